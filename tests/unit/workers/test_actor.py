"""The update: gradients that depend neither on micro-batches nor on the number of workers, and the optimizer step."""

import copy
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch

from gerl.algorithms import Batch, build_algorithm
from gerl.algorithms.core_algos import gaussian_kl
from gerl.config import ActorConfig, Config, SamplingConfig, algorithm_config
from gerl.engine import Tape, record, replay
from gerl.engine.batching import select_call
from gerl.model.ema import EMA
from gerl.model.loading import Policy
from gerl.model.lora import add_lora, lora_disabled
from gerl.protocol import Prompt, Sample, StepResult, UpdateStats
from gerl.utils.tensors import pack_tensors, unpack_tensors
from gerl.workers.actor import Actor

ADVANTAGES = [1.0, -0.5, 2.0, -1.5]


def new_policy(perturbed: bool = True) -> Policy:
    """Tiny SD3; the same weights every time."""
    pipe = tiny.build(tiny.CASES["sd3"])
    lora = {f"transformer.{key}": p for key, p in add_lora(pipe.transformer, 4, 4.0, None, seed=0).items()}
    if perturbed:
        torch.manual_seed(2)
        for p in lora.values():
            p.data.normal_(0, 0.2)
    return Policy(pipe, {"transformer": pipe.transformer}, lora, EMA(lora, 0.9))


def new_actor(
    policy: Policy | None = None, kl_coef: float = 0.0, total_updates: int = 10, clip: float = 0.2, **config: Any
) -> Actor:
    algorithm = algorithm_config(kl_coef=kl_coef, clip_low=clip, clip_high=clip)
    whole = Config(algorithm=algorithm, actor=ActorConfig(**config), sampling=SamplingConfig(num_inference_steps=4))
    return Actor(policy or new_policy(), whole.actor, build_algorithm(whole), total_updates)


def batch_of(tape: Tape, advantages: Sequence[float | None]) -> Batch:
    """The rows of `tape` with one advantage for all their steps; None: not trained on."""
    values = torch.tensor([math.nan if a is None else a for a in advantages])
    samples = [Sample(Prompt(0, "p"), i, i, 1) for i in range(tape.batch_size)]
    return Batch(tape, samples, tuple(tape.stochastic_steps), values[:, None].expand(-1, len(tape.steps)))


def roll_out(policy: Policy, samples: Sequence[int] = (0, 1, 2, 3)) -> Tape:
    """Some samples of one fixed rollout of four."""
    call = select_call(tiny.call_for(tiny.CASES["sd3"], True), samples)
    gens = tiny.generators()
    return record(policy.pipe, call, window=[1, 2], generators=[gens[i] for i in samples])[1]


def gradient(actor: Actor, batches: Sequence[Batch], num_pairs: int = 8) -> tuple[torch.Tensor, UpdateStats]:
    actor.optimizer.zero_grad(set_to_none=True)
    stats = actor.accumulate(batches, num_pairs)
    return actor.flat_gradient(), stats


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def shared() -> tuple[Policy, Tape]:
    """A policy and its rollout for tests that do not change them."""
    policy = new_policy()
    return policy, roll_out(policy)


# --- the gradient


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_the_micro_batch_size_does_not_change_the_gradient(shared: tuple[Policy, Tape], kl_coef: float) -> None:
    policy, tape = shared
    batch = [batch_of(tape, ADVANTAGES)]
    whole, whole_stats = gradient(new_actor(policy, kl_coef), batch)
    assert whole.norm() > 0 and whole_stats.ratio_deviation == 0.0
    for size in (1, 3, 4, 16):
        parts, stats = gradient(new_actor(policy, kl_coef, micro_batch_size=size), batch)
        assert relative(parts, whole) < 1e-5
        assert stats.pairs == whole_stats.pairs == 8
        for key in ("loss", "kl", "clip_low", "clip_high"):
            assert getattr(stats, key) == pytest.approx(getattr(whole_stats, key), rel=1e-4, abs=1e-5)
        assert stats.ratio_deviation <= 1e-5


def test_the_gradient_is_that_of_the_policy_gradient_written_by_hand(shared: tuple[Policy, Tape]) -> None:
    policy, tape = shared
    found, stats = gradient(new_actor(policy), [batch_of(tape, ADVANTAGES)])
    advantages = torch.tensor(ADVANTAGES)
    for p in policy.lora.values():
        p.grad = None
    # at ratio 1 the gradient of -A ratio is that of -A log_prob; the mean is over 4 samples and 2 steps
    replay(policy.pipe, tape, lambda k, step: -(advantages * step.log_prob).sum() / 8)
    by_hand = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in policy.lora.values()])
    assert relative(found, by_hand) < 1e-6
    assert stats.loss / stats.pairs == pytest.approx(-sum(ADVANTAGES) / 4, abs=1e-6)
    assert stats.log_ratio == stats.kl == stats.clip_low == stats.clip_high == 0.0


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_two_workers_sum_to_one(kl_coef: float) -> None:
    one, two = new_policy(), new_policy()
    first, second = [0, 1], [2, 3]
    whole, stats = gradient(new_actor(one, kl_coef), [batch_of(roll_out(one), ADVANTAGES)])
    parts = [
        gradient(new_actor(policy, kl_coef), [batch_of(roll_out(policy, half), [ADVANTAGES[i] for i in half])])
        for policy, half in ((one, first), (two, second))
    ]
    assert relative(parts[0][0] + parts[1][0], whole) < 1e-5
    assert relative(parts[0][0], whole) > 0.1
    summed = parts[0][1] + parts[1][1]
    assert summed.pairs == stats.pairs and summed.loss == pytest.approx(stats.loss, abs=1e-5)
    # both batches on one worker are the same as one on each
    tapes = [batch_of(roll_out(one, half), [ADVANTAGES[i] for i in half]) for half in (first, second)]
    assert relative(gradient(new_actor(one, kl_coef), tapes)[0], parts[0][0] + parts[1][0]) < 1e-6


def test_samples_without_advantage_contribute_nothing(shared: tuple[Policy, Tape]) -> None:
    policy, tape = shared
    actor = new_actor(policy)
    some, stats = gradient(actor, [batch_of(tape, [1.0, None, 2.0, None])], num_pairs=4)
    zeros, zero_stats = gradient(actor, [batch_of(tape, [1.0, 0.0, 2.0, 0.0])], num_pairs=4)
    assert relative(some, zeros) < 1e-5
    assert (stats.pairs, zero_stats.pairs) == (4, 4)  # neither is run
    nothing, stats = gradient(actor, [batch_of(tape, [None] * 4)])
    assert not nothing.any() and stats == UpdateStats()
    for size in (1, 2):
        split, _ = gradient(new_actor(policy, micro_batch_size=size), [batch_of(tape, [1.0, None, 2.0, None])], 4)
        assert relative(split, some) < 1e-5


def test_gradients_accumulate_until_the_step(shared: tuple[Policy, Tape]) -> None:
    policy, tape = shared
    actor = new_actor(policy)
    once, _ = gradient(actor, [batch_of(tape, ADVANTAGES)])
    actor.accumulate([batch_of(tape, ADVANTAGES)], 8)
    assert relative(actor.flat_gradient(), 2 * once) < 1e-6
    actor.optimizer.zero_grad(set_to_none=True)


def test_flat_gradient_and_back() -> None:
    actor = new_actor()
    assert not actor.flat_gradient().any()  # no gradient yet: zeros
    flat = torch.randn(sum(p.numel() for p in actor.parameters))
    kept = flat.clone()
    actor.set_flat_gradient(flat)
    assert torch.equal(actor.flat_gradient(), flat)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in actor.parameters)
    flat.zero_()
    assert torch.equal(actor.flat_gradient(), kept)


# --- clipping and the ratio


def moved(tape: Tape, log_ratio: float) -> Tape:
    """`tape` as if the weights had since moved by `log_ratio`."""
    other = copy.copy(tape)
    other.steps = [copy.copy(step) for step in tape.steps]
    for step in other.steps:
        step.log_prob = None if step.log_prob is None else step.log_prob - log_ratio
    return other


def test_beyond_the_clip_range_there_is_no_gradient(shared: tuple[Policy, Tape]) -> None:
    policy, tape = shared
    actor = new_actor(policy, clip=0.2)
    up, down = moved(tape, math.log(1.5)), moved(tape, math.log(0.5))
    high, stats = gradient(actor, [batch_of(up, [1.0, 1.0, -1.0, -1.0])])
    assert (stats.pairs, stats.clip_high, stats.clip_low) == (8, 4, 0)
    assert stats.ratio_deviation == pytest.approx(0.5, rel=1e-5)
    assert stats.log_ratio / stats.pairs == pytest.approx(math.log(1.5), rel=1e-5)
    assert stats.loss / stats.pairs == pytest.approx((-1.2 - 1.2 + 1.5 + 1.5) / 4, rel=1e-5)
    expected, _ = gradient(actor, [batch_of(tape, [0.0, 0.0, -1.5, -1.5])])
    assert relative(high, expected) < 1e-5
    _, stats = gradient(actor, [batch_of(down, [1.0, 1.0, 1.0, -1.0])])
    assert (stats.clip_high, stats.clip_low) == (0, 2)
    assert not gradient(actor, [batch_of(up, [1.0] * 4)])[0].any()
    assert not gradient(actor, [batch_of(down, [-1.0] * 4)])[0].any()


def test_a_ratio_that_is_not_one_is_reported() -> None:
    policy = new_policy()
    policy.pipe.transformer.register_forward_hook(
        lambda m, args, out: (out[0] + out[0][:1],)
    )  # samples mix, as OmniGen
    tape = roll_out(policy)
    assert gradient(new_actor(policy), [batch_of(tape, ADVANTAGES)])[1].ratio_deviation == 0.0
    assert gradient(new_actor(policy, micro_batch_size=2), [batch_of(tape, ADVANTAGES)])[1].ratio_deviation > 1e-3


# --- KL


def forwards(policy: Policy, actor: Actor, tape: Tape) -> int:
    """How often the transformer computes during an update."""
    calls: list[None] = []
    layer = policy.pipe.transformer.transformer_blocks[0].attn.to_q
    handle = layer.register_forward_hook(lambda *_: calls.append(None))
    actor.accumulate([batch_of(tape, ADVANTAGES)], 8)
    handle.remove()
    return len(calls)


def test_the_reference_is_run_only_for_a_kl(shared: tuple[Policy, Tape]) -> None:
    policy, tape = shared
    assert forwards(policy, new_actor(policy, kl_coef=0.0), tape) == 2
    assert forwards(policy, new_actor(policy, kl_coef=0.1), tape) == 4


def test_kl_of_a_fresh_lora_is_zero_with_its_gradient() -> None:
    policy = new_policy(perturbed=False)
    tape = roll_out(policy)
    without, _ = gradient(new_actor(policy), [batch_of(tape, ADVANTAGES)])
    with_kl, stats = gradient(new_actor(policy, kl_coef=10.0), [batch_of(tape, ADVANTAGES)])
    assert without.any() and torch.equal(with_kl, without) and stats.kl == 0.0
    assert not gradient(new_actor(policy, kl_coef=10.0), [batch_of(tape, [0.0] * 4)])[0].any()


def test_kl_of_a_trained_lora(shared: tuple[Policy, Tape]) -> None:
    policy, tape = shared
    weight = 0.3
    only_kl, stats = gradient(new_actor(policy, kl_coef=weight), [batch_of(tape, [0.0] * 4)])
    reference: dict[int, torch.Tensor] = {}
    values: list[torch.Tensor] = []

    def loss(k: int, step: Any) -> torch.Tensor:
        kl = gaussian_kl(step.mean, reference[k], step.std)
        values.append(kl.detach())
        return weight * kl.sum() / 8

    with lora_disabled([policy.pipe.transformer]):
        replay(policy.pipe, tape, lambda k, step: reference.update({k: step.mean}), grad=False)
    actor = new_actor(policy)
    actor.optimizer.zero_grad(set_to_none=True)
    replay(policy.pipe, tape, loss)
    assert relative(only_kl, actor.flat_gradient()) < 1e-6 and only_kl.any()
    assert stats.kl / stats.pairs == pytest.approx(float(torch.stack(values).mean()), rel=1e-5)
    assert stats.loss == pytest.approx(weight * stats.kl, rel=1e-5) and stats.kl > 0
    both, _ = gradient(new_actor(policy, kl_coef=weight), [batch_of(tape, ADVANTAGES)])
    policy_only, _ = gradient(new_actor(policy), [batch_of(tape, ADVANTAGES)])
    assert relative(both, policy_only + only_kl) < 1e-5


# --- the optimizer step


def weights(actor: Actor) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in actor.parameters])


def test_a_step_is_that_of_adamw() -> None:
    actor = new_actor(lr=0.01, weight_decay=0.1, max_grad_norm=1e9)
    before = weights(actor)
    flat = torch.randn(before.shape, generator=torch.Generator().manual_seed(0))
    actor.set_flat_gradient(flat)
    result = actor.step()
    assert result == StepResult(pytest.approx(float(flat.norm()), rel=1e-5), 0.01, True)  # type: ignore[arg-type]
    # the first step of Adam moves by lr sign(g), after decay by lr * weight_decay
    torch.testing.assert_close(weights(actor), before * (1 - 0.001) - 0.01 * flat.sign(), rtol=1e-4, atol=1e-4)
    assert actor.policy.version == 1 and actor.policy.ema.updates == 1
    assert all(p.grad is None for p in actor.parameters)
    average = torch.cat([actor.policy.ema.average[key].flatten() for key in actor.policy.lora])
    torch.testing.assert_close(average, 0.1 * before + 0.9 * weights(actor))


def test_the_gradient_norm_is_clipped_and_reported_unclipped() -> None:
    actor = new_actor(max_grad_norm=0.5)
    flat = torch.ones_like(weights(actor))
    norm = math.sqrt(flat.numel())
    actor.set_flat_gradient(flat)
    assert actor.step().grad_norm == pytest.approx(norm, rel=1e-5)
    momentum = torch.cat([actor.optimizer.state[p]["exp_avg"].flatten() for p in actor.parameters])
    torch.testing.assert_close(momentum, 0.1 * flat * 0.5 / norm, rtol=1e-4, atol=1e-9)
    small = new_actor(max_grad_norm=2 * norm)
    small.set_flat_gradient(flat)
    small.step()
    momentum = torch.cat([small.optimizer.state[p]["exp_avg"].flatten() for p in small.parameters])
    torch.testing.assert_close(momentum, 0.1 * flat)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_dropped(bad: float) -> None:
    actor = new_actor(lr=0.1, lr_schedule="linear", total_updates=4)
    flat = torch.ones_like(weights(actor))
    actor.set_flat_gradient(flat)
    assert actor.step().applied
    before = weights(actor)
    moments = {p: {k: v.clone() for k, v in state.items()} for p, state in actor.optimizer.state.items()}
    average = {key: value.clone() for key, value in actor.policy.ema.average.items()}
    flat[7] = bad
    actor.set_flat_gradient(flat)
    result = actor.step()
    assert not result.applied and not math.isfinite(result.grad_norm)
    assert torch.equal(weights(actor), before)
    assert all(torch.equal(v, moments[p][k]) for p, state in actor.optimizer.state.items() for k, v in state.items())
    assert all(torch.equal(value, average[key]) for key, value in actor.policy.ema.average.items())
    assert actor.policy.version == 1 and actor.policy.ema.updates == 1
    assert all(p.grad is None for p in actor.parameters)
    actor.set_flat_gradient(torch.ones_like(flat))
    after = actor.step()
    assert after.applied and after.lr == pytest.approx(0.05)  # the schedule counts the dropped update
    assert torch.isfinite(weights(actor)).all() and not torch.equal(weights(actor), before)


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1]),
        ("constant", 4, [0, 0.25, 0.5, 0.75, 1, 1]),
        ("linear", 0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("linear", 2, [0, 0.5, 1, 0.75, 0.5, 0.25]),
        ("cosine", 0, [0.5 * (1 + math.cos(math.pi * k / 6)) for k in range(6)]),
        ("cosine", 2, [0, 0.5, *(0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4))]),
    ],
)
def test_learning_rate_schedules(schedule: str, warmup: int, expected: list[float]) -> None:
    actor = new_actor(lr=0.02, lr_schedule=schedule, warmup_steps=warmup, total_updates=6)
    rates = []
    for _ in range(6):
        rates.append(actor.optimizer.param_groups[0]["lr"])
        actor.set_flat_gradient(torch.ones_like(weights(actor)))
        assert actor.step().lr == rates[-1]
    assert rates == pytest.approx([0.02 * factor for factor in expected])


# --- resuming


def updated(actor: Actor, updates: range) -> list[StepResult]:
    results = []
    for k in updates:
        noise = torch.randn(weights(actor).shape, generator=torch.Generator().manual_seed(k))
        actor.set_flat_gradient(noise)
        results.append(actor.step())
    return results


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_an_actor_continues_bitwise(schedule: str) -> None:
    settings: dict[str, Any] = {"lr": 0.01, "lr_schedule": schedule, "warmup_steps": 1, "total_updates": 6}
    actor = new_actor(**settings)
    updated(actor, range(3))
    tensors, numbers = actor.state()
    saved, text = pack_tensors(tensors), json.dumps(numbers)
    expected = updated(actor, range(3, 6))

    resumed = new_actor(new_policy(perturbed=False), **settings)
    resumed.load_state(unpack_tensors(saved), json.loads(text))
    assert resumed.policy.version == 3 and resumed.policy.ema.updates == 3
    assert updated(resumed, range(3, 6)) == expected
    assert torch.equal(weights(resumed), weights(actor))
    for key, value in actor.policy.ema.average.items():
        assert torch.equal(resumed.policy.ema.average[key], value)
    end, resumed_end = actor.state(), resumed.state()
    assert end[1] == resumed_end[1] and end[0].keys() == resumed_end[0].keys()
    assert all(torch.equal(value, resumed_end[0][key]) for key, value in end[0].items())
    fresh = new_actor(new_policy(perturbed=False), **settings)
    updated(fresh, range(3, 6))
    assert not torch.equal(weights(fresh), weights(actor))


def test_the_state_before_the_first_update() -> None:
    actor, other = new_actor(), new_actor(new_policy(perturbed=False))
    tensors, numbers = actor.state()
    other.load_state(unpack_tensors(pack_tensors(tensors)), json.loads(json.dumps(numbers)))
    assert torch.equal(weights(other), weights(actor)) and not other.optimizer.state
    updated(actor, range(2))
    updated(other, range(2))
    assert torch.equal(weights(other), weights(actor))

"""The update: gradients that depend neither on micro-batches nor on the number of workers, and the optimizer step."""

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from actors import flat, new_actor, stepped, weights
from replaying import counted_rows
from training import Training, chain_credit, config, new_policy, relative

from gerl.algorithms import Batch, KLWeight
from gerl.algorithms.core_algos import gaussian_kl
from gerl.config import ActorConfig
from gerl.config.registry import ALGORITHMS
from gerl.engine import ReplayedStep, Tape, record, replay
from gerl.engine.rows import select_call
from gerl.errors import CheckpointError, ConfigError, TrainingError
from gerl.model.lora import lora_disabled
from gerl.model.policy import EMA, Policy
from gerl.protocol import Prompt, Sample, StepResult, UpdateStats
from gerl.utils.tensors import pack_tensors, unpack_tensors
from gerl.workers import actor as actor_module
from gerl.workers.actor import Actor, check_optimizer

ADVANTAGES = [1.0, -0.5, 2.0, -1.5]
needs_package = pytest.mark.skipif(
    importlib.util.find_spec(actor_module.PACKAGE) is None, reason="needs the package bitsandbytes"
)


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


@pytest.fixture(scope="module")
def policy() -> Policy:
    """For tests that do not change it."""
    return new_policy()


@pytest.fixture(scope="module")
def tape(policy: Policy) -> Tape:
    """A rollout of it, for tests that do not change it."""
    return roll_out(policy)


# --- the gradient


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_the_micro_batch_size_does_not_change_the_gradient(policy: Policy, tape: Tape, kl_coef: float) -> None:
    batch = [batch_of(tape, ADVANTAGES)]
    whole, whole_stats = gradient(new_actor(policy, kl_coef), batch)
    assert whole.norm() > 0 and whole_stats.ratio_deviation == 0.0
    for size in (1, 3, 4, 16):
        parts, stats = gradient(new_actor(policy, kl_coef, micro_batch_size=size), batch)
        assert relative(parts, whole) < 1e-5
        assert stats.pairs == whole_stats.pairs == 8
        assert set(stats.sums) == set(whole_stats.sums) and ("kl" in stats.sums) == (kl_coef > 0)
        for key, value in whole_stats.sums.items():
            assert stats.sums[key] == pytest.approx(value, rel=1e-4, abs=1e-5)
        assert stats.ratio_deviation is not None and stats.ratio_deviation <= 1e-5


@pytest.mark.parametrize("size", [4, 3])
def test_each_step_has_its_part_of_the_gradient(policy: Policy, tape: Tape, size: int) -> None:
    batch, actor = batch_of(tape, ADVANTAGES), new_actor(policy, micro_batch_size=size)
    whole, unmeasured = gradient(actor, [batch])
    actor.optimizer.zero_grad(set_to_none=True)
    stats = actor.accumulate([batch], 8, by_step=True)
    assert torch.equal(actor.flat_gradient(), whole) and not unmeasured.step_squares, "it is only looked at"
    found = actor.step_gradients([batch], 8)
    assert relative(found[1] + found[2], whole) < 1e-5 and len(found) == 2
    assert all(p.grad is None for p in actor.parameters)
    first = batch_of(tape, [a if i < size else None for i, a in enumerate(ADVANTAGES)])  # micro-batch
    for k in (1, 2):
        alone, _ = gradient(actor, [replace(batch, trained=(k,))])
        assert found[k].norm() > 0 and relative(found[k], alone) < 1e-5
        measured, _ = gradient(actor, [replace(first, trained=(k,))])
        square, count = stats.step_squares[k]
        assert count == 1 and square == pytest.approx(float(measured.norm()) ** 2, rel=1e-4)
    assert (stats + stats).step_squares[1] == (2 * stats.step_squares[1][0], 2)


def test_the_gradient_is_that_of_the_policy_gradient_written_by_hand(policy: Policy, tape: Tape) -> None:
    actor, advantages = new_actor(policy), torch.tensor(ADVANTAGES)
    found, stats = gradient(actor, [batch_of(tape, ADVANTAGES)])
    actor.optimizer.zero_grad(set_to_none=True)
    # at ratio 1 the gradient of -A ratio is that of -A log_prob; the mean is over 4 samples and 2 steps
    replay(policy.pipe, tape, lambda k, step: -(advantages * step.log_prob).sum() / 8)
    assert relative(found, actor.flat_gradient()) < 1e-6
    assert stats.sums.pop("loss") / stats.pairs == pytest.approx(-sum(ADVANTAGES) / 4, abs=1e-6)
    names = "log_ratio_mean log_ratio_abs clip_fraction_low clip_fraction_high outside_fraction".split()
    assert stats.sums == dict.fromkeys(names, 0)


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
    assert summed.pairs == stats.pairs and summed.sums["loss"] == pytest.approx(stats.sums["loss"], abs=1e-5)
    # both batches on one worker are the same as one on each
    tapes = [batch_of(roll_out(one, half), [ADVANTAGES[i] for i in half]) for half in (first, second)]
    assert relative(gradient(new_actor(one, kl_coef), tapes)[0], parts[0][0] + parts[1][0]) < 1e-6


def test_samples_without_advantage_contribute_nothing(policy: Policy, tape: Tape) -> None:
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


def test_gradients_accumulate_until_the_step(policy: Policy, tape: Tape) -> None:
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
    steps = [replace(s, log_prob=None if s.log_prob is None else s.log_prob - log_ratio) for s in tape.steps]
    return replace(tape, steps=steps)


def test_beyond_the_clip_range_there_is_no_gradient(policy: Policy, tape: Tape) -> None:
    actor = new_actor(policy, clip=0.2)
    up, down = moved(tape, math.log(1.5)), moved(tape, math.log(0.5))
    high, stats = gradient(actor, [batch_of(up, [1.0, 1.0, -1.0, -1.0])])
    assert (stats.pairs, stats.sums["clip_fraction_high"], stats.sums["clip_fraction_low"]) == (8, 4, 0)
    assert stats.ratio_deviation == pytest.approx(0.5, rel=1e-5)
    assert stats.sums["log_ratio_mean"] / stats.pairs == pytest.approx(math.log(1.5), rel=1e-5)
    assert stats.sums["loss"] / stats.pairs == pytest.approx((-1.2 - 1.2 + 1.5 + 1.5) / 4, rel=1e-5)
    expected, _ = gradient(actor, [batch_of(tape, [0.0, 0.0, -1.5, -1.5])])
    assert relative(high, expected) < 1e-5
    _, stats = gradient(actor, [batch_of(down, [1.0, 1.0, 1.0, -1.0])])
    assert (stats.sums["clip_fraction_high"], stats.sums["clip_fraction_low"]) == (0, 2)
    assert not gradient(actor, [batch_of(up, [1.0] * 4)])[0].any()
    assert not gradient(actor, [batch_of(down, [-1.0] * 4)])[0].any()


def test_a_ratio_that_is_not_one_is_reported() -> None:
    policy = new_policy()
    policy.pipe.transformer.register_forward_hook(
        lambda m, args, out: (out[0] + out[0][:1],)
    )  # samples mix, as OmniGen
    tape = roll_out(policy)
    assert gradient(new_actor(policy), [batch_of(tape, ADVANTAGES)])[1].ratio_deviation == 0.0
    found = gradient(new_actor(policy, micro_batch_size=2), [batch_of(tape, ADVANTAGES)])[1].ratio_deviation
    assert found is not None and found > 1e-3


# --- KL


def test_the_reference_is_run_only_for_a_kl(policy: Policy, tape: Tape) -> None:
    for kl_coef, forwards in ((0.0, 2), (0.1, 4)):
        with counted_rows(policy.pipe) as rows:
            new_actor(policy, kl_coef).accumulate([batch_of(tape, ADVANTAGES)], 8)
        assert rows.total() == forwards * 2 * tape.batch_size


def test_kl_of_a_fresh_lora_is_zero_with_its_gradient() -> None:
    policy = new_policy(perturbed=False)
    tape = roll_out(policy)
    without, _ = gradient(new_actor(policy), [batch_of(tape, ADVANTAGES)])
    with_kl, stats = gradient(new_actor(policy, kl_coef=10.0), [batch_of(tape, ADVANTAGES)])
    assert without.any() and torch.equal(with_kl, without) and stats.sums["kl"] == 0.0
    assert not gradient(new_actor(policy, kl_coef=10.0), [batch_of(tape, [0.0] * 4)])[0].any()


def test_kl_of_a_trained_lora(policy: Policy, tape: Tape) -> None:
    weight = 0.3
    only_kl, stats = gradient(new_actor(policy, kl_coef=weight), [batch_of(tape, [0.0] * 4)])
    reference: dict[int, torch.Tensor] = {}
    values: list[torch.Tensor] = []

    def loss(k: int, step: ReplayedStep) -> torch.Tensor:
        kl = gaussian_kl(step.mean, reference[k], step.std)
        values.append(kl.detach())
        return weight * kl.sum() / 8

    with lora_disabled([policy.pipe.transformer]):
        replay(policy.pipe, tape, lambda k, step: reference.update({k: step.mean}), grad=False)
    actor = new_actor(policy)
    actor.optimizer.zero_grad(set_to_none=True)
    replay(policy.pipe, tape, loss)
    assert relative(only_kl, actor.flat_gradient()) < 1e-6 and only_kl.any()
    assert stats.sums["kl"] / stats.pairs == pytest.approx(float(torch.stack(values).mean()), rel=1e-5)
    assert stats.sums["loss"] == pytest.approx(weight * stats.sums["kl"], rel=1e-5) and stats.sums["kl"] > 0
    both, _ = gradient(new_actor(policy, kl_coef=weight), [batch_of(tape, ADVANTAGES)])
    policy_only, _ = gradient(new_actor(policy), [batch_of(tape, ADVANTAGES)])
    assert relative(both, policy_only + only_kl) < 1e-5


def test_the_kl_of_images_that_the_gate_leaves_out_does_not_count(policy: Policy, tape: Tape) -> None:
    nothing, gate = batch_of(tape, [0.0] * 4), torch.tensor([0.0, 1.0, 0.0, 1.0])
    actor = new_actor(policy, kl_coef=0.3)
    whole, stats = gradient(actor, [nothing])
    gated, gated_stats = gradient(actor, [replace(nothing, gate=gate)])
    others, _ = gradient(actor, [replace(nothing, gate=1 - gate)])
    alone = replace(nothing, credit=torch.where(gate[:, None] > 0, 0.0, math.nan).expand(-1, len(tape.steps)))
    assert relative(gated, gradient(actor, [alone])[0]) < 1e-6 and relative(gated + others, whole) < 1e-6
    assert gated_stats.sums["kl"] == stats.sums["kl"]  # what is reported is that of all


def test_the_weight_of_the_kl_may_be_another_one_than_that_of_the_configuration(policy: Policy, tape: Tape) -> None:
    actor, batch = new_actor(policy), batch_of(tape, ADVANTAGES)
    assert not actor.algorithm.needs_all_samples
    actor.algorithm.set_kl_weight(KLWeight(0.3))
    expected = gradient(new_actor(policy, kl_coef=0.3), [batch])[0]
    assert torch.equal(gradient(actor, [batch])[0], expected) and actor.algorithm.needs_all_samples
    actor.algorithm.set_kl_weight(None)
    assert torch.equal(gradient(actor, [batch])[0], gradient(new_actor(policy), [batch])[0])


def test_a_reference_that_is_reset_is_the_policy_of_that_moment() -> None:
    policy = new_policy()
    tape = roll_out(policy)
    actor = new_actor(policy, kl_coef=0.3, kl_reset_every=2)
    start = {name: p.detach().clone() for name, p in policy.trained.items()}
    kl = lambda: gradient(actor, [batch_of(tape, [0.0] * 4)])[1].sums["kl"]  # noqa: E731
    assert kl() == 0.0  # a warm start is the first reference
    stepped(actor, torch.randn(weights(actor).shape, generator=torch.Generator().manual_seed(1)))
    moved = kl()
    actor.finish_step(1)
    assert kl() == moved > 0.0
    actor.finish_step(2, resets=True)
    assert kl() == 0.0 and not all(torch.equal(start[name], p) for name, p in policy.trained.items())
    assert not any(t.requires_grad for t in policy.averages()["reference"].average.values())


# --- the optimizer step


def test_a_step_is_that_of_adamw() -> None:
    actor = new_actor(lr=0.01, weight_decay=0.1, max_grad_norm=1e9)
    before = weights(actor)
    noise = torch.randn(before.shape, generator=torch.Generator().manual_seed(0))
    expected = StepResult(pytest.approx(float(noise.norm()), rel=1e-5), 0.01, True)  # type: ignore[arg-type]
    result = stepped(actor, noise)
    rms = pytest.approx(float(noise.square().mean().sqrt()), rel=1e-5)
    assert result == replace(expected, lora_max=float(weights(actor).abs().max()), grad_rms=rms)
    # the first step of Adam moves by lr sign(g), after decay by lr * weight_decay
    torch.testing.assert_close(weights(actor), before * (1 - 0.001) - 0.01 * noise.sign(), rtol=1e-4, atol=1e-4)
    assert actor.policy.version == 1 and actor.policy.ema.updates == 1
    assert all(p.grad is None for p in actor.parameters)
    torch.testing.assert_close(flat(actor.policy.ema.average.values()), 0.1 * before + 0.9 * weights(actor))


def test_layers_without_a_gradient_are_named_after_the_first_update() -> None:
    """A LoRA on a layer that the pipeline does not call stays as it is, and nothing else would show it."""
    actor, said = new_actor(new_policy(perturbed=False)), list[str]()
    actor.say = said.append
    dead = next(name for name in actor.policy.trained if ".lora_B." in name)
    stepped(actor, torch.zeros_like(weights(actor)))  # no image had anything to learn: nothing can be told
    assert not said
    for name, p in actor.policy.trained.items():
        p.grad = torch.full_like(p, float(".lora_B." in name and name != dead))  # A has none while B is zero
    actor.step()
    assert len(said) == 1 and dead.split(".lora_B.")[0] in said[0] and "1 of the " in said[0]
    stepped(actor, torch.zeros_like(weights(actor)))
    assert len(said) == 1


def test_epsilon_holds_small_gradients_back() -> None:
    actor = new_actor(lr=0.01, weight_decay=0, max_grad_norm=1e9, eps=0.1)
    before = weights(actor)
    gradient = 0.1 * torch.ones_like(before)
    stepped(actor, gradient)
    # the first step of Adam: lr g / (|g| + eps)
    torch.testing.assert_close(weights(actor), before - 0.01 * 0.5, rtol=1e-4, atol=1e-6)


def test_the_gradient_norm_is_clipped_and_reported_unclipped() -> None:
    ones = torch.ones_like(weights(new_actor()))
    norm = math.sqrt(ones.numel())
    for limit, factor in ((0.5, 0.5 / norm), (2 * norm, 1.0)):
        actor = new_actor(max_grad_norm=limit)
        assert stepped(actor, ones).grad_norm == pytest.approx(norm, rel=1e-5)
        momentum = flat(actor.optimizer.state[p]["exp_avg"] for p in actor.parameters)
        torch.testing.assert_close(momentum, 0.1 * ones * factor, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_dropped(bad: float) -> None:
    actor = new_actor(lr=0.1, lr_schedule="linear", total_updates=4)
    ones = torch.ones_like(weights(actor))
    assert stepped(actor, ones).applied
    before, kept = weights(actor), {key: v.clone() for key, v in actor.state()[0].items()}
    wrong = ones.clone()
    wrong[7] = bad
    result = stepped(actor, wrong)
    assert not result.applied and not math.isfinite(result.grad_norm)
    assert all(torch.equal(v, kept[key]) for key, v in actor.state()[0].items())  # weights, moments and averages
    assert {key.split("/")[0] for key in kept} == {"lora", "ema", "optimizer"}
    assert actor.policy.version == 1 and actor.policy.ema.updates == 1
    assert all(p.grad is None for p in actor.parameters)
    after = stepped(actor, ones)
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
    for factor in expected:
        rate = actor.optimizer.param_groups[0]["lr"]
        assert rate == pytest.approx(0.02 * factor)
        assert stepped(actor, torch.ones_like(weights(actor))).lr == rate


@pytest.mark.parametrize(
    "name", sorted(ALGORITHMS.keys() - {"branch_grpo", "dense_grpo", "tempflow_grpo", "tree_grpo"})
)
def test_parts_that_another_rank_has_more_of_change_nothing(name: str) -> None:
    few: dict[str, Any] = (
        {"levels": [0.0, 0.99]} if name == "srpo" else {}
    )  # of four steps few are as high as published
    training = Training(config(name, n=4, micro=8, **few))
    credit = chain_credit([1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 1.0, -1.0])
    gradient, stats = training.gradient(credit)
    assert gradient.abs().max() > 0
    training.actor.ranks = SimpleNamespace(most=lambda count: count + 1)  # another rank has one part more
    again, same = training.gradient(credit)
    assert torch.equal(again, gradient) and same == stats
    training.actor.ranks = SimpleNamespace(most=lambda count: 1)  # a rank with nothing to learn goes along
    nothing, empty = training.gradient(torch.full_like(credit, torch.nan), pairs=1)
    assert not nothing.any() and empty.pairs == 0


# --- optimizers: AdamW with 8-bit moments learns as AdamW does, continues exactly, and is refused where it is not


def wide_policy() -> Policy:
    """A policy with a parameter that is large enough to have 8-bit moments, and a small one."""
    policy = new_policy()
    torch.manual_seed(0)
    lora = {"denoiser.a": torch.nn.Parameter(torch.randn(96, 96)), "denoiser.b": torch.nn.Parameter(torch.randn(8))}
    return Policy(policy.pipe, policy.denoisers, lora, EMA(lora, 0.9))


def updated(actor: Actor, updates: range) -> torch.Tensor:
    for k in updates:
        stepped(actor, 0.01 * torch.randn(weights(actor).shape, generator=torch.Generator().manual_seed(k)))
    return weights(actor)


@needs_package
def test_moments_in_8_bits_learn_alike_and_continue_exactly() -> None:
    actors = {name: new_actor(wide_policy(), optimizer=name, lr=0.01) for name in ("adamw", "adamw8bit")}
    start = weights(actors["adamw"])
    moved = {name: updated(actor, range(4)) - start for name, actor in actors.items()}
    assert relative(moved["adamw8bit"], moved["adamw"]) < 0.1

    actor = actors["adamw8bit"]
    tensors, numbers = actor.state()
    assert tensors["optimizer/state1/denoiser.a"].dtype == torch.uint8
    saved = pack_tensors(tensors)
    resumed = new_actor(wide_policy(), optimizer="adamw8bit", lr=0.01)
    resumed.load_state(unpack_tensors(saved), numbers)
    assert torch.equal(updated(resumed, range(4, 7)), updated(actor, range(4, 7)))
    assert resumed.state()[0].keys() == tensors.keys()
    with pytest.raises(CheckpointError, match="optimizer/"):
        new_actor(wide_policy()).load_state(unpack_tensors(saved), numbers)


@needs_package
@pytest.mark.parametrize("name", ["qmap1", "absmax2", "state1"])
def test_a_damaged_state_of_8_bits_is_refused(name: str) -> None:
    actor = new_actor(wide_policy(), optimizer="adamw8bit")
    updated(actor, range(2))
    tensors, numbers = actor.state()
    other = new_actor(wide_policy(), optimizer="adamw8bit")
    with pytest.raises(CheckpointError, match=name):
        other.load_state({k: v for k, v in tensors.items() if k != f"optimizer/{name}/denoiser.a"}, numbers)


def test_a_missing_package_and_one_that_does_not_work_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ActorConfig(optimizer="adamw8bit")
    check_optimizer(ActorConfig(), "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"actor\.optimizer=adamw8bit .*gerl\[bitsandbytes\].*actor\.optimizer=adamw"):
        check_optimizer(config, "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("no kernel\nsecond line")

    monkeypatch.setattr(actor_module, "build_optimizer", lambda _, parameters: Broken(parameters, lr=0.1))
    with pytest.raises(ConfigError, match=r"does not work on cpu \(no kernel\)"):
        check_optimizer(config, "cpu")


def test_the_root_mean_square_is_that_of_the_unclipped_gradient() -> None:
    actor = new_actor(max_grad_norm=1e-3)
    gradient = torch.randn(flat(actor.parameters).shape)
    result = stepped(actor, gradient)
    assert result.grad_rms == pytest.approx(float(gradient.square().mean().sqrt()), rel=1e-5)


def test_denoisers_are_trained_in_turn() -> None:
    names = ("transformer.a", "transformer_2.a", "transformer.b")
    weights = {name: torch.nn.Parameter(torch.ones(3)) for name in names}
    policy = Policy(new_policy().pipe, {}, weights, EMA(weights, 0.9))
    settings, algorithm = ActorConfig(alternate=2, lr=0.1), ALGORITHMS["flow_grpo"](config("flow_grpo"))
    with pytest.raises(ConfigError, match="only denoiser is trained"):
        Actor(new_policy(), settings, algorithm, 10)
    actor = Actor(policy, settings, algorithm, 10)
    for finished in range(6):
        before = {name: p.detach().clone() for name, p in weights.items()}
        for p in weights.values():
            p.grad = torch.ones(3)
        actor.step(finished)
        changed = {name for name, p in weights.items() if not torch.equal(before[name], p)}
        assert changed == ({"transformer.a", "transformer.b"} if finished // 2 % 2 == 0 else {"transformer_2.a"})


def test_a_lora_of_zeros_has_no_gradient_and_stops_the_run() -> None:
    policy = new_policy()
    for p in policy.trained.values():
        p.data.zero_()
    actor = new_actor(policy)
    with pytest.raises(TrainingError, match=r"0 everywhere.*model\.lora"):
        stepped(actor, torch.zeros_like(actor.flat_gradient()))

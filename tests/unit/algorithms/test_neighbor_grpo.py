"""Neighbor GRPO: advantages, the surrogate policy, and the gradient against one written out by hand."""

import math
from typing import Any

import pytest
import torch
from training import Training, chain_credit, config, relative, rewards, samples_of

from gerl.algorithms import build_algorithm
from gerl.algorithms.contrib.neighbor_grpo import NeighborGRPO, log_policy, quasi_normed
from gerl.algorithms.core_algos import group_advantages
from gerl.engine import replay
from gerl.engine.record import Recorder
from gerl.errors import ConfigError, ModelError
from gerl.model.lora import lora_disabled

ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.25, -0.25]  # two groups of four, centred


def neighbor_config(**keys: Any) -> Any:
    return config("neighbor_grpo", **keys)


@pytest.fixture(scope="module")
def everybody() -> Training:
    """All images of a group are anchors."""
    return Training(neighbor_config(anchors=4))


# --- advantages


def test_with_p_2_the_norm_is_the_standard_deviation() -> None:
    values, groups = torch.rand(12, dtype=torch.double), torch.arange(12) // 4
    expected = group_advantages(values, groups, eps=0.0)
    for std in ("group", "none"):  # of any factor nothing is left
        centred = group_advantages(values, groups, std)  # type: ignore[arg-type]
        torch.testing.assert_close(quasi_normed(centred, groups, 2.0), expected)


@pytest.mark.parametrize("p", [0.3, 0.8, 1.0, 2.0])
def test_advantages_are_divided_by_their_quasi_norm(p: float) -> None:
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    values = torch.tensor([1.0, 1.0, -1.0, -1.0, 3.0, -1.0, -1.0, -1.0])
    found = quasi_normed(values, groups, p)
    for members in (range(4), range(4, 8)):
        norm = sum(abs(float(values[i])) ** p for i in members) ** (1 / p)
        assert found[list(members)].tolist() == pytest.approx([2 * float(values[i]) / norm for i in members])
    assert (found[4:].norm() > found[:4].norm()) == (p < 2) or p == 2
    torch.testing.assert_close(quasi_normed(1e30 * values, groups, p), found)
    assert not quasi_normed(torch.zeros(4), torch.zeros(4), p).any()


def test_credit_is_that_of_the_reward_for_all_steps() -> None:
    a = build_algorithm(neighbor_config(quasi_norm=1.0, advantage_clip=1.0))
    samples = samples_of([0, 0, 0, 0, 1, 1, 1, 1])
    credit = a.credit(rewards(samples, [1.0, 0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 5.0]))
    assert credit.shape == (8, 4)
    # centred .75, -.25 ...: |A|_1 = 1.5 and sqrt(4) = 2, and a group of equal rewards has none
    torch.testing.assert_close(credit[:, 2], torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3, 0, 0, 0, 0]))


# --- the surrogate policy


def test_a_leap_is_the_likelier_the_nearer() -> None:
    neighbours = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 4.0]])
    found = log_policy(torch.zeros(2), neighbours, 2.0).exp()
    weights = [1.0, math.exp(-2 / 2), math.exp(-8 / 2)]  # mean squared distances 0, 2 and 8
    assert found.tolist() == pytest.approx([w / sum(weights) for w in weights])


def test_on_policy_the_gradient_draws_towards_good_neighbours() -> None:
    torch.manual_seed(0)
    neighbours, advantages = torch.randn(5, 3, 2), torch.randn(5)
    advantages = advantages - advantages.mean()
    for temperature in (0.1, 1.0, 10.0):
        x = neighbours[1].clone().requires_grad_()
        (advantages * log_policy(x, neighbours, temperature)).sum().backward()
        expected = 2 / temperature * torch.einsum("i,i...->...", advantages, neighbours - x.detach()) / x.numel()
        assert x.grad is not None
        torch.testing.assert_close(x.grad, expected, atol=1e-5, rtol=1e-4)


# --- initial noises


@pytest.mark.parametrize("spread", [0.3, 1.0])
def test_initial_noises_lie_around_one_noise(spread: float) -> None:
    def starts(**keys: Any) -> torch.Tensor:
        ((_, _, (tape,)),) = Training(config("diffusion_nft", sampling_kernel="ode", **keys)).tasks
        return tape.steps[0].x

    near = starts(sampling_same_init_noise=True, sampling_init_noise_spread=spread)
    common, own = starts(sampling_same_init_noise=True), starts()
    assert torch.equal(common[0], common[3]) and not torch.equal(common[0], common[4])
    torch.testing.assert_close(near, math.sqrt(1 - spread**2) * common + spread * own)


def test_noise_that_cannot_be_mixed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "_spread", lambda self, common, draw, *args, **kwargs: common)
    with pytest.raises(ModelError, match=r"sampling\.init_noise_spread"):
        Training(neighbor_config())


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"sampling_kernel": "flow_sde"}, r"sampling\.kernel=flow_sde: .*kernel=ode"),
        ({"sampling_solver": "dpm2"}, r"sampling\.solver=dpm2: .*solver=euler"),
        ({"sampling_init_noise_spread": 0.0}, r"init_noise_spread=0\.0: .*init_noise_spread=0\.3"),
        ({"sampling_same_init_noise": False}, r"init_noise_spread=0\.3: .*same_init_noise=true"),
        ({"micro": 3}, r"rollout\.micro_batch_size=3: neighbor_grpo needs the 4 images"),
    ],
)
def test_what_it_cannot_learn_from_is_refused(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        neighbor_config(**keys)


# --- the gradient


def by_hand(training: Training, scale: float) -> torch.Tensor:
    """Minus the gradient of sum_i A_i log pi(i) of every anchor at every step, by the formula for it on policy."""
    ((_, _, (tape,)),) = training.tasks
    advantages = torch.tensor(ADVANTAGES)
    training.actor.optimizer.zero_grad(set_to_none=True)

    def on_step(k: int, step: Any) -> torch.Tensor:
        total = torch.zeros(())
        for a in range(8):
            group = range(a // 4 * 4, a // 4 * 4 + 4)
            for i in group:
                towards = tape.steps[k].x_next[i] - tape.steps[k].x_next[a]
                total = total - 2 * advantages[i] * (towards * step.mean[a]).mean() / 4
        return total * scale

    replay(training.policy.pipe, tape, on_step, steps=range(3))
    return training.actor.flat_gradient()


def test_on_policy_the_gradient_is_that_of_the_distances(everybody: Training) -> None:
    ((task, _, _),) = everybody.tasks
    assert task.segments[0].window == () and task.segments[0].trained == (0, 1, 2)
    found, stats = everybody.gradient(chain_credit(ADVANTAGES))
    assert stats.pairs == 24 and stats.ratio_deviation is not None and stats.ratio_deviation < 1e-6
    assert relative(found, by_hand(everybody, 1 / 24)) < 1e-4 and found.any()
    cooler = build_algorithm(neighbor_config(anchors=4, temperature=0.25))
    assert relative(everybody.gradient(chain_credit(ADVANTAGES), algorithm=cooler)[0], 4 * found) < 1e-4


def test_micro_batches_change_nothing(everybody: Training) -> None:
    whole, stats = everybody.gradient(chain_credit(ADVANTAGES))
    for size in (1, 3):
        algorithm = build_algorithm(neighbor_config(anchors=4, actor_micro=size))
        part, part_stats = everybody.gradient(chain_credit(ADVANTAGES), algorithm=algorithm)
        assert relative(part, whole) < 1e-4 and part_stats.pairs == stats.pairs
        assert part_stats.sums["loss"] == pytest.approx(stats.sums["loss"], rel=1e-3, abs=1e-6)
    apart = Training(neighbor_config(anchors=4, micro=4))
    assert [len(task.samples) for task, _, _ in apart.tasks] == [4, 4]
    assert relative(apart.gradient(chain_credit(ADVANTAGES))[0], whole) < 1e-4


def test_anchors_are_some_of_each_group_and_stand_for_it(everybody: Training) -> None:
    ((task, _, tapes),) = everybody.tasks
    (batch,) = everybody.batches(task, tapes, chain_credit(ADVANTAGES))
    single = build_algorithm(neighbor_config(anchors=1))
    assert isinstance(single, NeighborGRPO)
    first, second = single.kept_rows(batch)
    assert first < 4 <= second and single.kept_rows(batch) == [first, second]
    found, stats = everybody.gradient(chain_credit(ADVANTAGES), algorithm=single)
    assert stats.pairs == 6
    parts = []
    for anchor in range(8):  # the mean over all choices of an anchor is the gradient of all of them
        single.kept_rows = lambda _, a=anchor: [a]  # type: ignore[method-assign,misc]
        parts.append(everybody.gradient(chain_credit(ADVANTAGES), pairs=24, algorithm=single)[0])
    assert relative(parts[first] + parts[second], found) < 1e-4
    assert relative(sum(parts) / 4, everybody.gradient(chain_credit(ADVANTAGES))[0]) < 1e-4  # type: ignore[arg-type]


def test_groups_without_credit_are_left_out(everybody: Training) -> None:
    ((task, _, tapes),) = everybody.tasks
    dull, dropped = chain_credit([0.0] * 4 + ADVANTAGES[4:]), chain_credit([math.nan] * 4 + ADVANTAGES[4:])
    for credit, with_kl in ((dull, list(range(8))), (dropped, [4, 5, 6, 7])):
        (batch,) = everybody.batches(task, tapes, credit)
        assert everybody.algorithm.kept_rows(batch) == [4, 5, 6, 7]
        assert build_algorithm(neighbor_config(anchors=4, kl_coef=0.1)).kept_rows(batch) == with_kl


def test_the_clip_range_holds_an_anchor_that_has_moved() -> None:
    training = Training(neighbor_config(anchors=4))
    wide = build_algorithm(neighbor_config(anchors=4, clip_low=0.99, clip_high=10.0))
    generator = torch.Generator().manual_seed(0)
    for p in training.policy.trained.values():
        p.data.add_(0.06 * torch.randn(p.shape, generator=generator))
    free, stats = training.gradient(chain_credit(ADVANTAGES), algorithm=wide)
    held, held_stats = training.gradient(chain_credit(ADVANTAGES))
    assert stats.ratio_deviation == held_stats.ratio_deviation and (stats.ratio_deviation or 0.0) > 1e-3
    assert stats.sums["clip_fraction_low"] == stats.sums["clip_fraction_high"] == 0
    assert held_stats.sums["clip_fraction_low"] > 0 and held_stats.sums["clip_fraction_high"] > 0
    assert relative(held, free) > 0.01


def test_the_distance_to_the_base_model_is_that_of_the_outputs(everybody: Training) -> None:
    policy, ((_, _, (tape,)),) = everybody.policy, everybody.tasks
    outputs: dict[int, torch.Tensor] = {}
    with lora_disabled(list(policy.denoisers.values())):
        replay(policy.pipe, tape, lambda k, s: outputs.update({k: s.model_output}), steps=range(3), grad=False)
    everybody.actor.optimizer.zero_grad(set_to_none=True)
    values: list[float] = []

    def on_step(k: int, step: Any) -> torch.Tensor:
        kl = ((step.model_output - outputs[k]) ** 2).flatten(1).mean(1)
        values.extend(kl.tolist())
        return 0.5 * kl.sum() / 24

    replay(policy.pipe, tape, on_step, steps=range(3))
    expected = everybody.actor.flat_gradient()
    algorithm = build_algorithm(neighbor_config(anchors=4, kl_coef=0.5))
    found, stats = everybody.gradient(0 * chain_credit(ADVANTAGES), algorithm=algorithm)
    assert relative(found, expected) < 1e-4 and stats.sums["kl"] == pytest.approx(sum(values), rel=1e-3)


def test_without_guidance_in_the_update_it_starts_on_policy() -> None:
    training = Training(neighbor_config(guidance=4.0, cfg="off"))
    gradient, stats = training.gradient(chain_credit(ADVANTAGES))
    assert gradient.any() and stats.ratio_deviation is None and set(stats.sums) == {"loss"}

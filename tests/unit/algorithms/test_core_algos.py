"""Advantages against naive twins, closed forms and golden numbers; the decay schedules of old policies."""

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, pstdev

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import rewards as rewards_of_training
from training import samples_of

from gerl.algorithms import build_algorithm
from gerl.algorithms.core_algos import (
    batch_advantages,
    best_of_group,
    decay_at,
    decoupled_advantages,
    group_advantages,
    group_ranks,
    preference_pairs,
    regression_weights,
    scaled_by_diversity,
    shaped_by_diversity,
    tree_advantages,
    zero_std_fraction,
)
from gerl.config import Config, RewardConfig, ScorerConfig, algorithm_config

REWARDS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, 0.0, 8.0]]).flatten()
GROUPS = torch.arange(3).repeat_interleave(4)

# --- by group


def naive_advantages(
    rewards: list[float], groups: list[int], std: str, leave_one_out: bool, eps: float = 1e-4
) -> list[float]:
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        centred = reward - fmean(others if leave_one_out else members)
        scale = {"group": pstdev(members) + eps, "batch": pstdev(rewards) + eps, "none": 1.0}[std]
        result.append(centred / scale if len(set(members)) > 1 else 0.0)
    return result


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Rewards of groups of 2 to 4, in any order, with equal rewards often enough."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=4))
    groups = draw(st.permutations([7 * g - 3 for g, size in enumerate(sizes) for _ in range(size)]))
    values = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-3, 3, width=16))
    return draw(st.lists(values, min_size=len(groups), max_size=len(groups))), groups


@given(batches(), st.sampled_from(["group", "batch", "none"]), st.booleans())
def test_group_advantages_equal_their_naive_twin(
    batch: tuple[list[float], list[int]], std: str, leave_one_out: bool
) -> None:
    rewards, groups = batch
    got = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), std, leave_one_out)
    assert got.tolist() == pytest.approx(naive_advantages(rewards, groups, std, leave_one_out), abs=1e-9)


def test_golden_advantages_with_group_std() -> None:  # T24
    got = group_advantages(REWARDS, GROUPS)
    expected = [-1.3415, -0.4472, 0.4472, 1.3415, 0, 0, 0, 0, -0.5773, -0.5773, -0.5773, 1.7320]
    assert got.tolist() == pytest.approx(expected, abs=1e-4)
    assert got.dtype == torch.float32 and got[4:8].tolist() == [0.0] * 4
    assert got.view(3, 4).sum(1).tolist() == pytest.approx([0, 0, 0], abs=1e-6)


def test_golden_advantages_with_batch_std_and_without() -> None:  # T24
    centred = torch.tensor([-1.5, -0.5, 0.5, 1.5, 0, 0, 0, 0, -2, -2, -2, 6])
    torch.testing.assert_close(group_advantages(REWARDS, GROUPS, "none"), centred)
    of_all = REWARDS.std(correction=0)
    torch.testing.assert_close(group_advantages(REWARDS, GROUPS, "batch", eps=0.0), centred / of_all)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("eps", [1e-4, 0.0])
def test_equal_rewards_give_exactly_zero(std: str, leave_one_out: bool, eps: float) -> None:  # T24
    # the fp32 mean of equal rewards is not always that reward: 0.1 and 0.7 are such values
    rewards = torch.tensor([0.1] * 11 + [0.7] * 7 + [0.0, 1.0])
    groups = torch.tensor([0] * 11 + [1] * 7 + [2, 2])
    got = group_advantages(rewards, groups, std, leave_one_out, eps)
    assert got[:18].tolist() == [0.0] * 18
    assert (got[18:] != 0).all()


def test_the_same_groups_on_several_workers_give_the_same_advantages() -> None:  # T25
    whole = group_advantages(REWARDS, GROUPS)
    by_worker = [group_advantages(r, g) for r, g in zip(REWARDS.view(3, 4), GROUPS.view(3, 4), strict=True)]
    assert torch.equal(torch.cat(by_worker), whole)
    interleaved = torch.arange(12).view(3, 4).T.flatten()  # every worker holds one sample of each group
    assert torch.equal(group_advantages(REWARDS[interleaved], GROUPS[interleaved]), whole[interleaved])


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (group_advantages, ([1.0, 2.0], [0]), r"\[B\], got \[2\] and \[1\]"),
        (group_advantages, ([[1.0, 2.0]], [[0, 0]]), r"\[B\], got \[1, 2\]"),
        (group_advantages, ([1.0, math.nan], [0, 0]), "finite: drop failed groups"),
        (group_advantages, ([1.0, math.inf], [0, 0]), "finite"),
        (group_advantages, ([1.0, 2.0, 3.0], [0, 0, 1], "group", True), "at least two samples"),
        (group_advantages, ([1.0, 2.0], [0, 0], "global"), "group, batch or none, got 'global'"),
        (decoupled_advantages, ([1.0, 2.0], [1.0], [0, 0]), r"\[B, R\] and weights \[R\], got \[2\] and \[1\]"),
        (decoupled_advantages, ([[1.0, 2.0]], [1.0], [0]), r"got \[1, 2\] and \[1\]"),
        (decoupled_advantages, ([[1.0], [2.0]], [1.0], [0]), r"\[B\], got \[2\] and \[1\]"),
        (decoupled_advantages, ([[1.0], [math.nan]], [1.0], [0, 0]), "finite"),
        (decoupled_advantages, ([[1.0], [2.0]], [1.0], [0, 0], "global"), "group, batch or none"),
        (tree_advantages, ([0.0, 0.0], [0, 0], [0, 0]), r"nodes \[B, D\], got \[2\] and \[2\]"),
        (tree_advantages, ([0.0, 0.0], [[0], [0], [0]], [0, 0]), r"got \[2\] and \[3, 1\]"),
        (tree_advantages, ([0.0, math.nan], [[0], [0]], [0, 0]), "finite"),
        (regression_weights, ([0.0, 0.0], [0, 0], 0.0), "temperature must be above 0, got"),
        (regression_weights, ([0.0, 0.0], [0, 0], -1.0), "temperature must be above 0, got"),
    ],
)
def test_wrong_rewards_are_refused(function: Callable[..., torch.Tensor], arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(*(torch.tensor(value) if isinstance(value, list) else value for value in arguments))


def test_a_group_of_one_has_no_advantage() -> None:
    assert group_advantages(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 0, 1]))[2] == 0


def test_zero_std_fraction() -> None:
    assert zero_std_fraction(REWARDS, GROUPS) == pytest.approx(1 / 3)
    assert zero_std_fraction(torch.full((12,), 0.1), GROUPS) == 1.0
    assert zero_std_fraction(torch.arange(12.0), GROUPS) == 0.0
    assert zero_std_fraction(torch.tensor([1.0, 2.0, 1.0, 2.0]), torch.tensor([5, 9, 5, 9])) == 1.0
    assert zero_std_fraction(torch.empty(0), torch.empty(0, dtype=torch.long)) == 0.0


# --- by batch


@pytest.mark.parametrize("eps", [1e-4, 0.0])
def test_batch_advantages_are_those_of_one_group(eps: float) -> None:
    for rewards in (REWARDS, torch.full((11,), 0.1), torch.tensor([1, 2, 3, 4]), torch.tensor([2.0])):
        one = torch.zeros(len(rewards), dtype=torch.long)
        assert torch.equal(batch_advantages(rewards, eps), group_advantages(rewards, one, eps=eps))


# --- by scorer


@st.composite
def scored(draw: st.DrawFn) -> tuple[list[list[float]], list[float], list[int]]:
    """Columns of rewards, weights of the scorers, groups."""
    first, groups = draw(batches())
    values = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-3, 3, width=16))
    others = draw(st.lists(st.lists(values, min_size=len(first), max_size=len(first)), max_size=2))
    weights = draw(st.lists(st.floats(-2, 2, width=16), min_size=1 + len(others), max_size=1 + len(others)))
    return [first, *others], weights, groups


@given(scored(), st.sampled_from(["group", "batch", "none"]))
def test_decoupled_advantages_equal_their_naive_twin(
    batch: tuple[list[list[float]], list[float], list[int]], std: str
) -> None:
    columns, weights, groups = batch
    normalised = [naive_advantages(column, groups, std, False) for column in columns]
    total = [math.fsum(w * a for w, a in zip(weights, row, strict=True)) for row in zip(*normalised, strict=True)]
    rewards = torch.tensor(columns, dtype=torch.float64).T
    got = decoupled_advantages(rewards, torch.tensor(weights), torch.tensor(groups), std)
    assert got.tolist() == pytest.approx([t / (pstdev(total) + 1e-4) for t in total], abs=1e-7)
    assert got.mean().item() == pytest.approx(0, abs=1e-7)


def test_decoupled_advantages_tell_apart_what_the_advantage_of_a_sum_does_not() -> None:
    both, one, none = [1.0, 1.0], [1.0, 0.0], [0.0, 0.0]
    rewards, groups, weights = torch.tensor([both, none, one, none]), torch.tensor([0, 0, 1, 1]), torch.ones(2)
    collapsed = group_advantages(rewards.sum(1), groups, eps=0.0)
    torch.testing.assert_close(collapsed, torch.tensor([1.0, -1.0, 1.0, -1.0]))
    got = decoupled_advantages(rewards, weights, groups, eps=0.0)
    torch.testing.assert_close(got, torch.tensor([2.0, -2.0, 1.0, -1.0]) / math.sqrt(2.5))


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("eps", [1e-4, 0.0])
def test_groups_without_signal_in_any_column_get_exactly_zero(std: str, eps: float) -> None:
    flat = torch.tensor([[0.1, 0.7]]).expand(11, 2)
    weights, groups = torch.tensor([0.3, 0.7]), torch.tensor([0] * 11 + [1, 1])
    got = decoupled_advantages(torch.cat([flat, torch.eye(2) * 2]), weights, groups, std, eps=eps)
    assert got[:11].tolist() == [0.0] * 11 and (got[11:] != 0).all()
    assert decoupled_advantages(flat, weights, groups[:11], std, eps=eps).tolist() == [0.0] * 11


# --- all of them


@pytest.mark.parametrize(
    "function",
    [
        group_advantages,
        lambda rewards, groups: group_advantages(rewards, groups, "batch", leave_one_out=True),
        lambda rewards, groups: group_advantages(rewards, groups, "none"),
        lambda rewards, groups: batch_advantages(rewards),
        lambda rewards, groups: decoupled_advantages(
            torch.stack([rewards, (5 * rewards).sin()], 1), torch.tensor([1.0, 0.5]), groups
        ),
        group_ranks,
        preference_pairs,
        best_of_group,
        lambda rewards, groups: regression_weights(rewards, groups, 0.5),
    ],
)
def test_shuffling_the_batch_shuffles_the_credit_and_writes_nothing(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:  # T25
    generator = torch.Generator().manual_seed(0)
    rewards, groups = torch.randn(12, generator=generator), torch.tensor([7, -3, 4, 7] * 3)  # no ties
    before, ids, order = rewards.clone(), groups.clone(), torch.randperm(12, generator=generator)
    torch.testing.assert_close(function(rewards[order], groups[order]), function(rewards, groups)[order])
    assert torch.equal(rewards, before) and torch.equal(groups, ids)


# --- old policies


@pytest.mark.parametrize(
    ("schedule", "decays"),
    [
        ((0, 0, 0, 0), {0: 0.0, 500: 0.0}),
        ((0, 0, 0.001, 0.5), {0: 0.0, 100: 0.1, 600: 0.5}),
        ((75, 0, 0.0075, 0.999), {74: 0.0, 75: 0.0, 76: 0.0075, 100: 0.1875, 300: 0.999}),
        ((0, 0.25, 0.005, 0.999), {0: 0.25, 50: 0.5, 200: 0.999}),
    ],
)
def test_decay_of_an_old_policy(schedule: tuple[float, ...], decays: dict[int, float]) -> None:  # T30
    assert {update: decay_at(schedule, update) for update in decays} == pytest.approx(decays, abs=1e-12)


@given(st.integers(0, 100), st.floats(0, 1), st.floats(0, 0.1), st.floats(0, 1), st.integers(0, 300))
def test_a_decay_rises_from_its_start_to_its_limit(
    hold: int, start: float, slope: float, limit: float, update: int
) -> None:
    limit = max(start, limit)
    schedule = (hold, start, slope, limit)
    assert start <= decay_at(schedule, update) <= decay_at(schedule, update + 1) <= limit
    assert decay_at(schedule, min(update, hold)) == start


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 3)), min_size=1, max_size=12))
def test_group_ranks_are_the_mean_of_pairwise_wins(pairs: list[tuple[int, int]]) -> None:
    rewards, ids = (torch.tensor(column) for column in zip(*pairs, strict=True))
    ranks = group_ranks(rewards.float(), ids)
    for i, (reward, group) in enumerate(pairs):
        others = [r for j, (r, g) in enumerate(pairs) if g == group and j != i]
        wins = [1.0 if reward > r else 0.5 if reward == r else 0.0 for r in others]
        assert float(ranks[i]) == pytest.approx(sum(wins) / len(wins) if wins else 0.5)
    assert torch.equal(group_ranks(rewards.float().exp(), ids), ranks)


SHAPING_GROUPS = torch.tensor([3, 3, 3, 3, 8, 8, 8, 8])
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5, 0.5, -0.5, -0.5])
DIVERSITY = torch.tensor([0.1, 0.3, 0.3, 0.1, 0.0, 0.0, 0.0, 0.0])


def test_scaling_raises_good_images_that_are_unlike_the_others_and_leaves_bad_ones() -> None:
    found = scaled_by_diversity(ADVANTAGES, DIVERSITY, SHAPING_GROUPS)
    assert found.tolist() == pytest.approx([0.5, -1.0, 3.0, -2.0, 0.5, 0.5, -0.5, -0.5])  # the second is all alike


def test_scaling_is_that_of_the_authors_code() -> None:
    """(reward - mean) * (1 where it is below 0, else distance / mean distance), prompt by prompt."""
    generator = np.random.default_rng(0)
    rewards, distances = generator.random((5, 6)), 0.1 + generator.random((5, 6))
    expected = []
    for own, far in zip(rewards, distances, strict=True):
        centred = own - own.mean()
        expected.append(centred * np.where(centred < 0, np.ones_like(far), far / far.mean()))
    ids = torch.arange(5).repeat_interleave(6)
    advantages = group_advantages(torch.tensor(rewards).flatten(), ids, std="none")
    found = scaled_by_diversity(advantages, torch.tensor(distances).flatten(), ids)
    np.testing.assert_allclose(found.numpy(), np.concatenate(expected), rtol=1e-12)


def test_a_potential_adds_the_advantage_of_the_diversity_itself() -> None:
    found = shaped_by_diversity(ADVANTAGES, DIVERSITY, SHAPING_GROUPS, 0.5)
    one = 0.1 / (0.1 + 1e-4)
    expected = [1 - one / 2, -1 + one / 2, 2 + one / 2, -2 - one / 2, 0.5, 0.5, -0.5, -0.5]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert found[:4].sum() == pytest.approx(0.0, abs=1e-6)  # nothing is given or taken on average


def test_the_differences_of_a_potential_along_a_trajectory_are_that_of_its_end() -> None:
    """What the key adds is the whole of potential-based shaping: its sum telescopes, whatever the steps between."""
    potentials = torch.rand(8, 5, generator=torch.Generator().manual_seed(2))
    potentials[:, 0] = 0.7  # noise, the same for all
    shaping = (potentials[:, 1:] - potentials[:, :-1]).sum(1)
    torch.testing.assert_close(
        group_advantages(shaping, SHAPING_GROUPS), group_advantages(potentials[:, -1], SHAPING_GROUPS)
    )


@pytest.mark.parametrize("kind", ["scale", "add"])
def test_algorithms_shape_their_credit_before_the_clip(kind: str) -> None:
    config = Config(
        algorithm=algorithm_config("flow_grpo", diversity=kind, diversity_coef=2.0, advantage_clip=1.2),
        reward=RewardConfig({"ocr": ScorerConfig(), "diversity": ScorerConfig(weight=0)}),
    )
    algorithm = build_algorithm(config)
    given = rewards_of_training(samples_of(SHAPING_GROUPS.tolist()), [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0])
    plain = algorithm.credit(given)
    shaped = algorithm.credit(replace(given, diversity=DIVERSITY))
    own = group_advantages(given.totals, SHAPING_GROUPS)
    function = scaled_by_diversity if kind == "scale" else lambda a, d, g: shaped_by_diversity(a, d, g, 2.0)
    torch.testing.assert_close(shaped[:, 0], function(own, DIVERSITY, SHAPING_GROUPS).clamp(-1.2, 1.2))
    assert not torch.equal(plain, shaped)

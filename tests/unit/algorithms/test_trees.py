"""Plans and credits of the tree algorithms."""

from collections import Counter
from typing import Any

import pytest
import torch
from training import config, rewards

from gerl.algorithms import build_algorithm, count_pairs
from gerl.algorithms.core_algos import group_advantages
from gerl.algorithms.planning import plan_samples
from gerl.errors import ConfigError
from gerl.protocol import Prompt, RolloutTask

PROMPTS = [Prompt(i, f"prompt {i}") for i in range(2)]


def tempflow(n: int = 4, micro: int = 12, factor: int = 6, steps: int = 10) -> Any:
    return build_algorithm(config("tempflow_grpo", n, steps=steps, micro=micro, branch_factor=factor))


def branch(splits: list[int], n: int = 1, micro: int = 16, steps: int = 20) -> Any:
    return build_algorithm(config("branch_grpo", n, steps=steps, micro=micro, split_steps=splits))


def plan(a: Any, prompts: list[Prompt]) -> list[RolloutTask]:
    return list(a.plan(plan_samples(a.config, prompts, 1, 0)))


def evaluations(task: RolloutTask, steps: int) -> int:
    """Denoiser evaluations of a task: a segment pays for the steps after the one it branches at, up to its stop."""
    total = 0
    for segment in task.segments:
        last = steps - 1 if segment.stop is None else segment.stop  # the denoiser of `stop` runs, its step is not taken
        first = 0 if segment.parent is None else segment.start + 1
        total += len(segment.seeds) * (last - first + 1)
    return total


# --- TempFlow-GRPO


def test_tempflow_costs_what_its_paper_says() -> None:  # 279 evaluations and 54 images for a seed of 6 branches
    (task,) = plan(tempflow(n=1), PROMPTS[:1])
    assert evaluations(task, 10) == 279 and len(task.samples) == 54
    four = plan(tempflow(n=4), PROMPTS[:1])
    assert sum(evaluations(t, 10) for t in four) == 1116 and sum(len(t.samples) for t in four) == 216


def test_tempflow_branches_once_at_every_step_that_can_be_noisy() -> None:
    tasks = plan(tempflow(n=3, factor=2, micro=4, steps=5), PROMPTS)
    assert [len(t.segments[0].seeds) for t in tasks] == [2, 2, 2]
    samples = [s for t in tasks for s in t.samples]
    assert Counter((s.prompt.id, s.branch) for s in samples) == {(p, k): 6 for p in (0, 1) for k in range(4)}
    assert len({s.seed for s in samples}) == len({(s.prompt.id, s.index) for s in samples}) == len(samples)
    for task in tasks:
        trunk, *branches = task.segments
        assert (trunk.window, trunk.trained, trunk.stop) == ((), (), 3)
        assert [b.window for b in branches] == [b.trained for b in branches] == [(k,) for k in range(4)]
        assert [leaf for b in branches for leaf in b.leaves] == list(range(len(task.samples)))
        assert all((b.parent, b.start, b.stop, b.rows) == (0, b.window[0], None, (0, 0, 1, 1)) for b in branches)
        for b in branches:
            assert b.seeds == tuple(task.samples[leaf].seed for leaf in b.leaves)
        prompts = [task.samples[leaf].prompt for leaf in trunk.leaves]
        assert prompts == [task.samples[b.leaves[2 * r]].prompt for r in range(2)]


def test_tempflow_credits_the_step_that_branched_and_compares_within_it() -> None:
    a = tempflow(n=1, factor=2, steps=4)
    (task,) = plan(a, PROMPTS[:1])
    credit = a.credit(rewards(task.samples, [0.0, 2.0, 5.0, 5.0, 3.0, 1.0]))
    expected = torch.full((6, 4), torch.nan)
    for row, (k, value) in enumerate([(0, -1.0), (0, 1.0), (1, 0.0), (1, 0.0), (2, 1.0), (2, -1.0)]):
        expected[row, k] = value
    torch.testing.assert_close(credit, expected, equal_nan=True, atol=1e-3, rtol=0)
    assert count_pairs([(task, credit)]) == 6


# --- BranchGRPO


def test_branch_evaluates_a_parent_once() -> None:  # 203 evaluations for 16 leaves, 320 for independent chains
    (task,) = plan(branch([0, 3, 6, 9]), PROMPTS[:1])
    assert len(task.samples) == 16
    assert evaluations(task, 20) == 203


@pytest.mark.parametrize("splits", [[0, 2], [1, 2], [3]])
def test_branch_trains_every_edge_of_the_tree_once(splits: list[int]) -> None:
    (task,) = plan(branch(splits, n=2, micro=64, steps=6), PROMPTS[:1])
    leaves = 2 * 2 ** len(splits)
    assert len(task.samples) == leaves
    assert len({s.seed for s in task.samples}) == len({s.index for s in task.samples}) == leaves
    segments = list(enumerate(task.segments))
    trained = {(i, row, k) for i, s in segments for row in range(len(s.seeds)) for k in s.trained}
    per_step = Counter(k for _, _, k in trained)
    assert per_step == {k: 2 * 2 ** sum(split <= k for split in splits) for k in range(5)}  # not the last step
    assert count_pairs([(task, torch.ones(leaves, 6))]) == len(trained)
    assert task.segments[-1].leaves == tuple(range(leaves)) and task.segments[-1].stop is None
    for d, segment in enumerate(task.segments[1:], start=1):
        parent = task.segments[d - 1]
        assert segment.parent == d - 1 and segment.start == parent.stop
        assert segment.rows == tuple(r for r in range(len(parent.seeds)) for _ in range(2))
        assert [segment.leaves[2 * r] for r in range(len(parent.seeds))] == list(parent.leaves)
        assert len(set(segment.seeds)) == len(segment.seeds)


def test_branch_credits_depths() -> None:  # T27: 16 leaves 0..15
    a = branch([0, 3, 6, 9])
    (task,) = plan(a, PROMPTS[:1])
    credit = a.credit(rewards(task.samples, [float(i) for i in range(16)]))
    assert credit.shape == (16, 20)
    for k in range(20):
        depth = 1 + sum(split <= k for split in (3, 6, 9))
        nodes = credit[:, k].unflatten(0, (2**depth, -1))
        assert torch.equal(nodes, nodes[:, :1].expand_as(nodes))  # all leaves of a node have its credit
        assert abs(float(nodes[:, 0].sum())) < 1e-5
    torch.testing.assert_close(credit[:, 0], torch.tensor([-1.0] * 8 + [1.0] * 8))  # 3.5 and 11.5
    late = branch([2], n=1, steps=5)
    (task,) = plan(late, PROMPTS[:1])
    assert not late.credit(rewards(task.samples, [0.0, 1.0]))[:, :2].any()  # the root has nobody to compare with


def test_the_noise_of_splits_is_planned() -> None:
    keys = {"split_noise": 4.0, "sampling_kernel": "dance_sde", "sampling_noise_level": 0.3}
    a = build_algorithm(config("branch_grpo", 1, steps=10, micro=16, split_steps=[0, 1, 3], **keys))
    (task,) = plan(a, PROMPTS[:1])
    assert [segment.noise for segment in task.segments] == [(), ((0, 1.2),), ((1, 1.2),), ((3, 1.2),)]
    assert all(noise == 0.7 for s in plan(branch([0, 2]), PROMPTS[:1])[0].segments for _, noise in s.noise)


def test_trees_of_a_prompt_compare_at_the_root_too() -> None:
    a = branch([1], n=2, steps=4)
    (task,) = plan(a, PROMPTS[:1])
    credit = a.credit(rewards(task.samples, [0.0, 2.0, 4.0, 6.0]))
    torch.testing.assert_close(credit[:, 0], torch.tensor([-1.0, -1.0, 1.0, 1.0]))


# --- TreeGRPO


def tree(n: int = 1, micro: int = 27, steps: int = 10, factor: int = 3, size: int = 3, **keys: Any) -> Any:
    settings = {"split_steps": None, "node_std": "leaves", "branch_factor": factor, **keys}
    window = {"sampling_window_size": size, "sampling_window_schedule": "geometric"}
    return build_algorithm(config("tree_grpo", n, steps=steps, micro=micro, **settings, **window))


def planned(a: Any, step: int) -> list[RolloutTask]:
    return list(a.plan(plan_samples(a.config, PROMPTS[:1], step, 0)))


def test_a_tree_is_noisy_in_a_window_that_moves_and_splits_at_each_of_its_steps() -> None:
    a, starts = tree(), set()
    for step in range(1, 20):
        (task,) = planned(a, step)
        trunk, *depths = task.segments
        start = trunk.stop
        assert start is not None and (trunk.window, trunk.trained, trunk.start) == ((), (), 0)
        assert [(s.window, s.trained) for s in depths] == [((k,), (k,)) for k in range(start, start + 3)]
        assert [len(s.seeds) for s in depths] == [3, 9, 27] and len(task.samples) == 27
        assert depths[-1].stop is None and count_pairs([(task, torch.ones(27, 10))]) == 39
        # once to the window, of its steps the first once for all, then a row for each node and leaf
        assert evaluations(task, 10) == start + 1 + 3 + 9 + 27 * (10 - start - 3)
        starts.add(start)
    assert {0, 1, 2} <= starts


def test_a_node_has_the_mean_of_the_advantages_of_its_leaves() -> None:
    a = tree(n=2)
    tasks = planned(a, 3)
    samples = [s for task in tasks for s in task.samples]
    totals = torch.rand(54, generator=torch.Generator().manual_seed(0))
    credit = a.credit(rewards(samples, totals.tolist()))
    leaves = group_advantages(totals, torch.zeros(54, dtype=torch.long), eps=0.0)
    (first, *_) = splits = a.splits(3)
    for depth, k in enumerate(splits, start=1):
        size = 3 ** (3 - depth)
        expected = leaves.unflatten(0, (-1, size)).mean(1).repeat_interleave(size)
        torch.testing.assert_close(credit[:, k], expected)
    assert first == tasks[0].segments[0].stop
    norms = [float(credit[:, k].norm()) for k in splits]
    assert norms == sorted(norms)  # the mean of many is nearer to the mean of all
    by_depth = tree(n=2, node_std="depth").credit(rewards(samples, totals.tolist()))
    for k in splits:  # BranchGRPO's differs by a factor
        factor = by_depth[:, k].std(correction=0) / credit[:, k].std(correction=0)
        torch.testing.assert_close(by_depth[:, k], factor * credit[:, k])


@pytest.mark.parametrize(
    "keys", [{"sampling_window_size": None}, {"sampling_window_size": 2, "sampling_window_per": "group"}]
)
def test_trees_of_a_window_need_one_for_all(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.split_steps=null: .*window_size and window_per=step"):
        config("tree_grpo", 1, split_steps=None, **keys)

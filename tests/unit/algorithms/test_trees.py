"""Plans and credits of the tree algorithms."""

import statistics
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from training import PROMPTS as DENSE_GRPO_PROMPTS
from training import Training, config, relative, rewards

from gerl.algorithms import Rewards, build_algorithm, count_pairs
from gerl.algorithms.core_algos import group_advantages
from gerl.algorithms.planning import plan_samples, sde_window
from gerl.algorithms.trees import DenseGRPO
from gerl.config import RewardConfig, ScorerConfig
from gerl.errors import ConfigError
from gerl.protocol import Prompt, RolloutTask, Sample, ScorerFailure
from gerl.trainer.step import usable_groups

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


WINDOWED = {"sampling_window_size": 2, "sampling_window_per": "group"}
N, STEPS = 3, 6


def dense(n: int = N, steps: int = STEPS, **keys: Any) -> DenseGRPO:
    algorithm = build_algorithm(config("dense_grpo", n, steps=steps, **keys))
    assert isinstance(algorithm, DenseGRPO)
    return algorithm


def planned_of_dense_grpo(algorithm: DenseGRPO) -> tuple[list[RolloutTask], list[Sample]]:
    tasks = algorithm.plan(plan_samples(algorithm.config, DENSE_GRPO_PROMPTS, 1, 0))
    return tasks, [sample for task in tasks for sample in task.samples]


def random_rewards(count: int) -> list[float]:
    return torch.rand(count, generator=torch.Generator().manual_seed(0)).tolist()


def naive_credit(
    algorithm: DenseGRPO, tasks: list[RolloutTask], totals: list[float]
) -> dict[tuple[int, int, int], float]:
    """(prompt, seed of the trajectory, step) -> its gain, normalised over the trajectories of the prompt."""
    values: dict[tuple[int, int, int], float] = {}  # of the latents before a step
    given = iter(totals)
    for task in tasks:
        trunk, *branches = task.segments
        for branch, position in zip(branches, (*trunk.window, trunk.window[-1] + 1), strict=True):
            for row, leaf in enumerate(branch.leaves):
                values[task.samples[leaf].prompt.id, trunk.seeds[row], position] = next(given)
    gains = {(p, s, k): values[p, s, k + 1] - v for (p, s, k), v in values.items() if (p, s, k + 1) in values}
    result = {}
    for (prompt, seed, k), gain in gains.items():
        group = [g for (p, _, step), g in gains.items() if (p, step) == (prompt, k)]
        scaled = (gain - statistics.fmean(group)) / (statistics.pstdev(group) + 1e-4)
        clip = algorithm.settings.advantage_clip
        result[prompt, seed, k] = max(-clip, min(clip, scaled))
    return result


# --- plan


def test_a_trajectory_costs_one_pass_and_a_rest_for_each_step() -> None:
    tasks, samples = planned_of_dense_grpo(dense(n=2, steps=10, micro=4))
    assert len(samples) == 4 * 10
    evaluations = 0
    for task in tasks:
        trunk, *branches = task.segments
        assert trunk.stop is not None
        evaluations += len(trunk.seeds) * (trunk.stop + 1)  # the denoiser of the stop is run, its step not taken
        evaluations += sum(len(branch.seeds) * (10 - branch.start - 1) for branch in branches)
    assert evaluations == 4 * (10 + 10 * 9 // 2)


@pytest.mark.parametrize("keys", [{}, WINDOWED, {"sampling_window_range": [1, 4]}])
def test_deterministic_branches_leave_before_every_stochastic_step_and_after_the_last(keys: dict[str, Any]) -> None:
    algorithm = dense(micro=4, **keys)
    tasks, samples = planned_of_dense_grpo(algorithm)
    count = algorithm.images_per_trajectory
    assert len({s.seed for s in samples}) == len({(s.prompt.id, s.index) for s in samples}) == len(samples)
    assert Counter(s.prompt.id for s in samples) == dict.fromkeys((0, 1), N * count)
    assert {s.index // count for s in samples} == set(range(N))
    for task in tasks:
        trunk, *branches = task.segments
        assert trunk.window == trunk.trained == sde_window(algorithm.config, 1, task.samples[0].group)
        assert trunk.leaves == tuple(range(len(trunk.seeds))) and trunk.stop == branches[-1].start
        assert [b.start for b in branches] == [*trunk.window, algorithm.config.sampling.steps_range[1]]
        assert [leaf for b in branches for leaf in b.leaves] == list(range(len(task.samples)))
        for j, b in enumerate(branches):
            assert (b.window, b.trained, b.parent, b.stop, b.rows) == ((), (), 0, None, trunk.leaves)
            assert [task.samples[leaf].index % count for leaf in b.leaves] == [j] * len(b.leaves)
            for row, leaf in enumerate(b.leaves):
                root, image = task.samples[row], task.samples[leaf]
                assert (image.prompt, image.index // count) == (root.prompt, root.index // count)


def test_images_of_shortened_rests_are_refused() -> None:
    keys = {"sampling_compression": 0.5, "sampling_solver": "dpm2", "sampling_window_size": 2}
    with pytest.raises(ConfigError, match=r"sampling\.compression=0\.5: dense_grpo .*use 1"):
        dense(**keys)


# --- credit


def test_the_credit_of_a_step_is_what_it_gained() -> None:
    algorithm = dense(n=2, steps=3, advantage_std="none")
    tasks, samples = planned_of_dense_grpo(algorithm)
    # trajectory -> rewards from its latents before step 0, 1 and 2, of which the last is its own image
    made = {(0, 0): [0.25, 0.5, 1.0], (0, 1): [0.75, 0.5, 0.5], (1, 0): [0.0, 0.0, 0.0], (1, 1): [1.0, 1.0, 0.5]}
    found = algorithm.credit(rewards(samples, [made[s.prompt.id, s.index // 3][s.index % 3] for s in samples]))
    expected = {(0, 0): [0.25, 0.25], (0, 1): [-0.25, -0.25], (1, 0): [0.0, 0.25], (1, 1): [0.0, -0.25]}
    for row, sample in zip(found.tolist(), samples, strict=True):  # gains .25 .5, -.25 0, 0 0 and 0 -.5, centred
        assert row[:2] == expected[sample.prompt.id, sample.index // 3] and np.isnan(row[2])
    assert count_pairs(zip(tasks, found.split([len(t.samples) for t in tasks]), strict=True)) == 2 * 2 * 2


@pytest.mark.parametrize("keys", [{}, WINDOWED, {"sampling_window_range": [1, 4], "advantage_clip": 0.5}])
def test_gains_are_normalised_over_the_images_of_a_prompt_at_each_step(keys: dict[str, Any]) -> None:
    algorithm = dense(micro=4, **keys)
    tasks, samples = planned_of_dense_grpo(algorithm)
    totals = random_rewards(len(samples))
    credit = algorithm.credit(rewards(samples, totals)).split([len(task.samples) for task in tasks])
    expected = naive_credit(algorithm, tasks, totals)
    found = {}
    for task, rows in zip(tasks, credit, strict=True):
        trunk, count = task.segments[0], algorithm.images_per_trajectory
        for leaf, row in enumerate(rows):
            seed = trunk.seeds[leaf % len(trunk.seeds)]
            known = {(task.samples[leaf].prompt.id, seed, k): float(v) for k, v in enumerate(row) if not v.isnan()}
            assert sorted(k for _, _, k in known) == list(trunk.window)
            assert all(found.setdefault(key, value) == value for key, value in known.items())  # all images of it agree
        assert len(rows) == count * len(trunk.seeds)
    assert found == {key: pytest.approx(value, rel=1e-4, abs=1e-4) for key, value in expected.items()}


def test_gains_of_a_trajectory_add_up_and_the_initial_noise_earns_nothing() -> None:
    algorithm = dense(advantage_std="none")
    _, samples = planned_of_dense_grpo(algorithm)
    totals, count = torch.tensor(random_rewards(len(samples))), algorithm.images_per_trajectory
    credit = algorithm.credit(rewards(samples, totals.tolist()))
    luck = torch.tensor([0.3 * (s.index // count) for s in samples])  # the same for all images of a trajectory
    torch.testing.assert_close(algorithm.credit(rewards(samples, (totals + luck).tolist())), credit, equal_nan=True)
    for prompt in (0, 1):
        rows = [[i for i, s in enumerate(samples) if (s.prompt.id, s.index // count) == (prompt, t)] for t in range(N)]
        whole = torch.stack([totals[max(r, key=lambda i: samples[i].index)] - totals[min(r)] for r in rows])
        torch.testing.assert_close(torch.stack([credit[r[0], :-1].sum() for r in rows]), whole - whole.mean())


def test_scorers_are_normalised_by_their_own_gains() -> None:
    algorithm = dense(adv_estimator="gdpo")
    _, samples = planned_of_dense_grpo(algorithm)
    columns = torch.rand(len(samples), 2, generator=torch.Generator().manual_seed(1))
    weights, one = torch.tensor([1.0, 0.0]), columns[:, 0]
    found = algorithm.credit(Rewards(samples, columns @ weights, columns, weights))
    torch.testing.assert_close(found, algorithm.credit(rewards(samples, one.tolist())), equal_nan=True)
    scaled = columns * torch.tensor([100.0, 1.0])
    both, drowned = (algorithm.credit(Rewards(samples, v.sum(1), v, torch.ones(2))) for v in (columns, scaled))
    torch.testing.assert_close(both, drowned, equal_nan=True, atol=5e-3, rtol=0)


def test_one_scorer_normalised_by_its_own_gains_points_where_the_total_does() -> None:
    algorithm, twin = dense(adv_estimator="gdpo"), dense()
    _, samples = planned_of_dense_grpo(algorithm)
    totals = random_rewards(len(samples))
    found, expected = (one.credit(rewards(samples, totals)).nan_to_num() for one in (algorithm, twin))
    assert torch.equal(found.sign(), expected.sign()) and found.count_nonzero() > len(samples)


def test_an_image_without_a_reward_takes_the_group_with_it() -> None:
    algorithm = dense()
    _, samples = planned_of_dense_grpo(algorithm)
    totals: list[float | None] = list(random_rewards(len(samples)))
    totals[4] = None
    settings = RewardConfig({"ocr": ScorerConfig()}, on_error="drop_group", max_failed=1.0)
    failures = [[ScorerFailure("ocr", "unread")] if total is None else [] for total in totals]
    keep, _ = usable_groups(samples, totals, failures, settings)
    kept = [(sample, total) for sample, total, usable in zip(samples, totals, keep, strict=True) if usable]
    assert {sample.prompt.id for sample, _ in kept} == {1 - samples[4].prompt.id}
    credit = algorithm.credit(rewards([s for s, _ in kept], [t for _, t in kept if t is not None]))
    assert credit.shape == (len(kept), STEPS) and not credit[:, :-1].isnan().any()


# --- images and gradient


@pytest.fixture(scope="module")
def dense_run() -> Training:
    return Training(config("dense_grpo"))


@pytest.fixture(scope="module")
def flow_run() -> Training:
    """Flow-GRPO from the same seeds."""
    return Training(config("flow_grpo"))


def test_the_last_image_is_that_of_the_trajectory_and_the_first_that_without_noise(
    dense_run: Training, flow_run: Training
) -> None:
    plain = Training(config("diffusion_nft", sampling_kernel="ode"))
    ((task, pixels, (trunk, *_)),) = dense_run.tasks
    ((_, noisy, (tape,)),), ((_, smooth, _),) = flow_run.tasks, plain.tasks
    count = len(task.segments[0].seeds)
    assert np.array_equal(pixels[-count:], noisy) and np.array_equal(pixels[:count], smooth)
    assert all(torch.equal(a.x_next, b.x_next) for a, b in zip(trunk.steps, tape.steps[:-1], strict=True))
    _, (whole, *branches), _ = dense_run.rollout.sample(task)
    assert whole.stochastic_steps == [0, 1, 2]
    for segment, branch in zip(task.segments[1:], branches, strict=True):
        assert branch.stochastic_steps == [k for k in range(3) if k < segment.start] and len(branch.steps) == 4
        if segment.start < len(whole.steps):
            assert torch.equal(branch.steps[segment.start].x, whole.steps[segment.start].x)


def test_the_gradient_is_that_of_flow_grpo_for_the_same_credit(dense_run: Training, flow_run: Training) -> None:
    ((task, _, _),) = dense_run.tasks
    credit = dense_run.algorithm.credit(rewards(task.samples, random_rewards(len(task.samples))))
    found, stats = dense_run.gradient(credit)
    expected, flow_stats = flow_run.gradient(credit[: len(task.segments[0].seeds)])
    assert stats.ratio_deviation == 0 and stats.pairs == flow_stats.pairs == 8 * 3
    assert expected.any() and relative(found, expected) < 1e-6


def test_micro_batches_change_nothing(dense_run: Training) -> None:
    ((task, _, _),) = dense_run.tasks
    credit = dense_run.algorithm.credit(rewards(task.samples, random_rewards(len(task.samples))))
    whole, stats = dense_run.gradient(credit)
    for size in (1, 3):
        algorithm = build_algorithm(config("dense_grpo", actor_micro=size))
        part, part_stats = dense_run.gradient(credit, algorithm=algorithm)
        assert relative(part, whole) < 1e-4
        assert part_stats.pairs == stats.pairs and (part_stats.ratio_deviation or 0.0) <= 1e-5
    drawn_apart = Training(config("dense_grpo", micro=3))
    parts = [task.samples for task, _, _ in drawn_apart.tasks]
    where = {(s.prompt.id, s.index): i for i, s in enumerate(task.samples)}
    same = torch.cat([credit[[where[s.prompt.id, s.index] for s in samples]] for samples in parts])
    assert relative(drawn_apart.gradient(same)[0], whole) < 1e-4


def test_weights_relative_to_other_steps_have_them_in_any_window() -> None:
    training = Training(config("dense_grpo", n=2, timestep_weights="std", sampling_window_size=1))
    whole = Training(config("flow_grpo", n=2, timestep_weights="std"))
    ((task, _, (trunk, *_)),), ((_, _, (tape,)),) = training.tasks, whole.tasks
    assert isinstance(training.algorithm, DenseGRPO)
    (step,) = task.segments[0].trained
    (found,) = training.algorithm._weights(trunk, (step,))
    stds = [tape.steps[k].rule.std for k in range(3)]
    assert found == pytest.approx(stds[step] / statistics.fmean(stds))
    gradient, _ = training.gradient(torch.linspace(-1, 1, len(task.samples))[:, None].expand(-1, 4))
    assert gradient.any()

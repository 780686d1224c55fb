"""DenseGRPO: its plan, the credit of its steps, and its gradient, which is Flow-GRPO's for that credit."""

import statistics
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from training import PROMPTS, Training, config, relative, rewards

from gerl.algorithms import Rewards, build_algorithm, count_pairs
from gerl.algorithms.dense_grpo import DenseGRPO
from gerl.algorithms.planning import plan_samples, sde_window
from gerl.config import RewardConfig, ScorerConfig
from gerl.errors import ConfigError
from gerl.protocol import RolloutTask, Sample, ScorerFailure
from gerl.rewards.checks import usable_groups

WINDOWED = {"sampling_window_size": 2, "sampling_window_per": "group"}
N, STEPS = 3, 6


def dense(n: int = N, steps: int = STEPS, **keys: Any) -> DenseGRPO:
    algorithm = build_algorithm(config("dense_grpo", n, steps=steps, **keys))
    assert isinstance(algorithm, DenseGRPO)
    return algorithm


def planned(algorithm: DenseGRPO) -> tuple[list[RolloutTask], list[Sample]]:
    tasks = algorithm.plan(plan_samples(algorithm.config, PROMPTS, 1, 0))
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
    tasks, samples = planned(dense(n=2, steps=10, micro=4))
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
    tasks, samples = planned(algorithm)
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
    tasks, samples = planned(algorithm)
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
    tasks, samples = planned(algorithm)
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
    _, samples = planned(algorithm)
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
    _, samples = planned(algorithm)
    columns = torch.rand(len(samples), 2, generator=torch.Generator().manual_seed(1))
    weights, one = torch.tensor([1.0, 0.0]), columns[:, 0]
    found = algorithm.credit(Rewards(samples, columns @ weights, columns, weights))
    torch.testing.assert_close(found, algorithm.credit(rewards(samples, one.tolist())), equal_nan=True)
    scaled = columns * torch.tensor([100.0, 1.0])
    both, drowned = (algorithm.credit(Rewards(samples, v.sum(1), v, torch.ones(2))) for v in (columns, scaled))
    torch.testing.assert_close(both, drowned, equal_nan=True, atol=5e-3, rtol=0)


def test_one_scorer_normalised_by_its_own_gains_points_where_the_total_does() -> None:
    algorithm, twin = dense(adv_estimator="gdpo"), dense()
    _, samples = planned(algorithm)
    totals = random_rewards(len(samples))
    found, expected = (one.credit(rewards(samples, totals)).nan_to_num() for one in (algorithm, twin))
    assert torch.equal(found.sign(), expected.sign()) and found.count_nonzero() > len(samples)


def test_an_image_without_a_reward_takes_the_group_with_it() -> None:
    algorithm = dense()
    _, samples = planned(algorithm)
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
    _, (whole, *branches), _ = dense_run.rollout.draw(task)
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

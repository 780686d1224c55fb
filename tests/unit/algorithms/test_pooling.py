"""Groups that are split between micro-batches, tasks and workers have the gradient of whole ones."""

from typing import Any

import pytest
import torch
from training import PROMPTS, Training, chain_credit, config, relative

from gerl.algorithms import Algorithm, build_algorithm
from gerl.algorithms.planning import plan_samples, update_parts
from gerl.algorithms.pooling import group_sums, pooled_rows, pooled_sum
from gerl.config import Config
from gerl.protocol import Sample

NAMES = ("crd", "dgpo", "diffusion_dpo")
KEYS: dict[str, dict[str, Any]] = {
    "crd": {"kl_coef": 0.3, "kl_by_reward": True},
    "dgpo": {"kl_coef": 0.3, "beta": 8.0, "clip_low": 0.5, "clip_high": 0.5},
    "diffusion_dpo": {"beta": 20.0, "old_kl_coef": 0.2},
}
ADVANTAGES = {
    "crd": [1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.0, -0.1],
    "dgpo": [1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.0, -0.1],
    "diffusion_dpo": [1.0, 0.0, 0.0, -1.0, 0.0, -1.0, 1.0, 0.0],
}


def settings(name: str, **keys: Any) -> Config:
    return config(name, sampling_kernel="ode", **KEYS[name], **keys)


def moved(training: Training) -> Training:
    """With trained weights that are not those of the old policy."""
    training.policy.old_is_current = False
    generator = torch.Generator().manual_seed(5)
    for p in training.policy.trained.values():
        p.data.add_(0.02 * torch.randn(p.shape, generator=generator))
    return training


@pytest.fixture(scope="module")
def whole() -> dict[str, tuple[Training, torch.Tensor, Any]]:
    """By algorithm: a rollout in one micro-batch, its gradient and metrics."""
    found = {}
    for name in NAMES:
        training = moved(Training(settings(name)))
        assert not training.algorithm.pools
        found[name] = (training, *training.gradient(chain_credit(ADVANTAGES[name])))
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("actor_micro", [1, 2, 3])
def test_an_update_in_parts_of_groups_has_the_gradient_of_whole_ones(
    name: str, actor_micro: int, whole: dict[str, Any]
) -> None:
    training, expected, stats = whole[name]
    algorithm = build_algorithm(settings(name, actor_micro=actor_micro))
    sums = training.pooled(chain_credit(ADVANTAGES[name])).values()
    # there is something to be known of the others
    assert max(float(torch.as_tensor(total).abs().max()) / count for total, count in sums) > 1e-3
    assert algorithm.pools == (name != "diffusion_dpo" or actor_micro == 1)  # two rows are a pair
    found, found_stats = training.gradient(chain_credit(ADVANTAGES[name]), algorithm=algorithm)
    assert expected.norm() > 0 and relative(found, expected) < 3e-6
    assert found_stats.pairs == stats.pairs and set(found_stats.sums) == set(stats.sums)
    assert all(found_stats.sums[key] == pytest.approx(stats.sums[key], rel=1e-4, abs=1e-6) for key in stats.sums)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_a_rollout_in_parts_of_groups_has_the_gradient_of_whole_ones(
    name: str, micro: int, whole: dict[str, Any]
) -> None:
    training = moved(Training(settings(name, micro=micro)))
    assert training.algorithm.pools and len(training.tasks) > 2
    credit = chain_credit(ADVANTAGES[name])
    found, stats = training.gradient(credit)
    # the images themselves differ by the rounding of another batch
    assert relative(found, whole[name][1]) < 2e-5 and stats.pairs == whole[name][2].pairs
    # two workers with every other task: a group of each prompt is on both
    tasks = training.tasks
    sizes = [len(task.samples) for task, _, _ in tasks]
    halves = []
    for start in (0, 1):
        credit_parts = torch.cat(credit.split(sizes)[start::2])
        training.tasks = tasks[start::2]
        halves.append((training.tasks, credit_parts, training.pooled(credit_parts)))
    pooled = pooled_sum(half[2] for half in halves)
    total = torch.zeros_like(found)
    pairs = 8 * 3  # all, of which Diffusion-DPO trains half
    for training.tasks, credit_parts, _ in halves:
        total += training.gradient(credit_parts, pairs, pooled=pooled)[0]
    assert relative(total, found) < 1e-6


def test_the_two_means_of_crds_cross_entropy_are_those_of_whole_groups() -> None:
    keys = {"regression": "cross_entropy", "mix": 2.0}
    training, credit = moved(Training(config("crd", sampling_kernel="ode", **keys))), chain_credit(ADVANTAGES["crd"])
    expected, stats = training.gradient(credit)
    algorithm = build_algorithm(config("crd", sampling_kernel="ode", actor_micro=3, **keys))
    assert algorithm.pools and not training.algorithm.pools
    found, found_stats = training.gradient(credit, algorithm=algorithm)
    assert expected.norm() > 0 and relative(found, expected) < 5e-6
    assert found_stats.sums["loss"] == pytest.approx(stats.sums["loss"], rel=1e-4)


def test_the_first_pass_leaves_no_gradient_and_counts_the_rows_with_credit() -> None:
    training = moved(Training(settings("crd", actor_micro=1)))
    credit = chain_credit(ADVANTAGES["crd"]).clone()
    credit[2] = torch.nan
    training.actor.optimizer.zero_grad(set_to_none=True)
    pooled = training.pooled(credit)
    assert all(p.grad is None for p in training.policy.trained.values())
    samples = [s for task, _, _ in training.tasks for s in task.samples]
    assert {key: count for key, (_, count) in pooled.items()} == {
        (group, k): 3 if group == samples[0].group else 4 for group in {s.group for s in samples} for k in range(3)
    }


def test_noise_of_a_group_is_the_same_in_every_task() -> None:
    one, several = (Training(settings("dgpo", micro=micro)) for micro in (8, 3))
    x0 = torch.zeros(8, 4, 2, 2)
    (task, _, _), parts = one.tasks[0], [task for task, _, _ in several.tasks]
    whole = one.algorithm._noise(task.samples, 1, x0)  # type: ignore[attr-defined]
    apart = [several.algorithm._noise(t.samples, 1, x0[: len(t.samples)]) for t in parts]  # type: ignore[attr-defined]
    assert torch.equal(torch.cat(apart), whole)


def test_sums_over_groups_add_up() -> None:
    samples = [Sample(PROMPTS[i], k, k, 1) for i, k in ((0, 0), (1, 0), (0, 1))]
    one = pooled_rows(torch.tensor([0.5, 2.0]), samples[:2], 3)
    other = pooled_rows(torch.tensor([0.25]), samples[2:], 3)
    sums, counts = group_sums(pooled_sum([one, other, {}]), samples, 3, torch.zeros(()))
    assert sums.tolist() == [0.75, 2.0, 0.75] and counts.tolist() == [2, 1, 2]
    one = pooled_rows(torch.tensor([[0.5, 1.0], [2.0, 3.0]]), samples[:2], 3)
    other = pooled_rows(torch.tensor([[0.25, 4.0]]), samples[2:], 3)
    sums, counts = group_sums(pooled_sum([one, other, {}]), samples, 3, torch.zeros(()))
    assert sums.tolist() == [[0.75, 5.0], [2.0, 3.0], [0.75, 5.0]] and counts.tolist() == [2, 1, 2]


def algorithm(**keys: Any) -> Algorithm:
    return build_algorithm(settings("dgpo", **keys))


@pytest.mark.parametrize(
    ("micro", "updates", "expected"), [(3, 2, [4, 4]), (3, 3, [4, 4]), (4, 2, [4, 4]), (8, 2, [8])]
)
def test_no_group_is_split_between_optimizer_steps(micro: int, updates: int, expected: list[int]) -> None:
    planned = algorithm(micro=micro)
    tasks = planned.plan(plan_samples(planned.config, PROMPTS, 1, 0))
    parts = update_parts(tasks, updates, whole_groups=True)
    assert [sum(len(task.samples) for task in part) for part in parts] == expected
    groups = [{s.group for task in part for s in task.samples} for part in parts]
    assert all(not a & b for i, a in enumerate(groups) for b in groups[i + 1 :])


@pytest.mark.parametrize(("micro", "sizes"), [(1, [1] * 8), (2, [2] * 4), (3, [2] * 4), (5, [4, 4]), (8, [8])])
def test_groups_larger_than_a_micro_batch_are_divided_evenly(micro: int, sizes: list[int]) -> None:
    planned = algorithm(micro=micro)
    samples = plan_samples(planned.config, PROMPTS, 1, 0)
    tasks = planned.plan(samples)
    assert [len(task.samples) for task in tasks] == sizes
    assert [s for task in tasks for s in task.samples] == samples

"""What to draw and what credit rewards give: chains of denoising steps, whole groups, zero advantages."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import training
from hypothesis import given
from hypothesis import strategies as st
from training import PROMPTS as POOLING_PROMPTS
from training import Training, chain_credit, config, relative

from gerl.algorithms import ALGORITHMS, Algorithm, Batch, ForwardProcess, Rewards, build_algorithm, count_pairs
from gerl.algorithms.base import group_sums, pooled_rows, pooled_sum
from gerl.algorithms.forward_process import ForwardProcessConfig, Noised
from gerl.algorithms.planning import plan_samples, sde_window
from gerl.config import ActorConfig, Config, RolloutConfig
from gerl.config.algorithms import Needs
from gerl.engine import Tape
from gerl.errors import CheckpointError
from gerl.protocol import Prompt, Sample
from gerl.trainer.update import update_parts

PROMPTS = [Prompt(i, f"prompt {i}") for i in range(4)]


def algorithm(name: str = "flow_grpo", n: int = 3, micro: int = 6, **keys: Any) -> Algorithm:
    return build_algorithm(config(name, n, steps=6, micro=micro, **keys))


def rewards(a: Algorithm, totals: Sequence[float]) -> Rewards:
    return training.rewards(plan_samples(a.config, PROMPTS, 1, 0)[: len(totals)], totals)


def test_every_algorithm_has_its_own_settings() -> None:
    for name, cls in ALGORITHMS.items():
        a = algorithm(name, n=4, micro=12)
        assert type(a) is cls and type(a.settings) is cls.config_class and a.settings.name == name


@dataclass(frozen=True)
class NewConfig(ForwardProcessConfig):
    name: str = "new"

    @property
    def needs(self) -> Needs:
        return replace(super().needs, loss_over="group")


class New(ForwardProcess):
    settings: NewConfig

    def loss(self, s: Noised) -> tuple[torch.Tensor, dict[str, float]]:
        raise NotImplementedError


def test_a_new_algorithm_says_once_that_it_needs_whole_groups() -> None:
    # the configuration had a list of such algorithms besides: a new one drew groups of 24 at a micro-batch size of 8
    def new(micro: int, **actor: int) -> ForwardProcess:
        rollout = RolloutConfig(n=24, micro_batch_size=micro)
        c = Config(algorithm=NewConfig(), rollout=rollout, actor=ActorConfig(**actor))  # type: ignore[arg-type]
        return New(c)

    def sizes(a: ForwardProcess) -> list[int]:
        return [len(task.samples) for task in a.plan(plan_samples(a.config, PROMPTS, 1, 0))]

    assert sizes(new(micro=60)) == [48, 48] and not new(micro=60).pools
    assert sizes(new(micro=16)) == [12] * 8  # halves of groups, rather than 16 and 8
    # what they have in common is then found by a first pass
    assert new(micro=16).pools and new(micro=48, micro_batch_size=8).pools


# --- what to draw


@given(st.integers(1, 13), st.integers(1, 5))
def test_a_plan_is_the_samples_in_order_cut_into_micro_batches(micro: int, step: int) -> None:
    a = algorithm(micro=micro)
    samples = plan_samples(a.config, PROMPTS, step, 0)
    tasks = a.plan(samples, first_id=7)
    assert [s for task in tasks for s in task.samples] == samples
    assert [task.id for task in tasks] == list(range(7, 7 + len(tasks)))
    for task in tasks:
        (segment,) = task.segments
        assert 0 < len(task.samples) <= micro and segment.leaves == tuple(range(len(task.samples)))
        assert segment.seeds == tuple(s.seed for s in task.samples)
        assert segment.window == segment.trained == tuple(range(5))
        assert (segment.parent, segment.start, segment.stop) == (None, 0, None)


def test_groups_with_their_own_window_share_no_task_with_another_window() -> None:
    a = algorithm(sampling_window_size=2, sampling_window_per="group")
    samples = plan_samples(a.config, PROMPTS, 1, 0)
    tasks = a.plan(samples)
    assert sorted(s.seed for t in tasks for s in t.samples) == sorted(s.seed for s in samples)
    assert len({task.segments[0].window for task in tasks}) > 1
    for task in tasks:
        assert {sde_window(a.config, 1, s.group) for s in task.samples} == {task.segments[0].window}


@pytest.mark.parametrize(("micro", "sizes"), [(3, [3, 3, 3, 3]), (5, [3, 3, 3, 3]), (7, [6, 6]), (100, [12])])
def test_algorithms_that_compare_within_a_micro_batch_get_whole_groups(micro: int, sizes: list[int]) -> None:
    a = algorithm("dgpo", micro=micro)
    tasks = a.plan(plan_samples(a.config, PROMPTS, 1, 0))
    assert [len(task.samples) for task in tasks] == sizes
    assert all(set(Counter(s.group for s in task.samples).values()) == {3} for task in tasks)


def test_a_share_of_the_steps_is_trained_and_drawn_anew_every_step() -> None:
    a = algorithm(timestep_fraction=0.6)
    drawn = [a.plan(plan_samples(a.config, PROMPTS, step, 0))[0].segments[0] for step in range(1, 30)]
    assert all(segment.window == tuple(range(5)) and len(segment.trained) == 3 for segment in drawn)
    assert len({segment.trained for segment in drawn}) > 3
    assert all(set(segment.trained) <= set(segment.window) for segment in drawn)


def test_forward_process_algorithms_train_noise_levels_of_an_ode() -> None:
    a = algorithm("diffusion_nft", sampling_kernel="ode", timesteps=2)
    segments = [a.plan(plan_samples(a.config, PROMPTS, step, 0))[0].segments[0] for step in range(1, 40)]
    assert all(segment.window == () and len(segment.trained) == 2 for segment in segments)
    assert {k for segment in segments for k in segment.trained} == set(range(5))  # never the last
    everything = algorithm("diffusion_nft", sampling_kernel="ode")
    assert everything.plan(plan_samples(a.config, PROMPTS, 1, 0))[0].segments[0].trained == tuple(range(5))


# --- credit


def test_credit_is_the_clipped_advantage_at_every_step() -> None:
    a = algorithm(advantage_clip=1.2)
    credit = a.credit(rewards(a, [0.0, 0.0, 1.0, 2.0, 2.0, 2.0]))
    assert credit.shape == (6, 6)
    third = math.sqrt(2) / 2
    expected = torch.tensor([-third, -third, 1.2, 0, 0, 0])
    torch.testing.assert_close(credit, expected[:, None].expand(6, 6), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [-1.0, 0.0, 1.0]),
        ("rloo", [-1.5, 0.0, 1.5]),
        ("reinforce_pp", [-(1.5**0.5), 0.0, 1.5**0.5]),
        ("gdpo", [-(1.5**0.5), 0.0, 1.5**0.5]),
    ],
)
def test_estimators(estimator: str, expected: list[float]) -> None:
    a = algorithm(adv_estimator=estimator, advantage_std="none")
    found = a.advantages(rewards(a, [1.0, 2.0, 3.0]))
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-3, rtol=0)


def test_gdpo_keeps_a_scorer_of_small_spread_audible() -> None:
    a = algorithm(adv_estimator="gdpo")
    samples = plan_samples(a.config, PROMPTS, 1, 0)[:3]
    columns = torch.tensor([[100.0, 0.03], [200.0, 0.02], [300.0, 0.01]])
    weights = torch.tensor([1.0, 2.0])
    both = a.advantages(Rewards(samples, columns @ weights, columns, weights))
    assert both[0] > 1 and both[2] < -1  # the second has twice the weight, though 10,000 times less spread
    summed = algorithm().advantages(Rewards(samples, columns @ weights, columns, weights))
    assert summed[0] < -1 and summed[2] > 1


def test_ddpo_normalises_by_the_history_of_a_prompt_once_it_is_long_enough() -> None:
    a = algorithm("ddpo", n=1, history=3, sampling_kernel="ddim")
    one, other = (Sample(p, 0, 0, 1) for p in PROMPTS[:2])

    def advantages(samples: list[Sample], totals: list[float]) -> list[float]:
        return a.advantages(training.rewards(samples, totals)).tolist()

    assert advantages([one, other], [1.0, 3.0]) == pytest.approx([-1, 1], abs=1e-3)  # of the batch
    assert advantages([one, other], [3.0, 9.0]) == pytest.approx([-1, 1], abs=1e-3)
    found = advantages([one, other], [5.0, 9.0])  # past of one: 1 3 5, of the other: 3 9 9
    assert found == pytest.approx([2 / (8 / 3) ** 0.5, 2 / 8**0.5], abs=1e-3)
    again = algorithm("ddpo", n=1, history=3, sampling_kernel="ddim")
    again.load_state(a.state())
    a_next, b_next = advantages([one], [0.0]), again.advantages(rewards(again, [0.0])).tolist()
    assert a_next == pytest.approx([(0 - 8 / 3) / (38 / 9) ** 0.5], abs=1e-3) and b_next == pytest.approx(a_next)


@pytest.mark.parametrize("past", [[1.0], {"a": [1.0]}, {"1": ["high"]}, {"1": 1.0}])
def test_a_damaged_history_is_a_sentence(past: Any) -> None:
    with pytest.raises(CheckpointError, match=r"algorithm\.past"):
        algorithm("ddpo", n=1, history=3, sampling_kernel="ddim").load_state({"past": past})


# --- which rows are trained


def batch(credit: list[list[float]], samples: list[Sample] | None = None) -> Batch:
    rows = samples or [Sample(PROMPTS[i // 3], i % 3, i, 1) for i in range(len(credit))]
    return Batch(Tape({}, len(credit)), rows, (0, 1), torch.tensor(credit))


NAN = math.nan
CREDIT = [[1, 0, 9], [0, 0, 9], [NAN, NAN, 9], [0, -1, NAN], [2, 2, 0], [0, 0, 0]]


def test_rows_without_credit_are_left_out_and_zeros_too_unless_they_count() -> None:
    assert list(algorithm().micro_batches(batch(CREDIT))) == [[0, 3, 4]]
    assert list(algorithm(actor_micro=2).micro_batches(batch(CREDIT))) == [[0, 3], [4]]
    assert list(algorithm(kl_coef=0.1).micro_batches(batch(CREDIT))) == [[0, 1, 3, 4, 5]]
    assert list(algorithm(kl_coef=0.1, kl_in_reward=True).micro_batches(batch(CREDIT))) == [[0, 3, 4]]
    assert list(algorithm().micro_batches(batch([[0.0, 0.0, 1.0]]))) == []


@pytest.mark.parametrize(
    ("size", "expected"), [(3, [[0, 1, 2], [3, 4, 5]]), (5, [[0, 1, 2], [3, 4, 5]]), (None, [[0, 1, 2, 3, 4, 5]])]
)
def test_whole_groups_stay_together(size: int | None, expected: list[list[int]]) -> None:
    a = algorithm("crd", actor_micro=size)
    assert list(a.micro_batches(batch([[1.0, 1.0, 1.0]] * 6))) == expected


def test_pairs_are_the_rows_and_steps_with_a_credit() -> None:
    a = algorithm(sampling_window_size=2, micro=6)
    (task,) = a.plan(plan_samples(a.config, PROMPTS[:2], 1, 0))
    credit = torch.ones(6, 6)
    assert count_pairs([(task, credit)]) == 12
    credit[:3] = NAN
    credit[3] = 0
    assert count_pairs([(task, credit), (task, credit)]) == 12


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
    samples = [Sample(POOLING_PROMPTS[i], k, k, 1) for i, k in ((0, 0), (1, 0), (0, 1))]
    one = pooled_rows(torch.tensor([0.5, 2.0]), samples[:2], 3)
    other = pooled_rows(torch.tensor([0.25]), samples[2:], 3)
    sums, counts = group_sums(pooled_sum([one, other, {}]), samples, 3, torch.zeros(()))
    assert sums.tolist() == [0.75, 2.0, 0.75] and counts.tolist() == [2, 1, 2]
    one = pooled_rows(torch.tensor([[0.5, 1.0], [2.0, 3.0]]), samples[:2], 3)
    other = pooled_rows(torch.tensor([[0.25, 4.0]]), samples[2:], 3)
    sums, counts = group_sums(pooled_sum([one, other, {}]), samples, 3, torch.zeros(()))
    assert sums.tolist() == [[0.75, 5.0], [2.0, 3.0], [0.75, 5.0]] and counts.tolist() == [2, 1, 2]


def algorithm_of_pooling(**keys: Any) -> Algorithm:
    return build_algorithm(settings("dgpo", **keys))


@pytest.mark.parametrize(
    ("micro", "updates", "expected"), [(3, 2, [4, 4]), (3, 3, [4, 4]), (4, 2, [4, 4]), (8, 2, [8])]
)
def test_no_group_is_split_between_optimizer_steps(micro: int, updates: int, expected: list[int]) -> None:
    planned = algorithm_of_pooling(micro=micro)
    tasks = planned.plan(plan_samples(planned.config, POOLING_PROMPTS, 1, 0))
    parts = update_parts(tasks, updates, whole_groups=True)
    assert [sum(len(task.samples) for task in part) for part in parts] == expected
    groups = [{s.group for task in part for s in task.samples} for part in parts]
    assert all(not a & b for i, a in enumerate(groups) for b in groups[i + 1 :])


@pytest.mark.parametrize(("micro", "sizes"), [(1, [1] * 8), (2, [2] * 4), (3, [2] * 4), (5, [4, 4]), (8, [8])])
def test_groups_larger_than_a_micro_batch_are_divided_evenly(micro: int, sizes: list[int]) -> None:
    planned = algorithm_of_pooling(micro=micro)
    samples = plan_samples(planned.config, POOLING_PROMPTS, 1, 0)
    tasks = planned.plan(samples)
    assert [len(task.samples) for task in tasks] == sizes
    assert [s for task in tasks for s in task.samples] == samples

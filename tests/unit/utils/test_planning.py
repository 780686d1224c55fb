from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gerl.config import Config, RolloutConfig, SamplingConfig, TrainerConfig, ValidationConfig
from gerl.protocol import Prompt, RolloutTask, Sample
from gerl.utils.planning import plan_step, plan_validation, sde_window, update_parts

PROMPTS = [Prompt(i, f"prompt {i}") for i in range(10)]


def config(micro: int = 4, seed: int = 0, **sampling: object) -> Config:
    return Config(
        rollout=RolloutConfig(prompts_per_step=4, n=3, micro_batch_size=micro),
        sampling=SamplingConfig(**{"num_inference_steps": 8, "window_size": 2} | sampling),  # type: ignore[arg-type]
        trainer=TrainerConfig(seed=seed),
    )


def samples(tasks: list[RolloutTask]) -> list[Sample]:
    return [s for task in tasks for s in task.samples]


# --- windows


def test_windows_cover_all_starts_evenly_and_never_the_last_step() -> None:  # T34
    drawn = Counter(sde_window(config(), step) for step in range(1, 3001))
    assert sorted(drawn) == [(k, k + 1) for k in range(6)]  # steps 0 to 6; step 7 has no noise
    assert all(abs(count - 500) < 110 for count in drawn.values())  # 5 standard deviations


def test_windows_are_reproducible_and_depend_on_seed_and_step() -> None:  # T34
    first = [sde_window(config(), step) for step in range(1, 21)]
    assert first == [sde_window(config(), step) for step in range(1, 21)]
    assert first != [sde_window(config(seed=1), step) for step in range(1, 21)]
    assert len(set(first)) > 1


@given(st.integers(1, 6), st.integers(1, 1000), st.data())
def test_windows_stay_in_their_range(size: int, step: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, 7 - size))
    end = data.draw(st.integers(first + size, 7))
    window = sde_window(config(window_size=size, window_range=[first, end]), step)
    assert window == tuple(range(window[0], window[0] + size))
    assert first <= window[0] and window[-1] < end <= 7


def test_without_a_window_every_step_but_the_last_is_stochastic() -> None:
    assert sde_window(config(window_size=None), 3) == tuple(range(7))
    assert sde_window(config(window_size=None, window_range=[2, 5]), 3) == (2, 3, 4)


# --- samples


def test_a_step_draws_n_samples_of_each_prompt_with_one_window() -> None:
    tasks = plan_step(config(micro=5), PROMPTS, 2, policy_version=7)
    assert [len(task.samples) for task in tasks] == [5, 5, 2] and [task.id for task in tasks] == [0, 1, 2]
    assert {task.window for task in tasks} == {sde_window(config(), 2)}
    groups = Counter(s.prompt.id for s in samples(tasks))
    assert len(groups) == 4 and set(groups.values()) == {3}
    assert all(s.prompt is PROMPTS[s.prompt.id] and s.group_id == s.prompt.id for s in samples(tasks))
    assert {(s.step, s.policy_version) for s in samples(tasks)} == {(2, 7)}
    assert {s.index for s in samples(tasks)} == {0, 1, 2}


def test_seeds_are_unique_over_steps_prompts_and_indices() -> None:
    steps = range(1, 31)
    drawn = [s for step in steps for s in samples(plan_step(config(), PROMPTS, step, 0))]
    assert len(drawn) == 10 * (4 + 4 + 2) * 3  # a partial last batch in each epoch of three steps
    assert len({s.seed for s in drawn}) == len({(s.step, s.prompt.id, s.index) for s in drawn}) == len(drawn)
    other = {s.seed for step in steps for s in samples(plan_step(config(seed=1), PROMPTS, step, 0))}
    assert not other & {s.seed for s in drawn}


@given(st.integers(1, 20), st.integers(1, 20))
def test_samples_do_not_depend_on_the_micro_batch_size(micro: int, step: int) -> None:
    tasks = plan_step(config(micro), PROMPTS, step, 0)
    assert samples(tasks) == samples(plan_step(config(1), PROMPTS, step, 0))
    assert all(0 < len(task.samples) <= micro for task in tasks)
    assert all(task.window == tasks[0].window for task in tasks)


def test_every_epoch_visits_every_prompt_once() -> None:
    seen = Counter(s.prompt.id for step in (4, 5, 6) for s in samples(plan_step(config(), PROMPTS, step, 0)))
    assert seen == {i: 3 for i in range(10)}


def test_validation_noise_depends_on_the_prompt_only() -> None:
    c = config()
    first, later = plan_validation(c, PROMPTS, 0), plan_validation(c, PROMPTS, 9)
    assert [s.seed for batch in first for s in batch] == [s.seed for batch in later for s in batch]
    few = plan_validation(replace(c, validation=ValidationConfig(micro_batch_size=3)), PROMPTS[4:], 0)
    assert [len(batch) for batch in few] == [3, 3]
    assert [s.seed for batch in few for s in batch] == [s.seed for batch in first for s in batch][4:]
    assert len({s.seed for batch in first for s in batch}) == 10
    other_run = plan_validation(config(seed=5), PROMPTS, 0)
    assert [s.seed for batch in other_run for s in batch] == [s.seed for batch in first for s in batch]
    other_seed = plan_validation(replace(c, validation=ValidationConfig(seed=1)), PROMPTS, 0)
    assert not {s.seed for b in other_seed for s in b} & {s.seed for b in first for s in b}
    assert not {s.seed for b in first for s in b} & {s.seed for s in samples(plan_step(c, PROMPTS, 1, 0))}


# --- optimizer steps


@given(st.integers(0, 40), st.integers(1, 12))
def test_update_parts_is_a_partition_into_runs_of_nearly_equal_length(count: int, updates: int) -> None:
    tasks = [RolloutTask(i, [], ()) for i in range(count)]
    parts = update_parts(tasks, updates)
    assert [task for part in parts for task in part] == tasks
    assert len(parts) == min(count, updates)
    lengths = [len(part) for part in parts]
    assert not lengths or max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(("count", "updates", "lengths"), [(6, 1, [6]), (6, 2, [3, 3]), (6, 3, [2, 2, 2]), (1, 4, [1])])
def test_update_parts(count: int, updates: int, lengths: list[int]) -> None:
    parts = update_parts([RolloutTask(i, [], ()) for i in range(count)], updates)
    assert [len(part) for part in parts] == lengths

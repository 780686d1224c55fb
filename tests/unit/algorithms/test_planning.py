from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gerl.algorithms import planning
from gerl.algorithms.base import group_ids
from gerl.algorithms.planning import (
    MixtureSchedule,
    PromptSchedule,
    plan_prompts,
    plan_samples,
    plan_validation,
    prompt_schedule,
    sampled_steps,
    sde_window,
)
from gerl.config import (
    Config,
    DataConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
    ValidationConfig,
    algorithm_config,
)
from gerl.data.sources import max_prompts_per_step
from gerl.protocol import Group, Prompt, RolloutTask, Sample
from gerl.trainer.update import update_parts

NFT = algorithm_config(name="diffusion_nft")
PROMPTS = [Prompt(i, f"prompt {i}") for i in range(10)]


def config(micro: int = 4, seed: int = 0, **sampling: object) -> Config:
    return Config(
        rollout=RolloutConfig(prompts_per_step=4, n=3, micro_batch_size=micro),
        sampling=SamplingConfig(**{"num_inference_steps": 8, "window_size": 2} | sampling),  # type: ignore[arg-type]
        trainer=TrainerConfig(seed=seed),
    )


def samples(c: Config, step: int, policy_version: int = 0) -> list[Sample]:
    return plan_samples(c, plan_prompts(prompt_schedule(c, PROMPTS), PROMPTS, step), step, policy_version)


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


def test_early_windows_may_be_likelier() -> None:
    c = config(window_schedule="geometric")
    drawn = Counter(sde_window(c, step)[0] for step in range(1, 3001))
    odds = [0.5**k / sum(0.5**j for j in range(6)) for k in range(6)]  # TreeGRPO, equation 7, with r = 0.5
    assert set(drawn) <= set(range(6))
    assert all(abs(drawn[k] - 3000 * p) < 5 * (3000 * p) ** 0.5 for k, p in enumerate(odds))


# --- windows that move


def moving(schedule: str, steps: int, every: int, **sampling: object) -> list[tuple[int, ...]]:
    c = config(window_schedule=schedule, window_every=every, **sampling)
    return [sde_window(c, step) for step in range(1, steps + 1)]


def test_a_progressive_window_moves_by_its_size_and_starts_over() -> None:
    starts = [window[0] for window in moving("progressive", 16, 2, window_size=3)]
    assert starts == [0, 0, 3, 3, 4, 4] * 2 + [0, 0, 3, 3]  # 7 stochastic steps: the last window is pushed back


def published_windows(steps: int, iterations: int, size: int, every: int, stride: int) -> list[tuple[int, ...]]:
    """MixGRPO's state machine: Tencent-Hunyuan/MixGRPO fastvideo/utils/grpo_states.py:85-148."""
    last, start, stayed, windows = steps - 2, 0, 0, list[tuple[int, ...]]()
    for _ in range(iterations):
        windows.append(tuple(range(start, min(start + size, last))))
        stayed += 1
        if stayed >= every:
            stayed, start = 0, start + stride
        if start > last:
            stayed, start = 0, 0
    return windows


@pytest.mark.parametrize(("every", "stride"), [(25, 1), (20, 1), (20, 0)])  # MixGRPO, Flash and Flash*
def test_a_progressive_window_moves_as_published(every: int, stride: int) -> None:
    keys = {"window_size": 4, "num_inference_steps": 25, "window_stride": stride}
    found = moving("progressive", 300, every, **keys)  # iterations of the official scripts
    assert found == published_windows(25, 300, 4, every, stride)
    assert len(set(found)) == {25: 12, 20: 15}[every] if stride else set(found) == {(0, 1, 2, 3)}


def test_a_window_that_moves_by_one_starts_over_where_the_published_one_runs_empty() -> None:
    keys = {"window_size": 4, "num_inference_steps": 25, "window_stride": 1}
    found = moving("progressive", 25 * 23, 25, **keys)
    published = published_windows(25, 25 * 24, 4, 25, 1)
    assert found[: 25 * 20] == published[: 25 * 20] and () in published
    assert [window[0] for window in found[::25]] == [*range(21), 0, 1] and {len(window) for window in found} == {4}


def test_a_window_of_the_published_size_is_never_empty() -> None:  # size 4, 25 steps, 25 iterations: the peer's bug
    windows = moving("progressive", 400, 25, window_size=4, num_inference_steps=25)
    assert all(len(window) == 4 and window[-1] <= 23 for window in windows)
    assert {k for window in windows for k in window} == set(range(24))


def test_a_decaying_window_stays_less_and_less_past_the_middle() -> None:
    windows = moving("decay", 200, 20, window_size=4, num_inference_steps=25)
    stays = Counter(window[0] for window in windows[:90])
    # threshold 12: 16 -> 20 exp(-0.4), 20 -> 20 exp(-0.8)
    assert stays == {0: 20, 4: 20, 8: 20, 12: 20, 16: 10} and len({w[0] for w in windows}) == 6
    whole = [window[0] for window in windows]
    assert whole.count(16) >= 13 and whole.count(20) >= 9 and whole[:102].count(20) == 9


def test_a_random_window_may_stay_for_some_steps() -> None:
    windows = [sde_window(config(window_every=5), step) for step in range(1, 201)]
    assert all(len(set(windows[i : i + 5])) == 1 for i in range(0, 200, 5))
    assert len(set(windows)) == 6


def test_windows_may_differ_by_group_but_not_within_one() -> None:
    c = config(window_per="group")
    windows = {p: {sde_window(c, 3, Group(p, turn)) for turn in (None, 1)} for p in range(50)}
    assert all(len(found) == 1 for found in windows.values())
    assert len({w for found in windows.values() for w in found}) == 6
    same = config(window_per="step")
    assert len({sde_window(same, 3, Group(p)) for p in range(50)}) == 1


def test_an_ode_has_no_window() -> None:
    sampling = SamplingConfig(kernel="ode", num_inference_steps=8)
    assert sde_window(Config(sampling=sampling, algorithm=NFT), 3) == ()


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 99))
def test_drawn_steps_are_one_of_each_stratum(length: int, count: int, seed: int) -> None:
    steps = list(range(5, 5 + length))
    drawn = sampled_steps(steps, count, seed)
    assert len(drawn) == min(count, length) and list(drawn) == sorted(set(drawn)) and set(drawn) <= set(steps)
    assert drawn == sampled_steps(steps, count, seed)
    if count >= length:
        assert drawn == tuple(steps)


def test_drawn_steps_cover_all_evenly() -> None:
    drawn = Counter(k for seed in range(900) for k in sampled_steps(range(9), 3, seed))
    assert sorted(drawn) == list(range(9)) and all(abs(count - 300) < 71 for count in drawn.values())


# --- samples


def test_a_step_draws_n_samples_of_each_prompt() -> None:
    drawn = samples(config(), 2, policy_version=7)
    groups = Counter(s.prompt.id for s in drawn)
    assert len(groups) == 4 and set(groups.values()) == {3}
    assert all(s.prompt is PROMPTS[s.prompt.id] and s.group == Group(s.prompt.id) for s in drawn)
    assert {(s.step, s.policy_version) for s in drawn} == {(2, 7)}
    assert {s.index for s in drawn} == {0, 1, 2} and {s.init_seed for s in drawn} == {None}


def test_seeds_are_unique_over_steps_prompts_and_indices() -> None:
    steps = range(1, 31)
    drawn = [s for step in steps for s in samples(config(), step)]
    assert len(drawn) == 10 * (4 + 4 + 2) * 3  # a partial last batch in each epoch of three steps
    assert len({s.seed for s in drawn}) == len({(s.step, s.prompt.id, s.index) for s in drawn}) == len(drawn)
    other = {s.seed for step in steps for s in samples(config(seed=1), step)}
    assert not other & {s.seed for s in drawn}


def test_initial_noise_is_shared_by_the_images_of_a_prompt_and_a_step() -> None:  # T36
    drawn = [s for step in (1, 2) for s in samples(config(same_init_noise=True), step)]
    by_group: dict[tuple[int, int], set[int | None]] = {}
    for s in drawn:
        by_group.setdefault((s.step, s.prompt.id), set()).add(s.init_seed)
    assert all(len(seeds) == 1 and None not in seeds for seeds in by_group.values())
    assert len({seed for seeds in by_group.values() for seed in seeds}) == len(by_group) == 8
    assert len({s.seed for s in drawn}) == len(drawn)


def test_every_epoch_visits_every_prompt_once() -> None:
    seen = Counter(s.prompt.id for step in (4, 5, 6) for s in samples(config(), step))
    assert seen == {i: 3 for i in range(10)}


def test_further_prompts_repeat_none_of_the_step() -> None:
    c = config()
    first = [p.id for p in plan_prompts(prompt_schedule(c, PROMPTS), PROMPTS, 1)]
    further = [[p.id for p in plan_prompts(prompt_schedule(c, PROMPTS), PROMPTS, 1, attempt)] for attempt in (1, 2, 3)]
    assert [len(ids) for ids in further] == [4, 2, 0]
    assert sorted(first + further[0] + further[1]) == list(range(10))
    assert further[0] == [p.id for p in plan_prompts(prompt_schedule(c, PROMPTS), PROMPTS, 1, 1)]


def test_groups_are_the_prompt_and_what_else_a_state_has() -> None:
    prompt = Prompt(3, "a", {"turn": [1, 2], "role": {"a": 1}})  # of a chat: columns like any other
    (sample, *_) = plan_samples(config(), [prompt], 1, 0)
    assert sample.group == Group(3)
    changes = ({"turn": 2}, {"role": "critic"}, {"branch": 4}, {"index": 2})
    others = [replace(sample, **change) for change in changes]
    assert group_ids([sample, *others, sample]).tolist() == [0, 1, 2, 3, 0, 0]


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


def test_further_images_of_a_held_out_prompt_leave_the_first_as_it_is() -> None:
    one, three = (replace(config(), validation=ValidationConfig(images_per_prompt=n)) for n in (1, 3))
    first, all_of_them = ([s for batch in plan_validation(c, PROMPTS, 5) for s in batch] for c in (one, three))
    assert all_of_them[::3] == first and [s.index for s in all_of_them[:4]] == [0, 1, 2, 0]
    assert len({s.seed for s in all_of_them}) == 30 and len({s.group for s in all_of_them}) == 10


# --- optimizer steps


@given(st.integers(0, 40), st.integers(1, 12))
def test_update_parts_is_a_partition_into_runs_of_nearly_equal_length(count: int, updates: int) -> None:
    tasks = [RolloutTask(i, [], ()) for i in range(count)]
    parts = update_parts(tasks, updates)
    assert [task for part in parts for task in part] == tasks
    assert len(parts) == min(count, updates)
    lengths = [len(part) for part in parts]
    assert not lengths or max(lengths) - min(lengths) <= 1


schedules = st.builds(PromptSchedule, st.integers(1, 40), st.integers(1, 45), st.booleans(), st.integers(0, 2**70))


@given(schedules, st.integers(0, 5))
def test_an_epoch_is_a_permutation_in_batches(schedule: PromptSchedule, epoch: int) -> None:
    first = epoch * schedule.steps_per_epoch
    steps = range(first, first + schedule.steps_per_epoch)
    batches = [schedule.batch(step) for step in reversed(steps)][::-1]  # any order: there is no state
    assert sorted(i for batch in batches for i in batch) == list(range(schedule.count))
    assert all(len(batch) == schedule.per_step for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= schedule.per_step
    assert {schedule.epoch(step) for step in steps} == {epoch}
    assert schedule.shuffle or batches[0][0] == 0


def test_epochs_and_seeds_have_their_own_order() -> None:
    orders = [PromptSchedule(50, 50, True, seed).batch(step) for seed in (0, 1) for step in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert PromptSchedule(3, 2, False, 0).batch(3) == [2]


def test_the_order_of_an_epoch_is_drawn_once() -> None:
    planning._order.cache_clear()
    schedule = PromptSchedule(10, 2, True, 0)
    assert sorted(i for step in range(5) for i in schedule.batch(step)) == list(range(10))
    assert planning._order.cache_info().misses == 1


@st.composite
def schedules_of_mixture(draw: st.DrawFn) -> MixtureSchedule:
    shares = draw(st.lists(st.fractions(Fraction(1, 20), 20, max_denominator=20), min_size=1, max_size=5))
    per_step = draw(st.integers(1, 30))
    more = st.integers(0, 40)
    sizes = [most + draw(more) for most in max_prompts_per_step(shares, per_step)]
    return MixtureSchedule(tuple(sizes), tuple(shares), per_step, draw(st.booleans()), draw(st.integers(0, 2**70)))


def source_of(schedule: MixtureSchedule, index: int) -> int:
    return next(i for i in range(len(schedule.sizes)) if index < sum(schedule.sizes[: i + 1]))


@settings(max_examples=40, deadline=None)
@given(schedules_of_mixture(), st.integers(0, 10**6))
def test_every_step_has_the_shares_and_no_prompt_twice(schedule: MixtureSchedule, first: int) -> None:
    seen: Counter[int] = Counter()
    shares = [weight / sum(schedule.weights) for weight in schedule.weights]
    for step in range(first, first + 8):
        batch = schedule.batch(step)
        assert len(set(batch)) == len(batch) == schedule.per_step
        counts = Counter(source_of(schedule, index) for index in batch)
        seen += counts
        most = max_prompts_per_step(schedule.weights, schedule.per_step)
        assert all(counts[i] <= most[i] for i in range(len(shares)))
    for i, share in enumerate(shares):
        assert abs(seen[i] - 8 * schedule.per_step * share) <= 1 + share * max(0, len(shares) - 2)


@settings(max_examples=40, deadline=None)
@given(schedules_of_mixture())
def test_a_step_is_the_same_whatever_was_asked_before(schedule: MixtureSchedule) -> None:
    """The order is that of the plain definition: all occurrences, sorted by their time."""
    due = sorted(
        ((n + Fraction(1, 2)) / weight, i, n)
        for i, weight in enumerate(schedule.weights)
        for n in range(int(4 * schedule.per_step * weight / sum(schedule.weights)) + 3)
    )
    plain = [(i, n) for _, i, n in due]
    for step in (2, 0, 1):
        start = step * schedule.per_step
        assert list(islice(schedule._due(start), schedule.per_step)) == plain[start : start + schedule.per_step]
        assert schedule.batch(step) == schedule.batch(step)


@pytest.mark.parametrize("sizes", [(40, 7), (9, 6)])
def test_every_prompt_of_a_source_comes_once_a_pass(sizes: tuple[int, int]) -> None:
    schedule = MixtureSchedule(sizes, (Fraction(2), Fraction(1)), 6, True, 3)
    drawn = [index for step in range(60) for index in schedule.batch(step)]
    first = [index for index in drawn if index < sizes[0]]
    passes = [first[i : i + sizes[0]] for i in range(0, len(first) - sizes[0], sizes[0])]
    assert len(passes) > 4 and all(sorted(p) == list(range(sizes[0])) for p in passes)
    assert (passes[0] != passes[1]) == (sizes[0] >= 2 * 4)  # at most 4 of a step are of it
    counts = Counter(index for index in drawn if index >= sizes[0])
    assert max(counts.values()) - min(counts.values()) <= 1 and len(counts) == sizes[1]


def test_seeds_and_the_order_of_the_files() -> None:
    weights = (Fraction(1), Fraction(1))
    orders = [MixtureSchedule((20, 20), weights, 8, True, seed).batch(0) for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert MixtureSchedule((3, 4), weights, 2, False, 0).batch(0) == [0, 3]
    assert MixtureSchedule((3, 4), weights, 2, False, 0).batch(3) == [0, 6]


def test_an_epoch_ends_when_every_prompt_has_come() -> None:
    schedule = MixtureSchedule((10, 30), (Fraction(1), Fraction(1)), 4, True, 0)
    assert schedule.steps_per_epoch == 15 and schedule.epoch(14) == 0 and schedule.epoch(15) == 1
    drawn = {index for step in range(15) for index in schedule.batch(step)}
    assert drawn == set(range(40))


def test_the_plan_of_a_run() -> None:
    prompts = [Prompt(i, f"p{i}", source=int(i >= 30)) for i in range(40)]
    rollout = RolloutConfig(prompts_per_step=4)
    one_pool = Config(data=DataConfig(train=["a.txt", "b.txt"]), rollout=rollout)
    assert prompt_schedule(one_pool, prompts) == PromptSchedule(40, 4, True, 0)
    config = Config(data=DataConfig(train=["a.txt", {"path": "b.txt", "weight": 3}]), rollout=rollout)
    steps = [plan_prompts(prompt_schedule(config, prompts), prompts, step) for step in (1, 2, 3)]
    assert all(sum(prompt.source for prompt in step) == 3 for step in steps)
    further = [plan_prompts(prompt_schedule(config, prompts), prompts, 1, attempt) for attempt in range(1, 10)]
    assert sum(prompt.source for prompt in further[0]) == 3
    everything = [prompt.id for part in (steps[0], *further) for prompt in part]
    assert sorted(everything) == list(range(40))

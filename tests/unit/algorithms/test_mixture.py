from collections import Counter
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gerl.algorithms.mixture import MixtureSchedule
from gerl.algorithms.planning import PromptSchedule, plan_prompts, prompt_schedule
from gerl.config import Config, DataConfig, RolloutConfig
from gerl.data.sources import most_of_a_step
from gerl.protocol import Prompt


@st.composite
def schedules(draw: st.DrawFn) -> MixtureSchedule:
    shares = draw(st.lists(st.fractions(Fraction(1, 20), 20, max_denominator=20), min_size=1, max_size=5))
    per_step = draw(st.integers(1, 30))
    more = st.integers(0, 40)
    sizes = [most + draw(more) for most in most_of_a_step(shares, per_step)]
    return MixtureSchedule(tuple(sizes), tuple(shares), per_step, draw(st.booleans()), draw(st.integers(0, 2**70)))


def source_of(schedule: MixtureSchedule, index: int) -> int:
    return next(i for i in range(len(schedule.sizes)) if index < sum(schedule.sizes[: i + 1]))


@settings(max_examples=40, deadline=None)
@given(schedules(), st.integers(0, 10**6))
def test_every_step_has_the_shares_and_no_prompt_twice(schedule: MixtureSchedule, first: int) -> None:
    seen: Counter[int] = Counter()
    shares = [weight / sum(schedule.weights) for weight in schedule.weights]
    for step in range(first, first + 8):
        batch = schedule.batch(step)
        assert len(set(batch)) == len(batch) == schedule.per_step
        counts = Counter(source_of(schedule, index) for index in batch)
        seen += counts
        most = most_of_a_step(schedule.weights, schedule.per_step)
        assert all(counts[i] <= most[i] for i in range(len(shares)))
    for i, share in enumerate(shares):
        assert abs(seen[i] - 8 * schedule.per_step * share) <= 1 + share * max(0, len(shares) - 2)


@settings(max_examples=40, deadline=None)
@given(schedules())
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
    steps = [plan_prompts(config, prompts, step) for step in (1, 2, 3)]
    assert all(sum(prompt.source for prompt in step) == 3 for step in steps)
    further = [plan_prompts(config, prompts, 1, attempt) for attempt in range(1, 10)]
    assert sum(prompt.source for prompt in further[0]) == 3
    everything = [prompt.id for part in (steps[0], *further) for prompt in part]
    assert sorted(everything) == list(range(40))

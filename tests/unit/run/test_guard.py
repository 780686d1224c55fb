import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gerl.config import GuardConfig
from gerl.errors import ConfigError
from gerl.run.guard import (
    LOOKED_AT,
    NEXT,
    Baselines,
    GuardLog,
    Signal,
    TrainingTrends,
    best_of,
    candidates,
    found_signals,
    levels,
    look_rows,
    look_steps,
    mean_chance,
    raise_peaks,
    read_guard,
    rise_chance,
    share_chance,
    sign_chance,
    trend_candidates,
    watched_columns,
)
from gerl.run.health import Health
from gerl.run.validation import JUDGED, Validation, evenly, judged

CONFIG: dict[str, Any] = {
    "reward": {"scorers": {"mine": {"weight": 1.0}, "other": {"weight": 0.0}}},
    "trainer": {"steps": 10},
    "validation": {"every": 1},
}
N = 64


# --- Chance


def signs_tried(changes: Sequence[float]) -> float:
    """Share of all signs of `changes` whose mean is as high."""
    sums = [
        sum(s * abs(c) for s, c in zip(signs, changes, strict=True)) for signs in product((-1, 1), repeat=len(changes))
    ]
    return float(np.mean(np.array(sums) >= sum(changes) - 1e-9))


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=9))
def test_the_chance_of_a_mean_is_that_of_all_signs(changes: list[int]) -> None:
    expected = signs_tried(changes) if sum(changes) > 0 else 1.0
    assert mean_chance(changes) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(4))
def test_more_changes_are_approximated_well_far_into_the_tail(seed: int) -> None:
    sizes = np.random.default_rng(seed).exponential(size=18)
    signs = np.array(list(product((-1.0, 1.0), repeat=18)))
    sums = signs @ sizes
    order = np.argsort(sums)
    for share in (0.2, 0.01, 1e-3, 2e-4):
        place = order[round(len(sums) * (1 - share))]
        exact = float((sums >= sums[place] - 1e-9).mean())
        assert mean_chance((signs[place] * sizes).tolist()) == pytest.approx(exact, rel=0.15)
    assert mean_chance(sizes.tolist()) == 0.5**18 and mean_chance((-sizes).tolist()) == 1.0


@pytest.mark.parametrize(("falls", "rises", "expected"), [(7, 1, 9 / 256), (0, 8, 1.0), (8, 0, 1 / 256), (0, 0, 1.0)])
def test_the_sign_test_is_exact(falls: int, rises: int, expected: float) -> None:
    assert sign_chance([1.0] * falls + [-2.0] * rises + [0.0] * 5) == pytest.approx(expected)


def test_the_chance_of_a_share_is_that_of_all_ways_to_draw_it() -> None:
    assert share_chance(1, 8, 7, 8) == pytest.approx((math.comb(8, 7) * 8 + 1) / math.comb(16, 8))
    assert share_chance(0, 8, 0, 8) == 1.0


def test_a_rise_is_seen_on_average_or_on_most_prompts() -> None:
    assert rise_chance([-9.0] * 2 + [1.0] * 40) == pytest.approx(2 * sign_chance([-9.0] * 2 + [1.0] * 40))
    few = [5.0] * 20 + [-0.1] * 25
    assert rise_chance(few) == pytest.approx(2 * mean_chance(few)) and rise_chance(few) < 1e-5


# --- Held-out images


def validation(step: int, seed: int = 0, shift: float = 0.0, **columns: Sequence[float]) -> Validation:
    """Rewards of N prompts, and how their images look: the same ones but for `shift`, in deviations of the first."""
    noise = np.random.default_rng(seed).normal(size=(6, N))
    looks = {"sharpness": noise[0] + shift, "red": noise[1], "unlike_others": 5 + noise[2]}
    looks |= dict(zip(JUDGED, np.exp([noise[4] / 2 - 2, noise[4] / 2 - 2 + 0.5 + abs(noise[5])]), strict=True))
    rewards = list(columns.pop("reward", 0.5 + 0.1 * noise[3]))
    by_scorer: dict[str, list[float | None]] = {"mine": list(rewards), "other": list(0.5 + 0.1 * noise[0])}
    by_scorer |= {name: list(values) for name, values in columns.items()}
    found = {name: [float(value) for value in values] for name, values in looks.items()}
    prompts = [f"prompt {i}" for i in range(N)]
    return Validation(step, prompts, list(rewards), by_scorer, [], [], None, [], found)  # type: ignore[arg-type]


FIRST = validation(0)


def risen(step: int = 5, **columns: Sequence[float]) -> Validation:
    return validation(step, reward=[r + 0.2 for r in FIRST.rewards if r is not None], **columns)


def looking(step: int, name: str, values: Sequence[float]) -> Validation:
    return replace(FIRST, step=step, looks=FIRST.looks | {name: list(values)})


def fired(later: Validation, first: Validation = FIRST, config: Any = CONFIG, **more: Any) -> list[Signal]:
    return found_signals(candidates(first, later, config, **more), config)


def keys(later: Validation, first: Validation = FIRST, config: Any = CONFIG) -> list[str]:
    return [signal.key for signal in fired(later, first, config)]


def test_a_reward_that_rises_alone_is_no_signal() -> None:
    assert keys(risen()) == [] and keys(FIRST) == []


def test_in_a_run_of_chance_alone_the_guard_is_silent_as_often_as_promised() -> None:
    """Images that wander, each from those before, in validations and looks; a fifth of 100 runs may give an alarm."""
    config = CONFIG | {"trainer": {"steps": 20}, "validation": {"every": 4}, "guard": {"false_alarms": 0.2}}
    steps = sorted({*range(4, 21, 4), *look_steps(20, 4)})
    alarms = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        values = {name: np.array(column, dtype=float) for name, column in FIRST.looks.items()}
        alarm, baselines = False, Baselines(config)
        baselines.add(FIRST)
        for step in steps:
            moved = {name: 0.3 * rng.normal(size=N) for name in values}
            values = {n: v * np.exp(moved[n]) if n in JUDGED else v + moved[n] for n, v in values.items()}
            later = replace(FIRST, step=step, looks={name: column.tolist() for name, column in values.items()})
            alarm = alarm or bool(found_signals(observe(baselines, later, step % 4 != 0), config))
        alarms += alarm
    assert alarms <= 0.2 * 100


def observe(baselines: Baselines, later: Validation, look: bool) -> list[Signal]:
    """Test a validation, or the parts of it that a look sees, and add it."""
    tested = list[Signal]()
    if not look:
        tested = baselines.tests(later, TrainingTrends())
        baselines.add(later)
        return tested
    for count in (LOOKED_AT, len(baselines.rows)):
        part = later.part(evenly(baselines.rows, count))
        part = replace(part, by_scorer={}, rewards=[None] * len(part.prompts))
        tested = baselines.tests_of_look(part)
        if not baselines.asks_for_more(part, tested):
            break
    baselines.add_look(part)
    return tested


# --- Looks


def test_looks_are_at_doubling_distances_and_then_half_way_between_validations() -> None:
    assert look_steps(76, 19) == [1, 2, 4, 8, 16, 28, 47] and look_steps(32, 8) == [1, 2, 4, 12, 20]
    assert look_steps(76, 0) == [1, 2, 4, 8, 16, 32, 64] and look_steps(1000, 25) == [1, 2, 4, 8, 16, 37, 62]
    assert look_steps(10, 1) == look_steps(1, 1) == [] and look_steps(8, 4) == [1, 2, 6]


@given(st.integers(1, 300), st.integers(0, 60), st.integers(0, 20), st.floats(0.001, 0.5))
def test_all_tests_of_a_run_together_spend_its_false_alarms(steps: int, every: int, others: int, rate: float) -> None:
    config = {"trainer": {"steps": steps}, "validation": {"every": every}, "guard": {"false_alarms": rate}}
    level, looks = levels(config, others), look_steps(steps, every)
    validations = [step for step in range(1, steps + 1) if step == steps or (every and step % every == 0)]
    spent = level.alignment * len([*validations, *looks]) + level.others * others * len(validations)
    assert spent <= rate * (1 + 1e-9) and not {*looks} & {*validations}


def test_a_part_of_a_validation_has_its_rows_alone() -> None:
    rows = [3, 5, 60]
    part = FIRST.part(rows)
    assert part.prompts == [f"prompt {row}" for row in rows] and part.ids == rows
    assert part.by_scorer["other"] == [FIRST.by_scorer["other"][row] for row in rows]
    assert set(part.looks) == {*JUDGED, "sharpness", "red"}  # dissimilarity is that of all images
    of_three = replace(FIRST, ids=[i // 4 for i in range(N)])
    assert look_rows(of_three) == list(range(0, N, 4))  # an image per prompt


def test_a_look_is_compared_with_the_same_rows_of_the_first_validation_and_of_their_peak() -> None:
    baselines = Baselines(CONFIG)
    baselines.add(FIRST)
    observe(baselines, replace(FIRST, step=2), look=True)
    assert baselines.parts[-1].ids == evenly(range(N), LOOKED_AT)
    lost = replace(with_errors(OWN, OWN), step=3)  # as under any other prompt
    (signal,) = found_signals(observe(baselines, lost, look=True), CONFIG)
    assert signal.key == "base/alignment" and signal.look and f"of {N} prompts" in signal.text  # seen in all of them
    assert baselines.parts[-1].ids == baselines.rows
    observe(baselines, replace(with_errors(OWN, 3 * OTHER), step=4), look=False)
    (signal,) = found_signals(observe(baselines, replace(with_errors(OWN, 1.2 * OTHER), step=5), look=True), CONFIG)
    assert "than at step 4" in signal.text
    assert baselines.tests_of_look(replace(FIRST.part([1]), ids=[N])) == []  # of a run with other prompts


OWN, OTHER = (np.array(FIRST.looks[name], dtype=float) for name in JUDGED)


def with_errors(own: np.ndarray, other: np.ndarray) -> Validation:
    return replace(FIRST, step=5, looks=FIRST.looks | {"own_error": own.tolist(), "other_error": other.tolist()})


def test_alignment_is_the_evidence_for_the_own_prompt_and_surprise_the_error_under_it() -> None:
    found = judged(FIRST, FIRST)
    c = OWN.mean()
    assert found["base/alignment"] == pytest.approx(np.log((OTHER + c) / (OWN + c)).tolist())
    assert found["base/surprise"] == pytest.approx(np.log(OWN).tolist())
    assert list(judged(with_errors(OWN, np.full(N, math.nan)), FIRST)) == ["base/alignment", "base/surprise"]


def test_images_that_no_longer_show_their_prompt_to_the_base_model() -> None:
    lost = np.arange(N) < 24  # of 64 prompts
    (found,) = fired(with_errors(OWN, np.where(lost, OWN, OTHER)))
    assert found.key == "base/alignment" and found.value < 0 and set(found.shown) <= set(range(24))
    assert "sees less of the prompts in the held-out images than at step 0" in found.text and "'prompt " in found.text
    assert found.sentence.endswith(NEXT["base"]) and "by chance: less than 1 in 1,000,000" in found.sentence
    assert fired(with_errors(OWN, 2 * OTHER)) == []


def test_images_that_show_their_prompt_less_than_at_the_peak() -> None:
    peak = with_errors(OWN, 3 * OTHER)
    peaks: dict[str, Validation] = {}
    for one in (FIRST, peak):
        raise_peaks(peaks, one, FIRST)
    assert peaks["base/alignment"] is peak
    later = replace(with_errors(OWN, 1.2 * OTHER), step=9)  # still better than at first
    assert keys(later) == []
    (found,) = fired(later, peaks=peaks, earlier=2)
    assert found.key == "base/alignment" and "than at step 5" in found.text
    # more than half of what was gained is left: 3 times the error under another prompt is log 3 more at most
    assert fired(replace(with_errors(OWN, 1.9 * OTHER), step=9), peaks=peaks, earlier=2) == []


def test_traces_in_the_latents_that_are_small_beside_the_errors_are_no_signal() -> None:
    assert fired(with_errors(OWN + 0.1 * OWN.mean(), OTHER + 0.3 * OWN.mean())) == []


def test_images_that_are_unlikely_to_the_base_model_beyond_the_spread_of_the_first_ones() -> None:
    spread = float(np.log(OWN).std(ddof=1))

    def surprising(deviations: float) -> list[Signal]:
        own, c = OWN * math.exp(deviations * spread), OWN.mean()
        return fired(with_errors(own, (own + c) * (OTHER + c) / (OWN + c) - c))  # the prompt is seen as before

    assert surprising(1.8) == [] and surprising(-3.0) == []
    (found,) = surprising(2.5)
    assert found.key == "base/surprise" and found.value == pytest.approx(2.5) and found.threshold == 2.0


def test_prompts_whose_images_the_base_model_did_not_judge_are_left_out() -> None:
    missing: dict[str, list[float | None]] = {name: [None] * N for name in JUDGED}
    assert (
        keys(replace(FIRST, step=5, looks=FIRST.looks | missing)) == [] and keys(replace(FIRST, step=5, looks={})) == []
    )


def test_a_watched_scorer_that_falls_while_the_reward_rises() -> None:
    lower = [v - 0.1 for v in FIRST.by_scorer["other"] if v is not None]
    later = risen(other=lower)
    assert keys(later) == ["watched/other", "disagreement/other"]
    found = fired(later)[0]
    assert found.value == pytest.approx(-0.1) and "most for 'prompt" in found.text
    assert "fell from 0." in found.text and "while the reward rose from 0." in found.text
    assert keys(validation(5, other=lower)) == []  # the reward did not rise
    held_out = CONFIG | {
        "reward": {"scorers": {"mine": {"weight": 1.0}, "other": {"weight": 0.0, "during": "validation"}}}
    }
    assert keys(later, config=held_out) == ["watched/other", "disagreement/other"]
    trained = CONFIG | {"reward": {"scorers": {"mine": {"weight": 1.0}, "other": {"weight": 0.5}}}}
    assert keys(later, config=trained) == []  # it is part of what was asked for


def test_a_few_large_gains_do_not_hide_that_a_watched_scorer_fell_on_most_prompts() -> None:
    known = [v for v in FIRST.by_scorer["other"] if v is not None]
    changed = [v + 3.0 if i < 6 else v - 0.1 for i, v in enumerate(known)]  # higher on average
    assert keys(risen(other=changed)) == ["disagreement/other"]


def test_seven_falls_and_a_rise_are_no_disagreement() -> None:
    """Only 8 prompts whose column changed: 3.5 % of such runs would have as many falls."""
    known = [v for v in FIRST.by_scorer["other"] if v is not None]
    assert keys(risen(other=[v - 0.1 if i < 7 else v + 0.1 if i == 7 else v for i, v in enumerate(known)])) == []


def test_a_watched_scorer_that_first_rose_is_compared_with_its_peak() -> None:
    known = [v for v in FIRST.by_scorer["other"] if v is not None]
    peak = risen(5, other=[v + 0.3 for v in known])
    rewards = [r + 0.4 for r in FIRST.rewards if r is not None]
    later = validation(9, reward=rewards, other=[v + 0.1 for v in known])  # above the first validation still
    peaks: dict[str, Validation] = {}
    for one in (FIRST, peak):
        raise_peaks(peaks, one, FIRST)
    assert keys(later) == [] and peaks["other"] is peak and peaks["mine"] is peak
    (fell, disagree) = fired(later, peaks=peaks, earlier=2)
    assert (fell.key, disagree.key) == ("watched/other", "disagreement/other")
    assert fell.value == pytest.approx(-0.2) and "at step 5" in fell.text
    twice = candidates(FIRST, later, CONFIG, peaks, 4)  # the peak of more validations is less of a surprise
    chances = {s.key: s.chance for s in twice}  # too small to be compared by an absolute tolerance
    for signal in (fell, disagree):
        assert signal.chance > 0 and chances[signal.key] == pytest.approx(2 * signal.chance, rel=1e-9, abs=0)


def test_a_watched_scorer_that_falls_on_a_plateau_of_the_reward() -> None:
    known = [v for v in FIRST.by_scorer["other"] if v is not None]
    peaks: dict[str, Validation] = {}
    for one in (FIRST, risen(5, other=[v + 0.3 for v in known])):
        raise_peaks(peaks, one, FIRST)
    later = risen(9, other=[v + 0.1 for v in known])  # the same reward as at step 5
    (fell,) = fired(later, peaks=peaks, earlier=2)  # no reward rose since the peak: there is no disagreement
    assert fell.key == "watched/other" and "at step 5" in fell.text


def test_a_fall_that_is_a_trifle_beside_a_column_is_none() -> None:
    known = [v for v in FIRST.by_scorer["other"] if v is not None]
    level = float(np.mean(known))
    assert keys(risen(other=[v - 0.029 * level for v in known])) == []
    assert keys(risen(other=[v - 0.031 * level for v in known])) == ["watched/other", "disagreement/other"]


def test_a_fall_that_is_sure_but_small_beside_the_spread_of_the_first_images_is_no_signal() -> None:
    spread = float(np.std([v for v in FIRST.by_scorer["other"] if v is not None], ddof=1))
    lower = [v - 0.2 * spread for v in FIRST.by_scorer["other"] if v is not None]
    fell, disagree = fired(risen(other=lower))
    assert fell.size == pytest.approx(0.2) and disagree.size == pytest.approx(0.2)
    important = CONFIG | {"guard": {"importance": 0.5}}
    assert keys(risen(other=lower), config=important) == []
    lower = [v - 0.6 * spread for v in FIRST.by_scorer["other"] if v is not None]
    assert keys(risen(other=lower), config=important) == [fell.key, disagree.key]


def test_any_fall_of_a_scorer_that_gave_every_image_the_same_is_important() -> None:
    first = replace(FIRST, by_scorer=FIRST.by_scorer | {"other": [1.0] * N})
    later = risen(other=[1.0 - 0.1 * (i % 2) for i in range(N)])
    found = fired(later, first, CONFIG | {"guard": {"importance": 10.0}})
    assert [signal.key for signal in found] == ["watched/other", "disagreement/other"] and found[0].size is None


def test_further_columns_of_a_trained_scorer_are_watched() -> None:
    columns = ["mine", "mine/exact", "mine/sigma", "mine/surprise", "other", "other/part"]
    assert watched_columns(CONFIG, columns) == ["mine/exact", "other", "other/part"]


def test_images_that_drifted_beyond_the_spread_of_the_first_ones() -> None:
    assert keys(validation(5, shift=1.0)) == []
    (found,) = fired(validation(5, shift=4.0))
    assert found.key == "looks/sharpness" and found.value > found.threshold > 0
    (down,) = fired(validation(5, shift=-4.0))
    assert down.key == "looks/sharpness" and down.value < down.threshold < 0
    assert down.sentence.endswith("guard.ignored=[looks/sharpness]")


def test_images_that_became_alike() -> None:
    assert keys(looking(5, "unlike_others", [0.1] * N)) == ["diversity/unlike_others"]


def test_validations_of_other_or_of_few_prompts_are_not_compared() -> None:
    wild = validation(5, shift=9.0)
    assert keys(replace(wild, prompts=["another", *wild.prompts[1:]])) == []
    few = [replace(v, prompts=v.prompts[:4], rewards=v.rewards[:4]) for v in (FIRST, wild)]
    assert keys(few[1], few[0]) == []
    assert keys(wild, replace(FIRST, looks={})) == []  # of an older version


def test_several_images_of_a_prompt_are_one_observation() -> None:
    """Eight images of a prompt that look alike are one observation: few prompts make no certain change."""

    def seen(step: int, shift: float, ids: list[int]) -> Validation:
        few = validation(step)
        sharpness = [float(i % 8) + i // 8 + shift * (i // 8 in (0, 1, 2)) for i in range(N)]  # three of eight prompts
        return replace(few, looks={"sharpness": sharpness}, ids=ids)

    own, of_eight = list(range(N)), [i // 8 for i in range(N)]
    assert keys(seen(5, 30.0, own), seen(0, 0.0, own)) == ["looks/sharpness"], "as if all were independent"
    assert keys(seen(5, 30.0, of_eight), seen(0, 0.0, of_eight)) == []


def test_more_validations_and_more_tests_need_rarer_changes() -> None:
    def rarest(steps: int, tests: int, name: str = "watched", column: str = "ocr", drift: bool = False) -> float:
        config, other = CONFIG | {"trainer": {"steps": steps}}, replace(signal(1, "watched", "x"), chance=1.0)
        tested = replace(signal(1, name, column), drift=drift)
        some = [replace(tested, chance=float(c)) for c in np.geomspace(1e-6, 0.1, 200)]
        return max(s.chance for c in some for s in found_signals([c, *[other] * (tests - 1)], config))

    assert rarest(10, 5) == pytest.approx(0.05 / 10 / 2 / 5, rel=0.1)
    assert rarest(40, 5) == pytest.approx(0.05 / 40 / 2 / 5, rel=0.1)
    assert rarest(10, 10) == pytest.approx(0.05 / 10 / 2 / 10, rel=0.1)
    assert rarest(10, 10, "base", "alignment") == pytest.approx(0.05 / 10 / 2, rel=0.1)
    assert rarest(10, 10, drift=True) == pytest.approx(0.05 / 10, rel=0.1)


def test_a_signal_stays_as_long_as_it_is_suspicious() -> None:
    tested = [replace(signal(8, "base", "alignment"), chance=0.2), replace(signal(8), chance=0.2)]
    assert found_signals(tested, CONFIG) == []
    assert found_signals(tested, CONFIG, ["base/alignment"]) == tested[:1]
    assert found_signals([replace(tested[0], chance=0.3)], CONFIG, ["base/alignment"]) == []


def signal(step: int, name: str = "looks", column: str = "red") -> Signal:
    return Signal(name, column, step, 1.0, 0.5, "it is red", [3], None, 0.001)


def test_a_signal_is_said_when_it_is_new_and_then_seldom(tmp_path: Path) -> None:
    log = GuardLog(tmp_path, 0)
    said = [step for step in (4, 6, 8, 10, 12, 14, 16, 18) if log.add([signal(step)], "warn")]
    assert said == [4, 8, 16]
    assert log.add([signal(18, "watched", "ocr")], "warn")
    rows = read_guard(tmp_path)
    assert [row["step"] for row in rows] == [4, 6, 8, 10, 12, 14, 16, 18, 18]
    assert rows[0] == {
        "step": 4, "signal": "looks", "column": "red", "value": 1.0, "threshold": 0.5, "text": signal(4).sentence,
        "shown": [3], "size": None, "chance": 0.001, "drift": False, "look": False, "action": "warn",
    }  # fmt: skip


def test_a_run_that_goes_back_has_only_the_signals_up_to_there(tmp_path: Path) -> None:
    log = GuardLog(tmp_path, 0)
    for step in (2, 4, 6):
        log.add([signal(step)], "warn")
    with (tmp_path / "guard.jsonl").open("a") as file:
        file.write('{"step": 8, "sig')  # a killed process
    again = GuardLog(tmp_path, 4)
    assert [row["step"] for row in read_guard(tmp_path)] == [2, 4]
    assert not again.add([signal(6)], "warn") and again.add([signal(8)], "warn")
    assert all(json.loads(line) for line in (tmp_path / "guard.jsonl").read_text().splitlines())


def test_going_back_is_a_row_of_the_step_that_the_run_goes_on_from(tmp_path: Path) -> None:
    log = GuardLog(tmp_path, 0)
    log.add([signal(4)], "rollback")
    sentence = GuardLog(tmp_path, 2).rolled_back_row(2, [signal(4), signal(4, "watched", "ocr")], 0.02)
    assert "from step 4 because of looks/red, watched/ocr" in sentence and "kl_coef=0.02" in sentence
    (row,) = read_guard(tmp_path)
    assert (row["step"], row["signal"], row["column"], row["text"]) == (2, "rollback", "from step 4", sentence)
    assert GuardLog(tmp_path, 2) and read_guard(tmp_path) == [row]  # as a resumed run opens it


def test_signals_that_are_ignored_are_named_in_words_that_there_are() -> None:
    config = GuardConfig(ignored=["looks/red", "diversity"])
    assert not config.counts("looks", "red") and not config.counts("diversity", "unlike_own")
    assert config.counts("looks", "blue") and config.counts("watched", "ocr")
    with pytest.raises(ConfigError, match=r"guard\.ignored: there is no signal 'colour', only base, watched"):
        GuardConfig(ignored=["colour"])


# --- Trends

GUARD_COURSE_N = 48
START = np.random.default_rng(0).normal(0.4, 0.1, GUARD_COURSE_N)


def validation_of_guard_course(step: int, gain: float, noise: float = 0.02) -> Validation:
    rewards = START + gain + noise * np.random.default_rng(step).normal(size=GUARD_COURSE_N)
    return Validation(step, [f"p{i}" for i in range(GUARD_COURSE_N)], [float(r) for r in rewards], {}, [], [])


def course(kl: dict[int, float], stuck: dict[int, float] | None = None, groups: float = 8.0) -> TrainingTrends:
    """Validations every four steps; the values hold for the steps up to each."""
    rows: list[dict[str, Any]] = [{"step": 0, "val/reward/mean": 0.4}]
    for step in range(1, 4 * max(len(kl), len(stuck or {})) + 1):
        block = -(-step // 4) * 4
        row: dict[str, Any] = {"step": step}
        row |= {"actor/kl": kl[block]} if block in kl else {}
        row |= {"health/groups": groups, "health/stuck_groups": stuck[block]} if stuck else {}
        rows.append(row | ({"val/reward/mean": 0.5} if step == block else {}))
    return TrainingTrends(rows)


def found(of: TrainingTrends, best: Validation, later: Validation, **more: Any) -> list[Signal]:
    return found_signals(trend_candidates(of, validation_of_guard_course(0, 0.0), best, later, **more), CONFIG)


def test_a_reward_that_falls_while_the_kl_grows_is_a_signal() -> None:
    of = course({4: 0.01, 8: 0.04})
    (signal,) = found(of, validation_of_guard_course(4, 0.2), validation_of_guard_course(8, 0.1))
    assert signal.key == "kl/reward" and signal.step == 8 and len(signal.shown) == 8
    assert signal.value == pytest.approx(-0.1, abs=0.02) and "from 0.01 to 0.04" in signal.text


@pytest.mark.parametrize(("kl", "gain"), [(0.04, 0.2), (0.04, 0.4), (0.005, 0.1)])
def test_a_reward_at_its_end_is_none_and_neither_is_a_fall_back_to_the_base_model(kl: float, gain: float) -> None:
    of = course({4: 0.01, 8: kl})
    assert found(of, validation_of_guard_course(4, 0.2), validation_of_guard_course(8, gain)) == []


def test_without_a_kl_to_one_model_there_is_no_such_signal() -> None:
    best, later = validation_of_guard_course(4, 0.2), validation_of_guard_course(8, 0.1)
    assert found(TrainingTrends([{"step": s} for s in range(9)]), best, later) == []
    assert found(course({4: 0.01, 8: 0.04}), best, later, measures_kl=False) == []


def test_groups_that_no_longer_differ_are_a_signal() -> None:
    of = course({}, {4: 0.0, 8: 1.0, 12: 7.0})
    best = validation_of_guard_course(4, 0.1)
    assert found(of, best, validation_of_guard_course(4, 0.1)) == []  # nothing to compare with yet
    assert found(of, best, validation_of_guard_course(8, 0.1)) == []
    (signal,) = found(of, best, validation_of_guard_course(12, 0.1))
    assert signal.key == "no_signal/groups" and signal.value == pytest.approx(7 / 8)
    assert signal.threshold == 0.0 and signal.chance == pytest.approx(share_chance(0, 32, 28, 32))
    assert found(course({}, {4: 6.0, 8: 6.0}), best, validation_of_guard_course(8, 0.1)) == []  # as in the beginning


def test_a_course_is_the_same_row_by_row() -> None:
    whole, grown = course({4: 0.01, 8: 0.04}), TrainingTrends()
    for step in range(1, 9):
        grown.add({"step": step, "actor/kl": 0.01 if step <= 4 else 0.04})
    grown.validated = [0, 4]
    assert (whole.kl(8), whole.kl(4)) == (grown.kl(8), grown.kl(4)) == (pytest.approx(0.04), pytest.approx(0.01))


def test_the_best_validation_is_the_last_of_the_highest() -> None:
    some = [
        validation_of_guard_course(0, 0.0, 0),
        validation_of_guard_course(4, 0.3, 0),
        validation_of_guard_course(8, 0.3, 0),
        validation_of_guard_course(12, 0.4, 0),
    ]
    best = best_of(some, 12)
    assert best is not None and best.step == 8 and best_of(some, 0) is None


def test_groups_with_one_reward_below_the_best_are_counted() -> None:
    health = Health({})
    row = health.measure({}, True, [[1.0, 1.0], [0.2, 0.2], [0.3, 0.4], [0.5, None]])
    assert row["health/groups"] == 3 and row["health/stuck_groups"] == 1 and row["health/highest_reward"] == 1.0
    health.observe({"step": 1, **row})
    later = health.measure({}, True, [[0.9, 0.9], [0.9, 0.9]])  # all of the step, though not of the run
    assert later["health/stuck_groups"] == 2 and later["health/highest_reward"] == 1.0
    assert "health/groups" not in health.measure({}, True, [[None, None]])

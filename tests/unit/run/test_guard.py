import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drills import more

from gerl.config import GuardConfig
from gerl.errors import ConfigError
from gerl.run.guard import (
    CHANCE,
    GuardLog,
    Signal,
    TrainingTrends,
    _enough_falls,
    _lowest_mean,
    best_of,
    raise_peaks,
    read_guard,
    signals,
    trend_signals,
    watched_columns,
)
from gerl.run.health import Health
from gerl.run.validation import Validation

CONFIG = {"reward": {"scorers": {"mine": {"weight": 1.0}, "other": {"weight": 0.0}}}}
N = 64


def validation(step: int, seed: int = 0, shift: float = 0.0, **columns: Sequence[float]) -> Validation:
    """Rewards of N prompts, and how their images look: the same ones but for `shift`, in deviations of the first."""
    noise = np.random.default_rng(seed).normal(size=(4, N))
    looks = {"sharpness": noise[0] + shift, "red": noise[1], "unlike_others": 5 + noise[2]}
    rewards = list(columns.pop("reward", 0.5 + 0.1 * noise[3]))
    by_scorer: dict[str, list[float | None]] = {"mine": list(rewards), "other": list(0.5 + 0.1 * noise[0])}
    by_scorer |= {name: list(values) for name, values in columns.items()}
    found = {name: [float(value) for value in values] for name, values in looks.items()}
    prompts = [f"prompt {i}" for i in range(N)]
    return Validation(step, prompts, list(rewards), by_scorer, [], [], None, [], found)  # type: ignore[arg-type]


FIRST = validation(0)


def risen(step: int = 5, **columns: Sequence[float]) -> Validation:
    return validation(step, reward=[r + 0.2 for r in FIRST.rewards if r is not None], **columns)


def keys(later: Validation, first: Validation = FIRST, config: Any = CONFIG) -> list[str]:
    return [signal.key for signal in signals(first, later, config)]


def test_a_reward_that_rises_alone_is_no_signal() -> None:
    assert keys(risen()) == [] and keys(FIRST) == []


@more
def test_other_images_of_the_same_kind_are_no_signal() -> None:
    """Chance alone: validations that are no better and no worse, each compared with another one."""
    pairs = [(validation(0, seed), validation(5, 1000 + seed)) for seed in range(100)]
    assert sum(bool(keys(later, first)) for first, later in pairs) <= 1


def test_a_watched_scorer_that_falls_while_the_reward_rises() -> None:
    lower = [v - 0.1 for v in FIRST.by_scorer["other"] if v is not None]
    later = risen(other=lower)
    assert keys(later) == ["watched/other", "disagreement/other"]
    found = signals(FIRST, later, CONFIG)[0]
    assert found.value == pytest.approx(-0.1) and found.threshold <= 0
    assert "fell from 0." in found.text and "while the reward rose from 0." in found.text
    assert keys(validation(5, other=lower)) == []  # the reward did not rise
    held_out = {"reward": {"scorers": {"mine": {"weight": 1.0}, "other": {"weight": 0.0, "during": "validation"}}}}
    assert keys(later, config=held_out) == ["watched/other", "disagreement/other"]
    trained = {"reward": {"scorers": {"mine": {"weight": 1.0}, "other": {"weight": 0.5}}}}
    assert keys(later, config=trained) == []  # it is part of what was asked for


def test_a_few_large_gains_do_not_hide_that_a_watched_scorer_fell_on_most_prompts() -> None:
    known = [v for v in FIRST.by_scorer["other"] if v is not None]
    changed = [v + 3.0 if i < 6 else v - 0.1 for i, v in enumerate(known)]  # higher on average
    assert keys(risen(other=changed)) == ["disagreement/other"]


@pytest.mark.parametrize(("count", "falls"), [(8, None), (10, None), (11, 11), (16, 15), (24, 21), (48, 36)])
def test_falls_and_rises_are_as_rare_as_said_by_the_exact_sign_test(count: int, falls: int | None) -> None:
    assert _enough_falls(count) == falls
    if falls is not None:
        chance = [sum(math.comb(count, k) for k in range(n, count + 1)) / 2**count for n in (falls - 1, falls)]
        assert chance[0] > CHANCE >= chance[1] and pytest.approx(0.0005) == CHANCE


def test_seven_falls_and_a_rise_are_no_disagreement() -> None:
    """Only 8 prompts whose column changed: 3.5 % of such runs would have as many falls."""
    known = [v for v in FIRST.by_scorer["other"] if v is not None]
    assert keys(risen(other=[v - 0.1 if i < 7 else v + 0.1 if i == 7 else v for i, v in enumerate(known)])) == []


def test_the_mean_change_by_chance_is_that_of_random_signs() -> None:
    """Of 12 equal falls, 1 of 4096 signs is as low: the quantile lies next to it."""
    assert -1 < _lowest_mean([-1.0] * 12) <= -10 / 12
    eight = np.random.default_rng(0).uniform(-1, 0, size=8).tolist()
    assert not np.mean(eight) < _lowest_mean(eight) < 0  # 8 falls are 1 of 256; resampling them gave an alarm


def test_a_watched_scorer_that_first_rose_is_compared_with_its_peak() -> None:
    known = [v for v in FIRST.by_scorer["other"] if v is not None]
    peak = risen(5, other=[v + 0.3 for v in known])
    rewards = [r + 0.4 for r in FIRST.rewards if r is not None]
    later = validation(9, reward=rewards, other=[v + 0.1 for v in known])  # above the first validation still
    peaks: dict[str, Validation] = {}
    for one in (FIRST, peak):
        raise_peaks(peaks, one)
    assert keys(later) == [] and peaks["other"] is peak and peaks["mine"] is peak
    (fell, disagree) = signals(FIRST, later, CONFIG, peaks)
    assert (fell.key, disagree.key) == ("watched/other", "disagreement/other")
    assert fell.value == pytest.approx(-0.2) and "at step 5" in fell.text


def test_a_fall_that_is_sure_but_small_beside_the_spread_of_the_first_images_is_no_signal() -> None:
    spread = float(np.std([v for v in FIRST.by_scorer["other"] if v is not None], ddof=1))
    lower = [v - 0.2 * spread for v in FIRST.by_scorer["other"] if v is not None]
    fell, disagree = signals(FIRST, risen(other=lower), CONFIG)
    assert fell.size == pytest.approx(0.2) and disagree.size == pytest.approx(0.2)
    assert signals(FIRST, risen(other=lower), CONFIG, importance=0.5) == []
    lower = [v - 0.6 * spread for v in FIRST.by_scorer["other"] if v is not None]
    assert [s.key for s in signals(FIRST, risen(other=lower), CONFIG, importance=0.5)] == [fell.key, disagree.key]


def test_any_fall_of_a_scorer_that_gave_every_image_the_same_is_important() -> None:
    first = replace(FIRST, by_scorer=FIRST.by_scorer | {"other": [1.0] * N})
    later = risen(other=[1.0 - 0.01 * (i % 2) for i in range(N)])
    found = signals(first, later, CONFIG, importance=10.0)
    assert [signal.key for signal in found] == ["watched/other", "disagreement/other"] and found[0].size is None


def test_further_columns_of_a_trained_scorer_are_watched() -> None:
    columns = ["mine", "mine/exact", "mine/sigma", "other", "other/part"]
    assert watched_columns(CONFIG, columns) == ["mine/exact", "other", "other/part"]


def test_images_that_look_as_hardly_any_did() -> None:
    assert keys(validation(5, shift=1.0)) == []
    (found,) = signals(FIRST, validation(5, shift=4.0), CONFIG)
    assert found.key == "looks/sharpness" and found.value > found.threshold
    assert found.threshold == pytest.approx(np.quantile(FIRST.looks["sharpness"], 0.975))
    assert found.shown == sorted(range(N), key=lambda i: -FIRST.looks["sharpness"][i])[:8]
    assert keys(validation(5, shift=-4.0)) == ["looks/sharpness"]


def test_images_that_became_alike() -> None:
    later = replace(FIRST, step=5, looks=FIRST.looks | {"unlike_others": [0.1] * N})
    assert keys(later) == ["diversity/unlike_others"]


def test_validations_of_other_or_of_few_prompts_are_not_compared() -> None:
    wild = validation(5, shift=9.0)
    assert keys(replace(wild, prompts=["another", *wild.prompts[1:]])) == []
    few = [replace(v, prompts=v.prompts[:4], rewards=v.rewards[:4]) for v in (FIRST, wild)]
    assert keys(few[1], few[0]) == []
    assert keys(wild, replace(FIRST, looks={})) == []  # of an older version


def signal(step: int, name: str = "looks", column: str = "red") -> Signal:
    return Signal(name, column, step, 1.0, 0.5, "it is red", [3])


def test_a_signal_is_said_when_it_is_new_and_then_seldom(tmp_path: Path) -> None:
    log = GuardLog(tmp_path, 0)
    said = [step for step in (4, 6, 8, 10, 12, 14, 16, 18) if log.add([signal(step)], "warn")]
    assert said == [4, 8, 16]
    assert log.add([signal(18, "watched", "ocr")], "warn")
    rows = read_guard(tmp_path)
    assert [row["step"] for row in rows] == [4, 6, 8, 10, 12, 14, 16, 18, 18]
    assert rows[0] == {
        "step": 4, "signal": "looks", "column": "red", "value": 1.0, "threshold": 0.5, "text": "it is red",
        "shown": [3], "size": None, "action": "warn",
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


def test_the_weight_of_the_kl_starts_and_doubles_up_to_its_most() -> None:
    guard = GuardConfig(action="kl", kl_start=0.01, kl_most=0.03)
    weights = [0.0]
    for _ in range(4):
        weights.append(guard.raised(weights[-1]))
    assert weights == pytest.approx([0.0, 0.01, 0.02, 0.03, 0.03]) and guard.raised(5.0) == 5.0
    with pytest.raises(ConfigError, match=r"guard\.kl_start=0\.5: it exceeds the limit guard\.kl_most=0\.1"):
        GuardConfig(kl_start=0.5, kl_most=0.1)


def test_signals_that_are_ignored_are_named_in_words_that_there_are() -> None:
    config = GuardConfig(ignored=["looks/red", "diversity"])
    assert not config.counts("looks", "red") and not config.counts("diversity", "unlike_own")
    assert config.counts("looks", "blue") and config.counts("watched", "ocr")
    with pytest.raises(ConfigError, match=r"guard\.ignored: there is no signal 'colour', only watched"):
        GuardConfig(ignored=["colour"])


def test_prompts_are_resampled_where_there_are_several_images_of_each() -> None:
    """Eight images of a prompt that look alike are one observation: few prompts make no certain change."""

    def seen(step: int, shift: float, ids: list[int]) -> Validation:
        few = validation(step)
        sharpness = [float(i % 8) + shift * (i // 8 in (0, 1, 2)) for i in range(N)]  # three of eight prompts
        return replace(few, looks={"sharpness": sharpness}, ids=ids)

    own, of_eight = list(range(N)), [i // 8 for i in range(N)]
    assert keys(seen(5, 30.0, own), seen(0, 0.0, own)) == ["looks/sharpness"], "as if all were independent"
    assert keys(seen(5, 30.0, of_eight), seen(0, 0.0, of_eight)) == []


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


def found(of: TrainingTrends, best: Validation, later: Validation, **more: Any) -> list[Any]:
    return trend_signals(of, validation_of_guard_course(0, 0.0), best, later, **more)


def test_a_kl_that_grows_without_any_gain_is_a_signal() -> None:
    of = course({4: 0.01, 8: 0.04})
    (signal,) = found(of, validation_of_guard_course(4, 0.2), validation_of_guard_course(8, 0.2))
    assert signal.key == "kl/reward" and signal.step == 8 and len(signal.shown) == 8
    assert signal.threshold == pytest.approx(0.2, abs=0.02)  # the KL is four times as large: twice the gain in all
    assert abs(signal.value) < 0.02 and "grew from 0.01 to 0.04 since step 4" in signal.text


def test_a_gain_as_the_root_of_the_kl_is_none_and_neither_is_a_small_growth() -> None:
    of = course({4: 0.01, 8: 0.04})
    assert found(of, validation_of_guard_course(4, 0.2), validation_of_guard_course(8, 0.4)) == []
    assert (
        found(course({4: 0.01, 8: 0.0105}), validation_of_guard_course(4, 0.2), validation_of_guard_course(8, 0.2))
        == []
    )
    assert (
        found(course({4: 0.01, 8: 0.005}), validation_of_guard_course(4, 0.2), validation_of_guard_course(8, 0.1)) == []
    )  # it came nearer
    assert (
        found(course({4: 0.01, 8: 0.04}), validation_of_guard_course(4, 0.0), validation_of_guard_course(8, 0.0)) == []
    )  # there was no gain before


def test_without_a_kl_to_one_model_there_is_no_such_signal() -> None:
    best, later = validation_of_guard_course(4, 0.2), validation_of_guard_course(8, 0.2)
    assert found(TrainingTrends([{"step": s} for s in range(9)]), best, later) == []
    assert found(course({4: 0.01, 8: 0.04}), best, later, measures_kl=False) == []
    assert (
        found(course({4: 0.01, 8: 0.04}), validation_of_guard_course(0, 0.0), later) == []
    )  # the first validation is the best


def test_chance_alone_gives_hardly_any_signal() -> None:
    """The root law holds, and every validation has noise of its own."""
    alarms = 0
    for seed in range(200):
        best, later = (
            validation_of_guard_course(4 + 1000 * seed, 0.2, 0.1),
            validation_of_guard_course(8 + 1000 * seed, 0.2 * 1.5, 0.1),
        )
        of = TrainingTrends([{"step": 1, "actor/kl": 0.01}, {"step": later.step, "actor/kl": 0.01 * 1.5**2}])
        of.validated = [0, best.step]
        alarms += bool(trend_signals(of, validation_of_guard_course(0, 0.0, 0.1), best, later))
    assert alarms <= 1


def test_groups_that_no_longer_differ_are_a_signal() -> None:
    of = course({}, {4: 0.0, 8: 1.0, 12: 7.0})
    assert (
        found(of, validation_of_guard_course(4, 0.1), validation_of_guard_course(4, 0.1)) == []
    )  # nothing to compare with yet
    assert found(of, validation_of_guard_course(4, 0.1), validation_of_guard_course(8, 0.1)) == []
    (signal,) = found(of, validation_of_guard_course(4, 0.1), validation_of_guard_course(12, 0.1))
    assert signal.key == "no_signal/groups" and signal.value == pytest.approx(7 / 8)
    assert 0 < signal.threshold == pytest.approx(1 - 0.0005 ** (1 / 32))  # 99.9 % of none in 32
    assert (
        found(course({}, {4: 6.0, 8: 6.0}), validation_of_guard_course(4, 0.1), validation_of_guard_course(8, 0.1))
        == []
    )  # as in the beginning


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

"""The sentence about what the guard can and cannot see."""

import pytest

from gerl.run.guard import Levels, fewest_changes, guard_scope, levels

CONFIG = {"trainer": {"steps": 40}, "validation": {"every": 10}, "guard": {"false_alarms": 0.05}}


def scope(watched: list[str], action: str, held_out: int, judge: bool = False, fewest: int = 11) -> str:
    return guard_scope(watched, action, held_out, judge, fewest)


def test_the_fewest_changed_prompts_are_those_of_the_sign_test() -> None:
    fewest = fewest_changes(CONFIG, 2)
    level = levels(CONFIG, 6)
    assert 0.5**fewest <= level.others < 0.5 ** (fewest - 1)
    looks = 6  # after steps 2, 4, 8, 15, 25 and 35, besides four validations
    of_alignment, of_others = 0.05 / 2 / (4 + looks), 0.05 / 2 / 4 / 6
    assert level == Levels(pytest.approx(of_alignment), pytest.approx(of_others), pytest.approx(0.05 / 4))


@pytest.mark.parametrize("judge", [False, True])
@pytest.mark.parametrize("watched", [[], ["ocr"]])
def test_a_guard_that_compares_nothing_sees_nothing(watched: list[str], judge: bool) -> None:
    assert scope(watched, "off", 48, judge).startswith("the guard is off (guard.action=off)")
    assert scope(watched, "warn", 0, judge).endswith("and there are none (validation.data)")
    few = scope(watched, "stop", 7, judge)
    assert "needs 8 held-out prompts" in few and few.endswith(
        "there are only 7 (validation.data, validation.share, validation.max_prompts)"
    )
    assert "the guard sees" in scope(watched, "warn", 8, judge)


def test_what_it_sees_depends_on_what_is_watched_and_judged() -> None:
    assert scope(["ocr", "ocr/exact"], "warn", 48) == (
        "the guard sees a fall of ocr, ocr/exact while the reward rises, and drifts in look and diversity; it cannot "
        "see what none of these measures"
    )
    assert scope([], "warn", 48) == (
        "no scorer is watched (+reward.scorers.NAME.weight=0): the guard sees drifts in look and diversity; it cannot "
        "see whether images still match their prompts"
    )
    judged = scope([], "warn", 48, judge=True)
    assert "no longer match their prompts" in judged and "see what none of these measures" in judged
    both = scope(["ocr"], "warn", 48, judge=True)
    assert "a fall of ocr" in both and "the base model finds unlikely" in both and "no scorer" not in both


def test_a_watched_scorer_needs_more_prompts_than_the_looks() -> None:
    few = scope(["ocr"], "warn", 10)
    assert "fall of" not in few and "still match their prompts; to compare ocr it needs 11" in few
    assert "fall of ocr" in scope(["ocr"], "warn", 11)


def test_it_names_the_steps_after_which_the_base_model_looks() -> None:
    sentence = guard_scope(["ocr"], "warn", 48, True, 11, [2, 4, 9])
    assert sentence.endswith("also looks at some images after steps 2, 4, 9") and "steps" not in scope([], "warn", 48)

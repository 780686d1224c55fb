from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gerl.config import Config, RewardConfig, ScorerConfig, ValidationConfig
from gerl.errors import ConfigError, DataError, RewardError
from gerl.protocol import Prompt, Sample, ScorerFailure
from gerl.rewards.checks import check_named, check_reward, read_prompts
from gerl.trainer.step import usable_groups

PROMPTS = [Prompt(0, 'a "B"'), Prompt(1, "a cat"), Prompt(2, "a dog")]
SAMPLES = [Sample(prompt, index, seed=0, step=7) for index in (0, 1) for prompt in PROMPTS]

STOP, DROP = (RewardConfig({"judge": ScorerConfig()}, on_error) for on_error in ("stop", "drop_group"))


def outcome(*failed: int) -> tuple[list[float | None], list[list[ScorerFailure]]]:
    totals = [None if i in failed else float(i) for i in range(len(SAMPLES))]
    return totals, [[ScorerFailure("judge", f"broke on {i}")] if i in failed else [] for i in range(len(SAMPLES))]


def test_everything_is_kept_without_failures() -> None:
    assert usable_groups(SAMPLES, *outcome(), STOP) == ([True] * 6, [])
    watched = [[ScorerFailure("watched", "down")]] * 6
    assert usable_groups(SAMPLES, outcome()[0], watched, STOP) == ([True] * 6, [])


def test_a_failed_sample_drops_its_group_and_says_so_once() -> None:
    keep, report = usable_groups(SAMPLES, *outcome(1, 4), DROP)
    assert keep == [True, False, True, True, False, True]
    assert report == ["group dropped: scorer judge has no score for image 0 of 'a cat': broke on 1"]


def test_stop_names_scorer_prompt_and_reason() -> None:
    with pytest.raises(RewardError, match=r"scorer judge has no score for image 1 of 'a dog': broke on 5.*on_error="):
        usable_groups(SAMPLES, *outcome(5), STOP)


def test_a_step_without_any_group_stops_the_run() -> None:
    with pytest.raises(RewardError, match=r"no group of step 7 has all its scores.*broke on 0"):
        usable_groups(SAMPLES, *outcome(0, 1, 5), replace(DROP, max_failed=1.0))


def test_check_reward_names_the_prompt_and_loads_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import rapidocr

    def refuse(**kwargs: Any) -> None:
        raise AssertionError("checking prompts needs no model")

    monkeypatch.setattr(rapidocr, "RapidOCR", refuse)
    config = RewardConfig({"jpeg_compressibility": ScorerConfig(), "ocr": ScorerConfig()})
    check_reward(config, PROMPTS[:1])
    with pytest.raises(DataError, match="prompt 1: 'a cat' has no text"):
        check_reward(config, PROMPTS)


def test_check_reward_refuses_what_cannot_be_built() -> None:
    with pytest.raises(RewardError, match="no such scorer"):
        check_reward(RewardConfig({"beauty": ScorerConfig()}), PROMPTS)


def test_too_many_failures_stop_the_run_with_numbers() -> None:
    assert not all(usable_groups(SAMPLES, *outcome(0, 1, 4), DROP)[0])  # half of them
    with pytest.raises(RewardError, match=r"67% .*reward\.max_failed=0\.5"):
        usable_groups(SAMPLES, *outcome(0, 1, 3, 4), DROP)


def test_no_reward_is_answered_by_three_and_never_assumed() -> None:
    with pytest.raises(ConfigError) as raised:
        check_named(RewardConfig())
    assert all(name in str(raised.value) for name in ("pickscore", "ocr", "path: my_reward.py"))
    check_named(RewardConfig({"sharpness": ScorerConfig()}))


def test_prompts_are_checked_by_the_scorers_that_look_at_them(tmp_path: Path) -> None:
    for name, text in (("signs.txt", 'a "B"'), ("cats.txt", "a cat")):
        (tmp_path / name).write_text(text)
    scorers = {"sharpness": ScorerConfig(), "ocr": ScorerConfig(0, during="validation")}
    signs = str(tmp_path / "signs.txt")
    config = Config(reward=RewardConfig(scorers), validation=ValidationConfig(data=signs))
    assert read_prompts(config, "data.train", str(tmp_path / "cats.txt"))[0].text == "a cat"
    assert read_prompts(config, "validation.data", signs)
    for key in ("validation.data", "prompts"):
        with pytest.raises(DataError, match="'a cat' has no text"):
            read_prompts(config, key, str(tmp_path / "cats.txt"))


def test_prompts_are_checked_by_the_scorers_that_apply_to_them() -> None:
    signs = {"ocr": ScorerConfig(data_sources=["signs"])}
    rows = [Prompt(0, 'a "B"', {"data_source": "signs"}), Prompt(1, "a cat", {"data_source": "photos"})]
    with pytest.raises(DataError, match=r"prompt 1: 'a cat' has the data_source 'photos', .*have signs"):
        check_reward(RewardConfig(signs), rows)
    check_reward(RewardConfig({**signs, "sharpness": ScorerConfig()}), rows)

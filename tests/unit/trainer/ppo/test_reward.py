import sys
from pathlib import Path
from typing import Any

import pytest

from gerl.config import RewardConfig, ScorerConfig
from gerl.errors import DataError, RewardError
from gerl.protocol import Prompt, Sample, ScorerFailure
from gerl.trainer.ppo.reward import check_reward, usable_groups, with_absolute_paths

PROMPTS = [Prompt(0, 'a "B"'), Prompt(1, "a cat"), Prompt(2, "a dog")]
SAMPLES = [Sample(prompt, index, seed=0, step=7) for index in (0, 1) for prompt in PROMPTS]


def outcome(*failed: int) -> tuple[list[float | None], list[list[ScorerFailure]]]:
    totals = [None if i in failed else float(i) for i in range(len(SAMPLES))]
    return totals, [[ScorerFailure("judge", f"broke on {i}")] if i in failed else [] for i in range(len(SAMPLES))]


def test_everything_is_kept_without_failures() -> None:
    assert usable_groups(SAMPLES, *outcome(), "stop") == ([True] * 6, [])
    watched = [[ScorerFailure("watched", "down")]] * 6
    assert usable_groups(SAMPLES, outcome()[0], watched, "stop") == ([True] * 6, [])


def test_a_failed_sample_drops_its_group_and_says_so_once() -> None:
    keep, report = usable_groups(SAMPLES, *outcome(1, 4), "drop_group")
    assert keep == [True, False, True, True, False, True]
    assert report == ["group dropped: scorer judge has no score for image 0 of 'a cat': broke on 1"]


def test_stop_names_scorer_prompt_and_reason() -> None:
    with pytest.raises(RewardError, match=r"scorer judge has no score for image 1 of 'a dog': broke on 5.*on_error="):
        usable_groups(SAMPLES, *outcome(5), "stop")


def test_a_step_without_any_group_stops_the_run() -> None:
    with pytest.raises(RewardError, match=r"no group of step 7 has all its scores.*broke on 0"):
        usable_groups(SAMPLES, *outcome(0, 1, 5), "drop_group")


def test_check_reward_names_the_prompt_and_loads_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import rapidocr

    def refuse(**kwargs: Any) -> None:
        raise AssertionError("checking prompts needs no model")

    monkeypatch.setattr(rapidocr, "RapidOCR", refuse)
    config = RewardConfig({"jpeg_compressibility": ScorerConfig(), "ocr": ScorerConfig()})
    check_reward(config, PROMPTS[:1])
    with pytest.raises(DataError, match="prompt 1: 'a cat' has no text"):
        check_reward(config, PROMPTS)


def test_check_reward_refuses_what_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RewardError, match="no such scorer"):
        check_reward(RewardConfig({"beauty": ScorerConfig()}), PROMPTS)
    with pytest.raises(RewardError, match="there is no Python file"):
        check_reward(RewardConfig({"mine": ScorerConfig(path=str(tmp_path / "no.py"))}), PROMPTS)
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(RewardError, match=r"gerl\[ocr\]"):
        check_reward(RewardConfig({"ocr": ScorerConfig()}), PROMPTS)


def test_custom_scorers_get_absolute_paths_and_nothing_else_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = RewardConfig({"mine": ScorerConfig(path="my.py", weight=0.5), "ocr": ScorerConfig()}, retries=3)
    changed = with_absolute_paths(config)
    assert changed.scorers["mine"] == ScorerConfig(path=str(tmp_path / "my.py"), weight=0.5)
    assert changed.scorers["ocr"] == ScorerConfig() and changed.retries == 3

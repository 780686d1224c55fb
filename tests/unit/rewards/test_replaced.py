"""Scorers that a reward replaces: which of them are watched, and the sentence about them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from gerl.config import Config, RewardConfig, ScorerConfig, ValidationConfig
from gerl.protocol import Prompt
from gerl.rewards.replaced import keep_watched

SIGNS = [Prompt(0, 'a red sign that reads "OPEN"'), Prompt(1, 'a blue sign that reads "42"')]
CATS = [Prompt(2, "a cat")]
MINE = Config(reward=RewardConfig({"mine": ScorerConfig(path="mine.py")}))
WATCHED = {"weight": 0.0, "during": "validation"}


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_without_replaced_scorers_nothing_changes() -> None:
    assert keep_watched(MINE, {}, SIGNS, SIGNS) == (MINE, "")


def test_what_was_rewarded_is_watched_in_validation_with_its_other_keys() -> None:
    replaced = {"ocr": ScorerConfig(2.0, kwargs={"match": "contains"}, replicas=2), "colour": ScorerConfig(0.0)}
    config, said = keep_watched(MINE, replaced, SIGNS, SIGNS)
    assert config.reward.scorers == {
        **MINE.reward.scorers,
        "ocr": ScorerConfig(kwargs={"match": "contains"}, replicas=2, **WATCHED),
        "colour": ScorerConfig(**WATCHED),
    }
    assert said == (
        "ocr and colour of the experiment stay watched in validation, unless you remove them with "
        "'~reward.scorers.ocr' '~reward.scorers.colour'"
    )


@pytest.mark.parametrize(("prompts", "held_out"), [(CATS, SIGNS), (SIGNS, CATS)])
def test_a_scorer_that_cannot_score_a_prompt_is_not_watched(prompts: list[Prompt], held_out: list[Prompt]) -> None:
    replaced = {"ocr": ScorerConfig(), "colour": ScorerConfig()}
    config, said = keep_watched(MINE, replaced, prompts, held_out)
    assert list(config.reward.scorers) == ["mine", "colour"]
    found = dict(sentence.split(" of the experiment ", 1) for sentence in said.split("; "))
    assert found["colour"] == ("stays watched in validation, unless you remove it with '~reward.scorers.colour'")
    assert found["ocr"].startswith("is not watched: prompt 2: 'a cat' has no text")


@pytest.mark.parametrize(
    ("name", "scorer", "held_out", "why"),
    [
        ("ocr", ScorerConfig(data_sources=["pages"]), SIGNS, "it scores none of the held-out prompts"),
        ("ocr", ScorerConfig(kwargs={"backend": "paddleocr"}), SIGNS, "what backend=paddleocr needs is not on this"),
        ("ocr", ScorerConfig(env={"uv": ["rapidocr"]}), SIGNS, "it may need a service or a download"),
        ("ocr", ScorerConfig(path="mine.py"), SIGNS, "it may need a service or a download"),
        ("ocr", ScorerConfig(kwargs={"thread": 2}), SIGNS, "reward.scorers.ocr.kwargs: thread"),
        ("vlm_judge", ScorerConfig(), SIGNS, "it may need a service or a download"),
        ("clipscore", ScorerConfig(), SIGNS, "openai/clip-vit-large-patch14 is not on this machine"),
    ],
)
def test_a_scorer_that_could_make_the_run_fail_or_download_is_not_watched(
    name: str, scorer: ScorerConfig, held_out: Sequence[Prompt], why: str
) -> None:
    config, said = keep_watched(MINE, {name: scorer}, SIGNS, held_out)
    assert config == MINE
    assert said.startswith(f"{name} of the experiment is not watched: {why}")


def test_scorers_with_the_same_reason_share_a_sentence() -> None:
    replaced = {"ocr": ScorerConfig(), "colour": ScorerConfig()}
    said = "ocr and colour of the experiment are not watched: there are no held-out prompts"
    assert keep_watched(MINE, replaced, SIGNS, []) == (MINE, said)


def test_a_share_of_a_gpu_is_taken_only_if_the_reward_takes_none() -> None:
    replaced = {"colour": ScorerConfig(gpus=0.1)}
    assert keep_watched(MINE, replaced, SIGNS, SIGNS)[0].reward.scorers["colour"].gpus == 0.1
    large = replace(MINE, reward=RewardConfig({"mine": ScorerConfig(path="mine.py", gpus=0.25)}))
    config, said = keep_watched(large, replaced, SIGNS, SIGNS)
    assert config == large and "a GPU may not have room for both" in said


def test_no_scorer_is_watched_that_the_configuration_refuses() -> None:
    without = replace(MINE, validation=ValidationConfig(data=None))
    config, said = keep_watched(without, {"ocr": ScorerConfig()}, SIGNS, SIGNS)
    assert config == without and "reward.scorers.ocr.during=validation" in said

import logging
import re
import socket
import sys
from typing import Any

import pytest
from PIL import Image, ImageDraw, ImageFont

from gerl.config import ScorerConfig
from gerl.errors import DataError, RewardError
from gerl.protocol import Prompt
from gerl.utils.reward_score import build_scorer
from gerl.utils.reward_score.ocr import OcrScorer, text_reward


def sign(text: str, width: int = 64, height: int = 32, size: int = 20) -> Image.Image:
    image = Image.new("RGB", (width, height), (30, 70, 190))
    font = ImageFont.load_default(size)
    ImageDraw.Draw(image).text((width / 2, height / 2), text, font=font, fill=(250, 250, 248), anchor="mm")
    return image


@pytest.mark.parametrize(
    ("recognised", "target", "reward"),
    [
        ("HELLO world", "Hello World", 1.0),
        ("xxHELLO worldxx", "Hello World", 1.0),
        ("he l\nlo", "Hello", 1.0),
        ("helo", "Hello", 0.8),
        ("", "Hello", 0.0),
        ("something far too long", "abc", 0.0),
        ("abxd", "abcd", 0.75),
    ],
)
def test_text_reward_cases(recognised: str, target: str, reward: float) -> None:
    assert text_reward(recognised, target) == pytest.approx(reward)


def test_reads_signs_offline_and_quietly(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the OCR model must come from the wheel")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    images = [sign("482"), sign("STOP"), sign("482"), Image.new("RGB", (64, 32)), sign("7").convert("L")]
    prompts = ['a sign that reads "482"', "a sign", "a “481” sign", 'a "B"', 'a "7"']
    metadata: list[dict[str, Any]] = [{}, {"text": "stop"}, {}, {}, {"text": None}]
    scores = OcrScorer()(images, prompts, metadata)
    assert scores == pytest.approx([1.0, 1.0, 2 / 3, 0.0, 1.0])
    assert (root.level, list(root.handlers)) == before
    assert capfd.readouterr() == ("", "")


def test_detect_joins_the_lines_of_a_page() -> None:
    page = Image.new("RGB", (320, 240), "white")
    for y, text in ((70, "HELLO"), (170, "WORLD")):
        ImageDraw.Draw(page).text((160, y), text, font=ImageFont.load_default(40), fill="black", anchor="mm")
    scorer = OcrScorer(detect=True)
    assert scorer.read(page) == "HELLOWORLD"
    assert scorer.read(Image.new("RGB", (320, 240), "white")) == ""


def test_target_metadata_goes_before_quotes() -> None:
    scorer = OcrScorer(metadata_key="sign")
    assert scorer.target('"A" and "B"', {"sign": 482}) == "482"
    assert scorer.target('"A" and "B"', {"text": "C"}) == "A"


@pytest.mark.parametrize("prompt", [Prompt(3, "a cat"), Prompt(3, 'a "" sign "A"'), Prompt(3, 'a "B"', {"text": " "})])
def test_prompt_without_target_is_refused(prompt: Prompt) -> None:
    with pytest.raises(DataError, match=r"prompt 3: .* has no text for the ocr scorer .*'text'"):
        OcrScorer().check_prompts([Prompt(0, 'a "B"'), prompt])
    with pytest.raises(DataError, match="has no text"):
        OcrScorer()([sign("B")], [prompt.text], [prompt.metadata])


@pytest.mark.parametrize(
    ("kwargs", "message"), [({"thread": 1}, "thread=1 is wrong"), ({"threads": 0}, "threads=0 is wrong")]
)
def test_bad_kwargs_are_named(kwargs: dict[str, int], message: str) -> None:
    with pytest.raises(RewardError, match=re.escape(f"reward.scorers.ocr.kwargs: {message}")) as error:
        build_scorer("ocr", ScorerConfig(kwargs=kwargs))
    assert "ocr takes threads, metadata_key, detect, min_width" in str(error.value)


def test_unknown_scorer_lists_names() -> None:
    with pytest.raises(RewardError, match=r"only ocr, jpeg_.*reward\.scorers\.orc\.path"):
        build_scorer("orc", ScorerConfig())


def test_scorer_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(RewardError, match=r"rapidocr.*pip install 'gerl\[ocr\]'"):
        build_scorer("ocr", ScorerConfig())

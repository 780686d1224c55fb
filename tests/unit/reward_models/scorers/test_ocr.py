import logging
import socket
import sys
import types
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from gerl.errors import DataError, RewardError
from gerl.protocol import Prompt
from reward_models.scorers.ocr import OcrScorer, is_exact, normalised, paddle_text, text_reward, video_reward


def sign(text: str, width: int = 64, height: int = 32, size: int = 20) -> Image.Image:
    image = Image.new("RGB", (width, height), (30, 70, 190))
    font = ImageFont.load_default(size)
    ImageDraw.Draw(image).text((width / 2, height / 2), text, font=font, fill=(250, 250, 248), anchor="mm")
    return image


@pytest.mark.parametrize(
    ("recognised", "target", "reward", "contains"),
    [
        ("HELLO world", "Hello World", 1.0, 1.0),
        ("xxHELLO worldxx", "Hello World", 0.6, 1.0),  # all that is read counts, also what surrounds the target
        ("135,", "35", 0.0, 1.0),
        ("he l\nlo", "Hello", 1.0, 1.0),
        ("hello\nworld", "Hello World", 1.0, 1.0),
        ("helo", "Hello", 0.8, 0.8),
        ("", "Hello", 0.0, 0.0),
        ("something far too long", "abc", 0.0, 0.0),
        ("abxd", "abcd", 0.75, 0.75),
        ("STOP!", "stop", 0.75, 1.0),  # punctuation counts
    ],
)
def test_text_reward_cases(recognised: str, target: str, reward: float, contains: float) -> None:
    assert text_reward(recognised, target) == pytest.approx(reward)
    assert text_reward(recognised, target, "contains") == pytest.approx(contains)


@given(st.text(max_size=8), st.text(min_size=1, max_size=6).filter(normalised))
def test_the_reward_is_1_exactly_where_the_target_is_read(recognised: str, target: str) -> None:
    reward = text_reward(recognised, target)
    assert 0 <= reward <= text_reward(recognised, target, "contains") <= 1
    assert (reward == 1) == is_exact(recognised, target)


# a text of each language as prompts have it: in its quotes, with its apostrophes, dashes, ligatures and invisible signs
LANGUAGES = {
    "English": "“DON’T WALK – 24/7”",
    "German": "„Straße geöffnet“",
    "French": "«\u202fL’été, c’est ouvert\u202f»",
    "Spanish": "«¿Está abierto?»",
    "Portuguese": "“Não há pão”",
    "Italian": "«C’è il caffè»",
    "Dutch": "„ĳs té koop”",
    "Swedish": "”Öppet på lördag”",
    "Polish": "„Zażółć gęślą jaźń”",
    "Czech": "„Žluťoučký kůň”",
    "Turkish": "“İyi günler ışık”",
    "Vietnamese": "“Mở cửa ngày mới”",
    "Greek": "«ΟΔΟΣ ανοιχτό ΐ»",
    "Russian": "«Ёлка – открыто й»",
    "Ukrainian": "«З’їзд відчинено»",
    "Arabic": "«مفتوح\u200f الآن»",
    "Hebrew": "”פתוח – שָׁלוֹם”",
    "Hindi": "“खुला क़िला\u200d”",
    "Japanese": "「ガラス営業中」",
    "Korean": "『영업 중』",
}


def test_a_perfect_picture_scores_1_in_20_languages() -> None:
    wrong, scorer = [], OcrScorer()
    for language, quoted in LANGUAGES.items():
        plain = quoted[1:-1].replace("’", "'").replace("–", "-").strip("\u202f")
        for form in ("NFC", "NFD", "NFKC", "NFKD"):
            target = scorer.target(f"a sign: {unicodedata.normalize(form, quoted)}", {})
            for read in (plain, plain.replace("\u200f", "").replace("\u200d", ""), target):
                if text_reward(read, target) != 1 or not is_exact(read, target):
                    wrong.append((language, form, read, target))
    assert len(LANGUAGES) == 20 and not wrong


def test_the_strict_form_compares_code_points() -> None:
    assert text_reward("don't", "don’t") == 1 and text_reward("don't", "don’t", strict=True) == pytest.approx(0.8)
    assert OcrScorer(strict=True)([sign("IT'S")], ["“IT’S”"], [{}])["exact"] == [0.0]
    assert OcrScorer()([sign("IT'S")], ["“IT’S”"], [{}])["exact"] == [1.0]


def test_the_log_says_what_is_looked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    OcrScorer().check_prompts([Prompt(1, 'a "B"'), Prompt(2, "a sign", {"text": "C"})])
    assert [r.levelname for r in caplog.records] == ["INFO"] and "1 prompts" in caplog.text and "'B'" in caplog.text
    assert "ambiguous" not in caplog.text
    caplog.clear()
    OcrScorer().check_prompts([Prompt(1, 'a "B"'), Prompt(7, '"X" and "Y"')])
    (record,) = caplog.records
    assert record.levelname == "WARNING" and all(
        word in caplog.text for word in ("prompt 7", "'X'", "1 of them", "'text'")
    )


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
    assert list(scores) == ["ocr", "exact"]
    assert scores["ocr"] == pytest.approx([1.0, 1.0, 2 / 3, 0.0, 1.0])
    assert scores["exact"] == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert (root.level, list(root.handlers)) == before
    assert capfd.readouterr() == ("", "")


def test_a_sign_with_more_than_the_target_is_not_exact() -> None:
    images = [sign("482"), sign("4820"), sign("4821")]
    prompts = ['"482"'] * 3
    assert OcrScorer()(images, prompts, [{}] * 3) == {"ocr": pytest.approx([1, 2 / 3, 2 / 3]), "exact": [1, 0, 0]}
    assert OcrScorer(match="contains")(images, prompts, [{}] * 3) == {"ocr": [1, 1, 1], "exact": [1, 0, 0]}


def test_detect_joins_the_lines_of_a_page() -> None:
    page = Image.new("RGB", (320, 240), "white")
    for y, text in ((70, "HELLO"), (170, "WORLD")):
        ImageDraw.Draw(page).text((160, y), text, font=ImageFont.load_default(40), fill="black", anchor="mm")
    scorer = OcrScorer(detect=True)
    assert scorer.read(page) == "HELLOWORLD"
    assert scorer.read(Image.new("RGB", (320, 240), "white")) == ""
    targets = ["hello\nWorld", "Hello World", "world"]
    assert scorer([page] * 3, targets, [{"text": text} for text in targets]) == {
        "ocr": pytest.approx([1, 1, 0]),  # of the last, five other letters are as many as it has
        "exact": [1, 1, 0],
    }


def test_target_metadata_goes_before_quotes() -> None:
    scorer = OcrScorer(metadata_key="sign")
    assert scorer.target('"A" and "B"', {"sign": 482}) == "482"
    assert scorer.target('"A" and "B"', {"text": "C"}) == "A"


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ('a sign that reads "A B"', "A B"),
        ("a sign that reads “A B”", "A B"),
        ("ein Schild mit „A B“", "A B"),
        ("tabliczka „A B”", "A B"),
        ("un panneau « A B »", "A B"),
        ("ein Schild mit »A B«", "A B"),
        ("en skylt ”A B”", "A B"),
        ("a sign that reads ‘A B’", "A B"),
        ("ein Schild mit ‚A B‘.", "A B"),
        ("‘don’t walk’ on a sign", "don’t walk"),
        ('“say "hi"” on a sign', 'say "hi"'),
        ("the dogs’ sign ‘A’", "A"),
        ("John’s “A” and ‘B’", "A"),
        ("the ‘old’ sign reads “A”", "A"),
        ('"A" and “B”', "A"),
        ("“A” and « B »", "A"),
        # no pair
        ("John’s sign and the dogs’ house", ""),
        ("rock ’n’ roll", ""),
        ("the ’90s, John’s", ""),
        ("a sign ‘A", ""),
        ("a sign that reads 'OPEN'", ""),
        ('6" tall', ""),
        ('a sign "A”', ""),
        ("a sign “A", ""),
        ("a sign ”A“", ""),
    ],
)
def test_the_target_stands_in_a_pair_of_quotes(prompt: str, target: str) -> None:
    if target:
        OcrScorer().check_prompts([Prompt(0, prompt)])
        assert OcrScorer().target(prompt, {}) == target
    else:
        with pytest.raises(DataError, match="has no text for the ocr scorer"):
            OcrScorer().check_prompts([Prompt(0, prompt)])


@pytest.mark.parametrize("prompt", [Prompt(3, "a cat"), Prompt(3, 'a "" sign "A"'), Prompt(3, 'a "B"', {"text": " "})])
def test_prompt_without_target_is_refused(prompt: Prompt) -> None:
    with pytest.raises(DataError, match=r"prompt 3: .* has no text for the ocr scorer .*'text'"):
        OcrScorer().check_prompts([Prompt(0, 'a "B"'), prompt])
    with pytest.raises(DataError, match="has no text"):
        OcrScorer()([sign("B")], [prompt.text], [prompt.metadata])


@pytest.mark.parametrize(
    ("texts", "reward"),
    [
        (["stop"], 1.0),
        (["STOP here"], 0.0),  # 4 characters too many of 4
        (["stops"], 0.75),
        (["st", "", "stop", "other words"], 0.75),  # the mean of 0.5 and 1
        (["", "other words"], 0.0),
    ],
)
def test_video_reward_is_the_mean_over_frames_with_some_of_the_text(texts: list[str], reward: float) -> None:
    assert video_reward(texts, "S top") == pytest.approx(reward)


def test_every_fourth_frame_of_a_video_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    video = [Image.new("RGB", (8, 8), (i, i, i)) for i in range(10)]
    texts, frames = iter(["482", "4", "", "x482x"]), []
    monkeypatch.setattr(OcrScorer, "read", lambda _, image: frames.append(image) or next(texts))
    scores = OcrScorer(match="contains")([video, video[5]], ['"482"', '"482"'], [{}, {}])
    assert scores == {"ocr": pytest.approx([(1 + 1 / 3) / 2, 1.0]), "exact": pytest.approx([1 / 3, 0])}
    assert frames == [video[0], video[4], video[8], video[5]]


def test_a_video_is_read_by_the_real_model() -> None:
    scores = OcrScorer()([[sign("482")] * 4 + [sign("481")]], ['"482"'], [{}])
    assert scores == {"ocr": pytest.approx([5 / 6]), "exact": [0.5]}


def test_a_video_without_frames_is_refused() -> None:
    with pytest.raises(RewardError, match="video without frames"):
        OcrScorer()([[]], ['"482"'], [{}])


def test_text_of_paddleocr_results() -> None:
    # Of the keys of a result of PaddleOCR 3's pipeline, and of its recogniser.
    page = {"input_path": None, "dt_polys": [np.zeros((4, 2), np.int16)] * 2, "rec_texts": ["HELLO", "WORLD"]}
    page |= {"rec_scores": [0.99, 0.98], "rec_boxes": np.zeros((2, 4), np.int16), "text_type": "general"}
    line = {"input_path": None, "page_index": None, "rec_text": "482", "rec_score": 0.99, "vis_font": None}
    results = ([page], [line], [page | {"rec_texts": []}], [])
    assert list(map(paddle_text, results)) == ["HELLOWORLD", "482", "", ""]
    with pytest.raises(RewardError, match=r"res, page .*rec_texts: install paddleocr 3"):
        paddle_text([{"res": {}, "page": 0}])


@pytest.mark.parametrize(("detect", "kind"), [(False, "TextRecognition"), (True, "PaddleOCR")])
def test_paddleocr_gets_the_image_as_bgr(monkeypatch: pytest.MonkeyPatch, detect: bool, kind: str) -> None:
    built: list[dict[str, Any]] = []
    seen: list[np.ndarray] = []

    class Engine:
        def __init__(self, **kwargs: Any) -> None:
            built.append(kwargs)

        def predict(self, image: np.ndarray) -> list[dict[str, Any]]:
            seen.append(image)
            return [{"rec_texts": ["4", "82"]} if detect else {"rec_text": "482"}]

    monkeypatch.setitem(sys.modules, "paddle", types.ModuleType("paddle"))
    monkeypatch.setitem(sys.modules, "paddleocr", types.SimpleNamespace(**{kind: Engine}))
    scorer = OcrScorer(backend="paddleocr", threads=3, detect=detect)
    scores = scorer([Image.new("RGB", (6, 4), (1, 2, 3))] * 2, ['"482"', '"48"'], [{}, {}])
    assert scores == {"ocr": [1.0, 0.5], "exact": [1.0, 0.0]}
    for array in seen:
        assert (array.shape, array[0, 0].tolist(), array.flags.c_contiguous) == ((4, 6, 3), [3, 2, 1], True)
    assert len(seen) == 2
    assert len(built) == 1 and built[0]["device"] == "cpu" and built[0]["cpu_threads"] == 3

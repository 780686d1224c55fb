import math
import threading
from pathlib import Path
from typing import Any

import pytest
from http_service import Answer, Asked, judge_says, judge_was_asked, judge_was_shown, serving
from PIL import Image

from gerl.errors import DataError, RewardError
from gerl.protocol import Prompt
from reward_models.scorers.chat import fill, last_object
from reward_models.scorers.vlm_judge import VlmJudge

CAT = ([Image.new("RGB", (8, 4), "red")], ["a cat"], [{}])


def first_token(**probabilities: float) -> dict[str, Any]:
    """Log-probabilities of a first token; `_` in a name stands for a space."""
    entries = [
        {"token": token.replace("_", " "), "logprob": math.log(p), "bytes": []} for token, p in probabilities.items()
    ]
    return {"content": [{**entries[0], "top_logprobs": entries}]}


def judge(url: str, **kwargs: Any) -> VlmJudge:
    return VlmJudge(**{"base_url": f"{url}/v1", "model": "m", "timeout": 5.0, "backoff": 0.01, "retries": 2, **kwargs})


def test_the_request_is_a_chat_completion_at_temperature_zero() -> None:
    with serving(*judge_says("Score: 7")) as service:
        assert judge(service.url, max_tokens=9)(*CAT) == [0.7]
    (asked,) = service.asked
    assert (asked.method, asked.path) == ("POST", "/v1/chat/completions")
    assert {name: asked.json[name] for name in ("model", "temperature", "max_tokens")} == {
        "model": "m",
        "temperature": 0,
        "max_tokens": 9,
    }
    image, text = judge_was_asked(asked)
    assert image.getpixel((7, 3)) == (255, 0, 0) and image.size == (8, 4)
    assert '"a cat"' in text and "from 0 " in text and "to 10 " in text


def test_scores_belong_to_their_images_whatever_the_order_of_the_answers() -> None:
    # The judge grades the red channel, and answers the first image last, when all the others are through.
    others = threading.Semaphore(0)

    def answer(asked: Asked) -> Answer:
        image, text = judge_was_asked(asked)
        red = image.getpixel((0, 0))[0]  # type: ignore[index]
        assert text == f"{red // 20}?"
        if red == 0:
            for _ in range(5):
                assert others.acquire(timeout=5)
        else:
            others.release()
        return judge_says(f"Score: {red / 20}")[0]

    images = [Image.new("RGB", (4, 4), (20 * i, 0, 0)) for i in range(6)]
    with serving(answer) as service:
        scores = judge(service.url, template="{prompt}?", concurrency=6)(images, [str(i) for i in range(6)], [{}] * 6)
    assert scores == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize(
    ("text", "kwargs", "score"),
    [
        ("Score: 7", {}, 0.7),
        ("**Score:** 7.5/10.", {}, 0.75),
        ("The colours earn Score: 3, all in all\nscore: 8", {}, 0.8),  # the last one
        ("Score: 10", {}, 1.0),
        ("Score: 8. Two hats, 1 cat", {}, 0.8),
        ("Score: 7e-1", {}, 0.07),
        ("Score: -3", {"limits": (-5, 5), "scale": 5}, -0.6),
        ("<Score>4</Score>", {"pattern": r"<Score>(\d+)</Score>", "limits": (1, 5), "scale": 5}, 0.8),
    ],
)
def test_the_number_in_the_text_is_divided_by_the_scale(text: str, kwargs: dict[str, Any], score: float) -> None:
    with serving(*judge_says(text)) as service:
        assert judge(service.url, **kwargs)(*CAT) == pytest.approx([score])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("I like it", r"'I like it' has no match of '.*core.*': change the template"),
        ("", "has no match"),
        (None, "has no match"),
        ("Score: 85", r"gives '85', expected a number from 0 to 10"),
        ("Score: -3", r"gives '-3', expected a number from 0 to 10"),
        ("Score: 1e999", r"gives '1e999', expected a number from 0 to 10"),
        ("Score: " + "1" * 5000, r"gives '1111.*expected a number from 0 to 10"),
        ("Score: 1,000", "has no match"),
        ("Score: 7,5", "has no match"),
    ],
)
def test_an_answer_without_a_usable_number_is_asked_again_and_then_an_error(text: Any, message: str) -> None:
    with serving(*judge_says(text, "Score: 5")) as service:
        assert judge(service.url)(*CAT) == [0.5]
        assert len(service.asked) == 2
    with serving(*judge_says(text)) as service, pytest.raises(RewardError, match=message) as error:
        judge(service.url, answer_retries=1)(*CAT)
    assert len(service.asked) == 2
    assert f"m at {service.url}/v1, about 'a cat': " in str(error.value) and "(2 attempts)" in str(error.value)


@pytest.mark.parametrize("finish", ["length", "content_filter", "tool_calls", "", None])
@pytest.mark.parametrize(
    ("text", "kwargs"),
    [
        ("The sign is blurred. A first guess is Score: 2, but", {}),
        ("Score: 1", {}),  # of 10
        ('a draft {"text": 2} but the text is in fact', {"mode": "rubric", "aspects": {"text": "?"}}),
    ],
)
def test_an_answer_that_did_not_end_is_no_verdict(finish: Any, text: str, kwargs: Any) -> None:
    cut, whole = *judge_says(text, finish=finish), *judge_says('Score: 5 {"text": 5}')
    with serving(cut, whole) as service:
        found = judge(service.url, **kwargs)(*CAT)
        assert found in ([0.5], {"mean": [0.5], "text": [0.5]}) and len(service.asked) == 2
    remedy = "was truncated.*raise max_tokens" if finish == "length" else "finish_reason="
    with serving(cut) as service, pytest.raises(RewardError, match=remedy):
        judge(service.url, answer_retries=0, **kwargs)(*CAT)


def test_the_first_token_is_read_of_an_answer_of_one_token_but_not_of_a_filtered_one() -> None:
    logprobs = {"content": [{"top_logprobs": [{"token": "Yes", "logprob": -0.1}, {"token": "No", "logprob": -3.0}]}]}
    with serving(*judge_says("Yes", finish="length", logprobs=logprobs)) as service:
        assert judge(service.url, mode="yes_no")(*CAT)[0] > 0.9
    filtered = judge_says("Yes", finish="content_filter", logprobs=logprobs)
    with serving(*filtered) as service, pytest.raises(RewardError, match="finish_reason='content_filter'"):
        judge(service.url, mode="yes_no", answer_retries=0)(*CAT)


def test_one_image_that_cannot_be_judged_fails_the_call_and_never_scores_zero() -> None:
    def answer(asked: Asked) -> Answer:
        return judge_says("Score: 7" if "good" in judge_was_asked(asked)[1] else "no idea")[0]

    with serving(answer) as service, pytest.raises(RewardError, match="no idea"):
        judge(service.url)(CAT[0] * 3, ["good", "bad", "good"], [{}] * 3)


@pytest.mark.parametrize("body", [{}, {"choices": []}, [1], {"error": "quota"}, {"choices": [{"message": "x"}]}])
def test_an_answer_that_is_no_completion_names_the_address(body: Any) -> None:
    with serving(Answer(body)) as service, pytest.raises(RewardError, match="OpenAI-compatible endpoint"):
        judge(service.url)(*CAT)
    assert len(service.asked) == 1


@pytest.mark.parametrize(
    ("tokens", "p"),
    [
        ({"Yes": 0.6, "No": 0.2, "Maybe": 0.2}, 0.75),
        ({"Yes": 0.3, "_yes": 0.2, "YES": 0.1, "No": 0.1, "_no": 0.1}, 0.75),
        ({"▁Yes": 0.4, "ĠNo": 0.4, "Not": 0.1, "None": 0.1}, 0.5),
        ({"Yes": 0.5}, 1.0),
        ({"no": 0.5}, 0.0),
    ],
)
def test_yes_no_is_the_share_of_all_spellings_of_yes(tokens: dict[str, float], p: float) -> None:
    with serving(*judge_says("Yes", logprobs=first_token(**tokens))) as service:
        assert judge(service.url, mode="yes_no")(*CAT) == pytest.approx([p])
    asked = service.asked[0].json
    assert (asked["logprobs"], asked["top_logprobs"], asked["max_tokens"]) == (True, 20, 1)
    assert judge_was_asked(service.asked[0])[1] == 'Does the image show "a cat"? Answer with one word, Yes or No.'


def test_yes_no_words_may_be_those_of_another_language_and_count_once() -> None:
    logprobs = first_token(Ja=0.3, ja=0.3, Jawohl=0.1, Nein=0.2, Yes=0.1)
    with serving(*judge_says("Ja", logprobs=logprobs)) as service:
        scorer = judge(service.url, mode="yes_no", yes=["ja", "Ja", "jawohl"], no=["nein"], template="{prompt}?")
        assert scorer(*CAT) == pytest.approx([0.7 / 0.9])


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        (None, "has no top_logprobs"),
        ({"content": []}, "has no top_logprobs"),
        ({"content": [{"token": "Yes", "logprob": 0.0, "top_logprobs": []}]}, "has no top_logprobs"),
        (first_token(The=0.9, Yes=0.004, No=0.004), r"probability of 0\.008, less than min_mass=0\.01.*'The', 'Yes'"),
        ({"content": [{"top_logprobs": [{"token": "Yes", "logprob": None}]}]}, "expected a token and a log-prob"),
        ({"content": [{"top_logprobs": [{"token": "Yes", "logprob": math.nan}]}]}, "expected a token and a log-prob"),
        ({"content": [{"top_logprobs": [{"token": "Yes", "logprob": -(10**400)}]}]}, "expected a token and a log-prob"),
    ],
)
def test_yes_no_without_usable_probabilities_is_an_error(logprobs: Any, message: str) -> None:
    with serving(*judge_says("Yes", logprobs=logprobs)) as service, pytest.raises(RewardError, match=message):
        judge(service.url, mode="yes_no", answer_retries=0)(*CAT)


ASPECTS = {"shape": "Are the shapes right?", "colour": "Are the colours right?"}


def test_a_rubric_gives_the_mean_first_and_then_each_aspect() -> None:
    answer = 'Let me see {"shape": 1}.\n```json\n{"colour": 4, "shape": "9", "note": {"shape": 2}}\n```'
    with serving(*judge_says(answer)) as service:
        scores = judge(service.url, mode="rubric", aspects=ASPECTS)(*CAT)
    assert isinstance(scores, dict) and list(scores) == ["mean", "shape", "colour"]
    assert scores == {"mean": [pytest.approx(0.65)], "shape": [0.9], "colour": [0.4]}
    assert len(service.asked) == 1
    text = judge_was_asked(service.asked[0])[1]
    assert "- shape: Are the shapes right?\n- colour: Are the colours right?" in text and '"shape", "colour"' in text


def test_a_rubric_may_ask_for_each_aspect_by_itself() -> None:
    def answer(asked: Asked) -> Answer:
        return judge_says("Score: 9" if "shapes" in judge_was_asked(asked)[1] else "Score: 4")[0]

    with serving(answer) as service:
        scores = judge(service.url, mode="rubric", aspects=ASPECTS, one_request=False)(*[2 * part for part in CAT])
    assert scores == {"mean": pytest.approx([0.65] * 2), "shape": [0.9] * 2, "colour": [0.4] * 2}
    assert len(service.asked) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"shape": 9}', "no JSON object with the keys shape, colour"),
        ('{"shape": 9, "colour": ', "no JSON object"),
        ("shape 9, colour 4", "no JSON object"),
        ('{"shape": 9, "colour": 11}', "gives 11, expected a number from 0 to 10"),
        ('{"shape": 9, "colour": true}', "gives True"),
        ('{"shape": 9, "colour": NaN}', "gives nan"),
        ('{"shape": 9, "colour": null}', "gives None"),
        ('{"shape": 9, "colour": 1%s}' % ("0" * 400), "gives 1000"),
        ('{"shape":' * 2000, "no JSON object"),
        ('{"shape": [9], "colour": 4}', r"gives \[9\]"),
    ],
)
def test_a_rubric_that_is_not_filled_in_is_an_error(text: str, message: str) -> None:
    with serving(*judge_says(text)) as service, pytest.raises(RewardError, match=message):
        judge(service.url, mode="rubric", aspects=ASPECTS, answer_retries=0)(*CAT)


def test_last_object_takes_the_last_complete_one() -> None:
    assert last_object('{"a": 1} and {"a": {"a": 2}} {"b": 3} {', ["a"]) == {"a": 2}
    assert last_object("{{}} [1]", ["a"]) is None


def test_a_template_takes_the_columns_of_the_row_and_leaves_other_braces_alone() -> None:
    text = fill('{prompt}|{style}|{"a": {}}|{n}', "a {style} cat", {"style": "flat {n}", "n": 3, "prompt": "x"})
    assert text == 'a {style} cat|flat {n}|{"a": {}}|3'
    with serving(*judge_says("Score: 5")) as service:
        judge(service.url, template="{prompt} in {style}, {low} to {high}")(CAT[0], ["a"], [{"style": "oil"}])
    assert judge_was_asked(service.asked[0])[1] == "a in oil, 0 to 10"


def test_a_prompt_without_a_column_of_the_template_is_named_before_any_request() -> None:
    with serving(*judge_says("Score: 5")) as service:
        scorer = judge(service.url, template="{prompt} in {style}")
        scorer.check_prompts([Prompt(0, "a", {"style": "oil"})])
        with pytest.raises(DataError, match=r"prompt 7: 'b' has no 'style'.*remove \{style\}"):
            scorer.check_prompts([Prompt(0, "a", {"style": "oil"}), Prompt(7, "b", {"style": None})])
        judge(service.url).check_prompts([Prompt(0, "any prompt will do")])
    assert not service.asked


def test_extra_body_replaces_and_removes_fields() -> None:
    extra = {"max_tokens": None, "max_completion_tokens": 64, "temperature": 0.5, "kwargs": {"thinking": False}}
    with serving(*judge_says("Score: 5")) as service:
        judge(service.url, extra_body=extra)(*CAT)
    body = service.asked[0].json
    assert "max_tokens" not in body and body["temperature"] == 0.5
    assert body["max_completion_tokens"] == 64 and body["kwargs"] == {"thinking": False}


def test_large_images_are_reduced_in_proportion() -> None:
    with serving(*judge_says("Score: 5")) as service:
        judge(service.url, image_size=6)([Image.new("RGB", (12, 8))], ["a"], [{}])
        judge(service.url, image_size=None)([Image.new("RGB", (2000, 2))], ["a"], [{}])
    assert [judge_was_asked(asked)[0].size for asked in service.asked] == [(6, 4), (2000, 2)]


def test_the_judge_of_an_edit_sees_the_source_and_then_the_result(tmp_path: Path) -> None:
    # It gives the most points for what has the source's red, and green of its own: kept, and edited as told.
    def answer(asked: Asked) -> Answer:
        (source, result), text = judge_was_shown(asked)
        assert '"more green"' in text and "everything else left as it was" in text
        before, after = source.getpixel((0, 0)), result.getpixel((0, 0))
        assert isinstance(before, tuple) and isinstance(after, tuple)
        return judge_says(f"Score: {5 * (before[0] == after[0]) + 5 * (after[1] > before[1])}")[0]

    Image.new("RGB", (4000, 4), (200, 0, 0)).save(tmp_path / "source.png")
    rows = [{"image": str(tmp_path / "source.png")}, {"image": [tmp_path / "source.png"]}] * 2
    images = [Image.new("RGB", (4, 4), colour) for colour in ((200, 90, 0), (200, 0, 0), (10, 90, 0), (10, 0, 0))]
    with serving(answer) as service:
        assert judge(service.url, sources=["image"])(images, ["more green"] * 4, rows) == [1.0, 0.5, 0.5, 0.0]
    (source, _), _ = judge_was_shown(service.asked[0])
    assert source.size == (1024, 1)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"mode": "yes_no"}, "Yes"),
        ({"mode": "rubric", "aspects": ASPECTS}, '{"shape": 9, "colour": 4}'),
        ({"mode": "rubric", "aspects": ASPECTS, "one_request": False}, "Score: 9"),
    ],
)
def test_every_mode_tells_the_judge_of_an_edit_what_the_pictures_are(kwargs: dict[str, Any], says: str) -> None:
    row = {"image": Image.new("RGB", (3, 3)), "control_image": Image.new("RGB", (5, 5))}
    with serving(*judge_says(says, logprobs=first_token(Yes=1.0))) as service:
        judge(service.url, sources=["control_image", "image"], **kwargs)(CAT[0], ["add a cat"], [row])
    images, text = judge_was_shown(service.asked[0])
    assert [image.size for image in images] == [(5, 5), (3, 3), (8, 4)]
    assert text.startswith('The last image was made from what is shown before it, by the instruction "add a cat". ')


def test_a_row_without_the_source_is_named_before_any_request(tmp_path: Path) -> None:
    scorer = judge("http://127.0.0.1:1", sources=["image"])
    with pytest.raises(DataError, match=r"prompt 3: 'a' has no reference for the vlm_judge scorer.*'image', got None"):
        scorer.check_prompts([Prompt(3, "a")])
    with pytest.raises(DataError, match=r"no file .*gone\.png"):
        scorer(CAT[0], ["a"], [{"image": str(tmp_path / "gone.png")}])

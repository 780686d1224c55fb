import math
from typing import Any

import pytest
from http_service import Answer, Asked, judge_says, judge_was_asked, serving
from PIL import Image

from gerl.errors import DataError, RewardError
from gerl.protocol import Prompt
from reward_models.scorers.vqa import GenEval2, geometric_mean, words

ASKED = [["How many cats are in the image?", "two"], ["Are the cats red?", "Yes"], ["Are there any cats?", "Yes"]]
CATS = Prompt(0, "two red cats", {"vqa_list": ASKED})
ANSWERS = {
    ASKED[0][0]: {"Two": 0.5, " two": 0.1, "2": 0.2, "One": 0.2},  # 0.8, and right
    ASKED[1][0]: {"No": 0.6, "Yes": 0.3, " yes": 0.1},  # 0.4, and wrong
    ASKED[2][0]: {"Yes": 0.9, "No": 0.1},
}


def first_token(probabilities: dict[str, float]) -> dict[str, Any]:
    entries = [{"token": token, "logprob": math.log(p)} for token, p in probabilities.items()]
    return {"content": [{**entries[0], "top_logprobs": entries}]}


def answer(asked: Asked) -> Answer:
    """As `ANSWERS` on a red image, otherwise surely right."""
    image, text = judge_was_asked(asked)
    question = text.removesuffix(" Answer in one word.")
    right = "2" if question == ASKED[0][0] else "Yes"
    red = image.getpixel((0, 0)) == (255, 0, 0)
    return judge_says("?", logprobs=first_token(ANSWERS[question] if red else {right: 1.0}))[0]


def scorer(url: str, **kwargs: Any) -> GenEval2:
    return GenEval2(base_url=f"{url}/v1", **{"timeout": 5.0, "backoff": 0.01, "answer_retries": 0, **kwargs})


def test_the_probabilities_of_the_right_answers_have_two_means() -> None:
    images = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    with serving(answer) as service:
        scores = scorer(service.url)(images, [CATS.text] * 2, [CATS.metadata] * 2)
        rising = scorer(service.url, mean="arithmetic")(images, [CATS.text] * 2, [CATS.metadata] * 2)
    assert list(scores) == ["geometric", "arithmetic", "correct"]  # the first is the score
    assert scores["geometric"] == pytest.approx([(0.8 * 0.4 * 0.9) ** (1 / 3), 1.0])
    assert scores["arithmetic"] == pytest.approx([2.1 / 3, 1.0])
    assert scores["correct"] == pytest.approx([2 / 3, 1.0])
    assert list(rising) == ["arithmetic", "geometric", "correct"] and rising["arithmetic"] == scores["arithmetic"]
    asked = service.asked[0].json
    assert (asked["logprobs"], asked["top_logprobs"], asked["max_tokens"]) == (True, 20, 1)
    assert asked["model"] == "Qwen/Qwen3-VL-8B-Instruct" and len(service.asked) == 12


def test_an_answer_of_probability_0_makes_the_geometric_mean_0() -> None:
    assert geometric_mean([0.0, 1.0]) == 0 and geometric_mean([0.25, 1.0]) == pytest.approx(0.5)
    with serving(*judge_says("No", logprobs=first_token({"No": 1.0}))) as service:
        metadata = [{"questions": [["Is it red?", "yes"]]}]
        found = scorer(service.url, metadata_key="questions")([Image.new("RGB", (8, 8))], ["a"], metadata)
    assert found == {"geometric": [0.0], "arithmetic": [0.0], "correct": [0.0]}


@pytest.mark.parametrize("tokens", [{"<think>": 0.99, "Yes": 0.001}, {"The": 1.0}])
def test_a_model_that_says_something_else_is_no_answer(tokens: dict[str, float]) -> None:
    for question in ASKED[:2]:
        with serving(*judge_says("?", logprobs=first_token(tokens))) as service:
            with pytest.raises(RewardError, match="none of which is an answer: change the template"):
                scorer(service.url)([Image.new("RGB", (8, 8))], ["a"], [{"vqa_list": [question]}])
            assert len(service.asked) == 1


def test_what_counts_as_an_answer_is_a_number_in_letters_or_digits_or_yes() -> None:
    assert words("How many cats are there?", "Three") == ["three", "3"]
    assert words("How many cats are there?", "3") == ["3", "three"]
    assert words("how many?", "12") == ["12"]
    assert words("Is it?", "Yes") == ["yes"]
    for question, given in (("How many?", "lots"), ("Is it?", "No")):
        with pytest.raises(DataError, match="has the answer"):
            words(question, given)


@pytest.mark.parametrize(
    "value", [None, [], "Is it?", [["Is it?"]], [["Is it?", "Yes"], "more"], [["", "Yes"]], [[1, "Yes"]]]
)
def test_a_row_without_usable_questions_is_named_before_any_request(value: Any) -> None:
    one = scorer("http://127.0.0.1:1")
    one.check_prompts([CATS])
    with pytest.raises(DataError, match=r"prompt 7: 'a' has no questions .*'vqa_list', got .*metadata_key"):
        one.check_prompts([CATS, Prompt(7, "a", {"vqa_list": value})])
    with pytest.raises(RewardError, match=r"template has no \{question\}"):
        scorer("http://127.0.0.1:1", template="?")

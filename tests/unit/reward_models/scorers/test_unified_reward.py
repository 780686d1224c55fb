from typing import Any

import pytest
from http_service import Answer, Asked, judge_says, judge_was_asked, serving
from PIL import Image

from gerl.errors import DataError, RewardError
from gerl.protocol import Prompt
from reward_models.scorers.vlm_judge import UnifiedReward1, UnifiedReward2


def scorer(url: str, **kwargs: Any) -> UnifiedReward1:
    return UnifiedReward1(base_url=f"{url}/v1", **{"timeout": 5.0, "backoff": 0.01, "answer_retries": 0, **kwargs})


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Final Score: 4", 0.8),
        ("The cat is well drawn.\nFinal Score:3.75", 0.75),
        ("Final Score: 5/5", 1.0),
        ("Final Score: 1.0", 0.2),
    ],
)
def test_the_final_score_is_divided_by_five(text: str, score: float) -> None:
    with serving(*judge_says(text)) as service:
        assert scorer(service.url)([Image.new("RGB", (9, 9))], ["a cat"], [{}]) == pytest.approx([score])


@pytest.mark.parametrize(
    "text",
    [
        "Score: 4",
        "Final Score: 0",
        "Final Score: 45",
        "Final Score: 5.5",
        "Final Score: 10",
        "Final Score: 1e999",
        "Final Score: 1.5e9",
    ],
)
def test_no_score_of_one_to_five_is_an_error(text: str) -> None:
    with serving(*judge_says(text)) as service, pytest.raises(RewardError, match="Final Score"):
        scorer(service.url)([Image.new("RGB", (9, 9))], ["a cat"], [{}])


@pytest.mark.parametrize("kind", [UnifiedReward1, UnifiedReward2])
def test_a_grade_in_an_answer_that_was_cut_off_is_none(kind: Any) -> None:
    text = "Final Score: 4\nAlignment Score (1-5): 4\nCoherence Score (1-5): 4\nStyle Score (1-5): 4"
    with serving(*judge_says(text, finish="length")) as service, pytest.raises(RewardError, match="max_tokens"):
        kind(base_url=f"{service.url}/v1", answer_retries=0)([Image.new("RGB", (9, 9))], ["a cat"], [{}])


def test_images_are_sent_as_squares_and_scores_keep_their_order() -> None:
    def answer(asked: Asked) -> Answer:
        image, text = judge_was_asked(asked)
        assert image.size == (512, 512) and image.format == "PNG"
        assert asked.json["model"] == "CodeGoat24/UnifiedReward-7b-v1.5" and asked.json["temperature"] == 0
        grade = image.getpixel((256, 256))[1] // 50  # type: ignore[index]
        assert f"Text caption: [grade {grade}]" in text
        return judge_says(f"Final Score: {grade}")[0]

    images = [Image.new("RGB", (30, 20), (0, 50 * grade, 0)) for grade in (5, 1, 3)]
    with serving(answer) as service:
        scores = scorer(service.url)(images, ["grade 5", "grade 1", "grade 3"], [{}] * 3)
    assert scores == pytest.approx([1.0, 0.2, 0.6])


def test_the_words_of_a_checkpoint_may_be_given_and_are_checked() -> None:
    with serving(*judge_says("Final Score: 4")) as service:
        own = scorer(service.url, template="{style}: {prompt}", image_size=16)
        own([Image.new("RGB", (9, 9))], ["a cat"], [{"style": "oil"}])
        assert judge_was_asked(service.asked[0])[1] == "oil: a cat"
        with pytest.raises(DataError, match="prompt 3: 'a cat' has no 'style'"):
            own.check_prompts([Prompt(3, "a cat")])
        scorer(service.url).check_prompts([Prompt(3, "a cat")])


THREE = "Alignment Score (1-5): 2.5\nCoherence Score (1-5): 4\n**Style Score (1-5):** 3.25"


def second(url: str, **kwargs: Any) -> UnifiedReward2:
    return UnifiedReward2(base_url=f"{url}/v1", **{"timeout": 5.0, "backoff": 0.01, "answer_retries": 0, **kwargs})


def test_version_2_gives_three_grades_and_their_mean() -> None:
    with serving(*judge_says(THREE)) as service:
        scores = second(service.url)([Image.new("RGB", (2048, 8))] * 2, ["a cat", "a dog"], [{}] * 2)
    assert list(scores) == ["mean", "alignment", "coherence", "style"]  # the first is the score
    assert scores == {
        "mean": pytest.approx([0.65] * 2),
        "alignment": [0.5] * 2,
        "coherence": [0.8] * 2,
        "style": [0.65] * 2,
    }
    asked = {judge_was_asked(asked)[1].splitlines()[-1]: judge_was_asked(asked)[0].size for asked in service.asked}
    assert asked == {"Text Caption: [a cat]": (1024, 4), "Text Caption: [a dog]": (1024, 4)}
    assert service.asked[0].json["model"] == "CodeGoat24/UnifiedReward-2.0-qwen3vl-8b"


@pytest.mark.parametrize(
    "text", [THREE.replace("Style", "Beauty"), THREE.replace("2.5", "0"), THREE.replace("2.5", "25")]
)
def test_version_2_without_three_grades_of_1_to_5_is_an_error(text: str) -> None:
    with serving(*judge_says(text)) as service, pytest.raises(RewardError, match=r"Alignment|Style"):
        second(service.url)([Image.new("RGB", (9, 9))], ["a cat"], [{}])


def test_version_2_takes_the_words_of_a_checkpoint() -> None:
    with serving(*judge_says(THREE)) as service:
        second(service.url, template="grade {prompt}")([Image.new("RGB", (9, 9))], ["a cat"], [{}])
    assert judge_was_asked(service.asked[0])[1] == "grade a cat"
    with pytest.raises(DataError, match="has no 'style'"):
        second("http://127.0.0.1:1", template="{style}").check_prompts([Prompt(3, "a cat")])

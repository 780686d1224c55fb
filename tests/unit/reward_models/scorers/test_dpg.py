import csv
import random
from pathlib import Path
from typing import Any

import pytest
from http_service import Answer, Asked, judge_says, judge_was_asked, serving
from PIL import Image

from gerl.errors import DataError, RewardError
from gerl.protocol import Prompt
from reward_models.scorers.vqa import DpgScorer, Question, score

ASKED = [
    {"proposition_id": "1", "dependency": "0", "question_natural_language": "Is there a cat?"},
    {"proposition_id": "2", "dependency": "1", "question_natural_language": "Is the cat red?"},
    {"proposition_id": "3", "dependency": "2, 1", "question_natural_language": "Is it the cat that sits?"},
    {"proposition_id": "4", "dependency": "0", "question_natural_language": "Is it night?"},
]


def scorer(url: str, **kwargs: Any) -> DpgScorer:
    return DpgScorer(base_url=f"{url}/v1", **{"timeout": 5.0, "backoff": 0.01, "answer_retries": 0, **kwargs})


def answer(asked: Asked) -> Answer:
    """No to the second question about a red image, else yes, in words of all kinds."""
    image, text = judge_was_asked(asked)
    question = text.removesuffix(" Answer with one word, Yes or No.")
    red = image.getpixel((0, 0)) == (255, 0, 0)
    return judge_says(" no." if red and question == ASKED[1]["question_natural_language"] else "**Yes**, it is")[0]


def test_a_question_counts_only_with_all_that_it_depends_on() -> None:
    images = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    with serving(answer) as service:
        found = scorer(service.url)(images, ["a cat"] * 2, [{"questions": ASKED}] * 2)
    assert found == {"score": [0.5, 1.0], "yes": [0.75, 1.0]}  # the third, too, is lost on the red one
    assert len(service.asked) == 8 and service.asked[0].json["model"] == "Qwen/Qwen3-VL-8B-Instruct"


def published(graph: dict[int, tuple[int, ...]], answers: dict[int, bool]) -> float:
    """The rule of compute_dpg_bench.py, one question after the other."""
    counted = {key: float(value) for key, value in answers.items()}
    for key, parents in graph.items():
        lost = False
        for parent in parents:
            if parent == 0:
                continue
            if counted[parent] == 0:
                lost = True
                break
        if lost:
            counted[key] = 0
    return sum(counted.values()) / len(counted)


def test_the_score_is_the_published_rule_on_any_graph() -> None:
    chance, different = random.Random(0), 0
    for _ in range(200):
        keys = chance.sample(range(1, 9), 6)  # a child may stand before its parent, and then counts by its own answer
        graph = {k: tuple(p for p in chance.sample([0, *keys], 2) if p != k) or (0,) for k in keys}
        answers = {k: chance.random() < 0.7 for k in keys}
        found = score({k: Question("?", parents) for k, parents in graph.items()}, answers)
        assert found == pytest.approx(published(graph, answers))
        different += found < sum(answers.values()) / 6
    assert different > 50


def test_a_parent_that_is_not_among_the_questions_takes_nothing_away() -> None:
    assert score({2: Question("?", (1,)), 3: Question("?", (2,))}, {2: True, 3: False}) == 0.5


def test_rows_of_the_benchmarks_form_are_read_as_they_are(tmp_path: Path) -> None:
    with (tmp_path / "q.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ASKED[0]))
        writer.writeheader()
        writer.writerows(ASKED)
    rows = list(csv.DictReader((tmp_path / "q.csv").open(newline="")))
    found = scorer("http://127.0.0.1:1").questions("a", {"questions": rows})
    assert {key: question.parents for key, question in found.items()} == {1: (0,), 2: (1,), 3: (2, 1), 4: (0,)}


@pytest.mark.parametrize("text", ["I see a cat", "", "<think> yes"])
def test_an_answer_that_is_neither_yes_nor_no_is_no_answer(text: str) -> None:
    with serving(*judge_says(text)) as service:
        with pytest.raises(RewardError, match=r"begins with neither Yes nor No.*change the template"):
            scorer(service.url)([Image.new("RGB", (8, 8))], ["a"], [{"questions": ASKED[:1]}])
        assert len(service.asked) == 1


def test_an_answer_that_was_cut_off_is_no_answer() -> None:
    cut = judge_says("Yes and no: while the cat", finish="length")
    with serving(*cut) as service, pytest.raises(RewardError, match="max_tokens"):
        scorer(service.url)([Image.new("RGB", (8, 8))], ["a"], [{"questions": ASKED[:1]}])


@pytest.mark.parametrize(
    "value",
    [
        *(None, [], "Is it?", ["Is it?"], [{"proposition_id": 1}]),
        *([{**ASKED[0], "dependency": "a"}], [{**ASKED[0], "proposition_id": None}]),
        [{**ASKED[0], "question_natural_language": " "}],
    ],
)
def test_a_row_without_usable_questions_is_named_before_any_request(value: Any) -> None:
    one = scorer("http://127.0.0.1:1", metadata_key="asked")
    one.check_prompts([Prompt(0, "a", {"asked": ASKED})])
    with pytest.raises(DataError, match=r"prompt 7: 'a' has no questions for the dpg .*'asked', got .*metadata_key"):
        one.check_prompts([Prompt(7, "a", {"asked": value})])


def test_a_template_without_the_question_is_refused() -> None:
    with pytest.raises(RewardError, match=r"template has no \{question\}"):
        scorer("http://127.0.0.1:1", template="?")

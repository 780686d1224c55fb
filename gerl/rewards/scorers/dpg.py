"""DPG-Bench: a vision language model answers questions about a long prompt, which depend on each other.

Source: "ELLA" (arXiv 2403.05135) and its code (github.com/TencentQQGYLab/ELLA, commit 3c228f1,
dpg_bench/compute_dpg_bench.py, lines 69 to 102 and 119 to 163), after the graphs of "Davidsonian Scene Graph" (arXiv
2310.18235). There mPLUG-large of ModelScope answers, which transformers does not have; here whatever model an endpoint
serves does. So these are not the benchmark's published numbers, though its prompts, questions and rule are the same.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

from PIL import Image
from pydantic import Field

from gerl.errors import DataError
from gerl.rewards.scorers.base import Columns, Metadata
from gerl.rewards.scorers.chat import ChatScorer, Choice, Unreadable, check_question, ending, text_of
from gerl.rewards.scorers.http import Client, at_most, png_base64

ID, PARENTS, TEXT = "proposition_id", "dependency", "question_natural_language"  # columns of the benchmark's file


@dataclass(frozen=True)
class Question:
    """A question that yes is the right answer to; it counts only if those of `parents` are answered with yes too."""

    text: str
    parents: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DpgScorer(ChatScorer):
    """The share of the row's questions, from 0 to 1, that are answered with yes, as are all those they depend on.

    They are in the row's `metadata_key`, a list of objects with the columns of the benchmark's file: `proposition_id`
    (a number), `dependency` (the numbers of its parents with commas between, 0 for none) and
    `question_natural_language`. A parent that is not among the questions counts as answered with yes. `yes`, a column
    that is watched, is the share of yes alone. A question is a request.
    """

    model: str = "Qwen/Qwen3-VL-8B-Instruct"
    metadata_key: str = "questions"
    template: str = "{question} Answer with one word, Yes or No."
    image_size: Annotated[int, Field(ge=1)] | None = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_question(self.template)

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> Columns:
        graphs = [self.questions(prompt, row) for prompt, row in zip(prompts, metadata, strict=True)]
        pictures = [png_base64(at_most(image, self.image_size)) for image in images]
        each = [(i, key) for i, graph in enumerate(graphs) for key in graph]
        with self.client(self.base_url) as client:

            def answer(item: tuple[int, int]) -> bool:
                i, key = item
                return self._answer(client, pictures[i], prompts[i], graphs[i][key].text)

            answers = dict(zip(each, client.map(answer, each), strict=True))
        given = [{key: answers[i, key] for key in graph} for i, graph in enumerate(graphs)]
        return {
            "score": [score(graph, own) for graph, own in zip(graphs, given, strict=True)],
            "yes": [fmean(own.values()) for own in given],
        }

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        self.questions(prompt, metadata)

    def questions(self, prompt: str, metadata: Metadata) -> dict[int, Question]:
        """The questions of a row by their numbers; raises `DataError` if there are none, or their form is another."""
        given = metadata.get(self.metadata_key)
        found: dict[int, Question] = {}
        try:
            for row in given if isinstance(given, list) else []:
                text = row[TEXT]
                if not isinstance(text, str) or not text.strip():
                    raise ValueError
                found[int(row[ID])] = Question(text, tuple(map(int, str(row[PARENTS]).split(","))))
        except (KeyError, TypeError, ValueError):
            found = {}
        if not found:
            raise DataError(
                f"{prompt!r:.80} has no questions for the dpg scorer, expected a list of objects with {ID}, "
                f"{PARENTS} and {TEXT} in the row's {self.metadata_key!r}, got {given!r:.200}: add it, or name the "
                "column with metadata_key"
            )
        return found

    def _answer(self, client: Client, image: str, prompt: str, question: str) -> bool:
        text = self.template.replace("{question}", question)
        return self.ask(client, prompt, text, [image], yes_or_no, max_tokens=self.max_tokens or 512)


def yes_or_no(choice: Choice) -> bool:
    """Whether the first word of an answer is yes; raises `Unreadable` if it is neither yes nor no."""
    text = text_of(choice)
    word = re.search(r"\w+", text)
    match word and word[0].casefold():
        case "yes":
            return True
        case "no":
            return False
    raise Unreadable(
        f"the answer {ending(text)} begins with neither Yes nor No: change the template, or disable the model's "
        "thinking"
    )


def score(questions: Mapping[int, Question], answers: Mapping[int, bool]) -> float:
    """The mean over the questions, where one counts 0 if a parent does, in the order of the questions."""
    counted = {key: float(answer) for key, answer in answers.items()}
    for key, question in questions.items():
        if any(counted.get(parent, 1.0) == 0 for parent in question.parents):
            counted[key] = 0.0
    return fmean(counted.values())

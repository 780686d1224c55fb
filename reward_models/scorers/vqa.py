"""Benchmarks with questions about an image, answered by a vision language model: DPG-Bench and GenEval 2."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import fmean
from typing import Annotated, Any, Literal

from PIL import Image
from pydantic import Field

from gerl.errors import DataError, RewardError
from gerl.rewards.scorers.base import Columns, Metadata
from reward_models.scorers.chat import (
    ChatScorer,
    Choice,
    Unreadable,
    bare,
    ending,
    first_tokens,
    probability_of,
    text_of,
)
from reward_models.scorers.http import Client


@dataclass(frozen=True, kw_only=True)
class QuestionScorer(ChatScorer):
    """Base class of both; the questions are in the row's `metadata_key`, and each question is a request."""

    model: str = "Qwen/Qwen3-VL-8B-Instruct"
    metadata_key: str
    template: str

    label = ""  # scorer name in error messages

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{question}" not in self.template:
            raise RewardError("template has no {question}, so the judge would not see the question: add it")

    def questions(self, prompt: str, metadata: Metadata) -> Any:
        """Return the questions of a row; raises `DataError` if they are missing or malformed."""
        raise NotImplementedError

    def answer(self, client: Client, image: str, prompt: str, question: Any) -> Any:
        """Return the model's answer to a question about `image`, a PNG in base64."""
        raise NotImplementedError

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        self.questions(prompt, metadata)

    def answers(
        self, images: list[Image.Image], prompts: list[str], questions: Sequence[Sequence[Any]]
    ) -> list[list[Any]]:
        """Return the answers to the `questions` about each of the images `[B]`."""
        pngs = [self.png(image) for image in images]
        pairs = [(i, question) for i, row in enumerate(questions) for question in row]
        with self.client(self.base_url) as client:
            replies = client.map(lambda pair: self.answer(client, pngs[pair[0]], prompts[pair[0]], pair[1]), pairs)
        left = iter(replies)
        return [[next(left) for _ in row] for row in questions]

    def _no_questions(self, prompt: str, metadata: Metadata, form: str) -> DataError:
        return DataError(
            f"{prompt!r:.80} has no questions for the {self.label} scorer, expected a list of {form} in the row's "
            f"{self.metadata_key!r}, got {metadata.get(self.metadata_key)!r:.200}: add it, or name the column with "
            "metadata_key"
        )


# --- DPG-Bench: questions about a long prompt, which depend on each other
#
# Source: "ELLA" (arXiv 2403.05135) and its code (github.com/TencentQQGYLab/ELLA, commit 3c228f1,
# dpg_bench/compute_dpg_bench.py, lines 69 to 102 and 119 to 163), after the graphs of "Davidsonian Scene Graph" (arXiv
# 2310.18235). The benchmark answers with ModelScope's mPLUG-large, which is not in transformers; here the model behind
# an endpoint answers. The scores are therefore not comparable with published ones, though prompts, questions and rule
# are the same.

ID, PARENTS, TEXT = "proposition_id", "dependency", "question_natural_language"  # columns of the benchmark's file


@dataclass(frozen=True)
class Question:
    """Question whose correct answer is yes; it counts only if all `parents` are answered with yes too."""

    text: str
    parents: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DpgScorer(QuestionScorer):
    """Fraction of the row's questions, in [0, 1], that are answered with yes, and whose parents are too.

    The questions are in the row's `metadata_key`, a list of objects with the columns of the benchmark's file:
    `proposition_id` (a number), `dependency` (comma-separated numbers of the parents, 0 for none) and
    `question_natural_language`. A parent that is not among the questions counts as answered with yes. The further
    column `yes` is the fraction of yes answers regardless of parents. Each question is a request.
    """

    metadata_key: str = "questions"
    template: str = "{question} Answer with one word, Yes or No."

    label = "dpg"

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> Columns:
        graphs = [self.questions(prompt, row) for prompt, row in zip(prompts, metadata, strict=True)]
        answers = self.answers(images, prompts, [list(graph.values()) for graph in graphs])
        by_question = [dict(zip(graph, replies, strict=True)) for graph, replies in zip(graphs, answers, strict=True)]
        return {
            "score": [score(graph, answer_of) for graph, answer_of in zip(graphs, by_question, strict=True)],
            "yes": [fmean(answer_of.values()) for answer_of in by_question],
        }

    def questions(self, prompt: str, metadata: Metadata) -> dict[int, Question]:
        """Return the questions of a row by number; raises `DataError` if they are missing or malformed."""
        rows = metadata.get(self.metadata_key)
        questions: dict[int, Question] = {}
        try:
            for row in rows if isinstance(rows, list) else []:
                text = row[TEXT]
                if not isinstance(text, str) or not text.strip():
                    raise ValueError
                questions[int(row[ID])] = Question(text, tuple(map(int, str(row[PARENTS]).split(","))))
        except (KeyError, TypeError, ValueError):
            questions = {}
        if not questions:
            raise self._no_questions(prompt, metadata, f"objects with {ID}, {PARENTS} and {TEXT}")
        return questions

    def answer(self, client: Client, image: str, prompt: str, question: Question) -> bool:
        text = self.template.replace("{question}", question.text)
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
    """Return the mean over the questions; a question counts as 0 if a parent does, in the order of the questions."""
    counted = {key: float(answer) for key, answer in answers.items()}
    for key, question in questions.items():
        if any(counted.get(parent, 1.0) == 0 for parent in question.parents):
            counted[key] = 0.0
    return fmean(counted.values())


# --- GenEval 2: a question about each part of a prompt
#
# Source: "GenEval 2" (arXiv 2512.16853) and its code (github.com/facebookresearch/GenEval2, commit a6e82d2,
# evaluation.py, lines 30 to 53, 73 to 100 and 131 to 190): Soft-TIFA, the probability of the correct answer as the
# first word. The benchmark uses the full token distribution of a local Qwen3-VL-8B, here the top 20 log-probabilities
# of an endpoint. The questions are from the benchmark's file, or custom.

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
COUNTING = "how many"  # prefix of a question whose answer is a number
OTHER_COUNTS = ("zero", "no", "none", "several", "many")
Pair = tuple[str, str]  # a question and the correct answer


@dataclass(frozen=True, kw_only=True)
class GenEval2(QuestionScorer):
    """Mean, in [0, 1], of the probabilities of the correct answers to the questions in the row's `metadata_key`.

    The questions are a list of pairs of question and answer; the answer is a number if the question begins with "How
    many", else yes. `mean`: geometric, the benchmark's per prompt, near 0 if one answer is wrong; or arithmetic, which
    increases with each. The other mean is a further column, as is `correct`, the fraction of correct answers. An answer
    is requested again if all possible answers together have a probability below `min_mass`.
    """

    metadata_key: str = "vqa_list"
    mean: Literal["geometric", "arithmetic"] = "geometric"
    template: str = "{question} Answer in one word."
    min_mass: Annotated[float, Field(gt=0, le=1)] = 0.01

    label = "geneval2"

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> Columns:
        questions = [self.questions(prompt, row) for prompt, row in zip(prompts, metadata, strict=True)]
        rows = self.answers(images, prompts, questions)
        columns = {
            "geometric": [geometric_mean([p for p, _ in row]) for row in rows],
            "arithmetic": [fmean(p for p, _ in row) for row in rows],
        }
        return {self.mean: columns.pop(self.mean), **columns, "correct": [fmean(right for _, right in r) for r in rows]}

    def questions(self, prompt: str, metadata: Metadata) -> list[Pair]:
        """Return the questions of a row with their answers; raises `DataError` if they are missing or malformed."""
        rows = metadata.get(self.metadata_key)
        pairs = [tuple(pair) for pair in rows if isinstance(pair, list | tuple)] if isinstance(rows, list) else []
        accepted = [pair for pair in pairs if len(pair) == 2 and all(isinstance(part, str) and part for part in pair)]
        if not accepted or not isinstance(rows, list) or len(accepted) < len(rows):
            raise self._no_questions(prompt, metadata, "pairs of a question and its answer")
        for question, answer in accepted:
            words(question, answer)
        return accepted

    def answer(self, client: Client, image: str, prompt: str, question: Pair) -> tuple[float, bool]:
        """Return the probability of the correct answer, and whether it is the most likely one."""
        wanted = words(*question)

        def read(choice: Choice) -> tuple[float, bool]:
            top = first_tokens(choice)
            if not probability_of(top, _possible(question[0], top)) >= self.min_mass:
                raise Unreadable(
                    f"the likeliest first tokens for {question[0]!r} are "
                    f"{', '.join(repr(token) for token, _ in top[:5])}, none of which is an answer: change the "
                    "template, or disable the model's thinking"
                )
            likeliest = max(top, key=lambda entry: entry[1])
            return min(1.0, probability_of(top, wanted)), probability_of([likeliest], wanted) > 0

        text, tokens = self.template.replace("{question}", question[0]), self.max_tokens or 1
        return self.ask(client, prompt, text, [image], read, max_tokens=tokens, logprobs=True, top_logprobs=20)


def _possible(question: str, top: Sequence[tuple[str, float]]) -> list[str]:
    """Return the words among the top tokens that are possible answers to a question."""
    if not question.lower().startswith(COUNTING):
        return ["yes", "no"]
    return [*NUMBERS, *OTHER_COUNTS, *(token for token, _ in top if bare(token).isdigit())]


def words(question: str, answer: str) -> list[str]:
    """Return the first words that count as correct: a number in words and digits, else yes.

    Raises `DataError` for an answer that is neither.
    """
    plain = answer.strip().lower()
    if not question.lower().startswith(COUNTING):
        if plain != "yes":
            raise DataError(f"{question!r} has the answer {answer!r}: phrase it so that the answer is yes or a count")
        return ["yes"]
    if plain in NUMBERS:
        return [plain, str(NUMBERS.index(plain) + 1)]
    if plain.isdigit():
        number = int(plain)
        return [plain, *([NUMBERS[number - 1]] if 1 <= number <= len(NUMBERS) else [])]
    raise DataError(f"{question!r} has the answer {answer!r}: expected a number, in digits or up to ten in letters")


def geometric_mean(values: list[float]) -> float:
    """Return the geometric mean of `values`; 0 if one of them is 0."""
    return prod(value ** (1 / len(values)) for value in values)

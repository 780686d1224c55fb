"""GenEval 2: a vision language model answers questions about what a prompt asks for, part by part.

Source: "GenEval 2" (arXiv 2512.16853) and its code (github.com/facebookresearch/GenEval2, commit a6e82d2,
evaluation.py, lines 30 to 53, 73 to 100 and 131 to 190): Soft-TIFA, the probability of the right answer as the first
word. There the probability is read from all tokens of a Qwen3-VL-8B in the process, here from the 20 likeliest that an
endpoint gives. The questions are those of the benchmark's file, or your own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Literal

from PIL import Image
from pydantic import Field

from gerl.errors import DataError
from gerl.rewards.scorers.base import Columns, Metadata
from gerl.rewards.scorers.chat import ChatScorer, Choice, Unreadable, bare, check_question, first_tokens, probability_of
from gerl.rewards.scorers.http import Client, at_most, png_base64

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
COUNTING = "how many"  # how a question begins whose answer is a number
OTHER_COUNTS = ("zero", "no", "none", "several", "many")
Question = tuple[str, str]  # with the right answer


@dataclass(frozen=True, kw_only=True)
class GenEval2(ChatScorer):
    """A mean, from 0 to 1, of the probabilities of the right answers to the questions of the row's `metadata_key`.

    They are a list of pairs of a question and its answer, which is a number for one that begins with "How many", and
    else yes. `mean`: geometric, the benchmark's for prompts, near 0 where one thing is wrong; or arithmetic, which
    rises with each. The other one is a further column, as is `correct`, the share of answers that were right. An answer
    is asked for again where all words that could be one have together less than the probability `min_mass`.
    """

    model: str = "Qwen/Qwen3-VL-8B-Instruct"
    metadata_key: str = "vqa_list"
    mean: Literal["geometric", "arithmetic"] = "geometric"
    template: str = "{question} Answer in one word."
    min_mass: Annotated[float, Field(gt=0, le=1)] = 0.01
    image_size: Annotated[int, Field(ge=1)] | None = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_question(self.template)

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> Columns:
        asked = [self.questions(prompt, row) for prompt, row in zip(prompts, metadata, strict=True)]
        pictures = [png_base64(at_most(image, self.image_size)) for image in images]
        each = [(i, question) for i, questions in enumerate(asked) for question in questions]
        with self.client(self.base_url) as client:

            def answer(item: tuple[int, Question]) -> tuple[float, bool]:
                i, question = item
                return self._answer(client, pictures[i], prompts[i], question)

            answers = client.map(answer, each)
        rows: list[list[tuple[float, bool]]] = [[] for _ in images]
        for (i, _), found in zip(each, answers, strict=True):
            rows[i].append(found)
        columns = {
            "geometric": [geometric_mean([p for p, _ in row]) for row in rows],
            "arithmetic": [fmean(p for p, _ in row) for row in rows],
        }
        return {self.mean: columns.pop(self.mean), **columns, "correct": [fmean(right for _, right in r) for r in rows]}

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        self.questions(prompt, metadata)

    def questions(self, prompt: str, metadata: Metadata) -> list[Question]:
        """The questions of a row with their answers; raises `DataError` if there are none, or their form is another."""
        given = metadata.get(self.metadata_key)
        pairs = [tuple(pair) for pair in given if isinstance(pair, list | tuple)] if isinstance(given, list) else []
        found = [pair for pair in pairs if len(pair) == 2 and all(isinstance(part, str) and part for part in pair)]
        if not found or not isinstance(given, list) or len(found) < len(given):
            raise DataError(
                f"{prompt!r} has no questions for the geneval2 scorer, expected a list of pairs of a question and "
                f"its answer in the row's {self.metadata_key!r}, got {given!r:.200}: add it, or name the column "
                "with metadata_key"
            )
        for question, answer in found:
            words(question, answer)
        return found

    def _answer(self, client: Client, image: str, prompt: str, question: Question) -> tuple[float, bool]:
        """The probability of the right answer, and whether it is the likeliest."""
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

        text = self.template.replace("{question}", question[0])
        tokens = self.max_tokens or 1
        return self.ask(client, prompt, text, [image], read, max_tokens=tokens, logprobs=True, top_logprobs=20)


def _possible(question: str, top: Sequence[tuple[str, float]]) -> list[str]:
    """The words among the likeliest tokens that could answer a question, rightly or not."""
    if not question.lower().startswith(COUNTING):
        return ["yes", "no"]
    return [*NUMBERS, *OTHER_COUNTS, *(token for token, _ in top if bare(token).isdigit())]


def words(question: str, answer: str) -> list[str]:
    """The first words that count as the right answer: a number in letters and digits, else yes.

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
    """The root of the product of `values`; 0 if one of them is."""
    product = 1.0
    for value in values:
        product *= value ** (1 / len(values))
    return product

"""Reward worker: a process that holds scorers and calls them on images."""

import copy
import inspect
import logging
import math
import os
import time
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from PIL import Image

from gerl.config import ScorerConfig
from gerl.errors import RewardError
from gerl.objects import Function, offer
from gerl.protocol import FeedbackRequest, Images, ScorerFailure
from gerl.rewards.scorers import Scorer, build_scorer
from gerl.rewards.scorers.base import Metadata, PeopleScorer, ReturnError
from gerl.rewards.total import LARGEST
from gerl.utils.files import capture_logs
from gerl.utils.seeding import isolated

log = logging.getLogger(__name__)
Row = dict[str, float | ScorerFailure]  # the columns of an image
FRAMES = 8  # of a video shown to a scorer without `takes_frames`


@dataclass(frozen=True)
class Answer:
    """Result of a call for images `[B]`: a row per image, duration, reasons of retries, and warnings.

    `waiting`: set if people have not answered yet, so there are no rows: "", or the problem with the service.
    """

    rows: list[Row]
    seconds: float
    retried: list[str]
    warnings: list[str]
    waiting: str | None = None


class RewardWorker:
    """Worker that calls scorers, retries failed calls, and reports remaining failures instead of a score of 0.

    `folder`: the driver's current directory; relative paths are resolved against it if it exists here. `functions`:
    functions of the driver's program that are scorers, by name. `groupwise`: the scorers to which the driver passes
    whole groups; None allows all.
    """

    def __init__(
        self,
        scorers: dict[str, ScorerConfig],
        retries: int,
        folder: str,
        functions: Mapping[str, Function] | None = None,
        groupwise: Collection[str] | None = None,
    ) -> None:
        self.configs, self.retries, self.folder, self.groupwise = scorers, retries, folder, groupwise
        self.functions = functions or {}
        self.scorers: dict[str, Scorer] = {}

    def ping(self) -> None:
        """Return, which shows that this process has been placed."""

    def build(self) -> None:
        """Build the scorers, without loading models; raises `RewardError` if that fails on this machine."""
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        offer(self.functions)
        self.scorers = {name: self._build(name, config) for name, config in self.configs.items()}
        for name, scorer in self.scorers.items():
            if scorer.groupwise and self.groupwise is not None and name not in self.groupwise:
                raise RewardError(
                    f"reward.scorers.{name} is groupwise, which can only be determined by importing its file: "
                    f"import the packages of reward.scorers.{name}.env inside the function, not at the top of the "
                    "file"
                )

    def _build(self, name: str, config: ScorerConfig) -> Scorer:
        try:
            return build_scorer(name, config)
        except RewardError as error:
            if not config.env or not isinstance(error.__cause__, ImportError):
                raise
            raise RewardError(f"{error}; it has its own environment: add it to reward.scorers.{name}.env") from error

    def score(
        self,
        name: str,
        places: Sequence[tuple[int, int]],
        prompts: list[str],
        metadata: list[Metadata],
        *images: Images,
    ) -> Answer:
        """Score `images[i].pixels[row]` for `places` `[(i, row)]`; a retry replaces only failed scores."""
        start = time.perf_counter()
        if self.scorers[name].on_worker:
            return Answer(_given_rows(name, places, images), time.perf_counter() - start, [], [])
        pixels = [images[i].pixels[row] for i, row in places]
        with isolated(), capture_logs("reward_models.scorers", logging.WARNING) as warnings:
            rows, retried = self._attempt(name, pixels, prompts, metadata), list[str]()
            while (failed := _failures(rows)) and len(retried) < self.retries:
                retried.append(f"{len(failed)} of {len(rows)} images: {failed[0].reason}")
                again = self._attempt(name, pixels, prompts, metadata)
                rows = [_merged(row, new) for row, new in zip(rows, again, strict=True)]
        return Answer(rows, time.perf_counter() - start, retried, warnings)

    def ask(
        self,
        name: str,
        places: Sequence[tuple[int, int]],
        prompts: list[str],
        metadata: list[Metadata],
        occasion: FeedbackRequest,
        *images: Images,
    ) -> Answer:
        """Request the scores of one group from people; the answer is `waiting` if they have not answered yet."""
        start, scorer = time.perf_counter(), self.scorers[name]
        assert isinstance(scorer, PeopleScorer)

        def pictures() -> list[Any]:
            return [shown for i, row in places for shown in _to_pil(images[i].pixels[row], whole=True)]

        try:
            answer = scorer.ask(pictures, prompts[0], copy.deepcopy(metadata[0]), occasion)
        except Exception as error:
            log.debug("scorer %s raised", name, exc_info=True)
            failure = ScorerFailure(name, _reason(error, scorer))
            return Answer([{name: failure} for _ in places], time.perf_counter() - start, [], [])
        if isinstance(answer, str):
            return Answer([], time.perf_counter() - start, [], [], answer)
        rows: list[Row] = [{name: _validated(name, value, scorer)} for value in answer]
        return Answer(rows, time.perf_counter() - start, [], [])

    def reach(self, name: str) -> str:
        """Check that people can be asked; see `PeopleScorer.reach`."""
        scorer = self.scorers[name]
        assert isinstance(scorer, PeopleScorer)
        return scorer.reach()

    def _attempt(self, name: str, pixels: list[np.ndarray], prompts: list[str], metadata: list[Metadata]) -> list[Row]:
        """Call a scorer once; an error becomes a `ScorerFailure` of the images concerned.

        The first of several columns is the score and has the scorer's name, the others are `name/column`.
        """
        scorer = self.scorers[name]
        # copies, so that no scorer changes the input of another scorer or a retry
        shown = [_to_pil(p, whole=scorer.takes_frames) for p in pixels]
        owners = [i for i, pictures in enumerate(shown) for _ in pictures]
        try:
            returned = scorer(
                [picture for pictures in shown for picture in pictures],
                [prompts[i] for i in owners],
                [copy.deepcopy(metadata[i]) for i in owners],
            )
            columns = columns_of(returned, name)
        # A scorer may be user code and raise anything. Its failure becomes a value with a reason, for which the driver
        # drops the group or stops, as set by `reward.on_error`. sys.exit is caught because scripts call it.
        except (Exception, SystemExit) as error:
            if hasattr(error, "ray_terminate_msg"):  # Ray ends this process
                raise
            log.debug("scorer %s raised", name, exc_info=True)
            failure = ScorerFailure(name, _reason(error, scorer))
            return [{name: failure} for _ in pixels]
        rows: list[Row] = [{} for _ in pixels]
        for number, (column, scores) in enumerate(columns.items()):
            label = f"{name}/{column}" if number else name
            for i, value in enumerate(_by_image(name, scores, owners, len(pixels), scorer)):
                rows[i][label] = value
        return rows


def _given_rows(name: str, places: Sequence[tuple[int, int]], images: Sequence[Images]) -> list[Row]:
    """Return the rows of a scorer that was computed where the images were sampled."""
    columns = [column for column in images[0].scores if column.partition("/")[0] == name]
    if not columns:
        failure = ScorerFailure(name, "it needs the latents of sampled images, which these images do not have")
        return [{name: failure} for _ in places]
    return [{column: float(images[i].scores[column][row]) for column in columns} for i, row in places]


def _reason(error: BaseException, scorer: Scorer) -> str:
    """Describe in one line why a call failed, and where in the user's code."""
    if isinstance(error, ReturnError):
        return f"{error}{scorer.place()}"
    text = " ".join(str(error).split())
    what = f"it called sys.exit({text})" if isinstance(error, SystemExit) else f"{type(error).__name__}: {text}"
    return f"{what}{scorer.place(error)}"


def _to_pil(pixels: np.ndarray, whole: bool) -> list[Any]:
    """Convert an image `[H, W, 3]` to a list of one, a video `[F, H, W, 3]` to [all frames] or some frames."""
    if pixels.ndim == 3:
        return [Image.fromarray(pixels.copy())]
    if whole:
        return [[Image.fromarray(frame.copy()) for frame in pixels]]
    chosen = np.linspace(0, len(pixels) - 1, min(len(pixels), FRAMES)).round().astype(int)
    return [Image.fromarray(pixels[k].copy()) for k in chosen]


def _by_image(
    name: str, scores: list[object], owners: list[int], count: int, scorer: Scorer
) -> list[float | ScorerFailure]:
    """Return one value per image: the score, the mean over its frames, or the failure."""
    if len(scores) != len(owners):
        reason = (
            f"returned a list of length {len(scores)} for {len(owners)} images, expected one score each{scorer.place()}"
        )
        return [ScorerFailure(name, reason)] * count
    values: list[list[float | ScorerFailure]] = [[] for _ in range(count)]
    for owner, score in zip(owners, scores, strict=True):
        values[owner].append(_validated(name, score, scorer))
    failures = [next((part for part in parts if isinstance(part, ScorerFailure)), None) for parts in values]
    return [
        failure or fmean(part for part in parts if isinstance(part, float))
        for failure, parts in zip(failures, values, strict=True)
    ]


def _validated(name: str, score: object, scorer: Scorer) -> float | ScorerFailure:
    number = number_of(score)
    if number is None:
        return ScorerFailure(name, f"returned {score!r:.80}, which is not a number{scorer.place()}")
    if not math.isfinite(number):
        return ScorerFailure(name, f"returned {number}, which is not finite{scorer.place()}")
    if abs(number) > LARGEST:
        return ScorerFailure(name, f"returned {number:g}, above the float32 limit {LARGEST:.2g}{scorer.place()}")
    return number


# --- What a scorer returned


def columns_of(returned: object, name: str) -> dict[str, list[object]]:
    """Return the lists that scorer `name` returned by column; raises `ReturnError` for anything but lists."""
    columns: dict[str, Any] = dict(returned) if isinstance(returned, Mapping) else {name: returned}
    wrong = next((f"{kind}{_of(column, returned)}" for column, v in columns.items() if (kind := _no_list(v))), None)
    if wrong or not columns:
        raise ReturnError(
            f"returned {wrong or 'an empty dict'}, expected a list with one number per image, or a dict of such "
            f"lists by name{_idea(returned)}"
        )
    return {str(column): list(values) for column, values in columns.items()}


def _no_list(values: object) -> str | None:
    """Describe `values` if they are not a list with a number per image; None if they are."""
    shape = getattr(values, "shape", None)
    if isinstance(values, str | bytes | bytearray | Mapping | Set):
        return f"a {type(values).__name__}"
    if shape is not None and len(shape) != 1:
        return f"a {type(values).__name__} of shape {list(shape)}"
    if isinstance(values, tuple) and any(isinstance(v, list | Mapping) or getattr(v, "shape", ()) for v in values):
        return f"a tuple of {', '.join(type(part).__name__ for part in values[:4])}"
    return None if isinstance(values, Iterable) else f"{values!r:.80}"


def _of(column: object, returned: object) -> str:
    return f" as {str(column)!r}" if isinstance(returned, Mapping) else ""


def _idea(returned: object) -> str:
    """Suggest a fix for a return value that is not a list; "" if none is known."""
    shape = getattr(returned, "shape", ())
    if returned is None:
        return ": is a return missing?"
    if isinstance(returned, tuple):
        return ": return only the scores, such as its first part"
    if isinstance(returned, Awaitable):
        if inspect.iscoroutine(returned):
            returned.close()  # otherwise Python warns that it was never awaited
        return ": it must be awaited, which gerl does not do: use asyncio.run inside"
    if len(shape) == 2 and 1 in shape:
        return ": return its .reshape(-1)"
    return ": images are a list, return one number per image" if number_of(returned) is not None else ""


def number_of(score: object) -> float | None:
    """Convert a score to float; None for text, which float() would parse, and for anything but a single number."""
    try:
        return None if isinstance(score, str | bytes) else float(score)  # type: ignore[arg-type]  # it is tried
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _failures(rows: list[Row]) -> list[ScorerFailure]:
    return [value for row in rows for value in row.values() if isinstance(value, ScorerFailure)]


def _merged(row: Row, new: Row) -> Row:
    return {
        label: row[label] if isinstance(row.get(label), float) else new.get(label, row.get(label))  # type: ignore[misc]
        for label in {**row, **new}
    }

"""The reward worker: a process that holds scorers and calls them on images."""

import copy
import logging
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
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
from gerl.rewards.scorers import Scorer, build_scorer, columns_of, number_of
from gerl.rewards.scorers.base import Metadata, PeopleScorer, ReturnError
from gerl.rewards.total import LARGEST
from gerl.utils.files import capture_logs

log = logging.getLogger(__name__)
Row = dict[str, float | ScorerFailure]  # the columns of an image
FRAMES = 8  # of a video are shown to a scorer that knows images only


@dataclass(frozen=True)
class Answer:
    """The result of a call for images [B]: a row each, its seconds, the reasons of its retries, its warnings.

    `waiting`: people have not answered yet, so there are no rows; "", or the problem with the service.
    """

    rows: list[Row]
    seconds: float
    retried: list[str]
    warnings: list[str]
    waiting: str | None = None


class RewardWorker:
    """Calls scorers; one that fails is retried, then its failure is reported: never a score of 0 in its place.

    `folder`: the driver's current directory; relative paths are resolved against it if it exists here. `functions`:
    those of the driver's program that are scorers here, by name. `groupwise`: the scorers to which the driver gives
    groups; None: all that want them.
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
        """Build the scorers, without their models; raises `RewardError` if that is not possible on this machine."""
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
        """Scores of the images `images[i].pixels[row]` for `places` [(i, row)], with prompts [B] and metadata [B].

        A retry fills in what failed before, and keeps what did not.
        """
        start = time.perf_counter()
        pixels = [images[i].pixels[row] for i, row in places]
        with capture_logs("reward_models.scorers", logging.WARNING) as warnings:
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
        """As `score`, by people and of one group: their scores, or that they have not answered yet."""
        start, scorer = time.perf_counter(), self._people(name)

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
        rows: list[Row] = [{name: _validated(name, value, "")} for value in answer]
        return Answer(rows, time.perf_counter() - start, [], [])

    def reach(self, name: str) -> str:
        """As `PeopleScorer.reach`."""
        return self._people(name).reach()

    def _people(self, name: str) -> PeopleScorer:
        scorer = self.scorers[name]
        assert isinstance(scorer, PeopleScorer)
        return scorer

    def _attempt(self, name: str, pixels: list[np.ndarray], prompts: list[str], metadata: list[Metadata]) -> list[Row]:
        """Call a scorer once; an error becomes a `ScorerFailure` of the images concerned.

        The first of several columns is the score and has the scorer's name, the others are `name/column`.
        """
        scorer = self.scorers[name]
        # Copies, so that no scorer changes what another one, or a retry, gets to see.
        shown = [_to_pil(p, whole=scorer.takes_frames) for p in pixels]
        owners = [i for i, pictures in enumerate(shown) for _ in pictures]
        try:
            returned = scorer(
                [picture for pictures in shown for picture in pictures],
                [prompts[i] for i in owners],
                [copy.deepcopy(metadata[i]) for i in owners],
            )
            columns = columns_of(returned, name)
        # A scorer is the user's code and may raise anything; its failure becomes a value with a reason, for which the
        # driver drops the group or stops, as `reward.on_error` says. sys.exit belongs to scripts.
        except (Exception, SystemExit) as error:
            if hasattr(error, "ray_terminate_msg"):  # Ray ends this process
                raise
            log.debug("scorer %s raised", name, exc_info=True)
            failure = ScorerFailure(name, _reason(error, scorer))
            return [{name: failure} for _ in pixels]
        rows: list[Row] = [{} for _ in pixels]
        for number, (column, scores) in enumerate(columns.items()):
            label = f"{name}/{column}" if number else name
            for i, value in enumerate(_by_image(name, scores, owners, len(pixels), scorer.place())):
                rows[i][label] = value
        return rows


def _reason(error: BaseException, scorer: Scorer) -> str:
    """Why a call failed, in one line, and where in the user's own code."""
    if isinstance(error, ReturnError):
        return f"{error}{scorer.place()}"
    text = " ".join(str(error).split())
    what = f"it called sys.exit({text})" if isinstance(error, SystemExit) else f"{type(error).__name__}: {text}"
    return f"{what}{scorer.place(error)}"


def _to_pil(pixels: np.ndarray, whole: bool) -> list[Any]:
    """An image [H, W, 3] as a list of one; a video [F, H, W, 3] as a list of one list of frames, or of some frames."""
    if pixels.ndim == 3:
        return [Image.fromarray(pixels.copy())]
    if whole:
        return [[Image.fromarray(frame.copy()) for frame in pixels]]
    chosen = np.linspace(0, len(pixels) - 1, min(len(pixels), FRAMES)).round().astype(int)
    return [Image.fromarray(pixels[k].copy()) for k in chosen]


def _by_image(
    name: str, scores: list[object], owners: list[int], count: int, place: str
) -> list[float | ScorerFailure]:
    """One value per image: the score, the mean over the frames that were shown, or why there is none."""
    if len(scores) != len(owners):
        reason = f"returned {len(scores)} scores for {len(owners)} images, expected one per image{place}"
        return [ScorerFailure(name, reason)] * count
    values: list[list[float | ScorerFailure]] = [[] for _ in range(count)]
    for owner, score in zip(owners, scores, strict=True):
        values[owner].append(_validated(name, score, place))
    return [_mean_of_frames(parts) for parts in values]


def _mean_of_frames(parts: list[float | ScorerFailure]) -> float | ScorerFailure:
    failures = [part for part in parts if isinstance(part, ScorerFailure)]
    return failures[0] if failures else fmean(part for part in parts if isinstance(part, float))


def _validated(name: str, score: object, place: str) -> float | ScorerFailure:
    number = number_of(score)
    if number is None:
        return ScorerFailure(name, f"returned {score!r:.80}, which is not a number{place}")
    if not math.isfinite(number):
        return ScorerFailure(name, f"returned {number}, which is not finite{place}")
    if abs(number) > LARGEST:
        return ScorerFailure(name, f"returned {number:g}, above the float32 limit {LARGEST:.2g}{place}")
    return number


def _failures(rows: list[Row]) -> list[ScorerFailure]:
    return [value for row in rows for value in row.values() if isinstance(value, ScorerFailure)]


def _merged(row: Row, new: Row) -> Row:
    return {
        label: row[label] if isinstance(row.get(label), float) else new.get(label, row.get(label))  # type: ignore[misc]
        for label in {**row, **new}
    }

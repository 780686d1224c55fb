"""The reward worker: scores a micro-batch of images with every scorer and adds the scores up."""

import copy
import logging
import math
import time
from typing import Any

from PIL import Image

from gerl.config import RewardConfig
from gerl.errors import Interrupted, RewardError
from gerl.protocol import Images, ScorerFailure, Scores
from gerl.utils.reward_score import Scorer, build_scorer, columns_of

log = logging.getLogger(__name__)
Columns = dict[str, list[float | ScorerFailure]]  # name of a score -> [B]


class RewardManager:
    """Scores images; a scorer that fails is retried, then its failure is reported: never a score of 0 in its place."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.scorers = {name: build_scorer(name, scorer) for name, scorer in config.scorers.items()}

    def score(self, images: Images, prompts: list[str], metadata: list[dict[str, Any]]) -> Scores:
        """Rewards of images [B, H, W, 3] drawn for prompts [B] with metadata [B].

        The total is the weighted sum of the scores; it is None where a scorer of non-zero weight failed. A scorer of
        weight 0 is only watched: its scores and failures are reported and change no total. So are the columns of a
        scorer besides its first one.
        """
        start = time.perf_counter()
        batch = len(images.pixels)
        if not batch == len(prompts) == len(metadata):
            raise RewardError(
                f"{batch} images came with {len(prompts)} prompts and {len(metadata)} metadata: pair them"
            )
        results: Columns = {}
        for name, scorer in self.scorers.items():
            results |= self._scores(name, scorer, images, prompts, metadata)
        weights = {name: scorer.weight for name, scorer in self.config.scorers.items()}
        weighted = [name for name in weights if weights[name] != 0]
        watched = [name for name in weights if weights[name] == 0]
        totals: list[float | None] = []
        failures: list[list[ScorerFailure]] = []
        for i in range(batch):
            parts = [weights[name] * value for name in weighted if isinstance(value := results[name][i], float)]
            totals.append(math.fsum(parts) if len(parts) == len(weighted) else None)
            # Weighted scorers first: the first failure of a sample without a total is why it has none.
            row = [results[name][i] for name in [*weighted, *watched, *(n for n in results if n not in weights)]]
            failures.append([value for value in row if isinstance(value, ScorerFailure)])
        by_scorer = {
            name: [value if isinstance(value, float) else None for value in values] for name, values in results.items()
        }
        return Scores(totals, by_scorer, failures, time.perf_counter() - start)

    def _scores(
        self, name: str, scorer: Scorer, images: Images, prompts: list[str], metadata: list[dict[str, Any]]
    ) -> Columns:
        """Columns of one scorer. A retry fills in what failed before, and keeps what did not."""
        results: Columns = {}
        for attempt in range(1, self.config.retries + 2):
            again = _attempt(name, scorer, images, prompts, metadata)
            for column, values in again.items():
                old = results.get(column, values)
                pairs = zip(old, values, strict=True)
                results[column] = [new if isinstance(value, ScorerFailure) else value for value, new in pairs]
            failed = [value for values in results.values() for value in values if isinstance(value, ScorerFailure)]
            if not failed:
                break
            log.warning(
                "scorer %s failed for %d of %d images (attempt %d of %d): %s",
                *(name, len(failed), len(prompts), attempt, self.config.retries + 1, failed[0].reason),
            )
        return results


def _attempt(name: str, scorer: Scorer, images: Images, prompts: list[str], metadata: list[dict[str, Any]]) -> Columns:
    """Call a scorer once; whatever goes wrong is a `ScorerFailure` of the samples concerned.

    The first of several columns is the score and has the scorer's name, the others are `name/column`.
    """
    batch = len(prompts)
    # Copies, so that no scorer changes what another one, or a retry, gets to see.
    pictures = [Image.fromarray(pixels.copy()) for pixels in images.pixels]
    try:
        values = columns_of(scorer(pictures, list(prompts), copy.deepcopy(metadata)), name)
    except Interrupted:
        raise
    # A scorer is the user's code and may raise anything; its failure becomes a value with a reason, for which the
    # driver drops the group or stops, as `reward.on_error` says.
    except Exception as error:
        log.debug("scorer %s raised", name, exc_info=True)
        return {name: [ScorerFailure(name, f"{type(error).__name__}: {' '.join(str(error).split())}")] * batch}
    results: Columns = {}
    for number, (column, scores) in enumerate(values.items()):
        label = f"{name}/{column}" if number else name
        if len(scores) != batch:
            results[label] = [ScorerFailure(name, f"returned {len(scores)} scores for {batch} images")] * batch
        else:
            results[label] = [_checked(name, value) for value in scores]
    return results


def _checked(name: str, value: Any) -> float | ScorerFailure:
    try:
        if isinstance(value, str | bytes):  # float() would parse it
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return ScorerFailure(name, f"returned {value!r}, which is not a number")
    return number if math.isfinite(number) else ScorerFailure(name, f"returned {number}, which is not finite")

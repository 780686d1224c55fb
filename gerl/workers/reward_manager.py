"""The reward worker: scores a micro-batch of images with every scorer and adds the scores up."""

import copy
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from PIL import Image

from gerl.config import RewardConfig
from gerl.errors import Interrupted, RewardError
from gerl.protocol import Images, ScorerFailure, Scores
from gerl.utils.reward_score import Scorer, build_scorer

log = logging.getLogger(__name__)


class RewardManager:
    """Scores images; a scorer that fails is retried, then its failure is reported: never a score of 0 in its place."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.scorers = {name: build_scorer(name, scorer) for name, scorer in config.scorers.items()}

    def score(self, images: Images, prompts: list[str], metadata: list[dict[str, Any]]) -> Scores:
        """Rewards of images [B, H, W, 3] drawn for prompts [B] with metadata [B].

        The total is the weighted sum of the scores; it is None where a scorer of non-zero weight failed. A scorer of
        weight 0 is only watched: its scores and failures are reported and change no total.
        """
        start = time.perf_counter()
        batch = len(images.pixels)
        if not batch == len(prompts) == len(metadata):
            raise RewardError(
                f"{batch} images came with {len(prompts)} prompts and {len(metadata)} metadata: pair them"
            )
        results = {name: self._scores(name, scorer, images, prompts, metadata) for name, scorer in self.scorers.items()}
        weights = {name: scorer.weight for name, scorer in self.config.scorers.items()}
        weighted = [name for name in weights if weights[name] != 0]
        watched = [name for name in weights if weights[name] == 0]
        totals: list[float | None] = []
        failures: list[list[ScorerFailure]] = []
        for i in range(batch):
            parts = [weights[name] * value for name in weighted if isinstance(value := results[name][i], float)]
            totals.append(math.fsum(parts) if len(parts) == len(weighted) else None)
            # Weighted scorers first: the first failure of a sample without a total is why it has none.
            row = [results[name][i] for name in weighted + watched]
            failures.append([value for value in row if isinstance(value, ScorerFailure)])
        by_scorer = {
            name: [value if isinstance(value, float) else None for value in values] for name, values in results.items()
        }
        return Scores(totals, by_scorer, failures, time.perf_counter() - start)

    def _scores(
        self, name: str, scorer: Scorer, images: Images, prompts: list[str], metadata: list[dict[str, Any]]
    ) -> list[float | ScorerFailure]:
        """Scores [B] of one scorer. A retry fills in what failed before, and keeps what did not."""
        results: list[float | ScorerFailure] = []
        for attempt in range(1, self.config.retries + 2):
            again = _attempt(name, scorer, images, prompts, metadata)
            results = [
                new if isinstance(old, ScorerFailure) else old for old, new in zip(results or again, again, strict=True)
            ]
            failed = [value for value in results if isinstance(value, ScorerFailure)]
            if not failed:
                break
            log.warning(
                "scorer %s failed for %d of %d images (attempt %d of %d): %s",
                *(name, len(failed), len(results), attempt, self.config.retries + 1, failed[0].reason),
            )
        return results


def _attempt(
    name: str, scorer: Scorer, images: Images, prompts: list[str], metadata: list[dict[str, Any]]
) -> list[float | ScorerFailure]:
    """Call a scorer once; whatever goes wrong is a `ScorerFailure` of the samples concerned."""
    batch = len(prompts)
    # Copies, so that no scorer changes what another one, or a retry, gets to see.
    pictures = [Image.fromarray(pixels.copy()) for pixels in images.pixels]
    try:
        returned = scorer(pictures, list(prompts), copy.deepcopy(metadata))
        if isinstance(returned, str | bytes | Mapping):
            raise TypeError(f"returned a {type(returned).__name__}, expected a list of {batch} floats")
        values = list(returned)
    except Interrupted:
        raise
    # A scorer is the user's code and may raise anything; its failure becomes a value with a reason, for which the
    # driver drops the group or stops, as `reward.on_error` says.
    except Exception as error:
        log.debug("scorer %s raised", name, exc_info=True)
        return [ScorerFailure(name, f"{type(error).__name__}: {' '.join(str(error).split())}")] * batch
    if len(values) != batch:
        return [ScorerFailure(name, f"returned {len(values)} scores for {batch} images")] * batch
    return [_checked(name, value) for value in values]


def _checked(name: str, value: Any) -> float | ScorerFailure:
    try:
        if isinstance(value, str | bytes):  # float() would parse it
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return ScorerFailure(name, f"returned {value!r}, which is not a number")
    return number if math.isfinite(number) else ScorerFailure(name, f"returned {number}, which is not finite")

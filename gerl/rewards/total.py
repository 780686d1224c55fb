"""The reward of an image from the scores of its scorers: which of them apply, on what scale, and their weighted sum."""

import math
from collections.abc import Mapping

from gerl.config import ScorerConfig
from gerl.errors import DataError
from gerl.protocol import Prompt, ScorerFailure

DATA_SOURCE = "data_source"  # column of a prompt file that picks the scorers of a row


def applies(scorer: ScorerConfig, prompt: Prompt) -> bool:
    """Whether images of `prompt` are scored by `scorer` (`reward.scorers.NAME.data_sources`)."""
    return scorer.data_sources is None or str(prompt.metadata.get(DATA_SOURCE)) in scorer.data_sources


def shaped(scorer: ScorerConfig, score: float) -> float:
    """`clip(scale * score + offset)`: a score on the scale on which it counts."""
    value = scorer.scale * score + scorer.offset
    low, high = scorer.clip or (-math.inf, math.inf)
    return min(max(value, low), high)


def total(
    scorers: Mapping[str, ScorerConfig], prompt: Prompt, scores: Mapping[str, float | ScorerFailure]
) -> float | None:
    """Weighted sum of the shaped scores of the scorers that apply to `prompt`; None if one of them failed.

    A scorer of weight 0 is only watched: its failure changes nothing.
    """
    parts = []
    for name, scorer in scorers.items():
        if scorer.weight == 0 or not applies(scorer, prompt):
            continue
        score = scores[name]
        if isinstance(score, ScorerFailure):
            return None
        parts.append(scorer.weight * shaped(scorer, score))
    return math.fsum(parts)


def check_routes(scorers: Mapping[str, ScorerConfig], prompts: list[Prompt]) -> None:
    """Raise `DataError` for the first prompt to which no scorer with a weight applies."""
    for prompt in prompts:
        if not any(scorer.weight and applies(scorer, prompt) for scorer in scorers.values()):
            sources = sorted({source for scorer in scorers.values() for source in scorer.data_sources or ()})
            raise DataError(
                f"prompt {prompt.id}: {prompt.text!r} has the {DATA_SOURCE} {prompt.metadata.get(DATA_SOURCE)!r}, for "
                f"which no scorer with a weight is named; reward.scorers.NAME.data_sources have {', '.join(sources)}"
            )

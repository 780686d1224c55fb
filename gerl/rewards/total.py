"""The reward of an image from the scores of its scorers: which of them apply, on what scale, and their weighted sum."""

import math
from collections.abc import Mapping
from dataclasses import replace

from gerl.config import RewardConfig, ScorerConfig
from gerl.config.blocks import RunPart
from gerl.errors import DataError
from gerl.protocol import DATA_SOURCE, Prompt, ScorerFailure

LARGEST = 3.4028234663852886e38  # of a float32, in which rewards are trained on


def applies(scorer: ScorerConfig, prompt: Prompt) -> bool:
    """Whether images of `prompt` are scored by `scorer` (`reward.scorers.NAME.data_sources`); files' are not."""
    if prompt.given:
        return False
    return scorer.data_sources is None or str(prompt.metadata.get(DATA_SOURCE)) in scorer.data_sources


def looking(scorers: Mapping[str, ScorerConfig], part: RunPart) -> dict[str, ScorerConfig]:
    """The scorers that look at the images of a `part` of a run (`reward.scorers.NAME.during`)."""
    return {name: scorer for name, scorer in scorers.items() if scorer.during in ("both", part)}


def looking_always(config: RewardConfig) -> RewardConfig:
    """The reward where nothing is trained, as in `gerl.score`: every scorer looks at all images."""
    return replace(config, scorers={name: replace(scorer, during="both") for name, scorer in config.scorers.items()})


def shaped(scorer: ScorerConfig, score: float) -> float:
    """`clip(scale * score + offset)`: a score on the scale on which it counts."""
    value = scorer.scale * score + scorer.offset
    low, high = scorer.clip or (-math.inf, math.inf)
    return min(max(value, low), high)


def total(
    scorers: Mapping[str, ScorerConfig], prompt: Prompt, scores: Mapping[str, float | ScorerFailure]
) -> float | ScorerFailure | None:
    """Weighted sum of the shaped scores of the scorers that apply to `prompt`; None if one of them failed.

    None as well if none with a weight applies, as in a validation without the people who score. A scorer of weight 0
    is only watched: its failure changes nothing. What float32 cannot hold is a failure.
    """
    parts: dict[str, float] = {}
    for name, scorer in scorers.items():
        if scorer.weight == 0 or not applies(scorer, prompt):
            continue
        score = scores[name]
        if isinstance(score, ScorerFailure):
            return None
        counted = shaped(scorer, score)
        parts[name] = scorer.weight * counted
        if max(abs(counted), abs(parts[name])) > LARGEST:
            return _too_large(name, counted if abs(counted) > abs(parts[name]) else parts[name])
    if not parts:
        return None
    value = math.fsum(parts.values())
    return value if abs(value) <= LARGEST else _too_large(max(parts, key=lambda name: abs(parts[name])), value)


def _too_large(name: str, value: float) -> ScorerFailure:
    return ScorerFailure(
        name, f"its part of the total is {value:g}, above the float32 limit {LARGEST:.2g}: lower scale or weight"
    )


def described(scorers: Mapping[str, ScorerConfig]) -> str:
    """Which scorers count how much, in one line, such as `1 x ocr + 0.1 x bright; watched: sharpness`."""
    parts = [f"{scorer.weight:g} x {name}{_notes(scorer)}" for name, scorer in scorers.items() if scorer.weight]
    only = {"both": "", "training": " (in training)", "validation": " (in validation)"}
    watched = [f"{name}{only[scorer.during]}" for name, scorer in scorers.items() if not scorer.weight]
    return " + ".join(parts).replace("+ -", "- ") + (f"; watched: {', '.join(watched)}" if watched else "")


def _notes(scorer: ScorerConfig) -> str:
    notes = ["scaled"] if (scorer.scale, scorer.offset, scorer.clip) != (1, 0, None) else []
    notes += [f"normalised by {scorer.normalise}"] if scorer.normalise != "none" else []
    notes += [f"for {' and '.join(scorer.data_sources)}"] if scorer.data_sources else []
    return f" ({', '.join(notes)})" if notes else ""


def check_routes(scorers: Mapping[str, ScorerConfig], prompts: list[Prompt]) -> None:
    """Raise `DataError` for the first prompt to which no scorer with a weight applies."""
    weighted = [scorer for scorer in scorers.values() if scorer.weight]
    for prompt in prompts if weighted else []:  # without any nothing is to be measured
        if not prompt.given and not any(applies(scorer, prompt) for scorer in weighted):
            sources = sorted({source for scorer in scorers.values() for source in scorer.data_sources or ()})
            raise DataError(
                f"prompt {prompt.id}: {prompt.text!r} has the {DATA_SOURCE} {prompt.metadata.get(DATA_SOURCE)!r}, "
                "for which there is no scorer with a weight; reward.scorers.NAME.data_sources have "
                f"{', '.join(sources)}"
            )

"""The scorers: each turns images and their prompts into one number an image."""

from pydantic import TypeAdapter, ValidationError

from gerl.config import ScorerConfig
from gerl.errors import RewardError
from gerl.utils.reward_score.base import Scorer, require
from gerl.utils.reward_score.custom import CustomScorer
from gerl.utils.reward_score.jpeg import JpegCompressibility, JpegIncompressibility
from gerl.utils.reward_score.ocr import OcrScorer

__all__ = ["SCORERS", "Scorer", "build_scorer", "require"]

# Each is a dataclass whose fields are the scorer's kwargs.
SCORERS: dict[str, type[OcrScorer] | type[JpegCompressibility] | type[JpegIncompressibility]] = {
    "ocr": OcrScorer,
    "jpeg_compressibility": JpegCompressibility,
    "jpeg_incompressibility": JpegIncompressibility,
}


def build_scorer(name: str, config: ScorerConfig) -> Scorer:
    """The scorer `name`: the user's function if `config.path` is given, else one of gerl's.

    Building checks everything that can be checked without scoring, and loads no model weights.

    Raises:
        RewardError: no such scorer, its package is not installed, wrong kwargs, or a file or function is missing.
    """
    key = f"reward.scorers.{name}"
    if config.path is not None:
        return CustomScorer(key, config.path, config.function, config.kwargs)
    if name not in SCORERS:
        raise RewardError(
            f"{key}: gerl has no such scorer, only {', '.join(SCORERS)}; for your own, give its file in {key}.path"
        )
    try:
        return TypeAdapter(SCORERS[name]).validate_python(config.kwargs)
    except ValidationError as error:
        first = error.errors()[0]
        kwarg = ".".join(str(part) for part in first["loc"])
        raise RewardError(
            f"{key}.kwargs: {kwarg}={first['input']!r} is wrong ({first['msg']}); "
            f"{name} takes {', '.join(SCORERS[name].__dataclass_fields__)}"
        ) from None

"""The scorers: each turns images and their prompts into numbers, one an image, or several by name."""

from inspect import signature

from pydantic import TypeAdapter, ValidationError

from gerl.config import ScorerConfig
from gerl.errors import RewardError
from gerl.rewards.scorers.aesthetic import AestheticScore
from gerl.rewards.scorers.base import Scorer, columns_of, number_of, require
from gerl.rewards.scorers.clipscore import ClipScore
from gerl.rewards.scorers.colourfulness import Colourfulness
from gerl.rewards.scorers.custom import CustomScorer
from gerl.rewards.scorers.deqa import DeqaScorer
from gerl.rewards.scorers.diversity import Diversity
from gerl.rewards.scorers.geneval import GenEvalScorer
from gerl.rewards.scorers.hpsv2 import HpsV2
from gerl.rewards.scorers.image_similarity import ImageSimilarity
from gerl.rewards.scorers.imagereward import ImageReward
from gerl.rewards.scorers.jpeg import JpegCompressibility, JpegIncompressibility
from gerl.rewards.scorers.ocr import OcrScorer
from gerl.rewards.scorers.pickscore import PickScore
from gerl.rewards.scorers.remote import RemoteScorer
from gerl.rewards.scorers.sharpness import Sharpness
from gerl.rewards.scorers.unified_reward import UnifiedRewardScorer
from gerl.rewards.scorers.vlm_judge import VlmJudge

__all__ = ["SCORERS", "Scorer", "build_scorer", "columns_of", "number_of", "require"]

# Each is a dataclass whose fields are the scorer's kwargs.
SCORERS: dict[str, type[Scorer]] = {
    "ocr": OcrScorer,
    "pickscore": PickScore,
    "clipscore": ClipScore,
    "aesthetic": AestheticScore,
    "imagereward": ImageReward,
    "hpsv2": HpsV2,
    "geneval": GenEvalScorer,
    "image_similarity": ImageSimilarity,
    "diversity": Diversity,
    "vlm_judge": VlmJudge,
    "unified_reward": UnifiedRewardScorer,
    "deqa": DeqaScorer,
    "remote": RemoteScorer,
    "sharpness": Sharpness,
    "colourfulness": Colourfulness,
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
    except RewardError as error:
        raise RewardError(f"{key}: {error}") from error.__cause__
    except ValidationError as error:
        first = error.errors()[0]
        kwarg = ".".join(str(part) for part in first["loc"])
        raise RewardError(
            f"{key}.kwargs: {kwarg}={first['input']!r} is wrong ({first['msg']}); "
            f"{name} takes {', '.join(signature(SCORERS[name]).parameters)}"
        ) from None

"""The scorers: each turns images and their prompts into numbers, one an image, or several by name."""

import pkgutil
from inspect import signature

from pydantic import TypeAdapter, ValidationError

from gerl.commandline.form import either, near_names
from gerl.config import ScorerConfig
from gerl.errors import RewardError
from gerl.objects import PREFIX
from gerl.rewards.scorers.base import PeopleScorer, RemoteOnlyScorer, Scorer, columns_of, number_of, require
from gerl.rewards.scorers.custom import CustomScorer, FunctionScorer

__all__ = [
    "SCORERS",
    "RemoteOnlyScorer",
    "Scorer",
    "asks_people",
    "build_scorer",
    "columns_of",
    "known_scorer",
    "number_of",
    "require",
    "scorer_class",
]

# The module and class of each; a class is a dataclass whose fields are the scorer's kwargs. Names and not the classes:
# some need torch, and only those that take part are imported.
SCORERS = {
    "ocr": "ocr:OcrScorer",
    "pickscore": "clip:PickScore",
    "clipscore": "clip:ClipScore",
    "aesthetic": "clip:AestheticScore",
    "imagereward": "blip:ImageReward",
    "hpsv2": "clip:HpsV2",
    "hpsv3": "vlm_reward:HpsV3",
    "videoalign": "videoalign:VideoAlign",
    "geneval": "geneval:GenEvalScorer",
    "geneval2": "vqa:GenEval2",
    "dpg": "vqa:DpgScorer",
    "blip_vqa": "blip:BlipVqa",
    "image_similarity": "similarity:ImageSimilarity",
    "dino_similarity": "similarity:DinoSimilarity",
    "diversity": "similarity:Diversity",
    "editreward": "vlm_reward:EditReward",
    "vlm_judge": "vlm_judge:VlmJudge",
    "unified_reward": "vlm_judge:UnifiedReward1",
    "unified_reward2": "vlm_judge:UnifiedReward2",
    "deqa": "remote:DeqaScorer",
    "remote": "remote:RemoteScorer",
    "colour": "simple:Colour",
    "vote": "vote:VoteScorer",
    "sharpness": "simple:Sharpness",
    "colourfulness": "simple:Colourfulness",
    "jpeg_compressibility": "simple:JpegCompressibility",
    "jpeg_incompressibility": "simple:JpegIncompressibility",
}


def scorer_class(name: str) -> type[Scorer]:
    """The class of gerl's scorer `name`, one of `SCORERS`."""
    found: type[Scorer] = pkgutil.resolve_name(f"{__name__}.{SCORERS[name]}")
    return found


def asks_people(name: str) -> bool:
    """Whether gerl's scorer `name` asks people; False where gerl has none of this name."""
    return name in SCORERS and issubclass(scorer_class(name), PeopleScorer)


def build_scorer(name: str, config: ScorerConfig) -> Scorer:
    """The scorer `name`: the user's function if `config.path` is given, else one of gerl's.

    Building checks everything that can be checked without scoring, and loads no model weights.

    Raises:
        RewardError: no such scorer, its package is not installed, wrong kwargs, or a file or function is missing.
    """
    key = f"reward.scorers.{name}"
    if config.path is not None and config.path.startswith(PREFIX):
        return FunctionScorer(key, config.path, config.kwargs)
    if config.path is not None:
        return CustomScorer(key, config.path, config.function, config.kwargs)
    if name not in SCORERS:
        near = near_names(name, list(SCORERS))
        hint = f"did you mean {either(near)}" if near else f"there are {', '.join(SCORERS)}"
        raise RewardError(f"{key}: gerl has no such scorer, {hint}; for a custom one, set {key}.path to its file")
    try:
        return TypeAdapter(scorer_class(name)).validate_python(config.kwargs)
    except RewardError as error:
        raise RewardError(f"{key}: {error}") from error.__cause__
    except ValidationError as error:
        first = error.errors()[0]
        kwarg = ".".join(str(part) for part in first["loc"])
        raise RewardError(
            f"{key}.kwargs: {kwarg}={first['input']!r} is invalid ({first['msg']}); {name} takes "
            f"{', '.join(signature(scorer_class(name)).parameters) or 'none'}"
        ) from None


def known_scorer(name: str, config: ScorerConfig) -> Scorer:
    """As `build_scorer`, in a process that does not score and may lack the packages of `config.env`.

    Where a package is missing here and the scorer has an environment, it is an `RemoteOnlyScorer`.
    """
    try:
        return build_scorer(name, config)
    except RewardError as error:
        if not config.env or not isinstance(error.__cause__, ImportError):
            raise
    return RemoteOnlyScorer() if config.path is not None else RemoteOnlyScorer(scorer_class(name))

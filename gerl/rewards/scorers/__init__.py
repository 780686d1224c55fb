"""Scorers: compute one or several named numbers per image and prompt."""

import pkgutil
from inspect import signature

from pydantic import TypeAdapter, ValidationError

from gerl.commandline.form import either, near_names
from gerl.config import ScorerConfig
from gerl.config.user_files import check_trusted
from gerl.errors import RewardError
from gerl.objects import PREFIX
from gerl.rewards.scorers.base import PeopleScorer, RemoteOnlyScorer, Scorer, require
from gerl.rewards.scorers.custom import CustomScorer, FunctionScorer
from gerl.utils.seeding import isolated

__all__ = [
    "SCORERS",
    "RemoteOnlyScorer",
    "Scorer",
    "asks_people",
    "build_scorer",
    "known_scorer",
    "require",
    "scorer_class",
]

# Module (in `MODELS`, unless it starts with gerl) and class of each scorer; the fields of a class are its kwargs.
# Names instead of classes, because some need torch, and only the scorers in use are imported.
MODELS = "reward_models.scorers"
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
    "base_alignment": "gerl.rewards.scorers.base_alignment:BaseAlignment",
    "colour": "gerl.rewards.scorers.simple:Colour",
    "vote": "vote:VoteScorer",
    "sharpness": "gerl.rewards.scorers.simple:Sharpness",
    "colourfulness": "gerl.rewards.scorers.simple:Colourfulness",
    "jpeg_compressibility": "gerl.rewards.scorers.simple:JpegCompressibility",
    "jpeg_incompressibility": "gerl.rewards.scorers.simple:JpegIncompressibility",
}


def scorer_class(name: str) -> type[Scorer]:
    """Return the class of the built-in scorer `name`, one of `SCORERS`."""
    place = SCORERS[name]
    cls: type[Scorer] = pkgutil.resolve_name(place if place.startswith("gerl.") else f"{MODELS}.{place}")
    return cls


def asks_people(name: str) -> bool:
    """Whether the built-in scorer `name` asks people; False if it does not exist."""
    return name in SCORERS and issubclass(scorer_class(name), PeopleScorer)


@isolated()
def build_scorer(name: str, config: ScorerConfig) -> Scorer:
    """Build the scorer `name`, custom if `config.path` is given, without weights; raises `RewardError` if it cannot."""
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
    """Build a scorer outside its processes: a `RemoteOnlyScorer` if a package of its environment is missing here."""
    named = {f"env.{kind}": value for kind, value in config.env.items()}  # of its processes: packages, an interpreter
    sent = ("url", "base_url", "token_env", "token_file")  # prompts, images and the token go to the address
    named |= {f"kwargs.{n}": value for n, value in config.kwargs.items() if n in sent}
    for kind, value in named.items():
        for text in value if isinstance(value, list) else [str(value)]:
            check_trusted(f"reward.scorers.{name}.{kind}", text)
    try:
        return build_scorer(name, config)
    except RewardError as error:
        if not config.env or not isinstance(error.__cause__, ImportError):
            raise
    return RemoteOnlyScorer() if config.path is not None else RemoteOnlyScorer(scorer_class(name))

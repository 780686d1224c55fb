"""Packages, weights and files of built-in scorers, and which this machine lacks; imports neither torch nor scorers."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from gerl.config import ScorerConfig
from gerl.config.bounded_text import read_json
from gerl.config.reading import typed
from gerl.errors import GerlError
from gerl.protocol import Prompt
from gerl.rewards.scorers import known_scorer

# Scorer -> kwarg -> its default, and the file that is read from there. The default is a Hub id, or with the file ""
# the value for which this table holds. Scorers that ask a service or people have no entry.
MODEL = "model"  # in place of a file: the weights of a transformers model, in one file or several
CLIP = ("openai/clip-vit-large-patch14", MODEL)
HEAD = "sac+logos+ava1-l14-linearMSE"
WEIGHTS: dict[str, dict[str, tuple[str, str]]] = {
    "ocr": {"backend": ("rapidocr", "")},
    "colour": {},
    "sharpness": {},
    "colourfulness": {},
    "jpeg_compressibility": {},
    "jpeg_incompressibility": {},
    "geneval": {"model": ("facebook/mask2former-swin-small-coco-instance", MODEL), "colour_model": CLIP},
    "image_similarity": {"model": CLIP},
    "dino_similarity": {"model": ("facebook/dinov2-base", MODEL)},
    "pickscore": {
        "model": ("yuvalkirstain/PickScore_v1", MODEL),
        "processor": ("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "preprocessor_config.json"),
    },
    "hpsv3": {
        "model": ("MizzenAI/HPSv3", "HPSv3.safetensors"),
        "checkpoint": ("HPSv3.safetensors", ""),
        "base": ("Qwen/Qwen2-VL-7B-Instruct", "tokenizer_config.json"),
    },
    "hpsv2": {"model": ("xswu/HPSv2", "HPS_v2.1_compressed.pt"), "checkpoint": ("HPS_v2.1_compressed.pt", "")},
    "imagereward": {
        "model": ("THUDM/ImageReward", "ImageReward.pt"),
        "tokenizer": ("google-bert/bert-base-uncased", "tokenizer_config.json"),
    },
    "clipscore": {"model": CLIP},
    "blip_vqa": {"model": ("Salesforce/blip-vqa-capfilt-large", MODEL)},
    "aesthetic": {
        "model": CLIP,
        "head": (HEAD, ""),
        "repository": ("camenduru/improved-aesthetic-predictor", f"{HEAD}.pth"),
    },
    "diversity": {"model": CLIP},
}
PACKAGES = {
    "ocr": ("cv2", "onnxruntime", "rapidocr"),
    "geneval": ("scipy",),
    "hpsv2": ("open_clip",),
    "hpsv3": ("hpsv3",),
    "blip_vqa": ("spacy", "en_core_web_sm"),
}
COLUMNS = {"geneval": "tag", "image_similarity": "image", "dino_similarity": "image"}  # of a prompt's row
# Not in `offers`: what the guard measures without a scorer, and `colour`, since the words of a prompt do not tell
# whether they name the colour of the ground.
MEASURED = ("diversity", "sharpness", "colourfulness", "jpeg_compressibility", "jpeg_incompressibility")
OFFERED = [name for name in WEIGHTS if name not in (*MEASURED, "colour")]


def missing(name: str, kwargs: Mapping[str, Any]) -> str:
    """Return what the scorer `name` of `WEIGHTS` would download, or a package that it lacks; "" if there is nothing."""
    for package in PACKAGES.get(name, ()):
        if find_spec(package) is None:
            return f"the package {package}"
    for kwarg, (default, file) in WEIGHTS[name].items():
        source = str(kwargs.get(kwarg, default))
        if not file and source != default:
            return f"what {kwarg}={source} needs"
        if file and not (_has_model(source) if file == MODEL else _find(source, file)):
            return source if file == MODEL else f"{file} of {source}"
    return ""


def _find(source: str, file: str) -> Path | None:
    """Return the path of `file` in `source`, a folder or a Hub id whose files are in the cache; None without it."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    try:
        cached = try_to_load_from_cache(source, file)
    except ValueError:  # neither a folder nor the id of a repository
        return None
    return Path(cached) if isinstance(cached, str) else None


def _has_model(source: str) -> bool:
    for file in ("model.safetensors", "pytorch_model.bin"):
        if _find(source, file):
            return True
        if index := _find(source, f"{file}.index.json"):
            return all(_find(source, shard) for shard in read_json(index)["weight_map"].values())
    return False


def offers(prompts: Sequence[Prompt], gpu: bool) -> list[str]:
    """Return for each built-in scorer that can score `prompts` without a download the override that watches it.

    `gpu`: give those with a network a share of a GPU.
    """
    names = [name for name in OFFERED if not missing(name, {}) and _applies(name, prompts)]
    shares = [{"gpus": 0.1} if gpu and name != "ocr" else {} for name in names]
    return [
        typed({f"+reward.scorers.{name}": {"weight": 0, "during": "validation", **share}})
        for name, share in zip(names, shares, strict=True)
    ]


def _applies(name: str, prompts: Sequence[Prompt]) -> bool:
    if name != "ocr":
        return name not in COLUMNS or all(prompt.metadata.get(COLUMNS[name]) for prompt in prompts)
    try:
        known_scorer(name, ScorerConfig()).check_prompts(list(prompts))
    except GerlError:
        return False
    return True

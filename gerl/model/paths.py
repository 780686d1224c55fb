"""Resolution of `model.path` and `model.lora` (models shipped with gerl, folders, files, Hub ids) without torch."""

import re
from importlib import resources
from pathlib import Path

from gerl.config.bounded_text import read_json
from gerl.errors import ModelError

SHIPPED = ("signs",)
ALLOWED = "give a folder, a Hub id such as 'owner/name', or 'signs'"
INDEX = "model_index.json"
WEIGHTS = "pytorch_lora_weights.safetensors"  # diffusers' name of a LoRA file
PATCHES = {  # pipeline -> side of its denoiser's patches, in latents
    "StableDiffusionPipeline": 1,
    "StableDiffusionXLPipeline": 1,
    "StableDiffusion3Pipeline": 2,
    "FluxPipeline": 2,
    "QwenImagePipeline": 2,
}
SINGLE_FILES = (".safetensors", ".ckpt", ".gguf", ".bin", ".pt", ".pth")
ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)|\w+://")


def resolve(path: str) -> str:
    """Return the folder of a pipeline, or `path` itself for a Hub id. Raises `ModelError` if it can be neither."""
    if path in SHIPPED:
        return str(resources.files("gerl") / "assets" / path)
    if not path.strip():
        raise ModelError(f"model.path is empty: {ALLOWED}")
    folder = Path(path).expanduser()
    if address := ADDRESS.match(path):
        remedy = f"the Hub id, model.path={address[1]}" if address[1] else "a Hub id such as owner/name, or a folder"
        raise ModelError(f"model.path={path!r} is a web address: use {remedy}")
    if folder.suffix in SINGLE_FILES and not folder.is_dir():
        raise ModelError(
            f"model.path={path!r} is a single file, and gerl reads pipeline folders: create one in Python with "
            f"PIPELINE.from_single_file({path!r}).save_pretrained('FOLDER'), then set model.path=FOLDER"
        )
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or folder.exists()
    if not looks_local:
        if path.count("/") != 1:
            raise ModelError(f"model.path={path!r} is not a pipeline: {ALLOWED}")
        return path
    if not (folder / INDEX).is_file():
        raise ModelError(f"model.path={path!r} is not a pipeline: {_why(folder)}")
    return str(folder)


def check_size(path: str, height: int | None, width: int | None) -> None:
    """Raise `ModelError` for a size in pixels that the pipeline in a folder cannot sample, if its multiple is known."""
    multiple = size_multiple(Path(resolve(path)))
    for key, pixels in (("height", height), ("width", width)):
        if multiple and pixels and pixels % multiple:
            below = max(pixels // multiple, 1) * multiple
            raise ModelError(
                f"sampling.{key}={pixels}: the model samples multiples of {multiple} pixels; use {below} or "
                f"{below + multiple}"
            )


def size_multiple(folder: Path) -> int | None:
    """Return of which number of pixels the sizes of a pipeline's images are multiples; None if that is not known."""
    try:
        kind, vae = read_json(folder / INDEX)["_class_name"], read_json(folder / "vae" / "config.json")
        halved = vae["temperal_downsample"] if "temperal_downsample" in vae else vae["block_out_channels"][1:]
        return int(PATCHES[kind] * 2 ** len(halved))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def local_lora(source: str) -> Path | None:
    """Return the file or folder of `model.lora`; None for a Hub id. Raises `ModelError` if it can be neither."""
    path, setting = Path(source).expanduser(), f"model.lora={source!r}"
    if path.exists():
        if (path / INDEX).is_file():
            raise ModelError(f"{setting} is a pipeline, not a LoRA: use it as model.path")
        if (path / "checkpoints").is_dir():
            raise ModelError(f"{setting} is a run: use one of its checkpoints, {source}/checkpoints/step_N")
        return path
    if address := ADDRESS.match(source):
        remedy = f"the Hub id, model.lora={address[1]}" if address[1] else "a Hub id such as owner/name, or a file"
        raise ModelError(f"{setting} is a web address: use {remedy}")
    if source.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)+", source):
        raise ModelError(
            f"{setting}: there is no file or folder {path.absolute()}; correct the path, or give a Hub id such as "
            "'owner/name' or 'owner/name/FILE.safetensors'"
        )
    return None


def _why(folder: Path) -> str:
    """Return why a path is not a pipeline's folder, and what to give instead."""
    if not folder.exists():
        return f"there is no folder {folder.absolute()}; correct the path, or give a Hub id such as 'owner/name'"
    if not folder.is_dir():
        return "it is a file; give the folder of a diffusers pipeline, or a Hub id such as 'owner/name'"
    if (folder / WEIGHTS).is_file():
        return f"the folder has a LoRA, {WEIGHTS}; use the pipeline that it was trained on"
    inside = sorted(index.parent for index in folder.glob(f"*/{INDEX}"))
    if inside:
        return f"the folder has no {INDEX}; did you mean {str(inside[0])!r}?"
    return f"the folder has no {INDEX}; use one written by pipe.save_pretrained or 'hf download --local-dir'"

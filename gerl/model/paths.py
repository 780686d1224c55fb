"""Resolution of `model.path` and `model.lora` (models shipped with gerl, folders, files, Hub ids) without torch."""

import re
from importlib import resources
from pathlib import Path

from gerl.errors import ModelError

SHIPPED = ("signs",)
ALLOWED = "give a folder, a Hub id such as 'owner/name', or 'signs'"
INDEX = "model_index.json"
WEIGHTS = "pytorch_lora_weights.safetensors"  # diffusers' name of a LoRA file
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


def local_lora(source: str) -> Path | None:
    """Return the file or folder of `model.lora`; None for a Hub id. Raises `ModelError` if it can be neither."""
    path, given = Path(source).expanduser(), f"model.lora={source!r}"
    if path.exists():
        if (path / INDEX).is_file():
            raise ModelError(f"{given} is a pipeline, not a LoRA: use it as model.path")
        if (path / "checkpoints").is_dir():
            raise ModelError(f"{given} is a run: use one of its checkpoints, {source}/checkpoints/step_N")
        return path
    if address := ADDRESS.match(source):
        remedy = f"the Hub id, model.lora={address[1]}" if address[1] else "a Hub id such as owner/name, or a file"
        raise ModelError(f"{given} is a web address: use {remedy}")
    if source.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)+", source):
        raise ModelError(
            f"{given}: there is no file or folder {path.absolute()}; correct the path, or give a Hub id such as "
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

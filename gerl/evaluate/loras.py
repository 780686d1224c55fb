"""The compared LoRAs: their files and names, and the columns of the results; this imports no torch."""

import logging
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from gerl.errors import ConfigError, ModelError
from gerl.model.paths import WEIGHTS
from gerl.rewards.total import TOTAL
from gerl.run.checkpoint import MANIFEST, find_checkpoint, models_in
from gerl.utils.files import reason

logger = logging.getLogger("gerl")

BASE = "base"  # the variant without a LoRA, with which the others are compared
COLUMNS = ("prompt_id", "image", "seed", "variant", "prompt", TOTAL, "failure")  # of scores.csv, beside the scorers'
IGNORED = ("lora", "checkpoints", WEIGHTS)  # parts of a path that do not distinguish LoRAs
LORA = (
    "a LoRA: file or folder in diffusers' format, a checkpoint, or a run, whose best checkpoint is used, or the "
    "model of a run with another model.train"
)


def find_lora(source: str) -> Path:
    """The safetensors file of a LoRA: itself, that in a LoRA's folder or a checkpoint, or in the best one of a run.

    Where a run trained the weights themselves it is the folder with its denoisers.

    Raises:
        ConfigError: there is none, or there are several.
        CheckpointError: the checkpoints of a run are damaged.
        ModelError: the file cannot be read.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return _readable(path)
    if not path.is_dir():
        raise ConfigError(f"lora={source}: there is no such file or folder; give {LORA}")
    if (path / "checkpoints").is_dir():
        _, checkpoint, why = find_checkpoint(path)
        logger.info("lora=%s: using the checkpoint of %s", source, why)
        path = checkpoint.path
    if models_in(path) and not (path / "model_index.json").is_file():  # the weights themselves were trained
        return path
    if (path / MANIFEST).is_file():
        path = path / "lora"
    files = sorted(path.glob("*.safetensors"))
    if path / WEIGHTS in files:
        return _readable(path / WEIGHTS)
    if len(files) != 1:
        what = f"{len(files)} .safetensors files, give one of them" if files else f"no {WEIGHTS}; give {LORA}"
        raise ConfigError(f"lora={source}: {path} has {what}")
    return _readable(files[0])


def _readable(file: Path) -> Path:
    try:
        with safe_open(file, "numpy"):
            return file
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} is not a readable LoRA ({reason(error)}): give a .safetensors file") from None


def name_loras(given: Sequence[tuple[str | None, str, Path]]) -> dict[str, Path]:
    """Names for LoRAs given as (name or None, path, file): the shortest ends of their paths that differ.

    Raises `ConfigError` if two, or one and the base, have the same name.
    """
    trails = [
        [part for part in Path(path).expanduser().absolute().parts if part not in IGNORED] for _, path, _ in given
    ]
    names: list[str] = []
    for length in range(1, max(map(len, trails), default=0) + 1):
        ends = ["/".join(trail[-length:]).removesuffix(".safetensors") for trail in trails]
        names = [name or end for (name, _, _), end in zip(given, ends, strict=True)]
        if len({BASE, *names}) > len(names):
            return {name: file for name, (_, _, file) in zip(names, given, strict=True)}
    if twice := [path for _, path, _ in given if [p for _, p, _ in given].count(path) > 1]:
        raise ConfigError(f"lora: {twice[0]} is given twice; use lora.NAME=PATH to tell them apart, or keep one")
    if names:
        raise ConfigError(
            f"lora: the names {', '.join(names)} do not distinguish the LoRAs and the base; use lora.NAME=PATH"
        )
    return {}


def config_of(file: Path) -> str | None:
    """The config.yaml of the run that a LoRA's file lies in, if any."""
    for folder in file.absolute().parents:
        if (folder / "checkpoints").is_dir() and (folder / "config.yaml").is_file():
            return str(folder / "config.yaml")
    return None

"""Python code that samples a held-out image of a run again, in plain diffusers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gerl.run.checkpoint import checkpoint_paths, models_in
from gerl.run.choice import choice_of
from gerl.run.validation import SamplingRecord, Validation
from gerl.utils.pages import render
from gerl.utils.versions import DTYPE

ASSETS = Path(__file__).parents[1] / "assets"
LOAD = "pipe.load_lora_weights(FOLDER)"


def usage(run_dir: Path, config: Mapping[str, Any], validations: list[Validation]) -> str | None:
    """Return a program that loads model and LoRA (or trained denoisers) and samples an image again.

    The image is the first one of the newest validation with a checkpoint, of that to be used if the latest has signals
    of the guard. In float32 it is reproduced, up to the last bits if the validation sampled several images in one
    batch; in half precision plain diffusers decodes and applies the LoRA less precisely. config: as in config.yaml. If
    no validation has a checkpoint, the newest LoRA with a prompt to fill in; None without any checkpoint to be used.
    """
    paths = {path.name: trained_weights(path) for path in checkpoint_paths(run_dir / "checkpoints")}
    if (choice := choice_of(run_dir)) is not None:
        paths = {name: path for name, path in paths.items() if choice.offers(int(name.rpartition("_")[2]))}
    folders = {name: path for name, path in paths.items() if path is not None}
    if not folders:
        return None
    with_lora = [v for v in validations if f"step_{v.step}" in folders and v.drawing is not None and v.shown]
    validation = with_lora[-1] if with_lora else None
    lora = list(folders.values())[-1] if validation is None else folders[f"step_{validation.step}"]
    drawing = SamplingRecord([], [], "cpu") if validation is None or validation.drawing is None else validation.drawing
    return program(config, lora.resolve(), validation, drawing)


def trained_weights(checkpoint: Path) -> Path | None:
    """Return the folder with the LoRA or trained denoisers, as plain diffusers loads them; None if it is missing."""
    if (checkpoint / "lora").is_dir():
        return checkpoint / "lora"
    return checkpoint if models_in(checkpoint) else None


def program(config: Mapping[str, Any], lora: Path, validation: Validation | None, drawing: SamplingRecord) -> str:
    """Return the program of `usage` for the LoRA or the trained denoisers in `lora`."""
    dtype = (config.get("model") or {}).get("dtype", "auto")
    if dtype == "auto":
        dtype = "bfloat16" if drawing.device.startswith("cuda") else "float32"
    whole = [
        f"pipe.{name} = type(pipe.{name}).from_pretrained(FOLDER, subfolder={name!r}, {DTYPE}=torch.{dtype})"
        for name in models_in(lora)
    ]
    loads = [line.replace("FOLDER", repr(str(lora))) for line in whole or drawing.lora_lines or [LOAD]]
    arguments = {}
    for name, value in (drawing.given[0] if drawing.given else {}).items():
        parts = [f"load_image({part!r})" for part in ([value] if isinstance(value, str) else value)]
        arguments[name] = parts[0] if isinstance(value, str) else f"[{', '.join(parts)}]"
    call = {name: value for name, value in call_of(config).items() if value is not None}
    prompt = call.pop("prompt", "a prompt" if validation is None else validation.prompts[validation.shown[0]])
    components = [line.replace("DTYPE", dtype) for line in drawing.components]
    libraries = [name for name in ("diffusers", "transformers") if any(f"={name}." in line for line in components)]
    loads_itself = any(line.startswith("load_lora(") for line in loads)
    shown = {
        "base": base_path(config),
        "dtype": dtype,
        "loads": loads,
        "given": arguments,
        "call": call,
        "prompt": prompt,
    }
    shown |= {"components": components, "libraries": libraries, "own_loader": loads_itself, "key": DTYPE}
    return render("program.py.j2", drawing=drawing, **shown)


def call_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the pipeline in a validation, as `gerl.model.prompts.pipeline_call` passes them."""
    sampling, other = config.get("sampling") or {}, config.get("validation") or {}
    names = ("height", "width", "num_inference_steps", "guidance_scale")
    call = {name: sampling.get(name) for name in names} | dict(sampling.get("call") or {})
    return call | {name: value for name in names if (value := other.get(name)) is not None}


def base_path(config: Mapping[str, Any]) -> str:
    """Return the model's path as Python code."""
    path = str((config.get("model") or {}).get("path") or "BASE_MODEL")
    # diffusers knows a model shipped with gerl only by its folder
    return repr(str(ASSETS / path)) if (ASSETS / path / "model_index.json").exists() else repr(path)

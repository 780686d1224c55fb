"""Python code that samples a held-out image of a run again, in plain diffusers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gerl.run.checkpoint import checkpoint_paths, models_in
from gerl.run.validation import SamplingRecord, Validation

ASSETS = Path(__file__).parents[1] / "assets"
LOAD = "pipe.load_lora_weights(FOLDER)"


def usage(run_dir: Path, config: Mapping[str, Any], validations: list[Validation]) -> str | None:
    """Return a program that loads model and LoRA (or trained denoisers) and samples an image again.

    The image is the first one of the newest validation with a checkpoint. In float32 it is reproduced, up to the last
    bits if the validation sampled several images in one batch; in half precision plain diffusers decodes and applies
    the LoRA less precisely. config: as in config.yaml. If no validation has a checkpoint, the newest LoRA with a prompt
    to fill in; None without any checkpoint.
    """
    paths = {path.name: trained_weights(path) for path in checkpoint_paths(run_dir / "checkpoints")}
    folders = {name: path for name, path in paths.items() if path is not None}
    if not folders:
        return None
    with_lora = [v for v in validations if f"step_{v.step}" in folders and v.drawing is not None and v.shown]
    validation = with_lora[-1] if with_lora else None
    lora = list(folders.values())[-1] if validation is None else folders[f"step_{validation.step}"]
    drawing = SamplingRecord([], [], "cpu") if validation is None or validation.drawing is None else validation.drawing
    return program(config, lora.resolve(), validation, drawing)


def trained_weights(checkpoint: Path) -> Path | None:
    """Return the folder with the LoRA or the trained denoisers for plain diffusers; None if there is none."""
    if (checkpoint / "lora").is_dir():
        return checkpoint / "lora"
    return checkpoint if models_in(checkpoint) else None


def program(config: Mapping[str, Any], lora: Path, validation: Validation | None, drawing: SamplingRecord) -> str:
    """Return the program of `usage` for the LoRA or the trained denoisers in `lora`."""
    model = config.get("model") or {}
    dtype = model.get("dtype", "auto")
    if dtype == "auto":
        dtype = "bfloat16" if drawing.device.startswith("cuda") else "float32"
    given = drawing.given[0] if drawing.given else {}
    imports = ["import torch", "from diffusers import DiffusionPipeline"]
    lines = [f"pipe = DiffusionPipeline.from_pretrained({base_path(config)}, dtype=torch.{dtype})"]
    if drawing.scheduler is not None:
        imports.append("from gerl.model.schedulers import trainable_scheduler")
        lines.append(
            f"# {drawing.scheduler} has no transition kernel: the run sampled with the solver that replaces it"
        )
        lines.append("pipe.scheduler = trainable_scheduler(pipe.scheduler)")
    whole = [
        f"pipe.{name} = type(pipe.{name}).from_pretrained(FOLDER, subfolder={name!r}, dtype=torch.{dtype})"
        for name in models_in(lora)
    ]
    for line in whole or drawing.lora_lines or [LOAD]:
        if line.startswith("load_lora("):  # for denoisers without LoRA support in diffusers
            imports += ["from pathlib import Path", "from gerl.model.lora import load_lora"]
        lines.append(line.replace("FOLDER", repr(str(lora))))
    if drawing.device.startswith("cuda"):
        lines.append('pipe.to("cuda")')
    if given:
        imports.append("from diffusers.utils import load_image")
    call = _arguments(config, validation, drawing)
    call += [f"{name}={_pictures(value)}," for name, value in given.items()]
    lines += ["output = pipe(", *(f"    {argument}" for argument in call), ")"]
    if drawing.video:
        imports.append("from diffusers.utils import export_to_video")
        lines.append('export_to_video(output.frames[0], "video.mp4")')
    else:
        lines.append('output.images[0].save("picture.png")')
    return "\n".join([*dict.fromkeys(imports), "", *lines])


def _arguments(config: Mapping[str, Any], validation: Validation | None, drawing: SamplingRecord) -> list[str]:
    """Return the arguments of the call, one per line, as `gerl.model.call.pipeline_call` passes them."""
    sampling, other = config.get("sampling") or {}, config.get("validation") or {}
    names = ("height", "width", "num_inference_steps", "guidance_scale")
    call = {name: sampling.get(name) for name in names} | dict(sampling.get("call") or {})
    call |= {name: value for name in names if (value := other.get(name)) is not None}
    call.pop("output_type", None)
    prompt = "a prompt" if validation is None else validation.prompts[validation.shown[0]]
    arguments = [f"{call.pop('prompt', prompt)!r},"]
    arguments += [f"{name}={value!r}," for name, value in call.items() if value is not None]
    if drawing.seeds:
        arguments.append(f"generator=torch.Generator().manual_seed({drawing.seeds[0]}),")
    return arguments


def base_path(config: Mapping[str, Any]) -> str:
    """Return the model's path as Python code."""
    path = str((config.get("model") or {}).get("path") or "BASE_MODEL")
    # diffusers knows a model shipped with gerl only by its folder
    return repr(str(ASSETS / path)) if (ASSETS / path / "model_index.json").exists() else repr(path)


def _pictures(value: str | list[str]) -> str:
    if isinstance(value, str):
        return f"load_image({value!r})"
    return "[" + ", ".join(f"load_image({part!r})" for part in value) + "]"

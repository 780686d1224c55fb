"""Files of the export formats: a LoRA in a library's layout, or the pipeline with the LoRA merged."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import diffusers
import torch
from safetensors import safe_open
from safetensors.torch import load

from gerl.config import ModelConfig
from gerl.errors import ModelError
from gerl.export.base import Base
from gerl.model import denoisers as skeletons
from gerl.model.components import check_files, weights_checked
from gerl.model.denoisers import find_denoisers
from gerl.model.hub import code_refused, model_folder
from gerl.model.loading import merge_start, own_code
from gerl.model.lora_files import Lora, check_fit, check_loads, convert, diffusers_file, kohya_file, merge, peft_files
from gerl.model.parts import left_out
from gerl.model.paths import WEIGHTS, resolve
from gerl.utils.versions import DTYPE

logger = logging.getLogger(__name__)
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write `files` (relative name -> content) to `folder`."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def lora_files(format: str, loras: Mapping[str, Lora], base: Base, stem: str = "lora") -> dict[str, bytes]:
    """Return the files of a format by name relative to `out`, with the base in their metadata.

    `stem`: name of kohya's file, since ComfyUI has those of all runs in one folder; with several denoisers, the start
    of their names. Raises `ModelError` if the format does not support the base model.
    """
    files: dict[str, bytes] = {}
    match format:
        case "diffusers":
            files[WEIGHTS] = diffusers_file(loras, str(base))
            _check(files[WEIGHTS], loras, base)
        case "peft":
            for name, lora in loras.items():
                files |= {f"{name}/{file}": content for file, content in peft_files(lora, str(base)).items()}
        case "kohya":
            for name, lora in loras.items():
                denoiser = skeleton(base, name)
                check_fit(lora, denoiser, f"{name} of {base.path}")
                file = f"{stem}_{name}.safetensors" if len(loras) > 1 else f"{stem}.safetensors"
                content = files[file] = kohya_file(lora, denoiser, str(base))
                try:
                    convert(load(content), denoiser, name)
                except ModelError as error:
                    logger.debug("diffusers does not read it: %s", error)
                    logger.info(
                        "for ComfyUI and kohya's tools; plain diffusers cannot read this layout for %s: for diffusers, "
                        "export format=diffusers",
                        type(denoiser).__name__,
                    )
    return files


def _check(content: bytes, loras: Mapping[str, Lora], base: Base) -> None:
    """Raise `ModelError` unless plain diffusers loads the file completely; skipped if the base model is missing."""
    try:
        denoisers = {name: skeleton(base, name) for name in loras}
    except ModelError as error:
        logger.info("the file was not tested in diffusers: %s", error)
    else:
        check_loads(content, denoisers)


def skeleton(base: Base, name: str) -> diffusers.ModelMixin:
    """Return the denoiser `name` of a pipeline without weights, on the meta device, built from its configuration."""
    with loading(base.path):
        folder = str(model_folder(base.path, base.parts)) if base.parts else resolve(base.path)
        index = diffusers.DiffusionPipeline.load_config(folder)
        if name not in index:
            raise ModelError(f"model={base.path} has no {name}, to which the LoRA belongs")
        return skeletons.skeleton(folder, name, index)


def merged_pipeline(loras: Mapping[str, Lora], base: Base) -> diffusers.DiffusionPipeline:
    """Return the pipeline with the LoRAs merged; every component keeps the precision of its files.

    A LoRA merged into the base before training is merged first.
    """
    with loading(base.path):
        folder = model_folder(base.path, base.parts)
        check_files(folder)
        index = diffusers.DiffusionPipeline.load_config(str(folder))
        own_code(base.path, folder, index)
        arguments = {DTYPE: stored_dtypes(folder), **left_out(index)}
        with weights_checked(), code_refused():
            pipe = diffusers.DiffusionPipeline.from_pretrained(folder, **arguments)
    if base.merged is not None:
        merge_start(ModelConfig(path=base.path, lora=base.merged, merge_lora=True), pipe, find_denoisers(pipe))
    for name, lora in loras.items():
        denoiser = pipe.components.get(name)
        if denoiser is None:
            raise ModelError(
                f"model={base.path} has no {name}, to which the LoRA belongs; use the model it was trained on"
            )
        check_fit(lora, denoiser, f"{name} of {base.path}")
        merge(lora.halves, denoiser)
    return pipe


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Return the most frequent stored precision by component; `default`, for components without weights, is fp32."""
    dtypes = {"default": torch.float32}
    for component in (f for f in folder.iterdir() if f.is_dir()):
        stored: Counter[str] = Counter()
        # names with two dots are variants such as model.fp16.safetensors, which are not loaded
        for file in (f for f in component.glob("*.safetensors") if f.name.count(".") == 1):
            with safe_open(file, "pt") as tensors:
                stored.update(tensors.get_slice(name).get_dtype() for name in tensors.keys())  # noqa: SIM118
        if floats := [name for name, _ in stored.most_common() if name in FLOATS]:
            dtypes[component.name] = FLOATS[floats[0]]
    return dtypes


@contextlib.contextmanager
def loading(base: str) -> Iterator[None]:
    """Convert exceptions of loading to a `ModelError` that names the pipeline and the reason."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, AttributeError, ImportError, KeyError, TypeError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model={base} cannot be loaded as a diffusers pipeline: {why}") from error
    except ModelError as error:
        raise ModelError(f"{error}; set model=FOLDER to the base model") from None

"""Several LoRAs on one pipeline, of which one at a time, or none, takes part."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from peft.tuners.tuners_utils import BaseTunerLayer

from gerl.errors import ModelError
from gerl.model.lora_weights import check_components, inject, read_lora


def attach(pipe: DiffusionPipeline, files: Mapping[str, Path]) -> None:
    """Put the LoRAs in `files`, by the name each is to have, on the components of `pipe`, all of them switched off.

    A file that gerl wrote is computed in fp32 on a base of any precision, as in training: its images are those of the
    run to the bit. Any other is read by the pipeline's own `load_lora_weights`. Raises `ModelError` for a file that
    cannot be read or does not fit the pipeline.
    """
    plain = {name: read_lora(file) for name, file in files.items()}
    for name, file in files.items():  # all of them, before the first one changes the layers
        check_components(plain[name] or {}, pipe, file)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several LoRAs on a model are meant
        for name, file in files.items():
            loras = plain[name]
            if loras is None:
                _load(pipe, file, _adapter(name))
            else:
                for denoiser, lora in loras.items():
                    inject(pipe.components[denoiser], lora, _adapter(name))
    switch(pipe, None)


def switch(pipe: DiffusionPipeline, name: str | None) -> None:
    """Let the LoRA `name` take part and no other; None: the base model alone."""
    for layer in _layers(pipe):
        layer.enable_adapters(name is not None)
        if name is not None:  # a layer that this LoRA does not have computes without one
            layer.set_adapter([_adapter(name)], inference_mode=True)


def _adapter(name: str) -> str:
    """A name for a LoRA that peft takes: torch takes no dot in the name of a module."""
    return "variant_" + "".join(c if c.isalnum() else f"_{ord(c)}_" for c in name)


def _load(pipe: DiffusionPipeline, file: Path, name: str) -> None:
    load = getattr(pipe, "load_lora_weights", None)
    if load is None:
        raise ModelError(f"{file} was not written by gerl, and {type(pipe).__name__} has no load_lora_weights")
    try:
        load(str(file.parent), weight_name=file.name, adapter_name=name, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, IndexError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{file} cannot be loaded as a LoRA of {type(pipe).__name__} ({reason}): use the model it was trained on"
        ) from error
    if not any(name in layer._all_available_adapter_names() for layer in _layers(pipe)):
        raise ModelError(f"{file} has no weights for {type(pipe).__name__}: use the model it was trained on")


def _layers(pipe: DiffusionPipeline) -> list[BaseTunerLayer]:
    models = [c for c in pipe.components.values() if isinstance(c, torch.nn.Module)]
    return [module for model in models for module in model.modules() if isinstance(module, BaseTunerLayer)]

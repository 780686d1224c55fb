"""Several LoRAs on one pipeline, of which one at a time, or none, takes part."""

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open

from gerl.errors import ModelError
from gerl.model.lora import METADATA
from gerl.model.lora_layouts import Lora, check_fit

KEY = re.compile(r"(?P<denoiser>\w+)\.(?P<layer>.+)\.lora_(?P<half>[AB])\.weight")
# what a LoRA of peft may be besides B A times alpha / rank
VARIANTS = ("rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save")


def attach(pipe: Any, files: Mapping[str, Path]) -> None:
    """Put the LoRAs in `files`, by the name each is to have, on the components of `pipe`, all of them switched off.

    A file that gerl wrote is computed in fp32 on a base of any precision, as in training: its images are those of the
    run to the bit. Any other is read by the pipeline's own `load_lora_weights`. Raises `ModelError` for a file that
    cannot be read or does not fit the pipeline.
    """
    plain = {name: read_lora(file) for name, file in files.items()}
    for name, file in files.items():  # all of them, before the first one changes the layers
        for denoiser, lora in (plain[name] or {}).items():
            if denoiser not in pipe.components:
                raise ModelError(f"{file} has a LoRA of {denoiser}, which {type(pipe).__name__} does not have")
            check_fit(lora, pipe.components[denoiser], f"{denoiser} of {type(pipe).__name__} ({file})")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several LoRAs on a model are meant
        for name, file in files.items():
            loras = plain[name]
            if loras is None:
                _load(pipe, file, _adapter(name))
            else:
                for denoiser, lora in loras.items():
                    _inject(pipe.components[denoiser], lora, _adapter(name))
    switch(pipe, None)


def switch(pipe: Any, name: str | None) -> None:
    """Let the LoRA `name` take part and no other; None: the base model alone."""
    for layer in _layers(pipe):
        layer.enable_adapters(name is not None)
        if name is not None:  # a layer that this LoRA does not have computes without one
            layer.set_adapter([_adapter(name)], inference_mode=True)


def _adapter(name: str) -> str:
    """What peft may call a LoRA: torch takes no dot in the name of a module."""
    return "variant_" + "".join(c if c.isalnum() else f"_{ord(c)}_" for c in name)


def read_lora(file: Path) -> dict[str, Lora] | None:
    """The LoRA of each denoiser in a file that gerl wrote; None for one in another layout.

    Raises `ModelError` if it is no safetensors file.
    """
    try:
        with safe_open(file, "pt") as opened:
            header = json.loads((opened.metadata() or {}).get(METADATA, "{}"))
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"{file} is no LoRA that can be read ({error}): give a .safetensors file") from None
    halves: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for key, tensor in tensors.items():
        match = KEY.fullmatch(key)
        if match is None or tensor.ndim != 2:
            return None
        halves.setdefault(match["denoiser"], {}).setdefault(match["layer"], {})[match["half"]] = tensor
    loras: dict[str, Lora] = {}
    for denoiser, layers in halves.items():
        alpha = header.get(f"{denoiser}.lora_alpha")
        whole = all(set(pair) == {"A", "B"} for pair in layers.values())
        if alpha is None or not whole or any(header.get(f"{denoiser}.{name}") for name in VARIANTS):
            return None
        loras[denoiser] = Lora({layer: (pair["A"], pair["B"]) for layer, pair in layers.items()}, alpha)
    return loras or None


@torch.no_grad()
def _inject(denoiser: Any, lora: Lora, name: str) -> None:
    """A LoRA whose layers compute what those of `gerl.model.lora.add_lora` do."""
    # an expression, since peft takes the names of a list for the ends of names
    layers = "|".join(map(re.escape, lora.layers))
    inject_adapter_in_model(LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=layers), denoiser, name)
    for layer, halves in lora.layers.items():
        adapted = denoiser.get_submodule(layer)
        for part, values in zip((adapted.lora_A[name], adapted.lora_B[name]), halves, strict=True):
            part.weight.data = values.to(part.weight.device, torch.float32)


def _load(pipe: Any, file: Path, name: str) -> None:
    load = getattr(pipe, "load_lora_weights", None)
    if load is None:
        raise ModelError(f"{file} was not written by gerl, and {type(pipe).__name__} has no load_lora_weights")
    try:
        load(str(file.parent), weight_name=file.name, adapter_name=name, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, IndexError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{file} cannot be loaded as a LoRA of {type(pipe).__name__} ({reason}): give the model it is of"
        ) from error
    if not any(name in layer._all_available_adapter_names() for layer in _layers(pipe)):
        raise ModelError(f"{file} has no weights for {type(pipe).__name__}: give the model it is of")


def _layers(pipe: Any) -> list[BaseTunerLayer]:
    models = [c for c in pipe.components.values() if isinstance(c, torch.nn.Module)]
    return [module for model in models for module in model.modules() if isinstance(module, BaseTunerLayer)]

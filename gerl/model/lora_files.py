"""The files of a LoRA, read: those of diffusers, PEFT and kohya, and the layouts that diffusers converts."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open

from gerl.errors import ModelError
from gerl.model.lora_converters import convert
from gerl.model.lora_layouts import in_layout, kohya_halves
from gerl.model.lora_weights import KEY, METADATA, Halves
from gerl.model.paths import WEIGHTS
from gerl.utils.files import reason

Layers = dict[str, Halves]  # by name of the layer
Denoisers = Mapping[str, torch.nn.Module]
PEFT_CONFIG, PEFT_WEIGHTS, PEFT_PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
KOHYA = "lora_unet_"
# what a LoRA of peft may be that is no sum of two matrices' product and the weights
OTHER = ("use_dora", "lora_bias", "modules_to_save", "fan_in_fan_out")
KINDS = "a file or folder of diffusers, PEFT or kohya, or another layout that diffusers reads"


def read_layers(path: Path, denoisers: Denoisers) -> dict[str, Layers]:
    """The LoRA of each denoiser in a file or folder; of `denoisers` only names, classes and sizes are read.

    Raises `ModelError` for anything but LoRAs of linear layers of these denoisers.
    """
    found: dict[str, Layers] = {}
    for file in _files(path):
        for name, layers in _read(file, denoisers).items():
            if name not in denoisers:
                raise ModelError(f"{file} has a LoRA of {name}, and gerl trains {' and '.join(denoisers)}")
            if name in found:
                raise ModelError(f"{path} has two LoRAs of {name}: give one of the files")
            found[name] = layers
    for name, layers in found.items():
        _check_numbers(name, layers)
    if not any(found.values()):
        raise ModelError(f"{path} has no LoRA: give {KINDS}")
    return found


def _files(path: Path) -> list[Path]:
    """The safetensors files that make up the LoRA in `path`."""
    if path.is_file():
        return [path]
    for file in (path / WEIGHTS, path / "lora" / WEIGHTS, path / PEFT_WEIGHTS):  # the second one: of a checkpoint
        if file.is_file():
            return [file]
    several = sorted(path.glob(f"*/{PEFT_WEIGHTS}")) or sorted(path.glob("lora_*.safetensors"))
    others = sorted(path.glob("*.safetensors"))
    if several or len(others) == 1:
        return several or others
    what = f"has {len(others)} .safetensors files: give one of them" if others else f"has no {WEIGHTS}: give {KINDS}"
    raise ModelError(f"{path} {what}")


def _read(file: Path, denoisers: Denoisers) -> dict[str, Layers]:
    try:
        with safe_open(file, "pt") as opened:
            header = json.loads((opened.metadata() or {}).get(METADATA, "{}"))
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        if not isinstance(header, dict):
            raise ValueError(f"its {METADATA} is not a JSON object")
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read ({reason(error)}): give a complete .safetensors file") from None
    try:
        if all(key.startswith(KOHYA) for key in tensors):
            name = _denoiser_of(file.stem.removeprefix("lora_"), denoisers)
            if in_layout(tensors, denoisers[name]):
                return {name: kohya_halves(tensors, denoisers[name])}
        if all(key.startswith(PEFT_PREFIX) for key in tensors):
            name = _denoiser_of(file.parent.name, denoisers)
            config = _peft_config(file.with_name(PEFT_CONFIG))
            return _of_peft({f"{name}.{k.removeprefix(PEFT_PREFIX)}": v for k, v in tensors.items()}, {name: config})
        names = {key.partition(".")[0] for key in tensors}
        if not names <= denoisers.keys() or not all(KEY.fullmatch(key) for key in tensors):
            name = _denoiser_of(file.stem, denoisers)
            return _of_peft(*convert(tensors, denoisers[name], name))
        configs = {n: {k.removeprefix(f"{n}."): v for k, v in header.items() if k.startswith(f"{n}.")} for n in names}
        return _of_peft(tensors, configs)
    except ModelError as error:
        raise ModelError(f"{file} is not a LoRA that gerl can train on: {error}") from None


def _denoiser_of(name: str, denoisers: Denoisers) -> str:
    """The denoiser that a file is for, by the name of the file or its folder, or because there is only one."""
    if name in denoisers:
        return name
    if len(denoisers) > 1:
        raise ModelError(
            "it does not say which denoiser it belongs to: name it lora_NAME.safetensors (kohya), or its folder "
            f"NAME (PEFT), with NAME one of {', '.join(denoisers)}"
        )
    return next(iter(denoisers))


def _peft_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} next to it, which has the LoRA's alpha, cannot be read ({reason(error)})") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file} next to it is not a JSON object")
    return config


def _of_peft(tensors: Mapping[str, torch.Tensor], configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Layers]:
    """The layers of tensors `DENOISER.LAYER.lora_A.weight`; of `configs` alpha and what gives layers another one."""
    pairs: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        match = KEY.fullmatch(key)
        if match is None or value.ndim != 2:
            raise ModelError(f"its {key} {list(value.shape)} is not a matrix of a LoRA of a linear layer")
        pairs.setdefault((match["denoiser"], match["layer"]), {})[match["half"]] = value
    found: dict[str, Layers] = {}
    for (name, layer), pair in pairs.items():
        if set(pair) != {"A", "B"}:
            raise ModelError(f"{name}.{layer} has only its matrix {', '.join(pair)}")
        scale = _scale(configs.get(name, {}), layer, len(pair["A"]))
        found.setdefault(name, {})[layer] = Halves(pair["A"], pair["B"], scale)
    return found


def _scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """alpha / rank of a layer, or alpha / sqrt(rank) of a rank-stabilised LoRA; 1 where no alpha is given."""
    if other := next((name for name in OTHER if config.get(name)), None):
        raise ModelError(f"it was trained with {other}, which gerl's LoRA does not have")
    pattern = config.get("alpha_pattern") or {}
    alpha = pattern.get(get_pattern_key(list(pattern), layer), config.get("lora_alpha", rank))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e30:
        raise ModelError(f"its lora_alpha is {alpha!r:.40}")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _check_numbers(name: str, layers: Layers) -> None:
    for layer, halves in layers.items():
        if not len(halves.a) == halves.b.shape[1] > 0:
            raise ModelError(f"{name}.{layer} has the ranks {len(halves.a)} and {halves.b.shape[1]}")
        if not all(half.is_floating_point() and half.float().isfinite().all() for half in (halves.a, halves.b)):
            raise ModelError(f"{name}.{layer} has non-finite values")

"""LoRA files in the layouts that other trainers and interfaces write, converted by diffusers' own readers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.loaders import lora_pipeline
from diffusers.utils import convert_unet_state_dict_to_peft

from gerl.errors import ModelError

SUFFIX = "LoraLoaderMixin"
# the tensors that a LoRA consists of, however they are called: two matrices per layer, and alpha
MATRIX = re.compile(r"(?P<layer>.+?)[._]lora(_linear_layer)?[._](?P<half>A|B|down|up)(\.default)?\.weight")
ALPHA = re.compile(r"(?P<layer>.+?)(\.lora)?\.alpha")
Tensors = Mapping[str, torch.Tensor]


def convert(tensors: Tensors, denoiser: torch.nn.Module, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a file as diffusers reads them, `name.LAYER.lora_A.weight`, and the configuration of each layer.

    Only class and sizes of `denoiser`, which is `name` in its pipeline, are read. Raises `ModelError` for a layout
    that diffusers cannot read, and for a tensor that would be left out: the images would be those of another LoRA.
    """
    for key, value in tensors.items():
        if not (MATRIX.fullmatch(key) or ALPHA.fullmatch(key)):
            raise ModelError(f"its {key} {list(value.shape)} is not a matrix of a LoRA of a linear layer")
    reader = _reader(denoiser)
    if reader is None:
        raise ModelError(
            f"its {next(iter(tensors))} is not named as in diffusers files, and diffusers converts no other layout "
            f"for {type(denoiser).__name__}: save it with pipe.save_lora_weights"
        )
    unet = {"unet_config": denoiser.config} if "StableDiffusion" in reader.__name__ else {}
    try:
        read = reader.lora_state_dict(dict(tensors), return_lora_metadata=True, **unet)
        found, alphas = read[0], read[1] if len(read) == 3 else None
        if not all("lora_A" in key or "lora_B" in key for key in found):
            found = convert_unet_state_dict_to_peft(found)
    except (ValueError, KeyError, RuntimeError, IndexError, TypeError, AttributeError, AssertionError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"diffusers cannot read its layout for {type(denoiser).__name__} ({first:.200})") from None
    if others := sorted({key.partition(".")[0] for key in found} - {name}):
        raise ModelError(f"it has a LoRA of {' and '.join(others)}, and gerl trains {name}: use a file of {name} alone")
    config = _alphas(alphas or {}, name)
    before, after = _squared_norm(tensors, {}), _squared_norm(found, config.get("alpha_pattern", {}))
    if not abs(after - before) <= 1e-3 * before:
        raise ModelError(
            f"diffusers reads only {after / before if before else 0:.1%} of it for {type(denoiser).__name__}: use "
            "the model it was trained on"
        )
    return found, {name: config}


def _reader(denoiser: torch.nn.Module) -> type[Any] | None:
    """The mixin of diffusers' pipelines that reads LoRAs of this class, the one with the longest common name."""
    family = type(denoiser).__name__
    if family == "UNet2DConditionModel":
        large = getattr(denoiser.config, "addition_embed_type", None) == "text_time"
        family = "StableDiffusionXL" if large else "StableDiffusion"
    known = [name for name in vars(lora_pipeline) if name.endswith(SUFFIX) and name != SUFFIX]
    fitting = [name for name in known if family.startswith(name.removesuffix(SUFFIX))]
    return getattr(lora_pipeline, max(fitting, key=len)) if fitting else None


def _alphas(alphas: Mapping[str, float], name: str) -> dict[str, Any]:
    """The alpha of each layer, which diffusers gives by the name of its first matrix, as in a configuration of PEFT."""
    renamed = convert_unet_state_dict_to_peft({key.removesuffix(".alpha"): value for key, value in alphas.items()})
    layers = {key.removeprefix(f"{name}.").split(".lora_")[0]: float(value) for key, value in renamed.items()}
    return {"alpha_pattern": {f"^{re.escape(layer)}$": alpha for layer, alpha in layers.items()}} if layers else {}


def _squared_norm(tensors: Tensors, pattern: Mapping[str, float]) -> float:
    """The sum of the squares of all updates `alpha / rank * B @ A`: what splitting a layer by rows leaves alone."""
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    alphas: dict[str, float] = {}
    for key, value in tensors.items():
        if match := MATRIX.fullmatch(key):
            half = {"down": "A", "up": "B"}.get(match["half"], match["half"])
            pairs.setdefault(match["layer"], {})[half] = value.flatten(1).double()
        elif match := ALPHA.fullmatch(key):
            alphas[match["layer"]] = float(value)
    total = 0.0
    for layer, pair in pairs.items():
        if set(pair) != {"A", "B"} or len(pair["A"]) != pair["B"].shape[1]:
            raise ModelError(f"{layer} has only one of its two matrices, or two of different ranks")
        given = [alpha for name, alpha in pattern.items() if re.search(name, layer.partition(".")[2])]
        scale = (given[0] if given else alphas.get(layer, len(pair["A"]))) / len(pair["A"])
        a, b = pair["A"] @ pair["A"].T, pair["B"].T @ pair["B"]
        total += scale**2 * float((a * b.T).sum())
    return total

"""The matrices of a LoRA: read from a file or a checkpoint, checked against a model, and put on it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, ModelMixin
from peft import LoraConfig, inject_adapter_in_model
from safetensors import SafetensorError, safe_open

from gerl.errors import CheckpointError, ModelError
from gerl.utils.files import reason

METADATA = "lora_adapter_metadata"  # where diffusers keeps the LoRA's configuration in the header of its file
KEY = re.compile(r"(?P<denoiser>\w+)\.(?P<layer>.+)\.lora_(?P<half>[AB])(\.default)?\.weight")
# what a LoRA of peft may be besides B A times alpha / rank
VARIANTS = ("rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save")


@dataclass(frozen=True)
class Halves:
    """The LoRA of one layer: its update is `scale * b @ a`, with `a [rank, in]` and `b [out, rank]`."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        """The rank, which other layers of the same LoRA need not have."""
        return len(self.a)


@dataclass(frozen=True)
class Lora:
    """The LoRA of one denoiser: by layer, `A [rank, in]` and `B [out, rank]`; a layer's update is `scale * B @ A`."""

    layers: dict[str, tuple[torch.Tensor, torch.Tensor]]
    alpha: float

    @property
    def rank(self) -> int:
        """The rank, the same in all layers."""
        return next(iter(self.layers.values()))[0].shape[0]

    @property
    def scale(self) -> float:
        """alpha / rank (Hu et al. 2021, section 4.1)."""
        return self.alpha / self.rank

    @property
    def halves(self) -> dict[str, Halves]:
        """The LoRA of each layer by itself."""
        return {layer: Halves(a, b, self.scale) for layer, (a, b) in self.layers.items()}

    @property
    def targets(self) -> str:
        """Its layers for peft: an expression, since peft takes the names of a list for the ends of names."""
        return "|".join(map(re.escape, self.layers))


def collect_loras(tensors: Mapping[str, torch.Tensor], alpha: float) -> dict[str, Lora]:
    """The LoRA of each denoiser from its matrices, named as in `Policy.trained` or in a file of diffusers.

    Raises `CheckpointError` for a tensor that is no such matrix, or one without its other half.
    """
    halves: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for name, value in sorted(tensors.items()):
        match = KEY.fullmatch(name)
        if match is None or value.ndim != 2:
            raise CheckpointError(
                f"{name!r} {list(value.shape)} is not a LoRA of a linear layer: only a LoRA can be exported"
            )
        halves.setdefault(match["denoiser"], {}).setdefault(match["layer"], {})[match["half"]] = value
    for denoiser, layers in halves.items():
        for layer, pair in layers.items():
            if set(pair) != {"A", "B"}:
                raise CheckpointError(f"the LoRA of {denoiser}.{layer} has only its matrix {', '.join(pair)}")
    return {
        denoiser: Lora({layer: (pair["A"], pair["B"]) for layer, pair in layers.items()}, alpha)
        for denoiser, layers in halves.items()
    }


def read_lora(file: Path) -> dict[str, Lora] | None:
    """The LoRA of each denoiser in a file that gerl wrote; None for one in another layout.

    Raises `ModelError` if it is no safetensors file, or a damaged one.
    """
    damaged = f"{file} is not a readable LoRA ({{}}): give a complete .safetensors file"
    try:
        with safe_open(file, "pt") as opened:
            header = json.loads((opened.metadata() or {}).get(METADATA, "{}"))
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise ModelError(damaged.format(reason(error))) from None
    if not isinstance(header, dict):
        raise ModelError(damaged.format(f"its {METADATA} is not a JSON object"))
    try:
        loras = collect_loras(tensors, alpha=0.0)
    except CheckpointError:
        return None
    alphas = {name: header.get(f"{name}.lora_alpha") for name in loras}
    if None in alphas.values() or any(header.get(f"{name}.{variant}") for name in loras for variant in VARIANTS):
        return None
    for name, lora in loras.items():
        if fault := _fault(lora, alphas[name]):
            raise ModelError(damaged.format(f"{name}: {fault}"))
    return {name: replace(lora, alpha=float(header[f"{name}.lora_alpha"])) for name, lora in loras.items()} or None


def _fault(lora: Lora, alpha: object) -> str | None:
    """The first thing in it that no file written by gerl has; None for a sound LoRA."""
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e30:
        return f"lora_alpha is {alpha!r:.40}"
    for layer, (a, b) in lora.layers.items():
        if not a.shape[0] == b.shape[1] == lora.rank > 0:
            return f"{layer} has the ranks {a.shape[0]} and {b.shape[1]}, the first layer {lora.rank}"
        if not (a.is_floating_point() and b.is_floating_point()):
            return f"{layer} has numbers of type {a.dtype} and {b.dtype}"
        if not (a.float().isfinite().all() and b.float().isfinite().all()):
            return f"{layer} has non-finite values"
    return None


def check_fit(lora: Lora | Mapping[str, Halves], denoiser: torch.nn.Module, where: str) -> None:
    """Raise `ModelError` if `denoiser`, `where` in the message, lacks a layer of the LoRA or has it in another size."""
    linear = {name: module for name, module in denoiser.named_modules() if isinstance(module, torch.nn.Linear)}
    for layer, halves in (lora.halves if isinstance(lora, Lora) else lora).items():
        a, b = halves.a, halves.b
        if layer not in linear:
            raise ModelError(
                f"the LoRA does not fit {where}: it has no linear layer {layer}; use the model it was trained on"
            )
        sizes, expected = (a.shape[1], b.shape[0]), (linear[layer].in_features, linear[layer].out_features)
        if sizes != expected:
            raise ModelError(
                f"the LoRA does not fit {where}: {layer} has {expected[0]} inputs and {expected[1]} outputs, the "
                f"LoRA {sizes[0]} and {sizes[1]}; use the model it was trained on"
            )


def check_components(loras: Mapping[str, Lora], pipe: DiffusionPipeline, file: Path) -> None:
    """Raise `ModelError` if `pipe` has no denoiser for one of the LoRAs of `file`, or one that it does not fit."""
    for denoiser, lora in loras.items():
        if denoiser not in pipe.components:
            raise ModelError(f"{file} has a LoRA of {denoiser}, which {type(pipe).__name__} does not have")
        check_fit(lora, pipe.components[denoiser], f"{denoiser} of {type(pipe).__name__} ({file})")


@torch.no_grad()
def inject(denoiser: ModelMixin, lora: Lora, name: str) -> None:
    """Put a LoRA on `denoiser` as the adapter `name`; its layers compute in fp32 as `gerl.model.lora.add_lora`'s do."""
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets)
    inject_adapter_in_model(config, denoiser, name)
    for layer, halves in lora.layers.items():
        adapted = denoiser.get_submodule(layer)
        for part, values in zip((adapted.lora_A[name], adapted.lora_B[name]), halves, strict=True):
            part.weight.data = values.to(part.weight.device, torch.float32)

"""8-bit copies of frozen weights that only draw: rollouts in int8 or fp8, updates with the weights as they are.

Unlike `model.quantize`, which keeps weights small and computes in the model's precision, these layers compute in 8
bits, inputs included. The policy that draws is then another than the one that is trained, close to it.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from diffusers import ModelMixin

from gerl.config.blocks import DrawingPrecision
from gerl.errors import ConfigError, ModelError
from gerl.model.sharding import repeated_blocks
from gerl.utils.files import reason

MULTIPLE = 16  # of which the widths of a layer have to be for 8-bit kernels


class DrawingWeights:
    """8-bit copies of the frozen linear weights in the repeated blocks of denoisers.

    Raises `ModelError` for denoisers without such layers, and `ConfigError` as `check_drawing`.
    """

    def __init__(self, denoisers: Mapping[str, ModelMixin], kind: DrawingPrecision) -> None:
        layers = {
            id(layer): layer
            for denoiser in denoisers.values()
            for block in repeated_blocks(denoiser)
            for layer in block.modules()
            if isinstance(layer, torch.nn.Linear) and _fits(layer)
        }
        if not layers:
            raise ModelError(
                f"rollout.quantize={kind}: the denoiser has no frozen linear layers with widths that are multiples of "
                f"{MULTIPLE}; use none"
            )
        self.copies = [(layer, quantised(layer.weight, kind)) for layer in layers.values()]

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The layers compute with the copies."""
        own = [layer.weight for layer, _ in self.copies]
        try:
            for layer, copy in self.copies:
                layer.weight = copy
            yield
        finally:
            for (layer, _), weight in zip(self.copies, own, strict=True):
                layer.weight = weight


def check_drawing(kind: DrawingPrecision, device: str, dtype: torch.dtype) -> None:
    """Raise `ConfigError` where the package for `kind` is missing, or layers cannot compute so on `device`."""
    weight = torch.eye(2 * MULTIPLE, dtype=dtype, device=device)
    try:
        with torch.no_grad():
            torch.nn.functional.linear(weight, quantised(weight, kind))
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"rollout.quantize={kind}: layers cannot compute in this format on {device} ({reason(error)}); use "
            "int8, or none"
        ) from error


def quantised(weight: torch.Tensor, kind: DrawingPrecision) -> torch.nn.Parameter:
    """A copy of a linear layer's `weight` that computes in 8 bits, with a scale for each row and each input vector."""
    try:
        from torchao.quantization import (  # an optional package
            Float8DynamicActivationFloat8WeightConfig,
            Int8DynamicActivationInt8WeightConfig,
            PerRow,
            quantize_,
        )
    except ImportError:
        raise ConfigError(
            f"rollout.quantize={kind} needs the package torchao: pip install 'gerl[quantize]', or use none"
        ) from None
    rows, columns = weight.shape
    layer = torch.nn.Linear(columns, rows, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    config = (
        Int8DynamicActivationInt8WeightConfig()
        if kind == "int8"
        else Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    )
    quantize_(layer, config)
    layer.weight.requires_grad_(False)
    return layer.weight


def _fits(layer: torch.nn.Linear) -> bool:
    divisible = layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0
    return divisible and not layer.weight.requires_grad and layer.weight.is_floating_point()

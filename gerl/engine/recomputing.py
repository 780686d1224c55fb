"""Gradient checkpointing under a LoRA scale: recomputed blocks see the scale that they were computed with."""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

# A pipeline's `joint_attention_kwargs={"scale": s}` (`attention_kwargs`, `cross_attention_kwargs`) scales the LoRA
# layers while the denoiser's forward pass runs. Checkpointed blocks are computed again in the backward pass, after the
# denoiser has removed the scale: their activations, and so the gradient, would be those of another scale.


@contextlib.contextmanager
def constant_scale(components: Iterable[object]) -> Iterator[None]:
    """Recompute checkpointed blocks of `components` with the LoRA scale of their forward pass."""
    modules = [m for c in components if isinstance(c, torch.nn.Module) for m in c.modules()]
    checkpointed = [m for m in modules if vars(m).get("gradient_checkpointing") and _FUNCTION in vars(m)]
    functions = [vars(m)[_FUNCTION] for m in checkpointed]
    for module, function in zip(checkpointed, functions, strict=True):
        setattr(module, _FUNCTION, _with_scale(function, module))
    try:
        yield
    finally:
        for module, function in zip(checkpointed, functions, strict=True):
            setattr(module, _FUNCTION, function)


_FUNCTION = "_gradient_checkpointing_func"  # of diffusers' and transformers' modules: computes a block, and again later


def _with_scale(checkpoint: Callable[..., object], module: torch.nn.Module) -> Callable[..., object]:
    from peft.tuners.tuners_utils import BaseTunerLayer  # imported lazily: only LoRAs need it

    layers: list[Any] = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]

    def checkpoint_with_scale(block: Callable[..., object], *args: object, **kwargs: object) -> object:
        scales = [dict(layer.scaling) for layer in layers]

        def compute(*args: object, **kwargs: object) -> object:
            now = [dict(layer.scaling) for layer in layers]
            _set_scales(layers, scales)
            try:
                return block(*args, **kwargs)
            finally:
                _set_scales(layers, now)

        return checkpoint(compute, *args, **kwargs)

    return checkpoint_with_scale


def _set_scales(layers: Iterable[Any], scales: Iterable[dict[str, float]]) -> None:
    for layer, scale in zip(layers, scales, strict=True):
        layer.scaling.update(scale)

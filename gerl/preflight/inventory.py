"""The components of a pipeline, and where its LoRA is."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Component:
    """A neural network of a pipeline. `targets`: names of the layers with a LoRA, `*` for the numbers in them."""

    name: str
    kind: str
    parameters: int  # without the LoRA
    dtype: str  # of most of them
    lora_parameters: int = 0
    lora_modules: int = 0
    linear_layers: int = 0  # of which `lora_modules` have a LoRA
    targets: tuple[str, ...] = ()


def components(parts: Mapping[str, object], lora: Mapping[str, torch.nn.Parameter]) -> list[Component]:
    """The networks among `parts` of a pipeline, largest first; names in `lora` are `component.parameter`."""
    found = [_component(n, part, _of(n, lora)) for n, part in parts.items() if isinstance(part, torch.nn.Module)]
    return sorted(found, key=lambda component: -component.parameters)


def _component(name: str, network: torch.nn.Module, lora: Mapping[str, torch.nn.Parameter]) -> Component:
    sizes: Counter[torch.dtype] = Counter()
    for key, p in network.named_parameters():
        if "lora_" not in key:
            sizes[p.dtype] += p.numel()
    layers = [key.partition(".lora_A.")[0] for key in lora if ".lora_A." in key]
    linear = [key for key, m in network.named_modules() if isinstance(m, torch.nn.Linear) and "lora_" not in key]
    return Component(
        name=name,
        kind=type(network).__name__,
        parameters=sizes.total(),
        dtype=str(max(sizes, key=lambda dtype: sizes[dtype], default="")).removeprefix("torch."),
        lora_parameters=sum(p.numel() for p in lora.values()),
        lora_modules=len(layers),
        linear_layers=len(linear),
        targets=tuple(dict.fromkeys(_without_numbers(layer) for layer in layers)),
    )


def count_gradients(lora: Mapping[str, torch.nn.Parameter], component: str) -> int:
    """LoRA modules of `component` that got a gradient: that of B, since A has none as long as B is zero."""
    found = [p.grad for key, p in _of(component, lora).items() if ".lora_B." in key]
    return sum(grad is not None and bool(grad.any()) for grad in found)


def _of(component: str, lora: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    return {key.removeprefix(f"{component}."): p for key, p in lora.items() if key.startswith(f"{component}.")}


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))

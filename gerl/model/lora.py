"""LoRA on any denoiser: target layers, adding and removing it, and switching it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

import accelerate
import torch
from diffusers import ModelMixin
from diffusers.loaders import PeftAdapterMixin
from diffusers.utils import recurse_remove_peft_layers
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer

from gerl.errors import ModelError

# parts of a repeated block that are neither attention nor feed-forward: modulation, embeddings, resnets, routers
NOT_TRAINED = re.compile(r"norm|embed|(?<![a-z])mod(?![a-z])|modulat|time|resnet|router|adaln", re.IGNORECASE)
ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)  # in a class name
ADAPTER = "default"  # peft's name of the trained LoRA
BASE_LAYER = ".base_layer"  # end of peft's name of a layer with a LoRA
Parameters = dict[str, torch.nn.Parameter]  # by name
Denoiser = TypeVar("Denoiser", bound=torch.nn.Module)


def default_targets(denoiser: torch.nn.Module) -> list[str]:
    """Return the names of the attention and feed-forward linear layers in the repeated blocks of `denoiser`.

    Blocks: entries of a `ModuleList` that contain a module with "attention" in its class name, else all entries.
    """
    modules = dict(denoiser.named_modules())
    entries = {name for name in modules if isinstance(modules.get(name.rpartition(".")[0]), torch.nn.ModuleList)}
    attentions = [name for name, module in modules.items() if ATTENTION.search(type(module).__name__)]
    blocks = entries & {above for name in attentions for above in _path(name)} or entries

    def is_target(name: str) -> bool:
        *above, _ = _path(name)
        # torch's attention reads the weights of its linear layers directly, bypassing `forward` and hence a LoRA
        outer = [modules[name] for name in above]
        inert = any("Resnet" in type(m).__name__ or isinstance(m, torch.nn.MultiheadAttention) for m in outer)
        return not inert and not blocks.isdisjoint(above) and not NOT_TRAINED.search(name)

    return [name for name in linear_layers(denoiser) if is_target(name)]


def _path(name: str) -> list[str]:
    """Return the attribute names on the path to module `name`, outermost first."""
    return [name[:i] for i, c in enumerate(name) if c == "."] + [name]


def linear_layers(model: torch.nn.Module) -> list[str]:
    """Return the names of the linear layers of `model`, without those of a LoRA on it."""
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return [name.removesuffix(BASE_LAYER) for name in names if ".lora_" not in name]


def find_targets(denoiser: torch.nn.Module, pattern: str | None, name: str = "denoiser") -> list[str]:
    """Return the linear layers of one denoiser that get a LoRA, see `targets_of`. Raises `ModelError` if none do."""
    return targets_of({name: denoiser}, pattern)[name]


def targets_of(denoisers: Mapping[str, torch.nn.Module], pattern: str | None) -> dict[str, list[str]]:
    """Return the linear layers that get a LoRA by denoiser, without denoisers that have none.

    By `default_targets`, or by `pattern` on names `denoiser.module`, as `model.train` sees them; one that matches none
    of these is tried on names without the denoiser. Layers that a plain model lacks (an IP-Adapter's, fused
    projections) are left out: it could not load their LoRA. Raises `ModelError` if no layer is left.
    """
    linear = {name: _plain_layers(denoiser) for name, denoiser in denoisers.items()}
    try:
        if pattern is None:
            usual = {name: set(default_targets(denoiser)) for name, denoiser in denoisers.items()}
            matched = {name: [layer for layer in linear[name] if layer in usual[name]] for name in linear}
        else:
            matched = {
                n: [layer for layer in layers_of if re.search(pattern, f"{n}.{layer}")]
                for n, layers_of in linear.items()
            }
            if not any(matched.values()):
                matched = {
                    n: [layer for layer in layers_of if re.search(pattern, layer)] for n, layers_of in linear.items()
                }
    except re.error as error:
        raise ModelError(f"model.lora_targets={pattern!r} is not a valid regular expression: {error}") from None
    if not any(matched.values()):
        names = [f"{name}.{layer}" for name, layers_of in linear.items() for layer in layers_of]
        kinds = " and ".join(type(denoiser).__name__ for denoiser in denoisers.values())
        raise ModelError(
            f"model.lora_targets={pattern!r} matches none of the {len(names)} linear layers of {kinds}; their names "
            f"look like {', '.join(names[:3])}"
        )
    return {name: layers for name, layers in matched.items() if layers}


def bare_model(kind: type[ModelMixin], config: Mapping[str, Any]) -> ModelMixin:
    """Build a model without weights and buffers: a table of positions alone may take seconds and gigabytes."""
    try:
        with torch.device("meta"):
            return kind.from_config(config)
    except (RuntimeError, NotImplementedError, TypeError):  # it reads values of its buffers
        with accelerate.init_empty_weights():
            return kind.from_config(config)


def _plain_layers(denoiser: torch.nn.Module) -> list[str]:
    linear = linear_layers(denoiser)
    if not isinstance(denoiser, ModelMixin):
        return linear
    plain = set(linear_layers(bare_model(type(denoiser), denoiser.config)))
    return [name for name in linear if name in plain]


def with_lora(denoisers: Mapping[str, Denoiser], adapter: str = ADAPTER) -> dict[str, Denoiser]:
    """Return the denoisers that have a trained LoRA."""
    return {name: d for name, d in denoisers.items() if adapter in getattr(d, "peft_config", {})}


def add_lora(
    denoiser: torch.nn.Module,
    rank: int,
    alpha: float,
    layers: Sequence[str] | str | None,
    seed: int,
    adapter: str = ADAPTER,
) -> Parameters:
    """Freeze `denoiser`, add a LoRA (A Gaussian from `seed`, B zero) and return its parameters (fp32) by name.

    layers: their names, or a pattern or None as in `find_targets`.
    """
    denoiser.requires_grad_(False)
    targets = set(find_targets(denoiser, layers) if layers is None or isinstance(layers, str) else layers)
    # peft targets every module whose name ends in "." and a target's name
    others = [name for name, _ in denoiser.named_modules() if name not in targets]
    mistaken = [name for name in others if any(name[i + 1 :] in targets for i, c in enumerate(name) if c == ".")]
    where = {"target_modules": list(targets), "exclude_modules": mistaken or None}
    config = LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights="gaussian", **where)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(denoiser, PeftAdapterMixin):
            denoiser.add_adapter(config, adapter)
        else:  # older denoisers and those of custom pipelines do not have it
            inject_adapter_in_model(config, denoiser, adapter)
    parameters = {name: p for name, p in denoiser.named_parameters() if p.requires_grad}
    for p in parameters.values():
        p.data = p.data.float()
    return parameters


def remove_lora(denoiser: torch.nn.Module) -> None:
    """Remove the LoRA from `denoiser` and restore the layers from before `add_lora`."""
    if isinstance(denoiser, PeftAdapterMixin):
        denoiser.unload_lora()
    else:
        recurse_remove_peft_layers(denoiser)
        if hasattr(denoiser, "peft_config"):
            del denoiser.peft_config


def adapted_layers(models: Iterable[torch.nn.Module]) -> list[BaseTunerLayer]:
    """Return the layers of `models` with a LoRA, trained or not."""
    return [module for model in models for module in model.modules() if isinstance(module, BaseTunerLayer)]


def activate(layer: BaseTunerLayer, adapter: str, trained: bool = False) -> None:
    """Make `adapter` the only active adapter of `layer`; it requires gradients only if `trained`."""
    layer.set_adapter([adapter])
    for names in () if trained else layer.adapter_layer_names:
        matrices = getattr(layer, names)
        if adapter in matrices:
            matrices[adapter].requires_grad_(False)


@contextlib.contextmanager
def adapter_active(denoisers: Iterable[torch.nn.Module], adapter: str | None, trained: bool = False) -> Iterator[None]:
    """Compute with the LoRA `adapter` instead of the trained one in the block; None: with the base model.

    Layers without it have no LoRA. Switches the layers directly, since not every denoiser has `disable_adapters`.
    """
    layers = adapted_layers(denoisers)
    for layer in layers:
        if adapter is None:
            layer.enable_adapters(False)
        else:
            activate(layer, adapter, trained)
    try:
        yield
    finally:
        for layer in layers:
            if adapter is None:
                layer.enable_adapters(True)
            else:
                layer.set_adapter([ADAPTER])


def lora_disabled(denoisers: Iterable[torch.nn.Module]) -> contextlib.AbstractContextManager[None]:
    """Compute with the base model within the block."""
    return adapter_active(denoisers, None)


def __getattr__(name: str) -> object:
    """`load_lora`, which programs that gerl has written import from here."""
    if name == "load_lora":
        return import_module("gerl.model.lora_files").load_lora
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""LoRA on any denoiser: where it goes, switching it off, and its files in diffusers' format."""

import contextlib
import inspect
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer

from gerl.errors import ModelError

# what in a repeated block is neither attention nor feed-forward: modulation, embeddings, resnets, routers
NOT_TRAINED = re.compile(r"norm|embed|mod|time|resnet|router|adaln", re.IGNORECASE)
WEIGHTS = "pytorch_lora_weights.safetensors"


def default_targets(denoiser: torch.nn.Module) -> list[str]:
    """Names of the attention and feed-forward linear layers in the repeated blocks (`ModuleList`s) of `denoiser`."""
    modules = dict(denoiser.named_modules())

    def is_target(name: str) -> bool:
        parents = [name[:i] for i, c in enumerate(name) if c == "."]
        within = [type(modules[p]).__name__ for p in parents]
        excluded = any(NOT_TRAINED.search(part) for part in name.split(".")) or any("Resnet" in w for w in within)
        return "ModuleList" in within and not excluded

    return [name for name, module in modules.items() if isinstance(module, torch.nn.Linear) and is_target(name)]


def find_targets(denoiser: torch.nn.Module, pattern: str | None) -> list[str]:
    """Names of the linear layers of `denoiser` that get a LoRA; raises `ModelError` if there are none.

    `pattern`: regular expression searched in the layers' names; None: `default_targets`.
    """
    linear = [name for name, module in denoiser.named_modules() if isinstance(module, torch.nn.Linear)]
    if pattern is None:
        found = default_targets(denoiser)
    else:
        try:
            found = [name for name in linear if re.search(pattern, name)]
        except re.error as error:
            raise ModelError(f"model.lora_targets={pattern!r} is no regular expression: {error}") from None
    if not found:
        raise ModelError(
            f"model.lora_targets={pattern!r} matches none of the {len(linear)} linear layers of "
            f"{type(denoiser).__name__}; their names look like {', '.join(linear[:3])}"
        )
    return found


def add_lora(denoiser: Any, rank: int, alpha: float, pattern: str | None, seed: int) -> dict[str, torch.nn.Parameter]:
    """Freeze `denoiser`, add a LoRA and return its parameters (fp32) by name.

    A is Gaussian, drawn from `seed`; B is zero, so the output is at first bitwise that of the base model.
    """
    denoiser.requires_grad_(False)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, init_lora_weights="gaussian", target_modules=find_targets(denoiser, pattern)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        denoiser.add_adapter(config)
    parameters = {name: p for name, p in denoiser.named_parameters() if p.requires_grad}
    for p in parameters.values():
        p.data = p.data.float()
    return parameters


@contextlib.contextmanager
def lora_disabled(denoisers: list[torch.nn.Module]) -> Iterator[None]:
    """The base model: switches the adapter layers themselves, since not every denoiser has `disable_adapters`."""
    layers = [m for d in denoisers for m in d.modules() if isinstance(m, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def lora_file(pipe: Any, denoisers: dict[str, Any]) -> bytes:
    """The current LoRA as the safetensors file that `pipe.load_lora_weights` of plain diffusers reads, alpha included.

    Raises `ModelError` for a pipeline whose `save_lora_weights` does not take one of its denoisers.
    """
    save = getattr(type(pipe), "save_lora_weights", None)
    accepted = inspect.signature(save).parameters if save else {}
    arguments: dict[str, Any] = {}
    for name, denoiser in denoisers.items():
        if f"{name}_lora_layers" not in accepted:
            raise ModelError(
                f"diffusers cannot save a LoRA of {type(pipe).__name__}.{name}: train another pipeline class"
            )
        arguments[f"{name}_lora_layers"] = get_peft_model_state_dict(denoiser)
        arguments[f"{name}_lora_adapter_metadata"] = denoiser.peft_config["default"].to_dict()
    with tempfile.TemporaryDirectory() as folder:
        assert save is not None
        save(folder, safe_serialization=True, **arguments)
        return (Path(folder) / WEIGHTS).read_bytes()

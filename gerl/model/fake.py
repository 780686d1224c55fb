"""A second LoRA, trained to imitate the images that the trained one draws: the "fake" model of distribution matching.

Its matrices are trained weights as those of the first: they share its optimizer, averages and checkpoints. It takes
part only where it is asked for, and in no export.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping

import torch
from diffusers import ModelMixin
from peft import LoraConfig, inject_adapter_in_model

from gerl.model.lora import ADAPTER
from gerl.model.teachers import adapted_layers
from gerl.utils.seeding import derive_seed

FAKE = "fake"


def add_fake(
    denoisers: Mapping[str, ModelMixin], scale: float, device: str, seed: int
) -> dict[str, torch.nn.Parameter]:
    """Add it to the layers that have the trained LoRA, with its ranks and `scale` times its alpha; at first it is 0.

    Returns its parameters (fp32) by name.
    """
    for name, denoiser in denoisers.items():
        first = denoiser.peft_config[ADAPTER]
        config = LoraConfig(
            r=first.r,
            lora_alpha=scale * first.lora_alpha,
            init_lora_weights="gaussian",
            target_modules=first.target_modules,
            exclude_modules=first.exclude_modules,
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # two LoRAs on a model are meant
            torch.manual_seed(derive_seed("fake", seed, name))
            inject_adapter_in_model(config, denoiser, FAKE)
    for layer in adapted_layers(denoisers):
        layer.set_adapter([ADAPTER])
    found = fake_parameters(denoisers)
    for p in found.values():
        p.data = p.data.to(device, torch.float32)
    return found


def fake_parameters(denoisers: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Its matrices by name, none where there is none."""
    named = {f"{name}.{key}": p for name, denoiser in denoisers.items() for key, p in denoiser.named_parameters()}
    return {name: p for name, p in named.items() if ".lora_" in name and is_fake(name)}


@contextlib.contextmanager
def fake_active(denoisers: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """The model computes, and is trained, with the second LoRA in place of the first."""
    layers = adapted_layers(denoisers)
    for layer in layers:
        layer.set_adapter([FAKE])
    try:
        yield
    finally:
        for layer in layers:
            layer.set_adapter([ADAPTER])


def is_fake(name: str) -> bool:
    """Whether a tensor of this name, as in `Policy.trained`, is one of its matrices."""
    return f".{FAKE}." in name

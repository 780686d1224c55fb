"""Teachers of a policy, and its fake model: LoRAs beside the trained one, inactive by default."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from diffusers import DiffusionPipeline, ModelMixin
from peft import inject_adapter_in_model

from gerl.config.algorithms import NAME, Teacher
from gerl.errors import ModelError
from gerl.model.lora import ADAPTER, Parameters, adapted_layers, with_lora
from gerl.model.lora_files import Denoisers, Layers, inject
from gerl.model.start_lora import read_fitting
from gerl.utils.seeding import derive_seed

# --- Teachers of a policy: LoRAs beside the trained one, inactive by default


@dataclass(frozen=True)
class TeacherModel:
    """Loaded teacher: the LoRA adapter `adapter`, the pipeline `pipe`, or the base model if both are None."""

    teacher: Teacher
    adapter: str | None = None
    pipe: DiffusionPipeline | None = None


def read_teachers(teachers: Sequence[Teacher], denoisers: Denoisers) -> dict[str, dict[str, Layers]]:
    """Read LoRAs among `teachers`, by source and denoiser (or skeleton). Raises `ModelError` if one does not fit."""
    loras: dict[str, dict[str, Layers]] = {}
    for source in (teacher.lora for teacher in teachers):
        if source is None or source in loras:
            continue
        try:
            loras[source] = read_fitting(source, denoisers)
        except ModelError as error:
            raise ModelError(in_teachers(str(error), f"lora={source!r}")) from None
    return loras


def in_teachers(text: str, entry: str) -> str:
    """Reword a sentence about a key of `model` as one about an entry of `algorithm.teachers`, with `entry` in it."""
    text = re.sub(r"\bmodel\.(lora|path)\b(?!_)", r"\1", text)
    return f"{NAME}: {text if text.startswith(entry) else f'{entry}: {text}'}"


def attach_teachers(
    teachers: Sequence[Teacher],
    read: Mapping[str, Mapping[str, Layers]],
    denoisers: Mapping[str, ModelMixin],
    device: str,
) -> list[TeacherModel]:
    """Add the LoRAs of `read_teachers` to `denoisers`, beside the trained one, which stays active."""
    adapters = {source: f"teacher_{i}" for i, source in enumerate(read)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several LoRAs on a model are intended
        for source, adapter in adapters.items():
            for name, layers in read[source].items():
                inject(denoisers[name], layers, adapter)
    for layer in adapted_layers(denoisers.values()):
        layer.set_adapter([ADAPTER])
    for name, p in teachers_parameters(denoisers).items():
        p.data = p.data.to(device)
        assert not p.requires_grad, name
    return [TeacherModel(t, None if t.lora is None else adapters[t.lora]) for t in teachers]


def teachers_parameters(denoisers: Mapping[str, ModelMixin]) -> Parameters:
    """Return the matrices of all teachers' LoRAs."""
    return {
        f"{name}.{key}": p
        for name, denoiser in denoisers.items()
        for key, p in denoiser.named_parameters()
        if ".lora_" in key and f".{ADAPTER}." not in key
    }


# --- A second LoRA, trained to imitate the policy's images: the "fake" model of distribution matching.
#
# Its matrices share the optimizer, averages and checkpoints of the first. It is inactive by default, and not exported.

FAKE = "fake"


def add_fake(denoisers: Mapping[str, ModelMixin], scale: float, device: str, seed: int) -> Parameters:
    """Add the fake LoRA, initially 0, beside the trained one with `scale` times its alpha; return its parameters."""
    for name, denoiser in with_lora(denoisers).items():
        first = denoiser.peft_config[ADAPTER]
        config = replace(first, lora_alpha=scale * first.lora_alpha)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # two LoRAs on a model are intended
            torch.manual_seed(derive_seed("fake", seed, name))
            inject_adapter_in_model(config, denoiser, FAKE)
    for layer in adapted_layers(denoisers.values()):
        layer.set_adapter([ADAPTER])
    parameters = fake_parameters(denoisers)
    for p in parameters.values():
        p.data = p.data.to(device, torch.float32)
    return parameters


def fake_parameters(denoisers: Mapping[str, torch.nn.Module]) -> Parameters:
    """Return the fake LoRA's matrices by name; empty without a fake LoRA."""
    named = {f"{name}.{key}": p for name, denoiser in denoisers.items() for key, p in denoiser.named_parameters()}
    return {name: p for name, p in named.items() if ".lora_" in name and is_fake(name)}


def is_fake(name: str) -> bool:
    """Whether a tensor of this name, as in `Policy.trained`, belongs to the fake LoRA."""
    return f".{FAKE}." in name

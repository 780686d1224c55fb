"""The denoisers among the components of a pipeline, and whether one in memory can be trained."""

import inspect
import re
from collections.abc import Mapping

import torch
from diffusers import DiffusionPipeline, ModelMixin

from gerl.config import ModelConfig
from gerl.errors import ModelError

DENOISERS = ("transformer", "transformer_2", "unet")  # usual names, for those that do not show what they are
TIMESTEP = re.compile(r"(^|_)(t|time|timesteps?|sigmas?|noise_level)(_|$)")  # an argument of a denoiser


def find_denoisers(pipe: DiffusionPipeline) -> dict[str, ModelMixin]:
    """The components that get a LoRA, by name: diffusers models with repeated blocks that are called with a timestep.

    The blocks have linear layers (a vocoder's have none). Autoencoders and ControlNets are none. A pipeline may have
    several: Wan 2.2 has one for high and one for low noise levels, Ideogram 4 one for the conditional and one for the
    unconditional prediction. Raises `ModelError` if there is none.
    """
    found = denoisers_among(pipe.components)
    if not found:
        raise ModelError(
            f"{type(pipe).__name__} has no denoiser: none of its components {', '.join(pipe.components)} is a model "
            "of diffusers with repeated blocks that is called with a timestep"
        )
    return found


def denoisers_among(components: Mapping[str, object]) -> dict[str, ModelMixin]:
    """Those of a pipeline's components that get a LoRA, see `find_denoisers`; skeletons will do."""
    models = {
        name: component
        for name, component in components.items()
        if isinstance(component, ModelMixin) and not hasattr(component, "decode") and "controlnet" not in name
    }
    found = {name: model for name, model in models.items() if _is_denoiser(model)}
    return found or {name: models[name] for name in DENOISERS if name in models}


def _is_denoiser(model: torch.nn.Module) -> bool:
    timed = any(TIMESTEP.search(name) for name in inspect.signature(model.forward).parameters)
    blocks = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    # a vocoder is told how to handle time, and has repeated blocks of convolutions: there is nothing for a LoRA
    return timed and any(isinstance(layer, torch.nn.Linear) for block in blocks for layer in block.modules())


def check_offered(pipe: object, config: ModelConfig | None = None) -> None:
    """Raise `ModelError` if a pipeline in memory is none, or cannot be trained as `config` says."""
    if not isinstance(pipe, DiffusionPipeline):
        raise ModelError(f"{type(pipe).__name__} is no pipeline of diffusers: give one, a hub id or a folder")
    config = config or ModelConfig()
    if config.quantize != "none" or config.quantize_encoders != "none" or config.merge_lora:
        raise ModelError("model.quantize and model.merge_lora change weights as they are read: give the path instead")
    for name, denoiser in find_denoisers(pipe).items():
        if has_lora(denoiser):
            raise ModelError(f"{name} has a LoRA already: call pipe.unload_lora_weights() or pipe.fuse_lora() before")


def has_lora(denoiser: torch.nn.Module) -> bool:
    """Whether a LoRA is on it, trained or not."""
    return any("lora_" in name for name, _ in denoiser.named_parameters())

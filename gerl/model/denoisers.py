"""The denoisers among the components of a pipeline, and whether one in memory can be trained."""

import inspect
import logging
import re
from collections.abc import Mapping

import torch
from diffusers import DiffusionPipeline, ModelMixin, ModularPipeline
from diffusers.models.attention_processor import Attention
from peft.tuners.tuners_utils import BaseTunerLayer

from gerl.config import ModelConfig
from gerl.engine.record import stateful_hooks
from gerl.errors import ModelError
from gerl.model.lora import remove_lora

logger = logging.getLogger(__name__)
DENOISERS = ("transformer", "transformer_2", "unet")  # usual names, for those that do not show what they are
TIMESTEP = re.compile(r"(^|_)(t|time|timesteps?|sigmas?|noise_level)(_|$)")  # an argument of a denoiser


def find_denoisers(pipe: DiffusionPipeline) -> dict[str, ModelMixin]:
    """The components that get a LoRA, by name: diffusers models with repeated blocks that are called with a timestep.

    The blocks have linear layers (a vocoder's have none). Autoencoders and ControlNets are none. A pipeline may have
    several: Wan 2.2 has one for high and one for low noise levels, Ideogram 4 one for the conditional and one for the
    unconditional prediction. Raises `ModelError` if there is none.
    """
    for name, component in pipe.components.items():
        if hasattr(component, "_orig_mod"):
            raise ModelError(
                f"{name} is wrapped by torch.compile: set pipe.{name} = pipe.{name}._orig_mod, and use model.compile "
                f"(or pipe.{name}.compile(), which changes it in place)"
            )
    found = denoisers_among(pipe.components)
    if not found:
        raise ModelError(
            f"{type(pipe).__name__} has no denoiser: none of its components {', '.join(pipe.components)} is a "
            "diffusers model with repeated blocks that is called with a timestep"
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
    """Raise `ModelError` if a pipeline in memory is none, or cannot be trained as `config` says.

    The layers of adapters that are fused into the weights are taken off: they compute nothing.
    """
    if not isinstance(pipe, DiffusionPipeline):
        modular = isinstance(pipe, ModularPipeline)
        instead = "one with the same components, such as FluxPipeline(**pipe.components)" if modular else "one"
        raise ModelError(f"{type(pipe).__name__} is not a diffusers pipeline: give {instead}, a Hub id or a folder")
    config = config or ModelConfig()
    if config.quantize != "none" or config.quantize_encoders != "none" or config.merge_lora:
        raise ModelError("model.quantize and model.merge_lora change weights on loading: give the path instead")
    for name, denoiser in find_denoisers(pipe).items():
        if is_fused(denoiser):
            logger.info("the fused adapters of %s stay in its weights, their layers are removed", name)
            remove_lora(denoiser)
        check_plain(name, denoiser)
        if hooked := [part or name for part, m in denoiser.named_modules() if m._forward_hooks or m._forward_pre_hooks]:
            logger.warning(
                "%s has forward hooks from the calling program (on %s), which run in both rollouts and replays: "
                "one that keeps state between calls makes them differ",
                name,
                hooked[0],
            )
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module) and any(p.is_meta for p in component.parameters()):
            raise ModelError(
                f"the weights of {name} are not in memory, as after enable_sequential_cpu_offload(): pass the "
                "pipeline without it, and use model.offload=blocks"
            )


def check_plain(name: str, denoiser: torch.nn.Module) -> None:
    """Raise `ModelError` unless `denoiser`, the component `name`, computes what its class does with its weights.

    A LoRA trained on anything else (other adapters, fused projections, caches) fits no plain pipeline.
    """
    if kinds := sorted({type(m).__module__.split(".")[2] for m in denoiser.modules() if _is_adapter(m)}):
        raise ModelError(
            f"{name} already has adapters ({', '.join(kinds)}): call pipe.unload_lora_weights() to start without "
            "them, or pipe.fuse_lora() and then pipe.unload_lora_weights() to train on top of them"
        )
    if any(map(_is_projection_fused, denoiser.modules())):
        raise ModelError(
            f"the projections of {name} are fused, so a LoRA would not fit a plain pipeline: call "
            f"pipe.{name}.unfuse_qkv_projections() first"
        )
    if stateful := stateful_hooks(denoiser):
        raise ModelError(
            f"{name} keeps state between denoising steps ({', '.join(stateful)}), which cannot be replayed: call "
            f"pipe.{name}.disable_cache() first, and use sampling.cache for rollouts"
        )


def is_fused(denoiser: torch.nn.Module) -> bool:
    """Whether there are adapters on it, and the weights have all of them in, as after `pipe.fuse_lora()`."""
    layers = [module for module in denoiser.modules() if isinstance(module, BaseTunerLayer)]
    return bool(layers) and all(
        layer.merged and set(layer._all_available_adapter_names()) <= set(layer.merged_adapters) for layer in layers
    )


def _is_projection_fused(module: torch.nn.Module) -> bool:
    if isinstance(module, Attention):  # which is still marked after unfuse_qkv_projections() has given it its processor
        return type(module.processor).__name__.startswith("Fused")
    return bool(getattr(module, "fused_projections", False))


def _is_adapter(module: torch.nn.Module) -> bool:
    return isinstance(module, BaseTunerLayer) and type(module).__module__.startswith("peft.tuners.")


def has_adapter(denoiser: torch.nn.Module) -> bool:
    """Whether an adapter of PEFT is on it, trained or not: a LoRA or any other kind."""
    return any(isinstance(module, BaseTunerLayer) for module in denoiser.modules())

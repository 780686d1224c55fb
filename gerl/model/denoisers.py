"""Denoisers of a pipeline, with and without weights, and the warnings of their libraries."""

import contextlib
import inspect
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline, ModelMixin, ModularPipeline
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import IPAdapterTimeImageProjection, MultiIPAdapterImageProjection
from transformers import PreTrainedModel

from gerl.config import ModelConfig
from gerl.engine.kv_caches import stateful_hooks
from gerl.errors import ModelError
from gerl.model.lora import adapted_layers, bare_model, remove_lora
from gerl.utils.versions import DTYPE

# --- Find the denoisers among a pipeline's components, and check whether a loaded one can be trained

logger = logging.getLogger(__name__)
DENOISERS = ("transformer", "transformer_2", "unet")  # usual names, for models that no signature identifies
TIMESTEP = re.compile(r"(^|_)(t|time|timesteps?|sigmas?|noise_level)(_|$)")  # an argument that only denoisers have


def find_denoisers(pipe: DiffusionPipeline) -> dict[str, ModelMixin]:
    """Return the components that get a LoRA, by name: diffusers models with repeated blocks that take a timestep.

    The blocks must have linear layers (a vocoder's have none). There may be several: Wan 2.2 has one for high and one
    for low noise levels. Raises `ModelError` if there is none.
    """
    for name, component in pipe.components.items():
        if hasattr(component, "_orig_mod"):
            raise ModelError(
                f"{name} is wrapped by torch.compile: set pipe.{name} = pipe.{name}._orig_mod, and use model.compile "
                f"(or pipe.{name}.compile(), which changes it in place)"
            )
    denoisers = denoisers_among(pipe.components)
    if not denoisers:
        raise ModelError(
            f"{type(pipe).__name__} has no denoiser: none of its components {', '.join(pipe.components)} is a "
            "diffusers model with repeated blocks that is called with a timestep"
        )
    return denoisers


def denoisers_among(components: Mapping[str, object]) -> dict[str, ModelMixin]:
    """Return the pipeline components, or skeletons, that get a LoRA; see `find_denoisers`."""
    models = {
        name: component
        for name, component in components.items()
        if isinstance(component, ModelMixin) and not hasattr(component, "decode") and "controlnet" not in name
    }
    denoisers = {name: model for name, model in models.items() if _is_denoiser(model)}
    return denoisers or {name: models[name] for name in DENOISERS if name in models}


def _is_denoiser(model: torch.nn.Module) -> bool:
    timed = any(TIMESTEP.search(name) for name in inspect.signature(model.forward).parameters)
    blocks = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    # a vocoder has a time argument and repeated blocks, but its blocks are convolutions, which get no LoRA
    return timed and any(isinstance(layer, torch.nn.Linear) for block in blocks for layer in block.modules())


def check_offered(pipe: object, config: ModelConfig | None = None) -> None:
    """Raise `ModelError` if an object in memory is not a pipeline, or cannot be trained according to `config`.

    Removes the layers of fused adapters, which no longer compute anything.
    """
    if not isinstance(pipe, DiffusionPipeline):
        modular = isinstance(pipe, ModularPipeline)
        instead = "one with the same components, such as FluxPipeline(**pipe.components)" if modular else "one"
        raise ModelError(f"{type(pipe).__name__} is not a diffusers pipeline: give {instead}, a Hub id or a folder")
    config = config or ModelConfig()
    if config.parts:
        raise ModelError(
            "model.parts replaces components on loading: set those of the pipeline in memory instead, such as pipe.vae"
        )
    if config.quantize != "none" or config.quantize_encoders != "none" or config.merge_lora:
        raise ModelError("model.quantize and model.merge_lora change weights on loading: give the path instead")
    denoisers = find_denoisers(pipe)
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            _remove_fused(name, component)
            if name in denoisers:
                check_plain(name, component)
            else:
                check_unadapted(name, component)
            if hooked := [part or name for part, m in component.named_modules() if _has_hooks(m)]:
                logger.warning(
                    "%s has forward hooks from the calling program (on %s), which no file of it holds and which run in "
                    "both rollouts and replays: one that keeps state between calls makes them differ",
                    name,
                    hooked[0],
                )
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module) and any(p.is_meta for p in component.parameters()):
            raise ModelError(
                f"the weights of {name} are not in memory, as after enable_sequential_cpu_offload(): pass the "
                "pipeline without it, and use model.offload=blocks"
            )
    _check_precision(pipe)


def _check_precision(pipe: DiffusionPipeline) -> None:
    """Raise `ModelError` if denoisers and text encoders have different precisions.

    diffusers does not convert between them: `from_pretrained` without a dtype loads the files of a text encoder as they
    are, and those of a denoiser as float32.
    """
    sizes = {name: _precisions(part) for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    precision = {name: size.most_common(1)[0][0] for name, size in sizes.items() if size}
    denoisers = find_denoisers(pipe)
    encoders = [n for n in precision if isinstance(getattr(pipe, n), PreTrainedModel) and n != "safety_checker"]
    together = {name: precision[name] for name in (*encoders, *denoisers) if name in precision}
    half = [dtype for dtype in reversed(together.values()) if dtype.itemsize == 2]
    if len(set(together.values())) > 1:
        names: dict[torch.dtype, list[str]] = {}
        for name, dtype in together.items():
            names.setdefault(dtype, []).append(name)
        dtypes = " and ".join(
            f"{', '.join(same)} in {str(dtype).removeprefix('torch.')}" for dtype, same in names.items()
        )
        wanted = half[0] if half else torch.float32
        raise ModelError(
            f"the pipeline in memory has {dtypes}, which cannot compute with each other: load it with "
            f"{DTYPE}={wanted}, or call pipe.to({wanted})"
        )


def _precisions(model: torch.nn.Module) -> Counter[torch.dtype]:
    """Count the floating-point parameters of each precision; none if the model is quantised."""
    if getattr(model, "quantization_method", None) or getattr(model, "hf_quantizer", None):
        return Counter()
    sizes: Counter[torch.dtype] = Counter()
    for p in model.parameters():
        if p.is_floating_point() and p.dtype.itemsize > 1:  # one byte: layerwise casting, which computes in another
            sizes[p.dtype] += p.numel()
    return sizes


def _remove_fused(name: str, model: torch.nn.Module) -> None:
    """Remove the layers that `pipe.fuse_lora()` leaves behind, if all adapters of `model` are fused."""
    adapted = adapted_layers([model])
    names = [set(layer._all_available_adapter_names()) - set(layer.merged_adapters) for layer in adapted]
    if adapted and not any(names) and all(layer.merged for layer in adapted):
        logger.info("the fused adapters of %s stay in its weights, their layers are removed", name)
        remove_lora(model)
        if isinstance(model, PreTrainedModel):
            model._hf_peft_config_loaded = False  # else it is saved as an adapter


def check_unadapted(name: str, model: torch.nn.Module) -> None:
    """Raise `ModelError` for adapters, which are in no file of the pipeline."""
    adapters = [type(layer).__module__ for layer in adapted_layers([model])]
    if kinds := sorted({module.split(".")[2] for module in adapters if module.startswith("peft.tuners.")}):
        raise ModelError(
            f"{name} already has adapters ({', '.join(kinds)}): call pipe.unload_lora_weights() to start without "
            f"them, or pipe.fuse_lora(components=[{name!r}]) and then pipe.unload_lora_weights() to train on top of "
            "them"
        )


def check_plain(name: str, denoiser: torch.nn.Module) -> None:
    """Raise `ModelError` for adapters, fused projections or caches, with which no LoRA fits a plain pipeline."""
    check_unadapted(name, denoiser)
    if any(isinstance(module, IMAGE_PROJECTIONS) for module in denoiser.modules()):
        raise ModelError(
            f"{name} has an IP-Adapter, which needs an image (ip_adapter_image) that no column of the data gives: call "
            "pipe.unload_ip_adapter() first"
        )
    # an `Attention` remains marked as fused after unfuse_qkv_projections() has restored its processor
    fused = [
        type(m.processor).__name__.startswith("Fused")
        if isinstance(m, Attention)
        else getattr(m, "fused_projections", False)
        for m in denoiser.modules()
    ]
    if any(fused):
        raise ModelError(
            f"the projections of {name} are fused, so a LoRA would not fit a plain pipeline: call "
            f"pipe.{name}.unfuse_qkv_projections() first"
        )
    if stateful := stateful_hooks(denoiser):
        raise ModelError(
            f"{name} keeps state between denoising steps ({', '.join(stateful)}), which cannot be replayed: call "
            f"pipe.{name}.disable_cache() first, and use sampling.cache for rollouts"
        )


LIBRARIES = (
    "accelerate", "bitsandbytes", "diffusers", "diffusers_modules", "gguf", "kernels", "optimum", "peft", "timm",
    "torch", "torchao", "torchvision", "transformers", "transformers_modules", "xformers",
)  # fmt: skip
IMAGE_PROJECTIONS = (MultiIPAdapterImageProjection, IPAdapterTimeImageProjection)  # of IP-Adapters
MOVING = re.compile("offload|tracker|autocast|context_parallel")  # hooks that change no result


def unstored(pipe: DiffusionPipeline) -> list[str]:
    """Describe what changes the results of `pipe` in memory, but is in no file that it saves."""
    changed = []
    for name, part in pipe.components.items():
        if not isinstance(part, torch.nn.Module):
            continue
        modules = dict(part.named_modules())
        if any(getattr(m, "b1", None) is not None and getattr(m, "s1", None) is not None for m in modules.values()):
            changed.append(f"FreeU on {name}")
        hooks = {
            h for m in modules.values() if (registry := getattr(m, "_diffusers_hook", None)) for h in registry.hooks
        }
        changed += [f"{hook} of {name}" for hook in sorted(hooks) if not MOVING.search(hook)]
        processors = {type(p) for m in modules.values() if (p := getattr(m, "processor", None)) is not None}
        kinds = {type(m) for m in modules.values()} if _is_of_a_library(type(part)) else set[type]()
        classes = sorted(kind.__name__ for kind in processors | kinds if not _is_of_a_library(kind))
        changed += [f"{kind} in {name}" for kind in classes]
        changed += [f"another forward of {place or name}" for place, m in modules.items() if _is_patched(m)][:1]
    return changed


def _is_of_a_library(kind: type) -> bool:
    return kind.__module__.split(".")[0] in LIBRARIES


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_patched(module: torch.nn.Module) -> bool:
    return "forward" in vars(module) and not (hasattr(module, "_hf_hook") or hasattr(module, "_diffusers_hook"))


def has_adapter(denoiser: torch.nn.Module) -> bool:
    """Whether the model has a PEFT adapter of any kind."""
    return bool(adapted_layers([denoiser]))


# --- Denoisers without weights, whose layers are known before anything is loaded


def skeleton(folder: str, name: str, index: Mapping[str, object] | None = None) -> ModelMixin:
    """Build the component `name` of a pipeline on the meta device; `index`: its model_index.json, else it is read."""
    entries = DiffusionPipeline.load_config(folder) if index is None else index
    kind = component_class(entries.get(name))
    if kind is None or not issubclass(kind, ModelMixin):
        raise ModelError(f"the pipeline in {folder} has no {name} that is a diffusers model")
    return bare_model(kind, kind.load_config(folder, subfolder=name))


def skeletons(folder: str) -> dict[str, ModelMixin] | None:
    """Return skeletons of a pipeline's diffusers models except autoencoders; None if it has custom code."""
    index = DiffusionPipeline.load_config(folder)
    parts = [name for name, entry in index.items() if isinstance(entry, list)]
    if "_class_name" in parts or any(list((Path(folder) / name).glob("*.py")) for name in parts):
        return None
    kinds = {name: component_class(entry) for name, entry in index.items()}
    return {
        name: skeleton(folder, name, index)
        for name, kind in kinds.items()
        if kind is not None and issubclass(kind, ModelMixin) and not hasattr(kind, "decode")
    }


def component_class(entry: object) -> type[Any] | None:
    """Return the model class of a model_index.json entry `[library, class]`, of diffusers or transformers, or None."""
    if not isinstance(entry, list) or len(entry) != 2:
        return None
    library = {"diffusers": diffusers, "transformers": transformers}.get(str(entry[0]))
    kind = getattr(library, str(entry[1]), None)
    return kind if isinstance(kind, type) and issubclass(kind, ModelMixin | PreTrainedModel) else None


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create modules in `dtype` within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --- Warnings of the model libraries about user input: passed to the run's log, once each

# warnings about gerl's own calls, or that gerl reports itself
NOISE = re.compile(
    "was truncated because|sequence length is longer than"  # gerl.model.prompts counts truncations over all prompts
    "|true_cfg_scale is passed as"  # gerl.model.prompts.unguided names the configuration keys
    "|passed to [A-Za-z]*Scheduler, but are not expected"  # from the scheduler that replaces the pipeline's
    r"|kept in float32: \[\]|requires torchvision|Guiders are currently|deprecated"
)


class _Relay(logging.Handler):
    """Log handler that forwards each message once, under the name of its library."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.passed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = " ".join(record.getMessage().split())
        if message not in self.passed and not NOISE.search(message):
            self.passed.add(message)
            logger.warning("%s: %s", record.name.partition(".")[0], message)


def relay_warnings() -> None:
    """Pass only warnings of diffusers and transformers to gerl's log."""
    for library in (diffusers, transformers):
        library.logging.set_verbosity_warning()
        library.logging.disable_default_handler()
        library_logger = logging.getLogger(library.__name__)
        library_logger.propagate = False
        # without that of an earlier run in this process
        library_logger.handlers = [
            *(handler for handler in library_logger.handlers if not isinstance(handler, _Relay)),
            _Relay(),
        ]


def quiet_libraries() -> None:
    """Hide progress bars of diffusers and transformers, and show their warnings only in gerl's log."""
    relay_warnings()
    for library in (diffusers.logging, transformers.logging):
        library.disable_progress_bar()

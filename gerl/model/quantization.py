"""Frozen weights in 8 or 4 bits: quantisation configurations of diffusers and transformers for a pipeline.

Only the weights of linear layers are quantised: a layer dequantises them and computes in the precision of
`model.dtype`. Rollout and update use the same weights, and the LoRA on top stays in fp32.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
import transformers
from diffusers import PipelineQuantizationConfig
from transformers import PreTrainedModel

from gerl.config import ModelConfig
from gerl.config.blocks import Quantisation
from gerl.errors import ConfigError, ModelError
from gerl.model.denoisers import component_class, skeletons

PACKAGES: dict[Quantisation, str] = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}
EXTRAS = {"torchao": "quantize", "bitsandbytes": "bitsandbytes"}  # extras of gerl that install the packages
# the first version with `FqnToConfig`, which diffusers' quantiser uses
OLDEST = {"torchao": (0, 16), "bitsandbytes": (0, 46)}


def check_quantisation(config: ModelConfig, device: str) -> None:
    """Raise `ConfigError` if a package for `config` is missing, or does not work on `device`."""
    for key, kind in (("model.quantize", config.quantize), ("model.quantize_encoders", config.quantize_encoders)):
        if kind == "none":
            continue
        package = PACKAGES[kind]
        version = importlib.util.find_spec(package) and importlib.metadata.version(package)
        if not version or tuple(int(n) for n in version.split(".")[:2]) < OLDEST[package]:
            oldest = ".".join(map(str, OLDEST[package]))
            raise ConfigError(
                f"{key}={kind} needs the package {package}, {oldest} or newer: pip install 'gerl[{EXTRAS[package]}]', "
                f"or use {key}=none"
            )
        if kind == "nf4" and not device.startswith("cuda"):
            raise ConfigError(f"{key}=nf4 requires a GPU, and the workers are on {device}: use int8 or fp8")


def quantisation_config(
    config: ModelConfig,
    folder: str,
    dtype: torch.dtype,
    denoisers_among: Callable[[Mapping[str, object]], Mapping[str, torch.nn.Module]],
) -> PipelineQuantizationConfig | None:
    """Return the quantisation of `config` for `from_pretrained` of the pipeline in `folder`; None: none.

    Denoiser layers outside repeated blocks keep their precision: all values pass them. Raises `ModelError`.
    """
    if (config.quantize, config.quantize_encoders) == ("none", "none"):
        return None
    models = skeletons(folder)
    if models is None:
        raise ModelError(
            f"model.path={config.path!r} has custom Python code, and only models of diffusers and transformers can "
            "be quantised: use model.quantize=none and model.quantize_encoders=none"
        )
    mapping: dict[str, object] = {}
    if config.quantize != "none":
        denoisers = denoisers_among(models)
        mapping |= {n: _quantised(config.quantize, diffusers, dtype, outer_layers(m)) for n, m in denoisers.items()}
    if config.quantize_encoders != "none":
        encoders = text_encoders(folder)
        if not encoders:
            raise ModelError(
                f"model.quantize_encoders={config.quantize_encoders}: the pipeline {config.path} has no text encoder "
                "of transformers; use none"
            )
        mapping |= {name: _quantised(config.quantize_encoders, transformers, dtype) for name in encoders}
    return PipelineQuantizationConfig(quant_mapping=mapping)


def text_encoders(folder: str) -> list[str]:
    """Return a pipeline's transformers models except its safety checker: text encoders, and some image encoders."""
    index = diffusers.DiffusionPipeline.load_config(folder)
    kinds = {name: component_class(entry) for name, entry in index.items() if name != "safety_checker"}
    return [name for name, kind in kinds.items() if kind is not None and issubclass(kind, PreTrainedModel)]


def outer_layers(model: torch.nn.Module) -> list[str]:
    """Return the names of the linear layers of `model` outside its repeated blocks."""
    blocks = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)]
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return [name for name in linear if not any(name.startswith(f"{block}.") for block in blocks)]


def _quantised(kind: Quantisation, library: Any, dtype: torch.dtype, kept: list[str] | None = None) -> object:
    """Return the configuration in `library`, diffusers or transformers, of a model, except the layers `kept`."""
    if kind == "nf4":  # 4-bit NormalFloat (Dettmers et al. 2023): blocks of 64 weights with a scale each
        # a name without a dot would also exclude layers of that name in the blocks, such as FLUX's `proj_out`
        outer = None if kept is None else [name for name in kept if "." in name]
        return library.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=outer
        )
    from torchao.quantization import Float8WeightOnlyConfig, FqnToConfig, Int8WeightOnlyConfig  # an optional package

    weights = Int8WeightOnlyConfig() if kind == "int8" else Float8WeightOnlyConfig()
    return library.TorchAoConfig(weights if kept is None else FqnToConfig({**dict.fromkeys(kept), "_default": weights}))


def leading_values(weight: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first values of a weight on the CPU in fp32, dequantised; for 4-bit weights the codes."""
    plain = weight.detach()
    if type(plain).__module__.startswith("torchao"):
        plain = plain.dequantize()
    return plain.flatten()[:count].float().cpu()


def stored_bytes(weight: torch.Tensor) -> int:
    """Return the bytes that a weight occupies; for a quantised one, those of codes and scales."""
    return sum(part.numel() * part.element_size() for part in _parts(weight))


def quantised_bytes(kind: Quantisation, elements: int, rows: int) -> float:
    """Return `stored_bytes` of quantised linear layers with `elements` weights and `rows` rows in total.

    Codes, and an fp32 scale per row (int8, fp8), a zero point (int8), or a scale per 64 weights (nf4).
    """
    return {"int8": elements + 5 * rows, "fp8": elements + 4 * rows, "nf4": elements / 2 + elements / 16}[kind]


def _parts(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that make up a weight."""
    if type(weight).__module__.startswith("torchao"):
        names, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined]
        return [part for name in names for part in _parts(getattr(weight, name))]
    state = getattr(weight, "quant_state", None)  # bitsandbytes weights
    return [weight] if state is None else [weight, state.absmax]

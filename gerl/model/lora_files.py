"""Matrices of LoRAs and the file formats they are read from and written to."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import yaml
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.loaders import PeftAdapterMixin, lora_pipeline
from diffusers.loaders.lora_conversion_utils import _maybe_map_sgm_blocks_to_diffusers
from diffusers.models.normalization import AdaLayerNormContinuous
from diffusers.utils import convert_unet_state_dict_to_peft
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import load

from gerl.config.bounded_text import load_json, read_json, regular
from gerl.errors import CheckpointError, ModelError
from gerl.model.lora import ADAPTER, bare_model, linear_layers, with_lora
from gerl.model.paths import WEIGHTS
from gerl.utils.files import first_line, reason
from gerl.utils.tensors import pack_tensors

# --- Matrices: read from a file or a checkpoint, checked against a model, and added to it

logger = logging.getLogger(__name__)
METADATA = "lora_adapter_metadata"  # key under which diffusers stores the LoRA configuration in the file's header
KEY = re.compile(r"(?P<denoiser>\w+)\.(?P<layer>.+)\.lora_(?P<half>[AB])(\.default)?\.weight")
# PEFT options under which a LoRA is more than a product of two matrices, or its factor is not alpha / rank
OTHER = ("use_dora", "lora_bias", "modules_to_save", "fan_in_fan_out")
VARIANTS = ("rank_pattern", "alpha_pattern", "use_rslora", *OTHER)


@dataclass(frozen=True)
class Halves:
    """LoRA of one layer: its update is `scale * b @ a`, with `a [rank, in]` and `b [out, rank]`."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Rank of this layer, which may differ from that of other layers."""
        return len(self.a)


Layers = Mapping[str, Halves]  # by layer name


@dataclass(frozen=True)
class Lora:
    """LoRA of one denoiser: `A [rank, in]` and `B [out, rank]` by layer; a layer's update is `scale * B @ A`."""

    layers: dict[str, tuple[torch.Tensor, torch.Tensor]]
    alpha: float

    @property
    def rank(self) -> int:
        """Rank, the same in all layers."""
        return next(iter(self.layers.values()))[0].shape[0]

    @property
    def scale(self) -> float:
        """alpha / rank (Hu et al. 2021, section 4.1)."""
        return self.alpha / self.rank

    @property
    def halves(self) -> Layers:
        """LoRA of each layer separately."""
        return {layer: Halves(a, b, self.scale) for layer, (a, b) in self.layers.items()}


def _expression(layers: Iterable[str]) -> str:
    """Return layers as a regular expression for peft, which would match a list of names by their ends."""
    return "|".join(map(re.escape, layers))


Pairs = dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]  # denoiser -> layer -> A and B


def paired(tensors: Mapping[str, torch.Tensor]) -> Pairs:
    """Pair the tensors `DENOISER.LAYER.lora_A.weight`. Raises `ModelError` for other names or an incomplete pair."""
    halves: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        match = KEY.fullmatch(name)
        if match is None or value.ndim != 2:
            raise ModelError(f"its {name} {list(value.shape)} is not a matrix of a LoRA of a linear layer")
        halves.setdefault((match["denoiser"], match["layer"]), {})[match["half"]] = value
    pairs: Pairs = {}
    for (denoiser, layer), pair in halves.items():
        if set(pair) != {"A", "B"}:
            raise ModelError(f"{denoiser}.{layer} has only its matrix {', '.join(pair)}")
        pairs.setdefault(denoiser, {})[layer] = pair["A"], pair["B"]
    return pairs


def collect_loras(tensors: Mapping[str, torch.Tensor], alpha: float) -> dict[str, Lora]:
    """Return the LoRA of each denoiser from matrices as in `Policy.trained`; raises `CheckpointError` for others."""
    try:
        return {name: Lora(layers, alpha) for name, layers in paired(dict(sorted(tensors.items()))).items()}
    except ModelError as error:
        raise CheckpointError(f"{error}: only a LoRA can be exported") from None


LARGEST = 2**33  # bytes of a LoRA
DAMAGED = "{} is not a readable LoRA ({}): give a complete .safetensors file"


def _open(file: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the LoRA configuration in a safetensors file's header, and its tensors. Raises `ModelError`."""
    try:
        with safe_open(regular(file, LARGEST), "pt") as opened:
            header = load_json((opened.metadata() or {}).get(METADATA, "{}"))
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        if not isinstance(header, dict):
            raise ValueError(f"its {METADATA} is not a JSON object")
    except (OSError, SafetensorError, ValueError, RuntimeError, MemoryError) as error:
        raise ModelError(DAMAGED.format(file, reason(error))) from None
    return header, tensors


def read_lora(file: Path) -> dict[str, Layers] | None:
    """Return the LoRA of each denoiser in a file of gerl; None for other formats; `ModelError` if it is damaged."""
    header, tensors = _open(file)
    configs = _configs(header, tensors)
    is_ours = all(c.get("lora_alpha") is not None and not any(map(c.get, VARIANTS)) for c in configs.values())
    if not tensors or not is_ours or not all(KEY.fullmatch(name) for name in tensors):
        return None
    try:
        return _of_peft(tensors, configs)
    except ModelError as error:
        raise ModelError(DAMAGED.format(file, error)) from None


def _configs(header: Mapping[str, Any], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the configuration of each denoiser with a tensor in `names`, from the header of a diffusers file."""
    denoisers = dict.fromkeys(name.partition(".")[0] for name in names)
    return {d: {k.removeprefix(f"{d}."): v for k, v in header.items() if k.startswith(f"{d}.")} for d in denoisers}


def _alpha(alpha: object) -> float:
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e30:
        raise ModelError(f"its lora_alpha is {alpha!r:.40}")
    return float(alpha)


def check_fit(lora: Lora | Layers, denoiser: torch.nn.Module, where: str) -> None:
    """Raise `ModelError` if `denoiser`, `where` in the message, lacks a layer of the LoRA or differs in its size."""
    linear = {n: (m.in_features, m.out_features) for n, m in denoiser.named_modules() if isinstance(m, torch.nn.Linear)}
    linear |= {name: (module.in_channels, module.out_channels) for name, module in pointwise_layers(denoiser).items()}
    for layer, halves in (lora.halves if isinstance(lora, Lora) else lora).items():
        sizes, expected = (halves.a.shape[1], halves.b.shape[0]), linear.get(layer)
        if expected is None:
            why = f"it has no linear layer {layer}"
        elif sizes != expected:
            size = f"{expected[0]} inputs and {expected[1]} outputs"
            why = f"{layer} has {size}, the LoRA {sizes[0]} and {sizes[1]}"
        else:
            continue
        raise ModelError(f"the LoRA does not fit {where}: {why}; use the model it was trained on")


def check_components(loras: Mapping[str, Layers], pipe: DiffusionPipeline, file: Path) -> None:
    """Raise `ModelError` if `pipe` has no denoiser for one of the LoRAs of `file`, or if one does not fit."""
    for denoiser, lora in loras.items():
        if denoiser not in pipe.components:
            raise ModelError(f"{file} has a LoRA of {denoiser}, which {type(pipe).__name__} does not have")
        check_fit(lora, pipe.components[denoiser], f"{denoiser} of {type(pipe).__name__} ({file})")


@torch.no_grad()
def inject(denoiser: ModelMixin, layers: Layers, name: str) -> None:
    """Add a LoRA to `denoiser` as the adapter `name`; its layers compute in fp32 as those of `add_lora` do."""
    one = next(iter(layers.values()))  # the others may have other ranks and scales, set below
    config = LoraConfig(r=one.rank, lora_alpha=one.scale * one.rank, target_modules=_expression(layers))
    inject_adapter_in_model(config, denoiser, name)
    for layer, halves in layers.items():
        adapted = denoiser.get_submodule(layer)
        adapted.scaling[name] = halves.scale
        for part, values in ((adapted.lora_A[name], halves.a), (adapted.lora_B[name], halves.b)):
            part.weight.data = values.to(part.weight.device, torch.float32)


# --- Read LoRA files of diffusers, PEFT and kohya, and of other layouts that diffusers converts

Denoisers = Mapping[str, torch.nn.Module]
PEFT_CONFIG, PEFT_WEIGHTS, PEFT_PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
KOHYA, TEXT_ENCODER = "lora_unet_", "text_encoder"
KOHYA_TEXT = {"lora_te_": TEXT_ENCODER, "lora_te1_": TEXT_ENCODER}
KOHYA_TEXT |= {f"lora_te{i}_": f"{TEXT_ENCODER}_{i}" for i in (2, 3)}
# before the names of a denoiser's layers: kohya, OneTrainer, ComfyUI
UNET_BLOCKS = {"input_blocks": "down_blocks", "middle_block": "mid_block", "output_blocks": "up_blocks"}
PREFIXES = (KOHYA, "lora_transformer_", "model.diffusion_model.", "diffusion_model.")
KINDS = "a file or folder of diffusers, PEFT or kohya, or another layout that diffusers reads"


def read_layers(path: Path, denoisers: Denoisers) -> dict[str, Layers]:
    """Read the LoRA of each denoiser, or skeleton, from a file or folder. Raises `ModelError` for anything else.

    Those of text encoders are read too if they are among the `denoisers`.
    """
    by_denoiser: dict[str, Layers] = {}
    for file in files_of(path):
        for name, layers in _read(file, denoisers).items():
            if name not in denoisers:
                raise ModelError(f"{file} has a LoRA of {name}, and gerl trains {' and '.join(denoisers)}")
            if name in by_denoiser:
                raise ModelError(f"{path} has two LoRAs of {name}: give one of the files")
            by_denoiser[name] = layers
    if not any(by_denoiser.values()):
        raise ModelError(f"{path} has no LoRA: give {KINDS}")
    return by_denoiser


def files_of(path: Path) -> list[Path]:
    """Return the safetensors files of the LoRA in `path`."""
    if path.is_file():
        return [path]
    for file in (path / WEIGHTS, path / "lora" / WEIGHTS, path / PEFT_WEIGHTS):  # the second: of a checkpoint
        if file.is_file():
            return [file]
    several = sorted(path.glob(f"*/{PEFT_WEIGHTS}")) or sorted(path.glob("lora_*.safetensors"))
    others = sorted(path.glob("*.safetensors"))
    if several or len(others) == 1:
        return several or others
    what = f"has {len(others)} .safetensors files: give one of them" if others else f"has no {WEIGHTS}: give {KINDS}"
    raise ModelError(f"{path} {what}")


def _read(file: Path, models: Denoisers) -> dict[str, Layers]:
    header, tensors = _open(file)
    denoisers = {name: model for name, model in models.items() if not name.startswith(TEXT_ENCODER)}
    try:
        if not tensors:
            raise ModelError("it is empty")
        if all(key.startswith(PEFT_PREFIX) for key in tensors):
            name = _denoiser_of(file.parent.name, denoisers)
            config = _peft_config(file.with_name(PEFT_CONFIG))
            return _of_peft({f"{name}.{k.removeprefix(PEFT_PREFIX)}": v for k, v in tensors.items()}, {name: config})
        names, configs = {key.partition(".")[0] for key in tensors}, _configs(header, tensors)
        if names <= models.keys() and all(KEY.fullmatch(key) for key in tensors):
            return {name: _renamed(layers, models[name]) for name, layers in _of_peft(tensors, configs).items()}
        halves = named_halves(tensors, models, file.stem)
        if halves is not None and not any(configs.values()):
            return halves
        name = _denoiser_of(file.stem, denoisers)
        return _of_peft(*convert(tensors, denoisers[name], name))
    except ModelError as error:
        raise ModelError(f"{file} is not a LoRA that gerl can train on: {error}") from None


def _denoiser_of(name: str, denoisers: Denoisers) -> str:
    """Return the denoiser that a file is for, by the end of its name or that of its folder, or the only one."""
    for denoiser in denoisers:
        if f"_{name}".endswith(f"_{denoiser}"):
            return denoiser
    if len(denoisers) > 1:
        raise ModelError(
            "it does not say which denoiser it belongs to: name it lora_NAME.safetensors (kohya), or its folder "
            f"NAME (PEFT), with NAME one of {', '.join(denoisers)}"
        )
    return next(iter(denoisers))


def _peft_config(file: Path) -> dict[str, Any]:
    try:
        config = read_json(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} next to it, which has the LoRA's alpha, cannot be read ({reason(error)})") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file} next to it is not a JSON object")
    return config


def _of_peft(tensors: Mapping[str, torch.Tensor], configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Layers]:
    """Return the layers of tensors `DENOISER.LAYER.lora_A.weight`; `configs`: of PEFT, with alpha and its pattern."""
    by_denoiser: dict[str, Layers] = {}
    for name, layers in paired(tensors).items():
        for layer, (a, b) in layers.items():
            check_pair(f"{name}.{layer}", a, b)
        config = configs.get(name, {})
        by_denoiser[name] = {layer: Halves(a, b, _scale(config, layer, len(a))) for layer, (a, b) in layers.items()}
    return by_denoiser


def check_pair(layer: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise `ModelError` for matrices of a layer that do not belong together or are not finite."""
    if not len(a) == b.shape[1] > 0:
        raise ModelError(f"{layer} has the ranks {len(a)} and {b.shape[1]}")
    if not (a.is_floating_point() and b.is_floating_point()):
        raise ModelError(f"{layer} has numbers of type {a.dtype} and {b.dtype}")
    if not (a.float().isfinite().all() and b.float().isfinite().all()):
        raise ModelError(f"{layer} has non-finite values")


def _scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """Return alpha / rank of a layer, or alpha / sqrt(rank) of a rank-stabilised LoRA; 1 if no alpha is given."""
    if other := next((name for name in OTHER if config.get(name)), None):
        raise ModelError(f"it was trained with {other}, which gerl's LoRA does not have")
    pattern = config.get("alpha_pattern") or {}
    alpha = pattern.get(get_pattern_key(list(pattern), layer), config.get("lora_alpha", rank))
    return _alpha(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


# --- Write a trained LoRA in the formats of diffusers, PEFT and kohya (also read by ComfyUI), or merge it

# class of a denoiser -> layer name in its original code -> the diffusers layers that make it up
LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    family: {original: tuple([parts] if isinstance(parts, str) else parts) for original, parts in layers.items()}
    for family, layers in yaml.safe_load(Path(__file__).with_name("kohya_layouts.yaml").read_text("utf-8")).items()
}
Facts = Mapping[str, str]
NO_FACTS: Facts = MappingProxyType({})
BLOCK = re.compile(r"(?<=\.)\d+(?=\.)")
# classes whose other layers have the same name in both
SAME_NAMES = ("QwenImageTransformer2DModel", "ZImageTransformer2DModel", "UNet2DConditionModel")


def diffusers_file(loras: Mapping[str, Lora], base: str | None = None, facts: Facts = NO_FACTS) -> bytes:
    """Return a diffusers file: a LoRA under each prefix; rank, alpha, `base` model and `facts` in the header."""
    tensors: dict[str, torch.Tensor] = {}
    header: dict[str, object] = {}
    for prefix, lora in loras.items():
        for layer, (a, b) in lora.layers.items():
            tensors |= {f"{prefix}.{layer}.lora_A.weight": a, f"{prefix}.{layer}.lora_B.weight": b}
        config = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.layers)}
        config["rank_pattern"] = {}  # diffusers 0.35 cannot read a file without it
        header |= {f"{prefix}.{key}": value for key, value in config.items()}
    note = {} if base is None else {"base_model": base}
    return pack_tensors(tensors, {"format": "pt", METADATA: json.dumps(header, indent=2), **note, **facts})


def peft_files(lora: Lora, base: str) -> dict[str, bytes]:
    """Return the files of a folder for `PeftModel.from_pretrained(denoiser, folder)`, with `base` as its base model."""
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=_expression(lora.layers))
    config.base_model_name_or_path, config.inference_mode = base, True
    return {
        "adapter_config.json": json.dumps(config.to_dict(), indent=2, sort_keys=True).encode(),
        "adapter_model.safetensors": diffusers_file({"base_model.model": lora}),
    }


def kohya_file(lora: Lora, denoiser: torch.nn.Module, base: str | None = None, facts: Facts = NO_FACTS) -> bytes:
    """Return a safetensors file in kohya's layout: `lora_unet_NAME.lora_down.weight`, `.lora_up.weight` and `.alpha`.

    Only the class and sizes of `denoiser` are read. `base`, `facts`: as in `diffusers_file`. LoRAs of layers that are
    one in the original code become the blocks of one LoRA whose rank is the sum of their ranks. Raises `ModelError` if
    kohya's layout of this class is unknown, or has no name for a layer.
    """
    family = type(denoiser).__name__
    if family not in LAYOUTS:
        raise ModelError(
            f"format=kohya: its layout for {family} is unknown, only for {', '.join(LAYOUTS)}; use diffusers, peft "
            "or merged"
        )
    tensors: dict[str, torch.Tensor] = {}
    for original, parts in dict(_original(layer, family) for layer in lora.layers).items():
        trained = [part for part in parts if part in lora.layers]
        rows = [len(denoiser.get_parameter(f"{part}.weight")) for part in parts]
        down = torch.cat([lora.layers[part][0] for part in trained])
        up = down.new_zeros(sum(rows), len(down))
        for i, part in enumerate(trained):
            b = lora.layers[part][1] if original == part else _halves_swapped(lora.layers[part][1], part, denoiser)
            top = sum(rows[: parts.index(part)])
            up[top : top + len(b), i * lora.rank : (i + 1) * lora.rank] = b
        name = KOHYA + original.replace(".", "_")
        # readers divide alpha by the rank they find, the total of all blocks
        alpha = torch.tensor(lora.scale * len(down))
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": alpha}
    note = {} if base is None else {"base_model": base}
    return pack_tensors(tensors, {"format": "pt", **note, **facts})


def named_halves(tensors: Mapping[str, torch.Tensor], models: Denoisers, stem: str) -> dict[str, Layers] | None:
    """Return the LoRAs of a file that has only layers of known names; None if it has others.

    Known are the names of diffusers and transformers and those of `LAYOUTS`, with dots or underscores, after the usual
    prefixes; alpha is that of each layer. Several layers may lie on top of each other. models: denoisers, and text
    encoders if a LoRA of theirs can be merged. stem: name of the file, see `_denoiser_of`.
    """
    files: dict[str, dict[str, dict[str, torch.Tensor]]] = {}  # component -> layer in the file -> A, B and alpha
    for key, value in _with_unet_names(tensors, models).items():
        match = MATRIX.fullmatch(key) or ALPHA.fullmatch(key)
        if match is None:
            return None
        half = match.groupdict().get("half") or "alpha"
        component, layer = _component_of(match["layer"], models, stem)
        value = value.flatten(1) if value.shape[2:] == (1, 1) else value
        files.setdefault(component, {}).setdefault(layer, {})[{"down": "A", "up": "B"}.get(half, half)] = value
    by_component: dict[str, Layers] = {}
    for component, layers in files.items():
        layer_names = _layer_names(models[component])
        if component.startswith(TEXT_ENCODER) and (unknown := sorted(layers.keys() - layer_names.keys())):
            raise ModelError(f"its {unknown[0]} is no layer of {component}: use the model it was trained on")
        if not layers.keys() <= layer_names.keys() or any(
            t.ndim > 2 for pair in layers.values() for t in pair.values()
        ):
            return None
        halves = [_halves_of(layer, pair, layer_names[layer], models[component]) for layer, pair in layers.items()]
        by_component[component] = {layer: value for part in halves for layer, value in part.items()}
    return by_component


def _with_unet_names(tensors: Mapping[str, torch.Tensor], models: Denoisers) -> Mapping[str, torch.Tensor]:
    """Return the tensors with diffusers' names of a UNet's blocks, where SDXL's files have those of its authors."""
    unet = models.get("unet")
    if unet is None or not any(name in key for key in tensors for name in UNET_BLOCKS):
        return tensors
    try:
        renamed = _maybe_map_sgm_blocks_to_diffusers(dict(tensors), unet.config)
    except (ValueError, IndexError):  # other layers, which diffusers' reader may know
        return tensors
    return {
        functools.reduce(lambda key, name: key.replace(name, UNET_BLOCKS[name]), UNET_BLOCKS, key): value
        for key, value in renamed.items()
    }


def _component_of(layer: str, models: Denoisers, stem: str) -> tuple[str, str]:
    """Return the component that a layer of a file belongs to, and its name in there, with underscores."""
    denoisers = {name: model for name, model in models.items() if not name.startswith(TEXT_ENCODER)}
    name, _, rest = layer.partition(".")
    for prefix in (prefix for prefix in KOHYA_TEXT if layer.startswith(prefix)):
        name, rest = KOHYA_TEXT[prefix], layer.removeprefix(prefix)
        if name not in models and prefix == "lora_te3_":  # of T5, which is FLUX's second
            name = f"{TEXT_ENCODER}_2"
    if name in models:
        return name, _underscored(rest)
    if name.startswith(TEXT_ENCODER):
        alone = f"a file of {' and '.join(denoisers)} alone"
        if len(models) > len(denoisers):
            raise ModelError(f"it has a LoRA of {name}, which the pipeline does not have: use {alone}")
        raise ModelError(
            f"it has a LoRA of {name}, which can be merged but not trained: use model.merge_lora=true, or {alone}"
        )
    prefix = next((prefix for prefix in PREFIXES if layer.startswith(prefix)), "")
    return _denoiser_of(stem, denoisers), _underscored(layer.removeprefix(prefix))


def _underscored(layer: str) -> str:
    return layer.replace(".", "_").removeprefix("text_model_")


def _renamed(layers: Layers, model: torch.nn.Module) -> Layers:
    """Return the layers of a text encoder under the names they have in `model`: transformers 5 shortened CLIP's."""
    names = {_underscored(layer): layer for layer in linear_layers(model)}
    return {names.get(_underscored(layer), layer): halves for layer, halves in layers.items()}


def kohya_halves(tensors: Mapping[str, torch.Tensor], denoiser: torch.nn.Module) -> dict[str, Halves]:
    """Return the LoRA of each layer in a file of `kohya_file`, exactly. Raises `ModelError` for other tensors."""
    by_component = named_halves(tensors, {"denoiser": denoiser}, "denoiser")
    if by_component is None:
        raise ModelError(f"it is not a LoRA of linear layers of {type(denoiser).__name__} only")
    return dict(by_component["denoiser"])


def _halves_of(
    name: str, tensors: Mapping[str, torch.Tensor], parts: tuple[str, ...], model: torch.nn.Module
) -> dict[str, Halves]:
    """Return the LoRA of each of the layers that make up layer `name` of a file."""
    down, up, alpha = (tensors.get(half) for half in ("A", "B", "alpha"))
    if down is None or up is None:
        raise ModelError(f"its {name} has only one of the two matrices, lora_A and lora_B")
    check_pair(name, down, up)
    scale = 1.0 if alpha is None else _alpha(float(alpha)) / len(down)
    rows = [len(model.get_parameter(f"{part}.weight")) for part in parts]
    if sum(rows) != len(up):
        raise ModelError(
            f"its {name} has {len(up)} outputs, and {type(model).__name__} {sum(rows)} in its place: use the model it "
            "was trained on"
        )
    original = name not in {_underscored(part) for part in parts}
    halves: dict[str, Halves] = {}
    for part, block in zip(parts, up.split(rows), strict=True):
        up_rows = _halves_swapped(block, part, model) if original else block
        used = up_rows.any(0).nonzero().flatten()
        if len(parts) == 1:
            halves[part] = Halves(down, up_rows, scale)
        elif len(used):
            columns = slice(int(used[0]), int(used[-1]) + 1)
            halves[part] = Halves(down[columns], up_rows[:, columns], scale)
    return halves


def _halves_swapped(up: torch.Tensor, layer: str, denoiser: torch.nn.Module) -> torch.Tensor:
    """Swap scale and shift of an `AdaLayerNormContinuous`, as diffusers' converter of SD3 does (`swap_scale_shift`)."""
    swapped = isinstance(denoiser.get_submodule(layer.rpartition(".")[0]), AdaLayerNormContinuous)
    return torch.cat(up.chunk(2)[::-1]) if swapped else up


def _layer_names(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the layers of `model` that make up each layer of a file, by its name with underscores."""
    layers, family = linear_layers(model), type(model).__name__
    names: dict[str, tuple[str, ...]] = {}
    for layer in layers if family in LAYOUTS else []:
        with contextlib.suppress(ModelError):  # the original code has no name for it
            original, parts = _original(layer, family)
            names[_underscored(original)] = parts
    return {_underscored(layer): (layer,) for layer in [*layers, *pointwise_layers(model)]} | names


def pointwise_layers(model: torch.nn.Module) -> dict[str, torch.nn.Conv2d]:
    """Return the convolutions of single pixels, linear layers to a LoRA, as SD 1.5 has around its attention."""
    convolutions = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Conv2d)}
    return {
        name: module for name, module in convolutions.items() if module.kernel_size == (1, 1) and module.groups == 1
    }


def _original(layer: str, family: str) -> tuple[str, tuple[str, ...]]:
    """Return the original name of a layer, and all diffusers layers that make it up, from top to bottom."""
    number = BLOCK.search(layer)
    block = number[0] if number else ""
    pattern = BLOCK.sub("*", layer, count=1)
    for original, parts in LAYOUTS[family].items():
        if pattern in parts:
            return original.replace("*", block), tuple(part.replace("*", block) for part in parts)
    if family not in SAME_NAMES:
        raise ModelError(f"format=kohya: it has no name for layer {layer} of {family}; use diffusers, peft or merged")
    return layer, (layer,)


@torch.no_grad()
def merge(layers: Layers, denoiser: torch.nn.Module) -> None:
    """Add a LoRA to the weights of `denoiser`, computed in fp32 and rounded once to the weights' precision."""
    for layer, halves in layers.items():
        weight = denoiser.get_parameter(f"{layer}.weight")
        update = (halves.b.float() @ halves.a.float()).to(weight.device).view_as(weight)
        weight.copy_(weight.float() + halves.scale * update)


def lora_file(denoisers: dict[str, ModelMixin], adapter: str = ADAPTER) -> bytes:
    """Return a LoRA as a safetensors file in diffusers' format with alpha; names are `denoiser.parameter`.

    `pipe.load_lora_weights(folder)` reads it for denoisers whose LoRA the pipeline can load; for others use
    `pipe.NAME.load_lora_adapter(folder, prefix="NAME", use_safetensors=True)`, or `load_lora` of this module.
    """
    weights: dict[str, torch.Tensor] = {}
    metadata: dict[str, object] = {}
    for name, denoiser in with_lora(denoisers, adapter).items():
        weights |= {f"{name}.{key}": v for key, v in get_peft_model_state_dict(denoiser, adapter_name=adapter).items()}
        config = denoiser.peft_config[adapter].to_dict()
        metadata |= {f"{name}.{key}": sorted(v) if isinstance(v, set) else v for key, v in config.items()}
    return pack_tensors(weights, {"format": "pt", METADATA: json.dumps(metadata, indent=2, sort_keys=True)})


def load_lora(pipe: DiffusionPipeline, path: Path) -> None:
    """Load a LoRA (file of `lora_file` or its folder) onto the denoisers of `pipe`. Raises `ModelError` for others."""
    file = path / WEIGHTS if path.is_dir() else path
    loras = read_lora(file)
    if loras is None:
        raise ModelError(f"{file} is not a LoRA written by gerl: use one, or {type(pipe).__name__}.load_lora_weights")
    check_components(loras, pipe, file)
    for denoiser, layers in loras.items():
        inject(pipe.components[denoiser], layers, ADAPTER)


# --- Check on a skeleton that plain diffusers loads a whole LoRA file, before the file counts as written

CHECK_ADAPTER = "check"


def check_loads(content: bytes, denoisers: Mapping[str, torch.nn.Module]) -> None:
    """Raise `ModelError` unless a plain model of each class loads all tensors of a file in diffusers' format.

    Diffusers only warns about tensors without a layer. Classes that cannot load a LoRA are skipped.
    """
    tensors = load(content)
    for name, denoiser in denoisers.items():
        if not (isinstance(denoiser, PeftAdapterMixin) and isinstance(denoiser, ModelMixin)):
            continue
        of_denoiser = {
            key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")
        }
        plain = bare_model(type(denoiser), denoiser.config)
        try:
            plain.load_lora_adapter(of_denoiser, prefix=None, adapter_name=CHECK_ADAPTER, low_cpu_mem_usage=True)
        except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"plain diffusers does not load the LoRA of {name}: {first_line(error)}") from error
        loaded = get_peft_model_state_dict(plain, adapter_name=CHECK_ADAPTER)
        wrong = sorted(of_denoiser.keys() ^ loaded.keys()) or [
            k for k, v in of_denoiser.items() if loaded[k].shape != v.shape
        ]
        if wrong:
            raise ModelError(
                f"a plain {type(denoiser).__name__} does not accept {len(wrong)} tensors of the LoRA of {name}, "
                f"such as {wrong[0]}: train the pipeline without additional or fused layers"
            )


# --- LoRA files in the layouts of other trainers and interfaces, converted by diffusers' readers

SUFFIX = "LoraLoaderMixin"
# tensor names of a LoRA in any layout: two matrices per layer, and alpha
MATRIX = re.compile(r"(?P<layer>.+?)[._]lora(_linear_layer)?[._](?P<half>A|B|down|up)(\.default)?\.weight")
ALPHA = re.compile(r"(?P<layer>.+?)(\.lora)?\.alpha")
COMPONENT = re.compile(r"(unet|(transformer|text_encoder)(_\d)?)(?=\.)")
Tensors = Mapping[str, torch.Tensor]


def convert(tensors: Tensors, denoiser: torch.nn.Module, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a file's tensors as diffusers reads them, `name.LAYER.lora_A.weight`, and each layer's configuration.

    Raises `ModelError` for a layout or tensor that diffusers does not read: the images would be those of another LoRA.
    """
    for key, value in tensors.items():
        if not (MATRIX.fullmatch(key) or ALPHA.fullmatch(key)):
            raise ModelError(f"its {key} {list(value.shape)} is not a matrix of a LoRA of a linear layer")
    reader = _reader(denoiser)
    if reader is None:
        raise ModelError(
            f"its {next(iter(tensors))} is not named as in diffusers files, and diffusers converts no other layout "
            f"for {type(denoiser).__name__}: save it with pipe.save_lora_weights"
        )
    unet = {"unet_config": denoiser.config} if "StableDiffusion" in reader.__name__ else {}
    try:
        read = reader.lora_state_dict(dict(tensors), return_lora_metadata=True, **unet)
        converted, alphas = read[0], read[1] if len(read) == 3 else None
        if not all("lora_A" in key or "lora_B" in key for key in converted):
            converted = convert_unet_state_dict_to_peft(converted)
    except (ValueError, KeyError, RuntimeError, IndexError, TypeError, AttributeError, AssertionError) as error:
        logger.debug("diffusers: %s", first_line(error))
        layer_names, layers = _layer_names(denoiser), [m["layer"] for key in tensors if (m := MATRIX.fullmatch(key))]
        prefix = next((prefix for prefix in PREFIXES if layers and layers[0].startswith(prefix)), "")
        other = next(
            (n for n in layers if _underscored(n.removeprefix(prefix)) not in layer_names), next(iter(tensors))
        )
        family = type(denoiser).__name__
        raise ModelError(f"its {other} is no layer of {family}: use the model it was trained on") from None
    if other := next((key for key in converted if key.partition(".")[0] != name), None):
        if component := COMPONENT.match(other):
            raise ModelError(f"it has a LoRA of {component[0]}, and gerl trains {name}: use a file of {name} alone")
        raise ModelError(f"its {other:.100} is no layer of {type(denoiser).__name__}: use the model it was trained on")
    config = _alphas(alphas or {}, name)
    before, after = _squared_norm(tensors, {}), _squared_norm(converted, config.get("alpha_pattern", {}))
    if not abs(after - before) <= 1e-3 * before:
        raise ModelError(
            f"diffusers reads its layers or alphas for {type(denoiser).__name__} only in part: use the model it was "
            "trained on, or save it with pipe.save_lora_weights"
        )
    return converted, {name: config}


def _reader(denoiser: torch.nn.Module) -> type[Any] | None:
    """Return diffusers' pipeline mixin that reads LoRAs of this class: the one with the longest common name."""
    family = type(denoiser).__name__
    if family == "UNet2DConditionModel":
        large = getattr(denoiser.config, "addition_embed_type", None) == "text_time"
        family = "StableDiffusionXL" if large else "StableDiffusion"
    readers = [name for name in vars(lora_pipeline) if name.endswith(SUFFIX) and name != SUFFIX]
    fitting = [name for name in readers if family.startswith(name.removesuffix(SUFFIX))]
    return getattr(lora_pipeline, max(fitting, key=len)) if fitting else None


def _alphas(alphas: Mapping[str, float], name: str) -> dict[str, Any]:
    """Return the alpha of each layer; diffusers names it by the first matrix, as a PEFT configuration does."""
    renamed = convert_unet_state_dict_to_peft({key.removesuffix(".alpha"): value for key, value in alphas.items()})
    layers = {key.removeprefix(f"{name}.").split(".lora_")[0]: float(value) for key, value in renamed.items()}
    return {"alpha_pattern": {f"^{re.escape(layer)}$": alpha for layer, alpha in layers.items()}} if layers else {}


def _squared_norm(tensors: Tensors, pattern: Mapping[str, float]) -> float:
    """Return the sum of squares of all updates `alpha / rank * B @ A`, invariant under splitting a layer by rows."""
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    alphas: dict[str, float] = {}
    for key, value in tensors.items():
        if match := MATRIX.fullmatch(key):
            half = {"down": "A", "up": "B"}.get(match["half"], match["half"])
            pairs.setdefault(match["layer"], {})[half] = value.flatten(1).double()
        elif match := ALPHA.fullmatch(key):
            alphas[match["layer"]] = float(value)
    total = 0.0
    for layer, pair in pairs.items():
        if set(pair) != {"A", "B"} or len(pair["A"]) != pair["B"].shape[1]:
            raise ModelError(f"{layer} has only one of its two matrices, or two of different ranks")
        matching = [alpha for name, alpha in pattern.items() if re.search(name, layer.partition(".")[2])]
        scale = (matching[0] if matching else alphas.get(layer, len(pair["A"]))) / len(pair["A"])
        a, b = pair["A"] @ pair["A"].T, pair["B"].T @ pair["B"]
        total += scale**2 * float((a * b.T).sum())
    return total

"""A trained LoRA as files of diffusers, PEFT and kohya (whose layout ComfyUI reads), or merged into the weights."""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType

import torch
from diffusers.models.normalization import AdaLayerNormContinuous
from peft import LoraConfig

from gerl.errors import ModelError
from gerl.model.lora_weights import METADATA, Halves, Lora
from gerl.utils.tensors import pack_tensors


def _qkv(attention: str) -> tuple[str, ...]:
    return tuple(f"{attention}.to_{x}" for x in "qkv")


def _added_qkv(attention: str) -> tuple[str, ...]:
    return tuple(f"{attention}.add_{x}_proj" for x in "qkv")


# How kohya files call the layers of a family: as its original code does, dots as underscores. Original name -> layers
# of diffusers, `*` is the number of a block. Several layers lie on top of each other in one of the original.
LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "SD3Transformer2DModel": {
        "joint_blocks.*.x_block.attn.qkv": _qkv("transformer_blocks.*.attn"),
        "joint_blocks.*.x_block.attn.proj": ("transformer_blocks.*.attn.to_out.0",),
        "joint_blocks.*.x_block.attn2.qkv": _qkv("transformer_blocks.*.attn2"),
        "joint_blocks.*.x_block.attn2.proj": ("transformer_blocks.*.attn2.to_out.0",),
        "joint_blocks.*.x_block.mlp.fc1": ("transformer_blocks.*.ff.net.0.proj",),
        "joint_blocks.*.x_block.mlp.fc2": ("transformer_blocks.*.ff.net.2",),
        "joint_blocks.*.context_block.attn.qkv": _added_qkv("transformer_blocks.*.attn"),
        "joint_blocks.*.context_block.attn.proj": ("transformer_blocks.*.attn.to_add_out",),
        "joint_blocks.*.context_block.mlp.fc1": ("transformer_blocks.*.ff_context.net.0.proj",),
        "joint_blocks.*.context_block.mlp.fc2": ("transformer_blocks.*.ff_context.net.2",),
        "joint_blocks.*.x_block.adaLN_modulation.1": ("transformer_blocks.*.norm1.linear",),
        "joint_blocks.*.context_block.adaLN_modulation.1": ("transformer_blocks.*.norm1_context.linear",),
        "context_embedder": ("context_embedder",),
        "t_embedder.mlp.0": ("time_text_embed.timestep_embedder.linear_1",),
        "t_embedder.mlp.2": ("time_text_embed.timestep_embedder.linear_2",),
        "y_embedder.mlp.0": ("time_text_embed.text_embedder.linear_1",),
        "y_embedder.mlp.2": ("time_text_embed.text_embedder.linear_2",),
        "final_layer.adaLN_modulation.1": ("norm_out.linear",),
        "final_layer.linear": ("proj_out",),
    },
    "FluxTransformer2DModel": {
        "double_blocks.*.img_attn.qkv": _qkv("transformer_blocks.*.attn"),
        "double_blocks.*.img_attn.proj": ("transformer_blocks.*.attn.to_out.0",),
        "double_blocks.*.img_mlp.0": ("transformer_blocks.*.ff.net.0.proj",),
        "double_blocks.*.img_mlp.2": ("transformer_blocks.*.ff.net.2",),
        "double_blocks.*.img_mod.lin": ("transformer_blocks.*.norm1.linear",),
        "double_blocks.*.txt_attn.qkv": _added_qkv("transformer_blocks.*.attn"),
        "double_blocks.*.txt_attn.proj": ("transformer_blocks.*.attn.to_add_out",),
        "double_blocks.*.txt_mlp.0": ("transformer_blocks.*.ff_context.net.0.proj",),
        "double_blocks.*.txt_mlp.2": ("transformer_blocks.*.ff_context.net.2",),
        "double_blocks.*.txt_mod.lin": ("transformer_blocks.*.norm1_context.linear",),
        "single_blocks.*.linear1": (*_qkv("single_transformer_blocks.*.attn"), "single_transformer_blocks.*.proj_mlp"),
        "single_blocks.*.linear2": ("single_transformer_blocks.*.proj_out",),
        "single_blocks.*.modulation.lin": ("single_transformer_blocks.*.norm.linear",),
    },
    "QwenImageTransformer2DModel": {},
    "ZImageTransformer2DModel": {
        f"{blocks}.*.attention.{original}": layers
        for blocks in ("layers", "noise_refiner", "context_refiner")
        for original, layers in {
            "qkv": _qkv(f"{blocks}.*.attention"),
            "out": (f"{blocks}.*.attention.to_out.0",),
        }.items()
    },
    "WanTransformer3DModel": {
        f"blocks.*.{original}": (f"blocks.*.{layer}",)
        for original, layer in {
            **{f"self_attn.{x}": f"attn1.to_{x}" for x in "qkv"},
            "self_attn.o": "attn1.to_out.0",
            **{f"cross_attn.{x}": f"attn2.to_{x}" for x in "qkv"},
            "cross_attn.o": "attn2.to_out.0",
            "cross_attn.k_img": "attn2.add_k_proj",
            "cross_attn.v_img": "attn2.add_v_proj",
            "ffn.0": "ffn.net.0.proj",
            "ffn.2": "ffn.net.2",
        }.items()
    },
    # kohya trains it under the names of diffusers
    "UNet2DConditionModel": {},
}
BLOCK = re.compile(r"(?<=\.)\d+(?=\.)")
# whose other layers have the same name in both
SAME_NAMES = ("QwenImageTransformer2DModel", "ZImageTransformer2DModel", "UNet2DConditionModel")


def diffusers_file(
    loras: Mapping[str, Lora], base: str | None = None, facts: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """A safetensors file of diffusers: a LoRA under each prefix, rank and alpha in the file's header.

    `base`: what it was trained on, for the header, which has `facts` too.
    """
    tensors: dict[str, torch.Tensor] = {}
    header: dict[str, object] = {}
    for prefix, lora in loras.items():
        for layer, (a, b) in lora.layers.items():
            tensors |= {f"{prefix}.{layer}.lora_A.weight": a, f"{prefix}.{layer}.lora_B.weight": b}
        config = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.layers)}
        header |= {f"{prefix}.{key}": value for key, value in config.items()}
    return pack_tensors(tensors, {"format": "pt", METADATA: json.dumps(header, indent=2), **_note(base), **facts})


def _note(base: str | None) -> dict[str, str]:
    return {} if base is None else {"base_model": base}


def peft_files(lora: Lora, base: str) -> dict[str, bytes]:
    """The files of a folder for `PeftModel.from_pretrained(denoiser, folder)`; `base` is noted as the base model."""
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets,
        base_model_name_or_path=base,
        inference_mode=True,
    )
    return {
        "adapter_config.json": json.dumps(config.to_dict(), indent=2, sort_keys=True).encode(),
        "adapter_model.safetensors": diffusers_file({"base_model.model": lora}),
    }


def kohya_file(
    lora: Lora, denoiser: torch.nn.Module, base: str | None = None, facts: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """A safetensors file in kohya's layout: `lora_unet_NAME.lora_down.weight`, `.lora_up.weight` and `.alpha`.

    Only the class and the sizes of `denoiser` are read, so it may be on the meta device. `base`, `facts`: as in
    `diffusers_file`. Where several layers are one in the original code, their LoRAs become the blocks of one LoRA,
    whose rank is the sum of theirs.

    Raises:
        ModelError: kohya's layout of this class is not known, or has no name for a layer.
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
            b = _halves_swapped(lora.layers[part][1], part, denoiser)
            top = sum(rows[: parts.index(part)])
            up[top : top + len(b), i * lora.rank : (i + 1) * lora.rank] = b
        name = "lora_unet_" + original.replace(".", "_")
        # readers divide alpha by the rank they find, that of all blocks together
        alpha = torch.tensor(lora.scale * len(down))
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": alpha}
    return pack_tensors(tensors, {"format": "pt", **_note(base), **facts})


def in_layout(tensors: Mapping[str, torch.Tensor], denoiser: torch.nn.Module) -> bool:
    """Whether `kohya_halves` knows all modules of a file for the class of `denoiser`."""
    return type(denoiser).__name__ in LAYOUTS and {n.split(".")[0] for n in tensors} <= _kohya_names(denoiser).keys()


def kohya_halves(tensors: Mapping[str, torch.Tensor], denoiser: torch.nn.Module) -> dict[str, Halves]:
    """The LoRA of each layer of `denoiser` in the tensors of a file in kohya's layout, see `kohya_file`.

    Where several layers are one in the original code, each gets the rows of its own, and the part of the rank that
    they use: exactly the LoRAs that `kohya_file` was given. Only the class and the sizes of `denoiser` are read.

    Raises:
        ModelError: kohya's layout of this class is not known, or the file has something else.
    """
    originals = _kohya_names(denoiser)
    found: dict[str, Halves] = {}
    modules = sorted({name.split(".")[0] for name in tensors})
    for module in modules:
        halves = [tensors.get(f"{module}.{part}.weight") for part in ("lora_down", "lora_up")]
        alpha = tensors.get(f"{module}.alpha")
        down, up = halves
        known = {f"{module}.{part}" for part in ("lora_down.weight", "lora_up.weight", "alpha")}
        if unread := sorted({name for name in tensors if name.split(".")[0] == module} - known):
            raise ModelError(f"its {unread[0]} is not part of a LoRA, and would be ignored")
        if module not in originals or down is None or up is None or not down.ndim == up.ndim == 2:
            raise ModelError(f"its {module} is not a LoRA of a linear layer of {type(denoiser).__name__}")
        scale = 1.0 if alpha is None else float(alpha) / len(down)
        top, parts = 0, originals[module]
        for part in parts:
            rows = len(denoiser.get_parameter(f"{part}.weight"))
            own = _halves_swapped(up[top : top + rows], part, denoiser)
            top += rows
            used = own.any(0).nonzero().flatten()
            if len(parts) == 1:
                found[part] = Halves(down, own, scale)
            elif len(used):
                columns = slice(int(used[0]), int(used[-1]) + 1)
                found[part] = Halves(down[columns], own[:, columns], scale)
        if top != len(up):
            raise ModelError(f"its {module} has {len(up)} rows, and {type(denoiser).__name__} {top} in its place")
    return found


def _halves_swapped(up: torch.Tensor, layer: str, denoiser: torch.nn.Module) -> torch.Tensor:
    """The rows in the other order where the layer's original outputs first the shift, then the scale, and diffusers'
    the scale first: `AdaLayerNormContinuous`, as in its converter of SD3's original code (`swap_scale_shift`).
    """
    if not isinstance(denoiser.get_submodule(layer.rpartition(".")[0]), AdaLayerNormContinuous):
        return up
    return torch.cat(up.chunk(2)[::-1])


def _kohya_names(denoiser: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """The layers of `denoiser` that make up each module of a kohya file, by the module's name."""
    family = type(denoiser).__name__
    if family not in LAYOUTS:
        raise ModelError(
            f"kohya's layout for {family} is unknown, only for {', '.join(LAYOUTS)}: use a diffusers or PEFT file"
        )
    names: dict[str, tuple[str, ...]] = {}
    for layer, module in denoiser.named_modules():
        if isinstance(module, torch.nn.Linear):
            try:
                original, parts = _original(layer, family)
            except ModelError:  # kohya has no name for it
                continue
            names["lora_unet_" + original.replace(".", "_")] = parts
    return names


def _original(layer: str, family: str) -> tuple[str, tuple[str, ...]]:
    """The original name of a layer, and all layers of diffusers that make it up, from top to bottom."""
    number = BLOCK.search(layer)
    block = number[0] if number else ""
    pattern = BLOCK.sub("*", layer, count=1)
    for original, parts in LAYOUTS[family].items():
        if pattern in parts:
            return original.replace("*", block), tuple(part.replace("*", block) for part in parts)
    if family not in SAME_NAMES:
        raise ModelError(
            f"format=kohya: it has no name for the layer {layer} of {family}; use diffusers, peft or merged"
        )
    return layer, (layer,)


def merge(lora: Lora, denoiser: torch.nn.Module) -> None:
    """Add the LoRA to the weights of `denoiser`: computed in fp32, rounded once to the precision of the weights."""
    merge_halves(lora.halves, denoiser)


@torch.no_grad()
def merge_halves(layers: Mapping[str, Halves], denoiser: torch.nn.Module) -> None:
    """As `merge`, for a LoRA whose layers may have a rank and a scale each."""
    for layer, halves in layers.items():
        weight = denoiser.get_parameter(f"{layer}.weight")
        update = (halves.b.float() @ halves.a.float()).to(weight.device)
        weight.copy_(weight.float() + halves.scale * update)

"""LoRA files: names and sums of kohya's layout against diffusers' readers of original code, and what is refused."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import diffusers
import pytest
import tiny
import torch
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from safetensors.torch import load

from gerl.errors import CheckpointError, ModelError
from gerl.model.lora import default_targets
from gerl.model.lora_layouts import diffusers_file, kohya_file, kohya_halves, merge
from gerl.model.lora_weights import Lora, check_fit, collect_loras


def random_lora(denoiser: torch.nn.Module, layers: Iterable[str], rank: int = 2, alpha: float = 5.0) -> Lora:
    """A random LoRA of the given linear layers of `denoiser`."""
    torch.manual_seed(0)
    sizes = {layer: denoiser.get_parameter(f"{layer}.weight").shape for layer in layers}
    return Lora({layer: (torch.randn(rank, n), torch.randn(m, rank)) for layer, (m, n) in sizes.items()}, alpha)


def updates(lora: Lora) -> dict[str, torch.Tensor]:
    """What the LoRA adds to each weight."""
    return {layer: lora.scale * b @ a for layer, (a, b) in lora.layers.items()}


def read_by_flux(content: bytes, x: Callable[[int], torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the layers add for inputs `x(size)`, as diffusers' reader of kohya's FLUX files has it."""
    state = diffusers.FluxPipeline.lora_state_dict(load(content))
    halves = {name.removesuffix(".lora_A.weight"): a for name, a in state.items() if name.endswith(".lora_A.weight")}
    # alpha is folded into the matrices
    return {
        name.removeprefix("transformer."): state[f"{name}.lora_B.weight"] @ (a @ x(a.shape[1]))
        for name, a in halves.items()
    }


def flux(**sizes: Any) -> torch.nn.Module:
    """A block of each kind, of the size of FLUX if no other is given, without weights."""
    with torch.device("meta"):
        return diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1, **sizes)


def test_flux_of_its_real_size() -> None:
    """The single blocks, where four layers are one in the original: diffusers knows their sizes by heart."""
    denoiser = flux()
    layers = [layer for layer in default_targets(denoiser) if layer.startswith("single")]
    lora = random_lora(denoiser, layers)
    content = kohya_file(lora, denoiser)
    assert {name.split(".")[0] for name in load(content)} == {
        "lora_unet_single_blocks_0_linear1", "lora_unet_single_blocks_0_linear2",
    }  # fmt: skip
    probe = torch.randn(5 * 3072)
    expected = {layer: lora.scale * b @ (a @ probe[: a.shape[1]]) for layer, (a, b) in lora.layers.items()}
    found = read_by_flux(content, lambda size: probe[:size])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)  # of 60


def test_layers_that_are_one_in_the_original_may_be_trained_in_part() -> None:
    denoiser = flux(attention_head_dim=16, num_attention_heads=2, axes_dims_rope=(4, 4, 8))
    layers = [f"transformer_blocks.0.attn.{name}" for name in ("to_v", "to_q", "add_k_proj", "to_out.0")]
    layers += ["transformer_blocks.0.norm1.linear"]
    lora = random_lora(denoiser, layers, rank=3)
    found = read_by_flux(kohya_file(lora, denoiser), torch.eye)
    untrained = [layer for layer in found if layer not in layers]
    assert {layer.rsplit(".", 1)[1] for layer in untrained} == {"to_k", "add_q_proj", "add_v_proj"}
    assert not any(found.pop(layer).any() for layer in untrained)
    torch.testing.assert_close(found, updates(lora), rtol=1e-5, atol=1e-5)


class Original(dict[str, torch.Tensor]):
    """A checkpoint of SD3's original code as kohya's file changes it: asked for a weight, it gives its update."""

    def __init__(self, content: bytes, blocks: int) -> None:
        super().__init__({f"joint_blocks.{i}.x": torch.empty(0) for i in range(blocks)})
        self["joint_blocks.0.x_block.attn2."], self["context_embedder.weight"] = torch.empty(0), torch.zeros(6)
        self.file, self.read = load(content), set[str]()

    def pop(self, key: str, *_: Any) -> torch.Tensor:
        name = "lora_unet_" + key.removesuffix(".weight").replace(".", "_")
        if f"{name}.alpha" not in self.file:
            return torch.zeros(6)
        self.read |= {f"{name}.alpha", f"{name}.lora_down.weight", f"{name}.lora_up.weight"}
        down, up = self.file[f"{name}.lora_down.weight"], self.file[f"{name}.lora_up.weight"]
        return self.file[f"{name}.alpha"] / len(down) * up @ down


def test_sd3_under_the_names_of_its_original_code() -> None:
    """All its linear layers, of which some have scale and shift the other way round in the original."""
    denoiser = tiny.sd3().transformer
    lora = random_lora(denoiser, [name for name, m in denoiser.named_modules() if isinstance(m, torch.nn.Linear)])
    original = Original(kohya_file(lora, denoiser), blocks=2)
    converted = convert_sd3_transformer_checkpoint_to_diffusers(original)
    assert original.read == original.file.keys()
    changed = {name.removesuffix(".weight"): value for name, value in converted.items() if value.ndim == 2}
    torch.testing.assert_close(changed, updates(lora), rtol=1e-5, atol=1e-5)
    again = kohya_halves(original.file, denoiser)
    assert again.keys() == lora.layers.keys()
    for layer, halves in again.items():
        torch.testing.assert_close(halves.scale * halves.b @ halves.a, updates(lora)[layer], rtol=1e-5, atol=1e-5)


def test_wan_with_an_image_prompt() -> None:
    class WanTransformer3DModel(torch.nn.Module):
        """Stands for the attention to the image of Wan's image-to-video models."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.ModuleDict({"attn2": torch.nn.ModuleDict()})])
            self.blocks[0]["attn2"]["add_k_proj"] = torch.nn.Linear(4, 5)  # type: ignore[index,operator]

    denoiser = WanTransformer3DModel()
    lora = random_lora(denoiser, ["blocks.0.attn2.add_k_proj"])
    names = {name.split(".")[0] for name in load(kohya_file(lora, denoiser))}
    assert names == {"lora_unet_blocks_0_cross_attn_k_img"}


def test_layouts_that_do_not_exist() -> None:
    lora = Lora({"proj_out": (torch.ones(1, 32), torch.ones(64, 1))}, 1.0)
    with pytest.raises(ModelError, match=r"proj_out of FluxTransformer2DModel; use"):
        kohya_file(lora, flux())
    with pytest.raises(ModelError, match=r"its layout for Linear is unknown, only for SD3Trans.*; use diffusers,"):
        kohya_file(lora, torch.nn.Linear(1, 1))


def test_merging_rounds_once() -> None:
    denoiser = torch.nn.Sequential(torch.nn.Linear(8, 6).to(torch.bfloat16))
    lora = random_lora(denoiser, ["0"], alpha=0.01)
    before = denoiser[0].weight.detach().clone()
    merge(lora, denoiser)
    assert torch.equal(denoiser[0].weight, (before.float() + updates(lora)["0"]).to(torch.bfloat16))
    assert not torch.equal(denoiser[0].weight, before)


def test_a_lora_of_another_model() -> None:
    denoiser = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU())
    check_fit(random_lora(denoiser, ["0"]), denoiser, "it")
    with pytest.raises(ModelError, match=r"0 has 8 inputs and 6 outputs, the LoRA 7 and 6; use"):
        check_fit(Lora({"0": (torch.ones(2, 7), torch.ones(6, 2))}, 1.0), denoiser, "it")
    with pytest.raises(ModelError, match=r"no linear layer 1; use the model"):
        check_fit(Lora({"1": (torch.ones(2, 8), torch.ones(6, 2))}, 1.0), denoiser, "it")


def test_what_a_checkpoint_holds() -> None:
    a, b = torch.ones(2, 3), torch.ones(4, 2)
    names = [f"{denoiser}.blocks.0.to_q.lora_{half}.default.weight" for denoiser in ("unet", "vit") for half in "AB"]
    loras = collect_loras(dict(zip(names, [a, b, 2 * a, 2 * b], strict=True)), 8.0)
    assert list(loras) == ["unet", "vit"] and loras["vit"].rank == 2 and loras["vit"].scale == 4.0
    assert torch.equal(loras["vit"].layers["blocks.0.to_q"][1], 2 * b)
    assert load(diffusers_file(loras)).keys() == {name.replace(".default", "") for name in names}
    with pytest.raises(CheckpointError, match=r"the LoRA of unet.x has only its matrix A"):
        collect_loras({"unet.x.lora_A.default.weight": a}, 1.0)
    with pytest.raises(CheckpointError, match=re.escape("'unet.x.weight' [2, 3] is not a LoRA of a linear layer")):
        collect_loras({"unet.x.weight": a}, 1.0)

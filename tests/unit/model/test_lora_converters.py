"""LoRA files in the layouts of other trainers: read as plain diffusers reads them, or refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from zoo.text_to_image import sdxl

from gerl.errors import ModelError
from gerl.model.lora_files import read_layers
from gerl.model.lora_weights import check_fit

Named = Callable[[str], str]


def lora(pipe: Any, layers: list[str], named: Named, halves: tuple[str, str], alpha: float | None) -> dict[str, Any]:
    """A file's tensors: random matrices of rank 3 under the names that `named` makes of the layers."""
    tensors = {}
    for number, layer in enumerate(layers):
        module, draw = denoiser(pipe).get_submodule(layer), torch.Generator().manual_seed(number)
        sizes = (3, module.in_features), (module.out_features, 3)
        for half, size in zip(halves, sizes, strict=True):
            tensors[f"{named(layer)}.{half}.weight"] = torch.randn(size, generator=draw)
        if alpha is not None:
            tensors[f"{named(layer)}.alpha"] = torch.tensor(alpha)
    return tensors


def denoiser(pipe: Any) -> Any:
    return getattr(pipe, "transformer", None) or pipe.unet


def underscored(layer: str) -> str:
    return "lora_unet_" + layer.replace(".", "_")


def of_original_unet(layer: str) -> str:
    """The name of a layer of the first attention of SDXL's second level, in the code of its authors."""
    return underscored(layer.replace("down_blocks.1.attentions.0", "input_blocks.3.1"))


JOINT = ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_k", "transformer_blocks.1.attn.to_out.0"]
Z_IMAGE = ["layers.0.attention.to_q", "layers.1.attention.to_out.0"]
UNET = [f"down_blocks.1.attentions.0.transformer_blocks.0.attn1.{part}" for part in ("to_q", "to_v", "to_out.0")]
PEFT, KOHYA = ("lora_A", "lora_B"), ("lora_down", "lora_up")


@pytest.mark.parametrize(
    ("build", "layers", "named", "halves", "alpha"),
    [
        pytest.param(tiny.qwen_image, JOINT, str, KOHYA, 1.5, id="Lightning"),
        pytest.param(tiny.qwen_image, JOINT, "diffusion_model.{}".format, PEFT, None, id="ComfyUI, Qwen-Image"),
        pytest.param(tiny.qwen_image, JOINT, underscored, KOHYA, 2.0, id="kohya, Qwen-Image"),
        pytest.param(tiny.z_image, Z_IMAGE, "diffusion_model.{}".format, PEFT, None, id="ComfyUI, Z-Image"),
        pytest.param(tiny.z_image, Z_IMAGE, underscored, KOHYA, 6.0, id="kohya, Z-Image"),
        pytest.param(sdxl, UNET, of_original_unet, KOHYA, 1.0, id="kohya, SDXL"),
        pytest.param(tiny.sd15, UNET, underscored, KOHYA, 1.0, id="kohya, SD 1.5"),
    ],
)  # fmt: skip
def test_as_plain_diffusers_reads_it(
    tmp_path: Path, build: Callable[[], Any], layers: list[str], named: Named, halves: tuple[str, str], alpha: Any
) -> None:
    pipe = build()
    save_file(lora(pipe, layers, named, halves, alpha), tmp_path / "a.safetensors", metadata={"format": "pt"})
    name = "unet" if hasattr(pipe, "unet") else "transformer"
    found = read_layers(tmp_path / "a.safetensors", {name: denoiser(pipe)})[name]
    pipe.load_lora_weights(str(tmp_path / "a.safetensors"))
    plain = {n: m for n, m in denoiser(pipe).named_modules() if isinstance(m, BaseTunerLayer)}
    assert found.keys() == plain.keys()
    for layer, read in found.items():
        delta = plain[layer].get_delta_weight(plain[layer].active_adapters[0])
        torch.testing.assert_close(read.scale * read.b @ read.a, delta, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("named", "halves", "more"),
    [
        (underscored, KOHYA, "dora_scale"),
        (str, KOHYA, "dora_scale"),
        ("transformer.{}".format, PEFT, "lora_magnitude_vector"),
        ("diffusion_model.{}".format, PEFT, "diff_b"),
    ],
)
def test_a_tensor_that_would_be_left_out_is_refused(
    tmp_path: Path, named: Named, halves: tuple[str, str], more: str
) -> None:
    pipe = tiny.qwen_image()
    tensors = lora(pipe, JOINT, named, halves, None) | {f"{named(JOINT[0])}.{more}": torch.ones(4)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=more):
        read_layers(tmp_path / "a.safetensors", {"transformer": pipe.transformer})


def test_what_is_of_another_model_or_has_one_matrix_is_refused(tmp_path: Path) -> None:
    transformer = tiny.qwen_image().transformer
    tensors = lora(tiny.qwen_image(), JOINT, "diffusion_model.{}".format, PEFT, None)
    half = {key: value for key, value in tensors.items() if "lora_B" in key}
    save_file(half, tmp_path / "half.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"half\.safetensors.*lora_A"):
        read_layers(tmp_path / "half.safetensors", {"transformer": transformer})
    other = {key.replace("transformer_blocks", "double_blocks"): value for key, value in tensors.items()}
    save_file(other, tmp_path / "other.safetensors", metadata={"format": "pt"})
    found = read_layers(tmp_path / "other.safetensors", {"transformer": transformer})
    with pytest.raises(ModelError, match=r"no linear layer double_blocks\.0"):
        check_fit(found["transformer"], transformer, "transformer")

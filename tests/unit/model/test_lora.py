"""LoRA on the denoisers of six pipelines: where it goes, switching it off, and its file in stock diffusers."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
import zoo.video
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from newer import needs
from peft import get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from replaying import EACH, Recorded, randomise, replayed, rolled_out
from safetensors import safe_open
from safetensors.torch import load, load_file, save, save_file
from zoo.text_to_image import sdxl

from gerl.algorithms.core_algos import gaussian_kl
from gerl.config import ModelConfig, SamplingConfig
from gerl.errors import CheckpointError, ConfigError, ModelError
from gerl.export.base import Base
from gerl.export.files import lora_files, write_files
from gerl.model.denoisers import find_denoisers
from gerl.model.loading import check_model, load_pipeline, load_policy, weights_fingerprint
from gerl.model.lora import add_lora, bare_model, default_targets, find_targets, linear_layers, lora_disabled
from gerl.model.lora_files import (
    LAYOUTS,
    Lora,
    check_fit,
    check_loads,
    collect_loras,
    diffusers_file,
    kohya_file,
    kohya_halves,
    load_lora,
    lora_file,
    merge,
    read_layers,
)
from gerl.model.paths import WEIGHTS
from gerl.model.placement import LazyTextEncoder
from gerl.model.policy import Policy

# the first of the repeated blocks: its attention, and its feed-forward
TARGETS = {
    "sd3": ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn2.to_out.0",
            "transformer_blocks.0.attn.add_k_proj", "transformer_blocks.0.ff.net.0.proj",
            "transformer_blocks.0.ff_context.net.2"),
    "flux": ("transformer_blocks.0.attn.to_add_out", "transformer_blocks.0.ff.net.2",
             "single_transformer_blocks.0.attn.to_v", "single_transformer_blocks.0.proj_mlp",
             "single_transformer_blocks.0.proj_out"),
    "qwen_image": ("transformer_blocks.0.attn.to_k", "transformer_blocks.1.attn.add_v_proj",
                   "transformer_blocks.0.img_mlp.net.0.proj", "transformer_blocks.0.txt_mlp.net.2"),
    "z_image": ("layers.0.attention.to_q", "layers.0.attention.to_out.0", "layers.0.feed_forward.w1",
                "layers.0.feed_forward.w3", "noise_refiner.0.attention.to_q", "context_refiner.0.feed_forward.w2"),
    "wan": ("blocks.0.attn1.to_q", "blocks.1.attn2.to_out.0", "blocks.0.ffn.net.0.proj", "blocks.0.ffn.net.2"),
    "sd15": ("down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
             "mid_block.attentions.0.transformer_blocks.0.attn2.to_out.0",
             "up_blocks.0.attentions.1.transformer_blocks.0.ff.net.0.proj"),
}  # fmt: skip
NUMBER_OF_TARGETS = {"sd3": 25, "flux": 17, "qwen_image": 24, "z_image": 28, "wan": 20, "sd15": 40}


def drawn(pipe: Any, name: str, **call: Any) -> torch.Tensor:
    return tiny.output_of(pipe(**(tiny.call_for(tiny.CASES[name], True) | call), generator=tiny.generators()))


def with_lora(name: str, rank: int = 4, alpha: float = 4.0, perturb: bool = True) -> tuple[Any, dict[str, Any]]:
    pipe = tiny.build(tiny.CASES[name])
    lora = add_lora(tiny.denoiser_of(pipe), rank, alpha, None, seed=3)
    if perturb:
        randomise(lora.values())
    return pipe, lora


# --- where it goes


@EACH
def test_default_targets_are_attention_and_feed_forward(name: str) -> None:
    denoiser = tiny.denoiser_of(tiny.build(tiny.CASES[name]))
    found = default_targets(denoiser)
    assert set(TARGETS[name]) <= set(found)
    assert len(found) == len(set(found)) == NUMBER_OF_TARGETS[name]
    for target in found:
        assert isinstance(denoiser.get_submodule(target), torch.nn.Linear)
        assert re.search(r"attn|attention|ff|feed_forward|mlp|single_transformer_blocks", target)
    others = {n for n, m in denoiser.named_modules() if isinstance(m, torch.nn.Linear)} - set(found)
    assert others  # modulation, embeddings, resnets, final layers
    assert not [n for n in others if re.search(r"attn|attention|ff\.|ffn|feed_forward|mlp\.net", n)]


@EACH
def test_nothing_else_is_wrapped_or_trained(name: str) -> None:
    pipe, lora = with_lora(name)
    denoiser = tiny.denoiser_of(pipe)
    wrapped = {key.rsplit(".lora_", 1)[0] for key in lora}
    assert wrapped == set(default_targets(tiny.denoiser_of(tiny.build(tiny.CASES[name]))))
    assert len(lora) == 2 * len(wrapped)
    assert {key for key, p in denoiser.named_parameters() if p.requires_grad} == set(lora)


# Denoisers whose blocks hold more than attention and feed-forward, or call them otherwise: layers that are trained, and
# layers that are not. Built without memory, in their default sizes but of one layer.
UNUSUAL: dict[str, tuple[dict[str, int], list[str], list[str]]] = {
    "ChromaTransformer2DModel": (
        {"num_layers": 1, "num_single_layers": 1, "approximator_layers": 1},
        ["transformer_blocks.0.attn.add_q_proj", "single_transformer_blocks.0.proj_mlp"],
        ["distilled_guidance_layer.layers.0.linear_1", "context_embedder"],  # the former computes the modulation
    ),
    "Flux2Transformer2DModel": (
        {"num_layers": 1, "num_single_layers": 1},
        ["single_transformer_blocks.0.attn.to_qkv_mlp_proj", "transformer_blocks.0.ff.linear_in"],
        ["double_stream_modulation_img.linear", "norm_out.linear"],
    ),
    "Flux3Transformer2DModel": (
        {"num_layers": 1, "num_single_layers": 1},
        ["mode_blocks.image.0.attn.to_q", "txt_mode_blocks.0.ff.linear_out"],
        ["early_stream_modulations.image.linear"],
    ),
    "GlmImageTransformer2DModel": ({"num_layers": 1}, ["transformer_blocks.0.ff.net.2"], ["glyph_projector.net.2"]),
    "SanaTransformer2DModel": ({"num_layers": 1}, ["transformer_blocks.0.attn2.to_k"], ["caption_projection.linear_1"]),
    "UNetMotionModel": (
        {},
        ["down_blocks.0.motion_modules.0.transformer_blocks.0.attn1.to_q", "mid_block.motion_modules.0.proj_in"],
        ["down_blocks.0.resnets.0.time_emb_proj", "time_embedding.linear_1"],
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_default_targets_of_unusual_denoisers(name: str) -> None:
    sizes, trained, left = UNUSUAL[name]
    with torch.device("meta"):
        denoiser = getattr(diffusers, name)(**sizes)
    found = set(default_targets(denoiser))
    linear = {n for n, m in denoiser.named_modules() if isinstance(m, torch.nn.Linear)}
    assert set(trained) <= found and set(left) <= linear - found
    assert not [n for n in linear - found if re.search(r"blocks.*(attn|\.ff\.)", n)]


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = torch.nn.Linear(4, 4)
        self.fused = torch.nn.MultiheadAttention(4, 1)  # would not run a LoRA on its `out_proj`


class Nested(torch.nn.Module):
    """A layer of the embedder is called, after a dot, as one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Attention()])
        self.embedder = torch.nn.Sequential()
        self.embedder.blocks = torch.nn.ModuleList([Attention()])


def test_a_target_is_the_layer_of_that_name_and_no_other() -> None:
    assert default_targets(Nested()) == ["blocks.0.to_q"]
    lora = add_lora(Nested(), 2, 2.0, None, seed=0)
    assert {name.split(".lora_")[0] for name in lora} == {"blocks.0.to_q"}


def test_find_targets() -> None:
    transformer = tiny.sd3().transformer
    assert find_targets(transformer, None) == default_targets(transformer)
    assert find_targets(transformer, r"blocks\.1\..*to_q$") == ["transformer_blocks.1.attn.to_q"]
    assert find_targets(transformer, r"^proj_out$") == ["proj_out"]  # what the default leaves out can be asked for
    with pytest.raises(ModelError, match=r"lora_targets='to_z' matches none of the 36 linear .* SD3Transformer2DModel"):
        find_targets(transformer, "to_z")
    with pytest.raises(ModelError, match=r"lora_targets='\*' .*regular expression: nothing to repeat"):
        find_targets(transformer, "*")
    with pytest.raises(
        ModelError, match=r"None matches none of the 1 linear layers of Sequential; .* like denoiser\.0"
    ):
        find_targets(torch.nn.Sequential(torch.nn.Linear(2, 2)), None)


# --- a fresh LoRA, and none


@EACH
def test_a_fresh_lora_changes_nothing(name: str) -> None:
    base = drawn(tiny.build(tiny.CASES[name]), name)
    pipe, lora = with_lora(name, perturb=False)
    assert all(bool((p == 0).all()) == ("lora_B" in key) for key, p in lora.items())
    assert torch.equal(drawn(pipe, name), base)


def test_a_lora_is_drawn_from_its_seed_alone() -> None:
    drawn_a = []
    for global_seed, seed in ((0, 3), (1, 3), (1, 4)):
        transformer = tiny.sd3().transformer
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        lora = add_lora(transformer, 4, 4.0, None, seed)
        assert torch.equal(torch.get_rng_state(), before)
        drawn_a.append(torch.cat([p.detach().flatten() for key, p in lora.items() if "lora_A" in key]))
    assert torch.equal(drawn_a[0], drawn_a[1]) and not torch.equal(drawn_a[1], drawn_a[2])
    assert drawn_a[0].std().item() == pytest.approx(1 / 4, rel=0.1)  # peft's Gaussian: std 1 / rank


@EACH
def test_kl_to_the_base_is_zero_for_a_fresh_lora(name: str) -> None:
    pipe, lora = with_lora(name, perturb=False)
    case = tiny.CASES[name]
    r = rolled_out(Recorded(pipe, list(lora.values()), tiny.call_for(case, True), case.kernel))

    def kl() -> torch.Tensor:
        with lora_disabled([tiny.denoiser_of(pipe)]):
            base = replayed(r)[0].values()
        pairs = zip(replayed(r)[0].values(), base, strict=True)
        return torch.stack([gaussian_kl(step.mean, other.mean, step.std) for step, other in pairs])

    assert torch.equal(kl(), torch.zeros(3, 4))
    for p in lora.values():
        p.data.add_(0.1)
    assert (kl() > 0).all()


@EACH
def test_lora_disabled_is_the_base_model_exactly(name: str) -> None:
    base = drawn(tiny.build(tiny.CASES[name]), name)
    pipe, lora = with_lora(name)
    changed = drawn(pipe, name)
    assert not torch.equal(changed, base)
    with lora_disabled([tiny.denoiser_of(pipe)]):
        assert torch.equal(drawn(pipe, name), base)
    assert torch.equal(drawn(pipe, name), changed)
    assert all(p.requires_grad for p in lora.values())
    with pytest.raises(KeyError), lora_disabled([tiny.denoiser_of(pipe)]):
        raise KeyError
    assert torch.equal(drawn(pipe, name), changed)
    assert {key for key, p in tiny.denoiser_of(pipe).named_parameters() if p.requires_grad} == set(lora)


# --- its file


@EACH
@pytest.mark.parametrize(("rank", "alpha"), [(4, 4.0), (2, 5.0)])
def test_stock_diffusers_draws_the_same_with_the_file(name: str, rank: int, alpha: float, tmp_path: Path) -> None:
    pipe, lora = with_lora(name, rank, alpha)
    denoiser = "unet" if name == "sd15" else "transformer"
    content = lora_file({denoiser: tiny.denoiser_of(pipe)})
    assert len(load(content)) == len(lora)
    (tmp_path / WEIGHTS).write_bytes(content)
    stock = tiny.build(tiny.CASES[name])
    base = drawn(stock, name)
    stock.load_lora_weights(tmp_path)
    images = drawn(stock, name)
    torch.testing.assert_close(images, drawn(pipe, name), rtol=1e-6, atol=1e-6)
    assert (images - base).abs().max() > 1e-2
    assert all(p.requires_grad for p in lora.values())
    stock.unload_lora_weights()
    assert torch.equal(drawn(stock, name), base)


def test_the_file_is_the_one_that_diffusers_writes(tmp_path: Path) -> None:
    for name in ("sd3", "sd15"):
        pipe, _ = with_lora(name)
        part = "unet" if name == "sd15" else "transformer"
        denoiser = tiny.denoiser_of(pipe)
        metadata = {f"{part}_lora_adapter_metadata": denoiser.peft_config["default"].to_dict()}
        type(pipe).save_lora_weights(
            tmp_path, **{f"{part}_lora_layers": get_peft_model_state_dict(denoiser)}, **metadata
        )
        ours = lora_file({part: denoiser})
        (tmp_path / "ours").write_bytes(ours)
        headers = [header(tmp_path / file, part) for file in (WEIGHTS, "ours")]
        assert headers[0] == headers[1]
        stock = load((tmp_path / WEIGHTS).read_bytes())
        assert stock.keys() == load(ours).keys() and all(torch.equal(v, stock[k]) for k, v in load(ours).items())


def header(file: Path, part: str) -> dict[str, Any]:
    with safe_open(file, "pt") as opened:
        metadata: dict[str, str] = opened.metadata()
    lora = json.loads(metadata.pop("lora_adapter_metadata"))
    return metadata | lora | {f"{part}.target_modules": sorted(lora[f"{part}.target_modules"])}  # a set has no order


def experts() -> Any:
    """Wan 2.2: one transformer for the high noise levels and one for the low."""
    pipe = tiny.build(tiny.CASES["wan"])
    pipe.register_modules(transformer_2=tiny.wan().transformer)
    pipe.register_to_config(boundary_ratio=0.8)
    return pipe


def test_every_denoiser_is_in_the_file(tmp_path: Path) -> None:
    pipe = experts()
    targets = {"transformer": r"attn1\.to_", "transformer_2": "ffn"}
    denoisers = {name: getattr(pipe, name) for name in targets}
    for seed, (name, denoiser) in enumerate(denoisers.items()):
        randomise(add_lora(denoiser, 2, 3.0, targets[name], seed).values(), 0.5, seed)
    (tmp_path / WEIGHTS).write_bytes(lora_file(denoisers))
    trained = drawn(pipe, "wan")
    plain = experts()
    base = drawn(plain, "wan")
    plain.load_lora_weights(tmp_path)
    half = drawn(plain, "wan")
    plain.transformer_2.load_lora_adapter(tmp_path, prefix="transformer_2", use_safetensors=True)
    ours = experts()
    load_lora(ours, tmp_path)
    for images in (drawn(plain, "wan"), drawn(ours, "wan")):
        torch.testing.assert_close(images, trained, rtol=1e-6, atol=1e-6)
    assert all((images - trained).abs().max() > 1e-3 for images in (base, half))


def pixart() -> Any:
    torch.manual_seed(0)
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, num_layers=1, sample_size=4, cross_attention_dim=8, in_channels=2,
        out_channels=2, caption_channels=8,
    ).eval()  # fmt: skip


class Bare(diffusers.DiffusionPipeline):
    """A pipeline class that knows nothing of LoRAs."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer)


def test_a_denoiser_without_any_lora_methods(tmp_path: Path) -> None:
    assert not hasattr(diffusers.PixArtTransformer2DModel, "add_adapter")
    pipe, x, text = Bare(pixart()), torch.randn(1, 2, 4, 4), torch.randn(1, 3, 8)

    def output(pipe: Any) -> torch.Tensor:
        sizes = {"resolution": None, "aspect_ratio": None}
        return pipe.transformer(x, text, torch.tensor([500]), added_cond_kwargs=sizes).sample

    base = output(pipe)
    lora = add_lora(pipe.transformer, 2, 3.0, None, seed=0)
    assert torch.equal(output(pipe), base)
    randomise(lora.values(), 0.5)
    trained = output(pipe)
    with lora_disabled([pipe.transformer]):
        assert torch.equal(output(pipe), base)
    (tmp_path / "file").write_bytes(lora_file({"transformer": pipe.transformer}))
    other = Bare(pixart())
    load_lora(other, tmp_path / "file")
    assert torch.equal(output(other), trained) and not torch.equal(trained, base)


def test_a_file_that_is_not_for_the_pipeline(tmp_path: Path) -> None:
    pipe, bare = with_lora("sd15")[0], Bare(pixart())
    for content, target, message in (
        (lora_file({"unet": pipe.unet}), bare, "has a LoRA of unet, which Bare does not have"),
        (lora_file({"transformer": pipe.unet}), bare, "does not fit transformer of Bare "),
        (
            save({"unet.x.weight": torch.ones(2)}),
            pipe,
            r"lora_weights\.safetensors is not a LoRA written by gerl",
        ),
        (b"{}", pipe, r"pytorch_lora_weights\.safetensors is not a readable LoRA"),
    ):
        (tmp_path / WEIGHTS).write_bytes(content)
        with pytest.raises(ModelError, match=message):
            load_lora(target, tmp_path)
    with pytest.raises(ModelError, match="missing is not a readable LoRA"):
        load_lora(pipe, tmp_path / "missing")


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
    merge(lora.halves, denoiser)
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
    with pytest.raises(CheckpointError, match=r"unet.x has only its matrix A"):
        collect_loras({"unet.x.lora_A.default.weight": a}, 1.0)
    with pytest.raises(CheckpointError, match=re.escape("unet.x.weight [2, 3] is not a matrix")):
        collect_loras({"unet.x.weight": a}, 1.0)


BUILD: dict[str, Callable[[], Any]] = {
    **{name: tiny.CASES[name].build for name in ("sd3", "sd15", "flux", "qwen_image", "wan", "z_image")},
    "wan_2": zoo.video.wan_2_2,
}
RANK, ALPHA = 3, 7.5
FORMATS = ("diffusers", "peft", "kohya")


def random_loras(pipe: Any, rank: int = RANK, pattern: str | None = None) -> dict[str, Lora]:
    torch.manual_seed(1)
    loras = {}
    for name, denoiser in find_denoisers(pipe).items():
        sizes = {layer: denoiser.get_parameter(f"{layer}.weight").shape for layer in find_targets(denoiser, pattern)}
        layers = {layer: (0.2 * torch.randn(rank, n), 0.2 * torch.randn(m, rank)) for layer, (m, n) in sizes.items()}
        loras[name] = Lora(layers, ALPHA)
    return loras


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    BUILD["sd3"]().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loras(base: Path) -> dict[str, Lora]:
    return random_loras(diffusers.DiffusionPipeline.from_pretrained(base))


@pytest.fixture(scope="module")
def start(base: Path, loras: dict[str, Lora], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of rank 3 in the layout of diffusers."""
    folder = tmp_path_factory.mktemp("start")
    write_files(lora_files("diffusers", loras, Base(str(base), ALPHA)), folder)
    return folder


def model(base: Path, **keys: Any) -> ModelConfig:
    return ModelConfig(path=str(base), **{"lora_rank": RANK, "lora_alpha": ALPHA} | keys)


def draw(pipe: Any) -> torch.Tensor:
    call = tiny.call_for(tiny.CASES["sd3"], guided=False, steps=2) | {"prompt": tiny.PROMPTS[:2]}
    found = tiny.output_of(pipe(**call, generator=tiny.generators(2)))
    assert isinstance(found, torch.Tensor)
    return found


# --- the layouts


@pytest.mark.parametrize("name", BUILD)
def test_what_the_export_writes_is_read(name: str, tmp_path: Path) -> None:
    pipe = BUILD[name]()
    pipe.save_pretrained(tmp_path / "model")
    denoisers, expected = find_denoisers(pipe), random_loras(pipe)
    for format in FORMATS:
        write_files(lora_files(format, expected, Base(str(tmp_path / "model"), ALPHA)), tmp_path / format)
        found = read_layers(tmp_path / format, denoisers)
        assert found.keys() == expected.keys()
        for denoiser, lora in expected.items():
            halves = found[denoiser]
            assert halves.keys() == lora.layers.keys()
            for layer, (a, b) in lora.layers.items():
                assert torch.equal(halves[layer].a, a) and torch.equal(halves[layer].b, b), (format, layer)
                assert halves[layer].scale == pytest.approx(lora.scale)


def test_a_layer_for_several_of_diffusers_may_have_one_matrix_for_all(base: Path, tmp_path: Path) -> None:
    """As other programs train it: query, key and value share the lower matrix."""
    denoiser = diffusers.DiffusionPipeline.from_pretrained(base).transformer
    down, up = torch.randn(4, 16), torch.randn(48, 4)
    module = "lora_unet_joint_blocks_0_x_block_attn_qkv"
    save_file({f"{module}.lora_down.weight": down, f"{module}.lora_up.weight": up}, tmp_path / "mine.safetensors")
    found = read_layers(tmp_path / "mine.safetensors", {"transformer": denoiser})["transformer"]
    assert set(found) == {f"transformer_blocks.0.attn.to_{x}" for x in "qkv"}
    for i, x in enumerate("qkv"):
        halves = found[f"transformer_blocks.0.attn.to_{x}"]
        assert halves.scale == 1.0 and torch.equal(halves.b @ halves.a, up[16 * i : 16 * i + 16] @ down)


@pytest.mark.parametrize("alpha", [{}, {"lora_alpha": 8, "alpha_pattern": {"attn.to_q": 2}}, {"use_rslora": True}])
def test_alpha_is_that_of_the_layer(base: Path, tmp_path: Path, alpha: dict[str, Any]) -> None:
    denoiser = diffusers.DiffusionPipeline.from_pretrained(base).transformer
    tensors = {
        f"transformer.transformer_blocks.0.attn.to_{x}.lora_{half}.weight": torch.ones(4, 16) if half == "A"
        else torch.ones(16, 4) for x in "qk" for half in "AB"
    }  # fmt: skip
    header = {f"transformer.{key}": value for key, value in alpha.items()}
    save_file(tensors, tmp_path / WEIGHTS, {"lora_adapter_metadata": json.dumps(header)})
    found = read_layers(tmp_path, {"transformer": denoiser})["transformer"]
    scales = [found[f"transformer_blocks.0.attn.to_{x}"].scale for x in "qk"]
    assert scales == ([0.5, 2.0] if "lora_alpha" in alpha else [2.0, 2.0] if alpha else [1.0, 1.0])


# --- the start of training


def test_the_trained_lora_is_that_of_the_file(base: Path, start: Path, loras: dict[str, Lora]) -> None:
    policy = load_policy(model(base, lora=str(start)), 0.9, "cpu", 0)
    for name, p in policy.trained.items():
        layer, half = name.removeprefix("transformer.").removesuffix(".default.weight").rsplit(".lora_", 1)
        assert torch.equal(p, loras["transformer"].layers[layer]["AB".index(half)]) and p.requires_grad
        assert torch.equal(policy.ema.average[name], p)
    stock = diffusers.DiffusionPipeline.from_pretrained(base)
    expected = draw(stock)
    with lora_disabled(list(policy.denoisers.values())):  # the reference of algorithm.kl_coef
        assert torch.equal(draw(policy.pipe), expected)
    stock.load_lora_weights(start)
    torch.testing.assert_close(draw(policy.pipe), draw(stock), rtol=1e-5, atol=1e-5)
    assert (draw(policy.pipe) - expected).abs().max() > 0.1


@pytest.mark.parametrize("keys", [{"lora_rank": 8}, {"lora_alpha": 2.0}, {"lora_rank": 5, "lora_alpha": 64.0}])
def test_a_larger_rank_and_another_alpha_hold_the_same_lora(base: Path, start: Path, keys: dict[str, Any]) -> None:
    same, other = (load_policy(model(base, lora=str(start), **more), 0.9, "cpu", 0) for more in ({}, keys))
    torch.testing.assert_close(draw(other.pipe), draw(same.pipe), rtol=1e-5, atol=1e-5)
    fresh = load_policy(model(base, **keys), 0.9, "cpu", 0)
    for name, p in other.trained.items():
        added = p[RANK:] if "lora_A" in name else p[:, RANK:]
        drawn = fresh.trained[name]
        assert torch.equal(added, drawn[RANK:] if "lora_A" in name else drawn[:, RANK:])


def test_layers_that_the_file_leaves_out_begin_with_nothing(base: Path, tmp_path: Path) -> None:
    pipe = diffusers.DiffusionPipeline.from_pretrained(base)
    part = random_loras(pipe, pattern="transformer_blocks.0.attn.to_[qk]$")
    write_files(lora_files("diffusers", part, Base("", ALPHA)), tmp_path)
    policy = load_policy(model(base, lora=str(tmp_path)), 0.9, "cpu", 0)
    moved = {name for name, p in policy.trained.items() if "lora_B" in name and p.any()}
    assert moved == {f"transformer.{layer}.lora_B.default.weight" for layer in part["transformer"].layers}
    pipe.load_lora_weights(tmp_path)
    torch.testing.assert_close(draw(policy.pipe), draw(pipe), rtol=1e-5, atol=1e-5)


def test_a_merged_lora_is_part_of_the_base(base: Path, start: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="gerl"):
        merged = load_policy(model(base, lora=str(start), merge_lora=True, lora_rank=2), 0.9, "cpu", 0)
    assert f"{start} is merged into the base model" in caplog.text
    begun = load_policy(model(base, lora=str(start)), 0.9, "cpu", 0)
    torch.testing.assert_close(draw(merged.pipe), draw(begun.pipe), rtol=1e-5, atol=1e-5)
    assert all(not p.any() for name, p in merged.trained.items() if "lora_B" in name)
    for p in merged.trained.values():
        p.data.normal_(0, 0.2)
    with lora_disabled(list(merged.denoisers.values())):  # the reference of algorithm.kl_coef
        torch.testing.assert_close(draw(merged.pipe), draw(begun.pipe), rtol=1e-5, atol=1e-5)
    prints = [weights_fingerprint(p.denoisers) for p in (merged, begun, load_policy(model(base), 0.9, "cpu", 0))]
    assert prints[1] == prints[2] != prints[0]  # which a resumed run compares


def test_a_checkpoint_and_a_file_are_places_too(base: Path, start: Path, tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / WEIGHTS).write_bytes((start / WEIGHTS).read_bytes())

    def weights(source: Path) -> Policy:
        return load_policy(model(base, lora=str(source)), 0.9, "cpu", 0)

    expected = weights(start).trained
    for source in (tmp_path, start / WEIGHTS):
        assert all(torch.equal(p, expected[name]) for name, p in weights(source).trained.items())


def test_what_a_resumed_run_loads() -> None:
    config = ModelConfig(lora="a/b")
    assert config.for_resume() == ModelConfig()
    merged = replace(config, merge_lora=True)
    assert merged.for_resume() == merged


# --- what is refused


def changed(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    first = next(iter(tensors))
    match how:
        case "other denoiser":
            return {key.replace("transformer.", "unet.", 1): value for key, value in tensors.items()}
        case "text encoder":
            return tensors | {"text_encoder.layer.lora_A.weight": torch.ones(1, 4)}
        case "other layer":
            return {key.replace("blocks.1", "blocks.7"): value for key, value in tensors.items()}
        case "wider":
            return {key: torch.cat([v, v], 1 if "lora_A" in key else 0) for key, v in tensors.items()}
        case "one half":
            return {key: value for key, value in tensors.items() if key != first}
        case "non-finite":
            return tensors | {first: torch.full_like(tensors[first], torch.nan)}
        case "a tensor more":  # as a DoRA has
            return tensors | {first.replace("lora_A", "lora_magnitude_vector"): torch.ones(4)}
        case _:
            return {key: value for key, value in tensors.items() if ".ff." in key}


@pytest.mark.parametrize(
    ("how", "keys", "named"),
    [
        ("other denoiser", {}, "a LoRA of unet, and gerl trains transformer"),
        ("text encoder", {}, r"a LoRA of text_encoder, which can .*model\.merge_lora=true"),
        ("other layer", {}, r"no linear layer transformer_blocks\.7"),
        ("wider", {}, "has 16 inputs"),
        ("one half", {}, "only its matrix B"),
        ("non-finite", {}, "non-finite"),
        ("a tensor more", {}, "magnitude.* not a matrix of a LoRA"),
        ("only ff", {"lora_targets": "attn"}, r"transformer_blocks.*model\.lora_targets=attn.*model\.merge_lora=true"),
        ("only ff", {"lora_rank": 2}, r"rank 3, .*model\.lora_rank=2.*use model\.lora_rank=3"),
    ],
)
def test_a_lora_that_does_not_fit_is_refused_before_weights_are_loaded(
    base: Path, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, keys: dict[str, Any], named: str
) -> None:
    save_file(changed(load_file(start / WEIGHTS), how), tmp_path / WEIGHTS)
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ModelError, match=named) as caught:
        check_model(model(base, lora=str(tmp_path), **keys), SamplingConfig())
    assert str(caught.value).startswith("model.lora=") and "\n" not in str(caught.value)
    check_model(model(base, lora=str(start)), SamplingConfig())


def test_variants_of_peft_are_refused_by_name(base: Path, loras: dict[str, Lora], tmp_path: Path) -> None:
    write_files(lora_files("peft", loras, Base(str(base), ALPHA)), tmp_path)
    file = tmp_path / "transformer" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
    with pytest.raises(ModelError, match=r"model\.lora=.*trained with use_dora"):
        check_model(model(base, lora=str(tmp_path)), SamplingConfig())
    file.unlink()
    with pytest.raises(ModelError, match=r"model\.lora=.*adapter_config\.json next to it.* cannot be read"):
        check_model(model(base, lora=str(tmp_path)), SamplingConfig())


def test_two_denoisers_need_to_be_told_apart(tmp_path: Path) -> None:
    pipe = BUILD["wan_2"]()
    pipe.save_pretrained(tmp_path / "model")
    write_files(lora_files("kohya", random_loras(pipe), Base(str(tmp_path / "model"), ALPHA)), tmp_path / "out")
    file = (tmp_path / "out" / "lora_transformer.safetensors").rename(tmp_path / "mine_transformer_2.safetensors")
    assert set(read_layers(file, find_denoisers(pipe))) == {"transformer_2"}
    file = file.rename(tmp_path / "mine.safetensors")
    with pytest.raises(ModelError, match=r"lora_NAME\.safetensors.*one of transformer, transformer_2"):
        read_layers(file, find_denoisers(pipe))


def test_a_merge_needs_a_lora() -> None:
    with pytest.raises(ConfigError, match=r"model\.merge_lora=true: there is no model\.lora"):
        ModelConfig(merge_lora=True)


@pytest.mark.parametrize("name", list(tiny.CASES))
def test_what_a_run_writes_is_taken(name: str) -> None:
    denoiser = tiny.denoiser_of(tiny.build(tiny.CASES[name]))
    add_lora(denoiser, 4, 8.0, None, seed=0)
    check_loads(lora_file({"transformer": denoiser}), {"transformer": denoiser})


def test_a_tensor_without_a_layer_or_of_another_size_is_not() -> None:
    denoiser = tiny.denoiser_of(tiny.build(tiny.CASES["flux"]))
    add_lora(denoiser, 4, 8.0, None, seed=0)
    tensors = load(lora_file({"transformer": denoiser}))
    fused = {key.replace("to_q", "to_qkv"): value for key, value in tensors.items()}
    wide = {key: torch.cat([value, value], 1) if "lora_A" in key else value for key, value in tensors.items()}
    for wrong in (fused, wide):
        with pytest.raises(ModelError, match=r"plain (diffusers does not load|FluxTransformer2DModel does not accept)"):
            check_loads(save(wrong), {"transformer": denoiser})


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
    """The name of a layer of an attention of the tiny SDXL, in the code of its authors."""
    blocks = {"down_blocks.1.attentions.0": "input_blocks.3.1", "mid_block.attentions.0": "middle_block.1"}
    blocks |= {f"up_blocks.0.attentions.{i}": f"output_blocks.{i}.1" for i in (0, 1)}
    return next(layer.replace(name, original) for name, original in blocks.items() if layer.startswith(name))


JOINT = ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_k", "transformer_blocks.1.attn.to_out.0"]
Z_IMAGE = ["layers.0.attention.to_q", "layers.1.attention.to_out.0"]
FLUX = ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.attn.to_v"]
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
        pytest.param(sdxl, UNET, lambda layer: underscored(of_original_unet(layer)), KOHYA, 1.0, id="kohya, SDXL"),
        pytest.param(tiny.sd15, UNET, underscored, KOHYA, 1.0, id="kohya, SD 1.5"),
        pytest.param(tiny.flux, FLUX, "transformer.{}".format, PEFT, 1.5, id="diffusers with alpha, FLUX"),
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


PREFIXES = ("diffusion_model.", "model.diffusion_model.", "lora_unet_", "lora_transformer_", "transformer.", "")
FAMILIES = {"sd3": "SD3", "flux": "Flux", "z_image": "ZImage", "wan": "Wan", "qwen_image": "QwenImage"}


def merged_by_hand(model: torch.nn.Module, tensors: dict[str, torch.Tensor], prefix: str, parts: Any) -> Any:
    """The weights that a file changes: `W + alpha / rank * B A`, by rows for layers on top of each other."""
    expected = {}
    for name, layers in parts.items():
        down, up = tensors[f"{prefix}{name}.lora_A.weight"], tensors[f"{prefix}{name}.lora_B.weight"]
        update = float(tensors[f"{prefix}{name}.alpha"]) / len(down) * up @ down
        if "adaLN" in name and name.startswith("final"):
            update = torch.cat(update.chunk(2)[::-1])
        for layer in layers:
            weight = model.get_parameter(f"{layer}.weight").detach()
            expected[layer], update = weight + update[: len(weight)], update[len(weight) :]
    return expected


def test_names_of_the_original_code_and_of_diffusers_are_read_with_dots_and_underscores(tmp_path: Path) -> None:
    """ComfyUI, kohya, OneTrainer, musubi and ai-toolkit; alpha below the rank."""
    wrong = []
    for case, family in FAMILIES.items():
        model = denoiser(tiny.build(tiny.CASES[case]))
        kind, layers = type(model).__name__, set(linear_layers(model))
        assert kind.startswith(family)
        own = {layer: (layer,) for layer in default_targets(model)}
        original = {
            name.replace("*", "0"): tuple(part.replace("*", "0") for part in parts)
            for name, parts in LAYOUTS[kind].items()
        }
        original = {name: parts for name, parts in original.items() if set(parts) <= layers}
        for names in (own, original) if original else (own,):
            for prefix in PREFIXES:
                torch.manual_seed(0)
                tensors = {}
                for name, parts in names.items():
                    rows = sum(len(model.get_parameter(f"{part}.weight")) for part in parts)
                    width = model.get_submodule(parts[0]).in_features
                    tensors[f"{prefix}{name}.lora_A.weight"] = torch.randn(3, width)
                    tensors[f"{prefix}{name}.lora_B.weight"] = torch.randn(rows, 3)
                    tensors[f"{prefix}{name}.alpha"] = torch.tensor(1.5)
                expected = merged_by_hand(model, tensors, prefix, names)
                if prefix.endswith("_"):
                    ends = re.compile(r"(.*?)(\.lora_[AB]\.weight|\.alpha)")
                    split = {ends.fullmatch(key): value for key, value in tensors.items()}
                    tensors = {m[1].replace(".", "_") + m[2]: value for m, value in split.items() if m}
                save_file(tensors, tmp_path / "a.safetensors")
                read = read_layers(tmp_path / "a.safetensors", {"transformer": model})["transformer"]
                copy = denoiser(tiny.build(tiny.CASES[case]))
                merge(read, copy)
                off = [n for n, w in expected.items() if not torch.allclose(copy.get_parameter(f"{n}.weight"), w)]
                if off or read.keys() != expected.keys():
                    wrong.append((case, prefix, off[:2], list(names)[:1]))
    assert not wrong


def test_refusals_are_short_and_name_a_layer(tmp_path: Path) -> None:
    models = {name: denoiser(tiny.build(tiny.CASES[name])) for name in ("wan", "sd3", "flux")}
    pair = {"lora_A": torch.ones(3, 16), "lora_B": torch.ones(16, 3)}

    def file(*layers: str, **more: torch.Tensor) -> dict[str, torch.Tensor]:
        return {f"{layer}.{half}.weight": value.clone() for layer in layers for half, value in pair.items()} | more

    nan = {"transformer.transformer_blocks.0.attn.to_q.alpha": torch.tensor(float("nan"))}
    cases: list[tuple[str, dict[str, torch.Tensor], str]] = [
        ("wan", file("diffusion_model.zebra.0.q"), "zebra"),
        ("wan", file("diffusion_model.head.head", "diffusion_model.zebra.1"), "zebra"),
        ("sd3", file(*(f"lora_transformer_zebra_{i}_attn_to_q" for i in range(20))), "zebra_0"),
        ("sd3", file("diffusion_model.double_blocks.0.img_attn.qkv"), "double_blocks"),
        ("flux", file("diffusion_model.double_blocks.18.img_attn.proj"), r"double_blocks\.18"),
        ("flux", file("transformer.transformer_blocks.0.attn.to_q", **nan), "nan"),
        ("flux", {}, "empty"),
    ]
    wrong = []
    for name, tensors, words in cases:
        save_file(tensors, tmp_path / "a.safetensors")
        try:
            read_layers(tmp_path / "a.safetensors", {"transformer": models[name]})
        except ModelError as error:
            text = str(error).removeprefix(str(tmp_path))
            if len(text) < 200 and re.search(words, text) and "%" not in text:
                continue
            wrong.append((name, words, text))
        else:
            wrong.append((name, words, "read"))
    assert not wrong


ENCODERS = {  # pipeline -> text encoder -> prefix of kohya's names
    "sd15": {"text_encoder": "lora_te_"},
    "sdxl": {"text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"},
    "sd3": {"text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_", "text_encoder_3": "lora_te3_"},
    "flux": {"text_encoder": "lora_te1_", "text_encoder_2": "lora_te3_"},
}


def test_the_part_of_a_text_encoder_is_merged(tmp_path: Path) -> None:
    """Under names of kohya and diffusers; CLIP's with text_model, which transformers 5 left out of some models."""
    torch.manual_seed(0)
    for case, prefixes in ENCODERS.items():
        (sdxl() if case == "sdxl" else tiny.build(tiny.CASES[case])).save_pretrained(tmp_path / case)
        for kohya in (True, False):
            pipe = load_pipeline(ModelConfig(path=str(tmp_path / case)), "cpu")
            component = "unet" if hasattr(pipe, "unet") else "transformer"
            chosen = default_targets(denoiser(pipe))[:: 2 if case == "sdxl" else 7]
            chosen += ["down_blocks.1.attentions.0.proj_in"] if component == "unet" and kohya else []
            parts = {component: (denoiser(pipe), chosen, "lora_unet_")}
            for name, prefix in prefixes.items():
                encoder = getattr(pipe, name)
                layers = [n for n in linear_layers(encoder) if re.search("q_proj|fc1|SelfAttention.v", n)]
                parts[name] = encoder, layers, prefix
            tensors, expected = {}, {}
            for name, (model, layers, prefix) in parts.items():
                for layer in layers:
                    weight = model.get_parameter(f"{layer}.weight").detach().clone()
                    pixel = weight.shape[2:]  # (1, 1) of a convolution
                    a, b = torch.randn(3, weight.shape[1], *pixel), torch.randn(len(weight), 3, *pixel)
                    full = f"text_model.{layer}" if layer.startswith("encoder.layers") else layer
                    if case == "sdxl" and component == name and kohya:
                        full = of_original_unet(full)
                    stem = prefix + full.replace(".", "_") if kohya else f"{name}.{full}"
                    tensors |= {f"{stem}.lora_down.weight": a, f"{stem}.lora_up.weight": b}
                    tensors |= {f"{stem}.alpha": torch.tensor(1.5)}
                    expected[name, layer] = weight + (0.5 * b.flatten(1) @ a.flatten(1)).view_as(weight)
            save_file(tensors, tmp_path / "a.safetensors")
            keys = {"path": str(tmp_path / case), "lora": str(tmp_path / "a.safetensors")}
            check_model(ModelConfig(**keys, merge_lora=True), SamplingConfig())
            for late in (False, True):
                merged = load_pipeline(ModelConfig(**keys, merge_lora=True), "cpu", late=late)
                for (name, layer), weight in expected.items():
                    model = merged.components[name]
                    model = model.loaded() if isinstance(model, LazyTextEncoder) else model
                    assert torch.allclose(model.get_submodule(layer).weight, weight), (name, layer)
            with pytest.raises(ModelError, match=r"text_encoder.*model\.merge_lora=true"):
                check_model(ModelConfig(**keys), SamplingConfig())


@needs("diffusers", "0.41", "cannot read LoRAs of text encoders beside transformers 5, which has renamed their layers")
def test_a_merged_text_encoder_draws_what_plain_diffusers_draws(tmp_path: Path) -> None:
    pipe = tiny.build(tiny.CASES["sd15"])
    pipe.save_pretrained(tmp_path / "sd15")
    torch.manual_seed(0)
    tensors = {}
    for name in ("unet", "text_encoder"):
        model = getattr(pipe, name)
        for layer in linear_layers(model)[:8]:
            rows, width = model.get_submodule(layer).weight.shape
            layer_of_file = f"text_model.{layer.removeprefix('text_model.')}" if name == "text_encoder" else layer
            stem = f"{name}.{layer_of_file}"
            halves = {"A": torch.randn(3, width), "B": torch.randn(rows, 3)}
            tensors |= {f"{stem}.lora_{half}.weight": value / 4 for half, value in halves.items()}
    save_file(tensors, tmp_path / "a.safetensors")
    config = ModelConfig(path=str(tmp_path / "sd15"), lora=str(tmp_path / "a.safetensors"), merge_lora=True)
    before, merged = drawn(pipe, "sd15"), drawn(load_pipeline(config, "cpu"), "sd15")
    pipe.load_lora_weights(str(tmp_path / "a.safetensors"))
    plain = drawn(pipe, "sd15")
    assert float((merged - plain).abs().max()) < 1e-3 * float((plain - before).abs().max())


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


@needs("diffusers", "0.36", "renames layers that no model has")
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


@pytest.mark.parametrize("build", [tiny.sd3, tiny.flux, tiny.sd15])
def test_a_model_without_weights_has_the_same_layers_and_computes_no_table(build: Callable[[], Any]) -> None:
    for denoiser in find_denoisers(build()).values():
        bare = bare_model(type(denoiser), denoiser.config)
        assert all(value.is_meta for value in [*bare.parameters(), *bare.buffers()])
        shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in (bare, denoiser)]
        assert shapes[0] == shapes[1]

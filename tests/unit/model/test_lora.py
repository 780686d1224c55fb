"""LoRA on the denoisers of six pipelines: where it goes, switching it off, and its file in stock diffusers."""

import json
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
from peft import get_peft_model_state_dict
from replaying import EACH, Recorded, randomise, replayed, rolled_out
from safetensors import safe_open
from safetensors.torch import load, save

from gerl.algorithms.core_algos import gaussian_kl
from gerl.errors import ModelError
from gerl.model.lora import add_lora, default_targets, find_targets, load_lora, lora_disabled, lora_file
from gerl.model.paths import WEIGHTS

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
    with pytest.raises(ModelError, match=r"None matches none of the 1 linear layers of Sequential; .* like 0"):
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

"""LoRA on the denoisers of six pipelines: where it goes, switching it off, and its file in stock diffusers."""

import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
from safetensors.torch import load

from gerl.errors import ModelError
from gerl.trainer.ppo.core_algos import gaussian_kl
from gerl.utils.lora import WEIGHTS, add_lora, default_targets, find_targets, lora_disabled, lora_file
from gerl.workers.diffusers_model import record, replay

EACH = pytest.mark.parametrize("name", list(tiny.CASES))
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
NUMBER_OF_TARGETS = {"sd3": 25, "flux": 17, "qwen_image": 24, "z_image": 21, "wan": 20, "sd15": 40}


def drawn(pipe: Any, name: str, **call: Any) -> torch.Tensor:
    return tiny.output_of(pipe(**(tiny.call_for(tiny.CASES[name], True) | call), generator=tiny.generators()))


def with_lora(name: str, rank: int = 4, alpha: float = 4.0, perturb: bool = True) -> tuple[Any, dict[str, Any]]:
    pipe = tiny.build(tiny.CASES[name])
    lora = add_lora(tiny.denoiser_of(pipe), rank, alpha, None, seed=3)
    if perturb:
        torch.manual_seed(1)
        for p in lora.values():
            p.data.normal_(0, 0.2)
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


def test_find_targets() -> None:
    transformer = tiny.sd3().transformer
    assert find_targets(transformer, None) == default_targets(transformer)
    assert find_targets(transformer, r"blocks\.1\..*to_q$") == ["transformer_blocks.1.attn.to_q"]
    assert find_targets(transformer, r"^proj_out$") == ["proj_out"]  # what the default leaves out can be asked for
    with pytest.raises(ModelError, match=r"lora_targets='to_z' matches none of the 36 linear .* SD3Transformer2DModel"):
        find_targets(transformer, "to_z")
    with pytest.raises(ModelError, match=r"lora_targets='\*' is no regular expression: nothing to repeat"):
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
    _, tape = record(pipe, tiny.call_for(case, True), kernel=case.kernel, generators=tiny.generators())

    def kl() -> torch.Tensor:
        means: dict[str, list[torch.Tensor]] = {"base": [], "policy": []}
        with lora_disabled([tiny.denoiser_of(pipe)]):
            replay(pipe, tape, lambda k, step: means["base"].append(step.mean), grad=False)
        replay(pipe, tape, lambda k, step: means["policy"].append(step.mean), grad=False)
        pairs = zip(means["policy"], means["base"], tape.steps, strict=False)
        return torch.stack([gaussian_kl(p, b, step.rule.std) for p, b, step in pairs])

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
    content = lora_file(pipe, {denoiser: tiny.denoiser_of(pipe)})
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


def test_a_pipeline_that_cannot_save_a_lora_is_named() -> None:
    pipe, _ = with_lora("sd15")
    with pytest.raises(ModelError, match=r"cannot save a LoRA of StableDiffusionPipeline\.transformer"):
        lora_file(pipe, {"transformer": pipe.unet})

    class Bare(diffusers.DiffusionPipeline):
        def __init__(self, unet: Any) -> None:
            super().__init__()
            self.register_modules(unet=unet)

    with pytest.raises(ModelError, match=r"cannot save a LoRA of Bare\.unet"):
        lora_file(Bare(pipe.unet), {"unet": pipe.unet})

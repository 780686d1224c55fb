"""A LoRA to start from: read in every layout that the export writes, begun with or merged, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
import zoo.video
from safetensors.torch import load_file, save_file

from gerl.config import ModelConfig, SamplingConfig
from gerl.errors import ConfigError, ModelError
from gerl.export.base import Base
from gerl.export.files import lora_files, write_files
from gerl.model.denoisers import find_denoisers
from gerl.model.loading import check_model, load_policy, weights_fingerprint
from gerl.model.lora import find_targets, lora_disabled
from gerl.model.lora_files import read_layers
from gerl.model.lora_weights import Lora
from gerl.model.paths import WEIGHTS
from gerl.model.policy import Policy

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
    assert config.carried_on() == ModelConfig()
    merged = replace(config, merge_lora=True)
    assert merged.carried_on() == merged


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
        ("text encoder", {}, "a LoRA of text_encoder, and gerl trains transformer"),
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
    file = (tmp_path / "out" / "lora_transformer.safetensors").rename(tmp_path / "mine.safetensors")
    with pytest.raises(ModelError, match=r"lora_NAME\.safetensors.*one of transformer, transformer_2"):
        read_layers(file, find_denoisers(pipe))


def test_a_merge_needs_a_lora() -> None:
    with pytest.raises(ConfigError, match=r"model\.merge_lora=true: there is no model\.lora"):
        ModelConfig(merge_lora=True)

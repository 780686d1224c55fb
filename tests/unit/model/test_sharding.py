"""Weights divided among ranks: two real processes over gloo draw and train as one that has all of them."""

import logging
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
from drills import more
from ranks import MEASURED, run_ranks, worst
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from gerl.config import ModelConfig
from gerl.errors import ModelError
from gerl.model.denoisers import find_denoisers
from gerl.model.loading import load_pipeline, weights_fingerprint
from gerl.model.sharding import Unread, fill, layers, repeated_blocks, shard, sharded_components

KEYS = ["signs ", "signs RESHARD=false", "full RESHARD=false", "full dtype=bfloat16 RESHARD=false"]
KEYS += ["full REDUCE_DTYPE=bfloat16", "sum float32 bfloat16"]
EXACT = [name for name in tiny.CASES if name != "sd15"]  # convolutions round by where their weights lie in memory


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the ranks say of each tiny pipeline."""
    cases = [*(f"draw {name}" for name in tiny.CASES), *KEYS]
    rows = worst(run_ranks("sharded_ranks", tmp_path_factory.mktemp("ranks"), 2, *cases))
    return {case.removeprefix("draw "): row for case, row in rows.items()}


@pytest.mark.parametrize("name", list(tiny.CASES))
def test_a_part_of_the_weights_draws_and_trains_as_the_whole(name: str, found: dict[str, dict[str, Any]]) -> None:
    assert found[name]["off"] <= (0 if name in EXACT else 1e-5)
    assert 0.5 <= found[name]["share"] < 0.65  # what does not divide by the ranks is padded, and buffers stay whole


def test_gathered_weights_may_stay_until_the_backward_pass(found: dict[str, dict[str, Any]]) -> None:
    """The frozen ones, and trained ones, which are gathered again wherever they have changed."""
    assert found["signs "]["off"] == found["signs RESHARD=false"]["off"] == 0
    assert found["signs RESHARD=false"]["gathers"] < 0.6 * found["signs "]["gathers"]
    assert found["signs RESHARD=false"]["share"] < 0.51
    for keys in ("full RESHARD=false", "full dtype=bfloat16 RESHARD=false"):
        assert found[keys]["images"] == found[keys]["gradients"] == 0 and found[keys]["saved"] > 100


def test_gradients_are_summed_in_the_configured_precision(found: dict[str, dict[str, Any]]) -> None:
    assert found["full REDUCE_DTYPE=bfloat16"]["rounded"] == 0 < found["full REDUCE_DTYPE=bfloat16"]["gradients"]
    assert found["sum float32 bfloat16"]["float32"] == found["sum float32 bfloat16"]["bfloat16"] == 0


def test_blocks_are_the_entries_of_the_outermost_lists() -> None:
    pipe = tiny.build(tiny.CASES["flux"])
    transformer = pipe.transformer
    assert repeated_blocks(transformer) == [*transformer.transformer_blocks, *transformer.single_transformer_blocks]


def test_layers_outside_of_the_blocks_that_share_their_weight_stay_whole() -> None:
    model = torch.nn.ModuleDict({k: torch.nn.Linear(2, 2) for k in "abc"})
    model["inner"] = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    model["norm"] = torch.nn.LayerNorm(2)
    assert layers(model, list(model["inner"])) == [model[k] for k in "abc"]
    model["b"].weight = model["a"].weight
    assert layers(model, list(model["inner"])) == [model["c"]]


def test_components_by_name() -> None:
    pipe = tiny.build(tiny.CASES["flux"])
    denoisers = {"transformer": pipe.transformer}
    assert sharded_components(pipe, denoisers, "none") == {}
    assert sharded_components(pipe, denoisers, "denoiser") == denoisers
    everything = sharded_components(pipe, denoisers, "all")
    assert sorted(everything) == ["text_encoder", "text_encoder_2", "transformer"]
    assert all(isinstance(c, PreTrainedModel) for name, c in everything.items() if name != "transformer")


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match=r"model\.shard: odd \(Linear\) has no repeated blocks.*model\.shard=none"):
        shard({"odd": torch.nn.Linear(2, 2)}, set(), None)  # type: ignore[arg-type]


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, those that share a weight by each of their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def settings(model: Any) -> dict[str, Any]:
    return dict(model.config.to_dict() if hasattr(model.config, "to_dict") else model.config)


@pytest.mark.parametrize(
    ("name", "dtype", "files"),
    [*((name, "bfloat16", "20KB") for name in tiny.CASES), ("wan", "float16", "10GB"), ("sd15", "float32", "10GB")],
)
def test_weights_from_their_files_are_those_of_the_whole_reading(
    name: str, dtype: Any, files: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gerl.model.sharding")
    tiny.build(tiny.CASES[name]).save_pretrained(tmp_path, max_shard_size=files)
    config, unread = ModelConfig(path=str(tmp_path), shard="all", dtype=dtype), Unread()
    whole, parts = load_pipeline(config, "cpu"), load_pipeline(config, "cpu", True, unread=unread)
    models = sharded_components(whole, find_denoisers(whole), "all")
    assert len(unread) == len({id(p) for model in models.values() for p in model.parameters()})
    assert weights_fingerprint(find_denoisers(parts), unread) == weights_fingerprint(find_denoisers(whole))
    for component, model in models.items():
        mine = getattr(parts, component)
        assert all(p.untyped_storage().nbytes() <= 4 for p in mine.parameters())
        fill(mine, unread)
        assert type(mine) is type(model) and mine.training == model.training and settings(mine) == settings(model)
        read, expected = tensors(mine), tensors(model)
        assert list(read) == list(expected)
        for key, tensor in expected.items():
            assert read[key].dtype == tensor.dtype and torch.equal(read[key], tensor), f"{component}.{key}"
    assert not unread and not caplog.messages


def edit(folder: Path, change: Any) -> None:
    """Let `change` work on the tensors of the transformer in `folder`."""
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})


def test_what_does_not_come_from_one_tensor_of_a_file_is_read_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gerl.model.sharding")
    pipe = tiny.build(tiny.CASES["flux"])
    pipe.save_pretrained(tmp_path)
    pipe.transformer.save_pretrained(tmp_path / "transformer", safe_serialization=False)
    (tmp_path / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    unread = Unread()
    loaded = load_pipeline(ModelConfig(path=str(tmp_path), shard="denoiser"), "cpu", True, unread=unread)
    assert not unread and torch.equal(loaded.transformer.proj_out.weight, pipe.transformer.proj_out.weight)
    assert "every rank reads all of transformer" in caplog.text and "no diffusion_pytorch_model.saf" in caplog.text


def test_a_weight_that_is_missing_is_refused(tmp_path: Path) -> None:
    tiny.build(tiny.CASES["sd3"]).save_pretrained(tmp_path)
    edit(tmp_path, lambda weights: weights.pop("proj_out.bias"))
    with pytest.raises(ModelError, match=r"transformer .*proj_out\.bias"):
        load_pipeline(ModelConfig(path=str(tmp_path), shard="denoiser"), "cpu", True, unread=Unread())


def test_of_a_merged_lora_the_denoiser_is_read_whole(tmp_path: Path) -> None:
    from gerl.model.loading import _to_divide

    tiny.build(tiny.CASES["sd3"]).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), shard="all", lora="x", merge_lora=True)
    encoders = ["text_encoder", "text_encoder_2", "text_encoder_3"]
    assert _to_divide(config, str(tmp_path)) == encoders


def large(folder: Path) -> int:
    """A FLUX of nine blocks in fp32; returns the bytes of its denoiser in bfloat16."""
    torch.manual_seed(0)
    sizes = tiny.JOINT | {"num_layers": 3, "attention_head_dim": 128, "num_attention_heads": 4, "num_single_layers": 6}
    sizes |= {"axes_dims_rope": [32, 32, 64], "in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 16}
    transformer = diffusers.FluxTransformer2DModel(**sizes)
    parts = tiny.dynamic(), tiny.image_vae(), tiny.clip(), tiny.t5()
    tiny.pipeline(diffusers.FluxPipeline, transformer, *parts).save_pretrained(folder, max_shard_size="20MB")
    return sum(2 * p.numel() for p in transformer.parameters())


@more
def test_no_rank_ever_has_the_whole_model(tmp_path: Path) -> None:
    size = large(tmp_path / "model")
    (found,) = worst(run_ranks("sharded_ranks", tmp_path, 2, f"read {tmp_path / 'model'}", **MEASURED)).values()
    assert size > 90e6 and found["different"] == 0
    assert found["whole"] > 0.95 * size
    assert found["parts"] < 0.75 * size  # a half of the weights, a block, and what else happens to be there

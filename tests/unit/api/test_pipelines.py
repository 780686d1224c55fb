"""Where a pipeline in memory lies as files."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
from huggingface_hub import constants
from peft import LoraConfig

from gerl.api.pipelines import path_of
from gerl.errors import ModelError


def read(folder: Path) -> Any:
    return diffusers.DiffusionPipeline.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    tiny.sd3(layers=1).save_pretrained(str(folder))
    return folder


def test_one_that_was_built_is_saved(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    assert path_of(tiny.sd3(layers=1), saved) == str(saved)
    assert type(read(saved)) is diffusers.StableDiffusion3Pipeline


def test_one_that_was_read_is_named(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = read(stored)
    assert path_of(pipe, tmp_path / "other") == str(stored)
    pipe("a", height=16, width=16, num_inference_steps=1, max_sequence_length=8)  # tokenizers keep how they padded
    assert path_of(pipe, tmp_path / "other") == str(stored)
    half = diffusers.DiffusionPipeline.from_pretrained(str(stored), dtype=torch.bfloat16)
    assert path_of(half, tmp_path / "other") == str(stored), "the weights in the precision in which they were read"
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    assert path_of(pipe, tmp_path / "other") == str(stored), "a LoRA is no part of the base model"

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = tmp_path / "cache" / "models--me--tiny" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(stored)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    pipe.register_to_config(_name_or_path="me/tiny")
    assert path_of(pipe, tmp_path / "other") == "me/tiny" and not (tmp_path / "other").exists()


def other_weights(pipe: Any) -> None:
    with torch.no_grad():
        pipe.transformer.transformer_blocks[0].attn.to_q.weight[3, 5] += 1


def fused_lora(pipe: Any) -> None:
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    pipe.fuse_lora()
    pipe.unload_lora_weights()


def other_vae(pipe: Any) -> None:
    pipe.vae.register_to_config(scaling_factor=2.0)


def other_scheduler(pipe: Any) -> None:
    pipe.scheduler = diffusers.FlowMatchHeunDiscreteScheduler.from_config(pipe.scheduler.config)


def more_tokens(pipe: Any) -> None:
    pipe.tokenizer.add_tokens("<style>")
    pipe.text_encoder.resize_token_embeddings(len(pipe.tokenizer))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (other_weights, {"transformer"}),
        (fused_lora, {"transformer"}),
        (other_vae, {"vae"}),
        (other_scheduler, {"scheduler"}),
        (more_tokens, {"text_encoder", "tokenizer"}),
    ],
)
def test_one_that_was_changed_is_written(
    stored: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Any], None], parts: set[str]
) -> None:
    """Not replaced by the name that it once had: what follows the run would mean another model."""
    pipe, saved = read(stored), tmp_path / "saved"
    change(pipe)
    with caplog.at_level(logging.INFO):
        assert path_of(pipe, saved) == str(saved)
    assert all(part in caplog.text for part in parts) and str(saved) in caplog.text
    assert {path.name for path in saved.iterdir() if path.is_dir() and not path.is_symlink()} == parts
    found = read(saved)
    call = {"height": 16, "width": 16, "num_inference_steps": 2, "max_sequence_length": 8, "output_type": "np"}
    if change is not other_scheduler:  # whose draw is its own
        images = [p("a <style>", generator=torch.Generator().manual_seed(0), **call).images for p in (pipe, found)]
        assert (images[0] == images[1]).all()
    assert type(found.scheduler) is type(pipe.scheduler)


def test_one_with_adapters_that_was_changed_is_refused(stored: Path, tmp_path: Path) -> None:
    pipe = read(stored)
    other_weights(pipe)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    with pytest.raises(ModelError, match=r"unload_lora_weights\(\)"):
        path_of(pipe, tmp_path / "saved")


def test_what_is_no_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a diffusers pipeline"):
        path_of("signs", tmp_path / "saved")  # type: ignore[arg-type]

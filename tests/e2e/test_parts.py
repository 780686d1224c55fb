"""Runs on pipelines with components left out or replaced, and what follows: resuming, export, evaluation, program."""

import logging
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from PIL import Image

import gerl
from gerl.errors import ConfigError
from gerl.run.validation import load_validation

PROMPTS = ["a red fox", "blue", "x y"]
CALL: dict[str, Any] = {"height": 16, "width": 16, "num_inference_steps": 4, "max_sequence_length": 8}
SMALL: dict[str, Any] = {
    "sampling": {"height": 16, "width": 16, "num_inference_steps": 4, "call": {"max_sequence_length": 8}},
    "sampling.guidance_scale": 1.0, "rollout.n": 4, "rollout.micro_batch_size": 4, "model.lora_rank": 4,
    "actor.lr": 0.02, "cluster.threads_per_worker": 1, "logger": {"tensorboard": False, "report": False},
}  # fmt: skip
WITHOUT: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None}
BLOCKS = {key: value for key, value in SMALL.items() if "." not in key}


def bright(images: list[Image.Image]) -> list[float]:
    return [float(np.asarray(image).mean()) / 255 for image in images]


def drawn(pipe: Any) -> torch.Tensor:
    generators = [torch.Generator().manual_seed(i) for i in range(3)]
    images = pipe(PROMPTS, generator=generators, output_type="np", guidance_scale=1.0, **CALL).images
    return torch.as_tensor(images)


def plain(path: Path, **parts: Any) -> Any:
    pipe = DiffusionPipeline.from_pretrained(path, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def follow(run: gerl.Run, expected: Any, folder: Path) -> None:
    """Export, resume and evaluate the run, whose LoRA `expected` has."""
    gerl.export(run, out=folder / "merged", format="merged")
    assert torch.allclose(drawn(plain(folder / "merged", **WITHOUT)), drawn(expected), atol=1e-5)
    found = gerl.evaluate(lora=run, prompts=["a red fox"], reward=bright, **BLOCKS)
    assert set(found.results["total"]) == {"base", "run"}
    again = gerl.train(reward=bright, resume=run.folder, **{"trainer.steps": 2})
    assert again.metrics[-1]["step"] == 2


def test_a_pipeline_in_memory_without_a_text_encoder(model: Path, tmp_path: Path) -> None:
    pipe = plain(model, **WITHOUT)
    run = gerl.train(pipe, bright, PROMPTS, steps=1, out=tmp_path / "run", **SMALL)
    assert run.config["model"]["path"] == str(tmp_path / "run" / "base")
    follow(run, pipe, tmp_path)


def test_parts_of_a_folder(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = AutoencoderKL.from_pretrained(model, subfolder="vae")
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1)
    other.save_pretrained(tmp_path / "vae")
    parts = {"model": {"parts": {"text_encoder_3": None, "vae": str(tmp_path / "vae")}}}
    with caplog.at_level(logging.INFO, logger="gerl"):
        run = gerl.train(str(model), bright, PROMPTS, held_out=PROMPTS, steps=1, out=tmp_path / "run", **SMALL | parts)
    code = caplog.messages[-1].partition("in plain diffusers:\n")[2]
    shown = load_validation(run.folder, 1).pixels[0].astype(int)
    monkeypatch.chdir(tmp_path)
    exec(compile(textwrap.dedent(code), "the printed program", "exec"), {})
    # the run drew several pictures in one batch, which may change the last bit
    assert np.abs(np.asarray(Image.open(tmp_path / "picture.png")) - shown).max() <= 1
    with pytest.raises(ConfigError, match=r"model\.parts .*was trained on these components"):
        gerl.train(reward=bright, resume=run.folder, **{"model.parts.vae": str(model), "trainer.steps": 2})
    pipe = plain(model, vae=other, **WITHOUT)
    pipe.load_lora_weights(run.lora)
    follow(run, pipe, tmp_path)

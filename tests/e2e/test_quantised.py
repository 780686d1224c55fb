"""A run on an int8 base: trained, exported into the base as it was, evaluated as it was trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch

from gerl.api.commands import evaluate
from gerl.export.command import main as export
from gerl.model.lora_files import collect_loras

KEYS = ("validation.every=1", "checkpoint.every=1", "checkpoint.keep=9", "actor.lr=0.01", "reward.trial=false")


def test_a_run_on_a_quantised_base(
    model: Path, workplace: Path, train: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(tmp_path / "run", *KEYS, "model.quantize=int8", "model.quantize_encoders=int8",
                validation__data=workplace / "val.txt")  # fmt: skip
    assert max(run.column("actor/ratio_deviation")) == 0.0 and min(run.column("actor/grad_norm")) > 0

    with caplog.at_level("INFO", logger="gerl"):
        assert export([f"run={run.folder}", f"out={tmp_path / 'out'}", "format=merged", "weights=raw", "step=2"]) == 0
    assert f"trained on {model}, quantised to int8" in caplog.text and "before quantisation" in caplog.text
    base, merged = (diffusers.DiffusionPipeline.from_pretrained(path) for path in (model, tmp_path / "out"))
    trained = {name.removeprefix("lora/"): t for name, t in run.state(2).items() if name.startswith("lora/")}
    layers = collect_loras(trained, 8.0)["transformer"].halves
    for name, p in merged.transformer.named_parameters():
        update = layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        added = 0.0 if update is None else update.scale * (update.b @ update.a)
        torch.testing.assert_close(p, base.transformer.get_parameter(name) + added, rtol=1e-6, atol=1e-6)
    assert tiny.denoiser_of(merged).dtype == torch.float32

    found = evaluate(lora=run.checkpoint(2), trust=True, overrides=["cluster.launcher=local", "logger.progress=false"])
    drawn = [found.results["total"][name].mean.mean for name in found.results["total"]]
    # another process may round a few of the values of 0 to 255 otherwise, of which an image has 16 x 16 x 3
    few = 8 / 255 / (16 * 16 * 3)
    assert drawn == pytest.approx([run.column("val/reward/mean")[0], run.column("val/reward/mean")[-1]], abs=few)

"""Runs that start from the LoRA of another run: trained on, merged into the base, resumed, exported, evaluated."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
import yaml
from drills import more

from gerl.api.commands import evaluate
from gerl.export.command import main as export
from gerl.model.lora_files import collect_loras
from gerl.trainer.main_flowgrpo import main

KEYS = ("validation.every=1", "checkpoint.every=1", "checkpoint.keep=9", "actor.lr=0.01", "reward.trial=false")


@pytest.fixture(scope="module")
def first(train: Callable[..., Any], workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of two steps."""
    return train(tmp_path_factory.mktemp("first") / "run", *KEYS, validation__data=workplace / "val.txt")


@more
def test_a_run_goes_on_from_another_ones_lora(first: Any, train: Callable[..., Any], tmp_path: Path) -> None:
    """Its first validation is the other's last; resumed, it does not need the file and ends with the same weights."""
    shutil.copytree(first.checkpoint(2) / "lora", tmp_path / "start")
    keys = {"validation__data": held_out(first), "model__lora": tmp_path / "start"}
    whole = train(tmp_path / "whole", *KEYS, **keys)
    assert whole.column("val/reward/mean")[0] == first.column("val/reward/mean")[-1]
    assert max(whole.column("actor/ratio_deviation")) < 1e-6
    begun = train(tmp_path / "begun", *KEYS, trainer__steps=1, **keys)
    shutil.rmtree(tmp_path / "start")
    assert main([f"checkpoint.resume={begun.folder}", "trainer.steps=2"]) == 0
    assert torch.equal(begun.lora(2), whole.lora(2)) and not torch.equal(begun.lora(1), begun.lora(2))


def held_out(run: Any) -> str:
    return str(yaml.safe_load((run.folder / "config.yaml").read_text())["validation"]["data"])


def test_a_merged_lora_belongs_to_the_base(
    first: Any, model: Path, train: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    start = first.checkpoint(2) / "lora"
    keys = {"validation__data": held_out(first), "model__lora": start}
    run = train(tmp_path / "run", *KEYS, "model.merge_lora=true", model__lora_rank=2, **keys)
    assert run.column("val/reward/mean")[0] == pytest.approx(first.column("val/reward/mean")[-1], abs=1e-5)

    # exported, both are in the weights
    with caplog.at_level("INFO", logger="gerl"):
        assert export([f"run={run.folder}", f"out={tmp_path / 'lora'}", "step=2"]) == 0
    assert f"trained on {model} with the LoRA {start} merged into it" in caplog.text
    assert f"on top of {start}: load that too" in caplog.text
    assert export([f"run={run.folder}", f"out={tmp_path / 'merged'}", "format=merged", "step=2"]) == 0
    both = diffusers.DiffusionPipeline.from_pretrained(model)
    both.load_lora_weights(start, adapter_name="start")
    both.load_lora_weights(tmp_path / "lora", adapter_name="more")
    both.set_adapters(["start", "more"])
    merged = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "merged")
    call = tiny.call_for(tiny.CASES["sd3"], guided=False, steps=2) | {"prompt": tiny.PROMPTS[:2]}
    drawn = [tiny.output_of(pipe(**call, generator=tiny.generators(2))) for pipe in (both, merged)]
    torch.testing.assert_close(*drawn, rtol=1e-4, atol=1e-4)

    # evaluated, the base is the one that was trained on
    found = evaluate(lora=run.checkpoint(2), trust=True, overrides=["cluster.launcher=local", "logger.progress=false"])
    assert found.results["total"]["base"].mean.mean == pytest.approx(run.column("val/reward/mean")[0], abs=1e-5)
    trained = [name for name in found.results["total"] if name != "base"]
    assert found.results["total"][trained[0]].mean.mean == pytest.approx(run.column("val/reward/mean")[-1], abs=1e-5)

    # another LoRA is another base
    shutil.copytree(first.checkpoint(1) / "lora", tmp_path / "other")
    state = collect_loras({n.removeprefix("lora/"): t for n, t in run.state(2).items() if n.startswith("lora/")}, 8.0)
    assert state["transformer"].rank == 2
    capsys.readouterr()
    assert main([f"checkpoint.resume={run.folder}", "trainer.steps=3", f"model.lora={tmp_path / 'other'}"]) != 0
    assert "model.lora" in capsys.readouterr().err

"""Predictions of memory and work, beside what real runs take and what is published of models."""

import dataclasses
import json
from pathlib import Path

import pytest
import sizing
import torch

from gerl.errors import ModelError
from gerl.preflight.sizing.build import build_pipeline
from gerl.preflight.sizing.facts import Facts, Part, Weights, find_facts
from gerl.preflight.sizing.hardware import GPUS
from gerl.preflight.sizing.layouts import Batch, Layout, cheapest, largest, memory, room
from gerl.preflight.sizing.stage import Tally

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bytes_and_operations_are_those_of_a_real_run(checkpointing: bool, tmp_path: Path) -> None:
    config = sizing.config_at(sizing.wide(tmp_path / "wide", 1280), checkpointing)
    facts, real = find_facts(config, tmp_path, torch.float32, both=False), sizing.real_run(config)
    (updated,) = facts.updates.values()
    (denoiser,) = (part for part in facts.parts if part.kind == "denoiser")
    assert 100e6 < denoiser.weights.total / 4 < 400e6
    assert max(facts.rollout.peaks.values()) == pytest.approx(real.rollout, rel=0.1)
    assert max(updated.peaks.values()) == pytest.approx(real.update, rel=0.1)
    assert facts.rollout.total == pytest.approx(real.rollout_flops, rel=1e-3)
    assert updated.total == pytest.approx(real.update_flops, rel=1e-3)
    assert Facts.from_json(json.loads(json.dumps(dataclasses.asdict(facts)))) == facts


# published: 2.5 B (SD3.5-M's paper counts its 0.25 B of fixed positions), 8.1 B, 12 B, 20 B, 32 B, 1.6 B, 1.3 B
@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("stabilityai/stable-diffusion-3.5-large", 8.06),
        ("black-forest-labs/FLUX.1-dev", 11.9),
        ("Qwen/Qwen-Image", 20.4),
        ("black-forest-labs/FLUX.2-dev", 32.2),
        ("Wan-AI/Wan2.1-T2V-14B-Diffusers", 14.3),
    ],
)
def test_models_on_record_have_their_published_size(model: str, billions: float) -> None:
    denoiser = build_pipeline(model, torch.bfloat16).components["transformer"]
    assert sum(p.numel() for p in denoiser.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_model_that_nobody_knows_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"'nobody/model' is not in the hub's cache.*black-forest-labs/FLUX.1-dev"):
        build_pipeline("nobody/model", torch.bfloat16)


def model(billions: float = 10.0) -> Facts:
    """A denoiser of 20 blocks and an encoder, in bf16; an image takes a GB."""
    whole = Weights(int(2e9 * billions), int(1e9 * billions), 1000, int(2e9 * billions))
    block = Weights(int(1e8 * billions), int(5e7 * billions), 50, int(1e8 * billions))
    parts = [
        Part("transformer", "denoiser", whole, block, Weights(), 10**7),
        Part("text_encoder", "encoder", Weights(2 * 10**9, 10**9, 1000, 2 * 10**9), Weights(), Weights(), 10**6),
    ]
    taken = Tally({"transformer": 10**15}, {"transformer": 10}, {"transformer": 8 * 10**9})
    return Facts("m", "P", "a", "bfloat16", "image", 8, 8, 8, parts, 10**7, 1, False, 1e6, taken, {True: taken})


def test_layouts_divide_what_they_should() -> None:
    facts, batch = model(), Batch(8, 8, 100)
    plain = memory(facts, Layout(), batch)
    assert plain.weights == 22e9 and plain.lora == 10**7 * 20 and plain.tape == 1e8
    assert plain.peak == plain.weights + plain.lora + plain.tape + 8e9
    # a quarter of the denoiser, two blocks of 1 GB, and two of the eight rows
    sharded = memory(facts, Layout(4, "denoiser"), batch)
    assert sharded.weights == 7e9 and sharded.peak - sharded.weights - sharded.lora - sharded.tape == 2e9 + 2e9
    assert memory(facts, Layout(4, "all"), batch).weights == 5.5e9
    assert memory(facts, Layout(quantize="int8"), batch).weights == pytest.approx(11e9, rel=1e-3)
    assert memory(facts, Layout(quantize="nf4"), batch).weights == pytest.approx(11e9 * 9 / 16, rel=1e-3)
    assert memory(facts, Layout(offload="encoders"), batch).weights == 20e9
    assert memory(facts, Layout(offload="blocks"), batch).weights == 2e9


def test_the_cheapest_layout_leaves_weights_as_they_are_while_it_can() -> None:
    small, large, batch = GPUS["rtx4090-24gb"], GPUS["h100-80gb"], Batch(8, 8, 100)
    as_it_is = cheapest(model(), batch, 1, large, 1, 0.4)
    assert as_it_is is not None and as_it_is.layout == Layout() and as_it_is.batch == batch
    sharded = cheapest(model(60), batch, 1, large, 8, 0.4)
    assert sharded is not None and sharded.layout.shard != "none" and sharded.layout.quantize == "none"
    offloaded = cheapest(model(), batch, 1, small, 1, 0.4)
    assert offloaded is not None and offloaded.layout.offload == "blocks"
    assert cheapest(model(2000), batch, 1, small, 1, 0.4) is None
    for choice in (as_it_is, sharded, offloaded):
        assert choice.memory.peak <= room(large)


def test_the_largest_micro_batch_just_fits() -> None:
    facts, batch, gpu = model(), Batch(8, 8, 100), GPUS["h100-80gb"]
    rollout, _ = largest(facts, Layout(), batch, gpu)
    assert memory(facts, Layout(), Batch(rollout, 8, 100)).peak <= room(gpu)
    assert memory(facts, Layout(), Batch(rollout + 1, 8, 100)).peak > room(gpu)


def test_the_page_has_the_table_of_the_recorded_results() -> None:
    assert sizing.table() in (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")

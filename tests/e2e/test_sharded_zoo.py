"""Pipelines of the zoo with their weights divided among the ranks of a worker: they draw and learn what whole ones do.

Two processes over gloo walk through them. By default through some of the architectures that `test_sharding.py` has not,
more of them with all drills, with `GERL_ZOO=all` through all and through compiled blocks, which takes some minutes.
"""

import os
from pathlib import Path
from typing import Any

import drills
import pytest
from drills import more
from ranks import run_ranks, worst
from zoo.entries import BY_NAME

SOME = [
    "StableDiffusionXLPipeline-text-to-image",
    "NucleusMoEImagePipeline-text-to-image",
    "FluxControlNetPipeline-ControlNet",
    "WanPipeline-text-to-video-(Wan-2.2,-two-experts)",
    "LTX2Pipeline-text-to-video-with-sound",
]
if drills.ALL:
    SOME += [f"{name}Pipeline-text-to-image" for name in ("Sana", "Lumina2", "Flux2", "Ideogram4")]
ALL = os.environ.get("GERL_ZOO") == "all"
TRAINED = list(BY_NAME)
CASES = TRAINED if ALL else SOME
# of `model`, for the whole weights as well, but for capitals
KEYS = [
    "quantize=int8 quantize_encoders=int8",
    "quantize=fp8 RESHARD=false",
    "OFFLOAD=blocks",
    *(["compile=eager"] if ALL else []),
]
CONVOLUTIONS = ("StableDiffusionXL", "StableDiffusionPipeline", "DreamLite")  # round by where their weights lie


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By pipeline, and by keys of the shipped one."""
    cases = [*(f"zoo {name}" for name in CASES), *(f"signs {keys}" for keys in KEYS)]
    rows = worst(run_ranks("sharded_ranks", tmp_path_factory.mktemp("ranks"), 2, *cases))
    return {case.partition(" ")[2]: row for case, row in rows.items()}


@more
@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_in_parts_draws_and_trains_as_the_whole(name: str, found: dict[str, dict[str, Any]]) -> None:
    assert found[name]["off"] <= (1e-5 if name.startswith(CONVOLUTIONS) else 0)
    assert 0.5 <= found[name]["share"] < 0.75  # what does not divide by the ranks is padded, and some layers stay whole


@pytest.mark.parametrize("keys", KEYS)
def test_parts_that_are_quantised_compiled_or_on_the_cpu(keys: str, found: dict[str, dict[str, Any]]) -> None:
    assert found[keys]["off"] == 0 and 0.5 <= found[keys]["share"] < 0.51
    assert (found[keys]["compiled"] > 0) == ("compile" in keys)


@more
def test_a_pipeline_among_four_ranks(tmp_path: Path) -> None:
    (row,) = worst(run_ranks("sharded_ranks", tmp_path, 4, "draw flux")).values()
    assert row["off"] == 0 and 0.25 <= row["share"] < 0.45  # what does not divide by four is padded

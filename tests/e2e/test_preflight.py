"""`python -m gerl.preflight`: a model in, a report out, and sentences for what keeps it from training."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import zoo.conditioned
import zoo.video

from gerl.preflight.arguments import main

Preflight = Callable[..., dict[str, Any]]


@pytest.fixture
def preflight(arguments: Callable[..., list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Preflight:
    """Run the command line and return its report, with the text of the terminal as `text`."""

    def examine(*overrides: str, expect: int = 0, **keys: Any) -> dict[str, Any]:
        caplog.clear()
        caplog.set_level(logging.INFO, logger="gerl")
        given = arguments(tmp_path / "run", *overrides, scorer="", **keys)
        assert main([*given, f"out={tmp_path}/report.json"]) == expect
        report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
        assert report["can_train"] == (expect == 0) == (not report["problems"])
        assert not (tmp_path / "run").exists(), "a preflight leaves no run behind"
        return report | {"text": caplog.text}

    return examine


def test_a_run_is_looked_at_without_rewards_and_prompts(preflight: Preflight, tmp_path: Path) -> None:
    clip = {"algorithm__clip_low": 0.2, "algorithm__clip_high": 0.3}
    found = preflight(data__train=tmp_path / "to_come.txt", sampling__window_range="[0,2]", **clip)
    assert found["pipeline"] == "StableDiffusion3Pipeline" and found["own_scheduler"] is None
    transformer = next(c for c in found["components"] if c["name"] == "transformer")
    assert transformer["lora_modules"] > 10 and transformer["dtype"] == "float32"
    assert "transformer_blocks.*.attn.to_q" in transformer["targets"]
    assert {c["name"] for c in found["components"] if not c["lora_modules"]} >= {"vae", "text_encoder"}
    run = found["run"]
    assert (run["images"], run["sampled"], run["trained"]) == (4, 4, 4)
    assert run["deviation"] == 0 and run["finite"] and run["gradients"]["transformer"] > 10
    assert found["probe"]["log_ratio_noise"] < 1e-5 and found["max_ratio_deviation"] == 1e-3
    assert found["clip"] == pytest.approx(3.2)  # 0.2 is for 65536 latent dimensions, here there are 256
    assert found["seconds"]["images"] == 8 and found["seconds"]["rollout"] > 0 and found["seconds"]["update"] > 0
    assert found["prompts"] is None and "100 prompts: " in found["text"]
    assert not found["warnings"] and "to_come.txt" in found["notes"][0]
    for word in ("frozen ", "clip range 3.2", "s/image", "peak memory", "largest ", "it can train"):
        assert word in found["text"]


def test_an_algorithm_without_a_ratio_and_a_file_of_prompts(preflight: Preflight) -> None:
    found = preflight(algorithm="awm_fast", rollout__micro_batch_size=3)
    assert found["probe"] is None and "does not compare probabilities" in found["text"]
    assert found["prompts"] == 6 and found["steps_per_epoch"] == 3
    (warning,) = found["warnings"]
    assert "rollout.micro_batch_size=3" in warning and "2 of 3 and 1 of 2" in warning and "2 or 4" in warning


def test_a_replaced_scheduler_and_a_denoiser_that_does_not_run(preflight: Preflight, tmp_path: Path) -> None:
    pipe = next(e for e in zoo.video.ENTRIES if "two experts" in e.task).build()
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    pipe.scheduler = diffusers.UniPCMultistepScheduler(**flow)
    pipe.save_pretrained(tmp_path / "wan")
    call = ("sampling.window_range=[0,1]", "sampling.call={max_sequence_length: 16, num_frames: 5}")
    found = preflight(*call, model__path=tmp_path / "wan", rollout__micro_batch_size=2)
    assert found["scheduler"] == "FlowMatchEulerDiscreteScheduler" and found["run"]["unit"] == "video"
    replaced, idle = found["warnings"][:2]
    assert "instead of the pipeline's UniPCMultistepScheduler" in replaced
    assert "no gradient reached the LoRA of transformer_2 at the trained steps [0]" in idle
    assert found["run"]["gradients"]["transformer"] > 0 == found["run"]["gradients"]["transformer_2"]


def test_pictures_are_made_up(preflight: Preflight, tmp_path: Path) -> None:
    zoo.conditioned.sd3_inpaint().save_pretrained(tmp_path / "inpaint")
    keys = {"model__path": tmp_path / "inpaint", "rollout__micro_batch_size": 2, "algorithm": "awm_fast"}
    (_, note, *_) = preflight(data__train=tmp_path / "to_come.jsonl", **keys)["notes"]
    assert note.startswith("the images for image and")
    (problem,) = preflight(expect=1, **keys)["problems"]
    assert "StableDiffusion3InpaintPipeline needs image and mask_image" in problem and "train.txt" in problem


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model__lora_targets": "nothing"}, ["model.lora_targets='nothing' matches none", "look like"]),
        ({"sampling__height": 18}, ["fails with these arguments", "divisible by", "sampling.height"]),
        ({"sampling__kernel": "ddim", "model__path": "nowhere/at/all"}, ["model.path", "is not a pipeline"]),
    ],
)
def test_what_cannot_train_is_said_in_a_sentence(preflight: Preflight, keys: dict[str, Any], words: list[str]) -> None:
    report = preflight(expect=1, **keys)
    (problem,) = report["problems"]
    assert all(word in problem for word in words), problem
    assert f"problem: {problem}" in report["text"]


def test_a_wrong_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argument, words in (("out=report.txt", "the path of a .json file"), ("trainer.stepz=3", "'trainer.steps'")):
        assert main([argument]) == 2
        assert argument.split("=")[0] in (said := capsys.readouterr().err) and words in said


@pytest.mark.gpu
def test_on_a_gpu_memory_is_that_of_tensors(preflight: Preflight) -> None:
    found = preflight(cluster__device="cuda", cluster__num_workers=1)
    assert found["device"] == "cuda" and next(c for c in found["components"])["dtype"] == "bfloat16"
    assert 0 < found["load_peak"] <= found["run"]["update"]["peak"] < torch.cuda.mem_get_info()[1]
    assert found["memory"]["largest_rollout"] == 8

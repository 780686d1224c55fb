"""gerl from Python: a pipeline, a function and prompts in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from diffusers import DiffusionPipeline
from drills import more
from PIL import Image

import gerl
from gerl.errors import ConfigError, FlaggedError, GerlError, ModelError, RewardError

PROMPTS = ["a red fox", "blue", "x y"]
SMALL: dict[str, Any] = {
    "sampling": {"height": 16, "width": 16, "num_inference_steps": 4, "call": {"max_sequence_length": 8}},
    "sampling.guidance_scale": 1.0, "rollout.n": 4, "rollout.micro_batch_size": 4, "model.lora_rank": 4,
    "actor.lr": 0.02, "cluster.threads_per_worker": 1, "logger": {"tensorboard": False, "report": False},
}  # fmt: skip
STOP: dict[str, Any] = {"reward.on_error": "stop", "reward.retries": 0}
CALL = {"height": 16, "width": 16, "num_inference_steps": 4, "guidance_scale": 1.0, "max_sequence_length": 8}


def bright(images: list[Image.Image]) -> list[float]:
    return [float(np.asarray(image).mean()) / 255 for image in images]


def drawn(pipe: Any) -> torch.Tensor:
    generators = [torch.Generator().manual_seed(i) for i in range(3)]
    return torch.as_tensor(pipe(PROMPTS, generator=generators, output_type="np", **CALL).images)


@pytest.fixture
def pipe(model: Path) -> DiffusionPipeline:
    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_a_pipeline_in_memory_is_trained_in_place(pipe: DiffusionPipeline, tmp_path: Path) -> None:
    before, scheduler, seen = drawn(pipe), pipe.scheduler, list[gerl.Step]()
    run = gerl.train(
        pipe, bright, PROMPTS, held_out=PROMPTS[:2], steps=3, out=tmp_path / "run",
        on_step=seen.append, on_validation=seen.append, **SMALL,
    )  # fmt: skip
    assert [step.number for step in seen] == [0, 1, 2, 3, 3] and seen[1].held_out is None and seen[0].reward is None
    assert run.column("reward/mean") == [step.reward for step in seen[1:4]] and len(run.metrics) == 4
    after = drawn(pipe)
    assert pipe.scheduler is scheduler and "encode_prompt" not in pipe.__dict__
    assert float((after - before).abs().max()) > 1e-3
    pipe.unload_lora_weights()
    assert torch.allclose(drawn(pipe), before, atol=1e-6)
    pipe.load_lora_weights(run.lora)
    assert torch.allclose(drawn(pipe), after, atol=1e-4)  # in place lies what is exported
    pictures = run.images()
    assert [p.prompt for p in pictures] == PROMPTS[:2] and run.validated == [0, 3]
    assert pictures[0].reward == pytest.approx(bright([pictures[0].image])[0], abs=1e-6)
    assert run.images(0)[0].image != pictures[0].image and run.show().width > 100
    assert "after step 3" in run._repr_html_() and run.config["reward"]["scorers"]["bright"]["path"] == "python:bright"
    with pytest.raises(ModelError, match="already has adapters"):
        gerl.train(pipe, bright, PROMPTS, steps=1, out=tmp_path / "again", **SMALL)
    assert not (tmp_path / "again").exists()


def test_a_pipeline_has_no_lora_with_signals_of_the_guard(
    pipe: DiffusionPipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has that of an earlier step, or is the base model where steps 3 and 6 have signals."""
    before, held_out = drawn(pipe), [f"prompt {i}" for i in range(12)]
    keys = SMALL | {
        "sampling.num_inference_steps": 5, "model.lora_alpha": 32, "actor.ema_decay": 0.5, "rollout.n": 12,
        "rollout.micro_batch_size": 18, "rollout.prompts_per_step": 3, "validation.num_inference_steps": None,
        "checkpoint.every": 1, "guard.ignored": ["watched", "disagreement"],
    }  # fmt: skip
    keys["sampling"] = {name: value for name, value in keys["sampling"].items() if name != "num_inference_steps"}
    texts = [*PROMPTS, 'a sign that reads "482"', "seven", "a cat"]
    for lr, every in ((0.02, 2), (0.06, 3)):
        keys |= {"actor.lr": lr, "validation.every": every, "algorithm": "flow_grpo"}
        run = gerl.train(pipe, bright, texts, held_out=held_out, steps=6, out=tmp_path / str(every), **keys)
        after, said = drawn(pipe), [r.message for r in caplog.records if r.message.startswith("step 6, the last one")]
        if every == 2:
            assert f"the pipeline has the LoRA of {run.lora.parent.name.replace('_', ' ')}, the best " in said[-1]
            pipe.unload_lora_weights()
            assert torch.allclose(drawn(pipe), before, atol=1e-6) and not torch.allclose(after, before, atol=1e-3)
            pipe.load_lora_weights(run.lora)
            assert torch.allclose(drawn(pipe), after, atol=1e-4)
            pipe.unload_lora_weights()
        else:
            assert torch.equal(after, before) and "the pipeline has no LoRA; " in said[-1]
            with pytest.raises(FlaggedError):
                _ = run.lora


def test_a_cell_may_be_run_twice(pipe: DiffusionPipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The LoRA that a run left on the pipeline is removed before the next, which has the same numbers; no other is."""
    first = gerl.train(pipe, bright, PROMPTS, steps=2, out=tmp_path / "first", **SMALL)
    caplog.set_level("INFO", logger="gerl")
    second = gerl.train(pipe, bright, PROMPTS, steps=2, out=tmp_path / "second", **SMALL)
    assert second.column("reward/mean") == first.column("reward/mean")
    assert f"model.lora={tmp_path / 'first'}" in caplog.text
    pipe.unload_lora_weights()
    pipe.load_lora_weights(second.lora)
    with pytest.raises(ModelError, match="already has adapters"):
        gerl.train(pipe, bright, PROMPTS, steps=1, out=tmp_path / "third", **SMALL)


def test_a_loop_that_is_left_has_a_checkpoint_and_goes_on_exactly(model: Path, tmp_path: Path) -> None:
    scale = 2.0
    reward = {"b": lambda images: [scale * value for value in bright(images)]}
    whole = gerl.train(model, reward, PROMPTS, steps=3, out=tmp_path / "whole", **SMALL)
    for step in gerl.Trainer(model, reward, PROMPTS, steps=3, out=tmp_path / "half", **SMALL):
        if step.number == 2:
            break
    assert gerl.Run(tmp_path / "half").lora.parent.name == "step_2"
    with pytest.raises(RewardError, match=r"gerl\.train\(\.\.\., resume=FOLDER\)"):
        gerl.train(resume=tmp_path / "half")
    half = gerl.train(reward=reward, resume=tmp_path / "half")
    assert half.column("reward/mean") == whole.column("reward/mean")
    files = [run.lora / "pytorch_lora_weights.safetensors" for run in (whole, half)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert gerl.train(reward=reward, resume=tmp_path / "half", **{"trainer.steps": 4}).metrics[-1]["step"] == 4


@more
def test_closures_go_to_the_processes_of_ray(model: Path, tmp_path: Path) -> None:
    offset, many = 3.0, {"trainer.seed": 1}

    def reward(images: list[Image.Image], prompts: list[str]) -> list[float]:
        return [offset + value for value in bright(images)]

    keys = {"steps": 1, **SMALL, **many}
    here = gerl.train(model, reward, PROMPTS, out=tmp_path / "here", **keys).column("reward/mean")
    there = gerl.train(model, reward, PROMPTS, out=tmp_path / "there", workers=1, **keys).column("reward/mean")
    assert here == pytest.approx(there) and here[0] > offset


def test_a_trainer_is_one_run_and_wrong_arguments_leave_nothing(model: Path, tmp_path: Path) -> None:
    trainer = gerl.Trainer(model, bright, PROMPTS, steps=1, out=tmp_path / "run", **SMALL)
    assert [step.number for step in trainer] == [1]
    with pytest.raises(GerlError, match="create another"):
        iter(trainer)
    with pytest.raises(ConfigError, match="reward and prompts missing"):
        gerl.train(model)
    with pytest.raises(ConfigError, match=r"sampling\.heigth.*did you mean 'sampling\.height'"):
        gerl.train(model, bright, PROMPTS, out=tmp_path / "typo", **SMALL, **{"sampling.heigth": 3})
    with pytest.raises(ModelError, match="not a diffusers pipeline"):
        gerl.train(torch.nn.Linear(2, 2), bright, PROMPTS, out=tmp_path / "typo", **SMALL)  # type: ignore[arg-type]
    assert not (tmp_path / "typo").exists()
    with pytest.raises(GerlError, match="not a run folder"):
        gerl.Run(tmp_path / "typo")


def test_a_start_that_fails_leaves_the_pipeline_as_it_was(pipe: DiffusionPipeline, tmp_path: Path) -> None:
    before, scheduler, calls = drawn(pipe), pipe.scheduler, list[int]()

    def fails(images: list[Image.Image]) -> list[float]:
        calls.append(len(images))
        if len(calls) > 2:  # the trial, and the pictures before the first step
            raise ValueError("no more")
        return bright(images)

    with pytest.raises(RewardError, match="no more"):
        gerl.train(pipe, fails, PROMPTS, held_out=PROMPTS, steps=1, out=tmp_path / "a", **SMALL, **STOP)
    assert not [name for name, _ in tiny.denoiser_of(pipe).named_parameters() if "lora" in name]
    assert all(p.requires_grad for p in tiny.denoiser_of(pipe).parameters()) and pipe.scheduler is scheduler
    assert torch.equal(drawn(pipe), before)
    assert gerl.train(pipe, bright, PROMPTS, steps=1, out=tmp_path / "b", **SMALL).column("reward/mean")
    assert [name for name, _ in tiny.denoiser_of(pipe).named_parameters() if "lora" in name]


def test_a_run_is_exported_and_evaluated_with_its_function_and_other_prompts(
    pipe: DiffusionPipeline, tmp_path: Path
) -> None:
    run = gerl.train(pipe, bright, PROMPTS, steps=1, out=tmp_path / "run", **SMALL)
    (file,) = gerl.export(run, tmp_path / "lora")
    assert file.name == "pytorch_lora_weights.safetensors"
    with pytest.raises(ConfigError, match="out is missing"):
        gerl.export(run)
    with pytest.raises(ConfigError, match="push=name: expected owner/name"):
        gerl.export(run, push="name")
    with pytest.raises(RewardError, match="reward=FUNCTION"):
        gerl.evaluate(lora=run, prompts=PROMPTS[:1])
    keys = {"sampling.num_inference_steps": 2, "logger": {"progress": False}}
    found = gerl.evaluate(pipe, run, [{"prompt": "a"}, "b"], reward={"mine": bright}, **keys)
    assert found.complete and [row.prompt for row in found.rows] == ["a", "b"] * 2
    assert {row.variant for row in found.rows} == {"base", "run"} and set(found.rows[0].values) == {"total", "mine"}
    named = gerl.evaluate(str(pipe.name_or_path), {"mine": run.lora}, ["a"], reward=bright, **SMALL)
    assert set(named.results["total"]) == {"base", "mine"}


def test_score_and_preflight_take_objects(model: Path, tmp_path: Path) -> None:
    images = [Image.new("RGB", (16, 16), (v, v, v)) for v in (51, 204)]
    rows = gerl.score(
        images, ["a", {"prompt": "b", "x": 5}], {"b": bright, "x": lambda i, p, m: [r.get("x", 0) for r in m]}
    )
    assert [dict(row.values) for row in rows] == [
        {"total": pytest.approx(0.2), "b": pytest.approx(0.2), "x": 0.0},
        {"total": pytest.approx(5.8), "b": pytest.approx(0.8), "x": 5.0},
    ]
    images[0].save(tmp_path / "0.png")
    (row,) = gerl.score([tmp_path / "0.png"], "a", bright, out=tmp_path / "scores")
    assert row.values["bright"] == pytest.approx(0.2) and (tmp_path / "scores" / "gallery.html").is_file()
    report = gerl.preflight(model, bright, PROMPTS, **SMALL)
    assert report.pipeline == "StableDiffusion3Pipeline" and report.problems == [] and report.prompts == 3
    assert callable(gerl.evaluate) and gerl.score.__doc__


def test_half_precision_of_the_object_is_that_of_the_run(pipe: DiffusionPipeline, tmp_path: Path) -> None:
    half: Callable[..., Any] = pipe.to(torch.bfloat16)
    run = gerl.train(half, bright, PROMPTS, steps=1, out=tmp_path / "run", **SMALL)
    assert run.config["model"]["dtype"] == "bfloat16" and tiny.denoiser_of(half).dtype == torch.bfloat16


def test_a_pipeline_that_was_changed_is_the_base_of_what_follows_its_run(
    pipe: DiffusionPipeline, tmp_path: Path
) -> None:
    """Its weights were those of the files in the export, the evaluation and the closing program."""
    with torch.no_grad():
        for p in pipe.transformer.parameters():
            p.mul_(1.2)
    run = gerl.train(pipe, bright, PROMPTS, steps=1, out=tmp_path / "run", **SMALL)
    gerl.export(run, out=tmp_path / "merged", format="merged")
    merged = DiffusionPipeline.from_pretrained(tmp_path / "merged")
    merged.set_progress_bar_config(disable=True)
    assert torch.allclose(drawn(merged), drawn(pipe), atol=1e-5)
    base = tmp_path / "run" / "base"
    assert run.config["model"]["path"] == str(base) == pipe.name_or_path and (base / "vae").is_symlink()
    found = gerl.evaluate(pipe, run, ["a red fox"], reward=bright, **{k: v for k, v in SMALL.items() if "." not in k})
    assert found.results["total"]

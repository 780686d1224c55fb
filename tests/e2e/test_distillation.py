"""A student learns from its teachers what they are rewarded for, though its own rewards are only watched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from gerl.export.command import main as export
from gerl.trainer.main_flowgrpo import main

Train = Callable[..., Any]
SPECIALIST = """
algorithm=awm_fast sampling.num_inference_steps=4 model.lora_alpha=32 actor.lr=0.02 actor.ema_decay=0.5
rollout.prompts_per_step=3 rollout.n=12 rollout.micro_batch_size=18 trainer.steps=3
"""
STUDENT = """
algorithm=opd algorithm.distance=velocity sampling.window_size=null sampling.window_range=[0,3] actor.ema_decay=0.5
model.lora_rank=8 model.lora_alpha=8 rollout.prompts_per_step=12 rollout.n=1 rollout.micro_batch_size=12 actor.lr=0.02
"""
ENDS = ("validation.every=0", "checkpoint.every=0")
KINDS = {"day": ("bright", 1), "night": ("dark", -1)}  # of prompts: their specialist, and what it is rewarded for


@pytest.fixture(scope="module")
def prompts(workplace: Path) -> dict[str, Path]:
    """Prompts of two kinds."""
    for name, count in (("train", 6), ("val", 3)):
        rows = [f'{{"prompt": "{kind} {i}", "data_source": "{kind}"}}' for kind in KINDS for i in range(count)]
        (workplace / f"kinds_{name}.jsonl").write_text("\n".join(rows) + "\n")
    return {"data__train": workplace / "kinds_train.jsonl", "validation__data": workplace / "kinds_val.jsonl"}


@pytest.fixture(scope="module")
def specialists(train: Train, prompts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run of a model that became brighter, and of one that became darker, whatever the prompt."""
    folder = tmp_path_factory.mktemp("teachers")
    return {
        name: train(folder / name, *SPECIALIST.split(), *ENDS, f"reward.scorers.bright.weight={weight}", **prompts)
        for name, weight in KINDS.values()
    }


def brightness(run: Any, kind: str) -> list[float]:
    """The mean of the held-out images of a kind, at each validation."""
    sign = -1 if run.column("val/reward/mean")[0] < 0 else 1
    return [sign * value for value in run.column(f"val/reward/{kind}/mean")]


def test_a_student_of_two_teachers_reaches_both(
    train: Train,
    assert_replayed: Callable[[Any], None],
    prompts: dict[str, Path],
    specialists: dict[str, Any],
    tmp_path: Path,
) -> None:
    entries = [f"{{lora: {specialists[name].checkpoint(3)}, data_source: {kind}}}" for kind, (name, _) in KINDS.items()]
    settings = [*STUDENT.split(), *ENDS, f"algorithm.teachers=[{', '.join(entries)}]", "trainer.steps=14"]
    run = train(tmp_path / "run", *settings, "trainer.dump=7", **prompts)
    assert_replayed(run)
    for kind, (name, sign) in KINDS.items():
        (start, end), goal = brightness(run, kind), brightness(specialists[name], kind)[-1]
        assert sign * (goal - start) > 0.002, (start, goal)
        assert abs(end - goal) < 0.4 * abs(start - goal), (start, end, goal)
        distances = run.column(f"actor/teacher_distance/{kind}")
        assert distances[-1] < 0.4 * distances[0]
    means = zip(*(run.column(f"actor/teacher_distance{part}") for part in ("", "/day", "/night")), strict=True)
    assert all(min(day, night) <= both <= max(day, night) for both, day, night in means)


def test_a_lora_learns_back_to_the_base_model_and_goes_on_with_another_teacher(
    train: Train, prompts: dict[str, Path], specialists: dict[str, Any], tmp_path: Path
) -> None:
    begun = specialists["bright"].checkpoint(3)
    settings = [*STUDENT.split(), *ENDS, f"model.lora={begun}", "model.lora_alpha=32", "actor.lr=0.01"]
    run = train(tmp_path / "run", *settings, "algorithm.teachers=[{}]", "trainer.steps=5", **prompts)
    distances = run.column("actor/teacher_distance")
    assert distances[-1] < 0.5 * distances[0]
    expected = {"loss", "grad_norm", "grad_rms", "lr", "lora_max", "nonfinite_updates", "policy_version"}
    found = {key.removeprefix("actor/") for row in run.metrics[1:] for key in row if key.startswith("actor/")}
    assert {key for key in found if not key.startswith(("step_grad_", "gradient_"))} == expected | {"teacher_distance"}
    changed = [f"algorithm.teachers=[{{lora: {specialists['dark'].checkpoint(3)}}}]", "trainer.steps=6"]
    assert main([f"checkpoint.resume={run.folder}", *changed]) == 0
    assert run.column("actor/teacher_distance")[-1] > 2 * distances[-1]
    (file,) = (run.checkpoint(6) / "lora").glob("*.safetensors")
    assert load_file(file).keys() == load_file(next((begun / "lora").glob("*.safetensors"))).keys()


def test_guidance_is_distilled(
    train: Train, assert_replayed: Callable[[Any], None], prompts: dict[str, Path], tmp_path: Path
) -> None:
    settings = [
        "algorithm=guidance_distillation",
        "algorithm.timesteps=2",
        "rollout.prompts_per_step=12",
        "rollout.n=1",
        "trainer.dump=4",
        *ENDS,
    ]
    run = train(
        tmp_path / "run", *settings, "rollout.micro_batch_size=12", "trainer.steps=4", "actor.lr=0.02", **prompts
    )
    assert_replayed(run)
    distances = run.column("actor/teacher_distance")
    assert distances[-1] < 0.7 * distances[0], distances


def test_a_lora_that_imitates_is_carried_on_and_not_exported(
    train: Train, prompts: dict[str, Path], tmp_path: Path
) -> None:
    settings = ["algorithm=dmdr", "algorithm.matching_steps=4", "rollout.n=2", "rollout.micro_batch_size=4"]
    keys = {**prompts, "validation__data": "null", "checkpoint__every": 1}
    whole = train(tmp_path / "whole", *settings, trainer__steps=2, **keys)
    half = train(tmp_path / "half", *settings, trainer__steps=1, **keys)
    assert main([f"checkpoint.resume={half.folder}", "trainer.steps=2"]) == 0
    half.assert_same(whole, 2)
    fakes = [name for name in half.state(2) if ".fake." in name]
    assert {name.split("/")[0] for name in fakes} == {"lora", "ema", "optimizer"}
    assert export([f"run={half.folder}", f"out={tmp_path / 'raw'}", "weights=raw"]) == 0
    (file,) = (tmp_path / "raw").glob("*.safetensors")
    (own,) = (half.checkpoint(2) / "lora").glob("*.safetensors")
    assert load_file(file).keys() == load_file(own).keys() and not any("fake" in name for name in load_file(file))

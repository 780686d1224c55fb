"""Runs that cannot learn say so, in the log, the metrics and the report; broken weights stop a run."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
from drills import more

from gerl.run.health import PATIENCE

Train = Callable[..., Any]
SMALL = ("rollout.prompts_per_step=1", "rollout.n=2", "sampling.num_inference_steps=2", "logger.report=true")


def report(run: Any) -> str:
    return (run.folder / "report.html").read_text(encoding="utf-8")


def scorer(workplace: Path, name: str, value: str) -> str:
    text = f"def compute_score(images, prompts, metadata):\n    return [{value} for i in range(len(images))]\n"
    (workplace / name).write_text(text)
    return name


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0.0", r"bright gave 0 to every image of the last 5 steps.*samples/.*data\.train.*scorers\.bright\.kwargs"),
        ("0.25", r"bright gave 0\.25 to every image of the last 5 steps.*gerl\.score.*reward\.scorers\.bright\.kwargs"),
    ],
)  # fmt: skip
def test_a_constant_reward_is_said(
    value: str, expected: str, train: Train, workplace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = scorer(workplace, f"constant{value}.py", value)
    run = train(tmp_path / "run", *SMALL, scorer=name, trainer__steps=PATIENCE + 2)
    warned = [record.message for record in caplog.records if "every image" in record.message]
    assert len(warned) == 1 and re.search(expected, warned[0]) and warned[0].startswith(f"step {PATIENCE}:")
    assert run.column("health/bright/constant_steps") == run.column("health/no_signal_steps") == [*range(1, 8)]
    assert re.search(r"<h2>Warnings.*step 7: bright gave .* the last 7 steps", report(run), re.DOTALL)


@more
def test_groups_without_a_difference_are_said_and_a_resumed_run_says_the_same(
    train: Train, workplace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = scorer(workplace, "by_prompt.py", "len(prompts[i]) / 100")
    folder = tmp_path / "a" / "run"
    whole = train(folder, *SMALL, scorer=name, trainer__steps=PATIENCE + 1)
    found = [record.message for record in caplog.records if "no training signal" in record.message]
    assert len(found) == 1 and "rollout.n=2" in found[0] and "sampling.noise_level=0.7" in found[0]
    assert "algorithm.dynamic_sampling" in found[0] and f"{PATIENCE} steps" in found[0]
    assert max(whole.column("health/bright/constant_steps")) < PATIENCE
    half = tmp_path / "b" / "run"
    train(half, *SMALL, scorer=name, trainer__steps=3)
    caplog.clear()
    resumed = train(half, *SMALL, f"checkpoint.resume={half}", scorer=name, trainer__steps=PATIENCE + 1)
    assert resumed.untimed() == whole.untimed()
    assert [record.message for record in caplog.records if "no training signal" in record.message] == found


def test_a_run_that_learns_is_not_warned_of(train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = train(tmp_path / "run", *SMALL, trainer__steps=2, actor__lr=0.02)
    assert run.column("health/no_signal_steps") == run.column("health/blank_fraction") == [0, 0]
    assert all(0 < value < 1 for value in run.column("actor/lora_max"))
    assert not [message for message in caplog.messages if re.match(r"step \d+: ", message)]
    assert "<h2>Warnings" not in report(run)


def test_exploding_weights_stop_the_run_and_are_not_exported(refused: Callable[..., str], tmp_path: Path) -> None:
    message = refused(*SMALL, actor__lr="1e30", checkpoint__every=1)
    assert re.search(r"largest weight of the LoRA is [\d.]+e\+\d\d .*actor\.lr", message)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_weights_that_grow_are_said_before(train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = train(tmp_path / "run", *SMALL, trainer__steps=1, actor__lr=20)
    assert 10 < run.column("actor/lora_max")[0] < 1000
    (warned,) = [record.message for record in caplog.records if "largest weight" in record.message]
    assert "actor.lr=20" in warned and "stops above 1000" in warned


def test_images_with_pixels_that_are_not_finite_stop_the_run_where_they_are_first_seen(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pipe = tiny.sd3()
    pipe.vae.decoder.conv_out.weight.data.fill_(float("nan"))  # as one that overflows in half precision
    pipe.save_pretrained(tmp_path / "model")
    with pytest.raises(AssertionError):
        train(tmp_path / "run", *SMALL, model__path=tmp_path / "model", trainer__steps=1)
    error = capfd.readouterr().err.splitlines()[-1]
    assert "2 of 2 images" in error and "not finite" in error and "model.dtype=float32" in error


def test_base_weights_that_are_not_finite_stop_the_run_before_its_first_step(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pipe = tiny.sd3()
    pipe.transformer.proj_out.weight.data[0, 0] = float("nan")
    pipe.save_pretrained(tmp_path / "model")
    with pytest.raises(AssertionError):
        train(tmp_path / "run", *SMALL, model__path=tmp_path / "model", trainer__steps=1)
    error = capfd.readouterr().err.splitlines()[-1]
    assert "not finite" in error and "model.dtype=float32" in error


def test_images_of_a_single_colour_are_said(
    train: Train, workplace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = tiny.sd3()
    pipe.vae.decoder.conv_out.weight.data.fill_(0.0)
    pipe.save_pretrained(tmp_path / "model")
    name = scorer(workplace, "counting.py", "float(i)")
    run = train(tmp_path / "run", *SMALL, model__path=tmp_path / "model", scorer=name, trainer__steps=1)
    assert run.column("health/blank_fraction") == [1]
    (warned,) = [record.message for record in caplog.records if "single colour" in record.message]
    assert "100%" in warned and "model.dtype=float32" in warned and warned in report(run).replace("&#39;", "'")


def test_a_memory_that_is_full_divides_micro_batches_and_changes_nothing(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(tmp_path / "plain", actor__lr=0.01)
    forward = diffusers.SD3Transformer2DModel.forward

    @functools.wraps(forward)
    def in_a_small_memory(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if len(hidden_states) > (1 if torch.is_grad_enabled() else 3):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(diffusers.SD3Transformer2DModel, "forward", in_a_small_memory)
    small = train(tmp_path / "small", actor__lr=0.01)
    assert float((small.lora(2) - plain.lora(2)).norm() / plain.lora(2).norm()) < 1e-3
    said = [message for message in caplog.messages if "out of memory" in message]
    assert len(said) == 2 and "rollout.micro_batch_size=2" in said[0] and "actor.micro_batch_size=1" in said[1], said

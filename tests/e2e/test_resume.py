"""A run that stops, by itself, by a signal or by kill -9, carries on as if nothing had happened."""

import json
import shutil
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import tiny
import torch

from gerl.algorithms.planning import plan_validation
from gerl.commandline.composition import compose_run
from gerl.trainer.main_flowgrpo import main
from gerl.utils.dataset import load_prompts
from gerl.utils.seeding import sample_generators

Arguments = Callable[..., list[str]]
Resume = Callable[[Any], None]
STEPS = 5
EVERY_STEP = """
validation.every=1 checkpoint.every=1 checkpoint.keep=9 rollout.prompts_per_step=3 actor.lr=0.01 actor.warmup_steps=3
""".split()
# Brightness; call number `number` (from 1) sends a signal to the process, as a user or a scheduler would.
STOPPING = """
import os, pathlib, signal
import numpy as np

def compute_score(images, prompts, metadata, log, number):
    calls = pathlib.Path(log)
    count = int(calls.read_text()) + 1 if calls.exists() else 1
    calls.write_text(str(count))
    if count == number:
        os.kill(os.getpid(), signal.SIGTERM)
    return [float(np.asarray(image).mean()) / 255 for image in images]
"""


@pytest.fixture(scope="module")
def command(arguments: Arguments, workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Arguments:
    """Four calls of the scorer a step: validation on one, rollout on three, an epoch of two steps."""
    (workplace / "stopping.py").write_text(STOPPING)

    def build(folder: Path, *overrides: str, stop: int = 0, **keys: Any) -> list[str]:
        settings = {
            "scorer": "stopping.py",
            "trainer__steps": STEPS,
            "validation__data": workplace / "val.txt",
            "reward__scorers__bright__kwargs": f"{{log: {folder.parent / 'calls'}, number: {stop}}}",
        }
        return arguments(folder, *EVERY_STEP, *overrides, **settings | keys)

    return build


@pytest.fixture(scope="module")
def finished(command: Arguments, run_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    @cache
    def run(steps: int) -> Any:
        folder = tmp_path_factory.mktemp("finished") / "run"
        assert main(command(folder, trainer__steps=steps)) == 0
        return run_of(folder)

    return run


@pytest.fixture
def whole(finished: Callable[[int], Any]) -> Any:
    return finished(STEPS)


@pytest.fixture
def stopped(finished: Callable[[int], Any], run_of: Any, tmp_path: Path) -> Any:
    """A copy of a run that ended after three steps."""
    return run_of(Path(shutil.copytree(finished(3).folder, tmp_path / "runs" / "run")))


@pytest.fixture
def resume(command: Arguments, stopped: Any, whole: Any) -> Callable[[Any], None]:
    """Carry `stopped` on from a place; it must end like the run that did not stop."""

    def run(place: Any) -> None:
        assert main(command(stopped.folder, f"checkpoint.resume={place}")) == 0
        assert_same_end(stopped, whole)

    return run


def assert_same_end(run: Any, other: Any) -> None:
    state, expected = run.state(STEPS), other.state(STEPS)
    assert sorted(state) == sorted(expected)
    assert any(name.startswith("ema/") for name in state) and any(name.startswith("optimizer/") for name in state)
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert run.untimed() == other.untimed()
    assert json.loads((run.checkpoint(STEPS) / "state.json").read_text())["finished"] is True
    for step in range(STEPS + 1):
        name = f"validation/step_{step:06d}.npz"
        assert (np.load(run.folder / name)["pixels"] == np.load(other.folder / name)["pixels"]).all()


def test_three_steps_and_two_are_five(resume: Resume, stopped: Any, caplog: pytest.LogCaptureFixture) -> None:
    resume(stopped.folder)
    assert any("resumed" in m and str(stopped.checkpoint(3)) in m for m in caplog.messages)


def test_a_single_checkpoint_can_be_named(resume: Resume, stopped: Any) -> None:
    resume(stopped.checkpoint(2))


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(
    resume: Resume, stopped: Any, caplog: pytest.LogCaptureFixture
) -> None:
    file = stopped.checkpoint(3) / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    resume(stopped.folder)
    assert any(str(stopped.checkpoint(3)) in m and "state.safetensors" in m for m in caplog.messages)
    assert any("resumed" in m and str(stopped.checkpoint(2)) in m for m in caplog.messages)


def test_a_run_killed_before_its_first_checkpoint_starts_anew_in_its_folder(resume: Resume, stopped: Any) -> None:
    shutil.rmtree(stopped.folder / "checkpoints")
    resume("auto")


@pytest.mark.parametrize(
    ("call", "kept"),
    [(1, 0), (3, 0), (6, 1), (5, 1), (17 + 4, 5)],
    ids=["first validation", "first rollout", "later rollout", "validation of a step", "last validation"],
)
def test_sigterm_leaves_a_checkpoint_and_auto_carries_on(
    command: Arguments, run_of: Any, whole: Any, tmp_path: Path, call: int, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path / "runs" / "first")
    settings = ("actor.lr_schedule=constant", "checkpoint.every=0")
    assert main(command(run.folder, *settings, stop=call)) == 128 + signal.SIGTERM
    where, why = caplog.messages[-2:]
    assert f"step {kept}: " in where and str(run.folder / "checkpoints") in where
    assert f"signal {int(signal.SIGTERM)}" in why
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == [f"step_{kept}"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # the handlers are gone
    second = tmp_path / "runs" / "second"
    assert main(command(second, *settings, "checkpoint.resume=auto", stop=call)) == 0
    assert not second.exists()  # it carried on where the first one lies
    assert_same_end(run, whole)


def test_kill_9_during_a_step_and_the_same_command_again(
    command: Arguments, start: Callable[..., Any], run_of: Any, whole: Any, tmp_path: Path
) -> None:
    run = run_of(tmp_path / "run")
    arguments = command(run.folder, "checkpoint.resume=auto")
    process = start(arguments)
    while not ((run.folder / "metrics.jsonl").exists() and len(run.metrics) >= 3):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    steps = [row["step"] for row in run.metrics]
    assert steps[:3] == [0, 1, 2] and len(steps) < STEPS + 1
    assert main(arguments) == 0
    assert_same_end(run, whole)


def test_auto_after_a_finished_run_starts_anew(
    command: Arguments, run_of: Any, stopped: Any, caplog: pytest.LogCaptureFixture
) -> None:
    new = run_of(stopped.folder.parent / "new")
    assert main(command(new.folder, "checkpoint.resume=auto", trainer__steps=1)) == 0
    assert any(f"nothing to resume in {new.folder.parent}" in message for message in caplog.messages)
    assert [row["step"] for row in new.metrics] == [0, 1] and len(stopped.metrics) == 4


def test_a_folder_with_a_run_is_not_written_over(
    command: Arguments, stopped: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in stopped.folder.rglob("*") if path.is_file()}
    assert main(command(stopped.folder)) == 2
    assert f"hydra.run.dir={stopped.folder}" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in stopped.folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("key", ["data.train", "validation.data", "model.path", "model.lora_rank", "trainer.seed"])
def test_a_run_that_changed_is_not_resumed(
    command: Arguments, stopped: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    value: Any = 7
    if "data" in key:
        value = tmp_path / "changed.txt"
        value.write_text("another prompt\n")
    elif key == "model.path":
        value, pipe = tmp_path / "changed", tiny.sd3()
        pipe.transformer.transformer_blocks[0].attn.to_q.weight.data += 0.01
        pipe.save_pretrained(value)
    kept = stopped.untimed()
    assert main([*command(stopped.folder, f"checkpoint.resume={stopped.folder}"), f"{key}={value}"]) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    named = "model.lora_*" if "lora" in key else key
    assert message.startswith(f"error: {stopped.checkpoint(3)} ") and f" {named} changed" in message, message
    assert message.endswith("checkpoint.resume=never"), message
    assert stopped.untimed() == kept


def test_nothing_to_resume_at_a_path(refused: Callable[..., str], tmp_path: Path) -> None:
    place = f"checkpoint.resume={tmp_path / 'nowhere'}"
    assert refused(place).startswith(f"error: {place}: ")
    assert not (tmp_path / "run").exists()


def test_plain_diffusers_draws_the_validation_images_with_the_lora(
    command: Arguments, whole: Any, model: Path, workplace: Path
) -> None:
    config = compose_run(command(whole.folder)).config
    (samples,) = plan_validation(config, load_prompts(str(workplace / "val.txt")), STEPS)
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)

    def draw() -> np.ndarray:
        images = pipe(
            [s.prompt.text for s in samples],
            height=16,
            width=16,
            num_inference_steps=4,
            guidance_scale=1.0,
            max_sequence_length=8,
            generator=sample_generators([s.seed for s in samples]),
            output_type="pil",
        ).images
        return np.stack([np.asarray(image) for image in images])

    before, after = (np.load(whole.folder / f"validation/step_{step:06d}.npz")["pixels"] for step in (0, STEPS))
    assert (draw() == before).all()
    pipe.load_lora_weights(str(whole.checkpoint(STEPS) / "lora"))
    assert (draw() == after).all()
    assert (before != after).any()

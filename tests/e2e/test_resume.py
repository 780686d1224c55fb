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
from drills import more

from gerl.algorithms.planning import plan_validation
from gerl.commandline.composition import compose_run
from gerl.run.checkpoint import load_checkpoint, save_checkpoint
from gerl.trainer.main_flowgrpo import main
from gerl.utils.dataset import load_prompts
from gerl.utils.tensors import pack_tensors

Arguments = Callable[..., list[str]]
Resume = Callable[[Any], None]
STEPS = 5
EVERY_STEP = """
validation.every=1 checkpoint.every=1 checkpoint.keep=9 rollout.prompts_per_step=3 actor.lr=0.01 actor.warmup_steps=3
reward.trial=false
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


def rewrite(run: Any, state: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Replace entries of the state of step 3, by what functions make of them, and tensors; all hashes are right."""
    path = run.checkpoint(3)
    values = json.loads((path / "state.json").read_text())
    values |= {key: change(values[key]) for key, change in state.items()}
    files = {name: path.joinpath(name).read_bytes() for name in load_checkpoint(path).files}
    if tensors is not None:
        files["state.safetensors"] = pack_tensors(run.state(3) | tensors)
    save_checkpoint(path.parent, 3, files, values)


def test_three_steps_and_two_are_five(resume: Resume, stopped: Any, caplog: pytest.LogCaptureFixture) -> None:
    resume(stopped.folder)
    assert any("resumed" in m and str(stopped.checkpoint(3)) in m for m in caplog.messages)
    assert [row["step"] for row in stopped.metrics if "actor/gradient_cosine" in row] == [1]  # its settings are checked


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


@more
def test_a_run_killed_before_its_first_checkpoint_starts_anew_in_its_folder(resume: Resume, stopped: Any) -> None:
    shutil.rmtree(stopped.folder / "checkpoints")
    resume("auto")


@more
@pytest.mark.parametrize(
    ("call", "kept"),
    [(6, 1), (5, 1), (17 + 4, 5)],
    ids=["later rollout", "validation of a step", "last validation"],
)
def test_sigterm_leaves_a_checkpoint_and_auto_carries_on(
    command: Arguments, run_of: Any, whole: Any, tmp_path: Path, call: int, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path / "runs" / "first")
    settings = ("actor.lr_schedule=constant", "checkpoint.every=0")
    again = command(tmp_path / "runs" / "${now:%f}", *settings, "checkpoint.resume=auto", stop=call)
    assert main(command(run.folder, *settings, stop=call)) == 128 + signal.SIGTERM
    said = caplog.messages[-1]
    assert "SIGTERM" in said and str(run.checkpoint(kept)) in said and f"checkpoint.resume={run.folder}" in said
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == [f"step_{kept}"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # the handlers are gone
    assert main(again) == 0
    assert [path.name for path in (tmp_path / "runs").glob("*/")] == ["first"]  # it carried on where that one lies
    assert_same_end(run, whole)
    assert "resumed with changes" not in caplog.text


@more
@pytest.mark.parametrize(("call", "left"), [(1, False), (3, True)], ids=["first validation", "first rollout"])
def test_sigterm_before_the_first_step_ends_leaves_no_checkpoint(
    command: Arguments, run_of: Any, whole: Any, tmp_path: Path, call: int, left: bool
) -> None:
    run, second = run_of(tmp_path / "runs" / "first"), run_of(tmp_path / "runs" / "second")
    assert main(command(run.folder, stop=call)) == 128 + signal.SIGTERM
    assert run.folder.exists() == left and not (run.folder / "checkpoints").exists()
    assert main(command(second.folder, "checkpoint.resume=auto", stop=call)) == 0
    assert_same_end(second, whole)


@more
def test_a_run_stopped_before_and_after_it_logged_a_step_logs_it_once(
    command: Arguments, run_of: Any, whole: Any, tmp_path: Path
) -> None:
    run = run_of(tmp_path / "runs" / "run")
    again = ("checkpoint.every=0", "checkpoint.resume=auto")
    assert main(command(run.folder, *again, stop=5)) == 128 + signal.SIGTERM  # in the validation of step 1
    assert main(command(run.folder, *again, stop=7)) == 128 + signal.SIGTERM  # in step 2: no newer checkpoint
    assert main(command(run.folder, *again)) == 0
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
    folder = stopped.folder.parent
    assert main(command(folder / "new_${now:%f}", "checkpoint.resume=auto", trainer__steps=1)) == 0
    assert any(f"nothing to resume in {folder}" in message for message in caplog.messages)
    (new,) = folder.glob("new_*")
    assert [row["step"] for row in run_of(new).metrics] == [0, 1] and len(stopped.metrics) == 4


def test_a_folder_with_a_run_is_not_written_over(
    command: Arguments, stopped: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in stopped.folder.rglob("*") if path.is_file()}
    assert main(command(stopped.folder)) == 2
    assert f"hydra.run.dir={stopped.folder}" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in stopped.folder.rglob("*") if path.is_file()} == before


@pytest.fixture
def files(stopped: Any) -> Callable[[], dict[Path, bytes]]:
    return lambda: {path: path.read_bytes() for path in stopped.folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("key", ["data.train", "model.path", "model.lora_rank", "actor.betas=[0.5]"])
def test_a_change_that_cannot_be_made_leaves_the_run_as_it_was(
    command: Arguments, stopped: Any, files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    (tmp_path / "changed.txt").write_text("another prompt\n")
    value = {"data.train": tmp_path / "changed.txt", "model.path": tmp_path, "model.lora_rank": 7}.get(key)
    change, before = key if value is None else f"{key}={value}", files()
    assert main([*command(stopped.folder, f"checkpoint.resume={stopped.folder}"), change]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and change.partition("=")[0] in message
    assert files() == before


def test_other_weights_at_the_same_path_are_refused(
    command: Arguments, stopped: Any, files: Any, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved, pipe = tmp_path / "model", tiny.sd3()
    pipe.transformer.transformer_blocks[0].attn.to_q.weight.data += 0.01
    pipe.save_pretrained(moved)
    rewrite(stopped, {"settings": lambda s: {**s, "model": {**s["model"], "path": str(moved)}}})
    config = stopped.folder / "config.yaml"
    config.write_text(config.read_text().replace(str(model), str(moved)))
    before = files()
    assert main(command(stopped.folder, f"checkpoint.resume={stopped.folder}", model__path=moved)) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"error: {stopped.checkpoint(3)} ") and "the content of model.path has changed" in message
    assert files() == before


def test_nothing_to_resume_at_a_path(refused: Callable[..., str], tmp_path: Path) -> None:
    place = f"checkpoint.resume={tmp_path / 'nowhere'}"
    assert refused(place).startswith(f"error: {place}: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("named", "state", "shape"),
    [
        ("worker.lr_schedule.last_epoch", {"worker": lambda w: {**w, "lr_schedule": {"last_epoch": "3"}}}, None),
        ("algorithm.past", {"algorithm": lambda _: {"past": {"0": 1.0}}}, None),
        ("state.safetensors: lora/", {}, (1,)),
    ],
)
def test_a_checkpoint_of_something_else_is_a_sentence_and_leaves_the_run_as_it_was(
    command: Arguments,
    stopped: Any,
    files: Any,
    capsys: pytest.CaptureFixture[str],
    named: str,
    state: dict[str, Any],
    shape: tuple[int, ...] | None,
) -> None:
    name = next(name for name in stopped.state(3) if name.startswith("lora/"))
    rewrite(stopped, state, None if shape is None else {name: torch.zeros(shape)})
    before = files()
    assert main(command(stopped.folder, f"checkpoint.resume={stopped.folder}")) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"error: {stopped.checkpoint(3)} cannot be resumed: ") and named in message
    assert files() == before


@more
def test_the_bare_command_carries_on_the_same_run_and_a_change_takes_effect(
    command: Arguments, stopped: Any, caplog: pytest.LogCaptureFixture
) -> None:
    resume = f"checkpoint.resume={stopped.folder}"
    before = (stopped.folder / "config.yaml").read_text()
    assert main([resume, "trainer.steps=4"]) == 0  # no experiment, model, prompts or scorer
    assert stopped.column("actor/lr")[-2:] == [0.01, 0.01]  # after a warm-up of three optimizer steps
    assert main([resume, "trainer.steps=5", "actor.lr=0.005", "cluster.num_workers=1"]) == 0
    assert stopped.column("actor/lr")[-1] == 0.005
    changes = [message for message in caplog.messages if message.startswith("resumed with changes: ")]
    assert [change.partition(": ")[2] for change in changes] == [
        "trainer.steps 3 -> 4",
        "actor.lr 0.01 -> 0.005, cluster.num_workers null -> 1, trainer.steps 4 -> 5",
    ]
    assert (stopped.folder / "config.step_3.yaml").read_text() == before
    assert "steps: 4" in (stopped.folder / "config.step_4.yaml").read_text()
    assert main([resume, "actor.lr=0.01"]) == 2  # it is finished
    assert main([resume]) == 0


@more
def test_an_earlier_checkpoint_sets_the_later_ones_aside(resume: Resume, stopped: Any, run_of: Any) -> None:
    later = stopped.state(3)
    resume(stopped.checkpoint(1))
    aside = run_of(stopped.folder / "abandoned" / "after_step_1")
    assert all(torch.equal(value, later[name]) for name, value in aside.state(3).items())


@more
def test_two_runs_never_write_into_one_folder(
    command: Arguments, start: Any, run_of: Any, whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run")
    process = start(command(run.folder))
    while not (run.folder / "checkpoints").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)  # it is alive for as long as this takes
    try:
        for again in ("never", "auto", run.folder):
            other = command(run.folder, f"checkpoint.resume={again}", "actor.lr=0.05", "actor.ema_decay=0.5")
            assert main(other) == 2
            message = capsys.readouterr().err
            assert f"{run.folder}: its run is still alive (process {process.pid} on " in message
    finally:
        process.send_signal(signal.SIGCONT)
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert_same_end(run, whole)
    assert "lr: 0.01\n" in (run.folder / "config.yaml").read_text()


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
            generator=[torch.Generator().manual_seed(s.seed) for s in samples],
            output_type="pil",
        ).images
        return np.stack([np.asarray(image) for image in images])

    before, after = (np.load(whole.folder / f"validation/step_{step:06d}.npz")["pixels"] for step in (0, STEPS))
    assert (draw() == before).all()
    pipe.load_lora_weights(str(whole.checkpoint(STEPS) / "lora"))
    assert (draw() == after).all()
    assert (before != after).any()

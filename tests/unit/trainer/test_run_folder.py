"""Which run a command line carries on, and from where. No model is needed for it."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from resumed_runs import Made, opened, refused

from gerl.errors import CheckpointError, ConfigError
from gerl.run.checkpoint import RunLock
from gerl.trainer.run_folder import open_run

pytestmark = pytest.mark.usefixtures("here")


def test_auto_carries_on_the_run_that_was_written_last(made: Made) -> None:
    made("a")
    b = made("b", steps=(1, 2))
    made("c", steps=())
    folder = opened("checkpoint.resume=auto")
    assert folder.path.resolve() == b and folder.checkpoint is not None and folder.checkpoint.step == 2


def test_a_folder_that_is_named_is_the_only_one_that_is_looked_at(made: Made, tmp_path: Path) -> None:
    a, b = made("a"), made("b")
    assert opened("checkpoint.resume=auto", f"hydra.run.dir={a}").path == a
    new = opened("checkpoint.resume=auto", f"hydra.run.dir={b.parent / 'c'}")
    assert new.path == b.parent / "c" and new.checkpoint is None
    later = opened("checkpoint.resume=auto", f"hydra.run.dir={b.parent}/${{now:%Y}}")  # a new one every time
    assert later.path == b


def test_auto_starts_anew_where_there_is_nothing_to_carry_on(
    made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="gerl"):
        assert opened("checkpoint.resume=auto", "trainer.steps=7").checkpoint is None
        made("a")
        made("b", steps=(10,), finished=True)
        new = opened("checkpoint.resume=auto", "trainer.steps=7")
    assert new.checkpoint is None and new.composed.config.trainer.steps == 7
    assert len(caplog.messages) == 2 and all("nothing to resume in outputs/signs" in m for m in caplog.messages)
    assert opened("checkpoint.resume=auto", "trainer.steps=11").path.name == "b"  # more steps than it had


def test_a_run_or_a_checkpoint_by_path(made: Made) -> None:
    run = made("a", steps=(2, 3))
    for path, step in ((run, 3), (run / "checkpoints" / "step_2", 2), (run / "checkpoints" / "step_3", 3)):
        folder = opened(f"checkpoint.resume={path}")
        assert folder.path == run and folder.checkpoint is not None and folder.checkpoint.step == step
    assert opened("checkpoint.resume=outputs/signs/a").path == Path("outputs/signs/a")
    for nothing in ("nowhere", "outputs", "yes"):
        with pytest.raises(CheckpointError, match=rf"checkpoint\.resume={nothing}: .*auto or never"):
            open_run([f"checkpoint.resume={nothing}"])


@pytest.mark.parametrize("value", ["true", "null", "1", "[a]"])
def test_what_resume_may_be(value: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.resume=.*auto, never, or the folder"):
        open_run([f"checkpoint.resume={value}"])


@pytest.mark.parametrize("resume", ["auto", "{}/checkpoints/step_5"])
def test_a_run_that_is_alive_is_not_carried_on(made: Made, resume: str) -> None:
    made("old")
    run = made("alive", steps=(5,))
    lock = RunLock(run)
    lock.acquire()
    message = refused(run, f"checkpoint.resume={resume.format(run)}")
    assert "alive: its run is still alive (process " in message and "checkpoint.resume=never" in message
    lock.release()
    assert opened(f"checkpoint.resume={resume.format(run)}").path.resolve() == run


def test_auto_does_not_start_a_copy_of_a_run_that_has_no_checkpoint_yet(made: Made) -> None:
    made("old")
    run = made("alive", steps=())
    lock = RunLock(run)
    lock.acquire()
    assert "alive: its run is still alive" in refused(run, "checkpoint.resume=auto")
    lock.release()


def test_a_resume_is_refused_before_torch_is_imported(made: Made) -> None:
    run = made("a")
    code = (
        "import sys; from gerl.trainer.main_flowgrpo import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'ray', 'diffusers'} & set(sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, f"checkpoint.resume={run}"]
    found = subprocess.run([*command, "model.lora_rank=8"], capture_output=True, text=True, check=False)
    assert found.returncode == 2 and found.stderr.startswith("error: ") and "model.lora_rank 16 -> 8" in found.stderr
    assert subprocess.run([*command, "trainer.steps=5"], capture_output=True, check=False).returncode == 0

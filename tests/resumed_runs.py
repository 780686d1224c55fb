"""What the tests of carrying a run on share: runs without tensors, and what a command line makes of them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gerl.commandline.composition import Composed, compose_run
from gerl.config.changes import settings_of
from gerl.errors import ConfigError
from gerl.run.checkpoint import RunState, ScheduleState, WorkerState, save_checkpoint
from gerl.trainer.run_folder import RunFolder, identity, open_run

COMMAND = "experiment=signs algorithm=flow_grpo trainer.steps=10 actor.lr=1e-3 +reward.scorers.mine={path: mine.py}"
KEYS = COMMAND.split(" ", 4)
Made = Callable[..., Path]
WORKER = WorkerState(0, {"ema": 0}, True, ScheduleState(0))


@cache
def composition(*arguments: str) -> Composed:
    return compose_run(arguments)


def add(folder: Path, config: Any, step: int, finished: bool = False, **state: Any) -> None:
    """A checkpoint as a run of this configuration writes it, without tensors."""
    record = RunState(step, finished, worker=WORKER, identity=identity(config), settings=settings_of(config), **state)
    save_checkpoint(folder / "checkpoints", step, {}, record.to_json())


def opened(*arguments: str) -> RunFolder:
    folder = open_run(arguments)
    assert folder is not None
    folder.lock.release()
    return folder


def said(folder: RunFolder) -> list[str]:
    return [str(change) for change in folder.changes]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(folder: Path, *arguments: str, error: type[Exception] = ConfigError) -> str:
    """The sentence with which a resume is refused; nothing of the run may have changed."""
    before = content(folder)
    with pytest.raises(error) as caught:
        resumes = any(argument.startswith("checkpoint.resume=") for argument in arguments)
        open_run([*([] if resumes else [f"checkpoint.resume={folder}"]), *arguments])
    assert content(folder) == before
    message = str(caught.value)
    assert "\n" not in message
    return message

"""Runs in forked processes, which share the imports of this one and compute on one thread each."""

import logging
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol, TypeVar

import peft  # noqa: F401 - imported once, before the runs are forked
from diffusers import DDIMPipeline, StableDiffusion3Pipeline  # noqa: F401

from gerl.trainer import launch  # noqa: F401
from gerl.trainer.main_flowgrpo import main


class Job(Protocol):
    """A run to be made, in the folder `folder / name`."""

    @property
    def name(self) -> str: ...

    def arguments(self, folder: Path) -> list[str]:
        """Return the command line."""


J = TypeVar("J", bound=Job)


def train_by_gerl(job: Job, arguments: list[str]) -> int:
    """Run gerl's command line; returns the exit code."""
    return main(arguments)


def run_logged(train: Callable[[J, list[str]], int], job: J, arguments: list[str], log: Path) -> None:
    """Make a run in this process, with its output in `log`, and exit."""
    with log.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    logging.getLogger().handlers.clear()
    sys.exit(train(job, arguments))


def run_jobs(
    next_job: Callable[[], J | None],
    count: int,
    folder: Path,
    train: Callable[[J, list[str]], int] = train_by_gerl,
) -> Iterator[tuple[J, bool, str]]:
    """Make runs, `count` at a time, and yield those that ended with whether they succeeded and what they printed.

    `next_job` is asked for another whenever there is room; None: there is none as long as the others run. A run that
    was cut off earlier starts anew. train: makes a run from its command line and returns the exit code.
    """
    running: dict[BaseProcess, J] = {}
    forking = multiprocessing.get_context("fork")
    os.environ["OMP_NUM_THREADS"] = "1"
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        while len(running) < count and (job := next_job()) is not None:
            shutil.rmtree(folder / job.name, ignore_errors=True)
            given = (train, job, job.arguments(folder), folder / f"{job.name}.log")
            process = forking.Process(target=run_logged, args=given)
            process.start()
            running[process] = job
        if not running:
            return
        for process in [process for process in running if not process.is_alive()]:
            job = running.pop(process)
            yield job, process.exitcode == 0, (folder / f"{job.name}.log").read_text()
        time.sleep(0.2)

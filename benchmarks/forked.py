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
    """A run to be made, in the folder `folder / name`; `train(arguments)`, if it has that, makes it instead of gerl."""

    @property
    def name(self) -> str: ...

    def arguments(self, folder: Path) -> list[str]:
        """Return the command line."""


J = TypeVar("J", bound=Job)


def train(arguments: list[str], log: Path, run: Callable[[list[str]], int] = main) -> None:
    """Run a command line in this process, with its output in `log`."""
    with log.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    logging.getLogger().handlers.clear()
    sys.exit(run(arguments))


def run_jobs(next_job: Callable[[], J | None], count: int, folder: Path) -> Iterator[tuple[J, bool, str]]:
    """Make runs, `count` at a time, and yield those that ended with whether they succeeded and what they printed.

    `next_job` is asked for another whenever there is room; None: there is none as long as the others run. A run that
    was cut off earlier starts anew.
    """
    running: dict[BaseProcess, J] = {}
    forking = multiprocessing.get_context("fork")
    os.environ["OMP_NUM_THREADS"] = "1"
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        while len(running) < count and (job := next_job()) is not None:
            shutil.rmtree(folder / job.name, ignore_errors=True)
            given = (job.arguments(folder), folder / f"{job.name}.log", getattr(job, "train", main))
            process = forking.Process(target=train, args=given)
            process.start()
            running[process] = job
        if not running:
            return
        for process in [process for process in running if not process.is_alive()]:
            job = running.pop(process)
            yield job, process.exitcode == 0, (folder / f"{job.name}.log").read_text()
        time.sleep(0.2)

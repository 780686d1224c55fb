"""Lets tests act inside the workers of a run: put this folder on PYTHONPATH.

GERL_PRETENDED: workers compute on the simulated accelerator (`pretended.py`, whose folder is on PYTHONPATH too).
GERL_KILLS: a folder of signals. A file METHOD.NUMBER.STEP in it is for worker NUMBER: when it calls METHOD in trainer
step STEP (0: while it is loading), it removes the file and sends itself the signal named in it. METHOD of another role
of an episode is ROLE:METHOD.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "gerl.workers.worker"
ENTERED = contextlib.ExitStack()  # to the end of the process
METHODS = "join setup sample validate accumulate reduce_gradient step finish_step checkpoint call".split()


class Finder(importlib.abc.MetaPathFinder):
    """Acts when the module of the workers is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if "GERL_KILLS" in os.environ:
                for method in METHODS:
                    wrap(module.PolicyWorker, method)
            if "GERL_PRETENDED" in os.environ:
                import pretended

                ENTERED.enter_context(pretended.computing())

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def wrap(cls: Any, method: str) -> None:
    original = getattr(cls, method)

    @functools.wraps(original)
    def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if method == "sample":
            self.__dict__["at"] = args[0].samples[0].step
        name = args[0].__name__ if method == "call" else method
        if name == "in_role":
            name = f"{args[1]}:{args[2].__name__}"
        names = {name, "accumulate"} if name == "add_task_gradient" else {name}  # early or not: whichever comes first
        if "accumulate" in names and self.trajectories:
            self.__dict__["at"] = min(kept.task.samples[0].step for kept in self.trajectories.values())
        for wish in (Path(os.environ["GERL_KILLS"]) / f"{n}.{self.rank}.{self.__dict__.get('at', 0)}" for n in names):
            if wish.exists():
                number = int(wish.read_text())
                wish.unlink()
                os.kill(os.getpid(), number)
        return original(self, *args, **kwargs)

    setattr(cls, method, asked)


if {"GERL_KILLS", "GERL_PRETENDED"} & os.environ.keys():
    sys.meta_path.insert(0, Finder())

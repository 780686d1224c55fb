"""Lets workers of a run kill themselves, or stand still, where a test asks for it: put this folder on PYTHONPATH.

A file METHOD.NUMBER.STEP in the folder of the variable GERL_KILLS is for worker NUMBER: when it calls that method in
trainer step STEP (0: while it is loading), it removes the file and sends itself the signal that is in it.
"""

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
METHODS = "setup sample validate accumulate reduce_gradient step finish_step checkpoint call".split()


class Finder(importlib.abc.MetaPathFinder):
    """Wraps the methods of the workers when their module is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for method in METHODS:
                wrap(module.PolicyWorker, method)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def wrap(cls: Any, method: str) -> None:
    original = getattr(cls, method)

    @functools.wraps(original)
    def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if method == "sample":
            self.__dict__["at"] = args[0].samples[0].step
        elif method == "accumulate" and self.trajectories:
            self.__dict__["at"] = min(kept.task.samples[0].step for kept in self.trajectories.values())
        name = args[0].__name__ if method == "call" else method
        wish = Path(os.environ["GERL_KILLS"]) / f"{name}.{self.rank}.{self.__dict__.get('at', 0)}"
        if wish.exists():
            number = int(wish.read_text())
            wish.unlink()
            os.kill(os.getpid(), number)
        return original(self, *args, **kwargs)

    setattr(cls, method, asked)


if "GERL_KILLS" in os.environ:
    sys.meta_path.insert(0, Finder())

"""Modules that are imported when they are first used."""

import importlib
from functools import cache
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Stands for a module, which is imported when one of its names is read; from then on it has the same names."""

    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(self.__name__)
        vars(self).update(vars(module))
        return getattr(module, name)


@cache
def lazy(name: str) -> Any:
    """Return a stand-in for the module `name`.

    For modules that the configuration imports, such as algorithms: a wrong key is answered without torch. To be
    written as `if TYPE_CHECKING: import torch`, `else: torch = lazy("torch")`.
    """
    return LazyModule(name)

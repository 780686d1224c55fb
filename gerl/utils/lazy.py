"""Modules imported on first use."""

import importlib
from functools import cache
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Proxy of a module, which is imported when one of its names is first read."""

    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(self.__name__)
        vars(self).update(vars(module))
        return getattr(module, name)


@cache
def lazy(name: str) -> Any:
    """Return a proxy of the module `name`, so that a wrong key is reported without importing torch.

    Write `if TYPE_CHECKING: import torch`, `else: torch = lazy("torch")`.
    """
    return LazyModule(name)

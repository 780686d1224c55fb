"""Modules imported on first use."""

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Proxy of a module, imported when a name is first read, so that a wrong key is reported without importing torch.

    Write `if TYPE_CHECKING: import torch`, `else: torch = lazy("torch")`.
    """

    def __getattr__(self, name: str) -> Any:
        module = importlib.import_module(self.__name__)
        vars(self).update(vars(module))
        return getattr(module, name)


lazy: Callable[[str], Any] = cache(LazyModule)

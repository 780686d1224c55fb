"""The base model against LoRAs: `python -m gerl.evaluate`, or `gerl.evaluate(...)` in Python."""

import inspect
import sys
import types

from gerl.evaluate.command import evaluate


class _CallableModule(types.ModuleType):
    """Importing a module of a package binds its name there, so that `gerl.evaluate` can be nothing but this module."""

    __call__ = staticmethod(evaluate)
    __signature__ = inspect.signature(evaluate)


sys.modules[__name__].__class__ = _CallableModule

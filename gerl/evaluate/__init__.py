"""The base model against LoRAs: `python -m gerl.evaluate`, or `gerl.evaluate(...)` in Python."""

import inspect
import sys
import types

from gerl.evaluate.command import evaluate


class _CallableModule(types.ModuleType):
    # Importing any module of this package binds the package to the name `gerl.evaluate`, over a function of that name.
    # So the package itself has to be what is called; Python looks for `__call__` only in its class.
    __call__ = staticmethod(evaluate)
    __signature__ = inspect.signature(evaluate)


sys.modules[__name__].__class__ = _CallableModule

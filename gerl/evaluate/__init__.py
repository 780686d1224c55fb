"""The base model against LoRAs: `python -m gerl.evaluate`, or `gerl.evaluate(...)` in Python."""

import sys
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import inspect

    from gerl.evaluate.command import Evaluation


class _CallableModule(types.ModuleType):
    # Importing any module of this package binds the package to the name `gerl.evaluate`, over a function of that name.
    # So the package itself has to be what is called; Python looks for `__call__` only in its class. The function is
    # imported when it is needed: the command has to hear signals before it imports anything large.
    def __call__(self, *arguments: object, **keywords: object) -> "Evaluation":
        from gerl.evaluate.command import evaluate

        return evaluate(*arguments, **keywords)  # type: ignore[arg-type]

    @property
    def __signature__(self) -> "inspect.Signature":
        import inspect

        from gerl.evaluate.command import evaluate

        return inspect.signature(evaluate)


sys.modules[__name__].__class__ = _CallableModule

"""Packages that can be called, such as `gerl.score(...)`: they have the name of their main function."""

import importlib
import inspect
import sys
import types


class CallablePackage(types.ModuleType):
    """Importing a module of a package binds the package over a function of its name, so the package has to be callable.

    Python looks for `__call__` in the class. The function is imported when it is needed: a command has to hear signals
    before it imports anything large.
    """

    _place: str  # "module:function"

    def _function(self) -> types.FunctionType:
        module, name = self._place.split(":")
        found: types.FunctionType = getattr(importlib.import_module(module), name)
        return found

    def __call__(self, *arguments: object, **keywords: object) -> object:
        return self._function()(*arguments, **keywords)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function())


def make_callable(package: str, place: str) -> None:
    """Let `package`, a name in `sys.modules`, be called as the function `place`, "module:function"."""
    module = sys.modules[package]
    module.__class__ = CallablePackage
    module._place = place  # type: ignore[attr-defined]

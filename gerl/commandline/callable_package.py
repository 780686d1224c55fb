"""Callable packages such as `gerl.score(...)`, named like their main function."""

import inspect
import pkgutil
import sys
import types


class CallablePackage(types.ModuleType):
    """A package that can be called like the function of the same name (`gerl.score(...)`).

    Importing a submodule binds the package over that function, so the package itself must be callable. Python looks up
    `__call__` in the class. The function is imported on the first call: signals must be handled before large imports.
    """

    _place: str  # "module:function"

    def _function(self) -> types.FunctionType:
        function: types.FunctionType = pkgutil.resolve_name(self._place)
        return function

    def __call__(self, *arguments: object, **keywords: object) -> object:
        return self._function()(*arguments, **keywords)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function())


def make_callable(package: str, place: str) -> None:
    """Make `package` (a name in `sys.modules`) callable as the function `place` ("module:function")."""
    module = sys.modules[package]
    module.__class__ = CallablePackage
    module._place = place  # type: ignore[attr-defined]

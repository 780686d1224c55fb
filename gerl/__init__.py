"""gerl: reinforcement learning for diffusion models."""

from types import ModuleType

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """`gerl.evaluate`, which is loaded when it is first used: `import gerl` is quick."""
    if name == "evaluate":
        from importlib import import_module

        return import_module("gerl.evaluate")
    raise AttributeError(f"module 'gerl' has no attribute {name!r}")

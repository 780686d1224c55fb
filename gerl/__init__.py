"""gerl: reinforcement learning for diffusion models."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gerl.engine import record, replay

__all__ = ["__version__", "record", "replay"]
__version__ = "0.1.0"

# torchao, where it is installed, is imported by diffusers and says then that it was built for another torch or GPU
for _library in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"):
    logging.getLogger(_library).setLevel(logging.ERROR)


def __getattr__(name: str) -> object:
    """`gerl.record`, `gerl.replay` and `gerl.evaluate`, loaded when they are first used: `import gerl` is quick."""
    if name in ("record", "replay"):
        return getattr(import_module("gerl.engine"), name)
    if name == "evaluate":
        return import_module("gerl.evaluate")
    raise AttributeError(f"module 'gerl' has no attribute {name!r}")

"""gerl: reinforcement learning for diffusion models."""

import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from gerl.plugins import PACKAGES

if TYPE_CHECKING:
    from gerl.api.runs import Run
    from gerl.api.training import Step, Trainer, train
    from gerl.commandline.composition import load_config
    from gerl.engine import record, replay

__all__ = ["SIGNS", "Run", "Step", "Trainer", "__version__", "load_config", "record", "replay", "train"]
__version__ = "0.1.0"
SIGNS = str(Path(__file__).with_name("assets") / "signs")  # folder of the small SD3 that ships with gerl

# OpenMP reads it when torch is loaded: threads that spin while they wait make a busy machine ten times slower
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# torchao, where it is installed, is imported by diffusers and says then that it was built for another torch or GPU
for _library in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"):
    logging.getLogger(_library).setLevel(logging.ERROR)


PACKAGES["algorithms"] = "gerl.algorithms"

_PLACES = {
    "record": "gerl.engine", "replay": "gerl.engine", "Run": "gerl.api.runs", "Step": "gerl.api.training",
    "Trainer": "gerl.api.training", "train": "gerl.api.training", "load_config": "gerl.commandline.composition",
}  # fmt: skip
_CALLABLE = ("evaluate", "export", "preflight", "score")  # packages that are called


def __getattr__(name: str) -> object:
    """The names of the package, loaded when they are first used: `import gerl` is quick."""
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    if name in _CALLABLE:
        return import_module(f"gerl.{name}")
    raise AttributeError(f"module 'gerl' has no attribute {name!r}")

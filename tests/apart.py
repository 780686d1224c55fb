"""Packages for the tests that need them; `make` puts them apart, in folders that are on nobody's path but theirs.

Wherever scipy and torchao can be found, diffusers and transformers import them, which would cost each of the many
processes of the tests a tenth of its start. The trackers' packages ask for older versions of Pillow and protobuf than
the others have (and work with the newer ones), and transformers and accelerate look for them.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
from transformers.utils import is_scipy_available

FOLDER, TRACKERS = (Path(sys.prefix) / name for name in ("scipy", "trackers"))
PACKAGES = ("wandb", "trackio", "mlflow", "swanlab", "sqlalchemy")


def import_scipy() -> None:
    """From now on `import scipy` works in this process; skips the tests that need it where it is not installed."""
    if importlib.util.find_spec("scipy") is None:
        if not FOLDER.is_dir():
            pytest.skip("scipy is not installed; make installs it, and so does pip install 'gerl[geneval]'")
        sys.path.append(str(FOLDER))
        is_scipy_available.cache_clear()
    importlib.import_module("scipy")


def find_trackers(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone, the trackers' packages are found, in processes that start too; skips without them."""
    if not all(importlib.util.find_spec(name) for name in PACKAGES):
        if not TRACKERS.is_dir():
            pytest.skip("the trackers' packages are not installed; make does it, and so does pip install 'gerl[wandb]'")
        patch.syspath_prepend(str(TRACKERS))

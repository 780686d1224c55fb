"""open_clip for the tests of the scorer `hpsv2`, beside a torch that its torchvision was not built for.

open_clip imports torchvision, whose wheels on the package index are built for the CUDA torch. Beside a CPU torch their
C++ library cannot be loaded and `import torchvision` fails; transformers and diffusers import torchvision wherever it
is installed, and fail with it. So the development environment has none: `make` puts open_clip and what it needs in a
folder of their own (`FOLDER`), which is on nobody's path but here, and the two operators that torchvision expects even
without its library are declared here, without code: the scorer calls neither. Where open_clip can be imported without
all this (`gerl[clip]`, beside a torch that fits), that one is tested.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

FOLDER = Path(sys.prefix) / "open_clip"
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@contextmanager
def importable_open_clip() -> Iterator[None]:
    """Inside, `import open_clip` works; skips the tests that need it where it is not installed at all."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in _modules().items():
            patch.setitem(sys.modules, name, module)
        yield


@cache  # what torchvision registers outlives its modules: it can be imported once a process
def _modules() -> dict[str, ModuleType]:
    """The modules from `FOLDER`, taken out of sys.modules again: nobody else must find a torchvision there."""
    try:
        importlib.import_module("open_clip")
        return {}
    except ImportError:
        if not FOLDER.is_dir():
            pytest.skip("open_clip is not installed; make installs it, and so does pip install 'gerl[clip]'")
    # transformers remembers the answer, so that what open_clip imports of it is as it is for everybody else.
    assert not transformers.utils.is_torchvision_available()
    _declare_operators()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        importlib.import_module("open_clip")
    found = {path.name for path in FOLDER.iterdir()}
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in found}


@cache
def _declare_operators() -> torch.library.Library:
    """The library, which the cache keeps: the declarations would go with it."""
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(operator + SIGNATURE)
    return library

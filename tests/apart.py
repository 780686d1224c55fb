"""scipy for the tests that need it; `make` puts it apart, in a folder that is on nobody's path but theirs.

Wherever scipy can be found, diffusers and transformers import it, which would cost each of the many processes of the
tests a tenth of its start.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
from transformers.utils import is_scipy_available

FOLDER = Path(sys.prefix) / "scipy"


def import_scipy() -> None:
    """From now on `import scipy` works in this process; skips the tests that need it where it is not installed."""
    if importlib.util.find_spec("scipy") is None:
        if not FOLDER.is_dir():
            pytest.skip("scipy is not installed; make installs it, and so does pip install 'gerl[geneval]'")
        sys.path.append(str(FOLDER))
        is_scipy_available.cache_clear()
    importlib.import_module("scipy")

import gc
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from gerl.commandline.imports import WhenRead, importing

ROOT = Path(__file__).resolve().parents[3]
IMPORTS = """
from gerl.commandline.imports import WhenRead, importing

with importing():
    import diffusers
found = diffusers.utils.import_utils._package_map
assert isinstance(found, WhenRead) and found._found.cache_info().misses == 0, "it was read"
assert found["diffusers"] == ["diffusers"]
"""


def test_garbage_is_not_looked_for_meanwhile() -> None:
    with importing():
        assert not gc.isenabled()
        with importing():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_failed_import_leaves_all_as_it_was() -> None:
    find = importlib.metadata.packages_distributions
    with pytest.raises(ImportError), importing():
        assert importlib.metadata.packages_distributions is not find
        importlib.import_module("gerl.no_such_module")
    assert gc.isenabled() and importlib.metadata.packages_distributions is find


def test_distributions_are_those_that_are_installed() -> None:
    with importing():
        found = importlib.metadata.packages_distributions()
    assert isinstance(found, WhenRead) and "torch" in found and "no_such_package" not in found
    assert dict(found) == dict(importlib.metadata.packages_distributions())


def test_diffusers_looks_through_no_installed_package() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

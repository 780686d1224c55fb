import gc
import importlib

import pytest

from gerl.commandline.imports import importing


def test_garbage_is_not_looked_for_meanwhile() -> None:
    with importing():
        assert not gc.isenabled()
        with importing():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_failed_import_leaves_it_as_it_was() -> None:
    with pytest.raises(ImportError), importing():
        importlib.import_module("gerl.no_such_module")
    assert gc.isenabled()

"""The picture of the packages is that of the code."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("map_of_gerl", ROOT / "docs" / "map.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_up_to_date(drawing: ModuleType) -> None:
    drawn = drawing.draw()
    assert drawing.PICTURE.read_text(encoding="utf-8") == drawn, "the code has changed: run python docs/map.py"
    packages = {drawing.structure.package(path) for path in drawing.structure.files("gerl")} - {"__init__", "__main__"}
    for words in (*packages, "Rollout.generate", "Actor.accumulate", "imports algorithms, run, rewards"):
        assert f">{words}</text>" in drawn


@pytest.mark.parametrize("name", ["gerl.workers.actor:Actor.learn", "gerl.run.save:save_checkpoint", "gerl.nowhere:f"])
def test_a_stop_that_is_gone_is_named(drawing: ModuleType, name: str) -> None:
    with pytest.raises(LookupError, match=rf"{name}.*WAY"):
        drawing.draw((*drawing.WAY, ("gone", name)))


def test_only_imports_that_do_not_follow_from_others(drawing: ModuleType) -> None:
    found = drawing.imports()
    assert found["errors"] == set() and "errors" in found["config"]
    assert "errors" not in found["trainer"] and "workers" in found["trainer"]

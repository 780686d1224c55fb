"""Bounds of versions: their reasons, the table in benchmarks/README.md, and what gerl refuses with older ones."""

import re
import tomllib
from pathlib import Path

import pytest
from versions import bounds, read_table

from gerl.errors import VersionError
from gerl.utils import versions
from gerl.utils.versions import _numbers, has, require

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"^(TORCH|TRANSFORMERS) = \"([\d.]+)\"", re.MULTILINE)
REQUIRED = re.compile(r"\b(?:has|require)\(\s*\"(\w+)\", \"([\d.]+)\"")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


PINS = {
    name.lower().replace("_", "-"): pin
    for name, pin in re.findall(r"^([\w.-]+)==(\S+)$", read("constraints.txt"), re.M)
}


def test_the_table_has_the_bounds_and_the_versions_that_the_tests_use() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    names = [line.split(">=")[0] for line in project["dependencies"]]
    table = read_table(read("benchmarks/README.md"))
    assert table.pop("") == ["oldest", "pinned", "newest"] and table.pop("tests")
    assert f">={'.'.join(table.pop('Python')[0].split('.')[:2])}" == project["requires-python"]
    assert list(table) == names
    oldest, pinned, newest = ({name: cells[i] for name, cells in table.items()} for i in range(3))
    assert {name: _numbers(oldest[name]) for name in names} == {name: _numbers(bounds()[name]) for name in names}
    assert pinned == {name: PINS[name] for name in names}
    assert not [name for name in names if _numbers(newest[name]) < _numbers(pinned[name])]


def test_every_bound_has_its_reason() -> None:
    lines = read("pyproject.toml").split("\ndependencies = [\n")[1].split("\n]\n")[0].splitlines()
    assert not [
        line for line in lines if not re.fullmatch(r'    "[\w-]+>=[\d.]+",  # \w.*|    "[\w-]+>=[\d.]+",  # `.*', line)
    ]


def test_what_older_versions_lack_is_between_the_bound_and_the_pin() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "gerl").rglob("*.py")]
    uses = {use for text in texts for use in REQUIRED.findall(text)}
    uses |= {(name.lower(), version) for text in texts for name, version in NAMED.findall(text)}
    uses = {(name.replace("_", "-"), version) for name, version in uses}
    assert {name for name, _ in uses} >= {"diffusers", "torch", "transformers"}
    known = bounds()
    wrong = [f"{name} {version}" for name, version in uses if _numbers(version) > _numbers(PINS[name])]
    assert not wrong, "newer than the pinned ones"
    needless = [f"{name} {v}" for name, v in uses if name in known and _numbers(v) <= _numbers(known[name])]
    assert not needless, "every allowed version has it"


def test_an_older_version_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda package: "2.8.0+cu128")
    has.cache_clear()
    try:
        require("torch", "2.8", "it")
        with pytest.raises(
            VersionError, match=r"^cluster.context=2 needs torch 2\.13 or newer, and 2\.8\.0\+cu128 is ins"
        ):
            require("torch", "2.13", "cluster.context=2")
    finally:
        has.cache_clear()

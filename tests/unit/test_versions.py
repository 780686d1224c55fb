"""The table of versions in docs/install.md."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_table_has_the_required_versions_and_those_that_the_tests_use() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    floors = dict(line.split(">=") for line in project["dependencies"])
    pins = {name.lower(): pin for name, pin in re.findall(r"^([\w.-]+)==(\S+)$", read("constraints.txt"), re.M)}
    section = read("docs/install.md").split("\n## Versions\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", section, re.M)][2:]
    table = {name: (floor, pin) for name, floor, pin in rows}
    assert table.pop("Python")[0] == project["requires-python"].removeprefix(">=")
    assert table == {name: (floor, pins[name]) for name, floor in floors.items()}

"""The lowest versions that `pyproject.toml` allows, as constraints of pip: `python tests/lowest.py [EXTRA ...]`."""

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,.-]+\])?>=([\w.]+)")


def lowest(extras: list[str]) -> list[str]:
    """`name==version` for each dependency, and those of `extras`; raises `ValueError` for one without a lower bound."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    found = {}
    for requirement in wanted:
        match = REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise ValueError(f"{requirement}: expected name>=version")
        found[match[1].lower()] = match[2]
    return [f"{name}=={version}" for name, version in sorted(found.items())]


if __name__ == "__main__":
    sys.stdout.write("\n".join(lowest(sys.argv[1:])) + "\n")

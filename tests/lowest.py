"""The lowest versions that `pyproject.toml` allows, as requirements of pip: `python tests/lowest.py [EXTRA ...]`.

`make test-lowest` installs them and runs these files:
"""
# tests: tests/unit/commandline tests/unit/program tests/unit/test_config.py tests/unit/utils tests/unit/pages
# tests: tests/unit/engine/test_kernels.py tests/unit/engine/test_record.py tests/unit/algorithms/test_core_algos.py
# tests: tests/unit/run/test_tracking.py tests/unit/reward_models/scorers/test_ocr.py tests/unit/trainer/test_sweep.py
# tests: tests/unit/model/test_sharding.py tests/unit/model/test_quantization.py tests/unit/model/test_placement.py
# tests: tests/unit/data tests/unit/export tests/unit/api
# tests: tests/unit/workers/test_actor.py tests/unit/trainer/test_run_folder.py

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

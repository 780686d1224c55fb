"""The golden runs of `tests/net.py`, and how far a plain step of training goes through the code."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import net
import pytest
from drills import ALL
from newer import needs

TRACING = Path(net.__file__).with_name("tracing.py")
GOLDEN: dict[str, Any] = json.loads(net.GOLDEN.read_text())
# locally each preset in one process; Ray, ranks, kills and resumed runs have tests of their own
SHOWN = [case for case in net.CASES if ALL or case[1] == "local" or case == ("flow_grpo", "resumed")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return net.workplace(tmp_path_factory.mktemp("golden"))


@needs("transformers", "5.20", "draws other weights of text encoders than these runs had")
@pytest.mark.parametrize(("preset", "way"), SHOWN)
def test_a_run_has_the_recorded_numbers(
    preset: str, way: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in net.kills(tmp_path).items():
        monkeypatch.setenv(name, value)
    assert net.check(place, tmp_path / "run", preset, way, GOLDEN) == []


def test_a_plain_step_can_be_followed() -> None:
    """A newcomer reads these packages to see one step of training."""
    printed = subprocess.run([sys.executable, TRACING], capture_output=True, text=True, check=True).stdout
    found = json.loads(printed.splitlines()[-1])
    assert found["packages"] <= 13 and found["package_changes"] <= 180, printed

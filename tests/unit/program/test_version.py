"""The facts for a bug report are those of this machine, read without importing torch."""

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml

import gerl
from gerl.program import version as command
from gerl.program.commands import main
from gerl.program.version import cuda_of_torch

ROOT = Path(__file__).resolve().parents[3]
IMPORTED = "import sys; from gerl.program.version import facts; facts(); sys.exit('torch' in sys.modules)"


def test_versions_and_machine_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "format=yaml"]) == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["gerl"].startswith(gerl.__version__) and found["Python"].startswith(platform.python_version())
    for package in ("torch", "diffusers", "transformers", "peft", "ray", "hydra-core", "accelerate"):
        assert found[package] == version(package)
    assert found["CUDA of torch"] == (torch.version.cuda or "none")
    assert "cores" in found["CPU"] and found["system"] == platform.platform()
    assert (found["GPUs"] == "none") or torch.cuda.is_available()
    assert main(["version"]) == 0
    text = capsys.readouterr().out
    assert [line.split("  ")[0] for line in text.splitlines()] == list(found)


def test_torch_is_not_imported() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", IMPORTED], env=environment, check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0"),
        ('cuda = None\nhip = "6.4"\n', "ROCm 6.4"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", None),
    ],
)
def test_cuda_is_read_from_the_file_of_torch(
    text: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(text)
    spec = command.find_spec("json")
    assert spec is not None
    spec.origin = str(tmp_path / "torch" / "__init__.py")
    monkeypatch.setattr(command, "find_spec", lambda _: spec)
    assert cuda_of_torch() == expected

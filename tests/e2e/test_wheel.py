"""An installed wheel works from any folder, without the checkout."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check")
MAIN = """
import sys, gerl
from gerl.trainer.main_flowgrpo import main
print(gerl.__file__)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder)]
    run(*PIP, "wheel", *options, str(ROOT))
    (built,) = folder.iterdir()
    return built


def run(*arguments: str, **options: Any) -> str:
    """Run Python with arguments; returns what it wrote."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_what_a_run_needs_and_no_more(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    shipped = [f"gerl/configs/{path.relative_to(ROOT / 'configs')}" for path in (ROOT / "configs").rglob("*.yaml")]
    package = [path for path in (ROOT / "gerl").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert set(names) >= {*shipped, *(str(path.relative_to(ROOT)) for path in package)}
    assert {name.split("/")[0] for name in names} == {"gerl", f"gerl-{wheel.name.split('-')[1]}.dist-info"}
    assert wheel.stat().st_size < 20e6


def test_it_trains_from_another_folder(
    wheel: Path, arguments: Callable[..., list[str]], run_of: Any, tmp_path: Path
) -> None:
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    run(*PIP, "install", "--no-deps", "--no-index", "--quiet", "--target", str(target), str(wheel))
    elsewhere.mkdir()
    given = [a for a in arguments(Path("unused"), scorer="") if not a.startswith("hydra.run.dir")]
    given += ["reward.scorers.jpeg_compressibility.weight=1", "logger.report=true"]
    environment = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}  # before an editable install
    said = run("-P", "-c", MAIN, *given, cwd=elsewhere, env=environment)
    assert said.splitlines()[0] == str(target / "gerl" / "__init__.py")
    (folder,) = (elsewhere / "outputs" / "plain").iterdir()
    assert run_of(folder).column("actor/policy_version") == [2, 4]
    assert (folder / "report.html").exists() and (folder / "checkpoints" / "step_2" / "lora").is_dir()

"""An installed wheel works from any folder, without the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drills import more

import gerl

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
    package = [path for top in ("gerl", "reward_models") for path in (ROOT / top).rglob("*")]
    package = [path for path in package if path.is_file() and "__pycache__" not in path.parts]
    assert set(names) >= {*shipped, *(str(path.relative_to(ROOT)) for path in package)}
    assert {name.split("/")[0] for name in names} == {
        "gerl",
        "reward_models",
        f"gerl-{wheel.name.split('-')[1]}.dist-info",
    }
    assert {"gerl/py.typed", "reward_models/py.typed"} <= set(names)
    assert wheel.stat().st_size < 20e6


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in it."""
    target = tmp_path_factory.mktemp("site")
    run(*PIP, "install", "--no-deps", "--no-index", "--quiet", "--target", str(target), str(wheel))
    return target


@more
def test_it_trains_from_another_folder(
    installed: Path, arguments: Callable[..., list[str]], run_of: Any, tmp_path: Path
) -> None:
    target, elsewhere = installed, tmp_path / "elsewhere"
    elsewhere.mkdir()
    own = ("reward.scorers.jpeg_compressibility.weight=1", "logger.report=true")
    given = [a for a in arguments(Path("unused"), *own, scorer="") if not a.startswith("hydra.run.dir")]
    environment = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}  # before an editable install
    said = run("-P", "-c", MAIN, *given, cwd=elsewhere, env=environment)
    assert said.splitlines()[0] == str(target / "gerl" / "__init__.py")
    (folder,) = (elsewhere / "outputs" / "plain").iterdir()
    assert run_of(folder).column("actor/policy_version") == [2, 4]
    assert (folder / "report.html").exists() and (folder / "checkpoints" / "step_2" / "lora").is_dir()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "usage: gerl COMMAND"),
        ("train --cfg job experiment=sana_pickscore", "experiment: sana_pickscore"),
        ("recipes", "sana_pickscore  "),
        ("serve --help", "usage: gerl serve scorer=NAME"),
        ("version", f"gerl             {gerl.__version__}"),
    ],
)
def test_the_program_works_in_an_empty_folder(arguments: str, expected: str, installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [str(installed / "bin" / "gerl"), *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and expected in done.stdout, done.stderr
    if arguments == "version":
        assert f"folder           {installed / 'gerl'}" in done.stdout
    assert not list(tmp_path.iterdir())


def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    run("-m", "build", "--no-isolation", "--sdist", "--outdir", str(sources), str(ROOT))
    (archive,) = sources.iterdir()
    shutil.unpack_archive(archive, tmp_path)
    folder = tmp_path / archive.name.removesuffix(".tar.gz")
    for name in ("CITATION.cff", "CHANGELOG.md", "LICENSE", "constraints.txt", "docs", "examples", "tests"):
        assert (folder / name).exists()
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(tmp_path / "again")]
    run(*PIP, "wheel", *options, str(folder))
    (again,) = (tmp_path / "again").iterdir()
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())

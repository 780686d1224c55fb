"""An installed wheel works from any folder, without the checkout."""

import ast
import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drills import more
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from thin_environment import bare_environment

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


def metadata_of(wheel: Path) -> Any:
    (name,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(zipfile.ZipFile(wheel).read(name))


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


def test_a_package_index_shows_a_page_whose_links_lead_somewhere(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert urls == project["urls"] and metadata["Author"]
    page = metadata.get_payload()
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert len(targets) > 40 and all(target.startswith(("https://", "#")) for target in targets)
    home = urls["Homepage"]
    for kind in (f"{home}/blob/main/", "https://raw.githubusercontent.com/" + home.split("/", 3)[3] + "/main/"):
        files = [target.removeprefix(kind).split("#")[0] for target in targets if target.startswith(kind)]
        assert files and all((ROOT / file).exists() for file in files)
    assert f'repository-code: "{home}"' in (ROOT / "CITATION.cff").read_text()


def test_what_is_imported_is_declared(wheel: Path) -> None:
    declared = {canonicalize_name(Requirement(line).name) for line in metadata_of(wheel).get_all("Requires-Dist")}
    modules = {
        name.split(".")[0]
        for top in ("gerl", "reward_models")
        for file in (ROOT / top).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for name in imported(node)
    } - {*sys.stdlib_module_names, "gerl", "reward_models"}
    owners = importlib.metadata.packages_distributions()
    names = {module: {canonicalize_name(name) for name in owners.get(module, [module])} for module in modules}
    names |= {"open_clip": {"open-clip-torch"}, "mlflow": {"mlflow-skinny"}}  # which may not be installed here
    optional = {"IPython"}  # asked for only where it runs
    assert not {module for module, owner in names.items() if not owner & declared} - optional


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or "gerl"] if isinstance(node, ast.ImportFrom) and not node.level else []


@more
def test_it_trains_in_an_environment_of_what_it_declares(wheel: Path, tmp_path: Path) -> None:
    names = [line for line in metadata_of(wheel).get_all("Requires-Dist") if "extra ==" not in line]
    ocr = [line.partition(";")[0] for line in metadata_of(wheel).get_all("Requires-Dist") if "'ocr'" in line]
    python = bare_environment(tmp_path / "environment", *(Requirement(line).name for line in [*names, *ocr]))
    packages = next((tmp_path / "environment" / "lib").glob("*/site-packages"))
    run(*PIP, "install", "--no-deps", "--no-index", "--quiet", "--target", str(packages), str(wheel))
    folder = tmp_path / "folder"
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    keys = ("trainer.steps=1", "validation.max_prompts=4", "cluster.threads_per_worker=1", "logger.progress=false")
    command = [str(python), "-P", "-c", MAIN, *keys]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(packages / "gerl" / "__init__.py")
    (made,) = (folder / "outputs" / "signs").iterdir()
    assert (made / "report.html").exists() and (made / "checkpoints" / "step_1" / "lora").is_dir()


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

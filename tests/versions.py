"""Run tests with the oldest and the newest versions that pyproject.toml allows, each in an environment of its own.

    PYTHON tests/versions.py oldest|newest|pinned [ARGUMENTS OF PYTEST]
    .venv/bin/python tests/versions.py libraries

`oldest` and `newest` are new environments of PYTHON, `.venv-oldest` and `.venv-newest`; some GB, since PyPI's torch is
a CUDA build. `pinned` is the environment of PYTHON itself. The results go to benchmarks/README.md. `libraries`,
for CI: `PART` of the tests with the oldest `LIBRARIES`, and torch and Ray of `.venv`.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "README.md"
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,.-]+\])?>=([\w.]+)")
# what the tests import besides gerl's dependencies; packages that only check, build or document are left out
EXTRAS = ("parquet", "hub", "compbench", "ocr")
TOOLS = (
    "fastapi", "ftfy", "httpx", "hypothesis", "ipykernel", "markdown-it-py", "nbclient", "nbformat",
    "prometheus-client", "pytest", "pytest-xdist", "ray[serve]", "starlette", "uv", "uvicorn", "virtualenv",
)  # fmt: skip


# of CI: libraries of one file for all Pythons or of one per platform, and what they need of certain versions
LIBRARIES = (
    "accelerate", "diffusers", "hydra-core", "jinja2", "peft", "pydantic", "requests", "safetensors", "tqdm",
    "transformers",
)  # fmt: skip
COMPANIONS = ("ftfy", "huggingface-hub==0.34.0", "pydantic-core==2.27.0", "tokenizers==0.22.0")
PART = ("tests/unit/engine", "tests/unit/model", "tests/unit/workers", "tests/unit/api", "tests/e2e/test_python.py")


def bounds() -> dict[str, str]:
    """Return the lower bound of each dependency, and of those of `EXTRAS`; raises `ValueError` for one without."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    matches = {line: REQUIREMENT.fullmatch(line) for line in lines}
    if missing := [line for line, match in matches.items() if match is None]:
        raise ValueError(f"{missing[0]}: expected name>=version")
    return {match[1].lower(): match[2] for match in matches.values() if match is not None}


def pip(python: str | Path, *arguments: str) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    # a bound in the user's settings of pip would make other versions the newest
    subprocess.run(command, env={**os.environ, "PIP_CONSTRAINT": os.devnull}, check=True)


def install(which: str) -> Path:
    """Create or update the environment and return the path of its Python."""
    if which == "pinned":
        return Path(sys.executable)
    folder = ROOT / f".venv-{which}"
    python = folder / "bin" / "python"
    if not python.exists() or run(python, "--version") != run(sys.executable, "--version"):
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    sign, options = ("==", []) if which == "oldest" else (">=", ["--upgrade"])
    pip(python, *options, *(f"{name}{sign}{bound}" for name, bound in bounds().items()), *TOOLS)
    return python


def install_libraries() -> Path:
    """Install the oldest `LIBRARIES` into a folder without what they need, which `.venv` has."""
    folder = ROOT / ".venv-libraries" / "site-packages"
    wanted = [*(f"{name}=={bounds()[name]}" for name in LIBRARIES), *COMPANIONS]
    stamp = folder / "installed.txt"
    if not stamp.is_file() or stamp.read_text().splitlines() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        pip(sys.executable, "--no-deps", "--target", str(folder), *wanted)
        stamp.write_text("\n".join(wanted))
    return folder


def run(*command: str | Path) -> str:
    return subprocess.check_output(command, text=True).strip()


def test(python: Path, arguments: list[str], *paths: Path) -> tuple[str, bool]:
    """Run pytest with `paths` first on PYTHONPATH; return the numbers of tests by result, and whether none failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
        environ = {**os.environ, "PYTHONPATH": ":".join(map(str, [*paths, ROOT, ROOT / "tests"]))}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as on most machines: the libraries are imported many times
        done = subprocess.run([*command, f"--junitxml={report}", *arguments], cwd=ROOT, env=environ, check=False)
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, skipped, *bad = (
        sum(int(s.get(key, 0)) for s in suites) for key in ("tests", "skipped", "failures", "errors")
    )
    return f"{total - skipped - sum(bad)} passed, {skipped} skipped, {sum(bad)} failed", done.returncode == 0


def read_table(text: str) -> dict[str, list[str]]:
    """Return the cells of the page's table by the first of their row."""
    rows = re.findall(r"^\|(.*)\|$", text.split("\n## Versions\n")[1].split("\n## ")[0], re.MULTILINE)
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    return {name: rest for name, *rest in [cells[0], *cells[2:]]}


def write_column(which: str, values: dict[str, str]) -> None:
    """Write a column of the page's table."""
    text = PAGE.read_text(encoding="utf-8")
    table = read_table(text)
    column = table[""].index(which)
    for name, cells in table.items():
        if name:
            line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
            cells[column] = values[name]
            text = text.replace(line, f"| {' | '.join([name, *cells])} |")
    PAGE.write_text(text, encoding="utf-8")


def main(which: str, *arguments: str) -> int:
    """Install, test and write the column; part of the tests leaves the column as it is."""
    if which == "libraries":
        os.environ.pop("GERL_DRILLS", None)  # two cases of each test
        result, passed = test(Path(sys.executable), [*(arguments or PART)], install_libraries())
    else:
        python = install(which)
        result, passed = test(python, [*arguments])
    sys.stdout.write(f"{which}: {result}\n")
    if which != "libraries" and not any(not argument.startswith("-") for argument in arguments):
        names = list(read_table(PAGE.read_text(encoding="utf-8")))[2:-1]
        code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
        values = dict(zip(names, (v.split("+")[0] for v in run(python, "-c", code, *names).split()), strict=True))
        number = run(python, "-c", "import platform; print(platform.python_version())")
        write_column(which, {"Python": number, **values, "tests": result})
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

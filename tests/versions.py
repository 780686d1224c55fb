"""Run tests with the oldest and the newest versions that pyproject.toml allows, each in an environment of its own.

    python tests/versions.py oldest|newest [ARGUMENTS OF PYTEST]

The environment is `.venv-oldest` or `.venv-newest` with the Python that runs this file; it takes some GB, since PyPI's
torch is a CUDA build. The results go to the table in docs/install.md. `make test-versions` runs both.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "install.md"
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,.-]+\])?>=([\w.]+)")
# what the tests import besides gerl's dependencies; packages that only check, build or document are left out
EXTRAS = ("parquet", "hub", "compbench")
TOOLS = (
    "fastapi", "httpx", "hypothesis", "ipykernel", "markdown-it-py", "nbclient", "nbformat", "prometheus-client",
    "pytest", "pytest-xdist", "starlette", "uvicorn",
)  # fmt: skip


def bounds() -> dict[str, str]:
    """Return the lower bound of each dependency, and of those of `EXTRAS`; raises `ValueError` for one without."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    matches = {line: REQUIREMENT.fullmatch(line) for line in lines}
    if missing := [line for line, match in matches.items() if match is None]:
        raise ValueError(f"{missing[0]}: expected name>=version")
    return {match[1].lower(): match[2] for match in matches.values() if match is not None}


def install(which: str) -> Path:
    """Create or update the environment and return the path of its Python."""
    sign = "==" if which == "oldest" else ">="
    folder = ROOT / f".venv-{which}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    wanted = [f"{name}{sign}{bound}" for name, bound in bounds().items()]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted, *TOOLS]
    subprocess.run(pip if which == "oldest" else [*pip, "--upgrade"], check=True)
    return python


def test(python: Path, arguments: list[str]) -> str:
    """Run pytest, and return the numbers of tests by result."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        subprocess.run([*command, f"--junitxml={report}", *arguments], cwd=ROOT, env=environ, check=False)
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, skipped, *bad = (
        sum(int(s.get(key, 0)) for s in suites) for key in ("tests", "skipped", "failures", "errors")
    )
    return f"{total - skipped - sum(bad)} passed, {skipped} skipped, {sum(bad)} failed"


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


def main(which: str, *arguments: str) -> None:
    """Install, test and write the column; part of the tests leaves the column as it is."""
    python = install(which)
    names = list(read_table(PAGE.read_text(encoding="utf-8")))[2:-1]
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    versions = subprocess.check_output([python, "-c", code, *names], text=True).split()
    numbers = subprocess.check_output([python, "-c", "import platform; print(platform.python_version())"], text=True)
    result = test(python, [*arguments])
    sys.stdout.write(f"{which}: {result}\n")
    if not any(not argument.startswith("-") for argument in arguments):
        values = dict(zip(names, (version.split("+")[0] for version in versions), strict=True))
        write_column(which, {"Python": numbers.strip(), **values, "tests": result})


if __name__ == "__main__":
    main(*sys.argv[1:])

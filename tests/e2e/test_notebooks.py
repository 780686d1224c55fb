"""The notebooks in `examples` run from top to bottom in a real kernel, with smaller values of their parameters."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples"
SMALLER: dict[str, dict[str, object]] = {
    "first_run": {"steps": 2, "held_out": 4},
    "own_reward": {"steps": 1, "more_steps": 1, "images": 2},
    "own_pipeline": {"steps": 1, "images": 2},
    "look_at_a_run": {"steps": 1},
    "from_lora_to_comfyui": {"steps": 1},
}
DRAWN = {"first_run": 4, "own_reward": 2, "own_pipeline": 3, "look_at_a_run": 4, "from_lora_to_comfyui": 1}


def notebook(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def parameters(cells: list[Any]) -> int:
    (place,) = (i for i, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", []))
    return place


def test_every_notebook_is_run_here() -> None:
    assert sorted(SMALLER) == sorted(path.stem for path in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("name", SMALLER)
def test_a_notebook_is_stored_without_outputs_and_reads_as_a_diff(name: str) -> None:
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    found = notebook(name)
    nbformat.validate(found)
    for cell in found.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cell.id), "an id that says what the cell is for"
    assert text == nbformat.writes(found, indent=1) + "\n"
    assert set(SMALLER[name]) <= set(re.findall(r"^(\w+) = ", found.cells[parameters(found.cells)].source, re.M))


@pytest.fixture
def _kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel on one core (its run takes as many threads as there are cores), which leaves nothing at home."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if cores:
        os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})  # the kernel is born with it
    yield
    if cores:
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("name", SMALLER)
@pytest.mark.usefixtures("_kernel")
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    found = notebook(name)
    smaller = "\n".join(f"{key} = {value!r}" for key, value in SMALLER[name].items())
    found.cells.insert(parameters(found.cells) + 1, nbformat.v4.new_code_cell(smaller))
    place = tmp_path / "examples"
    place.mkdir()
    NotebookClient(found, timeout=600, resources={"metadata": {"path": str(place)}}).execute()
    outputs = {cell.id: cell.get("outputs", []) for cell in found.cells}
    pictures = [o for cell in outputs.values() for o in cell if has_picture(o)]
    assert len(pictures) >= DRAWN[name], "sheets, pictures, and the progress of a run"
    boards = [html for cell in outputs.values() for o in cell if "<progress" in (html := html_of(o))]
    total = SMALLER[name]["steps"]
    assert boards and all(f"<progress max='{total}' value='{total}'" in html for html in boards), "updated to the end"
    assert all("<img src='data:image/" in html and "<svg" in html for html in boards), "the newest sheet, and a curve"
    for cell in outputs.values():
        said = "".join(o.text for o in cell if o.output_type == "stream")
        assert "Traceback" not in said and not re.search(r"(step/s|s/step)[],]", said), "the bar of a terminal"


def html_of(output: Any) -> str:
    return str(output.get("data", {}).get("text/html", ""))


def has_picture(output: Any) -> bool:
    return "image/png" in output.get("data", {}) or "<img" in html_of(output)


@pytest.mark.parametrize("name", SMALLER)
def test_the_links_of_a_notebook_lead_to_files(name: str) -> None:
    texts = [cell.source for cell in notebook(name).cells if cell.cell_type == "markdown"]
    links = [link for text in texts for link in re.findall(r"\]\(([^)#]+)", text)]
    named = [path for text in texts for path in re.findall(r"`((?:docs|examples|gerl)/[\w./]+)`", text)]
    assert all((FOLDER / link).is_file() for link in links) and all((ROOT / path).is_file() for path in named)

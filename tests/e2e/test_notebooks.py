"""The notebooks in `examples` run from top to bottom in a real kernel, with smaller values of their parameters."""

import os
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import drills
import nbformat
import pytest
from drills import more
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


RUN = [name for name in SMALLER if drills.sampled(name, ("first_run",))]


def notebook(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def parameters(cells: list[Any]) -> int:
    (place,) = (i for i, cell in enumerate(cells) if "parameters" in cell.metadata.get("tags", []))
    return place


def test_every_notebook_is_run_here() -> None:
    assert sorted(SMALLER) == sorted(path.stem for path in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("name", SMALLER)
def test_a_notebook_is_stored_with_the_outputs_of_its_cells(name: str) -> None:
    """As `python docs/notebooks.py` writes them: numbered from 1, with pictures, without paths or times."""
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    found = notebook(name)
    nbformat.validate(found)
    code = [cell for cell in found.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert sum(map(has_picture, outputs)) >= DRAWN[name] and "error" not in {o.output_type for o in outputs}
    said = "".join(o.text for o in outputs if o.output_type == "stream")
    assert not re.search(r"\d{4}-\d\d-\d\d_\d\d|/tmp/|/home/|Warning", said)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", cell.id) for cell in found.cells), "an id that says what it is for"
    assert text == nbformat.writes(found, indent=1) + "\n" and len(text) < 1_500_000
    assert set(SMALLER[name]) <= set(re.findall(r"^(\w+) = ", found.cells[parameters(found.cells)].source, re.M))


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The cells of each notebook, with their outputs.

    All run in one kernel, which imports the libraries once and forgets every name between two of them, each cell twice,
    as a reader may run it; on one core, as a run in it takes as many threads as there are cores, and nothing is left at
    home.
    """
    place, whole, last = tmp_path_factory.mktemp("notebooks"), nbformat.v4.new_notebook(), {}
    for name in RUN:
        (place / name / "examples").mkdir(parents=True)
        cells = notebook(name).cells
        for cell in cells:
            cell.update({"outputs": [], "execution_count": None} if cell.cell_type == "code" else {})
        smaller = "\n".join(f"{key} = {value!r}" for key, value in SMALLER[name].items())
        cells.insert(parameters(cells) + 1, nbformat.v4.new_code_cell(smaller))
        anew = nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {place / name / 'examples'}")
        whole.cells += [anew, *(each for cell in cells for each in (deepcopy(cell), cell))]
        last[name] = cells
    own = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        for variable in own:
            patch.setenv(variable, str(place / variable))
        if cores:
            os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})  # the kernel is born with it
        try:
            NotebookClient(whole, timeout=600, resources={"metadata": {"path": str(place)}}).execute()
        finally:
            if cores:
                os.sched_setaffinity(0, cores)
    return last


@more
@pytest.mark.parametrize("name", RUN)
def test_a_notebook_runs(name: str, executed: dict[str, list[Any]]) -> None:
    outputs = {cell.id: cell.get("outputs", []) for cell in executed[name]}
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

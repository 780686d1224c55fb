"""Execute the notebooks of `examples` and store their outputs in them: `python docs/notebooks.py [NAME ...]`.

Times of execution are left out, and so is what a terminal would show (progress bars, warnings): what is stored changes
only where numbers or pictures do.
"""

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples"


def execute(path: Path) -> Any:
    """The notebook with the outputs of its cells, run in a folder of its own; nothing is written into `examples`."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=3600, resources={"metadata": {"path": folder}})
        client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
        where = re.escape(str(Path(folder).resolve()))
    for number, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), start=1):
        cell.metadata.pop("execution", None)
        cell.execution_count = number
        kept = [o for o in cell.outputs if not (o.output_type == "stream" and o.name == "stderr")]
        cell.outputs = [_plain(output, where, number) for output in kept]
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    return notebook


def _plain(output: Any, where: str, number: int) -> Any:
    """An output without the folder it was made in, the run's time and the cell's number in its kernel."""
    if output.output_type == "execute_result":
        output.execution_count = number
    if "image/png" in output.get("data", {}):
        output.data.pop("image/jpeg", None)  # the same picture
    holder, keys = (output, ["text"]) if output.output_type == "stream" else (output.data, list(output.data))
    for key in keys:
        if isinstance(holder[key], str) and not key.startswith("image/"):
            text = re.sub(rf"{where}/?", "", holder[key])
            holder[key] = re.sub(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(-\d+)?", "TIME", text)
    return output


def main(names: list[str]) -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        if not names or path.stem in names:
            path.write_text(nbformat.writes(execute(path), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Wrong inputs of every command: one sentence that names the key and the remedy, before anything is loaded or written.

The table is `tests/wrong_inputs.py`. It is run in this process; a few of its rows also as real commands.
"""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from safetensors.numpy import save_file
from tables import each
from wrong_files import FILES, LORAS
from wrong_inputs import TABLE
from wrong_rows import Row

from gerl.web.studio.drafts import Draft, check

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "train": "gerl.trainer.main_flowgrpo",
    "small": "gerl.trainer.main_flowgrpo",
    "score": "gerl.score.command",
    "evaluate": "gerl.evaluate.command",
    "export": "gerl.export.command",
    "preflight": "gerl.preflight.arguments",
    "replay": "gerl.trainer.replay",
    "verify": "gerl.verify.command",
    "report": "gerl.run.report",
    "watch": "gerl.web.watch",
    "studio": "gerl.web.studio.command",
    "serve": "reward_models.serve",
    "vote": "reward_models.votes.command",
    "gerl": "gerl.program.commands",
}


@pytest.fixture(scope="session")
def finished(train: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return Path(train(folder).folder)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name, tensors in LORAS.items():
        save_file({key: np.ones(shape, np.float32) for key, shape in tensors.items()}, folder / name)
    for name in ("images/0.png", "images/1.png", "images/2.png", "damaged/0.png"):
        Image.new("RGB", (16, 16), "grey").save(folder / name)
    pyarrow.parquet.write_table(pyarrow.table({"caption": ["a"]}), folder / "captions.parquet")
    return folder


@pytest.fixture
def here(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the files of the table."""
    folder = tmp_path / "here"
    shutil.copytree(files, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def fill(finished: Path, model: Path, tmp_path: Path) -> Callable[[str], str]:
    """Replace the words in capitals of a row by the folders that they stand for, which are made when they are named."""

    def folder(match: re.Match[str]) -> str:
        if match[0] in ("RUN", "MODEL"):
            return str(finished if match[0] == "RUN" else model)
        copy = tmp_path / match[0].lower()
        if not copy.exists():
            shutil.copytree(finished, copy)
        if match[0] == "BARE":
            (copy / "config.yaml").unlink()
        return str(copy)

    return lambda text: re.sub(r"\b(RUN|COPY|BARE|MODEL)\b", folder, text)


def snapshot(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize("row", TABLE)
def test_one_sentence_names_the_key_and_the_remedy(
    row: Row,
    here: Path,
    fill: Callable[[str], str],
    arguments: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    command, *given = shlex.split(fill(row.line))
    if command == "small":
        own = {argument.partition("=")[0] for argument in given}
        base = arguments(here / "run", scorer="" if "reward.scorers" in own else "bright.py", trainer__steps=1)
        given = [*(a for a in base if a.partition("=")[0] not in own), *given]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, value in row.environment.items():
        monkeypatch.setenv(name, value)
    if not row.loads:
        monkeypatch.setattr("gerl.cluster.Cluster.__enter__", lambda _: pytest.fail("a worker was started"))
    before = snapshot(here)
    with caplog.at_level("INFO", logger="gerl"):
        code = importlib.import_module(MODULES[command]).main(given)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error:", "Traceback"))]
    named = fill(row.named)
    if row.works:
        assert code == (row.code or 0) and errors == [] and re.search(named, caplog.text), (code, errors)
        return
    assert (code != 0 if row.code is None else code == row.code) and len(errors) == 1, (code, errors)
    _, found, rest = errors[0].partition(named)
    remedy = fill(row.remedy)
    assert errors[0].startswith("error: ") and found and re.search(remedy, rest), errors
    assert row.loads or snapshot(here) == before


def test_every_row_has_a_name_of_its_own() -> None:
    names = [parameter.id for parameter in TABLE]
    assert len(set(names)) == len(names) > 153


SHOWN = {"dashes and a space", "unknown experiment", "missing prompts", "address as model", "score nothing in quotes"}


@pytest.mark.parametrize("row", [parameter for parameter in TABLE if parameter.id in SHOWN])
def test_as_a_real_command(row: Row, here: Path) -> None:
    """A shell shows that sentence and nothing else."""
    command, *given = shlex.split(row.line)
    module = MODULES[command].removesuffix(".command")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-m", module, *given], env=environment, capture_output=True, text=True)
    assert ran.returncode == row.code and ran.stdout == ""
    assert ran.stderr.startswith("error: ") and row.named in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr


# --- The same on the page of the studio, where keys are typed into fields


def is_typed(row: Row) -> bool:
    """Whether a row is a run whose arguments are keys with values, each once, without settings of Hydra."""
    command, *given = shlex.split(row.line)
    keys = [argument.partition("=")[0] for argument in given]
    plain = all(re.match(r"[A-Za-z]\S*=\S|[A-Za-z]\S*=.*\S", argument) for argument in given)
    own = not any(key.startswith("hydra") or key in ("out", "checkpoint.resume") for key in keys)
    # found when a worker starts, or by a network
    later = "cluster.device=cuda" in given or "hf:" in row.line or "cluster.device=cpu" in given
    return command == "train" and plain and own and len(set(keys)) == len(keys) and not (later or row.works)


TYPED = [parameter for parameter in TABLE if is_typed(parameter.values[0])]


@each("row", [parameter.values[0] for parameter in TYPED], every=20)
def test_the_studio_answers_as_the_command_line_does(row: Row, here: Path, fill: Callable[[str], str]) -> None:
    keys = dict(argument.split("=", 1) for argument in shlex.split(fill(row.line))[1:])
    sentences = [problem.sentence for problem in check(Draft("draft", keys), here / "outputs").problems]
    assert any(fill(row.named) in said and re.search(row.remedy, said) for said in sentences), sentences
    assert not (here / "outputs" / "draft").exists()


def test_most_rows_of_runs_are_tried_in_the_studio() -> None:
    assert len(TYPED) > 150

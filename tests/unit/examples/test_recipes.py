"""The scripts of `examples/recipes`: one a recipe, sound, and true to the head of the recipe."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dry_run import ROOT, TRAIN, DryRun

from gerl.commandline.composition import compose_run
from gerl.commandline.experiments import experiments

FOLDER = ROOT / "examples" / "recipes"
RECIPES = [name for name in experiments() if name not in ("plain", "signs")]


def comment(path: Path) -> str:
    """The comment at the top of a file, in one line."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    top = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    return " ".join(" ".join(line.lstrip("#") for line in top).split())


def head(name: str) -> str:
    return comment(ROOT / "configs" / "experiment" / f"{name}.yaml")


def one_gpu(name: str) -> list[str]:
    """The keys that the head of a recipe names for one GPU."""
    (said,) = re.findall(r"1 GPU: (.*?) \(", head(name))
    return str(said).split()


def test_every_recipe_has_a_script() -> None:
    assert sorted(RECIPES) == sorted(path.stem for path in FOLDER.glob("*"))


def test_scripts_are_sound() -> None:
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck (of the extra dev) is not installed")
    done = subprocess.run([shellcheck, *FOLDER.glob("*.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", RECIPES)
def test_a_script_trains_its_recipe(name: str, tmp_path: Path) -> None:
    dry, script = DryRun(tmp_path, 1), str(FOLDER / f"{name}.sh")
    dry.run(script, "trainer.steps=7", "sampling.call={a: 1}")
    dry.run(script, GPUS="1", TRAIN="a file.txt", HELD_OUT="null")
    eight, one = (call.arguments for call in dry.calls("python"))
    rows, begin = "jsonl" if "geneval" in name else "txt", [*TRAIN[1:], f"experiment={name}"]
    data = [f"data.train=my_prompts.{rows}", f"validation.data=my_held_out.{rows}"]
    assert eight == [*begin, *data, "trainer.steps=7", "sampling.call={a: 1}"]
    assert one == [*begin, "data.train=a file.txt", "validation.data=null", *one_gpu(name)]
    composed = compose_run(eight[2:])
    assert (composed.experiment, composed.config.trainer.steps) == (name, 7)
    assert composed.config.data.train == f"my_prompts.{rows}", "which the head of a recipe names, where it names one"
    assert compose_run(one[2:]).config.validation.data is None
    said = comment(FOLDER / f"{name}.sh")
    assert f"my_prompts.{rows} and my_held_out.{rows}" in said or f"in my_prompts.{rows}" in said
    assert "geneval" not in composed.config.reward.scorers or "gerl[geneval]" in said


@pytest.mark.parametrize("name", RECIPES)
def test_a_script_says_what_its_recipe_says(name: str) -> None:
    said = comment(FOLDER / f"{name}.sh")
    (memory,) = re.findall(r"Memory of a GPU, computed, not measured: .*?come on top\.", head(name))
    (eight,) = re.findall(r"8 GPUs: (.*?)\. 1 GPU", head(name))
    assert memory in said and f"GPUs: 8, {eight}. " in said
    assert f"GPUS=1 bash examples/recipes/{name}.sh" in said


def test_the_page_has_a_row_for_every_recipe() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[(\w+)\]\(\.\./examples/recipes/\w+\.sh\) \| (.*) \|$", page, re.M))
    assert sorted(rows) == sorted(RECIPES)
    for name, row in rows.items():
        _, memory, keys = row.split(" | ")
        assert f"about {memory} at the peak" in head(name) and keys == f"`{' '.join(one_gpu(name))}`"

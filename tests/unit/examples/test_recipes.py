"""The scripts of `examples/recipes`: one a recipe, sound, and true to the head of the recipe."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dry_run import ROOT, TRAIN, DryRun

from gerl.commandline.composition import compose_run, experiments
from gerl.config.blocks import sources

FOLDER = ROOT / "examples" / "recipes"
RECIPES = [name for name in experiments() if name not in ("plain", "signs")]


@pytest.fixture(scope="module")
def sizing() -> Any:
    """benchmarks/sizing.py."""
    spec = importlib.util.spec_from_file_location("sizing_of_recipes", ROOT / "benchmarks" / "sizing.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    assert sorted([*RECIPES, "common"]) == sorted(path.stem for path in FOLDER.glob("*"))


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
    begin, said = [*TRAIN[1:], f"experiment={name}"], comment(FOLDER / f"{name}.sh")
    edits = name.endswith("_geneval")  # of pictures that a user has
    data = ["data.train=my_prompts.jsonl", "validation.data=my_held_out.jsonl"] if edits else []
    assert eight == [*begin, *data, "trainer.steps=7", "sampling.call={a: 1}"]
    assert one == [*begin, "data.train=a file.txt", "validation.data=null", *one_gpu(name)]
    composed = compose_run(eight[2:])
    assert (composed.experiment, composed.config.trainer.steps) == (name, 7)
    assert compose_run(one[2:]).config.validation.data is None
    assert "my_prompts.jsonl and my_held_out.jsonl" in said if edits else "TRAIN=FILE" in said
    assert not edits or "gerl[geneval]" in said


@pytest.mark.parametrize("name", RECIPES)
def test_prompts_exist_without_work(name: str) -> None:
    """Lists of gerl's or data sets of the hub; only for edits the pictures are the user's."""
    config, said = compose_run([f"experiment={name}"]).config, comment(FOLDER / f"{name}.sh")
    for key, given in (("data.train", config.data.train), ("validation.data", config.validation.data)):
        for source in sources(given, key):
            assert source.on_hub or source.path in ("signs_train", "signs_val") or name.endswith("_geneval")
            assert not source.on_hub or (source.prompt_key and "gerl[hub]" in said)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("gpu", ["24gb", "80gb"])
def test_a_gpu_of_a_size_gets_the_keys_that_were_computed(name: str, gpu: str, tmp_path: Path, sizing: Any) -> None:
    dry, script = DryRun(tmp_path, 1), str(FOLDER / f"{name}.sh")
    keys = sizing.one_gpu_keys(name, f"one {gpu.removesuffix('gb')} GB GPU")
    process = dry.start(script, GPU=gpu)
    said, _ = process.communicate(timeout=60)
    assert (f"GPU={gpu}" in comment(FOLDER / f"{name}.sh")) == (keys is not None)
    if keys is None:
        assert process.returncode == 2 and "no GPU of 24 GB" in said and dry.nothing()
        return
    (call,) = dry.calls("python")
    given = [key for key in call.arguments[3:] if not key.startswith(("data.", "validation.data"))]
    assert given == keys and given[: len(one_gpu(name))] == one_gpu(name)
    assert compose_run(call.arguments[2:])


def test_a_gpu_of_an_unknown_size_is_refused(tmp_path: Path) -> None:
    dry = DryRun(tmp_path, 1)
    process = dry.start(str(FOLDER / "sd35_medium_ocr.sh"), GPU="16gb")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "24gb or 80gb" in said and dry.nothing()


@pytest.mark.parametrize("name", RECIPES)
def test_a_script_says_what_its_recipe_says(name: str) -> None:
    said = comment(FOLDER / f"{name}.sh")
    (memory,) = re.findall(r"Memory of a GPU, computed, not measured: .*?come on top\.", head(name))
    (eight,) = re.findall(r"8 GPUs: (.*?)\. 1 GPU", head(name))
    assert memory in said and f"GPUs: 8, {eight}. " in said
    assert f"GPUS=1 bash examples/recipes/{name}.sh" in said


def test_the_page_has_rows_for_every_recipe(sizing: Any) -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[`(\w+)`\]\(\.\./examples/recipes/(\w+)\.sh\) \| (.*) \|$", page, re.M)
    assert [name for name, *_ in rows] == sorted(RECIPES)
    for name, script, row in rows:
        composed = compose_run([f"experiment={name}"])
        model, algorithm, reward, prompts = row.split(" | ")
        assert name == script and composed.config.model.path in model and algorithm == f"`{composed.preset}`"
        assert set(reward.split(", ")) == set(composed.config.reward.scorers)
        (source,) = sources(composed.config.data.train, "data.train")
        assert sizing.PROMPTS[source.path] == prompts


def test_the_page_names_the_prompts_of_the_recipes() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").partition("## Prompts")[2]
    for name in RECIPES:
        config = compose_run([f"experiment={name}"]).config
        for key, given in (("data.train", config.data.train), ("validation.data", config.validation.data)):
            paths = [source.path.removeprefix("hf:").partition("[")[0] for source in sources(given, key)]
            assert not [path for path in paths if path not in page], name


def test_the_page_on_memory_has_the_peak_of_every_recipe() -> None:
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8").partition("## Eight GPUs")[0]
    peaks = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \| (\d+) \|", page, re.M))
    assert sorted(peaks) == sorted(RECIPES)
    for name, peak in peaks.items():
        assert f"about {peak} GB at the peak" in head(name)


def test_the_rows_of_edits_on_the_page_are_those_of_the_recipes() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^```json\n(.*?)^```", page, re.M | re.S)
    shown = " ".join(row.split())
    assert json.loads(shown) and all(shown in head(name) for name in RECIPES if "geneval" in name)

"""`python -m gerl.evaluate`: the run's own validation to the bit, other LoRAs beside it, and one sentence otherwise."""

import base64
import csv
import inspect
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from PIL import Image

import gerl
from gerl.errors import RewardError
from gerl.evaluate.command import main, parse
from gerl.evaluate.comparison import ScoredRow
from gerl.evaluate.loras import BASE
from gerl.model.paths import SHIPPED
from gerl.run.validation import load_validation

# The score is the mean brightness; `fails` makes it fail for a prompt, `kill` ends the process when that comes.
SCORER = """
import os, signal
import numpy as np

def compute_score(images, prompts, metadata, fails=None, kill=None):
    if kill in prompts:
        os.kill(os.getpid(), signal.SIGTERM)
    return [float("nan") if p == fails else float(np.asarray(i).mean()) / 255 for i, p in zip(images, prompts)]
"""

LEVELS = 5e-5  # of a mean brightness: ten levels of pixels, which a processor's kernels may round otherwise

SMALL = [f"sampling.{key}" for key in ("height=16", "width=16", "num_inference_steps=2")]
SMALL += ["cluster.launcher=local", "cluster.threads_per_worker=1", "logger.progress=false"]


@pytest.fixture(scope="module")
def run(train: Callable[..., Any], workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of two steps that validates and saves after each, and learns fast."""
    validation = ("validation.every=1", "validation.micro_batch_size=3", "validation.num_inference_steps=3")
    keys = (f"validation.data={workplace / 'val.txt'}", *validation, "checkpoint.every=1", "actor.lr=0.05")
    return train(tmp_path_factory.mktemp("evaluated") / "run", *keys)


@pytest.fixture
def scorer(tmp_path: Path) -> Callable[..., list[str]]:
    """Keys that put a scorer of these tests in the place of the run's."""
    (tmp_path / "mine.py").write_text(SCORER)
    keys = ["~reward.scorers.bright", f"reward.scorers.mine.path={tmp_path / 'mine.py'}", "reward.retries=0"]
    return lambda *kwargs: [*keys, f"reward.scorers.mine.kwargs={{{', '.join(kwargs)}}}"]


def scores(out: Path) -> list[dict[str, str]]:
    with (out / "scores.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def of(rows: list[ScoredRow], variant: str, index: int = 0) -> list[ScoredRow]:
    return [row for row in rows if row.variant == variant and row.index == index]


def pixels(row: ScoredRow) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(row.picture.partition(",")[2]))))


def test_it_reproduces_the_validation_of_the_run(run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gerl"):
        steps = ",".join(str(run.checkpoint(step) / "lora") for step in (1, 2))
        assert main([f"lora={steps}", f"out={tmp_path}", "trust=true"]) == 0
    assert f"configuration: {run.folder / 'config.yaml'}; 4 prompts" in caplog.text
    assert str(tmp_path / "gallery.html") in caplog.text
    found, summary = scores(tmp_path), json.loads((tmp_path / "summary.json").read_text())
    assert [row["variant"] for row in found[:9:3]] == [BASE, "step_1", "step_2"]  # micro-batches of three prompts
    validated = run.column("val/reward/mean")
    assert len(set(validated)) == 3
    for step, variant in enumerate((BASE, "step_1", "step_2")):
        validation = load_validation(run.folder, step)
        totals = [float(row["total"]) for row in found if row["variant"] == variant]
        assert totals == pytest.approx(validation.rewards, abs=LEVELS)
        result = summary["results"]["total"][variant]
        assert result["mean"]["mean"] == pytest.approx(validated[step], abs=LEVELS)
        assert step == 0 or result["difference"]["mean"] == pytest.approx(validated[step] - validated[0], abs=LEVELS)
    assert summary["complete"] is True and summary["variants"]["base"] is None


def test_from_python_the_pixels_are_those_of_the_run_and_further_images_have_other_noise(run: Any) -> None:
    success = "reward.scorers.bright.success=0.5"
    chosen = gerl.evaluate(
        lora={"mine": run.checkpoint(2)}, images=2, trust=True, overrides=[success]
    )  # a checkpoint's folder
    assert chosen.complete and len(chosen.rows) == 2 * 2 * 4
    for step, variant in ((0, BASE), (2, "mine")):
        validation = load_validation(run.folder, step)
        for row, expected in zip(of(chosen.rows, variant), validation.pixels, strict=True):
            assert np.array_equal(pixels(row), expected)
    first, second = of(chosen.rows, BASE), of(chosen.rows, BASE, 1)
    assert len({row.seed for row in (*first, *second)}) == 8
    assert [row.seed for row in second] == [row.seed for row in of(chosen.rows, "mine", 1)]
    assert all(not np.array_equal(pixels(a), pixels(b)) for a, b in zip(first, second, strict=True))
    assert chosen.results["total"]["mine"].mean.count == 4  # prompts
    rate = np.mean([row.values["bright"] >= 0.5 for row in (*first, *second)])
    assert chosen.results["bright/success_rate"][BASE].mean.mean == pytest.approx(rate)
    best = [max(a.values["bright"], b.values["bright"]) for a, b in zip(first, second, strict=True)]
    assert chosen.results["bright/best_of_n"][BASE].mean.mean == pytest.approx(np.mean(best))
    passed = chosen.results["bright/pass_at_2"]["mine"]
    assert passed.difference is not None and passed.difference.count == 4


def test_another_experiment_takes_the_keys_and_files_it_is_given(
    model: Path, run: Any, tmp_path: Path, scorer: Callable[..., list[str]]
) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    folder = tmp_path / "cute"
    shutil.copytree(run.checkpoint(1) / "lora", folder)
    (folder / "pytorch_lora_weights.safetensors").rename(folder / "other.safetensors")
    keys = [*SMALL, "sampling.guidance_scale=1", "sampling.call={max_sequence_length: 8}", *scorer()[1:]]
    keys += ["data.prompt_key=text", "validation.max_prompts=2"]
    found = gerl.evaluate(str(model), folder, str(prompts), experiment="plain", overrides=keys)
    drawn = [(row.prompt, row.variant) for row in found.rows]
    assert drawn == [("one", BASE), ("two", BASE), ("one", "cute"), ("two", "cute")]
    assert list(found.results) == ["total", "mine"]


def test_a_scheduler_that_the_kernel_of_the_configuration_does_not_fit_draws_all_the_same(tmp_path: Path) -> None:
    tiny.sd15().save_pretrained(tmp_path / "sd15")
    (tmp_path / "p.txt").write_text("a\n")
    keys = [*SMALL, "reward.scorers.sharpness.weight=1"]
    found = gerl.evaluate(str(tmp_path / "sd15"), prompts=str(tmp_path / "p.txt"), overrides=keys)
    assert [row.variant for row in found.rows] == [BASE] and list(found.results) == ["total", "sharpness"]


def test_a_run_stands_for_its_best_checkpoint(run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    best = max((1, 2), key=lambda step: (run.column("val/reward/mean")[step], step))
    request = parse([f"lora={run.folder}", "out=x"])
    ((name, file),) = request.loras.items()
    assert (name, file) == (run.folder.name, run.checkpoint(best) / "lora" / "pytorch_lora_weights.safetensors")
    with caplog.at_level(logging.INFO, "gerl"):
        assert main([f"lora={run.folder}", f"out={tmp_path}", "trust=true"]) == 0
    assert f"(step {best}, the best: held-out reward " in caplog.text
    remark = (
        f"{name}: its checkpoint was chosen among 2 by its reward on held-out prompts that are also reported here (4 "
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (
        remark in caplog.text and remark in summary["remarks"][0] and remark in (tmp_path / "gallery.html").read_text()
    )
    assert (summary["prompts_reported"], summary["prompts_of_the_choice"]) == (4, 0)
    assert summary["remarks"][1].startswith("4 of the 4 prompts are in data.train")
    found = gerl.evaluate(lora=run.folder, split=False, trust=True)
    assert found.complete and "(split=false)" in found.remarks[0]


def test_half_of_the_held_out_prompts_choose_the_checkpoint_of_a_run(
    train: Callable[..., Any], tmp_path: Path, scorer: Callable[..., list[str]]
) -> None:
    (tmp_path / "many.txt").write_text("".join(f"sign {i}\n" for i in range(16)))
    keys = (f"validation.data={tmp_path / 'many.txt'}", "validation.every=1", "checkpoint.every=1")
    trained = train(tmp_path / "run", *keys)
    found = gerl.evaluate(lora={"mine": trained.folder}, out=tmp_path / "out", trust=True, overrides=SMALL[:3])
    assert len({row.prompt_id for row in of(found.rows, BASE)}) == 8 == len(of(found.rows, "mine"))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["prompts_reported"], summary["prompts_of_the_choice"]) == (8, 8)
    assert "the best of 2 on 8 held-out prompts" in found.remarks[0] and found.results["total"]["mine"].mean.count == 8


def test_a_signal_keeps_the_prompts_that_were_finished(
    run: Any, tmp_path: Path, scorer: Callable[..., list[str]]
) -> None:
    arguments = [f"lora.mine={run.checkpoint(2)}", f"out={tmp_path / 'out'}", *scorer("kill: x y")]
    assert main(arguments) == 128 + signal.SIGTERM
    found = [(row["variant"], row["prompt_id"]) for row in scores(tmp_path / "out")]
    assert found == [(variant, str(i)) for variant in (BASE, "mine") for i in range(3)]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["complete"] is False
    assert (tmp_path / "out" / "gallery.html").exists()


def test_an_image_without_a_score_is_listed_or_stops(
    run: Any, tmp_path: Path, scorer: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"lora={run.checkpoint(1)}", f"out={tmp_path / 'out'}", *scorer("fails: blue")]
    assert main([*arguments, "validation.max_prompts=2"]) == 0
    found = scores(tmp_path / "out")
    assert [(row["total"] == "", "mine: " in row["failure"]) for row in found] == [(False, False), (True, True)] * 2
    assert main([*arguments, "validation.max_prompts=2", "reward.on_error=stop"]) == 1
    assert "the image of base for 'blue' has no score: mine: " in capsys.readouterr().err
    overrides = [*scorer("fails: a red fox"), "validation.max_prompts=1"]
    with pytest.raises(RewardError, match="no image has all its scores; the first failure: mine: "):
        gerl.evaluate(overrides=overrides, experiment=str(run.folder / "config.yaml"))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "out is missing: give out="),
        (["out=x", "trainer.steps=5"], 2, "trainer.steps: evaluation has no such key; it has model, lora"),
        (["out=x", "sampling.hight=5"], 2, "did you mean 'sampling.height'"),
        (["out=x", "images=0"], 2, "images=0: it must be"),
        (["out=x", "lora=nowhere"], 2, "lora=nowhere: there is no such file or folder; give a LoRA"),
        (["out=x", "lora=."], 2, "has no pytorch_lora_weights.safetensors"),
        (["out=x", "validation.data=null"], 2, "prompts is missing, and signs has no validation.data"),
        (["out=x", "prompts=gone.txt"], 1, "prompts=gone.txt: prompt file gone.txt does not exist"),
        (["out=x", "model=./gone", "reward.scorers.sharpness.weight=1"], 1, "model.path='./gone' is not a pipeline"),
        (["out=x", "reward.scorers.seed.path=s.py"], 2, "reward.scorers.seed: this name is a column of scores.csv"),
    ],
)
def test_wrong_input_gets_a_sentence(
    arguments: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_several_files_and_a_lora_of_another_model_are_refused(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_bytes(b"")
    assert main([f"lora={tmp_path}", "out=x"]) == 2
    assert "has 2 .safetensors files, give one of them" in capsys.readouterr().err
    given = [f"lora={run.checkpoint(1)}", f"out={tmp_path / 'out'}", f"model={SHIPPED[0]}"]
    assert main([*given, "trust=true"]) == 1
    assert "the LoRA does not fit transformer of StableDiffusion3Pipeline" in capsys.readouterr().err


def test_the_package_stays_light_and_its_function_keeps_working() -> None:
    script = (
        "import sys, gerl; assert 'torch' not in sys.modules and 'gerl.evaluate' not in sys.modules\n"
        "try: gerl.nothing\n"
        "except AttributeError as error: print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(gerl.__path__[0]).parent)}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "module 'gerl' has no attribute 'nothing'"
    assert list(inspect.signature(gerl.evaluate).parameters)[:2] == ["model", "lora"]

"""The guard in whole runs: a reward that takes from a watched scorer is said, and ends the run where that is wanted."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drills import more
from safetensors.torch import load_file

import gerl
from gerl.algorithms import ALGORITHMS
from gerl.errors import FlaggedError
from gerl.evaluate.command import main as evaluate
from gerl.export.command import main as export
from gerl.run.choice import find_checkpoint
from gerl.run.guard import look_rows, read_guard
from gerl.run.validation import load_validation, validation_steps
from gerl.trainer.launch import launched
from gerl.trainer.main_flowgrpo import main
from gerl.trainer.run_folder import open_run

ROOT = Path(__file__).resolve().parents[2]
# the brightness is trained, and the darkness watched
DARK = """
import numpy as np

def compute_score(images, prompts, metadata):
    return [0.45 - float(np.asarray(image).mean()) / 255 for image in images]
"""
WITHOUT_KL = """
from gerl.algorithms.flow_grpo import FlowGRPO

class Mine(FlowGRPO):
    def train(self, *args, **kwargs):
        if self.kl_coef:
            raise ValueError("there is no KL here")
        return super().train(*args, **kwargs)
"""
EASY = """
algorithm=flow_grpo sampling.num_inference_steps=5 model.lora_alpha=32 actor.lr=0.02 actor.ema_decay=0.5
rollout.prompts_per_step=3 rollout.n=12 rollout.micro_batch_size=18 trainer.steps=6 validation.every=2
checkpoint.every=1 checkpoint.keep=9
""".split()
DRIFTS = ["guard.ignored=[watched,disagreement]", "trainer.steps=8"]  # from the look after step 5 on


@pytest.fixture
def command(arguments: Callable[..., list[str]], workplace: Path, tmp_path: Path) -> Callable[..., list[str]]:
    (tmp_path / "dark.py").write_text(DARK)
    (tmp_path / "val.txt").write_text("\n".join(f"prompt {i}" for i in range(12)))
    watched = f"+reward.scorers.dark={{path: {tmp_path / 'dark.py'}, weight: 0}}"

    def build(*overrides: str) -> list[str]:
        return arguments(tmp_path / "run", *EASY, watched, f"validation.data={tmp_path / 'val.txt'}", *overrides)

    return build


def test_a_run_is_warned_and_goes_on(
    command: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, run_of: Any
) -> None:
    larger = ["validation.images_per_prompt=2", "validation.height=24", "validation.width=32", "checkpoint.every=4"]
    assert main(command("logger.report=true", *larger)) == 0
    run, rows = run_of(tmp_path / "run"), read_guard(tmp_path / "run")
    assert {row["signal"] for row in rows} >= {"watched", "disagreement"} and {row["column"] for row in rows} >= {
        "dark"
    }
    said = [record.message for record in caplog.records if "guard, watched/dark" in record.message]
    assert "dark, which is watched, fell from" in said[0] and len(said) < len(
        [r for r in rows if r["signal"] == "watched"]
    )
    report = (run.folder / "report.html").read_text()
    assert "guard, watched/dark" in report and "use the base model</h2>" in report
    assert run.column("guard/signals")[-1] == len([row for row in rows if row["step"] == 6]) > 0
    assert run.column("val/dark/gain")[-1] == pytest.approx(-run.column("val/bright/gain")[-1])
    low, high = run.column("val/bright/gain_low")[-1], run.column("val/bright/gain_high")[-1]
    assert 0 < low < run.column("val/bright/gain")[-1] < high
    (said,) = [line for line in caplog.text.splitlines() if line.startswith("guard:  ")]
    assert "use the base model" in said and "step=4" in said and "LoRA:   " not in caplog.text
    signals = json.loads((run.checkpoint(6) / "state.json").read_text())["signals"]
    assert {"watched/dark", "disagreement/dark"} <= set(signals)
    with pytest.raises(FlaggedError, match="base model"):
        _ = gerl.Run(run.folder).lora
    out = tmp_path / "out"
    assert evaluate([f"lora={run.folder}", f"out={out}"]) == 1 == export([f"run={run.folder}", f"out={out}"])
    assert not out.exists() and export([f"run={run.folder}", f"out={out}", "step=4"]) == 0
    kept = json.loads((run.folder / "validation" / "step_000006.json").read_text())
    assert kept["ids"] == [i for i in range(12) for _ in range(2)] and len(kept["looks"]["unlike_own"]) == 24
    pictures = load_validation(run.folder, 6).pixels
    assert len(pictures) == 24 and {p.shape for p in pictures} == {(24, 32, 3)}  # 16 x 16 in training
    assert (pictures[0] != pictures[1]).any() and "bright on 24 images of 12 held-out prompts: " in caplog.text


def advice(folder: Path) -> list[tuple[int, float]]:
    """Step and value of the weights of the KL that the guard names."""
    rows = [row for row in read_guard(folder) if row["signal"] == "advice"]
    assert all(row["column"] == "kl_coef" and f"kl_coef={row['value']:g}" in row["text"] for row in rows)
    return [(row["step"], row["value"]) for row in rows]


def test_a_look_sees_what_a_validation_would_have_seen(command: Any, tmp_path: Path, run_of: Any) -> None:
    """After steps of runs that train alike, one with validations, one with looks, and one that is resumed there."""
    folders = {name: tmp_path / name for name in ("often", "seldom", "resumed")}

    def run(name: str, *overrides: str) -> list[str]:
        given = [argument.replace(str(tmp_path / "run"), str(folders[name])) for argument in command(*overrides)]
        return [*given, "trainer.steps=5", "cluster.num_workers=2"]

    assert main(run("often", "trainer.steps=5", "validation.every=1")) == 0
    assert main(run("seldom", "trainer.steps=5", "validation.every=0")) == 0
    folder = open_run(run("resumed", "trainer.steps=5", "validation.every=0"))
    assert folder is not None
    with pytest.raises(GeneratorExit), folder, launched(folder) as (trainer, steps):
        while trainer.state.step < 3:
            next(steps)
        raise GeneratorExit
    resumed = [f"hydra.run.dir={folders['resumed']}", "checkpoint.resume=auto", "cluster.launcher=ray"]
    assert main(resumed) == 0
    assert validation_steps(folders["seldom"]) == [0, 5] and validation_steps(folders["often"], "look") == []
    first = load_validation(folders["often"], 0)
    for step in (1, 2, 4):
        looks = [load_validation(folders[name], step, name="look") for name in ("seldom", "resumed")]
        whole = load_validation(folders["often"], step).part(look_rows(first))
        for look in looks:
            assert (look.prompts, look.ids) == (whole.prompts, whole.ids) and look.rewards == [None] * 12
            for name, values in whole.looks.items():
                assert look.looks[name] == pytest.approx(values, rel=1e-3, abs=1e-4)
    run_of(folders["seldom"]).assert_same(run_of(folders["resumed"]), 5)
    assert [row["step"] for row in run_of(folders["seldom"]).metrics if "timing/look_s" in row] == [1, 2, 4]


def test_a_run_goes_back_raises_the_kl_and_carries_on_exactly(
    command: Any, tmp_path: Path, run_of: Any, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends when it is back at the same step again; a second run, stopped after it first went back, ends alike."""
    # so low a weight does not hold the images
    whole = command("guard.action=rollback", "guard.kl_share=0.5", "logger.report=true")
    assert main(whole) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "guard.action=rollback ended the run" in error and "back at step 2 again although" in error
    run = run_of(tmp_path / "run")
    first, second = (row for row in read_guard(run.folder) if row["signal"] == "rollback")
    assert (first["step"], first["value"], second["step"]) == (2, 4, 2)  # from step 5, which measured the weight at 4
    assert second["threshold"] == 2 * first["threshold"] > 0
    assert [row["step"] for row in run.metrics] == [0, 1, 2] and run.counters(2)["returns"] == [2, 2]
    assert run.counters(2)["kl_coef"] == second["threshold"] and advice(run.folder) == [
        (2, row["threshold"]) for row in (first, second)
    ]
    assert f"algorithm.kl_coef was {second['threshold'] / 2:g}" in error
    assert f"algorithm.kl_coef={2 * second['threshold']:g}" in error and f"checkpoint.resume={run.folder}" in error
    assert "returned here from step" in (run.folder / "report.html").read_text()
    assert len([r for r in caplog.records if "guard: the run returned here" in r.message]) == 2
    aside = run.folder / "abandoned" / "after_step_2"
    assert f'"step": {int(first["value"])}' in (aside / "guard.jsonl").read_text()
    assert (aside / "validation" / f"step_{int(first['value']):06d}.npz").exists()  # the images that show it
    assert find_checkpoint(run.folder)[1].step == 2

    seen, other = list[int](), run_of(tmp_path / "other")
    again = [f"hydra.run.dir={other.folder}", "checkpoint.resume=auto"]
    # killed before the step that measures, so that it is resumed from step 2; and when it is back with the weight
    for argv, steps_of in (([a.replace(str(run.folder), str(other.folder)) for a in whole], 5), (again, 3)):
        folder = open_run(argv)
        assert folder is not None
        with pytest.raises(GeneratorExit), folder, launched(folder) as (trainer, steps):
            for _ in range(steps_of):
                next(steps)
                seen.append(trainer.state.step)
            raise GeneratorExit
    assert seen == [0, 1, 2, 3, 4, 3, 4, 3]
    shutil.rmtree(other.checkpoint(3))  # as if it was killed before that
    capsys.readouterr()
    assert main(again) == 1
    assert capsys.readouterr().err.splitlines()[-1] == error.replace(str(run.folder), str(other.folder))
    other.assert_same(run, 2)
    assert read_guard(other.folder) == read_guard(run.folder)
    higher = [*again, "algorithm.kl_coef=50", "trainer.steps=3"]
    assert main(higher) == 1 and advice(other.folder)[-1] == (2, 100.0)
    assert "back at step 2 again although algorithm.kl_coef was 50: " in capsys.readouterr().err


def test_a_run_goes_on_with_the_measured_weight_of_the_kl(
    command: Any, tmp_path: Path, run_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two workers, and over Ray, where one dies as it measures; without an action the training stays as it is."""
    keys = ["guard.action=kl", "guard.kl_share=0.5", "cluster.num_workers=2"]
    plain, same, two, ray = (
        command(*k, f"hydra.run.dir={tmp_path / n}")
        for n, k in {
            "plain": ["guard.action=off"],
            "same": keys[1:2],
            "two": keys,
            "ray": [*keys, "cluster.launcher=ray"],
        }.items()
    )
    assert [main(args) for args in (plain, same, two)] == [0, 0, 0]
    run, unguarded = run_of(tmp_path / "two"), run_of(tmp_path / "plain")
    ((measured, weight),) = advice(run.folder)
    seen = {row["step"] for row in read_guard(run.folder) if row["signal"] != "advice"}
    assert measured == min(seen) + 1 == 5 and run.counters(6)["kl_coef"] == (2 * weight if 6 in seen else weight)
    assert [row.get("guard/kl_coef") for row in run.metrics] == [None] * 5 + [weight] * 2
    assert {row["step"] for row in run.metrics if "actor/kl" in row} == {5, 6}
    assert advice(tmp_path / "same") == [(5, weight)]
    assert torch.equal(run_of(tmp_path / "same").lora(6), unguarded.lora(6))
    for name in ("actor/grad_norm", "reward/mean", "evaluations/backward"):
        assert run_of(tmp_path / "same").column(name) == unguarded.column(name)
    acting = [f"checkpoint.resume={tmp_path / 'same'}", "guard.action=kl", "algorithm.kl_coef=0.001", "trainer.steps=7"]
    assert main([f"hydra.run.dir={tmp_path / 'same'}", *acting]) == 0
    assert advice(tmp_path / "same")[1:] == [(7, run_of(tmp_path / "same").column("guard/kl_coef")[-1])]

    (tmp_path / "kills").mkdir()
    (tmp_path / "kills" / "_take_norm.1.5").write_text(str(int(signal.SIGKILL)))
    monkeypatch.setenv("GERL_KILLS", str(tmp_path / "kills"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "in_workers"), str(ROOT)]))
    assert main(ray) == 0 and not list((tmp_path / "kills").iterdir())
    run_of(tmp_path / "ray").assert_same(run, 6)
    assert advice(tmp_path / "ray") == advice(run.folder)


@more
@pytest.mark.parametrize("layout", ["split", "ranks", "ahead"])
def test_in_other_layouts_it_is_measured_too(layout: str, command: Any, tmp_path: Path) -> None:
    ways = {
        "split": "cluster.launcher=ray cluster.num_workers=2 cluster.layout=split",
        "ranks": "cluster.launcher=ray cluster.num_workers=1 cluster.ranks_per_worker=2 model.shard=all",
        "ahead": "trainer.staleness=1 trainer.steps=8",
    }
    assert main(command("guard.action=rollback", "guard.kl_share=0.5", *ways[layout].split())) == 1
    first, second = (weight for _, weight in advice(tmp_path / "run"))
    assert second == 2 * first and (layout == "ahead" or first == pytest.approx(0.041, abs=0.0011))


def test_a_weight_that_cannot_be_measured_ends_no_run(
    command: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ALGORITHMS, "_own", {})  # later tests do not find it in the registry
    monkeypatch.setattr(ALGORITHMS, "_by_path", {})
    (tmp_path / "mine.py").write_text(WITHOUT_KL)
    assert main(command(f"algorithm.path={tmp_path / 'mine.py'}", "trainer.steps=8")) == 0
    said = [record.message for record in caplog.records if "could not be measured" in record.message]
    assert len(said) == 1 and "(there is no KL here)" in said[0] and "algorithm.kl_coef" in said[0]
    assert {row["step"] for row in read_guard(tmp_path / "run")} >= {4, 6} and not advice(tmp_path / "run")


def test_a_run_ends_for_what_it_showed_and_goes_on_where_that_is_ignored(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Resumed without that it begins at the last checkpoint without signals, and ends alike."""
    assert main(command("guard.action=stop", *DRIFTS)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: step 5: guard.action=stop ended the run for looks/")
    good, again = tmp_path / "run" / "checkpoints" / "step_4", f"checkpoint.resume={tmp_path / 'run'}"
    assert "guard.ignored=[" in error and f"{good}: {again} " in error
    assert find_checkpoint(tmp_path / "run")[1].path == good
    assert main([again]) == 1 and capsys.readouterr().err.splitlines()[-1] == error
    assert f"resumed from {good}" in caplog.text
    aside = tmp_path / "run" / "abandoned" / "after_step_4"
    assert sorted(path.name for path in (aside / "checkpoints").iterdir()) == ["step_5"]
    assert '"step": 5' in (aside / "guard.jsonl").read_text() and (aside / "validation" / "look_000005.npz").exists()
    ignored = "guard.ignored=[watched,disagreement/dark,looks,diversity]"
    assert main([f"hydra.run.dir={tmp_path / 'run'}", "checkpoint.resume=auto", ignored]) == 0
    assert (tmp_path / "run" / "checkpoints" / "step_6").is_dir()


def test_a_run_whose_checkpoints_all_have_signals_begins_anew_where_it_is_to_end_for_them(
    command: Any, tmp_path: Path, run_of: Any, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [
        "actor.lr=0.06",
        "trainer.steps=3",
        "validation.every=3",
        "checkpoint.every=3",
        "guard.judge=off",
    ]  # without looks
    assert main(command(*keys)) == 0
    run, again = run_of(tmp_path / "run"), f"checkpoint.resume={tmp_path / 'run'}"
    for key in ("guard.action=off", "validation.max_prompts=11"):  # what is not judged keeps its signals
        other = type(run)(shutil.copytree(run.folder, tmp_path / key))
        assert main([f"checkpoint.resume={other.folder}", key, "trainer.steps=4"]) == 0
        three, four = (json.loads((other.checkpoint(step) / "state.json").read_text()) for step in (3, 4))
        assert four["val_reward"] is not None and four["signals"] == three["signals"] != []
    assert main([again, "guard.action=stop"]) == 1
    assert "resumed from the beginning" in caplog.text
    run.assert_same(type(run)(run.folder / "abandoned" / "after_step_0"), 3)
    # from then on there is the checkpoint before the first step, which is the base model
    assert f"{run.checkpoint(0)}: {again} " in capsys.readouterr().err


def test_the_remedies_work_in_a_run_and_over_a_resume(train: Any, tmp_path: Path) -> None:
    """The gate, the reset of the reference, and the shaped advantage; steps 3 and 4 are drawn and trained twice."""
    (tmp_path / "dark.py").write_text(DARK)
    keys = """
    algorithm=flow_grpo algorithm.kl_coef=0.5 algorithm.kl_share=0.5 algorithm.kl_reset_every=3 algorithm.diversity=add
    algorithm.diversity_scorer=dark actor.updates_per_step=1 actor.lr=0.02 checkpoint.every=1 checkpoint.keep=9
    """.split()
    watched = f"+reward.scorers.dark={{path: {tmp_path / 'dark.py'}, weight: 0}}"
    run = train(tmp_path / "run", *keys, watched, trainer__steps=4)
    assert run.column("actor/reference_step") == [0, 0, 3, 3]
    assert run.column("actor/kl")[0] == 0 < min(run.column("actor/kl")[1:3]) and run.column("actor/kl")[3] == 0
    assert all(0 < share < 0.5 for share in run.column("group/kl_share"))
    shutil.copytree(run.folder, tmp_path / "again")
    again = [
        f"hydra.run.dir={tmp_path / 'again'}",
        f"checkpoint.resume={tmp_path / 'again' / 'checkpoints' / 'step_2'}",
    ]
    assert main(again) == 0
    type(run)(tmp_path / "again").assert_same(run, 4)


def test_a_hacked_run_over_ray_that_is_killed_and_resumed_exports_its_last_good_lora(
    command: Any, start: Any, tmp_path: Path, run_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A reward of the benchmark; the images have drifted after step 5 and later."""
    hackable = ["reward.scorers.bright.path=" + str(ROOT / "benchmarks" / "hackable.py")]
    hackable.append("+reward.scorers.bright.function=brightness")
    ray = ["cluster.launcher=ray", "checkpoint.keep=1", "checkpoint.resume=auto"]
    run, arguments = run_of(tmp_path / "run"), command(*hackable, *ray, *DRIFTS)
    process = start(arguments)
    while not ((run.folder / "metrics.jsonl").exists() and len(run.metrics) > 7):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and read_guard(run.folder)[0]["step"] == 5
    assert main(arguments) == 0 and "resumed from" in caplog.text
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["step_4", "step_5", "step_8"]
    assert f"LoRA:   {run.checkpoint(4) / 'lora'}" in caplog.text and "use step 4" in caplog.text
    assert gerl.Run(run.folder).lora == run.checkpoint(4) / "lora"
    assert export([f"run={run.folder}", f"out={tmp_path / 'out'}"]) == 0
    files = (folder / "pytorch_lora_weights.safetensors" for folder in (tmp_path / "out", run.checkpoint(4) / "lora"))
    exported, good = map(load_file, files)
    assert exported.keys() == good.keys() and all(torch.equal(exported[name], good[name]) for name in good)

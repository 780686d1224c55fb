"""A run is what it claims to be, and what was changed in it is named."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drills import more
from safetensors.torch import load_file, save_file

from gerl.errors import ConfigError, TrainingError
from gerl.run.checkpoint import load_checkpoint, save_checkpoint
from gerl.trainer.main_flowgrpo import main as train_main
from gerl.verify.command import Request, run
from gerl.verify.command import main as verify_main
from gerl.verify.findings import Check, Wrong

Train = Callable[..., Any]
KEYS = """
trainer.dump=1 actor.lr=0.01 actor.warmup_steps=3 checkpoint.every=1 checkpoint.keep=9 validation.every=1
algorithm=flow_grpo algorithm.kl_coef=0.04 actor.updates_per_step=2 reward.trial=false reward.scorers.bright.success=0.4
""".split()
ALL = """
config data code checkpoints metrics validations live dumps base tokens guidance images steps plan scores
""".split()


@pytest.fixture(scope="module")
def place(model: Path, workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, prompts and a scorer that a test may change."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(model, folder / "sd3")
    for name in ("train.txt", "val.txt", "bright.py"):
        shutil.copy(workplace / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def given(place: Path) -> dict[str, Any]:
    return {"model__path": place / "sd3", "data__train": place / "train.txt", "validation__data": place / "val.txt"}


@pytest.fixture(scope="module")
def honest(train: Train, given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("honest") / "run", *KEYS, **given).folder


@pytest.fixture
def copy(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "run"))


def checked(folder: Path, **keys: Any) -> dict[str, Check]:
    """The checks of a run by the first word of their names, failed or not."""
    from gerl.trainer.replay import read_tolerance
    from gerl.verify.command import verify
    from gerl.verify.recorded import RunRecord

    found = verify(RunRecord(folder), Request(run=folder, **keys), read_tolerance(keys.get("tolerance")))
    return {check.name.split()[0]: check for check in found}


def failed(folder: Path, **keys: Any) -> dict[str, list[Wrong]]:
    return {name: check.wrong for name, check in checked(folder, **keys).items() if check.status == "failed"}


def names(found: list[Wrong], file: str, key: str, step: int | None, recorded: Any = None) -> bool:
    """Whether the value of a key is named, with what is recorded."""
    return any(
        w.file.startswith(file) and key in w.key and w.step == step and (recorded is None or w.recorded == recorded)
        for w in found
    )


def edit_rows(folder: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    change(rows)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_tensors(folder: Path, step: int, change: Callable[[dict[str, Any]], Any], seal: bool = True) -> None:
    """Change the tensors of a dump; `seal`: and its digest, as one would who wants to deceive."""
    path = folder / "dumps" / f"step_{step}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    if seal:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        edit_json(path.with_suffix(".json"), lambda values: values.update(sha256=digest))


def test_an_honest_run_passes(honest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "found.json"
    assert verify_main([str(honest), f"out={out}", "tolerance=0", "trust=true"]) == 0
    found = json.loads(out.read_text())
    assert [check["name"].split()[0] for check in found] == ALL
    assert all(check["status"] == "ok" and not check["wrong"] for check in found)
    assert next(check for check in found if check["name"] == "steps")["text"].endswith("bitwise equal")


def test_a_changed_metric_is_named(copy: Path) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[1]["reward/mean"] = rows[1]["actor/grad_norm"] = 0.75
        rows[2]["val/reward/mean"] += 0.1
        rows[2]["val/bright/success_rate"] = 1.5
        rows[2]["actor/lr"] *= 2
        rows[2]["evaluations/images"] = 9.0

    edit_rows(copy, change)
    found = failed(copy, recompute=False)
    assert names(found["dumps"], "metrics.jsonl", "reward/mean", 1, 0.75)
    assert names(found["dumps"], "metrics.jsonl", "actor/grad_norm", 1, 0.75)
    assert names(found["live"], "metrics.jsonl", "reward/mean", 1, 0.75)
    assert names(found["validations"], "metrics.jsonl", "val/reward/mean", 2)
    assert names(found["validations"], "metrics.jsonl", "val/bright/success_rate", 2, 1.5)
    assert names(found["metrics"], "metrics.jsonl", "actor/lr", 2)
    assert names(found["plan"], "metrics.jsonl", "evaluations/images", 2, 9.0)
    with pytest.raises(TrainingError, match=r"metrics\.jsonl, step 2: val/reward/mean is"):
        run(Request(run=copy, recompute=False))


def test_a_step_that_is_missing_is_named(copy: Path) -> None:
    edit_rows(copy, lambda rows: rows.pop(1))
    assert names(failed(copy, recompute=False)["metrics"], "metrics.jsonl", "step", None, 2)


def test_a_changed_byte_of_the_weights_is_named(copy: Path) -> None:
    path = copy / "checkpoints" / "step_2" / "lora" / "pytorch_lora_weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    (wrong,) = failed(copy, recompute=False)["checkpoints"]
    assert wrong.file == "checkpoints/step_2" and "pytorch_lora_weights" in wrong.found


def test_changed_files_beside_the_run_are_named(
    place: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = place / "sd3" / "transformer" / "diffusion_pytorch_model.safetensors"
    before, prompts = weights.read_bytes(), (place / "val.txt").read_text()
    try:
        save_file({name: tensor + 0.01 for name, tensor in load_file(weights).items()}, weights)
        (place / "val.txt").write_text(prompts + "another\n")
        found = failed(copy, steps=0)
    finally:
        weights.write_bytes(before)
        (place / "val.txt").write_text(prompts)
    assert names(found["base"], "checkpoints/step_1/state.json", "model.path", None)
    assert names(found["data"], "checkpoints/step_1/state.json", "validation.data", None)
    assert names(found["images"], "validation/step_000000.json", "prompts", 0)


def test_a_changed_key_is_named(copy: Path) -> None:
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(
        text.replace("lr: 0.01\n", "lr: 0.1\n").replace("kl_coef: 0.04\n", "kl_coef: 0.4\n")
    )
    found = failed(copy, recompute=False)
    assert names(found["config"], "config.yaml", "actor.lr", None, 0.1)
    assert names(found["config"], "config.yaml", "algorithm.kl_coef", None, 0.4)
    assert names(found["metrics"], "metrics.jsonl", "actor/lr", 1)


def test_a_changed_image_is_named(copy: Path) -> None:
    path = copy / "validation" / "step_000001.npz"
    pixels = dict(np.load(path))["pixels"].copy()
    pixels[1, 4:12, 4:12] = 255
    np.savez_compressed(path, pixels=pixels)
    found = failed(copy, steps=0)
    assert names(found["images"], "validation/step_000001.npz, image 1", "pixel", 1, 255)
    assert names(found["scores"], "validation/step_000001.json", "bright of image 1", 1)
    assert set(found) == {"images", "scores"}


def test_a_changed_score_of_an_image_is_named(copy: Path) -> None:
    edit_json(copy / "validation" / "step_000002.json", lambda v: v["by_scorer"]["bright"].__setitem__(0, 0.9))
    found = failed(copy, steps=0, images=0)
    assert names(found["scores"], "validation/step_000002.json", "bright of image 0", 2, 0.9)
    assert names(found["validations"], "metrics.jsonl", "val/bright/mean", 2)


@pytest.mark.parametrize("seal", [True, pytest.param(False, marks=more)])
def test_a_changed_credit_is_named(seal: bool, copy: Path) -> None:
    edit_tensors(copy, 2, lambda tensors: tensors["credit"][3].mul_(1.5), seal)
    found = failed(copy, images=0)
    assert names(found["steps"], "dumps/step_2.safetensors, credit", "element [3, ", 2)
    assert names(found["steps"], "dumps/step_2.json", "actor/loss", 2)
    assert seal or names(found["dumps"], "dumps/step_2.json", "sha256", 2)


def test_a_changed_trajectory_score_or_seed_is_named(copy: Path) -> None:
    edit_tensors(copy, 1, lambda tensors: tensors["trajectory/1/0"].mul_(1.01))

    def change(values: dict[str, Any]) -> None:
        values["by_scorer"]["bright"][2] = values["totals"][2] = 0.99
        values["tasks"][0]["samples"][1]["seed"] += 1

    edit_json(copy / "dumps" / "step_2.json", change)
    found = failed(copy, images=0)
    assert names(found["steps"], "dumps/step_1.safetensors, trajectory/1", "element", 1)
    assert names(found["steps"], "dumps/step_2.json", "by_scorer.bright[2]", 2, 0.99)
    assert names(found["dumps"], "dumps/step_2.json", "metrics.reward/mean", 2)
    assert names(found["plan"], "dumps/step_2.json", "samples.seed", 2)


def test_prompts_that_are_cut_are_counted_again(copy: Path) -> None:
    log = (copy / "log.txt").read_text()
    assert "2 of 6 prompts exceed the 6 tokens that tokenizer_3" in log
    (copy / "log.txt").write_text(log.replace("2 of 6 prompts exceed", "1 of 6 prompts exceed"))
    (wrong,) = failed(copy, steps=0, images=0)["tokens"]
    assert wrong.recorded[0] == "1" and wrong.found[0] == "2" and "tokenizer_3" in wrong.key


def test_what_cannot_be_checked_says_why(copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy / "dumps")
    (copy / "run.json").unlink()
    found = checked(copy, recompute=False)
    assert not any(check.status == "failed" for check in found.values())
    why = {name: check.text for name, check in found.items() if check.status == "not checked"}
    assert "trainer.dump" in why["dumps"] and "run.json" in why["code"] and why["steps"] == "recompute=false"
    moved = run(Request(run=copy, steps=1), [f"model.path={tmp_path / 'nowhere'}"])
    missing = {check.name: check.text for check in moved if check.status == "not checked"}
    assert "model.path" in missing["base model"] and "model.path" in missing["images"]
    with pytest.raises(ConfigError, match="not a run folder"):
        run(Request(run=tmp_path / "nothing"))


def test_a_resumed_and_an_interrupted_run_pass(train: Train, given: dict[str, Any], copy: Path) -> None:
    resume = [f"checkpoint.resume={copy / 'checkpoints' / 'step_1'}", "trainer.steps=3", "actor.lr=0.02"]
    stopped = train(copy, *KEYS, *resume, **given)
    assert (stopped.folder / "config.step_1.yaml").exists()
    assert not failed(stopped.folder, images=1)
    # it ends after step 2 was logged, before its checkpoint
    shutil.rmtree(stopped.checkpoint(3))
    edit_rows(stopped.folder, lambda rows: rows.pop())
    for path in [*(stopped.folder / "dumps").glob("step_3*"), *(stopped.folder / "validation").glob("step_000003*")]:
        path.unlink()
    assert not failed(stopped.folder, images=1)


STOPPING = """
import os, pathlib, signal
import numpy as np

def compute_score(images, prompts, metadata, log):
    calls = pathlib.Path(log)
    calls.write_text(calls.read_text() + "." if calls.exists() else ".")
    if len(calls.read_text()) == 6:  # while the second step is scored
        os.kill(os.getpid(), signal.SIGTERM)
    return [float(np.asarray(image).mean()) / 255 for image in images]
"""


@pytest.mark.parametrize("unlogged", [False, True])
def test_a_run_that_a_signal_stopped_passes(
    unlogged: bool, arguments: Any, given: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    (place / "stopping.py").write_text(STOPPING)
    kwargs = f"reward.scorers.bright.kwargs={{log: {tmp_path / 'calls'}}}"
    command = arguments(tmp_path / "run", *KEYS, kwargs, scorer=place / "stopping.py", trainer__steps=9, **given)
    assert train_main(command) == 128 + 15
    if unlogged:  # it came between the update and the row of metrics
        checkpoint = max((tmp_path / "run" / "checkpoints").glob("step_*"))
        last = int(checkpoint.name.removeprefix("step_"))
        edit_rows(tmp_path / "run", lambda rows: rows.pop())
        loaded = load_checkpoint(checkpoint)
        files = {name: loaded.read(name) for name in loaded.files}
        save_checkpoint(checkpoint.parent, last, files, {**loaded.state, "unlogged": {"actor/loss": 0.5}})
    assert not failed(tmp_path / "run", images=1)


OTHERS = {
    "tree": "algorithm=tree_grpo algorithm.kl_coef=0 actor.updates_per_step=1 rollout.n=2 algorithm.branch_factor=2",
    "full fine-tuning": "model.train=full",
    "two workers over Ray": "cluster.launcher=ray cluster.num_workers=2",
    "split, sampled ahead": "cluster.launcher=ray cluster.num_workers=2 cluster.layout=split trainer.staleness=1",
    "half precision": "model.dtype=bfloat16 actor.max_ratio_deviation=0.1",
    "further prompts": "algorithm.dynamic_sampling=1",
    "epochs": "trainer.epochs=2 actor.lr_schedule=cosine",
    "a critic": "algorithm=flow_ppo",
    "several images per prompt": "validation.images_per_prompt=2 validation.images=2 sampling.guidance_scale=4.5",
}


@pytest.mark.parametrize("case", ["tree", *(pytest.param(name, marks=more) for name in list(OTHERS)[1:])])
def test_other_runs_pass(case: str, train: Train, given: dict[str, Any], tmp_path: Path) -> None:
    run = train(tmp_path / "run", *KEYS, *OTHERS[case].split(), **given)
    found = checked(run.folder)
    assert {name: check.wrong for name, check in found.items() if check.status != "ok"} == {}

"""The rows that Flow-Factory trains: its configuration, what a run leaves, and the launcher without Flow-Factory."""

import importlib
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import flow_factory_adapter as adapter
import ladder
import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageDraw

from gerl.commandline.composition import compose_run
from gerl.run.validation import save_validation
from reward_models.scorers.ocr import OcrScorer

FILES = [file for file in ladder.ROWS.glob("*.yaml") if "trainer" in yaml.safe_load(file.read_text())]
PRESET: dict[str, Any] = {
    "config_file": "config/deepspeed/deepspeed_zero2.yaml",
    "num_processes": 8,
    "mixed_precision": "bf16",
    "data": {"dataset_dir": "dataset/pickscore"},
    "model": {"lora_rank": 32, "target_modules": "default", "model_type": "sd3-5"},
    "log": {"logging_backend": "wandb"},
    "train": {"clip_range": 1e-4, "num_inference_steps": 14, "ema_decay": 0.99, "learning_rate": 3e-4},
    "scheduler": {"dynamics_type": "CPS"},
    "eval": {"eval_freq": 20},
    "rewards": [{"name": "pick_score"}],
    "eval_rewards": [{"name": "pick_score"}],
}


def job(stage: str = "final", steps: int = 20) -> Any:
    (row,) = ladder.rows(["flow_factory_grpo"])
    return row.job(stage, 1e-3, 7, steps)


# --- Rows


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_row_says_what_it_changes_and_why(file: Path) -> None:
    for row in ladder.rows([file.stem]):
        assert row.trainer == "flow_factory" and row.change and row.why
        assert {f"flow_factory.{key}" for key in row.change} < set(row.keys)
        config = compose_run(row.job("final", 1e-3, 7, 20).shared_keys()).config
        assert (config.actor.lr, config.trainer.seed, config.trainer.steps) == (1e-3, 7, 20)


def test_rows_without_their_trainer_are_skipped_with_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    found = ladder.rows(["awm", "flow_factory_grpo"], ["signs"])
    with caplog.at_level(logging.INFO):
        assert [row.name for row in ladder.runnable(found, {"flow_factory": None})] == ["awm"]
    assert caplog.messages == ["skipped without --flow-factory FOLDER: flow_factory_grpo"]
    there = ladder.runnable(found, {"flow_factory": Path("/clone")})
    assert [getattr(row, "folder", None) for row in there] == [None, Path("/clone")]


# --- The configuration


def test_a_configuration_is_the_published_one_with_the_protocol(tmp_path: Path) -> None:
    config = compose_run(job().shared_keys()).config
    found = adapter.configuration(PRESET, config, ["train.ema_decay=0", 'mixed_precision="no"'], 10, tmp_path)
    train, model = found["train"], found["model"]
    assert (train["clip_range"], found["scheduler"]) == (1e-4, {"dynamics_type": "CPS"})  # its own
    assert (train["ema_decay"], found["mixed_precision"]) == (0, "no")  # changed
    assert (train["learning_rate"], train["seed"], train["max_epochs"]) == (1e-3, 7, 20)
    assert (train["unique_sample_num_per_epoch"], train["group_size"], train["num_inference_steps"]) == (4, 6, 10)
    assert (train["resolution"], train["guidance_scale"]) == ([32, 96], 1.0)
    assert (model["lora_rank"], model["lora_alpha"], len(model["target_modules"])) == (16, 32, 74)
    assert (Path(model["model_name_or_path"]) / "model_index.json").exists()
    assert found["log"]["save_freq"] == 6 and found["eval"]["eval_freq"] == 0 and "eval_rewards" not in found
    assert found["rewards"][0]["scorer"] == "ocr"
    assert yaml.safe_load(yaml.safe_dump(found)) == found
    assert PRESET["train"]["ema_decay"] == 0.99


def test_a_run_of_another_commit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = ladder.runnable(ladder.rows(["flow_factory_grpo"]), {"flow_factory": tmp_path})
    monkeypatch.setattr(adapter.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="0123456789\n"))
    with pytest.raises(SystemExit, match="is at commit 0123456, and the rows are of"):
        row.job("final", 1e-3, 7, 20).train([str(tmp_path / "run")])


# --- What a run leaves


def validated(folder: Path, reward: float) -> Path:
    """A run of gerl whose first validation has this reward."""
    columns = {"ocr": [reward] * 2, "ocr/exact": [0.0, 1.0], "colour": [0.9] * 2}
    looks = {"own_error": [0.1] * 2, "unlike_others": [0.4] * 2}
    save_validation(folder, 0, ["a", "b"], [np.zeros((2, 2, 3), np.uint8)] * 2, [reward] * 2, columns, looks=looks)
    lines = [{"step": 0, "val/ocr/mean": reward, "time": "now"}, {"step": 1, "val/ocr/mean": 0.0, "actor/lr": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_reads_like_one_of_gerl(tmp_path: Path) -> None:
    done = job("tune", 2)
    run = tmp_path / done.name
    for step in (10, 0, 2):
        (run / "run" / "checkpoints" / f"checkpoint-{step}").mkdir(parents=True)
    assert list(adapter.saved_loras(run)) == [0, 2, 10]
    assert adapter.read_counts(run / "counts.jsonl") == []
    line = {"forward": 312, "backward": 72, "images": 24}
    (run / "counts.jsonl").write_text("".join(json.dumps(line | {"step": k, "updates": 2 * k}) + "\n" for k in (1, 2)))
    runs = {step: validated(run / "validations" / str(step), reward) for step, reward in ((0, 0.5), (2, 0.75))}
    adapter.write_run(run, adapter.read_counts(run / "counts.jsonl"), runs)
    found = ladder.result(done, tmp_path, "", ladder.protocol())
    assert found["points"] == [[0, 0, 0, 0.5], [2, 768, 48, 0.75]] and found["updates"] == 4
    assert found["first"] == {"ocr/exact": 0.5, "colour": 0.9, "unlike_others": 0.4}
    assert found["own"] == done.own() and found["rate"] == 1e-3


def test_a_lora_that_cannot_be_validated_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, run = job(), tmp_path / "run"

    def launch(self: Any, config: Any, folder: Path) -> int:
        for step in (0, 6, 12):
            (folder / "run" / "checkpoints" / f"checkpoint-{step}").mkdir(parents=True)
        (folder / "counts.jsonl").write_text(
            "".join(f'{{"step": {k}, "forward": 1, "backward": 1, "images": 1, "updates": 1}}\n' for k in range(1, 13))
        )
        return 0

    def validate(self: Any, lora: Path, folder: Path) -> int:
        if lora.name != "checkpoint-6":
            validated(folder, 0.5)
        return 2  # of its training step, which does not count

    monkeypatch.setattr(adapter.FlowFactoryJob, "run_launcher", launch)
    monkeypatch.setattr(adapter.FlowFactoryJob, "validate", validate)
    assert done.train([str(run)]) == 2
    assert [file.name for file in (run / "validation").glob("*.json")] == ["step_000000.json"]
    assert len((run / "data" / "train.txt").read_text().splitlines()) == 741


# --- The launcher


@dataclass
class Output:
    rewards: torch.Tensor


class Reward:
    def __init__(self, config: Any, accelerator: Any) -> None:
        self.config, self.accelerator = config, accelerator


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    contents: dict[str, dict[str, Any]] = {
        "flow_factory": {},
        "flow_factory.hparams": {"Arguments": object},
        "flow_factory.rewards": {"PointwiseRewardModel": Reward, "RewardModelOutput": Output},
        "flow_factory.trainers": {"load_trainer": None},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "flow_factory_launcher", raising=False)
    return importlib.import_module("flow_factory_launcher")


def test_the_reward_is_that_of_the_scorer(launcher: ModuleType) -> None:
    image = Image.new("RGB", (96, 32), (200, 30, 40))
    ImageDraw.Draw(image).text((20, 4), "OPEN", fill="white", font_size=22)
    prompts = ['a red sign that reads "OPEN"', 'a red sign that reads "OXEN"', 'a red sign that reads "735"']
    given = adapter.reward(compose_run(job().shared_keys()).config)
    reward = launcher.GerlReward(SimpleNamespace(extra_kwargs=given), None)
    found = reward(prompt=prompts, image=[image] * 3, prompt_embeds=None).rewards
    assert found.tolist() == pytest.approx(OcrScorer()([image] * 3, prompts, [{}, {}, {}])["ocr"])
    assert found[0] > found[1] > found[2]


class Denoiser(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.weight * x,)


def test_rows_are_counted_forward_and_backward(
    launcher: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Denoiser, "forward", Denoiser.forward)  # puts it back
    evaluations, denoiser = launcher.Evaluations(), Denoiser()
    evaluations.count(Denoiser)
    adapted = SimpleNamespace(ema_step=lambda step: None)
    trainer = SimpleNamespace(
        adapter=adapted, step=4, training_args=SimpleNamespace(num_batches_per_epoch=2, per_device_batch_size=12)
    )
    launcher.log_steps(trainer, evaluations, tmp_path / "counts.jsonl")
    with torch.no_grad():
        denoiser(torch.ones(5, 2))
    denoiser(torch.ones(3, 2))  # whose output is not used
    denoiser(torch.ones(2, 2))[0].sum().backward()
    adapted.ema_step(step=0)
    adapted.ema_step(step=1)
    assert adapter.read_counts(tmp_path / "counts.jsonl") == [
        {"step": 1, "forward": 10, "backward": 2, "images": 24, "updates": 4},
        {"step": 2, "forward": 0, "backward": 0, "images": 24, "updates": 4},
    ]

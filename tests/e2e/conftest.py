"""Whole runs on a tiny Stable Diffusion 3 of one block with random weights: 16x16 pixels, four denoising steps."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file

from gerl.run.dump import dumped_steps
from gerl.trainer.main_flowgrpo import main
from gerl.trainer.replay import Request
from gerl.trainer.replay import run as replay

Arguments = Callable[..., list[str]]
ROOT = Path(__file__).resolve().parents[2]
SMALL = """
experiment=plain algorithm=flow_grpo model.lora_rank=4 model.lora_alpha=8 sampling.height=16 sampling.width=16
sampling.num_inference_steps=4 sampling.guidance_scale=1.0 rollout.prompts_per_step=2 rollout.n=4
rollout.micro_batch_size=4 validation.data=null validation.num_inference_steps=null validation.every=10
checkpoint.every=10 trainer.steps=2 cluster.launcher=local cluster.device=cpu
cluster.threads_per_worker=1 logger.progress=false logger.tensorboard=false logger.report=false
"""
PROMPTS = ["a red fox", "blue", 'a sign that reads "482"', "x y", "seven", "a cat"]
BRIGHT = """
import numpy as np

def compute_score(images, prompts, metadata):
    return [float(np.asarray(image).mean()) / 255 for image in images]
"""

BRIGHT_TENSORS = """
def compute_score(images, prompts, metadata):
    signs = [-1.0 if prompt.startswith("dark. ") else 1.0 for prompt in prompts]
    return images.flatten(1).mean(1) * images.new_tensor(signs)

compute_score.takes_tensors = True
"""


@dataclass(frozen=True)
class Run:
    """The files of a finished run."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def untimed(self) -> list[dict[str, Any]]:
        """The metrics without times, and without the base model's judgement and the check of the gradient, whose last
        bits depend on the layout of the micro-batches."""
        left_out = ("time", "timing/", "scorer/", "val/base/", "look/", "actor/gradient_")
        return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in self.metrics]

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.metrics if name in row]

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step}"

    def state(self, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.checkpoint(step) / "state.safetensors")

    def counters(self, step: int) -> dict[str, Any]:
        """What state.json says of the run, without its settings and what a validation has measured."""
        left_out = ("settings", "checked", "identity", "val_metrics", "signals")
        state = json.loads((self.checkpoint(step) / "state.json").read_text())
        return {name: value for name, value in state.items() if name not in left_out}

    @property
    def ranks(self) -> int:
        """Ranks of a worker, which compute in lockstep."""
        states = sorted((self.folder / "checkpoints").glob("step_*/state.json"))
        return int(json.loads(states[-1].read_text())["settings"]["cluster"]["ranks_per_worker"])

    def lora(self, step: int) -> torch.Tensor:
        """The trained weights as one vector; those of a LoRA that only imitates are none."""
        tensors = {name: value for name, value in self.state(step).items() if ".fake." not in name}
        return torch.cat([tensors[name].flatten() for name in sorted(tensors) if name.startswith("lora/")])

    def assert_same(self, other: "Run", step: int) -> None:
        """LoRA, averages, moments, counters and metrics are bitwise equal, but for the record of replaced workers.

        Ranks of a worker count the evaluations of their padding.
        """
        state, expected = self.state(step), other.state(step)
        assert sorted(state) == sorted(expected) and all(torch.equal(state[name], expected[name]) for name in state)
        left_out = ("cluster/",) if self.ranks == other.ranks else ("cluster/", "evaluations/")
        rows, expected_rows = (
            [{key: value for key, value in row.items() if not key.startswith(left_out)} for row in run.untimed()]
            for run in (self, other)
        )
        assert rows == expected_rows
        assert self.counters(step) == other.counters(step)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "sd3"
    tiny.sd3(layers=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompt files and scorers."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "train.txt").write_text("\n".join(PROMPTS) + "\n")
    (folder / "val.txt").write_text("\n".join(PROMPTS[:4]) + "\n")
    (folder / "bright.py").write_text(BRIGHT)
    (folder / "bright_tensors.py").write_text(BRIGHT_TENSORS)
    return folder


@pytest.fixture(scope="session")
def arguments(model: Path, workplace: Path) -> Arguments:
    """The command line of a small run into `folder`; keyword arguments (`__` for a dot) and overrides replace keys."""

    def build(folder: Path, *overrides: str, scorer: str | Path = "bright.py", **keys: Any) -> list[str]:
        values: dict[str, Any] = dict(pair.split("=") for pair in SMALL.split()) | {
            "hydra.run.dir": folder,
            "model.path": model,
            "data.train": workplace / "train.txt",
            "sampling.call": "{max_sequence_length: 8}",
        }
        if scorer:
            values["reward.scorers.bright.path"] = workplace / scorer
        given = (*overrides, *(f"{name}=" for name in keys))
        if any(override.startswith(("experiment=", "checkpoint.resume=/")) for override in given):
            del values["algorithm"]  # the experiment or the run sets it
        values |= {name.replace("__", "."): value for name, value in keys.items()}
        last = {override.partition("=")[0]: override for override in overrides}  # of two
        return [*(f"{name}={value}" for name, value in values.items() if name not in last), *last.values()]

    return build


def with_last(arguments: list[str]) -> list[str]:
    """Of two arguments with one key the last one: what a test adds to a command replaces what is there."""
    return list({argument.partition("=")[0]: argument for argument in arguments}.values())


@pytest.fixture(scope="session")
def train(arguments: Arguments) -> Callable[..., Run]:
    """Run the command line in this process and expect success."""

    def run(folder: Path, *overrides: str, **keys: Any) -> Run:
        assert main(arguments(folder, *overrides, **keys)) == 0
        return Run(folder)

    return run


@pytest.fixture
def refused(arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run, expect the exit code, and return the message on stderr, which must be one line and no traceback."""

    def run(*overrides: str, expect: int = 1, **keys: Any) -> str:
        capsys.readouterr()
        assert main(arguments(tmp_path / "run", *overrides, **keys)) == expect
        message = capsys.readouterr().err
        assert message.startswith("error: ") and message.count("\n") == 1 and "Traceback" not in message, message
        return message

    return run


@pytest.fixture(scope="session")
def start() -> Callable[[list[str]], "subprocess.Popen[str]"]:
    """Start the command line as a process of its own, leader of a process group as under a shell."""

    def popen(arguments: list[str], cwd: Path = ROOT, **environment: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "gerl.trainer.main_flowgrpo", *with_last(arguments)],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return popen


@pytest.fixture(scope="session")
def run_of() -> type[Run]:
    return Run


@pytest.fixture(scope="session")
def assert_replayed() -> Callable[[Run], None]:
    """The dumped steps of a run (`trainer.dump`) are trained on again, bit for bit."""

    def replayed(run: Run) -> None:
        paths = dumped_steps(run.folder).values()
        assert paths
        for path in paths:
            found = replay(Request(dump=path, tolerance="0", trust=True))
            assert found.exact and found.weights and not found.environment

    return replayed

"""Whole runs on a simulated accelerator: equal to the CPU, resumed, offloaded, quantised, in half precision."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pretended
import pytest
import torch
from drills import more
from safetensors.torch import load_file

from gerl.cluster import Cluster
from gerl.evaluate.command import main as evaluate
from gerl.export.command import main as export
from gerl.preflight.arguments import main as preflight
from gerl.run.dump import dumped_steps, read_dump
from gerl.trainer.replay import Request as Replay
from gerl.trainer.replay import run as replay
from gerl.verify.command import Request as Verification
from gerl.verify.command import run as verify

TESTS = Path(pretended.__file__).parent
KEYS = "validation.every=1 checkpoint.every=1 checkpoint.keep=9".split()
WAYS = {
    "an encoder at a time": ["model.offload=encoders"],
    "a block at a time": ["model.offload=blocks"],
    "bf16": ["model.dtype=bfloat16"],
    "fp16": ["model.dtype=float16", "actor.ema_decay=0.9"],
    "full weights": ["model.train=full", "actor.lr=1e-4"],
    "full weights in bf16": ["model.train=full", "actor.lr=1e-4", "model.dtype=bfloat16"],
    "8-bit weights": ["model.quantize=int8"],
    "8-bit rollouts": ["rollout.quantize=int8"],
    "the old policy": ["algorithm=diffusion_nft", "actor.ema_decay=0.9"],
    "a step ahead": ["trainer.staleness=1"],
    "a rollback": ["guard.action=rollback"],
    "the base model as a reward": ["algorithm=awm_fast", "reward.scorers={base_alignment: {}}"],
}


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers of runs and evaluations in this process compute on the pretended device."""
    monkeypatch.setattr(Cluster, "worker_device", lambda self, rank: str(pretended.DEVICE))
    with pretended.computing():
        yield


def test_a_run_is_that_of_the_cpu_and_resumes_bit_for_bit(
    train: Callable[..., Any], workplace: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    keys = [*KEYS, f"validation.data={workplace / 'val.txt'}"]
    expected = train(tmp_path / "cpu", *keys)
    request.getfixturevalue("accelerator")
    found = train(tmp_path / "device", *keys)
    rows = zip(found.untimed(), expected.untimed(), strict=True)
    assert all(a == pytest.approx(b, rel=1e-2, abs=1e-5) for a, b in rows)
    torch.testing.assert_close(found.lora(2), expected.lora(2), rtol=1e-3, atol=1e-5)
    for run in (found, expected):
        assert export([f"run={run.folder}", f"out={run.folder / 'out'}", "format=peft"]) == 0
    files = [next((run.folder / "out").rglob("*.safetensors")) for run in (found, expected)]
    torch.testing.assert_close(load_file(files[0]), load_file(files[1]), rtol=1e-3, atol=1e-5)
    train(tmp_path / "resumed", *keys, trainer__steps=1)
    train(tmp_path / "resumed", "checkpoint.resume=auto", *keys).assert_same(found, 2)


@more
@pytest.mark.parametrize("way", WAYS)
def test_a_run_with(way: str, train: Callable[..., Any], workplace: Path, tmp_path: Path, accelerator: None) -> None:
    run = train(tmp_path / "run", *KEYS, f"validation.data={workplace / 'val.txt'}", *WAYS[way])
    assert [row["step"] for row in run.metrics] == [0, 1, 2]
    assert run.metrics[-1]["actor/grad_norm"] > 0


@more
@pytest.mark.parametrize(
    "way", ["an encoder at a time", "bf16", "full weights in bf16", "the old policy", "a step ahead"]
)
def test_a_dumped_step_with(
    way: str, train: Callable[..., Any], workplace: Path, tmp_path: Path, accelerator: None
) -> None:
    keys = [*KEYS, "trainer.dump=1", f"validation.data={workplace / 'val.txt'}"]
    run = train(tmp_path / "run", *keys, *WAYS[way])
    for path in dumped_steps(run.folder).values():
        found = replay(Replay(dump=path, tolerance="0", trust=True))
        assert found.exact and found.weights and not found.environment
        assert read_dump(path).record.environment.device == pretended.NAME
    assert {check.status for check in verify(Verification(run=run.folder, trust=True))} == {"ok"}


@more
@pytest.mark.parametrize(
    "processes",
    [["cluster.num_workers=2"], ["cluster.num_workers=1", "cluster.ranks_per_worker=2", "model.shard=all"]],
    ids=["two workers", "two ranks"],
)
def test_processes_over_ray(
    processes: list[str], train: Callable[..., Any], workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [*KEYS, f"validation.data={workplace / 'val.txt'}"]
    expected = train(tmp_path / "cpu", *keys, "cluster.num_workers=2")
    monkeypatch.setenv("GERL_PRETENDED", "1")  # the workers inherit both
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [TESTS / "in_workers", TESTS, TESTS.parent])))
    monkeypatch.setattr(Cluster, "worker_device", lambda self, rank: str(pretended.DEVICE))
    found = train(tmp_path / "device", *keys, "cluster.launcher=ray", *processes)
    torch.testing.assert_close(found.lora(2), expected.lora(2), rtol=1e-3, atol=1e-5)
    assert not torch.equal(found.lora(2), torch.zeros_like(found.lora(2)))


@more
def test_a_preflight(arguments: Callable[..., list[str]], tmp_path: Path, accelerator: None) -> None:
    assert preflight([*arguments(tmp_path / "run", scorer=""), f"out={tmp_path / 'report.json'}"]) == 0


@more
def test_rewards_on_tensors_and_an_evaluation(
    train: Callable[..., Any], workplace: Path, tmp_path: Path, accelerator: None
) -> None:
    run = train(
        tmp_path / "run", "algorithm=draft", "algorithm.last=1", *KEYS, scorer="bright_tensors.py",
        validation__data=workplace / "val.txt",
    )  # fmt: skip
    assert run.metrics[-1]["actor/grad_norm"] > 0
    assert evaluate([f"lora={run.folder}", f"out={tmp_path / 'evaluated'}", "trust=true"]) == 0

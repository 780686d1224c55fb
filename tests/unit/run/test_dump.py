"""The files of a dump, without a run; with one: tests/e2e/test_dump.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gerl.protocol import Prompt, RolloutTask, Sample, ScorerFailure, Segment
from gerl.run.checkpoint import ScheduleState, WorkerState
from gerl.run.dump import Dump, DumpError, Environment, StepRecord, dumped_steps, read_dump, tensor_file, write_record

SOFTWARE = {"gerl": {"version": "1", "code": "abc"}, "python": "3.11", "packages": {"torch": "2"}}
HERE = Environment(SOFTWARE, "cpu", "CPU", "float32", 1)
SAMPLES = [Sample(Prompt(0, "a", {"n": [1, None]}), i, 2**62 + i, 4, init_seed=7) for i in range(2)]
TASK = RolloutTask(0, SAMPLES, (Segment((2**62, 2**62 + 1), (0, 1), (0, 2), (0,), noise=((0, 0.5),)),))
WORKER = WorkerState(3, {"ema": 3}, False, ScheduleState(3))
RECORD = StepRecord(
    format=1, step=4, planned=9, lag=0, file="step_4.safetensors", sha256="",
    settings={"actor": {"lr": 1e-3}}, identity={}, environment=HERE, processes=1, holders=[0],
    limits=[None], policy_version=3, nonfinite=0, kl_coef=None,
    algorithm={}, extensions={}, worker=WORKER, tasks=[TASK], totals=[0.1 + 0.2, None],
    by_scorer={"bright": [0.1, None]}, failures=[[], [ScorerFailure("bright", "it failed")]], given=False,
    weights="abc", metrics={"actor/loss": 1e-17, "actor/kl": float("nan")},
)  # fmt: skip


def written(folder: Path, record: StepRecord = RECORD) -> Path:
    file = tensor_file(folder, record.step)
    file.add("credit", torch.tensor([[1.0, torch.nan]]))
    file.add("state/a", torch.arange(3))
    path = file.path.with_suffix(".json")
    write_record(path, replace(record, sha256=file.close()))
    return path


def test_a_dump_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert list(dumped_steps(tmp_path)) == [4] and dumped_steps(tmp_path)[4] == path
    dump = read_dump(path)
    changed = {"sha256": dump.record.sha256, "metrics": {"actor/loss": 1e-17, "actor/kl": None}}
    assert dump.record == replace(RECORD, **changed) and len(dump.record.sha256) == 64  # type: ignore[arg-type]
    assert dump.record.scores.samples == SAMPLES and dump.record.scores.failed == [1]
    assert read_dump(path.with_suffix(".safetensors")) == dump
    assert torch.equal(dump.tensor("credit").nan_to_num(), torch.tensor([[1.0, 0.0]]))
    assert list(dump.group("state/")) == ["a"]
    with pytest.raises(DumpError, match="no trajectory 0"):
        list(dump.trajectories("cpu"))
    assert max(map(len, path.read_text().splitlines())) < 2000  # a task per line


def test_a_dump_is_complete_or_absent(tmp_path: Path) -> None:
    written(tmp_path)
    file = tensor_file(tmp_path, 4)  # the step is taken again
    assert dumped_steps(tmp_path) == {}
    file.discard()
    assert [p.name for p in (tmp_path / "dumps").iterdir()] == ["step_4.safetensors"]


def damage(values: dict[str, Any], key: str, value: Any) -> str:
    return json.dumps({**values, key: value})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("format", 99, "update gerl"),
        ("format", "x", "cannot be read"),
        ("step", "four", "no usable step"),
        ("worker", {}, "no usable worker"),
        ("tasks", [{"id": 0}], r"no usable tasks\.0\.samples"),
        ("totals", [0.5], "totals does not have a value per image"),
        ("by_scorer", {"bright": []}, "bright does not have a value per image"),
    ],
)
def test_a_damaged_dump_names_what_is_wrong(key: str, value: Any, said: str, tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(damage(json.loads(path.read_text()), key, value))
    with pytest.raises(DumpError, match=said):
        read_dump(path)


def test_missing_and_truncated_tensors(tmp_path: Path) -> None:
    dump = read_dump(written(tmp_path))
    dump.tensors.write_bytes(dump.tensors.read_bytes()[:-9])
    with pytest.raises(DumpError, match="belongs beside"):
        Dump(dump.path, dump.record).tensor("credit")
    dump.path.write_text("{")
    with pytest.raises(DumpError, match="cannot be read"):
        read_dump(dump.path)


def test_environments_differ_in_what_is_named() -> None:
    other = replace(HERE, software={**SOFTWARE, "packages": {"torch": "3", "peft": "1"}}, threads=2)
    assert HERE.differences(HERE) == []
    assert HERE.differences(other) == ["torch: 2, 3", "threads: 1, 2", "peft: None, 1"]

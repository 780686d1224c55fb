"""The base model's judgement in whole runs: the same on any workers, of a LoRA and of full weights, and as a reward."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drills import more

from gerl.run.validation import JUDGED
from gerl.trainer.main_flowgrpo import main

KEYS = "algorithm=awm_fast trainer.steps=1 actor.lr=0.05 sampling.num_inference_steps=6 validation.every=1".split()
SHARDED = ["cluster.launcher=ray", "cluster.ranks_per_worker=2", "model.shard=all"]
FULL = ["model.train=full", "actor.lr=1e-3"]
WAYS = {  # keys of both runs, and of the one with several processes
    "two workers over Ray": ([], ["cluster.launcher=ray", "cluster.num_workers=2"]),
    "a sharded model": ([], SHARDED),
    "full weights, sharded": (FULL, SHARDED),
}


def judgement(folder: Path, step: int) -> dict[str, list[float]]:
    looks = json.loads((folder / "validation" / f"step_{step:06d}.json").read_text())["looks"]
    return {name: looks[name] for name in JUDGED}


@more
@pytest.mark.parametrize("way", WAYS)
def test_the_judgement_is_the_same_on_any_workers(
    way: str, arguments: Callable[..., list[str]], workplace: Path, tmp_path: Path, run_of: Any
) -> None:
    both, several_processes = WAYS[way]
    keys = [*KEYS, f"validation.data={workplace / 'val.txt'}", *both]
    assert main(arguments(tmp_path / "one", *keys)) == 0
    assert main(arguments(tmp_path / "several", *keys, *several_processes)) == 0
    for step in (0, 1):
        one, several = (judgement(tmp_path / name, step) for name in ("one", "several"))
        assert all(one[name] == pytest.approx(several[name], rel=1e-3) for name in JUDGED)
    first, last = (judgement(tmp_path / "one", step) for step in (0, 1))
    assert first["own_error"] != last["own_error"]
    row = run_of(tmp_path / "one").metrics[-1]
    assert row["val/base/surprise/gain_low"] <= row["val/base/surprise/gain"] <= row["val/base/surprise/gain_high"]


def test_the_base_model_is_the_reward(
    arguments: Callable[..., list[str]], workplace: Path, tmp_path: Path, run_of: Any
) -> None:
    held_out = f"validation.data={workplace / 'val.txt'}"
    keys = [*KEYS, held_out, "reward.scorers={base_alignment: {kwargs: {draws: 2}}}"]
    assert main(arguments(tmp_path / "run", *keys, scorer="")) == 0
    run = run_of(tmp_path / "run")
    assert len(run.column("reward/base_alignment/mean")) == 1
    assert run.column("val/base_alignment/mean") == pytest.approx(run.column("val/reward/mean"))
    errors = judgement(tmp_path / "run", 0)
    assert len(errors["own_error"]) == 4
    off = [*KEYS, held_out, "guard.judge=off", "reward.scorers={base_alignment: {}}"]
    assert main(arguments(tmp_path / "off", *off, scorer="")) == 0
    assert not any(name.startswith("val/base/") for name in run_of(tmp_path / "off").metrics[-1])


def test_one_prompt_has_no_other_to_be_compared_with(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("a fox\n")
    keys = [*KEYS, f"data.train={tmp_path / 'one.txt'}", "rollout.prompts_per_step=1"]
    assert main(arguments(tmp_path / "run", *keys, "reward.scorers={base_alignment: {}}", scorer="")) == 1
    assert "base_alignment compares each prompt with another one" in capsys.readouterr().err

"""time_to_reward: what it counts, and what it refuses."""

import json
import sys
from pathlib import Path

import pytest
import time_to_reward

SMALL = """
rwr trainer.steps=1 validation.every=1 sampling.num_inference_steps=3 rollout.prompts_per_step=1 rollout.n=4
rollout.micro_batch_size=4 validation.max_prompts=2 cluster.threads_per_worker=1 --seeds 7
""".split()


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["time_to_reward.py", *arguments])
    return time_to_reward.main()


def test_a_run_counts_what_it_paid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert call(monkeypatch, "reward.scorers={sharpness: {}}", *SMALL, "--images-before", "5", "--out", str(out)) == 0
    [run] = map(json.loads, out.read_text().splitlines())
    first, last = run["points"]
    # 4 images of 3 steps, an update of 2 noise levels (all steps but the last), and the engine's first call for one
    # sample, which shows it the batch dimensions; validations cost nothing, 5 images of before as much as drawing them
    assert (first["forward"], first["backward"], first["images"]) == (5 * 3, 0, 5)
    assert (last["step"], last["forward"], last["backward"], last["images"]) == (1, 9 * 3 + 4 * 2 + 1, 4 * 2, 9)
    assert first["cpu_seconds"] == pytest.approx(run["validation_seconds"] * 5 / 2)  # of 2 held-out prompts
    assert last["cpu_seconds"] > first["cpu_seconds"] and last["exact"] is None  # no OCR
    assert 0 < run["validation_seconds"] < 60
    assert (run["algorithm"], run["seed"], run["optimizer_steps"], run["error"]) == ("rwr", 7, 1, "")
    assert run["gerl"]["version"] and run["torch"] and run["hardware"]["cores"] and len(run["fingerprint"]) == 16
    assert "| rwr | 7 | 1 | 1 | 36 | 8 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--suite", "rwr", "trainer.steps=1"], "--results"), (["rwrr"], "no algorithm rwrr"), (["--jobs=x"], "--jobs")],
)
def test_a_wrong_command_line_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        call(monkeypatch, *arguments)
    assert message in capsys.readouterr().err

"""The table of benchmarks/guard.py, and that docs/guard.md has that of the results."""

import json
from pathlib import Path
from typing import Any

import guard
import pytest

from gerl.commandline.composition import compose_run


def run(reward: str, seed: int, rewards: list[float], alarms: list[int]) -> dict[str, Any]:
    points = [{"step": 2 * i, "reward": value, "ocr": 0.5, "ocr/exact": 0.2} for i, value in enumerate(rewards)]
    signal = {"signal": "watched", "column": "ocr", "value": -0.1, "threshold": -0.05}
    signals = [{"step": step, **signal} for step in alarms]
    return {"reward": reward, "seed": seed, "points": points, "signals": signals}


@pytest.mark.parametrize("reward", guard.REWARDS)
def test_every_reward_is_a_run_that_composes(reward: str) -> None:
    config = compose_run(guard.Job(reward, 3).arguments).config
    weighted = {name for name, scorer in config.reward.scorers.items() if scorer.weight}
    assert weighted == {"ocr", "colour"} if reward == guard.HONEST else not weighted & {"ocr", "colour"}
    assert config.trainer.seed == 3 and {"ocr", "colour"} <= set(config.reward.scorers)


def test_the_table_says_when_a_hack_was_seen_and_how_far_it_had_come() -> None:
    runs = [run("brightness", 1, [0.4, 0.5, 0.9], [2, 4]), run("brightness", 2, [0.4, 0.8, 0.9], [4])]
    runs += [run(guard.HONEST, seed, [0.5, 0.9], [2] if seed == 1 else []) for seed in range(20)]
    card = {"cpu": "a CPU", "cores": 2, "torch": "2"}
    text = guard.table({"runs": runs, "card": card, "command": "benchmarks/guard.py"})
    assert "| brightness | 2 | 0.400, 0.900 | 20%, 20% | 2, 1 | 3 (2 to 4) | 60% (100%) | `watched/ocr` 2 |" in text
    assert "False alarms: 1 of 20 runs (95 % interval 0% to 25%)." in text


def test_the_interval_of_a_share_is_exact() -> None:
    assert guard.interval(0, 20) == "0% to 17%" and guard.interval(20, 20) == "83% to 100%"


def test_the_page_has_the_table_of_the_results() -> None:
    page = guard.PAGE.read_text(encoding="utf-8")
    assert guard.table(json.loads(guard.RESULTS.read_text())) in page
    assert Path(guard.MINE).is_file()

"""When the progress of a run begins and ends."""

from types import SimpleNamespace
from typing import Any

import pytest

from gerl.config import Config, TrainerConfig
from gerl.progress import Stopwatch
from gerl.run.validation import Estimate
from gerl.trainer.extensions import progress
from gerl.trainer.extensions.progress import ProgressBar
from gerl.trainer.step import Step


class Bar:
    """In place of the bar: what it is told."""

    def __init__(self, total: int, initial: int, disable: bool) -> None:
        self.told: list[Any] = [(total, initial)]
        self.done = initial

    def go_back(self, step: int) -> None:
        self.told.append(step)
        self.done = step

    def update(self, values: dict[str, Any]) -> None:
        self.told.append(values)
        self.done += 1

    def close(self) -> None:
        self.told.append("closed")


def run_of(step: int, held_out: bool) -> Any:
    state = SimpleNamespace(step=step, unlogged={})
    validated = step or None
    history = SimpleNamespace(validated=validated, reward=None, gain=None)
    return SimpleNamespace(state=state, plan=SimpleNamespace(steps=5, held_out=held_out), history=history)


@pytest.mark.parametrize(("step", "held_out"), [(0, True), (0, False), (3, True)])
def test_it_begins_when_the_model_is_loaded_and_validated(
    step: int, held_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a step is not that of the start, and nothing stands on the screen where the start fails."""
    monkeypatch.setattr(progress, "Progress", Bar)
    bar, run = ProgressBar(Config(trainer=TrainerConfig(steps=5))), run_of(step, held_out)
    bar.stepping(run)
    assert bar.bar is None
    bar.ended(run, ValueError("the model cannot be loaded"))
    bar.starting(run)
    if step == 0 and held_out:
        bar.stepping(run)
        bar.concluded(run, Step(0, Stopwatch()))
        assert bar.bar is None
        run.history.validated = 0
    bar.stepping(run)
    found: Any = bar.bar
    assert found is not None and found.told == [(5, step)]
    run.history.reward, run.history.gain = 0.5, Estimate(0.1, 0.05, 0.15, 8)
    bar.concluded(run, Step(step + 1, Stopwatch(), metrics={"reward/mean": 0.25}))
    bar.ended(run, None)
    assert found.told[1:] == [{"reward": 0.25, "held-out": "0.500 (+0.050 to +0.150)"}, "closed"]

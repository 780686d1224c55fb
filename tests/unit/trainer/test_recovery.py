"""A run that begins again, and what is said of one that ends before its time."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crediting import config

from gerl.algorithms import build_algorithm
from gerl.errors import GerlError, Interrupted
from gerl.protocol import Prompt
from gerl.run.checkpoint import RunState, save_checkpoint
from gerl.trainer.extensions import build_extensions
from gerl.trainer.plan import Plan
from gerl.trainer.recovery import add_resume_notes, begin_again, interruption_logged
from gerl.trainer.roles import POLICY, Role
from gerl.trainer.run import Run
from gerl.trainer.update import Update


@pytest.mark.parametrize(
    ("steps", "finished", "remedy"),
    [
        (2, True, "gerl.run.report run="),
        (3, True, "checkpoint.resume="),  # prolonged, and stopped before its first step
        (2, False, "checkpoint.resume="),  # the last step is not logged
    ],
)
def test_a_run_that_was_interrupted_says_how_to_go_on(tmp_path: Path, steps: int, finished: bool, remedy: str) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path / "checkpoints", step, {}, {"finished": finished and step == 2})
    with pytest.raises(Interrupted) as caught, interruption_logged(tmp_path, steps):
        raise Interrupted(15)
    (note,) = caught.value.__notes__
    assert str(tmp_path / "checkpoints" / "step_2") in note and f"{remedy}{tmp_path}" in note


def test_a_damaged_checkpoint_is_not_the_end_of_a_run(tmp_path: Path) -> None:
    path, error = save_checkpoint(tmp_path / "checkpoints", 2, {}, {"finished": True}), GerlError("no")
    (path / "state.json").write_text("{")
    add_resume_notes(error, tmp_path, 2)
    assert "checkpoint.resume=" in error.__notes__[0]


def test_a_reason_is_given_once(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device")
    for cause, said in ((full, "(for the same reason)"), (ValueError("x"), "No space left on device")):
        error = GerlError("metrics.jsonl cannot be written")
        error.__cause__ = cause
        add_resume_notes(error, tmp_path, 3, 2, "step_2 cannot be written: No space left on device; nothing was kept")
        assert said in error.__notes__[0]


def test_a_run_that_begins_again_has_forgotten_all_that_it_learned() -> None:
    """Where no worker is left and there is no checkpoint: it must go on as if nothing had been."""
    settings = config(kl_coef=0.1, kl_share=0.5)
    fleet: Any = SimpleNamespace(workers=[None], forget_sync=lambda: None)
    state = RunState(step=3, identity={"a": "b"}, kl_coef=0.4)
    extensions, plan = build_extensions(settings, ("gardo:KLGate",)), Plan(settings, [Prompt(0, "a")])
    whole = Run(settings, Path(), plan, fleet, fleet, extensions, state)
    update = Update(settings, build_algorithm(settings), fleet, state, half_precision=False)
    whole.set_roles({POLICY: Role(POLICY, settings, fleet, update)})
    gate = extensions["gardo"].gate  # type: ignore[attr-defined]
    for seed in range(3):
        draws = torch.rand(12, generator=torch.Generator().manual_seed(seed))
        gate.choose(draws, -draws[:, None] * seed)
    whole.algorithm.kl_coef = 0.4
    assert gate.past
    begin_again(whole)
    assert (whole.state.step, whole.state.identity, whole.state.kl_coef) == (0, {"a": "b"}, None)
    assert gate.past == [] and gate.share == 0.5
    assert whole.algorithm.kl_coef == 0.1

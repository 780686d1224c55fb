"""Steps that are drawn ahead of the one that is trained: with earlier weights, and the same numbers every time."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drills import more

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "checkpoint.every=1 checkpoint.keep=9 actor.lr=0.01 actor.updates_per_step=2 rollout.micro_batch_size=2".split()
)
STEPS = 5
Train = Callable[..., Any]


@pytest.fixture(scope="module")
def whole(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(tmp_path_factory.mktemp("whole") / "run", *SETTINGS, trainer__steps=STEPS, trainer__staleness=2)


def test_steps_are_drawn_with_the_weights_there_were_so_many_steps_ago(
    whole: Any, train: Train, tmp_path: Path
) -> None:
    on_time = train(tmp_path / "run", *SETTINGS, trainer__steps=STEPS)
    assert whole.column("actor/staleness") == [0, 1, 2, 2, 2] and not on_time.column("actor/staleness")
    # the first three steps are drawn by the weights that the run begins with: their images are those of a run that
    # does not learn, and those of step 1 the same as without staleness
    still = train(tmp_path / "still", *SETTINGS, "actor.lr=1e-30", trainer__steps=STEPS)
    reward = {name: run.column("reward/mean") for name, run in (("late", whole), ("now", on_time), ("still", still))}
    assert reward["late"][:3] == pytest.approx(reward["still"][:3], abs=1e-7)
    assert reward["late"][0] == reward["now"][0] and reward["late"][2] != reward["now"][2]
    assert reward["late"][3] != pytest.approx(reward["still"][3], abs=1e-7)
    # where they are the same, the ratio must be 1; elsewhere it is measured
    assert len(whole.column("actor/ratio_deviation")) == 1 and len(on_time.column("actor/ratio_deviation")) == STEPS
    assert whole.column("actor/off_policy/log_ratio_abs")[2] > on_time.column("actor/off_policy/log_ratio_abs")[2]


@more
@pytest.mark.parametrize(
    ("algorithm", "own"),
    [
        ("flow_grpo", ["algorithm.decoupled=true"]),
        ("diffusion_nft", ["algorithm.rollout_decay=[0,0.3,0.1,0.9]"]),  # a policy of its own draws
    ],
    ids=["decoupled", "diffusion_nft"],
)
def test_a_resumed_run_draws_again_what_was_on_its_way(
    algorithm: str, own: list[str], train: Train, tmp_path: Path, whole: Any
) -> None:
    settings = [*SETTINGS, f"algorithm={algorithm}", *own]
    late, whole = whole, train(tmp_path / "whole", *settings, trainer__steps=STEPS, trainer__staleness=2)
    assert not torch.equal(late.lora(STEPS), whole.lora(STEPS))
    folder = tmp_path / "run"
    for steps in (1, 3, STEPS):
        more = [] if steps == 1 else [f"checkpoint.resume={folder}"]
        run = train(folder, *settings, *more, trainer__steps=steps, trainer__staleness=2)
    run.assert_same(whole, STEPS)


@more
def test_over_ray_a_worker_may_die_with_what_was_on_its_way(
    whole: Any, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sample.0.4").write_text(str(int(signal.SIGKILL)))
    monkeypatch.setenv("GERL_KILLS", str(tmp_path))  # the workers inherit both
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "in_workers"), str(ROOT)]))
    more = {"cluster__launcher": "ray", "trainer__steps": STEPS, "trainer__staleness": 2}
    run = train(tmp_path / "run", *SETTINGS, **more)
    assert "continuing from step 1 with 1 new process(es)" in caplog.text
    state, expected = run.state(STEPS), whole.state(STEPS)  # another process may round in another way
    assert sorted(state) == sorted(expected)
    assert all(torch.allclose(state[name], expected[name], rtol=1e-4, atol=2e-5) for name in state)
    rows = [{key: value for key, value in row.items() if not key.startswith("cluster/")} for row in run.untimed()]
    for row, other in zip(rows, whole.untimed(), strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-5)

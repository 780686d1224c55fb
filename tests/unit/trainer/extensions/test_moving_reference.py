"""When the reference of the KL moves to the trained weights."""

from types import SimpleNamespace
from typing import Any

from gerl.algorithms import build_algorithm
from gerl.config import Config, algorithm_config
from gerl.progress import Stopwatch
from gerl.protocol import UpdateStats
from gerl.trainer.extensions.moving_reference import MovingReference
from gerl.trainer.step import Step


def test_the_reference_is_reset_by_time_or_by_its_distance() -> None:
    assert not MovingReference.wanted(Config(algorithm=algorithm_config(kl_coef=0.1)))
    config = Config(algorithm=algorithm_config(kl_coef=0.1, kl_reset_every=3, kl_reset_above=0.2))
    assert MovingReference.wanted(config)
    extension, algorithm, due = MovingReference(config), build_algorithm(config), list[bool]()
    run: Any = SimpleNamespace(algorithm=algorithm)
    for number in range(1, 8):
        step = Step(number, Stopwatch(), stats=UpdateStats(4, {"kl": 1.0 if number == 4 else 0.2}))  # 4 pairs
        due.append(extension.updating(run, step))
        extension.updated(run, step)
        assert step.metrics["actor/reference_step"] == algorithm.reference_step
    assert due == [False, False, True, True, False, False, True]
    again = build_algorithm(config)
    again.load_state(algorithm.state())
    assert again.reference_step == 7 and algorithm.state()["reference_step"] == 7


def test_without_a_measured_kl_only_time_counts() -> None:
    config = Config(algorithm=algorithm_config(kl_coef=0.1, kl_reset_every=2, kl_reset_above=0.2))
    extension, run = MovingReference(config), SimpleNamespace(algorithm=build_algorithm(config))
    assert [extension.updating(run, Step(n, Stopwatch())) for n in (1, 2)] == [False, True]  # type: ignore[arg-type]

"""From one micro-batch to a step: sums that can be done by hand."""

from dataclasses import replace
from typing import Any

import pytest
from training import config

from gerl.config import Config, ValidationConfig
from gerl.preflight.forecast import Run, busiest, forecast_memory, forecast_seconds, rows_of, sized
from gerl.preflight.measure import Usage
from gerl.protocol import Prompt, RolloutTask, Sample, Segment

RUN = Run(
    images=4,
    drawn=4,
    trained=2,
    rollout=Usage(8.0, 1400),
    update=Usage(4.0, 1200),
    step_seconds=0.5,
    trajectories=40,
    deviation=0.0,
    finite=True,
    gradients={"transformer": 3},
    unit="image",
)


def tasks(*sizes: int) -> list[RolloutTask]:
    segment = Segment((0,), (0,), (), ())
    return [
        RolloutTask(i, [Sample(Prompt(0, "a"), k, k, 1) for k in range(n)], (segment,)) for i, n in enumerate(sizes)
    ]


def test_the_worker_with_most_images_decides() -> None:
    assert (
        busiest(tasks(4, 4, 4, 2), 2) == 8 and busiest(tasks(4, 4, 4, 2), 4) == 4 and busiest(tasks(4, 4, 4), 1) == 12
    )
    # two updates of (4, 4) and (4, 2): 4 + 4 images for the busier worker, 2 s an image drawn, 1 s trained
    two = replace(config("flow_grpo"), actor=replace(config("flow_grpo").actor, updates_per_step=2))
    found = forecast_seconds(two, tasks(4, 4, 4, 2), 2, RUN, share=1.0)
    assert (found.images, found.images_per_worker) == (14, 8)
    assert (found.rollout, found.update, found.step) == (16.0, 8.0 + 2 * 0.5, 25.0)
    assert forecast_seconds(two, tasks(4, 4, 4, 2), 2, RUN, share=0.25).update == 2.0 + 2 * 0.5


@pytest.mark.parametrize(
    ("capacity", "rollout", "update"),
    [
        # 10 bytes for each of 20 images are held; without them the rollout takes 1000 + 90 n, the update 960 + 100 n
        (None, None, None),
        (10_000, 20, 20),
        (2000, 6, 6),
        (1700, 3, 3),
        (1000, 0, 0),
    ],
)
def test_the_largest_micro_batch(capacity: int | None, rollout: int | None, update: int | None) -> None:
    c = replace(config("flow_grpo"), validation=ValidationConfig(micro_batch_size=32))
    small = replace(RUN, images=1, drawn=1, trained=1, rollout=Usage(2, 1100), update=Usage(1, 1070), trajectories=10)
    found = forecast_memory(c, [small, RUN], RUN, 20, range(1, 21), capacity)
    assert (found.trajectories, found.rollout, found.update) == (200, 1560, 1360)
    assert (found.largest_rollout, found.largest_update) == (rollout, update)
    assert found.validation == 1000 + 90 * 32


def test_what_is_not_measured_is_not_known() -> None:
    blind = replace(RUN, rollout=Usage(8.0, None), update=Usage(4.0, None))
    found = forecast_memory(config("flow_grpo"), [blind, blind], blind, 20, range(1, 21), 10_000)
    assert (found.rollout, found.update, found.largest_rollout, found.validation) == (None, None, None, None)


def test_sizes() -> None:
    changed: Config = sized(config("flow_grpo"), 6, 3)
    assert (changed.rollout.micro_batch_size, changed.actor.micro_batch_size, changed.rollout.n) == (6, 3, 4)
    segments: list[Any] = [Segment((0, 1), (0, 1), (), ()), Segment((0, 1, 2), (0, 1, 2), (), ())]
    assert rows_of(segments) == 3

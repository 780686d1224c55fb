"""At which steps a sheet of training images is saved."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gerl.algorithms import build_algorithm
from gerl.algorithms.planning import plan_samples
from gerl.cluster import Pending
from gerl.config import Config, LoggerConfig, TrainerConfig, ValidationConfig
from gerl.progress import Stopwatch
from gerl.protocol import Images, Prompt, Scores
from gerl.trainer.extensions.training_images import TrainingImages
from gerl.trainer.plan import Plan
from gerl.trainer.step import Step


@pytest.mark.parametrize("held_out", [[], [Prompt(0, "x")]])
def test_a_sheet_is_saved_as_often_as_there_is_a_validation_also_without_held_out_prompts(held_out: list[Any]) -> None:
    config = Config(
        trainer=TrainerConfig(steps=5), validation=ValidationConfig(every=2), logger=LoggerConfig(live=False)
    )
    found = dict[int, tuple[str, tuple[int, int]]]()

    def picture(step: int, name: str, image: Image.Image) -> None:
        found[step] = name, image.size

    run: Any = SimpleNamespace(config=config, plan=Plan(config, [Prompt(0, "a")], held_out), picture=picture)
    samples = plan_samples(config, [Prompt(0, "a"), Prompt(1, "b")], 1, 0)
    tasks = build_algorithm(config).plan(samples)
    for number in range(1, 6):
        step = Step(number, Stopwatch(), tasks=list(tasks))
        step.scores.add(Scores(samples, [1.0] * len(samples), {}, [[] for _ in samples]))
        pixels = np.zeros((len(tasks[0].samples), 8, 8, 3), np.uint8)
        step.images = [Pending("worker", value=Images(0, pixels, 0.0))]
        TrainingImages(config).credited(run, step)
        assert (number in found) == (number != 3)
    assert {name for name, _ in found.values()} == {"train"} and list(found) == [1, 2, 4, 5]

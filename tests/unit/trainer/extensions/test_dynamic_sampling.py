"""Further prompts in place of groups that teach nothing."""

from types import SimpleNamespace
from typing import Any

import torch
from crediting import PROMPTS, Crediting, config, scored

from gerl.algorithms import build_algorithm
from gerl.algorithms.planning import plan_samples
from gerl.progress import Stopwatch
from gerl.protocol import Group, Scores
from gerl.trainer.extensions.dynamic_sampling import DynamicSampling
from gerl.trainer.step import Step


def test_dynamic_sampling_trains_on_the_first_groups_with_a_signal() -> None:
    crediting = Crediting(config(dynamic_sampling=2))
    found = scored(crediting.config, [5.0, 5.0, 1.0, 3.0, 2.0, 4.0, 0.0, 8.0])
    assert found.groups_with_signal() == [Group(1), Group(2), Group(3)]
    credit = crediting.step(found).credit
    assert credit is not None and credit[[0, 1, 6, 7]].isnan().all()
    assert credit[2:6, 0].tolist() == [-1.0, 1.0, -1.0, 1.0]
    assert not torch.isnan(credit[2:6]).any()


def test_rounds_are_asked_for_until_enough_groups_have_a_signal_or_there_were_too_many() -> None:
    nobody: Any = SimpleNamespace(sample=lambda *arguments: arguments)
    c = config(dynamic_sampling=2)
    extension, asked = DynamicSampling(c), list[bool]()

    def rounds(*totals: list[float]) -> list[bool]:
        asked.clear()
        step = Step(1, Stopwatch())
        for number, values in enumerate(totals):
            samples = plan_samples(c, PROMPTS[2 * number % 4 :][:2], 1, 0)
            step.round = build_algorithm(c).plan(samples)
            step.scores.add(Scores(samples, list(values), {"a": list(values)}, [[] for _ in values]))
            step.rounds += 1
            asked.append(extension.scored(nobody, step) is not None)
        step.credit = torch.zeros(len(step.scores.samples), 3)
        extension.credited(nobody, step)
        assert step.metrics["group/further_prompts"] == 2.0 * (len(totals) - 1)
        return asked

    same, differ = [1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 1.0, 2.0]
    assert rounds(differ) == [False]
    assert rounds([1.0, 1.0, 1.0, 2.0], differ) == [True, False]
    assert rounds(same, same, same) == [True, True, False]

"""Every algorithm on a simulated accelerator: the gradients of the CPU, and no synchronisation within a replay."""

from collections import Counter
from typing import Any

import pretended
import pytest
import torch
import training
from pretended import COUNTS
from training import new_policy, on_device

from gerl import engine
from gerl.config.registry import ALGORITHMS
from gerl.model.policy import Policy

KEYS: dict[str, dict[str, Any]] = {"branch_grpo": {"steps": 6}, "tree_grpo": {"steps": 6}, "srpo": {"steps": 12}}


def update(name: str, policy: Policy) -> tuple[torch.Tensor, training.UpdateStats]:
    given = training.Training(training.config(name, **KEYS.get(name, {})), policy)
    count = sum(len(task.samples) for task, _, _ in given.tasks)
    signs = torch.tensor([1.0, -1.0]).repeat(count)[:count] if name == "diffusion_dpo" else torch.linspace(-1, 1, count)
    credit = signs[:, None].expand(-1, given.config.sampling.num_inference_steps).clone()
    gradient, stats = given.gradient(credit)
    given.actor.step()
    return gradient, stats


@pytest.mark.parametrize("name", list(ALGORITHMS.shipped))
def test_an_update_on_the_device_is_that_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: Counter[str] = Counter()

    def watched(pipe: Any, tape: Any, on_step: Any, *args: Any, **kwargs: Any) -> None:
        """A replay, and what waited for the device between its first and its last trained step."""
        places: list[int] = []

        def noted(k: int, step: Any) -> Any:
            places.append(len(COUNTS.events))
            loss = on_step(k, step)
            places.append(len(COUNTS.events))
            return loss

        replay(pipe, tape, noted, *args, **kwargs)
        if places and COUNTS.traced:
            waited.update(COUNTS.own("sync", places[0], places[-1]))

    replay = engine.replay
    expected, _ = update(name, new_policy())
    monkeypatch.setattr(engine, "replay", watched)
    with pretended.pretending(), COUNTS.counting():
        found, _ = update(name, on_device(new_policy()))
    assert float((found.cpu() - expected).norm()) <= 2e-4 * float(expected.norm())
    assert expected.norm() > 0
    assert not waited, waited

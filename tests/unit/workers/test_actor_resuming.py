"""The state of an actor: it continues bitwise, and one that does not fit is refused."""

import json
import re
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from actors import new_actor, stepped, weights
from pydantic import TypeAdapter
from training import new_policy

from gerl.errors import CheckpointError
from gerl.protocol import StepResult
from gerl.run.checkpoint import WorkerState
from gerl.utils.tensors import pack_tensors, unpack_tensors
from gerl.workers.actor import Actor


def updated(actor: Actor, updates: range) -> list[StepResult]:
    seeds = [torch.Generator().manual_seed(k) for k in updates]
    return [stepped(actor, torch.randn(weights(actor).shape, generator=g)) for g in seeds]


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_an_actor_continues_bitwise(schedule: str) -> None:
    settings: dict[str, Any] = {"lr": 0.01, "lr_schedule": schedule, "warmup_steps": 1, "total_updates": 6}
    actor = new_actor(**settings)
    updated(actor, range(3))
    tensors, numbers = actor.state()
    saved, text = pack_tensors(tensors), json.dumps(asdict(numbers))
    expected = updated(actor, range(3, 6))

    resumed = new_actor(new_policy(perturbed=False), **settings)
    resumed.load_state(unpack_tensors(saved), TypeAdapter(WorkerState).validate_json(text))
    assert resumed.policy.version == 3 and resumed.policy.ema.updates == 3
    assert updated(resumed, range(3, 6)) == expected
    end, resumed_end = actor.state(), resumed.state()  # weights, averages, moments
    torch.testing.assert_close(resumed_end[0], end[0], rtol=0, atol=0)
    assert end[1] == resumed_end[1]
    fresh = new_actor(new_policy(perturbed=False), **settings)
    updated(fresh, range(3, 6))
    assert not torch.equal(weights(fresh), weights(actor))


def test_the_state_before_the_first_update() -> None:
    actor, other = new_actor(), new_actor(new_policy(perturbed=False))
    tensors, numbers = actor.state()
    other.load_state(unpack_tensors(pack_tensors(tensors)), numbers)
    assert torch.equal(weights(other), weights(actor)) and not other.optimizer.state
    updated(actor, range(2))
    updated(other, range(2))
    assert torch.equal(weights(other), weights(actor))


def damaged(key: str, value: torch.Tensor | None) -> Any:
    """The state of an actor with a tensor replaced, or removed."""
    actor = new_actor()
    updated(actor, range(2))
    tensors, numbers = actor.state()
    return {name: v for name, v in (tensors | {key: value}).items() if v is not None}, numbers


NAME = next(iter(new_policy().trained))
SHAPE = new_policy().trained[NAME].shape


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((f"{kind}/{NAME}", None) for kind in ("lora", "ema", "optimizer/step", "optimizer/exp_avg_sq")),
        (f"lora/{NAME}", torch.zeros(1)),  # a shape that would broadcast
        (f"ema/{NAME}", torch.zeros(SHAPE[0], 1)),
        (f"optimizer/exp_avg/{NAME}", torch.zeros(*SHAPE, 1)),
        (f"optimizer/step/{NAME}", torch.zeros(SHAPE)),
        (f"lora/{NAME}", torch.zeros(SHAPE, dtype=torch.float16)),
        (f"old/{NAME}", torch.zeros(SHAPE)),  # of another algorithm
        ("lora/denoiser.elsewhere", torch.zeros(SHAPE)),
    ],
)
def test_a_state_that_does_not_fit_is_a_sentence_and_changes_nothing(key: str, value: torch.Tensor | None) -> None:
    actor = new_actor()
    before = {name: v.clone() for name, v in actor.state()[0].items()}
    with pytest.raises(CheckpointError, match=re.escape(key)):
        actor.load_state(*damaged(key, value))
    after = actor.state()[0]
    assert after.keys() == before.keys() and all(torch.equal(v, before[name]) for name, v in after.items())


@pytest.mark.parametrize("changed", [{"averages": {}}, {"averages": {"ema": 1, "old": 1}}, {"policy_version": -1}])
def test_counts_that_do_not_fit_are_a_sentence(changed: dict[str, Any]) -> None:
    tensors, numbers = new_actor().state()
    with pytest.raises(CheckpointError, match=r"state\.json"):
        new_actor().load_state(tensors, replace(numbers, **changed))


@pytest.mark.parametrize(
    "changed", [{"lr": 0.02}, {"lr_schedule": "constant"}, {"warmup_steps": 3}, {"total_updates": 20}, {"lr": 0.3}]
)
def test_a_changed_learning_rate_schedule_takes_effect_from_the_next_update(changed: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"lr": 0.1, "lr_schedule": "cosine", "total_updates": 10}
    actor = new_actor(**settings)
    updated(actor, range(4))
    resumed, other = new_actor(**(settings | changed)), new_actor(**(settings | changed))
    resumed.load_state(*actor.state())
    expected = updated(other, range(7))[4:]
    found = updated(resumed, range(4, 7))
    # the rates of a run that had the new ones from its start; its weights are others, it had them for longer
    assert [replace(r, lora_max=None) for r in found] == [replace(r, lora_max=None) for r in expected]
    assert found[0].lr != updated(actor, range(4, 5))[0].lr


def test_changed_betas_epsilon_and_decay_take_effect() -> None:
    actor, gradient = new_actor(), torch.ones_like(weights(new_actor()))
    stepped(actor, gradient)
    moved = []
    usual: dict[str, Any] = {"betas": [0.9, 0.999], "weight_decay": 1e-4, "eps": 1e-8}
    for changed in ({}, {"betas": [0.1, 0.999]}, {"weight_decay": 0.5}, {"eps": 1.0}):
        resumed = new_actor(**(usual | changed))
        resumed.load_state(*actor.state())
        stepped(resumed, -gradient)
        moved.append(weights(resumed))
    assert not any(torch.equal(moved[0], other) for other in moved[1:])


def test_a_reference_that_was_reset_is_saved_and_a_run_without_one_refuses_it() -> None:
    settings: dict[str, Any] = {"lr": 0.01, "kl_coef": 0.1, "kl_reset_every": 2}
    actor = new_actor(**settings)
    updated(actor, range(2))
    actor.finish_step(2, resets=True)
    updated(actor, range(2, 3))
    tensors, numbers = actor.state()
    resumed = new_actor(new_policy(perturbed=False), **settings)
    resumed.load_state(unpack_tensors(pack_tensors(tensors)), numbers)
    kept, again = (one.policy.averages()["reference"].average for one in (actor, resumed))
    assert all(torch.equal(kept[name], again[name]) for name in kept) and numbers.averages["reference"] == 2
    with pytest.raises(CheckpointError, match="reference"):
        new_actor(lr=0.01, kl_coef=0.1).load_state(tensors, numbers)

"""The state of a worker that trains the weights themselves: kept, written in parts, and read again."""

import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from actors import new_actor, stepped, weights
from safetensors.torch import load_file
from training import config

from gerl.errors import CheckpointError
from gerl.model.ema import EMA
from gerl.model.policy import Policy
from gerl.model.shards import Part, Shards
from gerl.model.whole import chosen, parameters_of
from gerl.run.state import STATE
from gerl.workers.actor import Actor
from gerl.workers.hybrid import HybridWorker
from gerl.workers.keeping import Keeping
from gerl.workers.whole import Writing, load_state, parts_of


def whole_actor(train: str = "full", **settings: Any) -> Actor:
    pipe = tiny.build(tiny.CASES["sd3"])
    denoisers = {"transformer": tiny.denoiser_of(pipe)}
    denoisers["transformer"].requires_grad_(False)
    trained = parameters_of(denoisers, chosen(train, denoisers))
    for p in trained.values():
        p.requires_grad_()
    return new_actor(Policy(pipe, denoisers, trained, EMA(trained, 0.9), whole=True), **settings)


def update(actor: Actor, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    stepped(actor, torch.randn(weights(actor).shape, generator=generator))


def test_the_base_is_kept_where_an_algorithm_asks_for_it() -> None:
    actor = whole_actor(kl_coef=0.1, lr=0.01)
    first = weights(actor).clone()
    update(actor, 0)
    now = weights(actor).clone()
    with actor.policy.base():
        assert torch.equal(weights(actor), first)
    assert torch.equal(weights(actor), now) and not torch.equal(now, first)
    assert whole_actor(kl_coef=0.0).policy.reference is None


def test_another_actor_continues_bitwise(tmp_path: Path) -> None:
    actor = whole_actor(lr=0.01)
    for number in range(2):
        update(actor, number)
    parts, numbers = parts_of(actor)
    Writing(actor.policy, parts).write_state(tmp_path, 0)
    resumed = whole_actor(lr=0.01)
    load_state(resumed, tmp_path, numbers)
    for one in (actor, resumed):
        update(one, 2)
    end, other = actor.state(), resumed.state()
    torch.testing.assert_close(other[0], end[0], rtol=0, atol=0)
    assert other[1] == end[1] and resumed.policy.version == 3
    with pytest.raises(CheckpointError, match="an unexpected tensor"):
        load_state(whole_actor("attn", lr=0.01), tmp_path, numbers)


def test_the_state_before_an_update_can_be_written_after_it(tmp_path: Path) -> None:
    worker = HybridWorker(config("flow_grpo"), 0, "cpu", 1, 10)
    worker.actor = whole_actor(lr=0.01)
    worker.policy, worker.keeping, worker.ended = worker.actor.policy, Keeping(worker.actor), 3
    update(worker.actor, 0)
    before, version = weights(worker.actor).clone(), worker.policy.version
    worker.actor.set_flat_gradient(torch.ones(before.shape))
    assert worker.step(finished=3).applied
    for step, expected in ((3, before), (4, weights(worker.actor).clone())):
        worker.ended = step
        assert worker.hold(step).policy_version == version + step - 3
        if step == 4:  # what is held is written as it was, whatever comes
            update(worker.actor, 1)
        worker.start_state(tmp_path / str(step), 0)
        while not worker.written():
            time.sleep(0.01)
        shards = Shards(tmp_path / str(step) / STATE)
        found = torch.cat([shards.whole(f"weights/{name}").flatten() for name in worker.policy.trained])
        assert torch.equal(found, expected)


def test_weights_that_are_not_trained_stand_beside_the_average(tmp_path: Path) -> None:
    actor = whole_actor("attn.to_q", lr=0.01)
    update(actor, 0)
    writing = Writing(actor.policy, parts_of(actor)[0])
    writing.write_state(tmp_path, 0)
    writing.write_denoisers(tmp_path)
    (file,) = (tmp_path / "transformer").glob("*.safetensors")
    stored, denoiser = load_file(file), actor.policy.denoisers["transformer"]
    assert stored.keys() == denoiser.state_dict().keys()
    for name, value in denoiser.state_dict().items():
        average = actor.policy.ema.average.get(f"transformer.{name}", value)
        assert torch.equal(stored[name], average)


def test_what_is_not_divided_is_written_once(tmp_path: Path) -> None:
    """As two processes do, of which each has half of the rows."""
    actor = whole_actor(lr=0.01)
    update(actor, 0)
    parts, _ = parts_of(actor)
    for number in range(2):
        rows = {
            name: Part(half, (number * (len(p.values) - len(half)), *p.offset[1:]), p.shape)
            for name, p in parts.items()
            for half in [p.values.tensor_split(2)[number] if "step/" not in name else p.values]
        }
        Writing(actor.policy, rows).write_state(tmp_path, number)
    shards = Shards(tmp_path / STATE)
    assert all(torch.equal(shards.whole(name), part.values) for name, part in parts.items())
    second = load_file(sorted((tmp_path / STATE).iterdir())[1])
    assert not any("step/" in name for name in second)

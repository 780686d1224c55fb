"""A micro-batch that the memory does not hold is halved, and draws and trains what the whole one does."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import training

from gerl.model.errors import MemoryFull
from gerl.workers.actor import Actor
from gerl.workers.worker import batches_of, peak_memory


@contextlib.contextmanager
def room_for(denoiser: torch.nn.Module, rows: int) -> Iterator[list[int]]:
    """A device that holds so many rows of the denoiser and no more; the list gets the rows of each call."""
    calls: list[int] = []

    def check(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        del module
        calls.append(len(kwargs["hidden_states"]))
        if calls[-1] > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    handle = denoiser.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def credit_of(t: training.Training) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(sum(len(task.samples) for task, _, _ in t.tasks))[:, None].expand(-1, 4)


@pytest.mark.parametrize("name", ["flow_grpo", "diffusion_nft", "branch_grpo", "tempflow_grpo"])
def test_a_rollout_is_drawn_in_smaller_calls(name: str) -> None:
    keys = {"split_steps": (1,), "branch_factor": 2} if name == "branch_grpo" else {}
    t = training.Training(training.config(name, **keys))
    (task, pixels, tapes), *_ = t.tasks
    said: list[str] = []
    t.rollout.format.say = said.append
    with room_for(t.policy.denoisers["transformer"], 2) as calls:
        again, parts = t.rollout.generate(task, t.algorithm)
        assert np.abs(again.astype(int) - pixels).max() <= 1 and len(parts.tapes) > len(tapes)
        t.rollout.generate(task, t.algorithm)
    assert max(calls[-8:]) <= 2 and 1 <= len(said) <= 3
    largest = max(len(segment.seeds) for segment in task.segments)
    assert f"the rollout of {largest} images" in said[0] and "rollout.micro_batch_size" in said[0]
    some = t.rollout.validate(task.samples[:3])[0]
    with room_for(t.policy.denoisers["transformer"], 1):
        assert np.abs(t.rollout.validate(task.samples[:3])[0].astype(int) - some).max() <= 1
    assert "validation" in said[-1]


@pytest.mark.parametrize("name", ["flow_grpo", "diffusion_nft", "dgpo"])
def test_an_update_adds_the_same_gradient_in_smaller_parts(name: str) -> None:
    t = training.Training(training.config(name, micro=8, actor_micro=2 if name == "dgpo" else None))
    credit, said = credit_of(t), list[str]()
    t.actor.say = said.append
    pooled = t.pooled(credit) if t.algorithm.pools else None
    batches = [b for task, _, tapes in t.tasks for b in t.batches(task, tapes, credit, pooled)]

    def added() -> torch.Tensor:
        t.actor.optimizer.zero_grad(set_to_none=True)
        t.actor.retry_on_oom(batches, lambda: t.actor.accumulate(batches, 32))
        return t.actor.flat_gradient()

    whole = added()
    with room_for(t.policy.denoisers["transformer"], 1 if name == "dgpo" else 3) as calls:
        assert training.relative(added(), whole) < 1e-5
        assert training.relative(added(), whole) < 1e-5
    assert calls[-1] <= 3 and t.actor.most == (1 if name == "dgpo" else 2)
    assert len(said) == len(set(said)) >= 1 and "actor.micro_batch_size" in said[0]


def test_what_cannot_be_halved_is_an_error() -> None:
    t = training.Training(training.config("dgpo"))  # compares the images of a group, which are in one replay
    credit = credit_of(t)
    batches = [b for task, _, tapes in t.tasks for b in t.batches(task, tapes, credit)]
    with room_for(t.policy.denoisers["transformer"], 1), pytest.raises(torch.OutOfMemoryError):
        t.actor.retry_on_oom(batches, lambda: t.actor.accumulate(batches, 32))
    assert t.actor.most == 4 and torch.equal(t.actor.flat_gradient(), torch.zeros_like(t.actor.flat_gradient()))
    with room_for(t.policy.denoisers["transformer"], 1), pytest.raises(MemoryFull, match="rollout of 8 images"):
        t.rollout.generate(t.tasks[0][0], t.algorithm)
    t.rollout.format.divides = t.actor.divides = False  # as in lockstep
    with room_for(t.policy.denoisers["transformer"], 1), pytest.raises(MemoryFull):
        t.rollout.validate(t.tasks[0][0].samples)


def test_a_smaller_part_of_what_was_drawn_in_parts_trains_as_well() -> None:
    t = training.Training(training.config("flow_grpo"))
    with room_for(t.policy.denoisers["transformer"], 3):
        _, parts = t.rollout.generate(t.tasks[0][0], t.algorithm)
    some = parts.rows([5, 0])
    assert [s.index for s in some.task.samples] == [parts.task.samples[i].index for i in (5, 0)]
    actor = Actor(t.policy, t.config.actor, t.algorithm, total_updates=1)
    actor.accumulate(batches_of(some, torch.ones(2, 4)), 8)
    assert actor.flat_gradient().norm() > 0


def test_a_cpu_has_no_gpu_memory() -> None:
    assert peak_memory("cpu") is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_is_that_since_the_last_call() -> None:
    block = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    with_block = peak_memory("cuda")
    del block
    torch.cuda.empty_cache()
    peak_memory("cuda")
    without = peak_memory("cuda")
    assert with_block is not None and without is not None and with_block > without + 0.2

"""Caches that live across denoising steps stop the rollout; other objects with tensors in them do not."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny
import torch

from gerl.engine import record
from gerl.engine.caches import Caches
from gerl.errors import ModelError


@dataclass
class Layer:
    keys: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Cache:
    layers: dict[str, Layer] = field(default_factory=lambda: {"first": Layer()})


def call_component(caches: Caches, step: int, argument: Any, output: Any = None, fill: bool = False) -> None:
    held = caches.check_arguments(step, "transformer", ((), {"attention": {"cache": argument}}))
    if fill:
        argument.layers["first"].keys.append(torch.zeros(1))
    caches.note(step, ((), {"attention": {"cache": argument}}), held, output)


def test_a_cache_filled_in_one_step_cannot_be_read_in_another() -> None:
    caches, cache = Caches(), Cache()
    call_component(caches, 0, cache, fill=True)
    call_component(caches, 0, cache)  # the second half of guidance
    with pytest.raises(ModelError, match=r"transformer .*step 1 .*Cache"):
        call_component(caches, 1, cache)


def test_a_cache_that_was_returned_cannot_be_read_in_another_step() -> None:
    caches, cache = Caches(), Cache({"first": Layer([torch.zeros(1)])})
    call_component(caches, 0, None, output=(torch.zeros(1), cache))
    with pytest.raises(ModelError, match=r"stored in a Cache, .* set it in sampling\.call"):
        call_component(caches, 1, cache)


def test_constants_and_caches_of_one_step_are_none() -> None:
    caches, constant = Caches(), Cache({"mask": Layer([torch.ones(1)])})
    for step in range(3):
        call_component(caches, step, constant)
        call_component(caches, step, Cache(), fill=True)
        call_component(caches, step, [torch.zeros(1), {"scale": 1.0}, None, "text", torch.nn.Linear(1, 1)])


def test_a_rollout_with_a_cache_is_refused() -> None:
    case, cache = tiny.CASES["sd3"], Cache()
    pipe = tiny.build(case)
    call = tiny.call_for(case, False) | {"joint_attention_kwargs": {"cache": cache}}
    record(pipe, call, noise_level=0.7)

    def remember(module: Any, args: Any, kwargs: dict[str, torch.Tensor]) -> None:
        cache.layers["first"].keys.append(kwargs["hidden_states"])

    pipe.transformer.transformer_blocks[0].register_forward_pre_hook(remember, with_kwargs=True)
    with pytest.raises(ModelError, match="reads at step 1 what an earlier step stored in a Cache"):
        record(pipe, call, noise_level=0.7)

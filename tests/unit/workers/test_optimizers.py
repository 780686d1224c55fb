"""The optimizers: AdamW with 8-bit moments learns as AdamW does, continues exactly, and is refused where it is not."""

import importlib.util
from typing import Any

import pytest
import torch
from actors import flat, new_actor, stepped, weights
from training import new_policy, relative

from gerl.config import ActorConfig
from gerl.errors import CheckpointError, ConfigError
from gerl.model.ema import EMA
from gerl.model.policy import Policy
from gerl.utils.tensors import pack_tensors, unpack_tensors
from gerl.workers import optimizers
from gerl.workers.actor import Actor
from gerl.workers.optimizers import check_optimizer

needs_package = pytest.mark.skipif(
    importlib.util.find_spec(optimizers.PACKAGE) is None, reason="needs the package bitsandbytes"
)


def wide_policy() -> Policy:
    """A policy with a parameter that is large enough to have 8-bit moments, and a small one."""
    policy = new_policy()
    torch.manual_seed(0)
    lora = {"denoiser.a": torch.nn.Parameter(torch.randn(96, 96)), "denoiser.b": torch.nn.Parameter(torch.randn(8))}
    return Policy(policy.pipe, policy.denoisers, lora, EMA(lora, 0.9))


def updated(actor: Actor, updates: range) -> torch.Tensor:
    for k in updates:
        stepped(actor, 0.01 * torch.randn(weights(actor).shape, generator=torch.Generator().manual_seed(k)))
    return weights(actor)


@needs_package
def test_moments_in_8_bits_learn_alike_and_continue_exactly() -> None:
    actors = {name: new_actor(wide_policy(), optimizer=name, lr=0.01) for name in ("adamw", "adamw8bit")}
    start = weights(actors["adamw"])
    moved = {name: updated(actor, range(4)) - start for name, actor in actors.items()}
    assert relative(moved["adamw8bit"], moved["adamw"]) < 0.1

    actor = actors["adamw8bit"]
    tensors, numbers = actor.state()
    assert tensors["optimizer/state1/denoiser.a"].dtype == torch.uint8
    saved = pack_tensors(tensors)
    resumed = new_actor(wide_policy(), optimizer="adamw8bit", lr=0.01)
    resumed.load_state(unpack_tensors(saved), numbers)
    assert torch.equal(updated(resumed, range(4, 7)), updated(actor, range(4, 7)))
    assert resumed.state()[0].keys() == tensors.keys()
    with pytest.raises(CheckpointError, match="optimizer/"):
        new_actor(wide_policy()).load_state(unpack_tensors(saved), numbers)


@needs_package
@pytest.mark.parametrize("name", ["qmap1", "absmax2", "state1"])
def test_a_damaged_state_of_8_bits_is_refused(name: str) -> None:
    actor = new_actor(wide_policy(), optimizer="adamw8bit")
    updated(actor, range(2))
    tensors, numbers = actor.state()
    other = new_actor(wide_policy(), optimizer="adamw8bit")
    with pytest.raises(CheckpointError, match=name):
        other.load_state({k: v for k, v in tensors.items() if k != f"optimizer/{name}/denoiser.a"}, numbers)


def test_a_missing_package_and_one_that_does_not_work_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ActorConfig(optimizer="adamw8bit")
    check_optimizer(ActorConfig(), "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"actor\.optimizer=adamw8bit .*gerl\[bitsandbytes\].*actor\.optimizer=adamw"):
        check_optimizer(config, "cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("no kernel\nsecond line")

    monkeypatch.setattr(optimizers, "build_optimizer", lambda _, parameters: Broken(parameters, lr=0.1))
    with pytest.raises(ConfigError, match=r"does not work on cpu \(no kernel\)"):
        check_optimizer(config, "cpu")


def test_the_root_mean_square_is_that_of_the_unclipped_gradient() -> None:
    actor = new_actor(max_grad_norm=1e-3)
    gradient = torch.randn(flat(actor.parameters).shape)
    result = stepped(actor, gradient)
    assert result.grad_rms == pytest.approx(float(gradient.square().mean().sqrt()), rel=1e-5)

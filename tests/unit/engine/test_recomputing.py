"""Gradient checkpointing leaves the gradient unchanged when the pipeline's call scales the LoRA."""

from typing import Any

import pytest
import tiny
import torch

import gerl


def gradient(name: str, argument: str, scale: float, checkpointing: bool) -> torch.Tensor:
    case = tiny.CASES[name]
    pipe = tiny.build(case)
    parameters = tiny.add_lora(pipe)
    if checkpointing:
        tiny.denoiser_of(pipe).enable_gradient_checkpointing()
    call: dict[str, Any] = tiny.call_for(case, False) | {"generator": tiny.generators(), argument: {"scale": scale}}
    _, tape = gerl.record(pipe, call, kernel=case.kernel, noise_level=0.7, window=[1])
    gerl.replay(pipe, tape, lambda k, step: -step.log_prob.mean())
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


@pytest.mark.parametrize(
    ("name", "argument"),
    [("flux", "joint_attention_kwargs"), ("sd15", "cross_attention_kwargs"), ("wan", "attention_kwargs")],
)
def test_checkpointed_blocks_are_recomputed_with_the_scale_of_their_forward_pass(name: str, argument: str) -> None:
    plain = gradient(name, argument, 0.5, False)
    torch.testing.assert_close(gradient(name, argument, 0.5, True), plain, rtol=1e-5, atol=1e-8)
    assert (plain - gradient(name, argument, 1.0, False)).norm() > 0.1 * plain.norm()


def test_the_checkpoint_function_of_the_denoiser_is_restored() -> None:
    pipe = tiny.build(tiny.CASES["flux"])
    tiny.add_lora(pipe)
    pipe.transformer.enable_gradient_checkpointing()
    before = pipe.transformer._gradient_checkpointing_func
    call = tiny.call_for(tiny.CASES["flux"], False) | {"joint_attention_kwargs": {"scale": 0.5}}
    _, tape = gerl.record(pipe, call | {"generator": tiny.generators()}, window=[1])
    gerl.replay(pipe, tape, lambda k, step: -step.log_prob.mean())
    assert pipe.transformer._gradient_checkpointing_func is before

"""The backward pass in every precision that a run can have, with the magnitudes of a full update of SD3.5."""

import copy
import math
from typing import Any

import pytest
import tiny
import torch

from gerl.engine import record, replay
from gerl.engine.loss_scale import loss_scale, unscaled
from gerl.engine.replay import pull_back
from gerl.engine.tape import Tape

# each image's loss is divided by the (image, step) pairs of an update, 96 x 9, and each latent's by those of an image
PAIRS, LATENTS = 96 * 9, 16 * 64 * 64
PRECISIONS = {torch.float16: 0.999, torch.bfloat16: 0.99}  # and how far the gradient points where fp32's does


def pipeline(dtype: torch.dtype) -> tuple[Any, list[torch.nn.Parameter]]:
    pipe = tiny.build(tiny.CASES["sd3"])
    parameters = tiny.add_lora(pipe)
    pipe.to(dtype)
    for p in parameters:
        p.data = p.data.float()
    return pipe, parameters


@pytest.fixture(scope="module")
def tape() -> Tape:
    call = tiny.call_for(tiny.CASES["sd3"], guided=True)
    return record(pipeline(torch.float32)[0], call, window=[1, 2], generators=tiny.generators())[1]


def share(tape: Tape) -> float:
    return tape.steps[0].x[0].numel() / LATENTS / PAIRS


def policy_gradient(pipe: Any, tape: Tape, **options: Any) -> None:
    signs = torch.tensor([1.0, -1.0, 0.5, -0.5])
    replay(pipe, tape, lambda k, s: -(signs * s.log_prob).sum() * share(tape), **options)


def noised(pipe: Any, tape: Tape) -> None:
    given = {1: torch.randn(tape.steps[1].x.shape, generator=torch.Generator().manual_seed(3))}
    replay(pipe, tape, lambda k, s: s.model_output.square().mean() * share(tape), steps=[1], latents=given)


def reward_gradient(pipe: Any, tape: Tape) -> torch.Tensor:
    gradient = torch.randn(tape.steps[2].x.shape, generator=torch.Generator().manual_seed(4)) / LATENTS / PAIRS
    found = pull_back(pipe, tape, 2, lambda step: step.mean, gradient, carry=True)
    assert found is not None
    return torch.cat([found.direct.flatten(), found.through.flatten()])


WAYS = {
    "policy gradient": policy_gradient,
    "several steps in one pass": lambda pipe, tape: policy_gradient(pipe, tape, step_batch=2),
    "without the unconditional half": lambda pipe, tape: policy_gradient(pipe, tape, cfg="detach_uncond"),
    "noised images": noised,
    "reward gradient": reward_gradient,
}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_that_of_fp32(tape: Tape, way: str, dtype: torch.dtype) -> None:
    found = []
    for precision in (torch.float32, dtype):
        pipe, parameters = pipeline(precision)
        if precision != torch.float32:
            tape = in_precision(tape, pipe)
        latents = WAYS[way](pipe, tape)
        gradient = [p.grad.flatten() for p in parameters if p.grad is not None]
        found.append(torch.cat([*gradient, *([] if latents is None else [latents * share(tape)])]))
    assert torch.nn.functional.cosine_similarity(*found, 0) > PRECISIONS[dtype]
    assert float(found[1].norm() / found[0].norm()) == pytest.approx(1, abs=0.02)
    assert (found[1] == 0).float().mean() < 0.05 + (found[0] == 0).float().mean()


def in_precision(tape: Tape, pipe: Any) -> Tape:
    """The call of `tape` in the precision of `pipe`, with its trajectory."""
    return record(pipe, copy.deepcopy(tape.call), window=[1, 2], generators=tiny.generators())[1]


def test_gradients_add_up_to_those_that_were_there(tape: Tape) -> None:
    pipe, parameters = pipeline(torch.float16)
    again = in_precision(tape, pipe)
    policy_gradient(pipe, again)
    once = [p.grad.clone() for p in parameters if p.grad is not None]
    policy_gradient(pipe, again)
    for p, first in zip((p for p in parameters if p.grad is not None), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * first, rtol=1e-6, atol=0)


def test_the_scale_is_a_power_of_two_that_brings_the_largest_below_one() -> None:
    output = torch.tensor([1.0, -3.0], requires_grad=True)
    for factor in (1e-9, 1e-3, 1.0, 5e4, 1e-42):
        scale = loss_scale((output * torch.tensor([factor, -2 * factor])).sum(), output)
        assert math.frexp(scale)[0] == 0.5 and 2 * factor * scale < 1
        assert 2 * factor * scale >= 0.5 or factor == 1e-42
    assert loss_scale((output * 0).sum(), output) == 1.0
    assert loss_scale((output * math.inf).sum(), output) == 1.0
    with unscaled([output], 8.0):
        (output * 8.0).sum().backward()
    assert output.grad is not None and output.grad.tolist() == [1.0, 1.0]

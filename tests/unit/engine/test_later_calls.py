"""Calls of the denoiser that a pipeline makes from a later step on: the probe, which ends at the first, has none."""

from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch

from gerl.engine import ReplayedStep, Tape, record, replay

WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 3.0])
# SD3's skip-layer guidance, from the second step on: two rows per sample in the guided call, then one in another
SKIPPED = {"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.01, "skip_layer_guidance_stop": 0.6}


@pytest.fixture(scope="module", params=[[0, 1], [2, 3], [4]], ids=str)
def rolled_out(request: pytest.FixtureRequest) -> tuple[Any, list[torch.nn.Parameter], Tape]:
    pipe = tiny.build(tiny.CASES["sd3"])
    parameters = tiny.add_lora(pipe)
    call = tiny.call_for(tiny.CASES["sd3"], guided=True, steps=6) | SKIPPED
    return pipe, parameters, record(pipe, call, window=request.param, generators=tiny.generators())[1]


def gradient(
    rolled_out: tuple[Any, list[torch.nn.Parameter], Tape], parts: Sequence[list[int]], **options: Any
) -> torch.Tensor:
    """The sum of the gradients of sub-batches, whose log-probabilities have to be the recorded ones."""
    pipe, parameters, tape = rolled_out
    pipe.transformer.zero_grad()
    for rows in parts:

        def loss(k: int, step: ReplayedStep, rows: list[int] = rows) -> torch.Tensor:
            assert step.recorded_log_prob is not None
            torch.testing.assert_close(step.log_prob, step.recorded_log_prob, rtol=1e-5, atol=1e-5)
            return (WEIGHTS[rows] * step.log_prob).sum()

        replay(pipe, tape, loss, index=rows, **options)
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


@pytest.mark.parametrize("parts", [[[0, 1], [2, 3]], [[0], [1], [2], [3]], [[2, 0], [3, 1]]], ids=str)
def test_sub_batches_add_up(rolled_out: tuple[Any, list[torch.nn.Parameter], Tape], parts: list[list[int]]) -> None:
    whole = gradient(rolled_out, [[0, 1, 2, 3]])
    found = gradient(rolled_out, parts)
    assert float((found - whole).norm() / whole.norm()) < 1e-5
    assert float((gradient(rolled_out, parts, step_batch=2) - whole).norm() / whole.norm()) < 1e-5

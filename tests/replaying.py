"""Shared by the tests of record and replay: recorded runs of the tiny pipelines and gradients of their replays."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import tiny
import torch

from gerl.engine import ReplayedStep, Tape, record, replay
from gerl.model.lora import add_lora

EACH = pytest.mark.parametrize("name", list(tiny.CASES))
GUIDED = pytest.mark.parametrize("guided", [False, True], ids=["plain", "cfg"])
NOISE = 0.7
WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 3.0])  # a different one for each sample, so that mixed-up samples show


@dataclass
class Recorded:
    """A pipeline with a LoRA, and what a rollout of its call left."""

    pipe: Any
    parameters: list[torch.nn.Parameter]
    call: dict[str, Any]
    output: Any
    tape: Tape
    kernel: str


@functools.cache
def recorded(name: str, guided: bool) -> Recorded:
    """Shared by the tests of this file: they leave the pipeline and the tape as they are."""
    case = tiny.CASES[name]
    pipe = tiny.build(case)
    parameters = tiny.add_lora(pipe)
    call = tiny.call_for(case, guided)
    output, tape = record(pipe, call, kernel=case.kernel, noise_level=NOISE, generators=tiny.generators())
    return Recorded(pipe, parameters, call, tiny.output_of(output), tape, case.kernel)


def gradients(r: Recorded, tape: Tape | None = None, **options: Any) -> tuple[list[torch.Tensor], float, list[int]]:
    """LoRA gradients of a weighted sum of log-probs, largest |ratio - 1|, and the steps that were trained."""
    index = options.get("index")
    weights = WEIGHTS if index is None else WEIGHTS[list(index)]
    deviation, seen = [0.0], []

    def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
        assert step.recorded_log_prob is not None and step.log_prob.shape == weights.shape
        seen.append(k)
        deviation.append(float(((step.log_prob.detach() - step.recorded_log_prob).exp() - 1).abs().max()))
        return (weights * step.log_prob).sum()

    for p in r.parameters:
        p.grad = None
    replay(r.pipe, tape or r.tape, on_step, **options)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in r.parameters]
    return grads, max(deviation), seen


def distance(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Norm of the difference of two gradients relative to the norm of the second."""
    one, other = (torch.cat([g.flatten() for g in grads]).double() for grads in (a, b))
    return float((one - other).norm() / other.norm())


class CountedLinear:
    """Counts how often the denoiser really computes: the calls of its first linear layer with a LoRA."""

    def __init__(self, pipe: Any) -> None:
        layer = next(m for m in tiny.denoiser_of(pipe).modules() if hasattr(m, "lora_A"))
        self.calls = 0
        self.handle = layer.register_forward_hook(self)

    def __call__(self, *_: Any) -> None:
        self.calls += 1

    def __enter__(self) -> "CountedLinear":
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


def fresh(name: str, guided: bool = True, dtype: torch.dtype = torch.float32) -> Recorded:
    """A pipeline of one's own with gerl's LoRA (fp32, all default targets), and a rollout of it."""
    case = tiny.CASES[name]
    pipe = tiny.build(case).to(dtype)
    parameters = list(add_lora(tiny.denoiser_of(pipe), 4, 8.0, None, seed=0).values())
    torch.manual_seed(1)
    for p in parameters:
        p.data.normal_(0, 0.2)
    return rolled_out(Recorded(pipe, parameters, tiny.call_for(case, guided), None, Tape({}, 0), case.kernel))


def rolled_out(r: Recorded) -> Recorded:
    output, r.tape = record(r.pipe, r.call, kernel=r.kernel, noise_level=NOISE, generators=tiny.generators())
    r.output = tiny.output_of(output)
    return r


def as_class(pipe: Any, cls: type) -> Any:
    """A pipeline of another class with the components of `pipe`."""
    other = cls(**pipe.components)
    other.set_progress_bar_config(disable=True)
    return other

"""Shared by the tests of record and replay: recorded runs of the tiny pipelines, their replays and gradients."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import diffusers
import pytest
import tiny
import torch

from gerl.engine import ReplayedStep, Tape, branch, record, replay
from gerl.model.lora import add_lora

EACH = pytest.mark.parametrize("name", list(tiny.CASES))
GUIDED = pytest.mark.parametrize("guided", [False, True], ids=["plain", "cfg"])
NOISE = 0.7
WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 3.0])  # a different one for each sample, so that mixed-up samples show
Edit = Callable[[Any, int, dict[str, Any]], dict[str, Any] | None]


@dataclass
class Recorded:
    """A pipeline with a LoRA, and what a rollout of its call left."""

    pipe: Any
    parameters: list[torch.nn.Parameter]
    call: dict[str, Any]
    kernel: str
    output: Any = None
    tape: Tape = field(default_factory=lambda: Tape({}, 0))

    def record(self, call: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Tape]:
        """The images and the tape of `call` or its own, with the usual generators if no others are given."""
        call = call or self.call
        usual = {"kernel": self.kernel, "noise_level": NOISE, "generators": tiny.generators(len(call["prompt"]))}
        output, tape = record(self.pipe, call, **usual | options)
        return output and tiny.output_of(output), tape

    def branch(self, tape: Tape, step: int, index: Sequence[int], **options: Any) -> tuple[Any, Tape]:
        """The images and the tape of a branch."""
        output, child = branch(self.pipe, tape, step, index, self.kernel, NOISE, **options)
        return output and tiny.output_of(output), child


def own(name: str = "sd3", guided: bool = True) -> Recorded:
    """A pipeline with a LoRA that a test may meddle with, without a rollout."""
    case = tiny.CASES[name]
    pipe = tiny.build(case)
    return Recorded(pipe, tiny.add_lora(pipe), tiny.call_for(case, guided), case.kernel)


def rolled_out(r: Recorded) -> Recorded:
    r.output, r.tape = r.record()
    return r


@functools.cache
def recorded(name: str, guided: bool) -> Recorded:
    """Shared by the tests of a file: they leave the pipeline and the tape as they are."""
    return rolled_out(own(name, guided))


def randomise(parameters: Iterable[torch.nn.Parameter], std: float = 0.2, seed: int = 1) -> None:
    """As if the parameters had learnt something."""
    torch.manual_seed(seed)
    for p in parameters:
        p.data.normal_(0, std)


def fresh(name: str, guided: bool = True, dtype: torch.dtype = torch.float32) -> Recorded:
    """A pipeline of one's own with gerl's LoRA (fp32, all default targets), and a rollout of it."""
    case = tiny.CASES[name]
    pipe = tiny.build(case).to(dtype)
    parameters = list(add_lora(tiny.denoiser_of(pipe), 4, 8.0, None, seed=0).values())
    randomise(parameters)
    return rolled_out(Recorded(pipe, parameters, tiny.call_for(case, guided), case.kernel))


def as_class(pipe: Any, cls: type) -> Any:
    """A pipeline of another class with the components of `pipe`."""
    other = cls(**pipe.components)
    other.set_progress_bar_config(disable=True)
    return other


def with_controlnet(r: Recorded) -> Recorded:
    """SD3 with a ControlNet of random weights and images for it, without a rollout."""
    torch.manual_seed(0)
    make = diffusers.SD3ControlNetModel.from_transformer
    controlnet = make(r.pipe.transformer, 2, 0, load_weights_from_transformer=False).eval()
    for p in controlnet.requires_grad_(False).parameters():
        torch.nn.init.normal_(p, std=0.1)
    r.pipe = as_class(r.pipe, functools.partial(diffusers.StableDiffusion3ControlNetPipeline, controlnet=controlnet))
    r.pipe.vae.requires_grad_(False)  # it encodes the images
    r.call["control_image"] = torch.rand(4, 3, 16, 16)
    return r


def after_each_step(r: Recorded, edit: Edit) -> None:
    """Let `edit(pipe, step, {"latents": ...})` run after each denoising step, as the pipeline's callback."""
    r.call["callback_on_step_end"] = lambda pipe, i, t, values: edit(pipe, i, values) or {}


Loss = Callable[[ReplayedStep], torch.Tensor]


def replayed(
    r: Recorded, tape: Tape | None = None, loss: Loss | None = None, **options: Any
) -> tuple[dict[int, ReplayedStep], list[torch.Tensor]]:
    """The steps of a replay, detached, and the LoRA gradients of the summed `loss`, without which it has no graph."""
    steps: dict[int, ReplayedStep] = {}

    def on_step(k: int, step: ReplayedStep) -> torch.Tensor | None:
        assert step.model_output.requires_grad == (loss is not None)
        steps[k] = replace(step, model_output=step.model_output.detach())
        return loss and loss(step)

    for p in r.parameters:
        p.grad = None
    replay(r.pipe, tape or r.tape, on_step, grad=loss is not None, **options)
    return steps, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in r.parameters]


def squares(step: ReplayedStep) -> torch.Tensor:
    """A loss that every latents have, recorded or not."""
    return step.model_output.square().mean()


def gradients(r: Recorded, tape: Tape | None = None, **options: Any) -> tuple[list[torch.Tensor], float, list[int]]:
    """LoRA gradients of a weighted sum of log-probs, largest |ratio - 1|, and the steps that were trained."""
    weights = WEIGHTS[list(options.get("index") or range((tape or r.tape).batch_size))]

    def loss(step: ReplayedStep) -> torch.Tensor:
        assert step.log_prob.shape == weights.shape
        return (weights * step.log_prob).sum()

    steps, grads = replayed(r, tape, loss, **options)
    return grads, largest_deviation(steps), list(steps)


def deviation(r: Recorded, tape: Tape, **options: Any) -> float:
    """Largest |ratio - 1| of a replay without gradient."""
    return largest_deviation(replayed(r, tape, **options)[0])


def largest_deviation(steps: dict[int, ReplayedStep]) -> float:
    return max(float(((s.log_prob - s.recorded_log_prob).exp() - 1).abs().max()) for s in steps.values())


def all_equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether as many tensors are bitwise the same."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def distance(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Norm of the difference of two gradients relative to the norm of the second."""
    one, other = (torch.cat([g.flatten() for g in grads]).double() for grads in (a, b))
    return float((one - other).norm() / other.norm())


@contextmanager
def counted_rows(pipe: Any) -> Iterator[Counter[bool]]:
    """Rows that the denoiser really computes, in its first layer with a LoRA, by whether with gradient."""
    rows: Counter[bool] = Counter()
    layer = next(m for m in tiny.denoiser_of(pipe).modules() if hasattr(m, "lora_A"))
    with layer.register_forward_hook(lambda module, args, _: rows.update({torch.is_grad_enabled(): len(args[0])})):
        yield rows

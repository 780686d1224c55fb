"""Denoising error of finished latents: how well a model predicts the noise in an image, given a prompt.

Clean latents are noised again at some levels of the schedule, as by a forward-process algorithm, and the model's output
there is compared with the output of a perfect model. The error under an image's own prompt is the bound on its negative
log-likelihood (Ho et al. 2020, arXiv 2006.11239); how much larger it is under another prompt is the evidence that the
image shows the own one (Li et al. 2023, arXiv 2303.16203). Taken as logarithms, errors are log-likelihoods of Gaussians
of unknown variance, so that noise levels, and images of more or less contrast, count alike.
"""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gerl.engine.hooks import put
from gerl.engine.record import DETERMINISTIC, Recorder, fixed_generators
from gerl.engine.replay import ReplayedStep, backprop_step, replay
from gerl.engine.skipping import StructureOnly
from gerl.engine.tape import Tape
from gerl.engine.transitions import DDIMRule, Rule, Timestep, unwritten
from gerl.errors import ReplayError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, SchedulerMixin

T = TypeVar("T")
LEVELS = (0.4, 0.6, 0.8)  # of flow matching, where own and other prompts differ most; 1 is pure noise


@dataclass
class FinishedLatents:
    """Latents after the last step of a plain call of a pipeline, `[B, ...]`, and its number of steps."""

    latents: torch.Tensor | None = None
    steps: int = 0


@contextlib.contextmanager
def finished_latents(pipe: DiffusionPipeline) -> Iterator[FinishedLatents]:
    """Note the latents after each scheduler step of `pipe` in the block, which changes nothing about its call."""
    finished = FinishedLatents()
    with contextlib.ExitStack() as undo:
        put(undo, pipe.scheduler, "step", _WatchedStep(finished, pipe.scheduler))
        yield finished


class _WatchedStep:
    """`scheduler.step` that notes its result; a copied scheduler, of a secondary modality (sound), steps unwatched."""

    def __init__(self, finished: FinishedLatents, scheduler: SchedulerMixin) -> None:
        self.finished, self.scheduler, self.step = finished, scheduler, scheduler.step
        self.__wrapped__ = scheduler.step  # pipelines inspect the signature
        self.last: float | None = None

    def __call__(self, model_output: torch.Tensor, timestep: Timestep, *args: Any, **kwargs: Any) -> Any:
        output = self.step(model_output, timestep, *args, **kwargs)
        self.finished.latents = output[0] if isinstance(output, tuple) else output.prev_sample
        at = float(torch.as_tensor(timestep).flatten()[0])
        self.finished.steps += at != self.last  # Cosmos asks for the clean latents of a step before it takes it
        self.last = at
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.scheduler), self.scheduler)
        return type(copied).step.__get__(copied)


def noise_level(rule: Rule) -> float:
    """Return the noise level of a step's latents on the scale of flow matching, in [0, 1]."""
    return rule.sigma / (rule.sigma + rule.sqrt_alpha) if isinstance(rule, DDIMRule) else rule.sigma


def nearest_steps(rules: Sequence[Rule], levels: Sequence[float] = LEVELS) -> list[int]:
    """Return the steps whose noise levels are nearest to `levels`, without those of pure noise."""
    noise_levels = {k: level for k, rule in enumerate(rules) if 0 < (level := noise_level(rule)) < 0.999}
    if not noise_levels:
        raise ReplayError("the schedule has no noise level between clean images and pure noise: sample with more steps")
    return sorted({min(noise_levels, key=lambda k: abs(noise_levels[k] - wanted)) for wanted in levels})


def structure_of(
    pipe: DiffusionPipeline,
    call: Mapping[str, object],
    steps: int,
    generators: torch.Generator | Sequence[torch.Generator] | None = None,
) -> Tape:
    """Record the `steps` denoising steps of `pipe(**call)` for replays at given latents, as `record_structure` does.

    `generators`: those of the sampled images, if the pipeline encodes a condition at random; None: fixed ones. Sound
    beside a video stays at its initial noise.
    """
    tape = Tape.of(call)
    recorder = Recorder(tape, DETERMINISTIC, None)
    recorder.skipping = StructureOnly(steps)
    recorder.run(pipe, generators or fixed_generators(tape.batch_size))
    return tape


@torch.no_grad()
def denoising_errors(
    pipe: DiffusionPipeline,
    tape: Tape,
    clean: torch.Tensor,
    noise: Callable[[int, torch.Tensor], torch.Tensor],
    draws: int = 1,
) -> torch.Tensor:
    """Return the mean squared errors of the model's output at noised `clean` latents, fp32 `[B, L]` by noise level.

    `tape`: a recorded call with the prompts, from `structure_of`. `clean`: `[B, ...]`. `noise(i, like)` returns the
    i-th noise as `like`; there are `draws` per level. Without classifier-free guidance where the pipeline allows that.
    Raises `ReplayError` for pipelines whose latents cannot be noised again.
    """
    steps, clean = nearest_steps([step.rule for step in tape.steps]), clean.float()
    errors: dict[int, list[torch.Tensor]] = {k: [] for k in steps}
    for draw in range(draws):
        drawn = {k: noise(draw * len(steps) + i, clean) for i, k in enumerate(steps)}
        latents = {k: tape.steps[k].rule.noised(clean, drawn[k]) for k in steps}

        def measure(k: int, step: ReplayedStep, drawn: Mapping[int, torch.Tensor] = drawn) -> None:
            difference = unwritten(step.model_output - step.rule.target(clean, drawn[k]), step.written)
            errors[k].append((difference**2).reshape(tape.batch_size, -1).mean(1))

        _unguided(partial(replay, pipe, tape, measure, steps=latents, latents=latents, grad=False))
    return torch.stack([torch.stack(of_level).mean(0) for of_level in errors.values()], dim=1)


def _unguided(run: Callable[..., T]) -> T:
    """Call `run` for the conditional output alone, or with guidance where it cannot be separated."""
    try:
        return run(cfg="off")
    except ReplayError as error:
        if "use cfg joint" not in str(error):
            raise
        return run(cfg="joint")


# --- The same with its gradient


def differentiable_errors(
    pipe: DiffusionPipeline,
    tape: Tape,
    clean: torch.Tensor,
    noise: Callable[[int, torch.Tensor], torch.Tensor],
    draws: int = 1,
) -> torch.Tensor:
    """Return `denoising_errors` as a function of `clean`, differentiable once; the weights are constants.

    Its gradient is computed at once, a step at a time. Raises `ReplayError` also if the pipeline writes a condition
    into the latents.
    """
    steps = [k for k in nearest_steps([step.rule for step in tape.steps]) if k > 0]
    if not steps or any(tape.steps[k].written is not None for k in steps):
        raise ReplayError("the denoising error has no gradient here: the pipeline writes a condition into its latents")

    def compute(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        errors, gradients = list[torch.Tensor](), list[torch.Tensor]()
        for i, k in enumerate(steps):
            noises = [noise(draw * len(steps) + i, values) for draw in range(draws)]
            pairs = [_error_and_gradient(pipe, tape, k, values, drawn) for drawn in noises]
            errors.append(torch.stack([error for error, _ in pairs]).mean(0))
            gradients.append(torch.stack([gradient for _, gradient in pairs]).mean(0))
        return torch.stack(errors, dim=1), torch.stack(gradients, dim=1)

    errors: torch.Tensor = _Errors.apply(clean, compute)
    return errors


def _error_and_gradient(
    pipe: DiffusionPipeline, tape: Tape, k: int, clean: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the errors `[B]` at step `k`, and the gradient of each with respect to its rows of `clean`."""
    leaf, rule, differences = clean.float().detach().requires_grad_(), tape.steps[k].rule, list[torch.Tensor]()
    x, target = rule.noised(leaf, noise), rule.target(leaf, noise)

    def squares(step: ReplayedStep) -> torch.Tensor:
        difference = step.model_output - target.detach()
        differences.append(difference.detach())
        return (difference**2).reshape(tape.batch_size, -1).mean(1)

    noised = replace(tape, steps=list(tape.steps))  # the noised latents as if the step before had led there
    noised.steps[k - 1] = replace(tape.steps[k - 1], x_next=x.detach())
    noised.steps[k] = replace(tape.steps[k], x=x.detach())
    ones = torch.ones(tape.batch_size, device=x.device)
    derivative = _unguided(partial(backprop_step, pipe, noised, k, squares, ones, carry=True))
    assert derivative is not None
    pairs = [(x, derivative.direct + derivative.through)]
    elements = x.numel() // tape.batch_size
    pairs += [(target, -2 * differences[-1] / elements)] if target.requires_grad else []
    (gradient,) = torch.autograd.grad([value for value, _ in pairs], leaf, [weight for _, weight in pairs])
    return (differences[-1] ** 2).reshape(tape.batch_size, -1).mean(1), gradient


class _Errors(torch.autograd.Function):
    """Function that returns errors `[B, L]`, whose gradients `[rows, L, ...]` are computed with them."""

    @staticmethod
    def forward(ctx: Any, clean: torch.Tensor, compute: Callable[..., Any]) -> torch.Tensor:
        with torch.enable_grad():
            errors, gradient = compute(clean)
        ctx.save_for_backward(gradient)
        return errors

    @staticmethod
    def backward(ctx: Any, incoming: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        rows = incoming.repeat_interleave(len(gradient) // len(incoming), dim=0)
        return (gradient * rows.view(*rows.shape, *[1] * (gradient.ndim - 2))).sum(1), None

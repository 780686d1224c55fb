"""The families of diffusers' schedulers that have transition kernels, and what each needs besides its rule."""

from __future__ import annotations  # of diffusers, which the driver of a run does without

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from diffusers import EDMEulerScheduler, LCMScheduler, SchedulerMixin


# diffusers is imported in the functions: the driver of a run does without


def is_flow_matching(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler's model output is a velocity and its sigmas those of `x = (1 - s) x0 + s eps`."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return (
        isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
        or is_flow_lcm(scheduler)
        or scheduler.config.get("prediction_type") == "flow_prediction"
    )


def is_flow_lcm(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler is that of consistency models of flow matching: it noises anew at each step."""
    from diffusers import FlowMatchLCMScheduler

    return isinstance(scheduler, FlowMatchLCMScheduler)


def is_trigflow(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler's noise levels are angles, as those of consistency models in TrigFlow."""
    from diffusers import SCMScheduler

    return isinstance(scheduler, SCMScheduler)


def is_lcm(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler is that of latent consistency models (arXiv 2310.04378)."""
    from diffusers import LCMScheduler

    return isinstance(scheduler, LCMScheduler)


def is_tcd(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler is that of trajectory consistency models (arXiv 2402.19159)."""
    from diffusers import TCDScheduler

    return isinstance(scheduler, TCDScheduler)


def noises_anew(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler's own sampler predicts clean latents and noises them anew: the kernel cps at level 1."""
    return is_trigflow(scheduler) or is_lcm(scheduler) or is_flow_lcm(scheduler)


def is_consistency(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler is that of a consistency model, whose steps have the kernel cps."""
    return noises_anew(scheduler) or is_tcd(scheduler)


def is_edm(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler preconditions input and output as EDM does (arXiv 2206.00364)."""
    from diffusers import EDMEulerScheduler

    return isinstance(scheduler, EDMEulerScheduler)


def is_flow_map(scheduler: SchedulerMixin) -> bool:
    """Whether the model's output is the average velocity between two noise levels (AnyFlow)."""
    from diffusers import FlowMapEulerDiscreteScheduler

    return isinstance(scheduler, FlowMapEulerDiscreteScheduler)


def counts_steps(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler looks its noise level up by the number of the step."""
    kinds = (is_flow_matching, is_consistency, is_edm, is_flow_map)
    return any(kind(scheduler) for kind in kinds)


def gives_model_dtype(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler's next latents have the dtype of the model output, not that of the latents."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    euler = isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
    return euler or is_flow_lcm(scheduler) or is_edm(scheduler) or is_flow_map(scheduler)


def step_index(scheduler: SchedulerMixin, timestep: torch.Tensor | float) -> int:
    """Index of the step that a scheduler that counts them is about to take at `timestep`."""
    if scheduler.step_index is None:
        scheduler._init_step_index(timestep)
    index: int = scheduler.step_index
    return index


def take_step(scheduler: SchedulerMixin, timestep: torch.Tensor | float) -> int:
    """Let a scheduler that counts its steps pass the one it is about to take at `timestep`; returns its index."""
    index = step_index(scheduler, timestep)
    scheduler._step_index = index + 1
    return index


def advance(scheduler: SchedulerMixin, timestep: torch.Tensor | float) -> None:
    """Let `scheduler` pass the step it is about to take at `timestep`.

    Pipelines that noise an image for the next step (inpainting) let the scheduler look its sigma up by step index.
    """
    if counts_steps(scheduler):
        scheduler._step_index = step_index(scheduler, timestep) + 1


def edm_scalings(scheduler: EDMEulerScheduler, c: float) -> tuple[float, float]:
    """`(skip, out)` of `x0h = skip x + out F` at noise level `c`, the fp32 numbers that the scheduler computes with."""
    data, scale = scheduler.config.sigma_data, torch.tensor(c)
    sign = 1 if scheduler.config.prediction_type == "epsilon" else -1
    return float(data**2 / (scale**2 + data**2)), float(sign * scale * data / (scale**2 + data**2) ** 0.5)


@contextlib.contextmanager
def predicts_clean(scheduler: SchedulerMixin, given: bool) -> Iterator[None]:
    """With `given`, let the rule of the step that `scheduler` takes in here read the model output as clean latents."""
    if given:
        scheduler.__dict__["gerl_clean_output"] = True
    try:
        yield
    finally:
        scheduler.__dict__.pop("gerl_clean_output", None)


def output_is_clean(scheduler: SchedulerMixin) -> bool:
    """Whether the step that `scheduler` takes has clean latents for a model output, see `predicts_clean`."""
    return "gerl_clean_output" in scheduler.__dict__


def scm_clean(timestep: torch.Tensor | float, model_output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The clean latents that an `SCMScheduler` returns besides the next ones, shape of `x`."""
    t = torch.as_tensor(timestep).flatten()[0]
    return torch.cos(t) * x - torch.sin(t) * model_output


def lcm_clean(
    scheduler: LCMScheduler, timestep: torch.Tensor | float, model_output: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """The clean latents that an `LCMScheduler` returns besides the next ones, shape of `x`."""
    t, config = int(timestep), scheduler.config
    alpha = scheduler.alphas_cumprod[t]
    skip, out = scheduler.get_scalings_for_boundary_condition_discrete(t)
    match config.prediction_type:
        case "epsilon":
            x0 = (x - (1 - alpha).sqrt() * model_output) / alpha.sqrt()
        case "v_prediction":
            x0 = alpha.sqrt() * x - (1 - alpha).sqrt() * model_output
        case _:  # sample
            x0 = model_output
    if config.clip_sample:
        x0 = x0.clamp(-config.clip_sample_range, config.clip_sample_range)
    clean: torch.Tensor = out * x0 + skip * x
    return clean

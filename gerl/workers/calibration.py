"""Calibration before training: numerical noise of the ratio, and weight of each denoising step."""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gerl.algorithms import Algorithm
from gerl.algorithms.flow_grpo import PolicyGradient
from gerl.engine import ReplayedStep, Trajectory, replay
from gerl.engine.hooks import uncounted
from gerl.engine.transitions import EDMRule, FlowRule
from gerl.model.errors import model_errors
from gerl.protocol import SamplingProbe

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from gerl.protocol import RolloutTask
    from gerl.workers.worker import PolicyWorker


def calibrate(worker: PolicyWorker, task: RolloutTask) -> SamplingProbe:
    """Sample a micro-batch on a worker, and `probe` it."""
    dtype = next(iter(worker.policy.denoisers.values())).dtype
    with uncounted(worker.policy.pipe):
        return probe(worker.policy.pipe, worker.rollout.generate(task, worker.algorithm)[1], worker.algorithm, dtype)


def probe(
    pipe: DiffusionPipeline, trajectory: Trajectory, algorithm: Algorithm, dtype: torch.dtype = torch.float32
) -> SamplingProbe:
    """Replay half of a micro-batch just sampled; measure its ratio, which must be 1, and its step weights."""
    segment, tape = trajectory.task.segments[0], trajectory.tapes[0]
    half = None if tape.batch_size == 1 else list(range(-(-tape.batch_size // 2)))
    ratios: list[torch.Tensor] = []
    kls: list[torch.Tensor] = []
    rounds = dtype != torch.float32 and isinstance(algorithm, PolicyGradient) and algorithm.kl_coef > 0

    def measure(_: int, step: ReplayedStep) -> None:
        ratios.append(algorithm.log_ratio(step).abs().cpu())
        if rounds:
            assert isinstance(algorithm, PolicyGradient)
            kls.append(algorithm.distance(rounded_otherwise(step, dtype), step).abs().cpu())

    noisy = [k for k in segment.trained if tape.steps[k].log_prob is not None]
    with model_errors("update"):
        replay(pipe, tape, measure, steps=noisy, index=half, grad=False)
    rules = [(k, tape.steps[k].rule) for k in segment.window]
    with_kappa = [(k, r) for k, r in rules if isinstance(r, FlowRule | EDMRule)]
    turned = [(k, r.sigma, r.sigma_next, r.kappa) for k, r in with_kappa if r.kappa < 0]
    weighting = getattr(algorithm.settings, "timestep_weights", None)
    steps, noise = algorithm.step_facts(tape, tuple(noisy)), float(torch.cat(ratios).quantile(0.99))
    resolution = float(torch.cat(kls).mean()) if kls else None
    return SamplingProbe(noise, turned, tape.steps[0].x[0].numel(), steps, weighting, resolution)


def rounded_otherwise(step: ReplayedStep, dtype: torch.dtype) -> ReplayedStep:
    """Return `step` with an output perturbed by two roundings to `dtype`, each up to half a unit in the last place."""
    output = step.model_output
    unit = torch.finfo(dtype).eps * torch.exp2(output.abs().clamp_min(torch.finfo(dtype).tiny).log2().floor())
    generator = torch.Generator().manual_seed(0)
    errors = [torch.rand(output.shape, generator=generator).to(output.device) - 0.5 for _ in range(2)]
    return replace(step, model_output=output + unit * (errors[0] - errors[1]))

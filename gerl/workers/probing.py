"""Measure a policy gradient before training: the noise of its ratio, and how each step counts."""

from __future__ import annotations  # of diffusers, which the driver of a run does without

from typing import TYPE_CHECKING

import torch

from gerl.algorithms import Algorithm
from gerl.config.policy_gradients import WeightedConfig
from gerl.engine import Trajectory, replay
from gerl.engine.kernels import EDMRule, FlowRule
from gerl.model.failures import model_errors
from gerl.protocol import SamplingProbe

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def probe(pipe: DiffusionPipeline, trajectory: Trajectory, algorithm: Algorithm) -> SamplingProbe:
    """Replay half of a micro-batch that was just drawn, and measure the ratio, which should be 1, and the steps."""
    segment, tape = trajectory.task.segments[0], trajectory.tapes[0]
    half = None if tape.batch_size == 1 else list(range(-(-tape.batch_size // 2)))
    found: list[torch.Tensor] = []
    noisy = [k for k in segment.trained if tape.steps[k].log_prob is not None]
    with model_errors("update"):
        replay(
            pipe,
            tape,
            lambda k, step: found.append(algorithm.log_ratio(step).abs().cpu()),
            steps=noisy,
            index=half,
            grad=False,
        )
    rules = [(k, tape.steps[k].rule) for k in segment.window]
    with_kappa = [(k, r) for k, r in rules if isinstance(r, FlowRule | EDMRule)]
    turned = [(k, r.sigma, r.sigma_next, r.kappa) for k, r in with_kappa if r.kappa < 0]
    settings = algorithm.settings
    weighting = settings.step_weighting if isinstance(settings, WeightedConfig) else None
    steps, noise = algorithm.step_facts(tape, tuple(noisy)), float(torch.cat(found).quantile(0.99))
    return SamplingProbe(noise, turned, tape.steps[0].x[0].numel(), steps, weighting)

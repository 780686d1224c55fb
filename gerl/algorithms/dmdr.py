"""DMDR (arXiv 2511.13649): a policy gradient of few steps, held to a model's images by distribution matching.

A model of few steps has no flow at the noise levels between its own steps, so a KL of steps does not say whether its
images still look like those of the model that it was made of. Distribution matching (DMD, arXiv 2311.18828) does: the
image `x0h` that a step predicts is noised to another level, `x = (1 - tau) x0h + tau eps`, and moved from where a model
of the student's own images (`fake`) would denoise it to where the `real` one would,

    direction = (x0_fake - x0_real) / mean |x0h - x0_real|,    loss = mean(direction x0h),

with the direction as data: the gradient is that of `mean((x0h - sg(x0h - direction))^2) / 2`, as published. `fake` is a
second LoRA on the model that training starts from, trained by flow matching on the images that the student has drawn.
`real` is a teacher, or that model itself, which holds the student where it was.

The public code trains a class-conditional model with ReFL (vvvvvjdy/dmdr 061dc29, lines 448 to 566 of
train_cc/sit/train_sitxl_refl_deepspeed.py). Here the surrogate is Flow-GRPO's, as in the paper. Not as published: both
LoRAs take their optimizer steps together, where the authors give `fake` five for each of the student's, and
`algorithm.fake_scale` lets it follow faster instead; there is no cold start and no schedule, since the student is
distilled already.
"""

from __future__ import annotations  # of the model, which the driver of a run does not have

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gerl.algorithms.base import Batch
from gerl.algorithms.flow_grpo import FlowGRPO
from gerl.algorithms.planning import any_steps
from gerl.algorithms.policy_gradient import Further
from gerl.algorithms.step_gradients import StepGradients
from gerl.config import Config
from gerl.config.distillation import DMDRConfig
from gerl.engine import ReplayedStep, Tape, record_structure, replay
from gerl.protocol import Sample, UpdateStats
from gerl.utils.seeding import derive_seed, sample_generators

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from gerl.model.policy import Policy

Levels = dict[int, torch.Tensor]  # by noise level: [R, ...]


class DMDR(FlowGRPO):
    """The clipped surrogate, distribution matching, and the loss of the model that imitates."""

    settings: DMDRConfig
    reads_finished = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.teachers = self.settings.taught_by

    @property
    def needs_all_samples(self) -> bool:
        return True  # also an image without advantage has to look like one

    def further(self, policy: Policy, batch: Batch, rows: list[int], options: dict[str, Any]) -> Further:
        images: Levels = {}

        def clean(k: int, step: ReplayedStep) -> None:
            images[k] = step.rule.clean(step.x, step.model_output)

        replay(policy.pipe, batch.tape, clean, **options, grad=False)
        samples = [batch.samples[r] for r in rows]
        step_of = dict(zip(self._levels(samples, len(images), "matching"), images, strict=True))
        structure = self._structure(policy.pipe, batch.tape, rows)
        given = {j: images[k] for j, k in step_of.items()}
        latents = noised(structure, given, noise_of(samples, given, "matching"))
        with policy.fake():
            fake = cleaned(policy.pipe, structure, latents)
        with policy.teacher(0) if self.teachers else policy.first() as other:
            pipe, changed = other or policy.pipe, self.teachers[0].changed if self.teachers else {}
            if pipe is not policy.pipe or changed:
                structure = self._structure(pipe, batch.tape, rows, changed)
            real = cleaned(pipe, structure, latents)
        directions = {k: direction(images[k], fake[j], real[j]) for j, k in step_of.items()}

        def loss(k: int, step: ReplayedStep) -> tuple[torch.Tensor, dict[str, float]]:
            matched = (directions[k] * step.rule.clean(step.x, step.model_output)).flatten(1).mean(1)
            squared = float(directions[k].square().mean())
            return self.settings.matching_coef * matched.mean(), {"matching_distance": squared / 2}

        return loss

    def train(
        self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float, meter: StepGradients[Any] | None = None
    ) -> UpdateStats:
        fake_loss = self._imitate(policy, batch, rows, num_pairs)  # before: the meter is of what the steps add
        return super().train(policy, batch, rows, num_pairs, meter) + UpdateStats(0, {"fake_loss": fake_loss})

    def _imitate(self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float) -> float:
        """Add the gradient of the LoRA that imitates the finished images of `rows`; the sum of its losses."""
        samples = [batch.samples[r] for r in rows]
        levels = self._levels(samples, len(batch.trained), "fake")
        images = dict.fromkeys(levels, batch.tape.steps[-1].x_next[rows])
        noise, structure = noise_of(samples, images, "fake"), self._structure(policy.pipe, batch.tape, rows)
        total = 0.0

        def imitate(j: int, step: ReplayedStep) -> torch.Tensor:
            nonlocal total
            loss = ((step.model_output - step.rule.target(images[j], noise[j])) ** 2).flatten(1).mean(1).sum()
            total += float(loss.detach())
            return loss / num_pairs

        with policy.fake():
            replay(policy.pipe, structure, imitate, steps=levels, latents=noised(structure, images, noise))
        return total

    def _levels(self, samples: Sequence[Sample], count: int, what: str) -> tuple[int, ...]:
        """`count` of the noise levels, the same for all rows, others at each trainer step."""
        levels = range(self.settings.matching_steps)
        return any_steps(levels, count, what, self.config.trainer.seed, samples[0].step)

    def _structure(
        self, pipe: DiffusionPipeline, tape: Tape, rows: list[int], changed: Mapping[str, Any] | None = None
    ) -> Tape:
        """The call of `tape` for `rows` with the noise levels of `matching_steps` steps."""
        steps = self.settings.matching_steps
        other: dict[str, Any] = {"num_inference_steps": steps}
        if tape.call.get("sigmas") is not None:
            other["sigmas"] = [1 - j / steps for j in range(steps)]
        if tape.call.get("timesteps") is not None:  # those of its few steps
            other["timesteps"] = None
        return record_structure(pipe, tape, rows, {**other, **(changed or {})}, steps)


def noise_of(samples: Sequence[Sample], levels: Levels, what: str) -> Levels:
    """Standard normal noise for the images of each level, the same in any micro-batch."""
    found: Levels = {}
    for j, images in levels.items():
        generators = sample_generators([derive_seed(what, sample.seed, j) for sample in samples])
        drawn = [torch.randn(images.shape[1:], generator=generator) for generator in generators]
        found[j] = torch.stack(drawn).to(images.device)
    return found


def noised(structure: Tape, images: Levels, noise: Levels) -> Levels:
    """The images of each level with its noise."""
    return {j: structure.steps[j].rule.noised(x0, noise[j]) for j, x0 in images.items()}


def cleaned(pipe: DiffusionPipeline, structure: Tape, latents: Levels) -> Levels:
    """The clean images that a pipeline sees in the latents of each level, without gradient."""
    found: Levels = {}

    def keep(j: int, step: ReplayedStep) -> None:
        found[j] = step.rule.clean(step.x, step.model_output)

    replay(pipe, structure, keep, steps=sorted(latents), latents=latents, grad=False)
    return found


def direction(images: torch.Tensor, fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """`(fake - real) / mean |images - real|`: against it, `[B, ...]`, distribution matching moves images.

    The mean is over the values of an image. 0 where the two models see the same.
    """
    scale = (images - real).abs().flatten(1).mean(1) + 1e-8
    return (fake - real) / scale.view(-1, *[1] * (images.ndim - 1))

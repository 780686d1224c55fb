"""On-policy distillation (DiffusionOPD, arXiv 2605.15055; Flow-OPD, arXiv 2605.08063): a student learns its own steps.

The student draws. At every state x_k of its own trajectories, which are data, a teacher's step is `Normal(mu', std)`
with the student's std, so that the KL to it has a closed form, a mean over dimensions:

    KL(student || teacher) = mean((mu - mu')^2) / (2 std^2)

Its gradient is exact. Flow-OPD's first form (`reward_mode` kl_only) takes -KL, with its gradient, for the advantage of
a policy gradient: the same gradient and noise beside it, as the KL of step k is a function of x_k, drawn before the
noise whose likelihood it multiplies. Its `gkd` is the form here.

Several teachers share a student by `data_source`: specialists become one model. A teacher may be the base model with
another guidance, which teaches the student to do without (guidance distillation). Rewards are only watched.
"""

from __future__ import annotations  # of the model, which the driver of a run does not have

from typing import TYPE_CHECKING, Any

import torch

from gerl.algorithms.base import Algorithm, Batch, Rewards
from gerl.algorithms.planning import drawn_steps
from gerl.algorithms.step_gradients import StepGradients
from gerl.algorithms.teaching import ask_teachers, by_teacher, distance_weight, step_distance, teacher_of
from gerl.config import Config
from gerl.config.distillation import OPDConfig
from gerl.engine import ReplayedStep, Tape, replay
from gerl.protocol import StepFacts, UpdateStats

if TYPE_CHECKING:
    from gerl.model.policy import Policy


class OPD(Algorithm):
    """The distance of each trained step to that of the teacher of its prompt, and one to the base model."""

    settings: OPDConfig

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.teachers = self.settings.taught_by

    @property
    def needs_all_samples(self) -> bool:
        return True

    @property
    def compares_with_base(self) -> bool:
        return super().compares_with_base or any(teacher.is_base for teacher in self.teachers)

    def trained_steps(self, window: tuple[int, ...], step: int) -> tuple[int, ...]:
        sampling = self.config.sampling
        noisy = sampling.kernel != "ode" and sampling.noise_level > 0
        steps = window if noisy else range(*sampling.steps_range)
        return drawn_steps(steps, self.settings.timesteps or len(steps), self.config.trainer.seed, step)

    def credit(self, rewards: Rewards) -> torch.Tensor:
        """1 for the samples that have a teacher, whatever their rewards; NaN for the others."""
        taught = [teacher_of(self.teachers, sample) is not None for sample in rewards.samples]
        credit = torch.where(torch.tensor(taught), 1.0, torch.nan)
        return credit[:, None].expand(-1, self.config.sampling.num_inference_steps)

    def step_facts(self, tape: Tape, trained: tuple[int, ...]) -> list[StepFacts]:
        kind, rules = self.settings.distance, [(k, tape.steps[k].rule) for k in trained]
        return [StepFacts(k, r.sigma, r.dt, r.std, r.jacobian, distance_weight(kind, r)) for k, r in rules]

    def train(
        self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float, meter: StepGradients[Any] | None = None
    ) -> UpdateStats:
        settings, tape = self.settings, batch.tape
        options: dict[str, Any] = {"steps": batch.trained, "index": rows, "cfg": settings.cfg}
        options["step_batch"] = self.step_batch(meter)
        samples = [batch.samples[r] for r in rows]
        lesson = ask_teachers(policy, tape, samples, options, every=self.config.lockstep)
        base = self.base_steps(policy, tape, options) if self.kl_coef > 0 else {}
        stats = UpdateStats()

        def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
            nonlocal stats
            if meter is not None:
                meter.begin(k)
            output, step = step.part(lesson.outputs[k]), step.reached()
            distances = step_distance(settings.distance, step, output)
            losses = lesson.weights * distances
            sums = {"teacher_distance": float(distances.detach().sum())}
            if base:
                kl = step_distance(settings.distance, step, base[k].reached().model_output)
                losses = losses + self.kl_coef * self.weighted_kl(kl, batch, rows)
                sums["kl"] = float(kl.detach().sum())
            parts = by_teacher(self.teachers, lesson, distances) if len(self.teachers) > 1 else {}
            named = {f"teacher_distance/{name}": part for name, part in parts.items()}
            stats += UpdateStats(len(rows), {"loss": float(losses.detach().sum())} | sums, parts=named)
            return losses.sum() / num_pairs

        replay(policy.pipe, tape, on_step, **options)
        return stats

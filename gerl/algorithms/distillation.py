"""Distillation on the student's own trajectories: on-policy distillation (OPD) and distribution matching (DMDR)."""

from __future__ import annotations  # torch is imported lazily

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gerl.algorithms.base import Algorithm, Batch, Measures, Rewards, summed
from gerl.algorithms.common import per_sample, predicted, replayed, sampled_noise
from gerl.algorithms.core_algos import Metrics
from gerl.algorithms.flow_grpo import ExtraLoss, FlowGRPO, FlowGRPOConfig
from gerl.algorithms.lazily import DiffusionPipeline, Policy, ReplayedStep, Rule, StepGradients, Tape, engine, torch
from gerl.algorithms.planning import any_steps, sampled_steps
from gerl.config import Config
from gerl.config.algorithms import NAME, AlgorithmConfig, Needs, Teacher, teachers
from gerl.config.blocks import SamplingConfig, StepDistance
from gerl.config.schema import key, main_key, shown
from gerl.errors import ConfigError, ModelError
from gerl.protocol import DATA_SOURCE, Sample, StepFacts, UpdateStats

Levels = dict[int, "torch.Tensor"]  # by step or noise level: [R, ...]


@dataclass(frozen=True)
class OPDConfig(AlgorithmConfig):
    """Keys of on-policy distillation."""

    teachers: list[dict[str, Any]] = main_key(
        [{"guidance": 4.5}],
        "what to learn from: [{lora: CHECKPOINT, data_source: ocr}, {path: PIPELINE, data_source: colour}]; "
        "without lora and path it is the base model, with another guidance scale",
    )
    distance: StepDistance = main_key(
        "gaussian",
        "distance of a step to the teacher's: the KL of the two Gaussians; half the squared distance of their "
        "means, also of steps without noise; or the squared distance of the outputs, which weighs all steps equally",
    )
    # of the stochastic steps, if there are any
    timesteps: int | None = main_key(None, "noise levels trained per trainer step; null: all in the range", low=1)

    @property
    def needs(self) -> Needs:
        chosen = tuple(teachers(self.teachers))
        base = any(teacher.is_base for teacher in chosen)
        return replace(super().needs, trajectory=True, single_images=True, teachers=chosen, base_model=base)

    def check(self) -> None:
        super().check()
        if not self.needs.teachers:
            raise ConfigError(
                f"algorithm.teachers=[]: {self.name} learns from teachers; add one, such as "
                "'algorithm.teachers=[{lora: CHECKPOINT}]'"
            )
        if self.dynamic_sampling:
            raise ConfigError(
                f"algorithm.dynamic_sampling={self.dynamic_sampling}: {self.name} learns from all images, "
                "regardless of their rewards; use 0"
            )

    def check_sampling(self, sampling: SamplingConfig) -> None:
        if self.distance == "gaussian" and (sampling.noise_level == 0 or sampling.kernel == "ode"):
            name = "kernel=ode" if sampling.kernel == "ode" else "noise_level=0"
            raise ConfigError(
                f"sampling.{name}: steps without noise have no KL to the teacher; use algorithm.distance=mean or "
                "velocity, or kernel=cps with noise_level=0.8"
            )
        for teacher in self.needs.teachers:
            same = teacher.guidance is not None and teacher.guidance == sampling.guidance_scale and not teacher.call
            if teacher.is_base and same and self.cfg != "off":
                raise ConfigError(
                    f"algorithm.teachers={shown(self.teachers)}: the base model with the guidance of the rollout "
                    "is identical to the initial student; set another guidance, or lora or path"
                )


@dataclass(frozen=True)
class DMDRConfig(FlowGRPOConfig):
    """Keys of DMDR."""

    teachers: list[dict[str, Any]] = key(
        [],
        "the model whose images a few-step model should match, [{path: PIPELINE, guidance: 4.5}]; []: the model "
        "that training starts from",
    )
    matching_coef: float = main_key(0.01, "weight of distribution matching", low=0)
    matching_steps: int = key(20, "noise levels of the comparison: those of this many steps", low=2, high=1000)
    fake_scale: float = key(
        2.0,
        "alpha of the LoRA that imitates the images, relative to that of the trained one: how fast it follows",
        above=0,
    )

    @property
    def needs(self) -> Needs:
        chosen = tuple(teachers(self.teachers))
        return replace(super().needs, imitation=self.fake_scale, finished_latents=True, teachers=chosen)

    def check(self) -> None:
        super().check()
        if len(self.needs.teachers) > 1 or any(t.data_source is not None for t in self.needs.teachers):
            raise ConfigError(
                f"algorithm.teachers={shown(self.teachers)}: {self.name} compares with one model, for all prompts; "
                "give one entry without data_source"
            )


# --- On-policy distillation (DiffusionOPD, arXiv 2605.15055; Flow-OPD, arXiv 2605.08063).
#
# The student samples trajectories. At each of their states x_k, which are data, a teacher's step is `Normal(mu', std)`
# with the student's std, so the KL to it has a closed form, a mean over dimensions, with an exact gradient:
#
#     KL(student || teacher) = mean((mu - mu')^2) / (2 std^2)
#
# Flow-OPD's first form (`reward_mode` kl_only) uses -KL as the advantage of a policy gradient: the same gradient plus
# noise. Its `gkd` is the form here. Several teachers, selected by `data_source`, combine specialists into one model. A
# teacher may be the base model with another guidance scale (guidance distillation). Rewards are logged, not optimised.


class OPD(Algorithm):
    """Distance of each trained step to that of the prompt's teacher, plus a KL to the base model."""

    names = "opd"
    settings: OPDConfig
    all_samples = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.teachers = self.needs.teachers

    def trained_steps(self, window: tuple[int, ...], step: int) -> tuple[int, ...]:
        sampling = self.config.sampling
        noisy = sampling.kernel != "ode" and sampling.noise_level > 0
        steps = window if noisy else range(*sampling.steps_range)
        return sampled_steps(steps, self.settings.timesteps or len(steps), self.config.trainer.seed, step)

    def credit(self, rewards: Rewards) -> torch.Tensor:
        """Return 1 for the samples with a teacher, regardless of rewards; NaN for the others."""
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
        options = self.replay_options(batch, rows, meter) | {"index": rows}
        samples = [batch.samples[r] for r in rows]
        outputs, weights, taught_by = teacher_steps(policy, tape, samples, options, every=self.config.lockstep)
        base = self.base_steps(policy, tape, options) if self.kl_coef > 0 else {}
        measures: list[Measures] = []

        def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
            output, step = step.part(outputs[k]), step.reached()
            distances = step_distance(settings.distance, step, output)
            losses = weights * distances
            sums: Metrics = {"teacher_distance": distances.detach().sum()}
            if base:
                kl = step_distance(settings.distance, step, base[k].reached().model_output)
                losses = losses + self.kl_coef * self.weighted_kl(kl, batch, rows)
                sums["kl"] = kl.detach().sum()
            parts = by_teacher(taught_by, distances) if len(self.teachers) > 1 else {}
            named = {f"teacher_distance/{self.teachers[i].name}": part for i, part in parts.items()}
            measures.append(Measures(len(rows), {"loss": losses.detach().sum()} | sums, parts=named))
            return losses.sum() / num_pairs

        engine.replay(policy.pipe, tape, on_step, **options)
        return summed(measures)


# --- Teachers' steps at the states of a student's trajectories


def teacher_of(teachers: Sequence[Teacher], sample: Sample) -> int | None:
    """Return the index of a sample's teacher: that of its data_source, else the general one; None: no teacher."""
    source = sample.prompt.metadata.get(DATA_SOURCE)
    numbers = {teacher.data_source: i for i, teacher in enumerate(teachers)}
    return numbers.get(None if source is None else str(source), numbers.get(None))


def teacher_steps(
    policy: Policy, tape: Tape, samples: Sequence[Sample], options: dict[str, Any], every: bool = False
) -> tuple[Levels, torch.Tensor, list[int | None]]:
    """Compute the teachers' steps for the R rows `options["index"]` of `tape`, whose samples are `samples`.

    Returns by step the fp32 outputs of each row's teacher, weights of the losses [R], both 0 without a teacher, and the
    teachers' indices. `every`: each teacher computes all rows, for ranks in lockstep, which make equally many calls.
    """
    index = list(options["index"] or range(tape.batch_size))
    teachers = [model.teacher for model in policy.teachers]
    taught_by = [teacher_of(teachers, sample) for sample in samples]
    divisible = tape.probe is not None and tape.probe.batch_size != tape.batch_size
    outputs: Levels = {}
    for number in range(len(teachers)):
        taught = [i for i, teacher in enumerate(taught_by) if teacher == number]
        rows = taught if divisible and not every else list(range(len(index)))
        if not taught and not every:
            continue
        by_step = _steps_of(policy, number, tape, [index[i] for i in rows], options)
        for k, output in by_step.items():
            whole = outputs.setdefault(k, output.new_zeros(len(index), *output.shape[1:]))
            whole[taught] = output[[rows.index(i) for i in taught]]
    weights = [0.0 if number is None else teachers[number].weight for number in taught_by]
    return outputs, torch.tensor(weights, device=tape.steps[0].x.device), taught_by


def _steps_of(policy: Policy, number: int, tape: Tape, rows: list[int], options: dict[str, Any]) -> Levels:
    """Return the outputs of a teacher by step at the states of `rows` of `tape`, [R, ...]."""
    model, options = policy.teachers[number], {**options, "cfg": "joint", "index": rows}
    with policy.teacher(number) as pipe:
        if model.pipe is None and not model.teacher.changed:
            return replayed(pipe, tape, lambda step: step.model_output, **options)
        # another call of the pipeline at the same latents
        changed = engine.record_structure(pipe, tape, rows, model.teacher.changed)
        for k in options["steps"]:
            new_step, rule, expected = changed.steps[k], changed.steps[k].rule, tape.steps[k].rule
            if type(rule) is not type(expected) or abs(rule.sigma - expected.sigma) > 1e-6:
                raise ModelError(
                    f"{NAME}: step {k} of {model.teacher} is at noise level {rule.sigma:.6g} ({type(rule).__name__}), "
                    f"that of the student at {expected.sigma:.6g} ({type(expected).__name__}): use a teacher with the "
                    "same steps"
                )
            if new_step.x.shape[1:] != tape.steps[k].x.shape[1:]:
                raise ModelError(
                    f"{NAME}: the latents of {model.teacher} have the shape {list(new_step.x.shape[1:])}, those of the "
                    f"student {list(tape.steps[k].x.shape[1:])}: use a teacher with the same latents"
                )
        options |= {"index": None, "latents": {k: tape.steps[k].x[rows] for k in options["steps"]}}
        return replayed(pipe, changed, lambda step: step.model_output, **options)


def step_distance(kind: StepDistance, step: ReplayedStep, output: torch.Tensor) -> torch.Tensor:
    """Return the distance [B] of a student's step to a teacher's `output` [B, ...]; gradient only to the student.

    Means over non-batch dimensions of `(mean - mean')^2 / (2 std^2)` (`gaussian`, the KL; raises `ValueError` without
    noise), `(mean - mean')^2 / 2` (`mean`) or `(output - output')^2` (`velocity`).
    """
    output = output.detach()
    if kind == "velocity":
        return per_sample((step.model_output - output) ** 2)
    if kind == "gaussian" and step.std == 0:
        raise ValueError("a step with std 0 is deterministic, and has no KL to another one")
    squares = per_sample((step.mean - step.rule.mean(step.x, output)) ** 2)
    return squares / (2 * step.std**2 if kind == "gaussian" else 2)


def distance_weight(kind: StepDistance, rule: Rule) -> float:
    """Return the factor of the squared distance of outputs in `step_distance`."""
    squared = rule.jacobian**2 / 2
    return {"gaussian": squared / rule.std**2 if rule.std else 0.0, "mean": squared, "velocity": 1.0}[kind]


def by_teacher(taught_by: Sequence[int | None], distances: torch.Tensor) -> dict[int, list[torch.Tensor]]:
    """Return the `distances` [R], one by one, by index of the teacher."""
    values: dict[int, list[torch.Tensor]] = {}
    for number, value in zip(taught_by, distances.detach().unbind(), strict=True):
        if number is not None:
            values.setdefault(number, []).append(value)
    return values


# --- DMDR (arXiv 2511.13649): a policy gradient of few steps, held to a model's images by distribution matching.
#
# A few-step model has no flow between its own noise levels, so a KL of steps does not tell whether its images still
# resemble those of the original model. Distribution matching (DMD, arXiv 2311.18828) does: the image `x0h` that a step
# predicts is noised to another level, `x = (1 - tau) x0h + tau eps`, and moved from the denoised image of a model of
# the student's own images (`fake`) towards that of the `real` model,
#
#     direction = (x0_fake - x0_real) / mean |x0h - x0_real|,    loss = mean(direction x0h),
#
# with the direction as data. `fake` is a second LoRA on the initial model, trained by flow matching on the student's
# images. `real` is a teacher, or the initial model itself, which keeps the student close to it.
#
# As in the authors' code (vvvvvjdy/dmdr 061dc29, train_cc/sit/train_sitxl_refl_deepspeed.py, lines 448 to 566), but
# with Flow-GRPO's surrogate, as in the paper, and both LoRAs take their optimizer steps together: `fake` follows faster
# by `algorithm.fake_scale`.


class DMDR(FlowGRPO):
    """Clipped surrogate, distribution matching, and the loss of the imitating LoRA."""

    names = "dmdr"
    settings: DMDRConfig
    all_samples = True  # images without advantage are matched too

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.teachers = self.needs.teachers

    def further(self, policy: Policy, batch: Batch, rows: list[int], options: dict[str, Any]) -> ExtraLoss:
        images = replayed(policy.pipe, batch.tape, predicted, **options)
        samples = [batch.samples[r] for r in rows]
        step_of = dict(zip(self._levels(samples, len(images), "matching"), images, strict=True))
        structure = self._structure(policy.pipe, batch.tape, rows)
        image_of = {j: images[k] for j, k in step_of.items()}
        latents = noised(structure, image_of, noise_of(samples, image_of, "matching"))
        with policy.fake():
            fake = cleaned(policy.pipe, structure, latents)
        with policy.teacher(0) if self.teachers else policy.first() as other:
            pipe, changed = other or policy.pipe, self.teachers[0].changed if self.teachers else {}
            if pipe is not policy.pipe or changed:
                structure = self._structure(pipe, batch.tape, rows, **changed)
            real = cleaned(pipe, structure, latents)
        directions = {k: direction(images[k], fake[j], real[j]) for j, k in step_of.items()}

        def loss(k: int, step: ReplayedStep) -> tuple[torch.Tensor, Metrics]:
            matched = per_sample(directions[k] * predicted(step))
            squared = directions[k].square().mean()
            return self.settings.matching_coef * matched.mean(), {"matching_distance": squared / 2}

        return loss

    def train(
        self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float, meter: StepGradients[Any] | None = None
    ) -> UpdateStats:
        fake = self._imitate(policy, batch, rows, num_pairs)  # first: the meter measures only the replay's steps
        return super().train(policy, batch, rows, num_pairs, meter) + fake

    def _imitate(self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float) -> UpdateStats:
        """Accumulate the gradient of the LoRA that imitates the images of `rows`; returns the sum of losses."""
        samples = [batch.samples[r] for r in rows]
        levels = self._levels(samples, len(batch.trained), "fake")
        images = dict.fromkeys(levels, batch.tape.steps[-1].x_next[rows])
        noise, structure = noise_of(samples, images, "fake"), self._structure(policy.pipe, batch.tape, rows)
        measures: list[Measures] = []

        def imitate(j: int, step: ReplayedStep) -> torch.Tensor:
            loss = per_sample((step.model_output - step.rule.target(images[j], noise[j])) ** 2).sum()
            measures.append(Measures(0, {"fake_loss": loss}))
            return loss / num_pairs

        with policy.fake():
            engine.replay(policy.pipe, structure, imitate, steps=levels, latents=noised(structure, images, noise))
        return summed(measures)

    def _levels(self, samples: Sequence[Sample], count: int, what: str) -> tuple[int, ...]:
        """Sample `count` noise levels, the same for all rows, new ones at each trainer step."""
        levels = range(self.settings.matching_steps)
        return any_steps(levels, count, what, self.config.trainer.seed, samples[0].step)

    def _structure(self, pipe: DiffusionPipeline, tape: Tape, rows: list[int], **changed: Any) -> Tape:
        """Return the call of `tape` for `rows` with the noise levels of `matching_steps` steps."""
        steps = self.settings.matching_steps
        other: dict[str, Any] = {"num_inference_steps": steps}
        if tape.call.get("sigmas") is not None:
            other["sigmas"] = [1 - j / steps for j in range(steps)]
        if tape.call.get("timesteps") is not None:  # levels of its own few steps
            other["timesteps"] = None
        return engine.record_structure(pipe, tape, rows, {**other, **changed}, steps)


def noise_of(samples: Sequence[Sample], levels: Levels, what: str) -> Levels:
    """Return standard normal noise for the images of each level."""
    return {j: sampled_noise(images, [(what, sample.seed, j) for sample in samples]) for j, images in levels.items()}


def noised(structure: Tape, images: Levels, noise: Levels) -> Levels:
    """Return the images with the noise of each level."""
    return {j: structure.steps[j].rule.noised(x0, noise[j]) for j, x0 in images.items()}


def cleaned(pipe: DiffusionPipeline, structure: Tape, latents: Levels) -> Levels:
    """Return the clean images a pipeline predicts from the latents of each level, without gradient."""
    return replayed(pipe, structure, predicted, steps=sorted(latents), latents=latents)


def direction(images: torch.Tensor, fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return `(fake - real) / mean |images - real|` [B, ...], the mean over an image; 0 where both models agree."""
    scale = per_sample((images - real).abs()) + 1e-8
    return (fake - real) / scale.view(-1, *[1] * (images.ndim - 1))

"""Base class of algorithms: the trajectories to sample, their credit, and the losses and gradients of a step.

The driver plans and credits, the workers train. An algorithm is independent of the model.
"""

from __future__ import annotations  # torch is imported lazily

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, ClassVar, assert_never

from gerl.algorithms.core_algos import (
    Metric,
    batch_advantages,
    decoupled_advantages,
    group_advantages,
    largest_of_groups,
    scaled_by_diversity,
    shaped_by_diversity,
)
from gerl.algorithms.lazily import Policy, ReplayedStep, StepGradients, Tape, Trajectory, engine, torch
from gerl.algorithms.planning import group_chunks, micro_batches, sde_window
from gerl.config import Config
from gerl.config.algorithms import AlgorithmConfig, Needs
from gerl.config.blocks import AdvantageEstimator, DiversityShaping, StdKind
from gerl.config.schema import key, main_key
from gerl.errors import CheckpointError
from gerl.protocol import Group, RolloutTask, Sample, Segment, StepFacts, UpdateStats

# --- Keys shared by several kinds of algorithms


@dataclass(frozen=True)
class NormalisedConfig(AlgorithmConfig):
    """Credit from the reward relative to a baseline."""

    adv_estimator: AdvantageEstimator = key(
        "grpo",
        "baseline: mean of the group; of its other members; of the batch; each scorer normalised before the sum; or a "
        "critic's values of the noisy latents, by step (block critic)",
    )
    advantage_std: StdKind = key(
        "group", "divisor of the centred rewards: the group's std, the batch's, or none (Dr. GRPO)"
    )

    @property
    def needs(self) -> Needs:
        whole_step = self.adv_estimator == "reinforce_pp" or (
            self.adv_estimator == "gae" and self.advantage_std != "group"
        )
        return replace(super().needs, single_images=whole_step)


@dataclass(frozen=True)
class ShapedConfig(NormalisedConfig):
    """Advantages may be shaped by the diversity of a group."""

    diversity: DiversityShaping = key(
        "none",
        "how an image's dissimilarity to the rest of its group (a watched groupwise scorer) shapes its advantage: "
        "scale multiplies positive advantages by it, relative to the group's mean (GARDO); add adds diversity_coef "
        "times the advantage that it would have as a reward (as DRIFT, which shapes the reward by the diversity of "
        "the group)",
    )
    diversity_scorer: str = key("diversity", "the scorer, or its column NAME/PART, that measures the dissimilarity")
    diversity_coef: float = key(0.1, "see diversity=add", above=0)


@dataclass(frozen=True)
class DownSampledConfig(ShapedConfig):
    """Images are trained on independently, so those with little signal may be left out."""

    train_share: float = key(
        1.0, "share of a group's images used for training, those with the largest |advantage| (PODS)", above=0, high=1
    )


@dataclass(frozen=True)
class ClippedConfig(AlgorithmConfig):
    """The ratio to the sampling policy is clipped."""

    clip_low: float = main_key(1e-4, "lower bound of the ratio is 1 - this value", above=0, high=1)
    clip_high: float = main_key(1e-4, "upper bound of the ratio is 1 + this value", above=0)

    def clip_range(self, dimensions: int) -> tuple[float, float]:
        return self.clip_low, self.clip_high


def group_ids(samples: Sequence[Sample]) -> torch.Tensor:
    """Return an integer per sample, equal within a group: [B] int64, in order of appearance."""
    numbers: dict[Group, int] = {}
    return torch.tensor([numbers.setdefault(s.group, len(numbers)) for s in samples], dtype=torch.int64)


@dataclass(frozen=True)
class Rewards:
    """Scores of the trainable samples of a step."""

    samples: Sequence[Sample]  # [B]
    totals: torch.Tensor  # [B]
    by_scorer: torch.Tensor  # [B, R], scorers with a weight
    weights: torch.Tensor  # [R]
    diversity: torch.Tensor | None = None  # [B], if algorithm.diversity is set
    rows: Sequence[int] = ()  # [B] rows in the step's table of scores
    values: torch.Tensor | None = None  # [B, T] of a critic, NaN at steps without one

    @property
    def group_ids(self) -> torch.Tensor:
        """`[B]` int64, equal for samples of one group."""
        return group_ids(self.samples)


@dataclass(frozen=True)
class Batch:
    """A tape and the credit of its rows; row `r` has the credit of `samples[r]`.

    `pooled`: sums over the groups, if the algorithm `pools`.
    """

    tape: Tape
    samples: Sequence[Sample]  # [R]
    trained: tuple[int, ...]  # steps (or noise levels)
    credit: torch.Tensor  # [R, T] fp32, NaN where not trained
    pooled: Pooled | None = None
    gate: torch.Tensor | None = None  # [R] factors of the KL to the reference; None: 1


@dataclass(frozen=True)
class KLWeight:
    """Weight of the KL to the reference, times factors `per_sample` [B] by task."""

    coef: float
    per_sample: Mapping[int, torch.Tensor] | None = None

    def of(self, task_id: int) -> torch.Tensor | None:
        """Return the factors of a task; None: 1."""
        return None if self.per_sample is None else self.per_sample.get(task_id)


class Algorithm(ABC):
    """Base class: groups of independent images with group-relative advantages for all their steps.

    A subclass annotates `settings` with its configuration class, which declares its keys and needs.
    """

    names: ClassVar[str] = ""  # values of `algorithm.name` that select the class, separated by spaces
    preset: ClassVar[str] = "flow_grpo"  # preset with default settings for a user's subclass
    config_class: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    settings: AlgorithmConfig
    all_samples = False  # train on samples with advantage 0 too
    kl_on_all = False  # the same while there is a KL to the base model
    regulariser: Algorithm | None = None  # imitates the images of `data.regularise`, if any

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if declared := vars(cls).get("__annotations__", {}).get("settings"):
            names = vars(sys.modules[cls.__module__])
            cls.config_class = names[declared] if isinstance(declared, str) else declared

    def __init__(self, config: Config) -> None:
        self.config, self.settings = config, config.algorithm
        self.needs = self.settings.needs
        n, actor_size = config.rollout.n, config.actor.micro_batch_size or config.rollout.n
        small = config.rollout.micro_batch_size < n or actor_size < self.needs.loss_images(n)
        self.together = self.needs.sampled_images(n)  # images of a group in one micro-batch of the rollout
        self.whole_groups = self.needs.whole_groups  # the loss of an image depends on others of its group
        self.pools = self.whole_groups and small  # a group may span micro-batches: sums need a first pass (`pool`)
        # the samples of a rollout's micro-batch must be on one tape
        self.needs_whole_batches = self.needs.sampled_over != "image" or (self.whole_groups and not self.pools)
        self.kl_coef = self.settings.kl_coef  # may be raised by the guard
        self.reference_step = 0  # trainer step whose final weights are the reference of the KL

    def of(self, samples: Sequence[Sample]) -> Algorithm:
        """Return the algorithm for a micro-batch of `samples`."""
        return self.regulariser if self.regulariser is not None and samples[0].dataset_image is not None else self

    # --- on the driver

    def plan(self, samples: Sequence[Sample], first_id: int = 0) -> list[RolloutTask]:
        """Split `samples` into the micro-batches of the rollout, with ids from `first_id`."""
        size = max(1, self.config.rollout.micro_batch_size // self.together) * self.together
        batches = group_chunks if self.whole_groups else micro_batches
        tasks: list[RolloutTask] = []
        groups = [sample.group for sample in samples]
        windows = self.windows(samples[0].step, groups) if samples else {}
        by_window = sorted(zip(groups, samples, strict=True), key=lambda pair: windows[pair[0]])
        for window, part in groupby(by_window, key=lambda pair: windows[pair[0]]):
            for chunk in batches([sample for _, sample in part], size):
                rows = tuple(range(len(chunk)))
                trained = self.trained_steps(window, chunk[0].step)
                segment = Segment(tuple(s.seed for s in chunk), rows, window, trained)
                tasks.append(RolloutTask(first_id + len(tasks), chunk, (segment,)))
        return tasks

    def windows(self, step: int, groups: Sequence[Group]) -> dict[Group, tuple[int, ...]]:
        """Return the stochastic steps of the trajectories of each of `groups` at trainer step `step`."""
        if self.config.sampling.window_per == "group":
            return {group: sde_window(self.config, step, group) for group in dict.fromkeys(groups)}
        return dict.fromkeys(groups, sde_window(self.config, step))

    def trained_steps(self, window: tuple[int, ...], step: int) -> tuple[int, ...]:
        """Return the steps (or noise levels) that trainer step `step` trains: here, the stochastic ones."""
        del step
        return window

    def credit(self, rewards: Rewards) -> torch.Tensor:
        """Return the clipped advantages of the samples at each step, [B, T]."""
        settings, clip = self.settings, self.settings.advantage_clip
        values = self._shaped(self.advantages(rewards), rewards).clamp(-clip, clip)
        if isinstance(settings, DownSampledConfig) and settings.train_share < 1:
            values = largest_of_groups(values, rewards.group_ids, settings.train_share)
        return values if values.ndim == 2 else values[:, None].expand(-1, self.config.sampling.num_inference_steps)

    def advantages(self, rewards: Rewards) -> torch.Tensor:
        """Return one advantage per sample, [B], or per step, [B, T]."""
        settings, ids = self.settings, rewards.group_ids
        assert isinstance(settings, NormalisedConfig)  # dataset images have a credit of their own
        match settings.adv_estimator:
            case "grpo" | "rloo" as estimator:
                return group_advantages(rewards.totals, ids, settings.advantage_std, estimator == "rloo")
            case "reinforce_pp" | "gae":  # gae: without values of a critic
                return batch_advantages(rewards.totals)
            case "gdpo":
                return decoupled_advantages(rewards.by_scorer, rewards.weights, ids, settings.advantage_std)
            case unknown:
                assert_never(unknown)

    def _shaped(self, advantages: torch.Tensor, rewards: Rewards) -> torch.Tensor:
        """Return the advantages [B], shaped by the diversity of the group as `algorithm.diversity` says."""
        settings = self.settings
        if not isinstance(settings, ShapedConfig) or rewards.diversity is None:
            return advantages
        if settings.diversity == "scale":
            return scaled_by_diversity(advantages, rewards.diversity, rewards.group_ids)
        return shaped_by_diversity(advantages, rewards.diversity, rewards.group_ids, settings.diversity_coef)

    def due_reset(self, step: int, kl: float | None) -> bool:
        """Whether the weights after trainer step `step` become the reference of the KL; `kl`: mean KL in this step."""
        every, above = self.settings.kl_reset_every, self.settings.kl_reset_above
        late = every > 0 and step - self.reference_step >= every
        return late or (above is not None and kl is not None and kl > above)

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run, as JSON."""
        return {"reference_step": self.reference_step}

    def move_reference(self, step: int) -> None:
        """Take the weights after trainer step `step` as the reference of the KL."""
        self.reference_step = step

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; raises `CheckpointError` for anything else."""
        step = state.get("reference_step", 0)
        if type(step) is not int:
            raise CheckpointError("state.json has no usable algorithm.reference_step: a step")
        self.reference_step = step

    # --- on a worker

    @property
    def needs_all_samples(self) -> bool:
        """Whether samples with advantage 0 are trained on too, for example for the KL to the base model."""
        return self.all_samples or (self.kl_on_all and self.kl_coef > 0)

    def pool(self, policy: Policy, batch: Batch, rows: list[int]) -> Pooled:
        """Return what `rows` of `batch` contribute to the losses of the other samples of their groups."""
        raise self.undefined("pool")

    def undefined(self, method: str) -> NotImplementedError:
        """Return the error of a class whose `needs` require a method that it lacks."""
        return NotImplementedError(f"{type(self).__name__} does not define {method}, which its needs require; add it")

    @property
    def credits_groups_alone(self) -> bool:
        """Whether the credit of a group depends only on its own images, and computing it has no side effects."""
        return self._inherits(Algorithm.credit, Algorithm.advantages) and compares_within_groups(self.settings)

    def _inherits(self, *methods: Callable[..., Any]) -> bool:
        """Whether the class has exactly these methods: a subclass may compute its credit in another way."""
        return all(getattr(type(self), method.__name__) is method for method in methods)

    def set_kl_weight(self, kl: KLWeight | None) -> None:
        """Set the weight of the KL to the reference; None: the configured one."""
        self.kl_coef = self.settings.kl_coef if kl is None else kl.coef

    def weighted_kl(self, distance: torch.Tensor, batch: Batch, rows: Sequence[int]) -> torch.Tensor:
        """Return the weighted KL [B] of `rows` to the reference."""
        return distance if batch.gate is None else distance * batch.gate[list(rows)].to(distance)

    def renews_old(self, step: int) -> bool:
        """Whether the old policy is updated at the end of trainer step `step`."""
        raise self.undefined("renews_old")

    def log_ratio(self, step: ReplayedStep) -> torch.Tensor:
        """Return the log-ratio to the rollout's policy, [B], if `needs.ratio`; 0 on policy."""
        raise self.undefined("log_ratio")

    def step_facts(self, tape: Tape, trained: tuple[int, ...]) -> list[StepFacts]:
        """Return the weight of each of the `trained` steps (or noise levels) in the loss."""
        rules = [(k, tape.steps[k].rule) for k in trained]
        return [StepFacts(k, rule.sigma, rule.dt) for k, rule in rules]

    def kl_to_base(self, policy: Policy, batch: Batch) -> torch.Tensor:
        """Return the KL [R] of the rollout's policy to the base model from recorded values, mean over trained steps."""
        raise self.undefined("kl_to_base")

    def micro_batches(self, batch: Batch, most: int | None = None) -> Iterator[list[int]]:
        """Split the rows of `batch` with credit into micro-batches of at most `most`."""
        size = min(self.config.actor.micro_batch_size or len(batch.samples), most or len(batch.samples))
        with_credit = self.kept_rows(batch)
        if not self.whole_groups or self.pools:
            yield from (with_credit[i : i + size] for i in range(0, len(with_credit), size))
            return
        ids, rows = group_ids(batch.samples).tolist(), list[int]()
        for number in dict.fromkeys(ids[r] for r in with_credit):
            members = [r for r in with_credit if ids[r] == number]
            if rows and len(rows) + len(members) > size:
                yield rows
                rows = []
            rows = rows + members
        if rows:
            yield rows

    def kept_rows(self, batch: Batch) -> list[int]:
        """Return the rows with a credit; unless all samples are needed, with a credit other than 0 at some step."""
        credit = batch.credit[:, list(batch.trained)]
        has_credit = ~credit.isnan().any(1)
        if not self.needs_all_samples:
            has_credit &= (credit != 0).any(1)
        return [int(r) for r in has_credit.nonzero()]

    @abstractmethod
    def train(
        self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float, meter: StepGradients[Any] | None = None
    ) -> UpdateStats:
        """Accumulate the gradient of `rows` of `batch`, part of an update of `num_pairs` (sample, timestep) pairs.

        `meter` measures what each step adds.
        """

    def step_batch(self, meter: StepGradients[Any] | None) -> int:
        """Return the number of trained steps per denoiser call: one if `meter` measures each step."""
        return self.config.actor.step_batch if meter is None else 1

    def replay_options(self, batch: Batch, rows: list[int], meter: StepGradients[Any] | None) -> dict[str, Any]:
        """Return the arguments of the replay of `rows`; `index` is None for all rows of the tape."""
        index = None if rows == list(range(batch.tape.batch_size)) else rows
        step_batch = self.step_batch(meter)
        options = {"steps": batch.trained, "index": index, "cfg": self.settings.cfg, "step_batch": step_batch}
        return options | {"meter": meter}

    def base_steps(self, policy: Policy, tape: Tape, options: dict[str, Any]) -> dict[int, ReplayedStep]:
        """Replay the steps with the base model, switching to it once per micro-batch."""
        steps: dict[int, ReplayedStep] = {}
        with policy.base():
            engine.replay(policy.pipe, tape, lambda k, step: steps.update({k: step}), grad=False, **options)
        return steps


def compares_within_groups(settings: AlgorithmConfig) -> bool:
    """Whether the advantages of these `settings` depend on the images of a group only."""
    if not isinstance(settings, NormalisedConfig) or settings.adv_estimator not in ("grpo", "rloo"):
        return False
    shaped = isinstance(settings, ShapedConfig) and settings.diversity != "none"
    return settings.advantage_std != "batch" and not shaped


def row_credit(segment: Segment, credit: torch.Tensor) -> torch.Tensor:
    """Return the credit [R, T] of a segment's rows from that of the task's samples [B, T]."""
    return credit[list(segment.leaves)]


def batches_of(
    trajectory: Trajectory, credit: torch.Tensor, pooled: Pooled | None = None, gate: torch.Tensor | None = None
) -> list[Batch]:
    """Return the segments of a trajectory with trainable rows, given the credit [B, T] of its samples.

    `gate`: factors [B] of the KL to the reference.
    """
    samples, batches = trajectory.task.samples, list[Batch]()
    for segment, tape in zip(trajectory.task.segments, trajectory.tapes, strict=True):
        if segment.trained:
            of, row_credits = [samples[leaf] for leaf in segment.leaves], row_credit(segment, credit)
            counts = None if gate is None else row_credit(segment, gate)
            batches.append(Batch(tape, of, segment.trained, row_credits, pooled, counts))
    return batches


def count_pairs(tasks: Iterable[tuple[RolloutTask, torch.Tensor]]) -> int:
    """Count the (row, timestep) pairs with a credit, over which an update's loss is averaged."""
    return sum(
        int((~row_credit(segment, credit)[:, list(segment.trained)].isnan()).sum())
        for task, credit in tasks
        for segment in task.segments
    )


# --- Metrics of the trained steps of a replay, copied from the device once, after the last step


@dataclass(frozen=True)
class Measures:
    """Metrics of one trained step, over so many (sample, timestep) `pairs`."""

    pairs: int
    sums: Mapping[str, Metric] = field(default_factory=dict)
    means: Mapping[str, Metric] = field(default_factory=dict)
    deviation: Metric | None = None  # see `UpdateStats.ratio_deviation`
    parts: Mapping[str, Sequence[Metric]] = field(default_factory=dict)  # values of the pairs of a part

    def values(self) -> Iterator[Metric | None]:
        """Yield all values in a fixed order."""
        yield from (*self.sums.values(), *self.means.values(), self.deviation)
        for part in self.parts.values():
            yield from part


def summed(steps: Sequence[Measures]) -> UpdateStats:
    """Add the metrics of a replay's steps, for which the device is waited for once."""
    tensors = [v.detach() for step in steps for v in step.values() if isinstance(v, torch.Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])

    def number(value: Metric) -> float:
        return next(numbers) if isinstance(value, torch.Tensor) else value

    stats: list[UpdateStats] = []
    for step in steps:
        sums = {name: number(value) for name, value in step.sums.items()}
        sums |= {name: number(value) * step.pairs for name, value in step.means.items()}
        deviation = None if step.deviation is None else number(step.deviation)
        parts = {name: (sum(map(number, values)), len(values)) for name, values in step.parts.items()}
        stats.append(UpdateStats(step.pairs, sums, deviation, parts=parts))
    return sum(stats, UpdateStats())


# --- Losses over groups that span micro-batches.
#
# A group may exceed a backward pass or lie on several workers. What the other images contribute to an image's loss (the
# weight of DGPO, the mean of CRD, the other half of a pair) is a constant: a first pass without gradient over the whole
# group computes it, as sums of one or several numbers per image at each noise level.

# group and noise level -> sum over its images (of a number each, or of n: fp64 [n]), their number
Pooled = dict[tuple[Group, int], "tuple[float | torch.Tensor, int]"]
Sums = tuple["torch.Tensor", "torch.Tensor"]  # [B] or [B, n] sum over the group of each row, [B] number of its rows


def pooled_sum(parts: Iterable[Pooled]) -> Pooled:
    """Add the sums of micro-batches and workers."""
    sums: Pooled = {}
    for part in parts:
        for group, (total, count) in part.items():
            before, counted = sums.get(group, (0.0, 0))
            sums[group] = before + total, counted + count
    return sums


def pooled_rows(values: torch.Tensor, samples: Sequence[Sample], level: int) -> Pooled:
    """Sum the values [B] or [B, n] of samples at noise level `level` by group, in fp64."""
    values = values.double().cpu()
    rows = zip(samples, values.tolist() if values.ndim == 1 else values, strict=True)
    return pooled_sum({(sample.group, level): (value, 1)} for sample, value in rows)


def group_sums(pooled: Pooled, samples: Sequence[Sample], level: int, like: torch.Tensor) -> Sums:
    """Return for each sample the sum over its group, [B] or [B, n], and the group's size, [B], as `like`."""
    sums, counts = zip(*(pooled[sample.group, level] for sample in samples), strict=True)
    totals = torch.stack([torch.as_tensor(total, dtype=torch.float64) for total in sums])
    return totals.to(like), like.new_tensor(counts)

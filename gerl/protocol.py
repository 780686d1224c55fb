"""Typed records that travel between driver and workers, in place of string-keyed batches.

*prompt*: a row of a prompt file. *group*: the images of one prompt in one trainer step. *sample*: one image. *credit*:
the advantage of each (sample, timestep), `[B, T]` fp32, NaN where it is not trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

DATA_SOURCE = "data_source"  # column of a prompt file that picks the scorers of a row, and its teacher
K = TypeVar("K", int, str)


@dataclass(frozen=True)
class DatasetImage:
    """An image that is trained on as it is in its file. The better of two of a prompt has the higher `score`; of one
    alone it is positive if it is liked and negative if it is not."""

    path: str
    score: float


@dataclass(frozen=True)
class Prompt:
    """A row of a prompt file or a data set: `id` is its index among all prompts, so that equal texts stay different
    prompts, and `source` the number of the one it is from. `given`: its images, where they are not drawn."""

    id: int
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)
    source: int = 0
    given: tuple[DatasetImage, ...] = ()


class Group(NamedTuple):
    """Key of the samples that may be compared (AT-GRPO, arXiv 2510.11062): the prompt's row and, where they apply, the
    turn, the role of the policy and the branching point, that is everything that makes up the state they shared.

    The program sets them; columns of a prompt file, whatever they are called, never do.
    """

    prompt: int
    turn: int | None = None
    role: str | None = None
    branch: int | None = None


@dataclass(frozen=True)
class Sample:
    """One image to draw: sample number `index` of the group of `prompt` in trainer step `step`.

    Its noise is drawn from `seed` alone, so it is the same on any worker; its initial latents from `init_seed` where
    that is given. `policy_version` counts the optimizer steps behind the weights that draw it. `turn`, `role` and
    `branch` divide the images of a prompt into groups that shared a state; see `Group`.
    """

    prompt: Prompt
    index: int
    seed: int
    step: int
    policy_version: int = 0
    init_seed: int | None = None
    turn: int | None = None
    role: str | None = None
    branch: int | None = None

    @cached_property
    def group(self) -> Group:
        """Samples are compared within a group only."""
        return Group(self.prompt.id, self.turn, self.role, self.branch)

    @property
    def given(self) -> DatasetImage | None:
        """The image that is trained on in place of one that is drawn."""
        return self.prompt.given[self.index] if self.prompt.given else None


@dataclass(frozen=True)
class Segment:
    """Trajectories (rows) denoised together from step `start` to before step `stop`; a tree consists of several.

    `leaves[r]` is the first sample of the task that descends from row `r`: its credit at the steps of the segment is
    that of all of them. A segment with a `parent` branches off: row `r` continues row `rows[r]` of that segment, with
    noise of its own from step `start` on.
    """

    seeds: tuple[int, ...]  # [R] of the step noise
    leaves: tuple[int, ...]  # [R]
    window: tuple[int, ...]  # stochastic steps
    trained: tuple[int, ...]  # steps (or noise levels) the update trains
    parent: int | None = None  # index in the task
    rows: tuple[int, ...] = ()  # [R]
    start: int = 0
    stop: int | None = None  # None: to the end, where the rows are the samples `leaves`
    noise: tuple[tuple[int, float], ...] = ()  # steps whose noise level is not sampling.noise_level, and what it is


@dataclass(frozen=True)
class RolloutTask:
    """A micro-batch: samples drawn together on one worker. Without branches it is one segment of one row a sample.

    `lag`: it is drawn with the weights of so many finished steps ago.
    """

    id: int
    samples: list[Sample]
    segments: tuple[Segment, ...]
    lag: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """A loaded policy, in what the driver wants to know of it."""

    pipeline: str  # class
    denoisers: list[str]
    trained_parameters: int
    half_precision: bool  # of the base weights
    weights: str  # fingerprint
    notes: list[str]  # sentences about what was replaced, left out or kept elsewhere
    scheduler: str | None  # the pipeline's own, if another one took its place
    lora_lines: list[str]  # Python that loads a LoRA of it in plain diffusers; none where weights are trained
    arguments: list[str]  # of the pipeline's call
    warnings: list[str] = field(default_factory=list)  # sentences about what is known to harm it


@dataclass(frozen=True)
class CutPrompts:
    """Prompts that tokenizers cut: by component so many of a prompt's tokens that it keeps, and indices of longer ones.

    `tokenizers`: how many read prompts at all.
    """

    by_tokenizer: dict[str, tuple[int, list[int]]]
    tokenizers: int

    @property
    def lost(self) -> list[int]:
        """Those of which no tokenizer reads the end."""
        cut = [set(indices) for _, indices in self.by_tokenizer.values()]
        return sorted(set.intersection(*cut)) if cut and len(cut) == self.tokenizers else []


@dataclass(frozen=True)
class Images:
    """The answer of a worker to a task; the trajectories stay with the worker under `task_id`."""

    task_id: int
    pixels: Any  # uint8 [B, H, W, 3], videos [B, F, H, W, 3], or a list of B such images of several sizes
    seconds: float
    looks: dict[str, np.ndarray] | None = None  # of held-out images: `gerl.workers.image_statistics`


@dataclass(frozen=True)
class ScorerFailure:
    """A scorer had no score for a sample: which one, and why."""

    scorer: str
    reason: str


@dataclass(frozen=True)
class Scores:
    """Rewards of one micro-batch, in its order. A failed sample has no total and at least one failure.

    A scorer that does not apply to a sample has neither a score nor a failure there.
    """

    totals: list[float | None]  # [B] weighted sum over scorers
    by_scorer: dict[str, list[float | None]]  # scorer -> [B]
    failures: list[list[ScorerFailure]]  # [B]


@dataclass(frozen=True)
class FeedbackRequest:
    """The origin of the images of a group, told to people who are asked about them.

    `key` stands for run, step, prompt and seeds, so a step that is repeated asks the same; `together` has the keys of
    all groups that are asked about at the same time.
    """

    key: str
    run: str
    step: int
    prompt: int  # its id
    seeds: tuple[int, ...]  # [B]
    together: tuple[str, ...]


@dataclass(frozen=True)
class StepEnd:
    """The end of a trainer step, as a worker tells of it."""

    blank: int  # images that have a single colour
    notes: list[str]  # sentences for the run's log
    memory_gb: float | None = None  # the most GPU memory that was reserved during the step; None on a CPU


def _added(one: Mapping[K, tuple[float, int]], other: Mapping[K, tuple[float, int]]) -> dict[K, tuple[float, int]]:
    """Sums and their numbers, added up by name."""
    found: dict[K, tuple[float, int]] = {}
    for k in sorted({**one, **other}):
        (a, count), (b, more) = (sums.get(k, (0.0, 0)) for sums in (one, other))
        found[k] = a + b, count + more
    return found


@dataclass
class UpdateStats:
    """Sums over trained (sample, timestep) pairs, so that workers and micro-batches add up to the same averages.

    `sums` has what the algorithm measured and nothing else: the metric's name -> its sum over the pairs.
    """

    pairs: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    ratio_deviation: float | None = None  # max |ratio - 1|; None where nothing is compared with the rollout
    # by trained step: the squared norm of what a micro-batch of it added to the gradient, summed over so many updates
    step_squares: dict[int, tuple[float, int]] = field(default_factory=dict)
    # what was measured on some of the pairs only: the metric's name -> its sum over them, and their number
    parts: dict[str, tuple[float, int]] = field(default_factory=dict)

    def __add__(self, other: "UpdateStats") -> "UpdateStats":
        known = [stats.ratio_deviation for stats in (self, other) if stats.ratio_deviation is not None]
        return UpdateStats(
            self.pairs + other.pairs,
            {k: self.sums.get(k, 0.0) + other.sums.get(k, 0.0) for k in {**self.sums, **other.sums}},
            float(np.max(known)) if known else None,  # a NaN stays one
            _added(self.step_squares, other.step_squares),
            _added(self.parts, other.parts),
        )


@dataclass(frozen=True)
class StepResult:
    """An optimizer step: gradient norm before clipping, learning rate, whether it was taken, the largest weight of
    the LoRA after it (None where it was not taken), the root mean square of the gradient's elements before
    clipping, and what the worker tells of the trainer step's end where it was the step's last."""

    grad_norm: float
    lr: float
    applied: bool
    lora_max: float | None = None
    grad_rms: float | None = None
    end: StepEnd | None = None


@dataclass(frozen=True)
class StepFacts:
    """How a trained step counts in the loss; what only policy gradients have is None for others.

    `gain`: the factor of the drawn noise in the gradient with respect to the model output, weight included.
    """

    step: int
    sigma: float
    dt: float
    std: float | None = None
    jacobian: float | None = None
    weight: float | None = None
    gain: float | None = None


@dataclass(frozen=True)
class SamplingProbe:
    """Measured before training: the 99th percentile of |log ratio| on policy, where it should be 0, the stochastic
    steps whose kernel flips the sign of the predicted noise (kappa < 0), as (step, sigma, next sigma, kappa), the
    dimensions of an image's latents, and how the trained steps count. `weighting`: algorithm.timestep_weights, None
    where the algorithm has no such key. `kl_resolution`: the KL between two outputs of the model that differ by their
    rounding alone; None in fp32 and without a KL."""

    log_ratio_noise: float
    reversed_noise: list[tuple[int, float, float, float]]
    dimensions: int = 1
    steps: list[StepFacts] = field(default_factory=list)
    weighting: str | None = None
    kl_resolution: float | None = None

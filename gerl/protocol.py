"""Typed records exchanged between driver and workers, instead of string-keyed batches.

*prompt*: a row of a prompt file. *group*: the images of one prompt in one trainer step. *sample*: one image. *credit*:
the advantage of each (sample, timestep), `[B, T]` fp32, NaN if not trained.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

DATA_SOURCE = "data_source"  # column of a prompt file that selects the scorers of a row, and its teacher
ORIGINAL = "original_prompt"  # column with the prompt of a row from which `data.template` makes the one that is sampled
K = TypeVar("K", int, str)


@dataclass(frozen=True)
class DatasetImage:
    """Image file to train on.

    The better of two images of a prompt has the higher `score`; the score of a single one is positive if it is
    preferred and negative if not.
    """

    path: str
    score: float


@dataclass(frozen=True, eq=False)
class Turn:
    """Turn of an episode: its number (from 0), the role that takes it, and the state it starts from.

    `request`: text passed to the model instead of the prompt, or ""; `image`: the image of the turn before, uint8
    [H, W, 3]; `state`: number of that image among those of the prompt.
    """

    number: int
    role: str
    request: str = ""
    image: Any = None
    state: int | None = None


@dataclass(frozen=True)
class Prompt:
    """Row of a prompt file or data set.

    `id`: its index among all prompts, so that equal texts stay different prompts; `source`: the number of its file.
    `dataset_images`: its images, if they are not sampled; `contrast`: the text of another prompt, with which the base
    model compares it; "": there is none, or nothing is compared. `turn`: None outside of episodes.
    """

    id: int
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)
    source: int = 0
    dataset_images: tuple[DatasetImage, ...] = ()
    contrast: str = ""
    turn: Turn | None = None

    @property
    def request(self) -> str:
        """Text passed to the model; scorers are passed `text`."""
        return self.text if self.turn is None or not self.turn.request else self.turn.request


class References(list[Any]):
    """Pictures of a prompt that belong to every sample of a call; any other list may have one for each."""


class Group(NamedTuple):
    """Key of samples that may be compared with each other (AT-GRPO, arXiv 2510.11062).

    It consists of the prompt's row and, if they apply, the turn, the role of the policy and the branching point (or the
    image that a turn starts from), which determine the state that the samples shared. The program sets them, never a
    column of a prompt file.
    """

    prompt: int
    turn: int | None = None
    role: str | None = None
    branch: int | None = None


@dataclass(frozen=True)
class Sample:
    """Image to sample: number `index` of the group of `prompt` in trainer step `step`.

    Its noise depends on `seed` only, so it is the same on any worker; its initial latents on `init_seed`, if set.
    `policy_version`: number of optimizer steps before its rollout. `turn`, `role` and `branch`: see `Group`.
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
        """Group of the sample; only samples of one group are compared."""
        return Group(self.prompt.id, self.turn, self.role, self.branch)

    @property
    def dataset_image(self) -> DatasetImage | None:
        """Image to train on instead of a sampled one, if any."""
        return self.prompt.dataset_images[self.index] if self.prompt.dataset_images else None


@dataclass(frozen=True)
class Segment:
    """Trajectories (rows) denoised together from step `start` until before step `stop`; a tree has several segments.

    `leaves[r]` is the first sample of the task that descends from row `r`: its credit at the steps of the segment is
    that of all its descendants. A segment with a `parent` branches off: row `r` continues row `rows[r]` of the parent,
    with other noise from step `start` on.
    """

    seeds: tuple[int, ...]  # [R] seeds of the step noise
    leaves: tuple[int, ...]  # [R]
    window: tuple[int, ...]  # stochastic steps
    trained: tuple[int, ...]  # steps (or noise levels) trained by the update
    parent: int | None = None  # index in the task
    rows: tuple[int, ...] = ()  # [R]
    start: int = 0
    stop: int | None = None  # None: to the end, where the rows are the samples `leaves`
    noise: tuple[tuple[int, float], ...] = ()  # (step, noise level) if not sampling.noise_level


@dataclass(frozen=True)
class RolloutTask:
    """Micro-batch: samples generated together on one worker; without branches one segment with a row per sample.

    `lag`: off-policy lag, the number of finished steps since the weights it is sampled with.
    """

    id: int
    samples: list[Sample]
    segments: tuple[Segment, ...]
    lag: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """Description of a loaded policy for the driver."""

    pipeline: str  # class name
    denoisers: list[str]
    trained_parameters: int
    half_precision: bool  # of the base weights
    weights: str  # fingerprint
    notes: list[str]  # messages about replaced, removed or offloaded parts
    scheduler: str | None  # the original scheduler, if it was replaced
    lora_lines: list[str]  # Python that loads its LoRA in plain diffusers; empty if weights are trained
    arguments: list[str]  # of the pipeline's call
    warnings: list[str] = field(default_factory=list)  # messages about settings known to harm it
    components: list[str] = field(default_factory=list)  # Python arguments for those left out or replaced


@dataclass(frozen=True)
class CutPrompts:
    """Truncated prompts: by tokenizer component the number of tokens it keeps, and the indices of longer prompts.

    `tokenizers`: number of tokenizers that read prompts.
    """

    by_tokenizer: dict[str, tuple[int, list[int]]]
    tokenizers: int

    @property
    def lost(self) -> list[int]:
        """Indices of prompts whose end no tokenizer reads."""
        cut = [set(indices) for _, indices in self.by_tokenizer.values()]
        return sorted(set.intersection(*cut)) if cut and len(cut) == self.tokenizers else []


@dataclass(frozen=True)
class Images:
    """Result of a task from a worker, which keeps the trajectories under `task_id`."""

    task_id: int
    pixels: Any  # uint8 [B, H, W, 3], videos [B, F, H, W, 3], or a list of B such images of several sizes
    seconds: float
    # of held-out images: `gerl.workers.image_statistics` and `gerl.workers.base_judge`
    statistics: dict[str, np.ndarray] | None = None
    judge_seconds: float = 0.0  # of `seconds`, for the base model's judgement
    scores: dict[str, np.ndarray] = field(default_factory=dict)  # by column, of scorers that are computed on the worker


@dataclass(frozen=True)
class ScorerFailure:
    """Missing score of a sample from a scorer, and the reason."""

    scorer: str
    reason: str


@dataclass
class Scores:
    """The samples of a micro-batch, a step or a validation in order, with their scores: one row per image.

    A failed sample has no total and at least one failure; a scorer that does not apply to a sample has neither a score
    nor a failure.

    Example: two prompts with three images each, scored by `ocr` and `aesthetic`, have six `samples`, six `totals` (the
    weighted sums, None where a scorer failed) and six values in each of the columns `ocr` and `aesthetic` of
    `by_scorer`.
    """

    samples: list[Sample] = field(default_factory=list)  # [B]
    totals: list[float | None] = field(default_factory=list)  # [B] weighted sum over scorers
    by_scorer: dict[str, list[float | None]] = field(default_factory=dict)  # scorer or SCORER/COLUMN -> [B]
    failures: list[list[ScorerFailure]] = field(default_factory=list)  # [B]
    given: bool = False  # ranks and labels of dataset images are not rewards

    def add(self, other: "Scores") -> None:
        """Append a micro-batch; a column missing on one side (its scorer failed) is filled with None.

        Dataset images have the scores of their files.
        """
        totals, columns, failures = other.totals, other.by_scorer, other.failures
        if preferences := [sample.dataset_image.score for sample in other.samples if sample.dataset_image is not None]:
            self.given, totals, columns, failures = True, list(preferences), {}, [[] for _ in preferences]
        for name in {**self.by_scorer, **columns}:
            column = self.by_scorer.setdefault(name, [None] * len(self.samples))
            column.extend(columns.get(name, [None] * len(other.samples)))
        self.samples += other.samples
        self.totals += totals
        self.failures += failures

    @property
    def unscored(self) -> int:
        """Return the samples whose total failed."""
        return len(self.failed)

    @property
    def failed(self) -> list[int]:
        """Return the rows whose total failed; a sample without scorers has neither a total nor a failure."""
        return [i for i, total in enumerate(self.totals) if total is None and self.failures[i]]

    @property
    def measured(self) -> int:
        """Return the samples that have or should have a total."""
        return sum(total is not None for total in self.totals) + self.unscored

    def by_group(self) -> dict[Group, list[float | None]]:
        """Return the rewards of the images of each group."""
        rewards: dict[Group, list[float | None]] = {}
        for sample, total in zip(self.samples, self.totals, strict=True):
            rewards.setdefault(sample.group, []).append(total)
        return rewards

    def groups_with_signal(self) -> list[Group]:
        """Return the groups whose images all have a reward, not all equal."""
        return [group for group, values in self.by_group().items() if len(set(values)) > 1 and None not in values]


@dataclass(frozen=True)
class FeedbackRequest:
    """Request for human votes on the images of a group.

    `key` identifies run, step, prompt and seeds, so a repeated step makes the same request; `together`: the keys of all
    groups of the step.
    """

    key: str
    run: str
    step: int
    prompt: int  # id of the prompt
    seeds: tuple[int, ...]  # [B]
    together: tuple[str, ...]


def _added(one: Mapping[K, tuple[float, int]], other: Mapping[K, tuple[float, int]]) -> dict[K, tuple[float, int]]:
    totals: dict[K, tuple[float, int]] = {}
    for k in sorted({**one, **other}):
        (a, count), (b, more) = (sums.get(k, (0.0, 0)) for sums in (one, other))
        totals[k] = a + b, count + more
    return totals


@dataclass
class UpdateStats:
    """Sums over trained (sample, timestep) pairs, so that workers and micro-batches add up to the same averages.

    `sums`: metric of the algorithm -> its sum over the pairs.
    """

    pairs: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    ratio_deviation: float | None = None  # max |ratio - 1|; None if nothing is compared with the rollout
    # by trained step: squared norm of a micro-batch's gradient contribution, summed over updates, and their number
    step_squares: dict[int, tuple[float, int]] = field(default_factory=dict)
    # metrics of a subset of the pairs: name -> sum over them, and their number
    parts: dict[str, tuple[float, int]] = field(default_factory=dict)

    def __add__(self, other: "UpdateStats") -> "UpdateStats":
        deviations = [stats.ratio_deviation for stats in (self, other) if stats.ratio_deviation is not None]
        return UpdateStats(
            self.pairs + other.pairs,
            {k: self.sums.get(k, 0.0) + other.sums.get(k, 0.0) for k in {**self.sums, **other.sums}},
            float(np.max(deviations)) if deviations else None,  # keeps a NaN
            _added(self.step_squares, other.step_squares),
            _added(self.parts, other.parts),
        )


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step, and the worker's report if it ended the trainer step."""

    grad_norm: float = math.nan  # before clipping
    lr: float = 0.0
    applied: bool = False  # whether the step was taken
    lora_max: float | None = None  # the largest weight of the LoRA after it; None if skipped
    grad_rms: float | None = None  # of the gradient's elements before clipping
    ended: bool = False  # the trainer step
    blank: int = 0  # images of the trainer step with a single colour
    notes: Sequence[str] = ()  # messages for the run's log
    memory_gb: float | None = None  # peak GPU memory reserved during the trainer step; None on a CPU
    forward: int = 0  # evaluations of the denoiser on one image, without those of validations
    backward: int = 0


NO_UPDATE = StepResult()  # no optimizer step was taken


@dataclass(frozen=True)
class StepFacts:
    """Weight of a trained step in the loss; None for values that only policy gradients have.

    `gain`: the factor of the sampled noise in the gradient of the model output, weight included.
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
    """Result of the calibration before training.

    It has the 99th percentile of |log ratio| on policy, where it should be 0, the stochastic steps whose kernel flips
    the sign of the predicted noise (kappa < 0), as (step, sigma, next sigma, kappa), the dimensions of an image's
    latents, and the weights of the trained steps. `weighting`: algorithm.timestep_weights, None if the algorithm has no
    such key. `kl_resolution`: the KL between two outputs that differ only by rounding; None in fp32 and without a KL.
    """

    log_ratio_noise: float
    reversed_noise: list[tuple[int, float, float, float]]
    dimensions: int = 1
    steps: list[StepFacts] = field(default_factory=list)
    weighting: str | None = None
    kl_resolution: float | None = None

"""Measure the reward signal: the agreement of gradients of independent batches, by denoising step."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import cast

import torch

from gerl.algorithms import count_pairs
from gerl.algorithms.base import Pooled
from gerl.algorithms.core_algos import LEVEL_WEIGHTS, step_weights
from gerl.algorithms.planning import plan_samples
from gerl.cluster import Cluster
from gerl.config import Config
from gerl.config.blocks import StepWeighting
from gerl.errors import ConfigError, TrainingError
from gerl.model.errors import model_errors
from gerl.model.loading import check_model
from gerl.model.paths import resolve
from gerl.preflight.findings import rendered, write_json
from gerl.progress import Stopwatch, waiting
from gerl.protocol import RolloutTask, Sample, StepFacts
from gerl.rewards.checks import check_named, read_prompts, without_people
from gerl.rewards.rollouts import PendingRollout
from gerl.trainer.launch import start_cluster
from gerl.trainer.plan import Plan
from gerl.trainer.run import Run
from gerl.trainer.start import load_run
from gerl.trainer.step import Step, credit_of, usable_rewards
from gerl.utils.files import finite
from gerl.workers.worker import Groups, PolicyWorker

# --- Agreement of gradients of independent batches: statistics of their inner products.
#
# In thousands of dimensions, two gradients g + n with the same expectation g and independent noise n have a cosine of
# about |g|^2 / (|g|^2 + |n|^2), the share of signal in one batch. B times the images divide the noise variance by B, so
# cos(B) = 1 / (1 + (1 / cos - 1) / B).

CHUNK = 2**18  # parameters per partial sum of products


@dataclass(frozen=True)
class Cosine:
    """Mean cosine over pairs of batches. `error`: its standard error, None for only two batches."""

    mean: float
    error: float | None

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if self.error is None else f" +- {self.error:.3f}")


def inner_products(batches: Sequence[Mapping[int, torch.Tensor]], steps: Sequence[int]) -> torch.Tensor:
    """Return the inner products `[N, N, T, T]` (fp64) of N batches' gradients `[P]` at T steps; 0 at a missing step."""
    count, rows = len(batches), [batch.get(k) for batch in batches for k in steps]
    size = max((len(row) for row in rows if row is not None), default=0)
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for start in range(0, size, CHUNK):  # a large LoRA would not fit in fp64 at once
        length = min(CHUNK, size - start)
        empty = torch.zeros(length, dtype=torch.float64)
        part = torch.stack([empty if row is None else row[start : start + length].double() for row in rows])
        products += part @ part.T
    return products.view(count, len(steps), count, len(steps)).permute(0, 2, 1, 3)


def combined_products(products: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    """Return the inner products `[N, N]` of sum_k factors_k g_k, given those of the steps, `[N, N, T, T]`."""
    c = torch.tensor(list(factors), dtype=torch.float64)
    return torch.einsum("j,abjk,k->ab", c, products, c)


def cosine(products: torch.Tensor) -> Cosine | None:
    """Return the mean cosine over pairs of batches, given their inner products `[N, N]`; None if there is no pair.

    Batches with gradient 0 are left out. The standard error is a jackknife estimate over batches, since pairs that
    share a batch are not independent.
    """
    norms = products.diagonal().sqrt()
    nonzero = [int(i) for i in (norms > 0).nonzero()]
    if len(nonzero) < 2:
        return None
    cosines = (products / (norms[:, None] * norms))[nonzero][:, nonzero]

    def mean(members: Sequence[int]) -> float:
        pairs = [float(cosines[a, b]) for i, a in enumerate(members) for b in members[i + 1 :]]
        return sum(pairs) / len(pairs)

    everyone = list(range(len(nonzero)))
    if len(nonzero) == 2:
        return Cosine(mean(everyone), None)
    without = [mean([b for b in everyone if b != a]) for a in everyone]
    centre = sum(without) / len(without)
    variance = (len(nonzero) - 1) / len(nonzero) * sum((value - centre) ** 2 for value in without)
    return Cosine(mean(everyone), math.sqrt(variance))


def larger_batch(cosine: float, wanted: float = 0.5) -> float | None:
    """Return the factor of the batch size that raises the cosine to `wanted`; None if no size is sufficient."""
    return None if cosine <= 0 else (1 / min(cosine, 1) - 1) / (1 / wanted - 1)


def clearly_above(candidate: Cosine, configured: Cosine) -> bool:
    """Whether `candidate` exceeds `configured` by more than both standard errors, if known, and 0 by two of its own."""
    if candidate.error is None or configured.error is None or candidate.mean <= 2 * candidate.error:
        return False
    return candidate.mean - configured.mean > candidate.error + configured.error


# --- The report of a signal measurement: numbers and terminal text

WANTED = 0.5  # cosine of two batches that are half signal


@dataclass(frozen=True)
class StepSignal:
    """A trained step (or noise level): mean gradient `norm` over batches, `share` of the squared norms of all steps."""

    facts: StepFacts
    norm: float
    share: float
    cosine: Cosine | None


@dataclass(frozen=True)
class Weighting:
    """A weighting of the steps, set by the key `setting`; `cosine`: between updates of independent batches."""

    name: str
    setting: str | None
    cosine: Cosine | None

    @property
    def times_images(self) -> str:
        """Factor of the batch size that raises the cosine to `WANTED`, as text."""
        value = self.cosine
        if value is None or value.error is None:
            return "-"
        if value.mean > 2 * value.error:
            times = larger_batch(value.mean, WANTED) or 0.0
            return f"{times:.1f}" if times < 9.95 else f"{times:.0f}"
        least = larger_batch(value.mean + 2 * value.error, WANTED)  # at the upper bound
        return "-" if least is None or least < 1 else f"more than {least:.0f}"


@dataclass
class Signal:
    """Report on the gradient of a trainer step, measured on independent batches."""

    model: str
    algorithm: str
    kernel: str
    weighting: str | None  # timestep_weights; None if the algorithm has no such key
    batches: int
    images: int  # per batch
    parameters: int  # of the LoRA
    steps: list[StepSignal]
    update: Weighting  # as configured
    choices: list[Weighting]  # other weights, and shorter windows
    recommended: Weighting | None = None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """Return the fields for JSON."""
        return finite(asdict(self))

    def text(self) -> str:
        """Return the report for the terminal."""
        return rendered("signal", **vars(self), wanted=WANTED)


# --- Measurement of batches: sampled, scored and credited as in a run, by its workers and scorers, but without an
# optimizer step.

logger = logging.getLogger("gerl")
Gradients = dict[int, torch.Tensor]  # step -> [P]


@dataclass(frozen=True)
class BatchGradients:
    """Gradients of a batch that was sampled and scored."""

    images: int
    gradients: Gradients
    facts: list[StepFacts]  # of the trained steps, in order


def run(config: Config, batches: int, out: Path | None = None) -> Signal:
    """Measure `batches` batches, log the report and write it to `out`. Raises `ConfigError` if none can be sampled."""
    if config.data.train_on == "files":
        raise ConfigError(
            "signal: it measures how informative the rewards of sampled images are, and with data.train_on=files "
            "none are sampled; remove it"
        )
    check_named(config.reward)
    config = replace(config, reward=without_people(config.reward))
    resolve(config.model.path)
    prompts = read_prompts(config, "data.train", config.data.train)
    machines = Cluster(config.cluster, config.reward.gpu_shares)
    if not machines.joined:  # otherwise the model may be on other machines
        check_model(config.model, config.sampling, config.cluster.context)
    measured: list[BatchGradients] = []
    with start_cluster(machines) as cluster:
        whole = load_run(config, Path(), cluster, Plan(config, prompts), {})
        for number in range(1, batches + 1):
            with waiting(f"measuring batch {number} of {batches}"):
                measured.append(measure(whole, number))
    signal = evaluate(config, measured)
    if len(prompts) < batches * config.rollout.prompts_per_step:
        signal.notes.append(
            f"data.train has {len(prompts)} prompts, so the batches share some: they agree a little more than "
            "batches of other prompts would"
        )
    logger.info("%s", signal.text())
    if out is not None:
        write_json(out, signal.as_json())
    return signal


def measure(run: Run, number: int) -> BatchGradients:
    """Measure batch `number` (from 1); the gradients are summed over the workers."""
    config, fleet, step = run.config, run.fleet, Step(number, Stopwatch())
    samples = plan_samples(config, run.plan.prompts_of(number), number, 0)
    tasks = plan(run, samples)
    rollout = PendingRollout(run.rewards, [t.samples for t in tasks], fleet.sample(tasks), fleet.samplers.hang_after)
    run.rollouts.score(rollout, step)
    step.rewards, step.metrics = usable_rewards(config, step.scores)
    run.notify("rewarded", step)
    credit = credit_of(config, run.algorithm, step.scores, step.rewards)
    logger.info("batch %d: %d images, mean reward %.3f", number, len(credit), step.metrics["reward/mean"])
    parts = credit.split([len(task.samples) for task in tasks])
    pairs = count_pairs(zip(tasks, parts, strict=True))
    by_task = {task.id: part for task, part in zip(tasks, parts, strict=True)}
    groups = fleet.lockstep_groups(by_task)
    sums: Gradients = {}
    for gradients in fleet.trainers.run(step_gradients, by_task, pairs, fleet.pool(by_task, groups), groups):
        sums |= {k: sums[k] + new if k in sums else new for k, new in gradients.items()}
    facts = {fact.step: fact for each in fleet.trainers.run(step_facts) for fact in each}
    fleet.discard()
    fleet.clear()
    return BatchGradients(len(credit), sums, [facts[k] for k in sorted(facts)])


def step_gradients(
    worker: PolicyWorker, credit: Gradients, num_pairs: int, pooled: Pooled | None, groups: Groups
) -> Gradients:
    """Return the gradient `[P]` on the CPU that `accumulate` would add, by trained step (or noise level)."""
    with model_errors("update"):
        return worker.actor.step_gradients(list(chain(*worker.batches(credit, groups, pooled).values())), num_pairs)


def step_facts(worker: PolicyWorker) -> list[StepFacts]:
    """Return the `StepFacts` of the trained steps of a worker's trajectories, in order."""
    facts_of: dict[int, StepFacts] = {}
    for trajectory in worker.trajectories.values():
        for segment, tape in zip(trajectory.task.segments, trajectory.tapes, strict=True):
            if segment.trained:
                facts_of |= {facts.step: facts for facts in worker.algorithm.step_facts(tape, segment.trained)}
    return [facts_of[k] for k in sorted(facts_of)]


def plan(run: Run, samples: Sequence[Sample]) -> list[RolloutTask]:
    """Plan micro-batches of `samples`, with the window (or noise levels) of the run's first step in every batch."""
    step = samples[0].step
    tasks = run.algorithm.plan([replace(sample, step=1) for sample in samples])
    return [replace(task, samples=[replace(sample, step=step) for sample in task.samples]) for task in tasks]


def evaluate(config: Config, batches: Sequence[BatchGradients]) -> Signal:
    """Return the report on the gradients of the batches. Raises `TrainingError` if they are all 0."""
    gradients, facts = [batch.gradients for batch in batches], {f.step: f for b in batches for f in b.facts}
    steps = sorted({k for batch in gradients for k in batch})
    ordered = [facts[k] for k in steps]
    products = inner_products(gradients, steps)
    squares = products.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1)  # [N, T]
    if not squares.sum() > 0:
        raise TrainingError(
            "no batch has a gradient: all images of each prompt had the same reward; raise rollout.n, or choose "
            "prompts that are neither too easy nor too hard (data.train)"
        )
    norms, shares = squares.sqrt().mean(0), squares.mean(0) / squares.mean(0).sum()

    def agreement(factors: Sequence[float]) -> Cosine | None:
        return cosine(combined_products(products, factors))

    alone = torch.eye(len(steps)).tolist()
    candidates = [*other_weights(config, ordered), *leading_windows(config, ordered)]
    signal = Signal(
        model=config.model.path,
        algorithm=config.algorithm.name,
        kernel=config.sampling.kernel,
        weighting=weighting(config),
        batches=len(gradients),
        images=max(batch.images for batch in batches),
        parameters=max(len(next(iter(batch.values()), ())) for batch in gradients),
        steps=[
            StepSignal(fact, float(norms[i]), float(shares[i]), agreement(alone[i])) for i, fact in enumerate(ordered)
        ],
        update=Weighting("as configured", None, agreement([1.0] * len(steps))),
        choices=[Weighting(name, setting, agreement(factors)) for name, setting, factors in candidates],
    )
    signal.recommended = recommended(signal)
    return signal


def weighting(config: Config) -> StepWeighting | None:
    """Return the configured weights of the steps; None if the algorithm has no such key."""
    return getattr(config.algorithm, "timestep_weights", None)


Candidate = tuple[str, str, list[float]]  # name, key=value, factors of the measured gradients


def other_weights(config: Config, facts: Sequence[StepFacts]) -> Iterator[Candidate]:
    """Yield the other kinds of `timestep_weights`; the gradient is a sum over steps with these weights as factors."""
    if weighting(config) is None:
        return
    stds, jacobians = [cast(float, f.std) for f in facts], [cast(float, f.jacobian) for f in facts]
    for kind in LEVEL_WEIGHTS:
        if kind == weighting(config):
            continue
        try:
            weights = step_weights(kind, stds, [f.dt for f in facts], jacobians)
        except ValueError:  # a denominator is 0
            continue
        factors = [weight / cast(float, f.weight) for weight, f in zip(weights, facts, strict=True)]
        yield f"timestep_weights={kind}", f"algorithm.timestep_weights={kind}", factors


def leading_windows(config: Config, facts: Sequence[StepFacts]) -> Iterator[Candidate]:
    """Yield windows that end earlier, with the configured weights, if the configuration allows them."""
    sampling = config.sampling
    if sampling.window_size is not None:  # a range for moving windows would also change the other steps
        return
    first, end = sampling.steps_range
    for m in sorted({fact.step + 1 for fact in facts} - {end}):
        try:
            replace(config, sampling=replace(sampling, window_range=[first, m]))
        except ConfigError:  # for example if the tree splits later
            continue
        weights = [float(fact.step < m) for fact in facts]
        if sum(weights) < len(weights):
            yield f"window_range=[{first},{m}]", f"sampling.window_range=[{first},{m}]", weights


def recommended(signal: Signal) -> Weighting | None:
    """Return the choice with the highest cosine that is `clearly_above` the configured one; None if there is none."""
    configured = signal.update.cosine
    if configured is None:
        return None
    better = [c for c in signal.choices if c.cosine is not None and clearly_above(c.cosine, configured)]
    return max(better, key=lambda c: c.cosine.mean if c.cosine else 0.0, default=None)

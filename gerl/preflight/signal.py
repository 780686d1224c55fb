"""Where the signal of the reward is: the gradients of independent batches, step by step, and how far they agree.

Batches are drawn, scored and credited as those of a run, by its workers and scorers; no optimizer step is taken.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, get_args

import torch

from gerl.algorithms import count_pairs
from gerl.algorithms.base import Pooled
from gerl.algorithms.core_algos import step_weights
from gerl.algorithms.planning import plan_prompts, plan_samples
from gerl.cluster import Cluster
from gerl.commandline.waiting import waiting
from gerl.config import Config
from gerl.config.algorithms import WeightedConfig
from gerl.config.blocks import StepWeighting
from gerl.errors import ConfigError, TrainingError
from gerl.model.errors import model_errors
from gerl.model.loading import check_model
from gerl.model.paths import resolve
from gerl.preflight.agreement import clearly_above, combined, cosine, inner_products
from gerl.preflight.findings import write_json
from gerl.preflight.signal_report import Choice, Signal, StepSignal
from gerl.protocol import RolloutTask, Sample, StepFacts
from gerl.rewards.checks import read_prompts, without_people
from gerl.timeline import Stopwatch
from gerl.trainer.credit import credit_of, usable_rewards
from gerl.trainer.launch import start_cluster
from gerl.trainer.rollouts import PendingRollout
from gerl.trainer.run import Run
from gerl.trainer.step import Step
from gerl.workers.worker import Groups, PolicyWorker

logger = logging.getLogger("gerl")
Gradients = dict[int, torch.Tensor]  # step -> [P]


@dataclass(frozen=True)
class Measured:
    """A batch that was drawn, scored and differentiated."""

    images: int
    gradients: Gradients
    facts: list[StepFacts]  # of its trained steps, in order


def run(config: Config, batches: int, out: Path | None = None) -> Signal:
    """Measure with so many `batches`, log the report and write it to `out`."""
    if config.data.train_on == "files":
        raise ConfigError(
            "signal: it measures how informative the rewards of sampled images are, and with data.train_on=files "
            "none are sampled; remove it"
        )
    config = replace(config, reward=without_people(config.reward))
    resolve(config.model.path)
    prompts = read_prompts(config, "data.train", config.data.train)
    machines = Cluster(config.cluster, config.reward.gpu_shares)
    if not machines.joined:  # else they may be on other machines
        check_model(config.model, config.sampling, config.cluster.context)
    found: list[Measured] = []
    with start_cluster(machines) as cluster:
        whole = Run(config, Path(), cluster, prompts, [], {})
        whole.start()
        for number in range(1, batches + 1):
            with waiting(f"measuring batch {number} of {batches}"):
                found.append(measure(whole, number))
    signal = evaluate(config, found)
    if len(prompts) < batches * config.rollout.prompts_per_step:
        signal.notes.append(
            f"data.train has {len(prompts)} prompts, so the batches share some: they agree a little more than "
            "batches of other prompts would"
        )
    logger.info("%s", signal.text())
    if out is not None:
        write_json(out, signal.as_json())
    return signal


def measure(run: Run, number: int) -> Measured:
    """Sample batch `number` (from 1); the gradients are summed over the workers."""
    config, fleet, step = run.config, run.fleet, Step(number, Stopwatch())
    samples = plan_samples(config, plan_prompts(config, run.prompts, number), number, 0)
    tasks = plan(run, samples)
    rollout = PendingRollout(run.rewards, [t.samples for t in tasks], fleet.sample(tasks), fleet.samplers.hang_after)
    run.score(rollout, step)
    step.rewards, step.metrics = usable_rewards(config, step.scores)
    run.notify("rewarded", step)
    credit = credit_of(config, run.algorithm, step.scores, step.rewards)
    logger.info("batch %d: %d images, mean reward %.3f", number, len(credit), step.metrics["reward/mean"])
    parts = credit.split([len(task.samples) for task in tasks])
    pairs = count_pairs(zip(tasks, parts, strict=True))
    given = {task.id: part for task, part in zip(tasks, parts, strict=True)}
    groups = fleet.lockstep_groups(given)
    found: Gradients = {}
    for gradients in fleet.trainers.run(step_gradients, given, pairs, fleet.pool(given, groups), groups):
        found |= {k: found[k] + new if k in found else new for k, new in gradients.items()}
    facts = {known.step: known for each in fleet.trainers.run(step_facts) for known in each}
    fleet.discard()
    fleet.clear()
    return Measured(len(credit), found, [facts[k] for k in sorted(facts)])


def step_gradients(
    worker: PolicyWorker, credit: Gradients, num_pairs: int, pooled: Pooled | None, groups: Groups
) -> Gradients:
    """The gradient that `accumulate` would add, by trained step (or noise level), each one vector on the CPU."""
    with model_errors("update"):
        return worker.actor.step_gradients(worker.batches(worker.own(credit, groups), pooled), num_pairs)


def step_facts(worker: PolicyWorker) -> list[StepFacts]:
    """How each trained step of what a worker has sampled counts in the loss, in order."""
    found: dict[int, StepFacts] = {}
    for kept in worker.trajectories.values():
        for segment, tape in zip(kept.task.segments, kept.tapes, strict=True):
            if segment.trained:
                found |= {facts.step: facts for facts in worker.algorithm.step_facts(tape, segment.trained)}
    return [found[k] for k in sorted(found)]


def plan(run: Run, samples: Sequence[Sample]) -> list[RolloutTask]:
    """The micro-batches of `samples`, with the window (or noise levels) of the run's first step for each batch.

    Everything else that depends on the step, such as noise, is that of the samples' own.
    """
    step = samples[0].step
    tasks = run.algorithm.plan([replace(sample, step=1) for sample in samples])
    return [replace(task, samples=[replace(sample, step=step) for sample in task.samples]) for task in tasks]


def evaluate(config: Config, batches: Sequence[Measured]) -> Signal:
    """The report on the gradients of the batches; raises `TrainingError` if they are all 0."""
    gradients, facts = [batch.gradients for batch in batches], {f.step: f for b in batches for f in b.facts}
    steps = sorted({k for batch in gradients for k in batch})
    known = [facts[k] for k in steps]
    products = inner_products(gradients, steps)
    squares = products.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1)  # [N, T]
    if not squares.sum() > 0:
        raise TrainingError(
            "no batch has a gradient: all images of each prompt had the same reward; raise rollout.n, or choose "
            "prompts that are neither too easy nor too hard (data.train)"
        )
    norms, shares = squares.sqrt().mean(0), squares.mean(0) / squares.mean(0).sum()
    alone = torch.eye(len(steps))
    by_step = [
        StepSignal(fact, float(norms[i]), float(shares[i]), cosine(combined(products, alone[i].tolist())))
        for i, fact in enumerate(known)
    ]
    update = Choice("as configured", None, cosine(combined(products, [1.0] * len(steps))))
    choices = [
        Choice(name, setting, cosine(combined(products, factors)))
        for name, setting, factors in [*other_weights(config, known), *leading_windows(config, known)]
    ]
    size = max(len(next(iter(batch.values()), ())) for batch in gradients)
    signal = Signal(
        model=config.model.path,
        algorithm=config.algorithm.name,
        kernel=config.sampling.kernel,
        weighting=weighting(config),
        batches=len(gradients),
        images=max(batch.images for batch in batches),
        parameters=size,
        steps=by_step,
        update=update,
        choices=choices,
    )
    signal.recommended = recommended(signal)
    return signal


def weighting(config: Config) -> StepWeighting | None:
    """The configured weights of the steps, None where the algorithm has no such key."""
    return config.algorithm.step_weighting if isinstance(config.algorithm, WeightedConfig) else None


Candidate = tuple[str, str, list[float]]  # name, key=value, factors of the measured gradients


def other_weights(config: Config, facts: Sequence[StepFacts]) -> Iterator[Candidate]:
    """The other kinds of `timestep_weights`: the gradient is a sum over steps, each with its weight as a factor."""
    if weighting(config) is None:
        return
    stds, jacobians = [cast(float, f.std) for f in facts], [cast(float, f.jacobian) for f in facts]
    for kind in get_args(StepWeighting):
        if kind == weighting(config):
            continue
        try:
            weights = step_weights(kind, stds, [f.dt for f in facts], jacobians)
        except ValueError:  # a denominator is 0
            continue
        factors = [weight / cast(float, f.weight) for weight, f in zip(weights, facts, strict=True)]
        yield f"timestep_weights={kind}", f"algorithm.timestep_weights={kind}", factors


def leading_windows(config: Config, facts: Sequence[StepFacts]) -> Iterator[Candidate]:
    """Windows that end earlier, with the configured weights, as far as the configuration allows them."""
    sampling = config.sampling
    if sampling.window_size is not None:  # another window would be other steps, too
        return
    first, end = sampling.steps_range[0], sampling.steps_range[1]
    for m in sorted({fact.step + 1 for fact in facts} - {end}):
        try:
            replace(config, sampling=replace(sampling, window_range=[first, m]))
        except ConfigError:  # the tree splits later, say
            continue
        kept = [float(fact.step < m) for fact in facts]
        if sum(kept) < len(kept):
            yield f"window_range=[{first},{m}]", f"sampling.window_range=[{first},{m}]", kept


def recommended(signal: Signal) -> Choice | None:
    """The choice with the highest cosine, if it is above the configured one by more than the standard errors."""
    configured = signal.update.cosine
    if configured is None:
        return None
    better = [c for c in signal.choices if c.cosine is not None and clearly_above(c.cosine, configured)]
    return max(better, key=lambda c: c.cosine.mean if c.cosine else 0.0, default=None)

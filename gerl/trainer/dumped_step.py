"""A dumped step loaded again: the run's own code takes it with one worker, in place of all of the run's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from gerl.algorithms import KLWeight, build_algorithm
from gerl.algorithms.base import pooled_sum
from gerl.cluster import Cluster, WorkerGroup
from gerl.commandline.composition import compose_changes, path_or_copy
from gerl.config import Config, RewardConfig
from gerl.engine import Trajectory
from gerl.errors import CheckpointError, ConfigError, ModelError
from gerl.model.paths import resolve
from gerl.progress import Stopwatch, Timeline, waiting
from gerl.protocol import ModelFacts, StepResult, UpdateStats
from gerl.rewards.manager import RewardManager, functions_of
from gerl.run.card import software
from gerl.run.checkpoint import RunState
from gerl.run.dump import CREDIT, GRADIENT, KL_WEIGHT, STATE, Dump, DumpError, Environment
from gerl.trainer.extensions import build_extensions
from gerl.trainer.plan import Plan
from gerl.trainer.roles import POLICY, Role
from gerl.trainer.run import Run
from gerl.trainer.step import Metrics, Step, credit_of, usable_rewards
from gerl.trainer.update import Update
from gerl.utils.imports import importing
from gerl.workers.dumping import machine, weights_digest
from gerl.workers.fleet import Credit, LocalFleet, Placement
from gerl.workers.worker import PolicyWorker

R = TypeVar("R")
# those that change rewards, credit or reference of a step
EXTENSIONS = (
    "gardo:KLGate", "kl_in_reward:KLInReward", "critic:Critic", "dynamic_sampling:DynamicSampling",
    "moving_reference:MovingReference",
)  # fmt: skip
# of the run's processes only the first is here: where and how many there were does not change what they compute
ALONE = {"launcher": "local", "num_workers": 1, "layout": "hybrid", "rollout_workers": None, "actor_workers": None}
ALONE |= {"ranks_per_worker": 1, "context": 1}


class ReplayFleet(LocalFleet):
    """One worker that does the work of each of the run's processes in turn, and adds up their gradients."""

    def __init__(self, config: Config, cluster: Cluster, worker: PolicyWorker, dump: Dump) -> None:
        super().__init__(config, cluster, WorkerGroup("worker", 1, lambda _: worker, None), Timeline())
        self.worker, self.limits = worker, dump.record.limits
        self.parts: dict[int, dict[int, Trajectory]] = {}  # by process of the run
        self.gradient: torch.Tensor | None = None  # of the last optimizer step
        record, whole = dump.record, config.model.dtype == "float32"
        for process, trajectory in zip(record.holders, dump.trajectories(worker.device, whole), strict=True):
            self.parts.setdefault(process, {})[trajectory.task.id] = trajectory
        self.held = [(record.tasks, Placement([0] * len(record.tasks)))]
        self.gather()

    @property
    def dimensions(self) -> int:
        """Number of elements of an image's latents."""
        tapes = [tape for trajectory in self.worker.trajectories.values() for tape in trajectory.tapes]
        return math.prod(next(step.x.shape[1:] for tape in tapes for step in tape.steps))

    def gather(self) -> None:
        """Give the worker the trajectories of all processes."""
        self.worker.trajectories = {i: t for trajectories in self.parts.values() for i, t in trajectories.items()}

    def in_turn(self, work: Callable[[], R]) -> Iterator[R]:
        """Yield the result of `work` with the trajectories of each process, and its limit of a micro-batch."""
        for process, trajectories in sorted(self.parts.items()):
            self.worker.trajectories, self.worker.actor.most = dict(trajectories), self.limits[process]
            yield work()
        self.gather()

    def accumulate(self, credit: Credit, num_pairs: int, kl: KLWeight) -> UpdateStats:
        worker, stats, gradients = self.worker, UpdateStats(), list[torch.Tensor]()
        pooled = pooled_sum(self.in_turn(lambda: worker.pool(credit, None, kl))) if self.pools else None
        for added in self.in_turn(lambda: worker.accumulate(credit, num_pairs, pooled, None, kl)):
            stats += added
            if len(self.parts) > 1:
                gradients.append(worker.actor.flat_gradient())
                worker.actor.optimizer.zero_grad(set_to_none=True)
        if gradients:
            worker.actor.set_flat_gradient(torch.stack(gradients).sum(0))
        return stats

    def step(self, finished: int, last: bool, resets: bool) -> list[StepResult]:
        self.gradient = self.worker.actor.flat_gradient().cpu()
        return super().step(finished, last, resets)


@dataclass(frozen=True)
class Replayed:
    """Results of training on a dumped step again."""

    metrics: Metrics
    credit: torch.Tensor  # [B, T] computed from the dumped scores
    gradient: torch.Tensor | None  # of the last optimizer step, before it is clipped
    weights: str | None  # digest of the trained weights after the step
    environment: Environment
    processes: int  # whose gradients were added up


@contextmanager
def loaded(dump: Dump, overrides: Sequence[str] = (), worker: PolicyWorker | None = None) -> Iterator[DumpedStep]:
    """Load model and state of a dumped step, in this process; `worker`: one that has loaded the model already.

    Raises `GerlError` if the model or a file of the run is missing or another one, or the dump is damaged.
    """
    config = configuration(dump, overrides)
    with Cluster(config.cluster) as cluster:
        yield DumpedStep(dump, config, cluster, worker)


def configuration(dump: Dump, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration that replays a dump in one process, changed by `overrides`; raises `ConfigError`."""
    where = dump.record.environment
    settings = in_one_process(dump.record.settings, dump.record.planned, where.device, where.dtype, where.threads)
    if not settings["model"]["merge_lora"]:
        settings["model"]["lora"] = None  # the trained LoRA that began as it is in the dump
    if isinstance(path := settings["algorithm"].get("path"), str):
        settings["algorithm"]["path"] = path_or_copy(path, dump.path.absolute().parents[1])
    config = compose_changes(settings, overrides)
    if config.model.dtype not in (where.dtype, "float32"):
        raise ConfigError(
            f"model.dtype={config.model.dtype}: the step was recorded in {where.dtype}, and can be replayed in this "
            "precision or in float32; use one of them"
        )
    return config


def in_one_process(
    settings: Mapping[str, Any], steps: int, device: str | None, dtype: str | None, threads: int | None
) -> dict[str, Any]:
    """Return the settings of a run of so many `steps` for a single worker in this process; None: as they are.

    `device`: of the run; without a GPU here the CPU takes its place.
    """
    values: dict[str, Any] = deepcopy(dict(settings))
    here = device if device == "cpu" or torch.cuda.is_available() else "cpu"
    facts = {"device": here if device else None, "threads_per_worker": threads}
    values["cluster"] |= {**ALONE, **{name: value for name, value in facts.items() if value is not None}}
    values["model"] |= {"shard": "none"} | ({} if dtype is None else {"dtype": dtype})
    values["trainer"] |= {"steps": steps, "epochs": None}  # the learning rates are those of the run
    values["rollout"]["service"] = {}  # its images are in the dump
    for scorer in values["reward"]["scorers"].values():
        scorer["env"] = {}  # needs processes; no scorer runs but those that the worker differentiates
    return values


def load_worker(config: Config, cluster: Cluster) -> tuple[PolicyWorker, ModelFacts]:
    """Load the model of `config` on a worker in this process; raises `ModelError` if it cannot be loaded."""
    resolve(config.model.path)
    with importing():
        from gerl.workers.setup import check_start

    functions = functions_of(config.reward.scorers) if config.algorithm.needs.reward_gradient else {}
    device, total = cluster.worker_device(0), config.trainer.steps * config.actor.updates
    with waiting(f"loading {config.model.path}"):
        check_start(config, device)
        worker = PolicyWorker(config, 0, device, cluster.threads, total, functions)
        return worker, worker.setup()


class DumpedStep:
    """A dumped step in this process: the run before its update, and the step from its scores on."""

    def __init__(self, dump: Dump, config: Config, cluster: Cluster, worker: PolicyWorker | None = None) -> None:
        self.dump, self.config, self.cluster = dump, config, cluster
        record = dump.record
        self.worker = worker if worker is not None else self.load_model()
        self.load_state()
        self.fleet = ReplayFleet(config, cluster, self.worker, dump)
        state = RunState(
            step=record.step - 1,
            policy_version=record.policy_version,
            nonfinite=record.nonfinite,
            kl_coef=record.kl_coef,
            algorithm=record.algorithm,
            extensions=dump.extensions,
        )
        extensions, rewards = build_extensions(config, EXTENSIONS), RewardManager(RewardConfig(), cluster, "")
        run = Run(config, dump.path.parents[1], Plan(config, ()), self.fleet, rewards, extensions, state)
        self.run = run
        update = self.update = Update(config, build_algorithm(config), self.fleet, state, half_precision=False)
        update.ratio_limit = math.inf  # reported, not judged
        update.compares_gradient = False  # the run has done so
        update.resets_reference = lambda step: any(run.notify("updating", step))
        run.set_roles({POLICY: Role(POLICY, config, self.fleet, update)})
        run.restore(state)
        if run.algorithm.needs.ratio and config.algorithm.cfg != "off":
            update.clip_range = config.algorithm.clip_range(self.fleet.dimensions)
        update.said_spread = self.worker.actor.looked = True  # the run has said it

    def load_model(self) -> PolicyWorker:
        """Load the model; raises `ModelError` if it has other weights than the run's."""
        worker, facts = load_worker(self.config, self.cluster)
        record = self.dump.record
        expected = record.identity.get("model.path", facts.weights)
        if facts.weights != expected and self.config.model.dtype == record.environment.dtype:
            raise ModelError(
                f"model.path={self.config.model.path}: its weights are not those of the run (fingerprint "
                f"{facts.weights[:12]}, not {expected[:12]}); give model.path=PIPELINE of the run"
            )
        return worker

    def load_state(self) -> None:
        """Load the state before the step; raises `DumpError` if it does not fit."""
        from gerl.workers.actor import snapshots_of
        from gerl.workers.state import load_tensors

        record, worker = self.dump.record, self.worker
        worker.snapshots = snapshots_of(worker.actor)
        try:
            load_tensors(worker.actor, self.dump.group(STATE), record.worker)
        except CheckpointError as error:
            raise DumpError(f"{self.dump.tensors} does not fit its model: {error}") from None
        worker.ended = record.step - 1

    def new_step(self) -> Step:
        """Return the step with its scores, and the credit that follows from them."""
        run, record = self.run, self.dump.record
        step = Step(record.step, Stopwatch(), tasks=list(record.tasks), scores=record.scores, lag=record.lag)
        step.rewards, step.metrics = usable_rewards(run.config, step.scores)
        run.notify("rewarded", step)
        step.credit = credit_of(run.config, run.algorithm, step.scores, step.rewards)
        run.notify("credited", step)
        return step

    def train(self) -> Replayed:
        """Train on the dumped credit, all optimizer steps of the trainer step; may be called once."""
        run, step = self.run, self.new_step()
        assert step.credit is not None
        credit, step.credit = step.credit, self.dump.tensor(CREDIT)
        step.kl_weight = self.dump.tensor(KL_WEIGHT) if KL_WEIGHT in self.dump.names else None
        with waiting(f"training on step {step.number} again"):
            step.metrics |= self.update.run(step)
        run.notify("updated", step)
        facts, digest = machine(self.worker), weights_digest(self.worker)
        code = {name: value for name, value in software().items() if name != "repository"}
        environment = Environment(code, facts.device, facts.processor, facts.dtype, facts.threads)
        return Replayed(step.metrics, credit, self.fleet.gradient, digest, environment, len(self.fleet.parts))

    def recorded_gradient(self) -> torch.Tensor | None:
        """Return the run's gradient of the last optimizer step; None if it took none, or trains whole models."""
        return self.dump.tensor(GRADIENT) if GRADIENT in self.dump.names else None

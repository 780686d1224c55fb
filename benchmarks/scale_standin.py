"""What `scale.py` measures with: workers whose denoiser takes a known time, and counters of what the driver does.

A worker is gerl's own, with its pipeline, tapes, LoRA gradients, optimizer and collective; only that its denoiser
sleeps as well, so that eight of them on two cores behave like eight GPUs. An `Echo` computes nothing at all: the
driver cannot tell the two apart, and a machine has room for many.
"""

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ray
import torch
import torch.distributed as dist
from ray import cloudpickle
from scale_echo import Echo, Pace

from gerl.algorithms import build_algorithm
from gerl.cluster import Cluster, Pending, WorkerGroup
from gerl.config import Config
from gerl.protocol import ModelFacts
from gerl.trainer import loop
from gerl.trainer.run import Run
from gerl.workers.worker import PolicyWorker

HERE = Path(__file__).parent
TIMED = ("sample", "accumulate", "reduce_gradient", "step", "finish_step", "checkpoint")
PHASES = ("draw", "score", "credit", "update", "remember")


class Pause(torch.autograd.Function):
    """The identity, that takes some seconds forward and twice as many backward."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * context.seconds)
        return gradients[0], None


class SlowWorker(PolicyWorker):
    """gerl's worker with a denoiser that takes `pace.image` seconds an image and call, and twice that backward."""

    def __init__(self, *arguments: Any) -> None:
        """Those of gerl's worker, and its pace."""
        super().__init__(*arguments[:-1])
        self.pace: Pace = arguments[-1]
        self.took: dict[str, list[tuple[float, float]]] = defaultdict(list)  # seconds, CPU seconds of each call

    def setup(self, remote: bool = False) -> ModelFacts:
        """Load the pipeline, and slow its denoiser down."""
        facts = super().setup(remote)
        for denoiser in self.policy.denoisers.values():
            denoiser.register_forward_hook(lambda _, __, out: (Pause.apply(out[0], self.pace.image * len(out[0])),))
        return facts

    def report(self) -> dict[str, list[tuple[float, float]]]:
        """What the calls took since the last time."""
        took = {name: list(values) for name, values in self.took.items()}
        self.took.clear()
        return took

    def all_reduce(self, numbers: int, repetitions: int) -> list[float]:
        """Seconds of all-reduces of so many fp32 numbers among all workers; a collective call."""
        values, found = torch.ones(numbers), []
        for _ in range(repetitions):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(values)
            found.append(time.perf_counter() - start)
        return found


def _timed(name: str) -> Callable[..., Any]:
    method = getattr(PolicyWorker, name)

    @wraps(method)
    def timed(self: SlowWorker, *arguments: Any) -> Any:
        start, cpu = time.perf_counter(), time.process_time()
        try:
            return method(self, *arguments)
        finally:
            self.took[name].append((time.perf_counter() - start, time.process_time() - cpu))

    return timed


for _name in TIMED:
    setattr(SlowWorker, _name, _timed(_name))  # of the class: Ray looks there


class StandIns(Cluster):
    """A cluster that starts stand-ins in place of gerl's workers."""

    def __init__(self, config: Config, pace: Pace, cls: type) -> None:
        super().__init__(config.cluster, config.reward.gpu_shares)
        self.pace, self.cls = pace, cls

    def workers(self, name: str, cls: Any, count: int, arguments: Any, **options: Any) -> Any:
        """As gerl's, with another class."""
        if cls is not PolicyWorker:
            return super().workers(name, cls, count, arguments, **options)
        if self.cls is Echo:
            return super().workers(name, Echo, count, lambda rank: (rank, self.pace), **options)
        return super().workers(name, self.cls, count, lambda rank: (*arguments(rank), self.pace), **options)


@dataclass
class Ledger:
    """What the driver did: its CPU seconds by phase, calls and waits, and the bytes of them where these are counted."""

    cpu: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    thread: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # of its main thread alone
    messages: Counter[str] = field(default_factory=Counter)
    waits: int = 0
    awaited: int = 0  # futures in all waits together
    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    weigh: bool = False  # bytes are counted by pickling once more, which takes time itself

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of a step."""
        cpu, thread = time.process_time(), time.thread_time()
        try:
            yield
        finally:
            self.cpu[name] += time.process_time() - cpu
            self.thread[name] += time.thread_time() - thread

    @contextmanager
    def watching(self, run: Run) -> Iterator[None]:
        """Count what happens in the block."""
        submit, ended, wait = WorkerGroup.submit, Pending.ended, ray.wait

        def counted(group: Any, index: int, method: Any, *arguments: Any, **options: Any) -> Any:
            self.messages[method.__name__] += 1
            if self.weigh:
                plain = [SimpleNamespace() if isinstance(a, Pending | ray.ObjectRef) else a for a in arguments]
                self.sent[method.__name__] += len(cloudpickle.dumps(plain))
            pending = submit(group, index, method, *arguments, **options)
            pending.name = method.__name__  # type: ignore[attr-defined]
            return pending

        def fetched(pending: Any) -> Any:
            value = ended(pending)
            if self.weigh and hasattr(pending, "name"):
                self.received[pending.name] += len(cloudpickle.dumps(value))
                del pending.name
            return value

        def waited(references: Sequence[Any], **options: Any) -> Any:
            self.waits, self.awaited = self.waits + 1, self.awaited + len(references)
            return wait(references, **options)

        def phased(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*arguments: Any) -> Any:
                with self.phase(name):
                    return function(*arguments)

            return timed

        parts = [
            *(("draw", run, "sample"), ("draw", run.rollouts, "wait_until_sampled")),
            *(("credit", loop, name) for name in ("usable_rewards", "credit_of")),
            *((name, loop, name) for name in ("score", "update", "remember")),
        ]
        patches = [patch.object(at, name, phased(phase, getattr(at, name))) for phase, at, name in parts]
        patches += [patch.object(WorkerGroup, "submit", counted), patch.object(Pending, "ended", fetched)]
        patches += [patch.object(ray, "wait", waited)]
        for one in patches:
            one.start()
        try:
            yield
        finally:
            for one in patches:
                one.stop()


def reshape(run: Run, config: Config) -> None:
    """Let the driver go on with the rollout sizes of another configuration, of which the workers need not know."""
    (role,) = run.roles.values()
    run.config = run.plan.config = run.rollouts.config = role.update.config = config
    role.update.algorithm = build_algorithm(config)


def importable() -> str:
    """What PYTHONPATH has to be for workers to find these classes."""
    return ":".join(dict.fromkeys([str(HERE), *filter(None, sys.path)]))

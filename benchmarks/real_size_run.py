"""The run that real_size.py measures: `python benchmarks/real_size_run.py OUT.json KEYS`.

As `gerl train KEYS`, with a count of the bytes that Ray carries, and a report of each worker's weights and calls.
"""

import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - which finds gerl
import ray
import torch
from ray._private.internal_api import node_stats
from ray._private.serialization import SerializationContext

from gerl.cluster import WorkerGroup
from gerl.commandline import signals
from gerl.commandline.command import run_command
from gerl.trainer.launch import launched
from gerl.trainer.run import Run
from gerl.trainer.run_folder import open_run
from gerl.workers.worker import PolicyWorker

Row = dict[str, Any]
DRIVER = "arguments"


class Traffic:
    """Bytes that this process sends to workers and receives from them, by the method that is called."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self._methods: dict[str, str] = {}  # by the hexadecimal id of an object
        self._calling = threading.local()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count in the block."""
        submit, run = WorkerGroup._submit, WorkerGroup.run
        serialize, deserialize = SerializationContext.serialize, SerializationContext.deserialize_objects

        def submitted(group: Any, number: int, worker: Any, method: Any, *arguments: Any, **options: Any) -> Any:
            self._calling.name = method.__name__
            pending = submit(group, number, worker, method, *arguments, **options)
            self._calling.name = None
            self._methods[pending.reference.hex()] = method.__name__
            return pending

        def ran(group: Any, method: Any, *arguments: Any, **options: Any) -> Any:
            self._calling.name = method.__name__  # of arguments that go through Ray's store
            return run(group, method, *arguments, **options)

        def serialized(context: Any, value: Any) -> Any:
            done = serialize(context, value)
            self.sent[getattr(self._calling, "name", None) or DRIVER] += done.total_bytes
            return done

        def deserialized(context: Any, objects: Any, references: Any, *rest: Any) -> Any:
            for reference, one in zip(references, objects, strict=True):
                data = one[0]
                self.received[self._methods.get(reference.hex(), DRIVER)] += 0 if data is None else len(data)
            return deserialize(context, objects, references, *rest)

        WorkerGroup._submit, WorkerGroup.run = submitted, ran  # type: ignore[assignment, method-assign]
        SerializationContext.serialize = serialized  # type: ignore[method-assign]
        SerializationContext.deserialize_objects = deserialized  # type: ignore[method-assign]
        yield

    def taken(self) -> Row:
        """What was counted since the last time."""
        row = {"sent": dict(self.sent), "received": dict(self.received)}
        self.sent.clear()
        self.received.clear()
        return row


def store() -> Row:
    """Bytes and objects that were ever put into Ray's store, and those in it."""
    (node,) = ray.nodes()
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats
    created = {"bytes": stats.cumulative_created_bytes, "objects": stats.cumulative_created_objects}
    return created | {"used": stats.object_store_bytes_used}


# --- functions that run on a worker


def weights_of(worker: PolicyWorker) -> Row:
    """Bytes of each component's weights by dtype, and in memory that several share once; the configured dtype."""
    from gerl.model.loading import precision

    found: Row = {"dtype": str(precision(worker.config.model, worker.device)).removeprefix("torch."), "components": {}}
    trained = {id(p) for p in worker.policy.trained.values()}
    storages: dict[int, int] = {}
    for name, component in worker.policy.pipe.components.items():
        if not isinstance(component, torch.nn.Module):
            continue
        sizes: Counter[str] = Counter()
        for tensor in {id(t): t for t in (*component.parameters(), *component.buffers())}.values():
            kind = str(tensor.dtype).removeprefix("torch.")
            sizes["trained" if id(tensor) in trained else kind] += tensor.nbytes
            if id(tensor) not in trained:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        found["components"][name] = dict(sizes)
    return found | {"storages": sum(storages.values()), "pid": os.getpid()}


def time_denoiser(worker: PolicyWorker) -> None:
    """From now on sum the seconds of calls, and in them of the denoiser forward and backward."""
    clock = worker.clock = Clock()  # type: ignore[attr-defined]
    for denoiser in worker.policy.denoisers.values():
        denoiser.forward = clock.timed("denoiser", denoiser.forward)
    torch.autograd.backward = clock.timed("denoiser", torch.autograd.backward)
    for at, name in ((worker, "generate"), (worker.rollout, "validate"), (worker.actor, "accumulate_tasks")):
        setattr(at, name, clock.timed(name, getattr(at, name)))


class Clock:
    """Seconds of functions, by name and by that of the timed function that calls them."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inside = ""

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with its seconds summed; a denoiser recomputed in a backward pass is a part of that."""

        @wraps(function)
        def measured(*arguments: Any, **options: Any) -> Any:
            outer, start = self._inside, time.perf_counter()
            if outer.endswith(name):
                return function(*arguments, **options)
            self._inside = f"{outer}/{name}".removeprefix("/")
            try:
                return function(*arguments, **options)
            finally:
                self.seconds[self._inside] += time.perf_counter() - start
                self._inside = outer

        return measured


def seconds_of(worker: PolicyWorker) -> Row:
    """The seconds since the last time, by call and in it by what took them."""
    seconds = worker.clock.seconds  # type: ignore[attr-defined]
    found = dict(seconds)
    seconds.clear()
    return found


# --- the run


class Report:
    """What is measured in the run, written after each step."""

    def __init__(self, path: Path) -> None:
        self.path, self.traffic, self.steps = path, Traffic(), list[Row]()
        self.weights: list[Row] = []

    def started(self, run: Run) -> None:
        """Look at the loaded workers."""
        self.weights = run.fleet.workers.run(weights_of)
        run.fleet.workers.run(time_denoiser)
        self.step(run, "start")

    def step(self, run: Run, name: object) -> None:
        """Add a step."""
        seconds = run.fleet.workers.run(seconds_of)
        now = {"step": name, "time": time.time(), **self.traffic.taken(), "store": store(), "seconds": seconds}
        self.steps.append(now)
        self.path.write_text(json.dumps({"weights": self.weights, "steps": self.steps}), encoding="utf-8")


def train(path: str, arguments: list[str]) -> None:
    """Train as `gerl train` does."""
    report, folder = Report(Path(path)), open_run(arguments)
    assert folder is not None
    with report.traffic.counted(), folder, launched(folder, arguments) as (run, steps):
        report.started(run)
        for step in steps:
            report.step(run, step.number)


def main(arguments: list[str]) -> int:
    path, *keys = arguments
    return run_command(keys, lambda: re.sub(r"\s+", " ", str(__doc__)), lambda given: train(path, list(given)))


if __name__ == "__main__":
    signals.exit_with(main(sys.argv[1:]))

"""Workers over Ray or in this process, behind one interface: the only file that imports Ray."""

import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import ray
import torch

from gerl.config import ClusterConfig
from gerl.errors import ClusterError, GerlError, Interrupted, WorkerDied

logger = logging.getLogger(__name__)
W = TypeVar("W")  # the class of a worker
R = TypeVar("R")  # what a call returns
P = ParamSpec("P")


class Pending(Generic[R]):
    """The result of a submitted call, or the exception it raised; `later` passes it on to another call."""

    def __init__(
        self,
        worker: str,
        reference: ray.ObjectRef | None = None,
        call: Callable[[], R] | None = None,
        value: R | None = None,
    ) -> None:
        self.worker, self.reference = worker, reference
        self._value = value
        self._error: Exception | None = None
        if call is not None:
            try:
                self._value = call()
            except Interrupted:
                raise
            except Exception as error:  # noqa: BLE001 - any error belongs to whoever asks for the result
                self._error = error

    def wait(self) -> None:
        """Wait until the call has ended, without fetching what it returned."""
        if self.reference is not None:
            ray.wait([self.reference], fetch_local=False)

    def later(self) -> R:
        """The result as an argument of another call, which gets the value when it is there; nothing waits here."""
        return cast(R, self)

    def result(self) -> R:
        """Wait for the call and return what it returned; raise what it raised."""
        if self.reference is None:
            if self._error is not None:
                raise self._error
            return cast(R, self._value)
        try:
            return cast(R, ray.get(self.reference))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, GerlError):
                raise error.cause from None
            raise
        except ray.exceptions.RayActorError as error:
            raise WorkerDied(
                f"{self.worker} died ({str(error).splitlines()[0]}): its log is in Ray's session folder; restart the "
                "command with checkpoint.resume=auto to carry on from the newest checkpoint"
            ) from None


def wait_any(pending: Sequence[Pending[Any]], timeout: float | None = None) -> list[Pending[Any]]:
    """Wait until one of the calls has ended, or for `timeout` seconds; returns those that have, in order."""
    references = [p.reference for p in pending if p.reference is not None]
    if len(references) < len(pending) or not references:  # what ran in this process has ended
        return [p for p in pending if p.reference is None]
    ready, _ = ray.wait(references, num_returns=1, timeout=timeout, fetch_local=False)
    ready, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
    return [p for p in pending if p.reference in ready]


class WorkerGroup(Generic[W]):
    """Workers of one plain class; calls are queued per worker in the order they are submitted.

    A call is given as the method of the class, `group.submit(0, Worker.method, argument)`: its arguments and its result
    have types, over Ray too.
    """

    def __init__(self, name: str, count: int, start: Callable[[int], W], end: Callable[[W], None] | None) -> None:
        self.name, self._start, self._end = name, start, end
        self.remote = end is not None
        self.workers = [start(rank) for rank in range(count)]  # over Ray: the handles of actors of that class

    def __len__(self) -> int:
        return len(self.workers)

    def submit(
        self, index: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[R]:
        """Queue `method(*args)` on worker `index`; an argument that is `Pending.later()` arrives as its value."""
        label = f"{self.name} {index}"
        bound = getattr(self.workers[index], method.__name__)
        if self.remote:
            return Pending(label, reference=bound.remote(*map(_reference, args), **kwargs))
        return Pending(label, call=lambda: bound(*map(_value, args), **kwargs))

    def restart(self, index: int) -> None:
        """End worker `index`, whatever it is doing, and start it anew; in this process there is nothing to end."""
        if self._end is not None:
            self._end(self.workers[index])
            self.workers[index] = self._start(index)

    def run(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run `method(*args)` on all workers at once and return what they returned, in order."""
        pending = [self.submit(i, method, *args, **kwargs) for i in range(len(self))]
        return [p.result() for p in pending]


def _value(argument: object) -> object:
    return argument.result() if isinstance(argument, Pending) else argument


def _reference(argument: object) -> object:
    if isinstance(argument, Pending) and argument.reference is not None:
        return argument.reference
    return _value(argument)


class Cluster:
    """A Ray session or this process; as a context manager it ends what it started, and nothing else.

    Joins the Ray cluster of the environment variable RAY_ADDRESS if it is set, otherwise starts an embedded one.
    """

    def __init__(self, config: ClusterConfig, scorers: Sequence[float] = ()) -> None:
        """`scorers`: the share of a GPU that each of their processes takes."""
        self.config = config
        self.scorers = list(scorers)
        self.remote = config.launcher == "ray"
        self._actors: list[object] = []
        self._started = False
        self.device = self._device()
        self.gpus = 1.0  # that a rollout and actor worker takes: one, less what scorers beside it need
        self.num_workers = config.num_workers or self._default_workers()

    def _default_workers(self) -> int:
        if self.device == "cuda":
            return torch.cuda.device_count()
        # on a CPU two processes beat one with as many threads, which wait for each other at every operation
        return min(2, _cores()) if self.remote else 1

    def _device(self) -> str:
        if self.config.device == "cuda" and not torch.cuda.is_available():
            raise ClusterError("cluster.device=cuda, but torch sees no GPU: use cluster.device=auto or cpu")
        if self.config.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.config.device

    def __enter__(self) -> "Cluster":
        joined = os.environ.get("RAY_ADDRESS")
        if self.remote and not ray.is_initialized():
            options: dict[str, object] = {"log_to_driver": False, "logging_level": logging.ERROR}
            if not joined:
                options |= {"address": "local", "include_dashboard": False}
            try:
                if joined:
                    check_reachable(joined)
                ray.init(**options)
            except Interrupted:
                raise
            except Exception as error:  # Ray's start-up time-out is a plain Exception
                raise ClusterError(_why_not_joined(error) if joined else f"Ray does not start: {error}") from error
            self._started = True
        try:
            self._check_devices()
        except ClusterError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._started:
            ray.shutdown()  # an embedded cluster ends, a joined one is only left
            self._started = False

    def _check_devices(self) -> None:
        if self.device != "cuda":
            return
        devices = int(ray.cluster_resources().get("GPU", 0)) if self.remote else torch.cuda.device_count()
        if self.num_workers > devices:
            raise ClusterError(
                f"cluster.num_workers={self.num_workers}, but there are only {devices} GPUs: lower it or use more GPUs"
            )
        if self.remote:
            self.gpus = worker_share(devices, self.num_workers, self.scorers)

    def worker_device(self, rank: int) -> str:
        """The torch device of worker `rank`; Ray shows each worker its own GPU only."""
        return "cuda" if self.device == "cuda" and self.remote else f"cuda:{rank}" if self.device == "cuda" else "cpu"

    @property
    def threads(self) -> int:
        """CPU threads of one rollout and actor worker."""
        return self.config.threads_per_worker or max(1, _cores() // self.num_workers)

    def workers(
        self,
        name: str,
        cls: type[W],
        count: int,
        arguments: Callable[[int], tuple[object, ...]],
        *,
        gpus: float = 0.0,
        threads: int = 1,
    ) -> WorkerGroup[W]:
        """Start `count` workers `cls(*arguments(rank))`, each with `threads` CPU threads and a share of a GPU.

        `gpus` is the share where there are GPUs; without one a worker sees none. Constructors must be light: Ray
        reports what they raise as a dead worker, without the exception.
        """
        if not self.remote:
            return WorkerGroup(name, count, lambda rank: cls(*arguments(rank)), None)
        # shares that always fit: the CPU is shared by design, Ray's accounting must not leave a worker unplaced
        total = ray.cluster_resources().get("CPU", 1.0)
        share = int(1000 * total / (self.num_workers + len(self.scorers) + 1)) / 1000
        environment = {"OMP_NUM_THREADS": str(threads)}
        options: dict[str, object] = {"num_cpus": min(share, 1.0), "runtime_env": {"env_vars": environment}}
        if gpus and self.device == "cuda":
            options["num_gpus"] = gpus
        else:
            environment["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves that to the machine
        actor_class = ray.remote(**options)(cls)

        def start(rank: int) -> W:
            actor = actor_class.remote(*arguments(rank))
            self._actors.append(actor)
            return cast(W, actor)

        def end(actor: W) -> None:
            self._actors.remove(actor)
            ray.kill(actor)

        return WorkerGroup(name, count, start, end)


def worker_share(devices: int, workers: int, scorers: Sequence[float]) -> float:
    """The share of a GPU for each of `workers`, one a GPU, so that processes with the shares `scorers` find a place.

    Raises `ClusterError` if scorers would have to take half a GPU or more from a worker.
    """
    largest = max(scorers, default=0.0)
    count = sum(share > 0 for share in scorers)
    if not count or int(1 / largest) * (devices - workers) >= count:
        return 1.0
    left = round(1 - largest * -(-count // devices), 3)
    if left <= 0.5:  # Ray would put two workers on one GPU
        raise ClusterError(
            f"{count} processes of scorers with up to {largest:g} of a GPU each do not fit beside {workers} workers on "
            f"{devices} GPUs: lower reward.scorers.NAME.gpus or cluster.num_workers"
        )
    return left


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_reachable(address: str) -> None:
    """Raise `OSError` if nothing listens at `host:port`, where Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10).close()


def _why_not_joined(error: Exception) -> str:
    return (
        f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: this Ray cluster cannot be joined ({' '.join(str(error).split())}); "
        "start it, unset the variable to get your own, or set RAY_AUTH_MODE=token if it asks for a token"
    )

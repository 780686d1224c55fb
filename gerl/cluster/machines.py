"""The cluster of a command (embedded Ray, joined Ray, or this process) and the placement of its processes."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from gerl.cluster.gpus import check_gpus
from gerl.cluster.worker_group import WorkerGroup
from gerl.commandline import signals
from gerl.config import ClusterConfig
from gerl.config.blocks import HAS_RAY
from gerl.errors import ClusterError
from gerl.utils.imports import importing

if TYPE_CHECKING:
    from gerl.cluster.ray_session import RaySession

logger = logging.getLogger(__name__)
W = TypeVar("W")  # the class of a worker


class Cluster:
    """Ray session or this process; as a context manager it ends only what it started.

    Joins the cluster at RAY_ADDRESS if set, whose resources are known once entered; otherwise starts an embedded Ray.
    """

    def __init__(self, config: ClusterConfig, scorers: Sequence[float] = (), ray: "RaySession | None" = None) -> None:
        """Store the settings; `scorers`: the GPU share of each of their processes. `ray`: if it is entered already."""
        self.config = config
        self.scorers = list(scorers)
        self.remote = config.launcher == "ray"
        self.joined = self.remote and joins()
        self._ray = ray
        self._ends = contextlib.ExitStack()
        self.gpus = 1.0  # GPU share of a rollout and actor worker: one, minus the shares of scorers beside it
        self.ranks = config.ranks_per_worker
        import torch  # a scorer's process may not need it

        self._resources = {"GPU": float(torch.cuda.device_count()), "CPU": float(_cores()), "nodes": 1.0}
        self.device, self.num_workers = "cpu", config.workers or 1
        if not self.joined:
            check_gpus(config.device)
            self._count()

    def _count(self) -> None:
        there = self._resources["GPU"] >= 1
        if self.config.device == "cuda" and not there:
            seen = "the Ray cluster has" if self.joined else "torch sees"
            raise ClusterError(f"cluster.device=cuda, but {seen} no GPU: use cluster.device=auto or cpu")
        self.device = "cuda" if there and self.config.device != "cpu" else "cpu"
        self.num_workers = self.config.workers or self._default_workers()
        if self.config.layout == "split" and self.device == "cuda" and not self.remote:
            raise ClusterError(
                "cluster.layout=split: on GPUs it needs several processes, and cluster.launcher=local has one; use "
                "cluster.launcher=ray"
            )
        if not all(self.config.roles(self.num_workers)):
            raise ClusterError(
                f"cluster.layout=split: {self.num_workers} worker(s) on {self.device} are too few for it; set both "
                "cluster.rollout_workers and cluster.actor_workers, or use cluster.layout=hybrid"
            )

    def words(self) -> str:
        """Describe workers and device for the log of a starting run."""
        if self.joined:
            return f"{self.config.workers or 'as many as there are GPUs'} on a Ray cluster"
        return f"{self.num_workers} on {self.device}, {self.config.launcher}"

    @property
    def note(self) -> str:
        """Sentence about the processes for the start of a run; empty if there is nothing to say."""
        if self.remote or HAS_RAY:
            return ""
        turns = " and take turns" if self.num_workers > 1 else ""
        return f"Ray is not installed: the workers are in this process{turns}; pip install ray gives each its own"

    @property
    def training(self) -> int:
        """Number of training processes, which are those of the first workers."""
        return self.config.roles(self.num_workers)[0] * self.ranks

    @property
    def processes(self) -> int:
        """Number of processes of all workers; rank `r` of worker `w` is number `w * ranks + r`."""
        return self.num_workers * self.ranks

    def _default_workers(self) -> int:
        if self.device == "cuda":
            workers, left = divmod(int(self._resources["GPU"]), self.ranks)
            if left:
                raise ClusterError(
                    f"cluster.ranks_per_worker={self.ranks} does not divide the {self._resources['GPU']:g} GPUs: "
                    "choose another value, or leave some GPUs unused with cluster.num_workers"
                )
            return workers
        # on a CPU two processes are faster than one with twice the threads, which synchronise at every operation
        most = min(2 * self._resources["nodes"], self._resources["CPU"])
        least = 2 if self.config.layout == "split" else 1
        return max(least, int(most) // self.ranks) if self.remote else least

    def __enter__(self) -> "Cluster":
        with contextlib.ExitStack() as stack:
            if not self.remote:
                import torch

                stack.callback(torch.set_num_threads, torch.get_num_threads())  # workers in this process change it
                self._warn_of_spinning()
            else:
                stack.enter_context(self.ray)
            if self.joined:
                self._resources = self.ray.resources()
                self._count()
            self._check_devices()
            self._ends = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with signals.deferred():  # no process may be left behind
            self._ends.__exit__(kind, error, trace)

    @property
    def ray(self) -> "RaySession":
        """The Ray of this command, imported on first use. Raises `ClusterError` if it cannot be imported."""
        if self._ray is None:
            self._ray = open_ray(self.config)
        return self._ray

    @property
    def own(self) -> bool:
        """Whether this command started Ray."""
        return self.remote and not self.joined

    @property
    def alive(self) -> bool:
        """Whether workers can be called: true without Ray, or while connected to it."""
        return not self.remote or self.ray.alive

    def start_anew(self, error: Exception) -> None:
        """Restart the embedded Ray, which died with `error`; the caller restarts the workers."""
        with signals.deferred():
            self.ray.forget()
            self.__exit__(type(error), error, error.__traceback__)
            self.__enter__()

    def _warn_of_spinning(self) -> None:
        """Warn of slow spinning threads if OpenMP was initialised before gerl could configure it."""
        load = os.getloadavg()[0]
        if self.device == "cpu" and self.threads > 1 and load > _cores() and "OMP_WAIT_POLICY" not in os.environ:
            logger.warning(
                "the machine is busy (a load of %.0f on %d cores), and torch's %d threads, which spin while "
                "waiting for each other, are then many times slower than one: import gerl before torch, or set "
                "OMP_WAIT_POLICY=passive or cluster.threads_per_worker=1",
                *(load, _cores(), self.threads),
            )

    def _check_devices(self) -> None:
        cores = int(self._resources["CPU"])
        if self.device != "cuda":
            if self.processes > max(cores, 1):
                logger.warning(
                    "%d worker processes share %d cores, and each loads the model: fewer are faster and need less "
                    "memory (cluster.num_workers=%d)",
                    *(self.processes, cores, max(1, cores // self.ranks)),
                )
            return
        devices = self.ray.gpus if self.remote else int(self._resources["GPU"])
        if self.processes > devices:
            each = "" if self.ranks == 1 else f" of cluster.ranks_per_worker={self.ranks} GPUs each"
            raise ClusterError(
                f"cluster.num_workers={self.num_workers}{each}, but there are only {devices} GPUs: lower it or use "
                "more GPUs"
            )
        if self.remote:
            self.gpus = worker_share(devices, self.processes, self.scorers)

    def worker_device(self, rank: int) -> str:
        """Return the torch device of worker `rank`; under Ray each worker sees only its own GPU."""
        return "cuda" if self.device == "cuda" and self.remote else f"cuda:{rank}" if self.device == "cuda" else "cpu"

    @property
    def threads(self) -> int:
        """CPU threads of a worker's process, at most OMP_NUM_THREADS or, without Ray, torch's setting."""
        import torch

        share = max(1, int(self._resources["CPU"]) // self.processes)
        configured = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        under_ray = int(configured) if configured.isdigit() and int(configured) else share
        return self.config.threads_per_worker or min(share, under_ray if self.remote else torch.get_num_threads())

    def send_by_value(self, functions: Iterable[Callable[..., object]]) -> None:
        """Pickle `functions` by value for the workers; those of installed packages are imported by name."""
        modules = []
        for function in functions if self.remote else ():
            module = sys.modules.get(getattr(function, "__module__", None) or "__main__", None)
            file = getattr(module, "__file__", None)
            installed = file is None or {"site-packages", "dist-packages"} & set(Path(file).parts)
            if module is not None and not installed and module.__name__ != "__main__":  # pickled by value in any case
                modules.append(module)
        if modules:
            self.ray.send_by_value(modules)

    def workers(
        self,
        name: str,
        cls: type[W],
        count: int,
        arguments: Callable[[int], tuple[object, ...]],
        *,
        gpus: float = 0.0,
        threads: int = 1,
        together: int = 1,
        environment: Mapping[str, object] | None = None,
    ) -> WorkerGroup[W]:
        """Start `count` workers `cls(*arguments(rank))`, each with `threads` CPU threads and a share of a GPU.

        `gpus`: the GPU share of each; without a share a worker sees no GPU. `together`: consecutive workers placed on
        one node if possible, see `Places`. `environment`: of Python, see `environments.runtime_env`. Constructors must
        be light: Ray reports their errors as a dead worker, without the exception. Raises `ClusterError` if a worker
        has no room or its environment cannot be created.
        """
        if not self.remote:
            return WorkerGroup(name, count, lambda rank: cls(*arguments(rank)), None)
        return self.ray.workers(
            *(name, cls, count, arguments),
            gpus=gpus if self.device == "cuda" else 0.0,
            threads=threads,
            together=together,
            environment=environment or {},
            processes=self.processes + len(self.scorers) + 1,
            hide_gpus=self.joined or self._resources["GPU"] > 0,
        )


def joins() -> bool:
    """Whether this command joins a Ray cluster; otherwise it starts a Ray of its own if it needs one."""
    return bool(os.environ.get("RAY_ADDRESS"))


def open_ray(config: ClusterConfig) -> "RaySession":
    """Import Ray and return the session of this command, not entered. Raises `ClusterError` if Ray is missing."""
    try:
        with importing():
            from gerl.cluster.ray_session import RaySession
    except ImportError as error:
        raise ClusterError(
            f"cluster.launcher=ray, or a scorer with an env of its own, needs Ray, which cannot be imported "
            f"({error}): run pip install ray, or use cluster.launcher=local and no reward.scorers.NAME.env"
        ) from error
    return RaySession(config, joins())


def worker_share(devices: int, workers: int, scorers: Sequence[float]) -> float:
    """Return the GPU share of each worker, one per GPU, beside `scorers`. Raises `ClusterError` if half or less."""
    largest = max(scorers, default=0.0)
    count = sum(share > 0 for share in scorers)
    if not count or int(1 / largest) * (devices - workers) >= count:
        return 1.0
    left = round(1 - largest * -(-count // devices), 3)
    if left <= 0.5:  # Ray would put two workers on one GPU
        raise ClusterError(
            f"{count} scorer processes with up to {largest:g} of a GPU each do not fit next to {workers} workers "
            f"on {devices} GPUs: lower reward.scorers.NAME.gpus or cluster.num_workers"
        )
    return left


def own_host() -> str:
    """Return the address at which Ray reaches this machine; the loopback for an embedded Ray."""
    from ray.util import get_node_ip_address  # here: only processes of Ray ask

    return str(get_node_ip_address())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

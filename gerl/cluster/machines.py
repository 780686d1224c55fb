"""The cluster of a command (embedded Ray, joined Ray, or this process) and the placement of its processes."""

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar, cast

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gerl.cluster import health, local_ray, worker_group
from gerl.cluster.health import check_gpus
from gerl.cluster.worker_group import WorkerGroup
from gerl.commandline import signals
from gerl.config import ClusterConfig
from gerl.errors import ClusterError

logger = logging.getLogger(__name__)
W = TypeVar("W")  # the class of a worker


class Cluster:
    """Ray session or this process; as a context manager it ends only what it started.

    Joins the cluster at RAY_ADDRESS if set, whose resources are known once entered; otherwise starts an embedded Ray.
    """

    def __init__(self, config: ClusterConfig, scorers: Sequence[float] = ()) -> None:
        """Store the settings; `scorers`: the GPU share of each of their processes."""
        self.config = config
        self.scorers = list(scorers)
        self.remote = config.launcher == "ray"
        self.joined = self.remote and bool(os.environ.get("RAY_ADDRESS"))
        self._actors: list[object] = []
        self._places: list[Places] = []
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
            if self.remote and not ray.is_initialized():
                options: dict[str, object] = {"log_to_driver": False, "logging_level": logging.ERROR}
                if self.joined:
                    join(os.environ["RAY_ADDRESS"], options)
                    stack.callback(self._leave)
                else:
                    local_ray.start(options, stack)
                stack.enter_context(health.watched(own=not self.joined))
            if self.joined:
                nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
                self._resources = {"GPU": 0.0, "CPU": 1.0, "nodes": float(len(nodes)), **ray.cluster_resources()}
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
    def own(self) -> bool:
        """Whether this command started Ray."""
        return self.remote and not self.joined

    @property
    def alive(self) -> bool:
        """Whether workers can be called: true without Ray, or while connected to it."""
        return not self.remote or bool(ray.is_initialized())

    def start_anew(self, error: Exception) -> None:
        """Restart the embedded Ray, which died with `error`; the caller restarts the workers."""
        with signals.deferred():
            for places in self._places:
                places.forget()
            self.__exit__(type(error), error, error.__traceback__)
            self._actors.clear()
            self.__enter__()
            for places in self._places:
                self._ends.callback(places.close)

    def _leave(self) -> None:
        for actor in self._actors if health.lives() else ():
            ray.kill(actor)
        self._actors = []
        ray.shutdown()

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
        devices = int(ray.cluster_resources().get("GPU", 0)) if self.remote else int(self._resources["GPU"])
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
        given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        under_ray = int(given) if given.isdigit() and int(given) else share
        return self.config.threads_per_worker or min(share, under_ray if self.remote else torch.get_num_threads())

    def send_by_value(self, functions: Iterable[Callable[..., object]]) -> None:
        """Pickle `functions` by value for the workers; those of installed packages are imported by name."""
        for function in functions if self.remote else ():
            module = sys.modules.get(getattr(function, "__module__", None) or "__main__", None)
            file = getattr(module, "__file__", None)
            installed = file is None or {"site-packages", "dist-packages"} & set(Path(file).parts)
            if module is not None and not installed and module.__name__ != "__main__":  # pickled by value in any case
                ray.cloudpickle.register_pickle_by_value(module)

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
        one node if possible, see `Places`. `environment`: of Python, see `worker_group.runtime_env`. Constructors must
        be light: Ray reports their errors as a dead worker, without the exception. Raises `ClusterError` if a worker
        has no room or its environment cannot be created.
        """
        if not self.remote:
            return WorkerGroup(name, count, lambda rank: cls(*arguments(rank)), None)
        # small enough for all processes to fit on the smallest machine, also after others died: the CPU is shared by
        # design, and Ray's accounting must not leave a process without room
        nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
        least = min((cpus for cpus in nodes if cpus), default=1.0)
        share = min(1.0, max(1, int(1000 * least / (self.processes + len(self.scorers) + 1))) / 1000)
        variables = {"OMP_NUM_THREADS": str(threads)}
        python = worker_group.runtime_env(environment or {}, self.config.hang_after, self.joined)
        options: dict[str, object] = {"num_cpus": share, "runtime_env": {"env_vars": variables, **python}}
        needs = {"CPU": share}
        if gpus and self.device == "cuda":
            options["num_gpus"] = needs["GPU"] = gpus
        else:
            variables["CUDA_VISIBLE_DEVICES"] = ""  # Ray would not hide the GPUs
        actor_class = ray.remote(**options)(local_ray.unshielded(cls))
        places: Places | None = None
        spread = together == 1 and "GPU" not in needs  # Ray would fill one node after another
        if together > 1 or self.joined:  # single processes always fit an embedded Ray
            places = Places(name, count, needs, count, ("SPREAD",)) if spread else Places(name, count, needs, together)
            self._ends.callback(places.close)
            self._places.append(places)

        def start(rank: int) -> W:
            place = places.of(rank) if places else "DEFAULT"
            actor = actor_class.options(scheduling_strategy=place).remote(*arguments(rank))
            self._actors.append(actor)
            return cast(W, actor)

        def end(actor: W) -> None:
            if actor in self._actors:  # a hanging worker is ended before it is replaced
                self._actors.remove(actor)
                ray.kill(actor)

        give_back = places.give_back if places is not None and not spread else None
        has_room = places.has_room if places is not None else None
        return WorkerGroup(name, count, start, end, self.config.hang_after, needs, give_back, has_room)


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
    return str(ray.util.get_node_ip_address())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def join(address: str, options: dict[str, object]) -> None:
    """Join the cluster at `address`. Raises `ClusterError` if that is not possible."""
    try:
        host, _, port = address.rpartition(":")
        if port.isdigit() and "/" not in host:  # Ray would wait for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        local_ray.initialize(**options)
    except Exception as error:  # Ray has no common exception for this
        reason = " ".join(str(error).split())
        raise ClusterError(
            f"RAY_ADDRESS={address}: this Ray cluster cannot be joined ({reason}); start it, unset RAY_ADDRESS to "
            "start a local Ray, or set RAY_AUTH_MODE=token if it requires a token"
        ) from error


# --- Placement of a worker's ranks on one node if it has room for them, by Ray's placement groups

PATIENCE = 5.0  # seconds in which Ray creates a group that fits
TOGETHER = ("STRICT_PACK", "PACK")  # on one node, else on as few as possible


class Places:
    """Placement groups for processes that take `share` of Ray's resources each: one group for all, or one per few."""

    def __init__(
        self, name: str, count: int, share: Mapping[str, float], together: int, strategies: Sequence[str] = TOGETHER
    ) -> None:
        """Create groups of `together` consecutive processes. Raises `ClusterError` in seconds without room."""
        self.share, self.together, self.strategies = dict(share), together, strategies
        self._groups: dict[int, PlacementGroup] = {}
        for number in range(count // together):
            label = name if together == count and strategies is not TOGETHER else f"{name} {number}"
            self._groups[number] = self._place(label)

    def of(self, process: int) -> PlacementGroupSchedulingStrategy:
        """Return the placement of a process; requests released room again without waiting."""
        number, index = divmod(process, self.together)
        if number not in self._groups:
            self._groups[number] = placement_group([self.share] * self.together, strategy=self.strategies[-1])
        return PlacementGroupSchedulingStrategy(self._groups[number], index)

    def has_room(self, process: int) -> bool:
        """Whether the placement group of a process is created; the process may still be starting."""
        group = self._groups.get(process // self.together)
        return group is not None and placement_group_table(group)["state"] == "CREATED"

    def give_back(self, process: int) -> None:
        """Release the placement group of a process."""
        if group := self._groups.pop(process // self.together, None):
            remove_placement_group(group)

    def close(self) -> None:
        """Release all placement groups; those of a dead Ray are gone already."""
        for number in list(self._groups) if health.lives() else ():
            self.give_back(number * self.together)

    def forget(self) -> None:
        """Forget all placement groups of a dead Ray."""
        self._groups.clear()

    def _place(self, label: str) -> PlacementGroup:
        for strategy in self.strategies:
            group = placement_group([self.share] * self.together, strategy=strategy)
            if group.wait(PATIENCE):
                return group
            remove_placement_group(group)
        said = no_room(label, self.share, self.together)
        raise ClusterError(f"{said}; lower cluster.num_workers or cluster.ranks_per_worker")


def no_room(name: str, share: Mapping[str, float], count: int = 1) -> str:
    """Describe the resources requested by `count` processes with `share` each, and the free ones."""
    asked = " and ".join(f"{value:g} {key}" for key, value in share.items())
    free = ray.available_resources()
    left = " and ".join(f"{free.get(key, 0.0):g} {key}" for key in share)
    nodes = sum(node["Alive"] for node in ray.nodes())
    return (
        f"Ray has no room for {name}, {count} process{'es' if count > 1 else ''} of {asked}: free are {left} on "
        f"{nodes} nodes"
    )

"""Ray session of a command, embedded or joined, and its workers."""

import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import ModuleType, TracebackType
from typing import TypeVar, cast

import ray

from gerl.cluster import health, local_ray
from gerl.cluster.environments import runtime_env
from gerl.cluster.placement import Places
from gerl.cluster.worker_group import WorkerGroup
from gerl.commandline import signals
from gerl.config import ClusterConfig
from gerl.errors import ClusterError

W = TypeVar("W")  # the class of a worker


class RaySession:
    """Connection to an embedded or joined Ray; keeps one that the process has, and ends only what it started.

    It is reentrant: `Cluster` enters a session that is already open, and the first exit closes it.
    """

    def __init__(self, config: ClusterConfig, joined: bool) -> None:
        self.config, self.joined = config, joined
        self._actors: list[object] = []
        self._places: list[Places] = []
        self._ends: ExitStack | None = None  # None: not entered
        self._started = False  # whether this session started Ray

    def __enter__(self) -> "RaySession":
        """Start or join Ray, unless that is done. Raises `ClusterError` on failure."""
        if self._ends is not None:
            return self
        with ExitStack() as ends:
            if not self.alive:
                options: dict[str, object] = {"log_to_driver": False, "logging_level": logging.ERROR}
                if self.joined:
                    join(os.environ["RAY_ADDRESS"], options)
                    ends.callback(self._leave)
                else:
                    local_ray.start(options, ends)
                    self._started = True
                ends.enter_context(health.watched(_services(), own=not self.joined))
            ends.callback(self._close)
            self._ends = ends.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ends, self._ends = self._ends, None
        if ends is not None:
            with signals.deferred():  # no process may be left behind
                ends.__exit__(kind, error, trace)

    @property
    def alive(self) -> bool:
        """Whether this process is connected to Ray."""
        return bool(ray.is_initialized())

    @property
    def gpus(self) -> int:
        """Number of GPUs of all machines."""
        return int(ray.cluster_resources().get("GPU", 0))

    def resources(self) -> dict[str, float]:
        """Return Ray's resources of all machines, and as `nodes` the number of those for workers."""
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        return {"GPU": 0.0, "CPU": 1.0, "nodes": float(len(nodes)), **ray.cluster_resources()}

    def forget(self) -> None:
        """Forget all workers and placements of a dead Ray."""
        self._actors.clear()
        for places in self._places:
            places.forget()

    def send_by_value(self, modules: Iterable[ModuleType]) -> None:
        """Pickle the functions of `modules` by value for the workers."""
        for module in modules:
            ray.cloudpickle.register_pickle_by_value(module)

    def workers(
        self,
        name: str,
        cls: type[W],
        count: int,
        arguments: Callable[[int], tuple[object, ...]],
        *,
        gpus: float,
        threads: int,
        together: int,
        environment: Mapping[str, object],
        processes: int,
        hide_gpus: bool,
    ) -> WorkerGroup[W]:
        """Start workers, see `Cluster.workers`.

        `processes`: total number of processes that share the CPUs. `hide_gpus`: from workers without a share of one.
        """
        # small enough for all processes to fit on the smallest machine, also after others died: the CPU is shared by
        # design, and Ray's accounting must not leave a process without room
        nodes = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
        least = min((cpus for cpus in nodes if cpus), default=1.0)
        share = min(1.0, max(1, int(1000 * least / processes)) / 1000)
        needs, options = {"CPU": share}, dict[str, object](num_cpus=share)
        if gpus:
            options["num_gpus"] = needs["GPU"] = gpus
        # only what a process would not have anyway: with a `runtime_env` Ray starts Python twice
        variables = {"OMP_NUM_THREADS": str(threads)} if self._threads() != str(threads) else {}
        if hide_gpus and not gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ""  # Ray would not hide the GPUs
        python = runtime_env(environment, self.config.hang_after, self.joined)
        if variables or python:
            options["runtime_env"] = {"env_vars": variables, **python}
        actor_class = ray.remote(**options)(local_ray.unshielded(cls))
        places: Places | None = None
        spread = together == 1 and "GPU" not in needs  # Ray would fill one node after another
        if together > 1 or self.joined:  # single processes always fit an embedded Ray
            places = Places(name, count, needs, count, ("SPREAD",)) if spread else Places(name, count, needs, together)
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

    def _threads(self) -> str | None:
        """Return OMP_NUM_THREADS of Ray's processes: inherited, or 1 for at most one CPU; None if it is not known."""
        return os.environ.get("OMP_NUM_THREADS", "1") if self._started else None

    def _close(self) -> None:
        for places in reversed(self._places):
            places.close()

    def _leave(self) -> None:
        for actor in self._actors if health.lives() else ():
            ray.kill(actor)
        self._actors = []
        ray.shutdown()


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


def _services() -> dict[str, tuple[str, int]]:
    """Return the addresses of the control service, and of the node service of this machine."""
    context = ray.get_runtime_context()
    host, _, port = context.gcs_address.rpartition(":")
    (node,) = (node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    control = (host.strip("[]"), int(port))
    return {health.CONTROL: control, health.NODE: (node["NodeManagerAddress"], node["NodeManagerPort"])}

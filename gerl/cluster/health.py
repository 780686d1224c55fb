"""Checks that Ray's services are alive and that torch can use the GPUs of this machine."""

import contextlib
import logging
import os
import socket
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import ray

from gerl.errors import ClusterError, RayDied

CONTROL, NODE = "Ray's control service (GCS)", "Ray's node service (raylet)"
EVERY = 2.0  # seconds between probes of another machine
OWN = 0.2  # and of this machine
PATIENCE = 30.0  # seconds given to a joined cluster to restart its control service; its workers end after 60 without it


class Health:
    """Probe of `services` (name -> (host, port)); only the control service may be silent for `patience` seconds."""

    def __init__(self, services: dict[str, tuple[str, int]], patience: float, every: float = OWN) -> None:
        self.services, self.patience, self.every = services, patience, every
        self._looked = -every
        self._refused: dict[str, float] = {}  # start of its silence

    def check(self, now: bool = False) -> None:
        """Raise `RayDied` if a service is gone; probes at most every `every` seconds, or `now`."""
        moment = time.monotonic()
        if not now and moment < self._looked + self.every:
            return
        self._looked = moment
        for name, (host, port) in self.services.items():
            if not _refuses(host, port):
                self._refused.pop(name, None)
            elif moment - self._refused.setdefault(name, moment) >= (self.patience if name == CONTROL else 0.0):
                raise RayDied(
                    f"{name} at {host}:{port} is gone, without which Ray cannot run: see the log in its session folder"
                )


_watched: Health | None = None  # a process has a single Ray session


def check(now: bool = False) -> None:
    """Raise `RayDied` if a service of this process's Ray session is gone; probes every few seconds, or `now`."""
    if _watched is not None:
        _watched.check(now)


def lives() -> bool:
    """Whether Ray answers now; calls to an unresponsive Ray would wait forever."""
    return _watched is None or not any(_refuses(*place) for place in _watched.services.values())


@contextlib.contextmanager
def rescuing() -> Iterator[None]:
    """Exclude the control service from `check` in the block: workers outlive it long enough to be saved from."""
    global _watched
    kept = _watched
    if kept is not None:
        _watched = Health({name: place for name, place in kept.services.items() if name != CONTROL}, 0.0, kept.every)
    try:
        yield
    finally:
        _watched = kept


@contextlib.contextmanager
def watched(own: bool) -> Iterator[None]:
    """Let `check` in the block probe the Ray that this process started (`own`) or joined."""
    global _watched
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    services = {CONTROL: (host.strip("[]"), int(port))}
    here = ray.get_runtime_context().get_node_id()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == here)
    services[NODE] = node["NodeManagerAddress"], node["NodeManagerPort"]
    _watched = Health(services, 0.0) if own else Health(services, PATIENCE, EVERY)
    try:
        yield
    finally:
        _watched = None


def _refuses(host: str, port: int) -> bool:
    """Whether the connection is refused; a timeout (slow or distant machine) does not count."""
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


# --- Whether torch can use the GPUs of this machine; if not, the reason and the remedy

logger = logging.getLogger(__name__)
SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
DEVICES = "nvidia[0-9]*"  # in /dev: some containers have no nvidia-smi
INSTALL = "install the torch build for its driver from https://pytorch.org/get-started/locally"


def check_gpus(device: str) -> None:
    """Raise `ClusterError` if CUDA cannot start; if torch has no CUDA, too, or only warn, as `device` is auto."""
    import torch

    if device == "cpu" or torch.version.hip is not None:
        return
    if torch.version.cuda is None:
        if (gpu := _seen()) is None:
            return
        sentence = f"this machine has {gpu}, which torch {torch.__version__} cannot use, as it is built without CUDA"
        if device == "cuda":
            raise ClusterError(f"cluster.device=cuda: {sentence}: {INSTALL}")
        logger.warning("%s: using the CPU; %s, or set cluster.device=cpu", sentence, INSTALL)
    elif torch.cuda.device_count():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            starts = torch.cuda.is_available()  # allocates no GPU memory
        if not starts:
            raise _cannot_start(str(caught[0].message) if caught else "CUDA does not say why")


def start_device(device: str) -> None:
    """Start `device` in this process. Raises `ClusterError` if torch cannot compute on it."""
    import torch

    if device.startswith("cuda"):
        try:
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:  # AssertionError: torch is built without CUDA
            raise _cannot_start(str(error)) from error


def _cannot_start(said: str) -> ClusterError:
    import torch

    first = " ".join(said.split()).split(". ")[0].removesuffix(".")
    return ClusterError(
        f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot start on {_seen() or 'the GPU'} "
        f"({first}): {INSTALL}, or use cluster.device=cpu"
    )


def _seen() -> str | None:
    """Describe the GPUs that the driver shows; None if there are none or they are hidden from this process."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(SMI, capture_output=True, text=True, timeout=10, check=True).stdout
        if lines := shown.strip().splitlines():
            name, _, driver = lines[0].rpartition(",")
            return f"{len(lines)} x {name.strip()} (driver {driver.strip()})"
    return "an NVIDIA GPU" if list(Path("/dev").glob(DEVICES)) else None

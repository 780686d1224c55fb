"""What a worker adds to the dump of a step: its trajectories, its state, and the facts of its machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from gerl.engine.storage import store
from gerl.model.shards import Part, part_of
from gerl.run.checkpoint import WorkerState
from gerl.utils.tensors import pack_tensors, tensors_digest

if TYPE_CHECKING:
    from gerl.workers.worker import PolicyWorker


def packed_trajectory(worker: PolicyWorker, task_id: int) -> tuple[bytes, bytes]:
    """Return a trajectory of this worker as JSON and as a safetensors file. Raises `ReplayError` if it has no form."""
    form, tensors = store(worker.trajectories[task_id])
    return json.dumps(form, separators=(",", ":"), allow_nan=False).encode(), pack_tensors(tensors)


def state_sizes(worker: PolicyWorker) -> tuple[dict[str, int], WorkerState]:
    """Return the bytes of this rank's tensors of the state by name, and its counters."""
    tensors, numbers = worker.actor.state()
    return {name: _part(t).values.nbytes for name, t in tensors.items()}, numbers


def state_parts(worker: PolicyWorker, names: Sequence[str]) -> dict[str, Part]:
    """Return this rank's parts of tensors of its state, in main memory."""
    tensors, _ = worker.actor.state()
    return {name: _part(tensors[name]).copy() for name in names}


def _part(tensor: torch.Tensor) -> Part:
    if isinstance(tensor, DTensor):
        return part_of(tensor)
    return Part(tensor.detach(), (0,) * tensor.ndim, tuple(tensor.shape))


@dataclass(frozen=True)
class Machine:
    """Facts of a worker that the last bits of its results may depend on."""

    device: str  # its kind
    processor: str
    dtype: str
    threads: int


def machine(worker: PolicyWorker) -> Machine:
    """Return the facts of this worker."""
    from gerl.model.loading import precision  # imported lazily: the driver does not need diffusers

    dtype = str(precision(worker.config.model, worker.device)).removeprefix("torch.")
    return Machine(torch.device(worker.device).type, processor(worker.device), dtype, worker.threads)


def processor(device: str) -> str:
    """Return the name of a GPU, or the instruction set that torch uses on a CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}"


def after_update(worker: PolicyWorker) -> tuple[int | None, str | None]:
    """Return the most rows of a replay that fit into memory, and the digest of the trained weights."""
    return worker.actor.most, weights_digest(worker)


def weights_digest(worker: PolicyWorker) -> str | None:
    """Return the digest of the trained weights; None if this rank has only a part of them."""
    values = {name: _part(p).values for name, p in worker.policy.trained.items()}
    if any(values[name].numel() != p.numel() for name, p in worker.policy.trained.items()):
        return None
    return tensors_digest(values)

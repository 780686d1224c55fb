"""Process groups: of all workers for the all-reduce, and of the ranks of a worker."""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gerl.cluster import own_host

TIMEOUT = timedelta(minutes=10)
LOOPBACK = ("127.0.0.1", "::1")


class Meeting:
    """Rendezvous of the workers: rank 0 opens it, and all join at its address.

    It listens only at the address where Ray reaches the machine (the loopback in an embedded Ray), since anyone who can
    reach it can write to it; the machine's own name may resolve to another address.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def open(self) -> str:
        """Listen at a free port; return `host:port`."""
        host = own_host()
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        return f"{host}:{self._socket.getsockname()[1]}"

    def join(self, address: str, rank: int, world_size: int, device: str) -> None:
        """Join the process group (gloo on the CPU, NCCL on GPUs), blocking until all `world_size` ranks have joined."""
        host, _, port = address.rpartition(":")
        if host in LOOPBACK:  # gloo listens at the address that the machine's name resolves to
            loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        mine = None if self._socket is None else self._socket.detach()
        self._socket = None
        store = dist.TCPStore(
            host, int(port), world_size, is_master=mine is not None, timeout=TIMEOUT, master_listen_fd=mine
        )
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)

    def leave(self) -> None:
        """Leave the process group, if there is one, so that another can be joined."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if dist.is_initialized():
            dist.destroy_process_group()


class Ranks:
    """Ranks in lockstep, created by all processes at once; `context`: how many split the tokens of a denoiser call."""

    def __init__(self, device: str, ranks: int, context: int = 1) -> None:
        self.device, kind = device, device.partition(":")[0]
        shape, names = (dist.get_world_size() // ranks, ranks), ("worker", "rank")
        both = init_device_mesh(kind, shape, mesh_dim_names=names)
        self.mesh: DeviceMesh = both["rank"]
        self.peers = both["worker"].get_group()  # the same rank of each worker
        self.context: DeviceMesh | None = None  # with the dimension names that diffusers expects
        if context > 1:
            groups = (dist.get_world_size() // context, 1, context)
            mesh = init_device_mesh(kind, groups, mesh_dim_names=("group", "ring", "ulysses"))
            self.context = mesh["ring", "ulysses"]

    def most(self, count: int) -> int:
        """Return the maximum of `count` over the ranks; a collective call."""
        largest = torch.tensor(count, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.mesh.get_group())
        return int(largest)

    def whole(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the sum of the gradients over the context-parallel ranks; a collective call."""
        if self.context is None:
            return gradients
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.context.get_group("ulysses"))
        parts = flat.split([gradient.numel() for gradient in gradients])
        return [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]

"""The process group of the workers' all-reduce."""

import socket
from datetime import timedelta

import torch.distributed as dist


def free_address() -> str:
    """`tcp://host:port` of a free port of this machine, for `join`."""
    try:
        host = socket.gethostbyname(socket.gethostname())
    except OSError:  # a machine whose own name does not resolve can only have local workers
        host = "127.0.0.1"
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"


def join(address: str, rank: int, world_size: int, device: str) -> None:
    """Join the process group at `address` (gloo on the CPU, NCCL on GPUs); blocks until all `world_size` ranks have."""
    backend = "nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(
        backend, init_method=address, rank=rank, world_size=world_size, timeout=timedelta(minutes=10)
    )

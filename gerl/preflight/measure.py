"""Seconds and memory of a piece of work on a GPU or a CPU, and how the memory grows with its size."""

import contextlib
import gc
import platform
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

T = TypeVar("T")
PROC = Path("/proc")
RESIDENT = ("self/status", "VmRSS")
# the memory limit of a container, of cgroup 2 and 1; a number of bytes, or `max`
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class Usage:
    """Time and memory that a piece of work took.

    `peak`: the most bytes at a time of tensors on the GPU, or on a CPU of the process's resident memory, which holds
    Python and its libraries as well; None where the system does not tell.
    """

    seconds: float
    peak: int | None


def measured(device: str, work: Callable[[], T]) -> tuple[T, Usage]:
    """The result of `work`, and the time and memory it took on `device` (`cpu`, `cuda`, `cuda:0`)."""
    gpu = device.startswith("cuda")
    if gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _reset_peak()
    start = time.perf_counter()
    result = work()
    if gpu:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    return result, Usage(seconds, torch.cuda.max_memory_allocated(device) if gpu else _peak())


def release(device: str) -> None:
    """Give back what was freed, after work that ran out of memory."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def capacity(device: str) -> int | None:
    """Bytes that this process could have, with what it has: of the GPU, or of main memory; None if not known.

    On a CPU that is what the kernel calls available, and at most the limit of the container.
    """
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    available, own = (_kilobytes(PROC / name, key) for name, key in (("meminfo", "MemAvailable"), RESIDENT))
    if available is None or own is None:
        return None
    limits = [int(text) for path in LIMITS if (text := _read(path).strip()).isdecimal()]
    return min([available + own, *limits])


def _kilobytes(path: Path, key: str) -> int | None:
    """The bytes of a line `key:  123 kB`."""
    found = re.search(rf"^{key}:\s*(\d+)", _read(path), re.MULTILINE)
    return 1024 * int(found[1]) if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def _reset_peak() -> None:
    """Let the peak begin anew; where that is not possible it stays that of the whole process."""
    with contextlib.suppress(OSError):
        (PROC / "self/clear_refs").write_text("5", encoding="ascii")


def _peak() -> int | None:
    peak = _kilobytes(PROC / "self/status", "VmHWM")
    if peak is None and resource is not None:
        unit = 1 if platform.system() == "Darwin" else 1024  # macOS counts bytes
        peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak


class Line(NamedTuple):
    """Bytes as a linear function of a size."""

    fixed: float
    slope: float

    def at(self, size: float) -> float:
        """Bytes at `size`."""
        return self.fixed + self.slope * size


def through(points: Mapping[int, float]) -> Line | None:
    """The line through the smallest and the largest size of `points`; None if it is one size, or nothing grew."""
    low, high = min(points, default=0), max(points, default=0)
    if low == high or points[high] <= points[low]:
        return None
    slope = (points[high] - points[low]) / (high - low)
    return Line(points[low] - slope * low, slope)

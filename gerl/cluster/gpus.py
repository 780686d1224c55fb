"""Whether torch can use the GPUs of this machine; where it cannot, why, and what to do about it."""

import logging
import os
import subprocess
import warnings
from pathlib import Path

from gerl.errors import ClusterError

logger = logging.getLogger(__name__)
SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
DEVICES = "nvidia[0-9]*"  # in /dev, where the driver has no nvidia-smi, as in some containers
INSTALL = "install the torch build for its driver from https://pytorch.org/get-started/locally"


def check_gpus(device: str) -> None:
    """Say that torch leaves the GPUs unused because it is built without CUDA: by a warning, if `device` is auto.

    Raises `ClusterError` where that is cuda, or where there is CUDA and it cannot start.
    """
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
    elif torch.cuda.device_count() and (said := _not_available()) is not None:
        raise _cannot_start(said)


def start_device(device: str) -> None:
    """Raise `ClusterError` unless torch can compute on `device`, which is left to the process from then on."""
    import torch

    if device.startswith("cuda"):
        try:
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:  # the latter: torch is built without CUDA
            raise _cannot_start(str(error)) from error


def _cannot_start(said: str) -> ClusterError:
    import torch

    first = " ".join(said.split()).split(". ")[0].removesuffix(".")
    return ClusterError(
        f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot start on {_seen() or 'the GPU'} "
        f"({first}): {INSTALL}, or use cluster.device=cpu"
    )


def _not_available() -> str | None:
    """Why CUDA cannot start; None if it can. No memory of a GPU is taken."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    return str(caught[0].message) if caught else "CUDA does not say why"


def _seen() -> str | None:
    """The GPUs that the driver shows, in words; None if there are none, or they are hidden from this process."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return None
    try:
        lines = subprocess.run(SMI, capture_output=True, text=True, timeout=10, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        lines = []
    if lines:
        name, _, driver = lines[0].rpartition(",")
        return f"{len(lines)} x {name.strip()} (driver {driver.strip()})"
    return "an NVIDIA GPU" if list(Path("/dev").glob(DEVICES)) else None

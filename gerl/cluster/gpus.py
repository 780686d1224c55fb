"""Whether torch can use the GPUs of this machine; if not, the reason and the remedy."""

import contextlib
import logging
import os
import subprocess
import warnings
from pathlib import Path

from gerl.errors import ClusterError

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


def _cannot_start(text: str) -> ClusterError:
    import torch

    first = " ".join(text.split()).split(". ")[0].removesuffix(".")
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

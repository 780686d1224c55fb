"""The folder of an embedded Ray: private to the user, with a path short enough for Ray's sockets."""

import contextlib
import fcntl
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gerl.errors import ClusterError, Interrupted
from gerl.utils.files import reason

logger = logging.getLogger(__name__)
PREFIX, LOCK, RAY = "gerl-ray-", "lock", "r"
LONGEST = 107 if sys.platform == "linux" else 103  # maximum bytes of a socket's path
BELOW = f"/{PREFIX}12345678/{RAY}/session_2026-01-31_12-00-00_123456_1234567/sockets/plasma_store"
KEPT = 24 * 3600.0  # seconds for which the folder of a failed or killed run is kept


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Create a folder for Ray, removed after the block unless an error leaves it; stale folders are removed too.

    It is created in RAY_TMPDIR, else TMPDIR, or in /tmp if that path is too long. Raises `ClusterError` if it cannot be
    created.
    """
    place, kept = _made(Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())), True
    clean(place.parent)
    with (place / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until this process ends
        try:
            yield place / RAY
            kept = False
        except ClusterError:
            logger.info("Ray's logs are kept for a day in %s", place / RAY / "session_latest" / "logs")
            raise
        except Interrupted:
            kept = False
            raise
        finally:
            if not kept:
                shutil.rmtree(place, ignore_errors=True)


def _made(wanted: Path) -> Path:
    """Create a folder of mode 0700 in `wanted`, or in /tmp."""
    bases = [base for base in (wanted.absolute(), Path("/tmp")) if len(os.fsencode(f"{base}{BELOW}")) <= LONGEST]
    said = "" if wanted.absolute() in bases else f"TMPDIR={wanted} is too long a path for Ray's sockets, and "
    for base in bases:
        try:
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        except OSError as error:
            said += f"no folder can be created in {base} ({reason(error)}), and "
    raise ClusterError(f"{said}Ray needs one: set RAY_TMPDIR to a folder with a short path, or free up space there")


def clean(base: Path) -> None:
    """Remove folders of this user in `base` that are at least a day old and whose process has ended."""
    for old in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or removed meanwhile
            lock = old / LOCK
            if old.stat().st_uid != os.getuid() or time.time() - lock.stat().st_mtime < KEPT:
                continue
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old, ignore_errors=True)

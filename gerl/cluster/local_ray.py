"""An embedded Ray on this machine, private to this process tree, which ends with the command.

It listens on the loopback only and requires a token. Its processes ignore the signals that a terminal, timeout(1),
SLURM and systemd send to all processes of a command: they must live until the last finished step is saved.
"""

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import ray
from ray._private import ray_constants, services
from ray._private.node import Node
from ray._raylet import Config  # type: ignore[attr-defined]

from gerl.cluster import reaper
from gerl.cluster.reaper import MARK, kill
from gerl.commandline import signals
from gerl.errors import ClusterError, Interrupted
from gerl.utils.files import reason

logger = logging.getLogger(__name__)
ATTEMPTS = 2  # attempts to start Ray, whose timeout of 30 s is short on a busy machine
LOOPBACK = "127.0.0.1"
TOKEN = secrets.token_hex(32)  # of all clusters of this process: Ray reads it once
# methods of Ray's node that start autoscaler, log monitor and dashboard server, which are not used: each takes a second
# of CPU time, and Ray waits for the dashboard at start
SERVICES = ("start_monitor", "start_log_monitor", "start_api_server")
LINUX = sys.platform == "linux"
W = TypeVar("W")  # the class of a worker


def start(options: dict[str, object], ends: contextlib.ExitStack) -> None:
    """Start Ray with `options` of `ray.init`; what ends it is added to `ends`. Raises `ClusterError` on failure."""
    mark, place = f"{os.getpid()}-{secrets.token_hex(8)}", ends.enter_context(folder())
    ends.enter_context(signals.before_leaving(lambda: kill(mark)))
    ends.callback(_end, mark)
    options = {"address": "local", "include_dashboard": False, "_temp_dir": str(place), **options}
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _guard(mark)
            # Ray uses the loopback on macOS and Windows; on Linux it has no option for that
            with contextlib.ExitStack() as while_starting:
                for service in filter(partial(hasattr, Node), SERVICES):
                    while_starting.enter_context(_replaced(Node, service, lambda *_, **__: None))
                while_starting.enter_context(_replaced(ray_constants, "ENABLE_RAY_CLUSTER", False))
                while_starting.enter_context(_replaced(services, "start_ray_process", _start_process))
                while_starting.enter_context(environment(_variables(mark)))
                while_starting.enter_context(shielded())
                initialize(**options)
            break
        except Exception as error:  # Ray raises a plain Exception on a start-up timeout
            if attempt == ATTEMPTS or not _may_pass(error):
                raise ClusterError(f"Ray failed to start ({_short(error)}): {_remedy(error, place)}") from error
            logger.warning("Ray failed to start (%s): retrying once", _short(error))
            _end(mark)
    addresses = {node["NodeManagerAddress"] for node in ray.nodes()}
    if addresses != {LOOPBACK}:
        raise ClusterError(
            f"ray {ray.__version__} listens on {', '.join(addresses)}, not only on the loopback interface: install "
            "another version, or use cluster.launcher=local"
        )


_start_ray_process = services.start_ray_process


def _start_process(*arguments: object, **options: object) -> object:
    """Start a process of Ray, which a signal must not interrupt: until it has its environment, `kill` misses it."""
    with signals.deferred():
        return _start_ray_process(*arguments, **options)


def _may_pass(error: Exception) -> bool:
    """Whether a second attempt may succeed, because the first one or a service timed out."""
    lasting = isinstance(error, TypeError | ValueError | ImportError | OSError)
    return isinstance(error, ConnectionError | TimeoutError) or not lasting


def _remedy(error: Exception, place: Path) -> str:
    if _may_pass(error):
        return "try again when the machine is less busy, or use cluster.launcher=local"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"free up space for {place}, or set RAY_TMPDIR to a folder on another disk"
    if isinstance(error, OSError):
        return f"its folder is {place}: set RAY_TMPDIR to another one, or use cluster.launcher=local"
    return "revert any changes to Ray (variables RAY_..., its version), or use cluster.launcher=local"


def _guard(mark: str) -> None:
    """Start a process that ends Ray's processes if this one dies without doing so (kill -9)."""
    if not LINUX:
        return
    command = [sys.executable, "-I", "-S", reaper.__file__, mark]
    environ = {**os.environ, MARK: mark}  # marks it as one of the processes that `kill` ends
    pipe, null = subprocess.PIPE, subprocess.DEVNULL  # the pipe ends with this process
    guard = subprocess.Popen(command, env=environ, stdin=pipe, stdout=null, stderr=null, start_new_session=True)
    _guards.append(guard)


_guards: list["subprocess.Popen[bytes]"] = []  # their pipes must stay open


def _end(mark: str) -> None:
    if LINUX:
        node = getattr(ray._private.worker, "_global_node", None)
        if node is not None:  # Ray would end one after the other by SIGTERM, which they ignore
            node.kill_all_processes = lambda **_: None
    ray.shutdown()
    kill(mark)
    while _guards:
        _guards.pop().communicate()


def initialize(**options: object) -> None:
    """Call `ray.init`, restoring the signal handlers of Python and C."""
    with _replaced(ray_constants, "RAY_DISABLE_FAILURE_SIGNAL_HANDLER", True), signals.kept():
        ray.init(**options)
    worker = ray._private.worker
    # error of a call that nobody waits for any more (its worker died), which Ray would print
    worker._unhandled_error_handler = partial(logger.debug, "a call that is no longer needed failed: %s")
    worker.print_to_stdstream = lambda data, *rest, **named: data.get("pid") == "raylet" or _print(data, *rest, **named)


_print = ray._private.worker.print_to_stdstream


def _variables(mark: str) -> dict[str, str]:
    """Return the environment variables of Ray's processes, without those the user has set."""
    values = {
        MARK: mark,
        "RAY_AUTH_MODE": "token",
        "SPT_NOENV": "1",  # Ray's agents would overwrite the environment that identifies them with their titles
        "RAY_worker_niceness": "0",  # Ray would lower the priority of its workers, which do all the computation
        # Ray would start a process per core in advance, unusable for workers, which have an environment of their own
        "RAY_prestart_worker_first_driver": "0",
        "RUNTIME_ENV_RETRY_TIMES": "1",  # Ray would retry a failing environment three times, minutes each
    }
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        values["RAY_AUTH_TOKEN"] = TOKEN
    return values


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set unset environment variables, which Ray reads at start and its processes inherit."""
    new = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(new)
    Config.initialize("")  # Ray has read it at import
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


_shield = threading.local()


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Block `signals.NUMBERS` in processes started by this thread during the block, and in their children."""
    _install()
    _shield.active = True
    try:
        yield
    finally:
        _shield.active = False


@cache
def _install() -> None:
    def before() -> None:
        if getattr(_shield, "active", False):
            _shield.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals.NUMBERS)

    def after() -> None:
        if getattr(_shield, "active", False):
            signal.pthread_sigmask(signal.SIG_SETMASK, _shield.mask)

    os.register_at_fork(before=before, after_in_parent=after)


def unshielded(cls: type[W]) -> type[W]:
    """Return a subclass that ignores `signals.NUMBERS` by handlers, which a scorer's own processes do not inherit."""

    class Worker(cls):  # type: ignore[valid-type, misc]
        def __init__(self, *arguments: object) -> None:
            for number in signals.NUMBERS:
                signal.signal(number, lambda number, frame: None)
                signal.siginterrupt(number, False)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.NUMBERS)
            super().__init__(*arguments)

    Worker.__name__ = Worker.__qualname__ = cls.__name__
    return Worker


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# --- The folder of an embedded Ray: private to the user, with a path short enough for Ray's sockets

PREFIX, LOCK, RAY = "gerl-ray-", "lock", "r"
LONGEST = 107 if sys.platform == "linux" else 103  # maximum bytes of a socket's path
BELOW = f"/{PREFIX}12345678/{RAY}/session_2026-01-31_12-00-00_123456_1234567/sockets/plasma_store"
KEPT = 24 * 3600.0  # seconds before the folder of a failed or killed run is removed


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Create a folder for Ray, removed after the block unless an error leaves it, and remove stale ones."""
    place, succeeded = _made(Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())), True
    clean(place.parent)
    with (place / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until this process ends
        try:
            yield place / RAY
            succeeded = False
        except ClusterError:
            logger.info("Ray's logs are kept for a day in %s", place / RAY / "session_latest" / "logs")
            raise
        except Interrupted:
            succeeded = False
            raise
        finally:
            if not succeeded:
                shutil.rmtree(place, ignore_errors=True)


def _made(wanted: Path) -> Path:
    bases = [base for base in (wanted.absolute(), Path("/tmp")) if len(os.fsencode(f"{base}{BELOW}")) <= LONGEST]
    problems = "" if wanted.absolute() in bases else f"TMPDIR={wanted} is too long a path for Ray's sockets, and "
    for base in bases:
        try:
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        except OSError as error:
            problems += f"no folder can be created in {base} ({reason(error)}), and "
    raise ClusterError(f"{problems}Ray needs one: set RAY_TMPDIR to a folder with a short path, or free up space there")


def clean(base: Path) -> None:
    """Remove folders of this user in `base` that are at least a day old and whose process has ended."""
    for old in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or already removed
            lock = old / LOCK
            if old.stat().st_uid != os.getuid() or time.time() - lock.stat().st_mtime < KEPT:
                continue
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old, ignore_errors=True)

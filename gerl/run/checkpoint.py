"""Checkpoints on disk (complete or absent, never pickle), the run state in them, and the lock of a run folder."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from pydantic import ConfigDict, TypeAdapter, ValidationError

from gerl.config.bounded_text import MALFORMED, read_json, regular
from gerl.errors import CheckpointError, ConfigError
from gerl.run.card import secrets
from gerl.utils.files import file_digest, reason

# --- Checkpoints on disk: complete or absent, verified when read, never pickle.
#
# A checkpoint is the folder `step_N` with the caller's files, `state.json` and `manifest.json` (the number of the
# format, and sha256 and size of each file).

log = logging.getLogger(__name__)

STATE = "state.json"
MANIFEST = "manifest.json"
FORMAT = 3  # of the files of a checkpoint, in its manifest


class NewerFormat(CheckpointError):
    """The checkpoint is intact but written in a newer format."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files matched its manifest when it was loaded."""

    path: Path
    step: int
    state: dict[str, Any]
    files: tuple[str, ...]  # relative names, without state.json and manifest.json
    format: int = FORMAT

    def read(self, name: str) -> bytes:
        """Read the file `name`; raises `CheckpointError` if it is missing or unreadable."""
        if name not in self.files:
            raise CheckpointError(
                f"{self.path}: there is no file {name!r}; it contains {', '.join(self.files) or 'none'}"
            )
        with _reading(self.path, name):
            return regular(self.path / name).read_bytes()


def save_checkpoint(
    root: Path,
    step: int,
    files: dict[str, bytes],
    state: dict[str, Any],
    fill: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Write `root/step_N` as a whole or not at all, and return its path.

    files: relative name with forward slashes -> content. state: JSON values; keys come back as strings. fill: writes
    further files into the folder, which has a temporary name until it is complete. An existing checkpoint of this step
    is then replaced. Raises `CheckpointError` if it cannot be written.
    """
    for name in files:
        if not _is_relative(name) or name in (STATE, MANIFEST):
            raise ValueError(
                f"file name {name!r}: expected a path inside the checkpoint other than {STATE} and {MANIFEST}"
            )
    contents = {**files, STATE: json.dumps(state, indent=1).encode()}
    listed = {name: {"sha256": hashlib.sha256(c).hexdigest(), "size": len(c)} for name, c in contents.items()}
    target = root / f"step_{step}"
    temporary: Path | None = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".tmp-step_{step}-", dir=root))
        # mkdtemp makes private folders; a checkpoint is as readable as the run folder
        temporary.chmod(root.stat().st_mode & 0o777)
        fill(temporary)
        for path in sorted(p for p in temporary.rglob("*") if p.is_file()):
            _sync(path, os.O_RDWR)
            name = path.relative_to(temporary).as_posix()
            listed[name] = {"sha256": file_digest(path), "size": path.stat().st_size}
        manifest = {"format": FORMAT, "step": step, "files": listed}
        contents[MANIFEST] = json.dumps(manifest, indent=1).encode()
        if secrets(state.get("settings", {})):
            (temporary / STATE).touch(0o600)
        for name, content in contents.items():
            _write(temporary / name, content)
        for folder in (f for f in temporary.rglob("*") if f.is_dir()):
            _sync(folder)
        _sync(temporary)
        _put_in_place(temporary, target)
        _sync(root)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {target} cannot be written: {reason(error)}; no part of it was kept"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    written = Checkpoint(target, step, json.loads(contents[STATE]), tuple(name for name in listed if name != STATE))
    with contextlib.suppress(OSError):
        _sound[target] = _stats(target), written
    return target


def load_checkpoint(path: Path, verify: bool = True) -> Checkpoint:
    """Open a checkpoint and verify every file against the manifest; `CheckpointError` names a damaged file.

    `verify`: False reads only its state.
    """
    manifest = _read_json(path, MANIFEST)
    number = manifest.get("format")
    if type(number) is not int:
        raise _damaged(path, f"{MANIFEST} has no usable format: {number!r}")
    if number < FORMAT:
        raise _damaged(path, f"it has the format {number} written by an older gerl; this version reads {FORMAT}")
    if number > FORMAT:
        raise NewerFormat(
            f"the checkpoint {path} was written by a newer gerl (format {number}; this one supports up to "
            f"{FORMAT}): update gerl"
        )
    try:
        step = int(manifest["step"])
        expected = {str(name): (str(e["sha256"]), int(e["size"])) for name, e in manifest["files"].items()}
    except MALFORMED as error:
        raise _damaged(path, f"{MANIFEST} is not a list of files") from error
    if STATE not in expected:
        raise _damaged(path, f"{MANIFEST} does not list {STATE}")
    for name, (digest, size) in expected.items() if verify else ():
        if not _is_relative(name):
            raise _damaged(path, f"{name!r} lies outside it")
        with _reading(path, name):
            if (path / name).stat().st_size != size or file_digest(path / name) != digest:
                raise _damaged(path, f"{name} has changed since it was written (SHA-256 differs from the manifest)")
    return Checkpoint(path, step, _read_json(path, STATE), tuple(name for name in expected if name != STATE), number)


def models_in(folder: Path) -> dict[str, Path]:
    """Return the names of the models that diffusers wrote into subfolders of a checkpoint or another folder."""
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/config.json"))}


def checkpoint_paths(root: Path) -> list[Path]:
    """Return the checkpoint folders under `root`, unverified, in the order of their steps."""
    by_step: dict[int, Path] = {}
    # `.old-` marks a checkpoint being replaced by one of the same step: it counts if that was interrupted, and sorts
    # before the other
    for folder in sorted(root.glob("*step_*")) if root.is_dir() else []:
        match = re.fullmatch(r"(?:\.old-)?step_(\d+)", folder.name)
        if match and folder.is_dir():
            by_step[int(match[1])] = folder
    return [by_step[step] for step in sorted(by_step)]


def newest_checkpoint(root: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint under `root`, or None if there is none at all.

    Damaged ones are logged as warnings. Raises `CheckpointError` if all are damaged, or if the newest intact one has a
    newer format: an older checkpoint would undo what a newer gerl has trained.
    """
    reasons = []
    for path in reversed(checkpoint_paths(root)):
        try:
            return load_checkpoint(path)
        except NewerFormat:
            raise
        except CheckpointError as error:
            log.warning("%s; trying the previous checkpoint", error)
            reasons.append(str(error))
    if reasons:
        raise CheckpointError(
            f"no checkpoint under {root} can be used ({'; '.join(reasons)}); start a new run with "
            "checkpoint.resume=never"
        )
    return None


def intact_checkpoints(
    root: Path, level: int = logging.DEBUG, load: Callable[[Path], Checkpoint] = load_checkpoint
) -> list[Checkpoint]:
    """Return the checkpoints under `root` that `load` opens, in the order of their steps; others are logged."""
    intact = []
    for path in checkpoint_paths(root):
        try:
            intact.append(load(path))
        except CheckpointError as error:
            log.log(level, "%s; it is skipped", error)
    return intact


def remove_checkpoints(root: Path, doomed: Iterable[Path]) -> None:
    """Delete the checkpoints `doomed`, and what interrupted writes have left under `root`."""
    left = [p for p in root.glob(".old-step_*") if p.with_name(p.name.removeprefix(".old-")).exists()]
    for path in [*doomed, *root.glob(".tmp-step_*"), *left]:
        try:
            shutil.rmtree(path)
            _sound.pop(path, None)
        except OSError as error:
            log.warning("%s is no longer needed but cannot be deleted: %s", path, reason(error))


def find_run_to_resume(experiment_dir: Path) -> Path | None:
    """Return the run folder below `experiment_dir` that was written last, or None.

    This is the folder with the newest checkpoint, or that of a running run which started later.
    """
    runs = []
    for run in sorted(experiment_dir.iterdir()) if experiment_dir.is_dir() else []:
        paths, started = checkpoint_paths(run / "checkpoints"), alive_since(run)
        if paths or started is not None:
            # the folder's name (its time) decides if copying has lost the file times
            written = 0
            with contextlib.suppress(OSError):
                written = (paths[-1] / MANIFEST).stat().st_mtime_ns if paths else 0
            runs.append((max(written, started or 0), run.name, run))
    return max(runs)[2] if runs else None


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path, mode: int = os.O_RDONLY) -> None:
    descriptor = os.open(path, mode)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(temporary: Path, target: Path) -> None:
    aside = target.with_name(f".old-{target.name}")
    # a folder cannot be renamed over a non-empty one: the old one is renamed first; `checkpoint_paths` finds it if the
    # process dies in between
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    try:
        temporary.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _is_relative(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\\" not in name


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {path} is damaged: {why}")


@contextlib.contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise _damaged(path, f"{name!r} is missing") from None
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path}: {name!r} cannot be read: {reason(error)}") from error


def _read_json(path: Path, name: str) -> dict[str, Any]:
    with _reading(path, name):
        try:
            value = read_json(path / name)
        except ValueError as error:
            raise _damaged(path, f"{name!r} is not valid JSON") from error
    if not isinstance(value, dict):
        raise _damaged(path, f"{name!r} is not a JSON object")
    return value


_sound: dict[Path, tuple[object, Checkpoint]] = {}  # that this process has written or verified, with their `_stats`


def verified(path: Path) -> Checkpoint:
    """Return a checkpoint that this process has written or verified and that is unchanged, else load it."""
    with _reading(path, "a file"):
        stats = _stats(path)
    if path not in _sound or _sound[path][0] != stats:
        _sound[path] = stats, load_checkpoint(path)
    return _sound[path][1]


def _stats(path: Path) -> dict[Path, tuple[int, int]]:
    stats = {file: file.stat() for file in path.rglob("*") if file.is_file()}
    return {file: (stat.st_size, stat.st_mtime_ns) for file, stat in stats.items()}


# --- The state of a run between trainer steps, `state.json` of a checkpoint

EXTENSIONS = "extensions"  # the folder of a checkpoint with the states of extensions that are no JSON
PARTS = "state"  # the folder of a checkpoint with the parts of trained weights
FROZEN = ".frozen"  # one with parts of weights that are not trained, until the denoisers are written
STRICT = ConfigDict(strict=True)  # a number that was written as text is damage


@dataclass
class ScheduleState:
    """Progress of the learning-rate schedule; the rest follows from the configuration."""

    __pydantic_config__ = STRICT

    last_epoch: int  # optimizer steps taken, with those that were skipped


@dataclass
class WorkerState:
    """State of a worker besides its tensors."""

    __pydantic_config__ = STRICT

    policy_version: int  # optimizer steps taken
    averages: dict[str, int]  # name of an average of the weights -> its updates
    old_is_current: bool  # the old policy holds the trained weights
    lr_schedule: ScheduleState
    roles: dict[str, "WorkerState"] = field(default_factory=dict)  # of the other roles of an episode


WorkerFiles = tuple[dict[str, bytes], WorkerState]  # a LoRA's files of a checkpoint, and the counters


@dataclass
class RunState:
    """State of a run besides the tensors of its workers; JSON values, and bytes in `extensions`."""

    __pydantic_config__ = STRICT

    step: int = 0  # finished trainer steps
    finished: bool = False  # there is nothing left to do
    policy_version: int = 0  # optimizer steps taken
    nonfinite: int = 0  # updates that were skipped because their gradient was not finite
    checked: str = ""  # digest of the settings with which the gradient was checked, see `Update.check_gradient`
    val_reward: float | None = None  # of the validation after this very step, if there was one
    val_metrics: dict[str, float] = field(default_factory=dict)  # its metrics, without those that are not finite
    signals: list[str] = field(default_factory=list)  # keys of the guard's signals when it last judged
    unlogged: dict[str, float] = field(default_factory=dict)  # of a step that is trained, but not validated and logged
    worker: WorkerState | None = None  # of one worker, which stands for all; None: nothing is saved yet
    kl_coef: float | None = None  # the weight of the KL that the guard has raised; None: algorithm.kl_coef
    returns: list[int] = field(default_factory=list)  # steps to which the guard has taken the run back, in order
    algorithm: dict[str, Any] = field(default_factory=dict)  # see `Algorithm.state`
    identity: dict[str, str] = field(default_factory=dict)  # digests of the prompts and of the base weights
    extensions: dict[str, Any] = field(default_factory=dict)  # by name, see `Extension.state`
    settings: dict[str, Any] = field(default_factory=dict)  # see `settings_of`

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values for `save_checkpoint`, without the contents of `files`."""
        plain = {name: state for name, state in self.extensions.items() if not isinstance(state, bytes)}
        return asdict(replace(self, extensions=plain))

    @property
    def files(self) -> dict[str, bytes]:
        """States of extensions that are files of a checkpoint."""
        states = self.extensions.items()
        return {f"{EXTENSIONS}/{name}.safetensors": state for name, state in states if isinstance(state, bytes)}

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "RunState":
        """Read the state of a checkpoint; raises `CheckpointError` if a value is missing or has the wrong type."""
        try:
            state = TypeAdapter(cls).validate_json(json.dumps(checkpoint.state))
            unusable = "worker" if state.worker is None else ""
            unusable = unusable or ("step" if state.step != checkpoint.step or state.step < 0 else "")
            paths = [PurePosixPath(name) for name in checkpoint.files if name.startswith(f"{EXTENSIONS}/")]
            state.extensions |= {path.stem: checkpoint.read(str(path)) for path in paths}
        except ValidationError as error:
            unusable = ".".join(map(str, error.errors()[0]["loc"]))
        if unusable:
            raise CheckpointError(
                f"{checkpoint.path} cannot be resumed: its state.json has no usable {unusable}; resume another one, or "
                "start a new run with checkpoint.resume=never"
            )
        return state


# --- The lock of a run folder: no two runs write into it

NAME = "run.lock"
ATTEMPTS, PAUSE = 10, 0.02  # `holder` takes the lock for an instant


class RunLock:
    """Exclusive write access to a run folder, from `acquire` to `release` or the end of the process.

    The operating system locks the file `run.lock`; its content is only for messages. Child processes do not inherit the
    lock: Python closes files on exec.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / NAME
        self._file: BinaryIO | None = None

    def acquire(self) -> None:
        """Lock an existing folder.

        Raises `ConfigError`: another process holds the lock; the message names host, process and time; `OSError`: the
        folder cannot be written.
        """
        for _ in range(ATTEMPTS):
            file = self.path.open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                time.sleep(PAUSE)
                continue
            except OSError as error:  # some network file systems have no locks
                log.warning(
                    "%s cannot be locked (%s): do not start a second run in it", self.path.parent, reason(error)
                )
            # the previous holder may have removed the opened file
            if self._is_at_path(file):
                file.truncate(0)
                since = datetime.now().astimezone().isoformat(" ", timespec="seconds")
                holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
                file.write(json.dumps(holder).encode())
                file.flush()
                self._file = file
                return
            file.close()
        raise ConfigError(
            f"{self.path.parent}: its run is still alive ({_said(self.path)}); wait for its end or stop it, or "
            "start another run with its own hydra.run.dir and checkpoint.resume=never"
        )

    def release(self) -> None:
        """Release the lock and remove its file; does nothing without a lock."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a leftover lock file is harmless
                if self._is_at_path(self._file):
                    self.path.unlink()
            self._file.close()
            self._file = None

    def _is_at_path(self, file: BinaryIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False


def alive_since(run_dir: Path) -> int | None:
    """Return the start of the running run of a folder, in ns as `st_mtime_ns`; None if none is running."""
    try:
        with (run_dir / NAME).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        pass
    return None


def _said(path: Path) -> str:
    try:
        values = read_json(path)
        return f"process {values['pid']} on {values['host']}, since {values['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"

"""The run folder: a new one, or that of the run to carry on, and what both runs must have in common."""

import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from gerl.commandline.composition import Composed
from gerl.config import Config
from gerl.config.changes import CONTENT, Change
from gerl.config.reading import typed
from gerl.data.sources import digest
from gerl.errors import CheckpointError, ConfigError
from gerl.run.checkpoint import Checkpoint, checkpoint_paths
from gerl.run.control import clear
from gerl.run.lock import RunLock
from gerl.utils.files import write_file

logger = logging.getLogger("gerl")
CURRENT = "config.yaml"


def identity(config: Config) -> dict[str, str]:
    """Digests of the prompts, which a resumed run must share with the one that wrote the checkpoint, by key."""
    given = dict(zip(CONTENT, (config.data.train, config.validation.data, config.data.regularise), strict=True))
    return {key: digest(value, config.data, key) for key, value in given.items() if value}


def check_identity(checkpoint: Checkpoint, found: dict[str, str]) -> None:
    """Raise `CheckpointError` if a digest is not the one the checkpoint has; one that it lacks is not compared."""
    saved = checkpoint.state.get("identity")
    known = saved if isinstance(saved, dict) else {}
    changed = [key for key, value in found.items() if known.get(key, value) != value]
    if changed:
        raise CheckpointError(
            f"{checkpoint.path} cannot be resumed: the content of {' and '.join(changed)} has changed since then; "
            "restore it, or start a new run with checkpoint.resume=never"
        )


@dataclass
class RunFolder:
    """The folder of a run that is about to start, its configuration, and the checkpoint it carries on from, if any.

    As a context manager it gives the lock of the folder back, which a resumed run has from the beginning and a new one
    from `open` on.
    """

    composed: Composed
    lock: RunLock
    checkpoint: Checkpoint | None = None
    changes: Sequence[Change] = ()
    before: str = ""  # the configuration up to the checkpoint, as `config.yaml` has it
    accepted: bool = False  # this run may write into the folder: nothing is left that could refuse it
    begin: Callable[[], None] = field(default=lambda: None, repr=False)  # called once it is accepted

    @property
    def path(self) -> Path:
        return self.composed.run_dir

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lock.release()

    def open(self, begin: Callable[[], None] = lambda: None) -> None:
        """Make the folder of a new run and write `config.yaml`; a resumed run's is left as it is until `carry_on`.

        `begin` is called as soon as the run may write into the folder: in here for a new run, else by `carry_on`.
        Raises `ConfigError` if the folder cannot be written, or is that of another run.
        """
        if self.checkpoint is None:
            prepare_folder(self.path, self.composed, self.lock)
            self.accepted = True
            begin()
        else:
            self.begin = begin

    def carry_on(self) -> None:
        """Write the configuration of a resumed run whose state is loaded, and keep what was there.

        `config.step_N.yaml` is the configuration up to step N, `config.yaml` the one from then on. What the run had
        after the checkpoint's step is repeated: checkpoints and configurations of those steps go to `abandoned/`, and
        validations to be drawn again go with them.
        """
        if self.checkpoint is None:
            return
        step, self.accepted = self.checkpoint.step, True
        self.begin()
        set_aside(self.path, step)
        kept, text = self.path / f"config.step_{step}.yaml", self.composed.yaml()
        if self.changes and not kept.exists():
            write_file(kept, self.before)
        if text != (self.path / CURRENT).read_text(encoding="utf-8"):
            write_file(self.path / CURRENT, text)
        logger.info("resumed from %s", self.checkpoint.path)
        if self.changes:
            logger.info("resumed with changes: %s", ", ".join(map(str, self.changes)))


def prepare_folder(run_dir: Path, composed: Composed, lock: RunLock) -> None:
    """Create the run folder, lock it and write `config.yaml`; raises `ConfigError` if that is not possible."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        clear(run_dir)
        if checkpoint_paths(run_dir / "checkpoints"):
            raise ConfigError(
                f"hydra.run.dir={run_dir}: it contains a run with checkpoints; choose another folder, or resume "
                f"that run with {typed({'checkpoint.resume': str(run_dir)})}"
            )
        (run_dir / CURRENT).write_text(composed.yaml(), encoding="utf-8")
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(
            f"hydra.run.dir={run_dir}: the run folder cannot be written ({reason}); choose another folder"
        ) from None


def configuration_at(run_dir: Path, step: int) -> Path:
    """The file of the configuration with which a run went on from `step`."""
    later = [number for number in _replaced(run_dir) if number > step]
    return run_dir / (f"config.step_{min(later)}.yaml" if later else CURRENT)


def set_aside(run_dir: Path, step: int, drawn_too: bool = False) -> None:
    """Move what belongs to steps after `step` to `abandoned/after_step_N`.

    What was only drawn there is removed, unless `drawn_too`.
    """
    checkpoints = {int(p.name.rpartition("_")[2]): p for p in checkpoint_paths(run_dir / "checkpoints")}
    moved = {f"checkpoints/step_{number}": path for number, path in checkpoints.items() if number > step}
    configurations = (f"config.step_{number}.yaml" for number in _replaced(run_dir) if number > step)
    moved |= {name: run_dir / name for name in configurations}
    drawn = [path for name in ("validation", "samples") for path in (run_dir / name).glob("*") if _step(path) > step]
    if not moved and not (drawn_too and drawn):
        for path in drawn:
            path.unlink()
        return
    place, number = run_dir / "abandoned" / f"after_step_{step}", 1
    while place.exists():
        number += 1
        place = place.with_name(f"after_step_{step}_{number}")
    for name in ("checkpoints", "validation", "samples"):
        (place / name).mkdir(parents=True)
    for name, path in {**moved, **{str(path.relative_to(run_dir)): path for path in drawn}}.items():
        path.rename(place / name)
    for name in (CURRENT, "metrics.jsonl", "guard.jsonl"):
        if (run_dir / name).exists():
            shutil.copyfile(run_dir / name, place / name)
    logger.info("the run returns to step %d: its later data is in %s", step, place)


def _step(picture: Path) -> int:
    """The step in the name of a file of a validation; -1: there is none."""
    match = re.search(r"_(\d+)\.\w+$", picture.name)
    return int(match[1]) if match else -1


def _replaced(run_dir: Path) -> list[int]:
    """The steps up to which there is a configuration of its own."""
    matches = (re.fullmatch(r"config\.step_(\d+)\.yaml", path.name) for path in run_dir.glob("config.step_*.yaml"))
    return [int(match[1]) for match in matches if match]

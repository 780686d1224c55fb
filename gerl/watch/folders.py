"""The run folders that a page shows."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gerl.errors import GerlError

MARKS = ("config.yaml", "metrics.jsonl")
DEPTH = 4  # outputs/EXPERIMENT/sweeps/TIME/RUN
MOST = 2000  # run folders


def is_run(folder: Path) -> bool:
    """Whether a run has written into `folder`."""
    return any((folder / name).is_file() for name in MARKS)


@dataclass(frozen=True)
class Folders:
    """All run folders below `root`, by their path from there; `chosen` is the one that was asked for."""

    root: Path
    chosen: str | None = None

    @classmethod
    def of(cls, given: Path) -> "Folders":
        """Those of a run folder and the ones beside it, or of a folder with runs in it; raises `GerlError`."""
        if not given.is_dir():
            raise GerlError(
                f"run={given}: there is no such folder; give a run folder, or one with runs, such as outputs/"
            )
        folder = given.resolve()
        if not is_run(folder):
            return cls(folder)
        beside = folder.parent.parent if folder.parent.parent.name == "outputs" else folder.parent
        return cls(beside, folder.relative_to(beside).as_posix())

    def found(self) -> dict[str, Path]:
        """The run folders there are now, in the order of their names."""
        names = dict.fromkeys([self.chosen] if self.chosen else [])
        for path in _below(self.root, DEPTH):
            names.setdefault(path.relative_to(self.root).as_posix())
            if len(names) == MOST:
                break
        return {name: self.root / name for name in sorted(names)}


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    try:
        inside = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in inside if depth else ():
        if not name.startswith("."):
            yield from _below(folder / name, depth - 1)

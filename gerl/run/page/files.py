"""Files of a run folder as they are now: whether they changed, their ends, and never one from outside the folder."""

import os
from pathlib import Path

TAIL = 512 * 1024  # bytes of a log or timeline that are looked at


def signature(path: Path) -> str:
    """Changes when the file or folder does; empty where there is none."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_mtime_ns:x}.{status.st_size:x}.{status.st_ino:x}"


def content(folder: Path, name: str) -> bytes | None:
    """The bytes of a file below `folder`; None where there is none, or where a link leads out of the folder."""
    try:
        path = (folder / name).resolve(strict=True)
        if not path.is_relative_to(folder.resolve()):
            return None
        return path.read_bytes()
    except OSError:
        return None


def last_lines(path: Path, most: int = TAIL) -> list[str]:
    """The complete lines in the last `most` bytes of a text file; empty where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = text.split("\n")[:-1]  # what is behind the last line break is half-written
    return lines[1:] if size > most else lines

"""The journal of a vote service: what happened, a line each, on disk before anybody is told of it."""

import json
import logging
import os
from io import FileIO
from pathlib import Path
from typing import Any

from gerl.errors import GerlError
from gerl.utils.files import reason, writing

logger = logging.getLogger("gerl")
NAME = "journal.jsonl"


class Journal:
    """Lines of JSON in `folder`, which is made with the first one; a service that starts anew reads them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._file: FileIO | None = None

    def replay(self) -> list[dict[str, Any]]:
        """All rows so far; what a power cut left of a last line is taken off.

        Raises `GerlError` if the file cannot be read.
        """
        if not self.path.exists():
            return []
        try:
            content = self.path.read_bytes()
            end = content.rfind(b"\n") + 1
            if end < len(content):
                logger.warning("%s ends with an incomplete line, which is ignored", self.path)
                with self.path.open("r+b") as file:
                    file.truncate(end)
            rows = [json.loads(line) for line in content[:end].splitlines()]
        except (OSError, ValueError) as error:
            raise GerlError(f"{self.path} cannot be read ({reason(error)}): repair it, or move it away") from None
        if any(not isinstance(row, dict) or "kind" not in row for row in rows):
            raise GerlError(f"{self.path} is not a journal of votes: move it away")
        return rows

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; when this returns it is on disk. Raises `GerlError` if it cannot be written: nothing of it is."""
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        with writing(self.path):
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab", buffering=0)  # what cannot be written must not wait for the next row
            end = os.fstat(self._file.fileno()).st_size
            try:
                while line:
                    line = line[self._file.write(line) :]
                os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(end)
                raise

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

"""The sentences of `gerl.run.health` about a run, without going through all of its metrics each time."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gerl.run.health import Health
from gerl.run.page.files import signature


class Findings:
    """Follows `metrics.jsonl`."""

    def __init__(self) -> None:
        self._health: Health | None = None
        self._place, self._file, self._seen = 0, "", ""

    def read(self, path: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The latest sentence of each kind, the newest first."""
        now = signature(path)
        if now != self._seen:
            self._seen = now
            self._take(path, config)
        found = self._health.found.values() if self._health is not None else ()
        return [
            {"step": finding.step, "text": finding.text} for finding in sorted(found, key=lambda finding: -finding.step)
        ]

    def _take(self, path: Path, config: Mapping[str, Any]) -> None:
        try:
            with path.open("rb") as file:
                node = str(path.stat().st_ino)
                if self._health is None or node != self._file or path.stat().st_size < self._place:
                    self._health, self._place, self._file = Health(config), 0, node
                file.seek(self._place)
                text = file.read()
        except OSError:
            return
        end = text.rfind(b"\n") + 1
        self._place += end
        for line in text[:end].splitlines():
            try:
                row = json.loads(line)
                row["step"] = int(row["step"])
            except (ValueError, KeyError, TypeError):
                continue
            self._health.observe(row)

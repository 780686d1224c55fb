"""All that a page shows of one run, from the files in its folder; nothing is read again that has not changed."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gerl.run import control
from gerl.run.checkpoint import checkpoint_paths
from gerl.run.facts import facts
from gerl.run.live import FOLDER as LIVE
from gerl.run.live import live_steps
from gerl.run.lock import alive_since
from gerl.run.page.columns import Columns
from gerl.run.page.files import content, last_lines, signature
from gerl.run.page.findings import Findings
from gerl.run.page.heldout import HeldOut
from gerl.run.redaction import redact
from gerl.run.settings import changes, difference, explanation, get, labels, read_config, scorers
from gerl.run.timeline import TIMELINE, chrome_trace, lanes, read_spans

PARTS = {
    "metrics": "metrics.jsonl",
    "validation": "validation",
    "live": LIVE,
    "timeline": TIMELINE,
    "guard": "guard.jsonl",
    "log": "log.txt",
    "config": "config.yaml",
    "control": control.FOLDER,
    "checkpoints": "checkpoints",
}
LORA = "lora/pytorch_lora_weights.safetensors"  # of a checkpoint
LINES = 200  # of the log
SIGNALS = 200  # of the guard
GAIN = ("gain", "gain_low", "gain_high")  # of a scorer, paired, with its interval


class RunData:
    """A run folder; every method may be called by several threads."""

    def __init__(self, name: str, folder: Path, config: tuple[str, dict[str, Any]] | None = None) -> None:
        """`config`: text and values of config.yaml, where they are known and will not change."""
        self.name, self.folder, self._config = name, folder, config
        self._lock = threading.RLock()
        self._kept: dict[str, tuple[object, Any]] = {}
        self._columns = Columns(folder / "metrics.jsonl")
        self._findings = Findings()
        self._held_out = HeldOut(folder)

    def signatures(self) -> dict[str, str]:
        """By part of the page, what changes when it does."""
        found = {part: signature(self.folder / name) for part, name in PARTS.items()}
        return found | {"alive": str(alive_since(self.folder) or "")}

    def keep(self, name: str, now: object, make: Callable[[], Any]) -> Any:
        """The value of `name`, made anew where `now` is not what it was the last time."""
        with self._lock:
            known = self._kept.get(name)
            if known is None or known[0] != now:
                known = self._kept[name] = now, make()
            return known[1]

    def config(self) -> tuple[str, dict[str, Any]]:
        """The text of config.yaml without secrets, and its values."""
        if self._config is not None:
            return self._config

        def make() -> tuple[str, dict[str, Any]]:
            text, values = read_config(self.folder / "config.yaml")
            return redact(text), values

        found: tuple[str, dict[str, Any]] = self.keep("config", signature(self.folder / "config.yaml"), make)
        return found

    def columns(self) -> Columns:
        """The metrics as they are now; to be used while the lock is held."""
        self._columns.read()
        return self._columns

    def overview(self) -> dict[str, Any]:
        """The facts on top of the page, and which metrics and scorers there are."""
        _, config = self.config()
        now = self.signatures()
        with self._lock:
            columns = self.columns()
            last, names = columns.last, sorted(columns.values)
            seconds = columns.latest("timing/step_s", 20)
            step = int(last.get("step", 0))
        rates = get(config, "rollout", "prompts_per_step"), get(config, "rollout", "n")
        alive = bool(now["alive"])
        return {
            "run": self.name,
            "signatures": now,
            "alive": alive,
            "writable": alive and os.access(self.folder, os.W_OK),
            "asked": control.asked(self.folder) if alive else [],
            "can_validate": bool(get(config, "validation", "data")),
            "step": step,
            "steps": get(config, "trainer", "steps"),
            "time": last.get("time"),
            "step_seconds": seconds,
            "images": rates[0] * rates[1] if all(isinstance(rate, int) for rate in rates) else None,
            "facts": [pair for pair in facts([], config) if pair[0] not in ("steps", "time")],
            "label": labels(config).training,
            "explanation": explanation(config),
            "names": names,
            "scorers": scorers(config),
            "lora": next((step for step, path in self._loras() if path.is_file()), None),
        }

    def series(self, names: Sequence[str], since: int, width: int, generation: int) -> dict[str, Any]:
        """Curves from step `since` on, or whole ones where the page's are of another `width` or `generation`."""
        with self._lock:
            columns = self.columns()
            reset = (width, generation) != (columns.width(), columns.generation)
            found = {name: columns.series(name, 0 if reset else since, columns.width()) for name in names}
            facts = {"width": columns.width(), "generation": columns.generation, "reset": reset}
            return {**facts, "series": {name: curve for name, curve in found.items() if curve is not None}}

    def held_out(self) -> dict[str, Any]:
        """The rewards of the held-out prompts at every validation."""
        with self._lock:
            found: dict[str, Any] = self.keep("held_out", self._held_out.now(), self._held_out.read)
            return found

    def prompt(self, row: int) -> dict[str, Any] | None:
        """The scores of a held-out prompt at every validation, None if there is no such prompt."""
        with self._lock:
            self.held_out()
            return self._held_out.scores(row)

    def picture(self, step: int, row: int) -> tuple[bytes, str] | None:
        """The picture of a held-out prompt and its media type; None if there is none."""
        with self._lock:
            return self._held_out.picture(step, row)

    def live(self, step: int = -1) -> dict[str, Any]:
        """The images of a step, or of the latest one where it has none, and all `steps` with images; may be empty."""
        steps = live_steps(self.folder)
        for number in [step] * (step in steps) + steps[::-1]:
            try:
                found = json.loads(content(self.folder, f"{LIVE}/step_{number:06d}.json") or b"")
            except ValueError:  # it was removed just now
                continue
            if isinstance(found, dict):
                return found | {"steps": steps}
        return {}

    def lora(self) -> tuple[int, bytes] | None:
        """The step of the latest checkpoint with a LoRA, and its file; None where there is none."""
        for step, path in self._loras():
            if (found := content(self.folder, str(path.relative_to(self.folder)))) is not None:
                return step, found
        return None

    def _loras(self) -> Iterator[tuple[int, Path]]:
        """The checkpoints' steps and where the LoRA of each would lie, the latest first."""
        for path in reversed(checkpoint_paths(self.folder / "checkpoints")):
            yield int(path.name.rpartition("_")[2]), path / LORA

    def sheet(self, step: int) -> tuple[bytes, str] | None:
        """The sheet with the images of a step and its media type; None if there is none."""
        found = content(self.folder, f"{LIVE}/step_{step:06d}.jpg")
        return None if found is None else (found, "image/jpeg")

    def timeline(self, steps: int) -> dict[str, Any]:
        """The spans of the last `steps` steps that are in the file, and the lanes that they are drawn in."""
        rows = read_spans(last_lines(self.folder / TIMELINE))
        newest = sorted({row["step"] for row in rows})[-steps:]
        rows = [row for row in rows if newest and row["step"] >= newest[0]]
        return {"lanes": lanes(rows), "spans": rows}

    def trace(self) -> dict[str, Any]:
        """The whole timeline as a Chrome trace."""
        return chrome_trace(read_spans(last_lines(self.folder / TIMELINE, 2**28)), self.name)

    def warnings(self) -> dict[str, Any]:
        """The signals of the guard, newest first, and what kept the run from learning."""
        guard = [row for line in last_lines(self.folder / PARTS["guard"]) if (row := _row(line)) is not None]
        _, config = self.config()
        path = self.folder / "metrics.jsonl"
        with self._lock:
            health = self._findings.read(path, config)
        return {"guard": guard[: -SIGNALS - 1 : -1], "health": health}

    def settings(self, other: "RunData | None") -> dict[str, Any]:
        """The configuration: its text, what differs from the defaults and, where given, from `other`."""
        text, config = self.config()
        now = signature(self.folder / "config.yaml")
        usual = self.keep("changes", now, lambda: changes(config) if config else [])
        against = difference(config, other.config()[1]) if other is not None else []
        return {"text": text, "changes": usual, "difference": against}

    def log(self) -> list[str]:
        """The last lines of the log."""
        return last_lines(self.folder / PARTS["log"])[-LINES:]

    def summary(self) -> dict[str, Any]:
        """A line for the list of runs."""

        def make() -> dict[str, Any]:
            rows = [row for line in last_lines(self.folder / "metrics.jsonl", 32 * 1024) if (row := _row(line))]
            last = rows[-1] if rows else {}
            held_out = next((row["val/reward/mean"] for row in reversed(rows) if "val/reward/mean" in row), None)
            return {"step": last.get("step"), "time": last.get("time"), "held_out": held_out}

        found: dict[str, Any] = self.keep("summary", signature(self.folder / "metrics.jsonl"), make)
        steps = get(self.config()[1], "trainer", "steps")
        return {"name": self.name, "alive": alive_since(self.folder) is not None, "steps": steps, **found}


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None

"""Data of a run's page, read from the files in its folder: metrics, held-out prompts, findings, facts."""

import math
import os
import re
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import numpy as np

from gerl.config.bounded_text import LARGEST_LOG, parse_json, regular, unlinked
from gerl.errors import GerlError
from gerl.run import session, settings
from gerl.run.checkpoint import alive_since, checkpoint_paths
from gerl.run.choice import choice_of
from gerl.run.hacking import PAIRS, hacking_card
from gerl.run.health import Health
from gerl.run.live import EPISODES, TIMELINE, chrome_trace, episode_steps, lanes, live_steps, read_spans
from gerl.run.live import FOLDER as LIVE
from gerl.run.tracking import Rows, parse_row
from gerl.run.validation import Validation, load_validation, standard_error, validation_steps
from gerl.utils.pages import data_uri, encode, enlarge

T = TypeVar("T")
POINTS = 400  # per curve; longer ones are binned, with mean, minimum and maximum


class Columns:
    """Columns of `metrics.jsonl`, and the health checks of its rows; `read` adds new rows."""

    def __init__(self, path: Path, config: Callable[[], Mapping[str, Any]] = dict) -> None:
        self.path, self._config = path, config
        self.generation = 0  # increases when the file is replaced: a resumed run truncates it
        self._clear({})

    def _clear(self, config: Mapping[str, Any]) -> None:
        self.health = Health(config)
        self.last: dict[str, Any] = {}  # the last row
        self.values: dict[str, tuple[array[int], array[float]]] = {}  # name -> steps, values (NaN: null)
        self._read, self._file = 0, (0, 0)

    def read(self) -> None:
        """Read the added lines; an incomplete last one is left for the next call."""
        try:
            with regular(unlinked(self.path), LARGEST_LOG).open("rb") as file:
                status = os.fstat(file.fileno())
                file_now = (status.st_ino, status.st_dev)
                if file_now != self._file or status.st_size < self._read:
                    self.generation += self._file != (0, 0)
                    self._clear(self._config())
                    self._file = file_now
                file.seek(self._read)
                text = file.read()
        except OSError:
            return
        end = text.rfind(b"\n") + 1
        self._read += end
        for line in text[:end].splitlines():
            self._add(line)

    def _add(self, line: bytes) -> None:
        row = parse_row(line)
        if row is None or row["step"] <= self.last.get("step", -1):
            return
        step = row["step"]
        self.last = row
        self.health.observe(row)
        for name, value in row.items():
            if name in ("step", "time"):
                continue
            steps, values = self.values.setdefault(name, (array("q"), array("d")))
            steps.append(step)
            values.append(math.nan if value is None else float(value))

    def series(self, name: str, since: int, width: int) -> dict[str, Any] | None:
        """Return the curve of a metric from step `since` on, in bins of `width` steps; None if unknown.

        `x`: first step of each bin; `y`: mean; `low` and `high` if `width` is more than 1.
        """
        if name not in self.values:
            return None
        steps, values = self.values[name]
        i = bisect_left(steps, since // width * width)
        if width == 1:
            return {"x": steps[i:].tolist(), "y": [_rounded(value, 5) for value in values[i:]]}
        curve: dict[str, list[Any]] = {"x": [], "y": [], "low": [], "high": []}
        while i < len(steps):
            part = steps[i] // width
            end = bisect_left(steps, (part + 1) * width, i)
            finite = [value for value in values[i:end] if math.isfinite(value)]
            three = (math.fsum(finite) / len(finite), min(finite), max(finite)) if finite else (None, None, None)
            for column, value in zip(curve.values(), (part * width, *(_rounded(v, 5) for v in three)), strict=True):
                column.append(value)
            i = end
        return curve

    def width(self) -> int:
        """Return the steps per bin, a power of two, for at most `POINTS` bins."""
        width = 1
        while self.last.get("step", 0) >= POINTS * width:
            width *= 2
        return width

    def latest(self, name: str, count: int = 1) -> float | None:
        """Return the mean of the last `count` values of a metric; None without values."""
        _, values = self.values.get(name, (None, array("d")))
        finite = [value for value in values[-count:] if math.isfinite(value)]
        return math.fsum(finite) / len(finite) if finite else None


# --- Everything a page shows of one run; unchanged files are not read again

PARTS = {
    "metrics": "metrics.jsonl",
    "validation": "validation",
    "live": LIVE,
    "timeline": TIMELINE,
    "guard": "guard.jsonl",
    "log": "log.txt",
    "config": "config.yaml",
    "control": session.FOLDER,
    "checkpoints": "checkpoints",
}
LORA = "lora/pytorch_lora_weights.safetensors"  # of a checkpoint
RECENT = 20  # steps whose mean time is that of the next ones
DOING = 3  # last lines of the log that say what a run does before anything is measured
PREFIX = re.compile(r"^[\d-]+T[\d:.]+Z [A-Z]+ [\w.]+: ")  # of a line of the log
LINES = 200  # of the log
SIGNALS = 200  # of the guard
GAIN = ("gain", "gain_low", "gain_high")  # of a scorer, paired, with its interval


class RunData:
    """Data of a run folder; thread-safe."""

    def __init__(self, name: str, folder: Path, config: tuple[str, dict[str, Any]] | None = None) -> None:
        """`config`: text and values of config.yaml, if known and final."""
        self.name, self.folder, self._config = name, folder, config
        self._lock = threading.RLock()
        self._kept: dict[str, tuple[object, Any]] = {}
        self._columns = Columns(folder / "metrics.jsonl", lambda: self.config()[1])
        self._held_out = HeldOut(folder)

    def signatures(self) -> dict[str, str]:
        """Return a value per part of the page that changes when the part does."""
        signatures = {part: signature(self.folder / name) for part, name in PARTS.items()}
        return signatures | {"alive": str(alive_since(self.folder) or "")}

    def keep(self, name: str, now: object, make: Callable[[], T]) -> T:
        """Return the cached value of `name`, made again if `now` has changed."""
        with self._lock:
            stored = self._kept.get(name)
            if stored is None or stored[0] != now:
                stored = self._kept[name] = now, make()
            kept: T = stored[1]
            return kept

    def config(self) -> tuple[str, dict[str, Any]]:
        """Return the text of config.yaml without secrets, and its values."""
        if self._config is not None:
            return self._config

        def make() -> tuple[str, dict[str, Any]]:
            text, values = settings.read_config(self.folder / "config.yaml")
            return settings.shown_config(text, values), values

        return self.keep("config", signature(self.folder / "config.yaml"), make)

    def planned_steps(self) -> int | None:
        """Return the number of steps that the run plans."""
        now = signature(self.folder / "run.json"), signature(self.folder / "config.yaml")
        return self.keep("steps", now, lambda: settings.planned_steps(self.folder, self.config()[1]))

    def columns(self) -> Columns:
        """Return the current metrics; call with the lock held."""
        self._columns.read()
        return self._columns

    def overview(self) -> dict[str, Any]:
        """Return the facts at the top of the page, and the names of metrics and scorers."""
        _, config = self.config()
        now = self.signatures()
        with self._lock:
            columns = self.columns()
            last, names = columns.last, sorted(columns.values)
            seconds = columns.latest("timing/step_s", RECENT)
            step = int(last.get("step", 0))
        rates = settings.get(config, "rollout", "prompts_per_step"), settings.get(config, "rollout", "n")
        alive = bool(now["alive"])
        return {
            "run": self.name,
            "signatures": now,
            "alive": alive,
            "writable": alive and os.access(self.folder, os.W_OK),
            "asked": session.asked(self.folder) if alive else [],
            "can_validate": bool(settings.get(config, "validation", "data")),
            "step": step,
            "steps": self.planned_steps(),
            "time": last.get("time"),
            "step_seconds": seconds,
            "images": rates[0] * rates[1] if all(isinstance(rate, int) for rate in rates) else None,
            "facts": [pair for pair in facts([], config) if pair[0] not in ("steps", "time")],
            "label": settings.training_label(config),
            "explanation": settings.explanation(config),
            "doing": [PREFIX.sub("", line) for line in self.log()[-DOING:]] if alive and not names else [],
            "names": names,
            "scorers": settings.scorers(config),
            "roles": settings.roles(config),
            "lora": next((step for step, path in self._loras() if path.is_file()), None),
        }

    def series(self, names: Sequence[str], since: int, width: int, generation: int) -> dict[str, Any]:
        """Return curves from step `since` on, or whole ones if the page has another `width` or `generation`."""
        with self._lock:
            columns = self.columns()
            reset = (width, generation) != (columns.width(), columns.generation)
            curves = {name: columns.series(name, 0 if reset else since, columns.width()) for name in names}
            facts = {"width": columns.width(), "generation": columns.generation, "reset": reset}
            return {**facts, "series": {name: curve for name, curve in curves.items() if curve is not None}}

    def held_out(self) -> dict[str, Any]:
        """Return the rewards of the held-out prompts at every validation."""
        with self._lock:
            return self.keep("held_out", signature(self.folder / "validation"), self._held_out.read)

    def prompt(self, row: int) -> dict[str, Any] | None:
        """Return the scores of a held-out prompt at every validation; None: no such prompt."""
        with self._lock:
            self.held_out()
            return self._held_out.scores(row)

    def picture(self, step: int, row: int) -> tuple[bytes, str] | None:
        """Return the image of a held-out prompt and its media type; None if there is none."""
        with self._lock:
            return self._held_out.picture(step, row)

    def live(self, step: int = -1) -> dict[str, Any]:
        """Return the images of a step, else of the latest one, and all `steps` with images; may be empty."""
        return self._sheet_values(f"{LIVE}/step", live_steps(self.folder), step)

    def episodes(self, step: int = -1) -> dict[str, Any]:
        """Return the held-out episodes of the `first` validation and of `step`, else of the latest one; may be empty.

        `steps`: the later validations with episodes.
        """
        steps = episode_steps(self.folder)
        first = self._sheet_values(f"{EPISODES}/episode", steps[:1], -1)
        sheet = self._sheet_values(f"{EPISODES}/episode", steps[1:], step)
        return {"first": first, "now": sheet, "steps": steps[1:]} if first else {}

    def _sheet_values(self, name: str, steps: Sequence[int], step: int) -> dict[str, Any]:
        """Return the values of the sheet of `step` if it is one of `steps`, else of the latest, with all `steps`."""
        for number in [step] * (step in steps) + list(steps)[::-1]:
            try:
                values = parse_json(content(self.folder, f"{name}_{number:06d}.json") or b"")
            except ValueError:  # removed meanwhile
                continue
            if isinstance(values, dict):
                return values | {"steps": steps}
        return {}

    def lora(self) -> tuple[int, bytes] | None:
        """Return the step and file of the latest LoRA, of a hacked run of the one to use; None if there is none."""
        for step, path in self._loras():
            if (data := content(self.folder, str(path.relative_to(self.folder)))) is not None:
                return step, data
        return None

    def _loras(self) -> Iterator[tuple[int, Path]]:
        choice = self.keep("choice", signature(self.folder / "checkpoints"), lambda: choice_of(self.folder))
        for path in reversed(checkpoint_paths(self.folder / "checkpoints")):
            step = int(path.name.rpartition("_")[2])
            if choice is None or choice.offers(step):
                yield step, path / LORA

    def sheet(self, step: int, held_out: bool = False) -> tuple[bytes, str] | None:
        """Return the sheet of a step's images, or of its held-out episodes, and its media type; None: there is none."""
        name = f"{EPISODES}/episode" if held_out else f"{LIVE}/step"
        data = content(self.folder, f"{name}_{step:06d}.jpg")
        return None if data is None else (data, "image/jpeg")

    def timeline(self, steps: int) -> dict[str, Any]:
        """Return the spans of the last `steps` steps, and their lanes."""
        rows = read_spans(last_lines(self.folder / TIMELINE))
        newest = sorted({row["step"] for row in rows})[-steps:]
        rows = [row for row in rows if newest and row["step"] >= newest[0]]
        return {"lanes": lanes(rows), "spans": rows}

    def trace(self) -> dict[str, Any]:
        """Return the whole timeline as a Chrome trace."""
        return chrome_trace(read_spans(last_lines(self.folder / TIMELINE, 2**28)), self.name)

    def warnings(self) -> dict[str, Any]:
        """Return the signals of the guard, newest first, and the findings of the health checks."""
        guard = [row for line in last_lines(self.folder / PARTS["guard"]) if (row := _row(line)) is not None]
        with self._lock:
            findings = sorted(self.columns().health.findings.values(), key=lambda finding: -finding.step)
        health = [{"step": finding.step, "text": finding.text} for finding in findings]
        return {"guard": guard[: -SIGNALS - 1 : -1], "health": health, "hacking": self._hacking()[0]}

    def hacking_picture(self, pair: int, side: int) -> tuple[bytes, str] | None:
        """Return an image of a pair of the card of a hacked run, before (0) or after (1), and its media type."""
        return self._hacking()[1].get((pair, side))

    def _hacking(self) -> tuple[dict[str, Any] | None, dict[tuple[int, int], tuple[bytes, str]]]:
        """Return the card of a hacked run, None without signals, and its images by pair and side."""
        names = ("guard.jsonl", "validation", "checkpoints", "config.yaml")
        now = [signature(self.folder / name) for name in names]

        def make() -> tuple[dict[str, Any] | None, dict[tuple[int, int], tuple[bytes, str]]]:
            card = hacking_card(self.folder, self.config()[1])
            if card is None:
                return None, {}
            sides = {(i, k): pair for i, pair in enumerate(card.pairs) for k in (0, 1)}
            images = {(i, k): encoded(pair.after if k else pair.before) for (i, k), pair in sides.items()}
            values = {"title": card.title, "lasts": card.lasts, "steps": card.steps, "falls": card.falls}
            values |= {"advice": card.advice, "version": "-".join(now)}
            values |= {"prompts": [pair.prompt for pair in card.pairs]}
            return values, images

        return self.keep("hacking", now, make) if now[0] else (None, {})

    def settings(self, other: "RunData | None") -> dict[str, Any]:
        """Return the configuration: its text, differences from the defaults and, if given, from `other`."""
        text, config = self.config()
        now = signature(self.folder / "config.yaml")
        usual = self.keep("changes", now, lambda: settings.changes(config) if config else [])
        against = settings.difference(config, other.config()[1]) if other is not None else []
        return {"text": text, "changes": usual, "difference": against}

    def log(self) -> list[str]:
        """Return the last lines of the log."""
        return last_lines(self.folder / PARTS["log"])[-LINES:]

    def summary(self) -> dict[str, Any]:
        """Return a row for the list of runs."""

        def make() -> dict[str, Any]:
            rows = [row for line in last_lines(self.folder / "metrics.jsonl", 32 * 1024) if (row := parse_row(line))]
            last = rows[-1] if rows else {}
            held_out = next((row["val/reward/mean"] for row in reversed(rows) if "val/reward/mean" in row), None)
            seconds = [row["timing/step_s"] for row in rows[-RECENT:] if row.get("timing/step_s") is not None]
            mean = math.fsum(seconds) / len(seconds) if seconds else None
            return {"step": last.get("step"), "time": last.get("time"), "held_out": held_out, "step_seconds": mean}

        values = self.keep("summary", signature(self.folder / "metrics.jsonl"), make)
        return {
            "name": self.name,
            "alive": alive_since(self.folder) is not None,
            "steps": self.planned_steps(),
            **values,
        }

    def last_picture(self) -> str | None:
        """Return the address, below that of the page, of a held-out image of the newest validation; None: none."""
        now = signature(self.folder / "validation")

        def make() -> str | None:
            steps = validation_steps(self.folder)
            rows = self._held_out.pictured(steps[-1]) if steps else []
            if not rows:
                return None
            return f"held_out?{urlencode({'run': self.name, 'step': steps[-1], 'row': rows[0], 'v': now})}"

        return self.keep("picture", now, make)


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


# --- Files of a run folder: whether they changed, their last lines; never a file outside the folder

LARGEST_FILE = 2**30  # bytes of an image or a LoRA that the page passes on
TAIL = 512 * 1024  # bytes read from the end of a log or timeline


def signature(path: Path) -> str:
    """Return a value that changes when the file or folder does; empty if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_mtime_ns:x}.{status.st_size:x}.{status.st_ino:x}"


def content(folder: Path, name: str) -> bytes | None:
    """Read a file below `folder`; None if it is missing, or if a link leads out of the folder."""
    try:
        path = (folder / name).resolve(strict=True)
        if not path.is_relative_to(folder.resolve()):
            return None
        return regular(path, LARGEST_FILE).read_bytes()
    except (OSError, RuntimeError):  # the latter: a link to itself
        return None


def last_lines(path: Path, most: int = TAIL) -> list[str]:
    """Return the complete lines in the last `most` bytes of a text file; empty if it is missing."""
    try:
        with regular(unlinked(path)).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = text.split("\n")[:-1]  # the text after the last line break is incomplete
    return lines[1:] if size > most else lines


# --- Held-out prompts over all validations

STEPS = 100  # validations shown, evenly spaced if there are more
DECODED, ENCODED = 4, 512  # validations with decoded images, and encoded images, in the caches
WIDE, EXACT = 512, 256  # pixels: largest width; images up to EXACT are lossless


class HeldOut:
    """Validations of a run folder, each read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.validations: dict[int, Validation] = {}  # by step: those with the prompts of the newest, without images
        self._last: Validation | None = None
        self._numbers = cache(self._load)
        self._decoded = lru_cache(DECODED)(self._pixels)
        self._encoded = lru_cache(ENCODED)(self._picture)

    def read(self) -> dict[str, Any]:
        """Return the `prompts` [N] of the newest validation, the `steps` [S] with the same prompts, and rewards."""
        read = {step: self._numbers(step, self._signature(step)) for step in validation_steps(self.folder)}
        readable = {step: validation for step, validation in read.items() if validation is not None}
        prompts = readable[max(readable)].prompts if readable else []
        steps = _spread([step for step, validation in readable.items() if validation.prompts == prompts], STEPS)
        self.validations = {step: readable[step] for step in steps}
        rows = list(self.validations.values())
        return {
            "prompts": prompts,
            "ids": rows[-1].ids if rows else None,
            "steps": steps,
            "shown": sorted(set.intersection(*(set(row.shown) for row in rows))) if rows else [],
            "rewards": [[_rounded(value) for value in row.rewards] for row in rows],
            "errors": [_rounded(standard_error(row.by_prompt(row.rewards))) for row in rows],
        }

    def scores(self, row: int) -> dict[str, Any] | None:
        """Return the scores of a prompt after all validations, by scorer; None: no such prompt."""
        validations = list(self.validations.values())
        if not validations or not 0 <= row < len(validations[0].prompts):
            return None
        columns = [{name: values[row] for name, values in validation.by_scorer.items()} for validation in validations]
        names = dict.fromkeys(name for column in columns for name in column)
        scores = {name: [_rounded(column.get(name)) for column in columns] for name in names}
        return {"prompt": validations[0].prompts[row], "steps": list(self.validations), "scores": scores}

    def picture(self, step: int, row: int) -> tuple[bytes, str] | None:
        """Return the image of a prompt after a step, as bytes and media type; None if there is none."""
        return self._encoded(step, row, self._signature(step))

    def pictured(self, step: int) -> list[int]:
        """Return the prompts that have an image after a step."""
        validation = self._numbers(step, self._signature(step))
        return [] if validation is None else list(validation.shown)

    def _load(self, step: int, now: str) -> Validation | None:
        try:
            validation = replace(load_validation(self.folder, step, pictures=False), drawing=None, looks={})
        except GerlError:
            return None
        if self._last is not None and (self._last.prompts, self._last.ids) == (validation.prompts, validation.ids):
            validation = replace(
                validation, prompts=self._last.prompts, ids=self._last.ids
            )  # equal lists are stored once
        self._last = validation
        return validation

    def _pixels(self, step: int, now: str) -> dict[int, np.ndarray]:
        try:
            validation = load_validation(self.folder, step)
        except GerlError:
            return {}
        return dict(zip(validation.shown, validation.pixels, strict=True))

    def _picture(self, step: int, row: int, now: str) -> tuple[bytes, str] | None:
        pixels = self._decoded(step, now).get(row)
        return None if pixels is None else encoded(pixels)

    def _signature(self, step: int) -> str:
        return signature(self.folder / "validation" / f"step_{step:06d}.json")


def encoded(pixels: np.ndarray) -> tuple[bytes, str]:
    """Encode an image for a page, as bytes and media type; small ones lossless."""
    image = enlarge(pixels, min_width=1, max_width=WIDE)
    return encode(image, lossy=image.width > EXACT)


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


# --- Facts of a run: pairs of name and value

TIMING_TOTALS = ("timing/step_s", "timing/total_s")


def _seconds(rows: Rows) -> float:
    """Time of all steps: a step's total if recorded, else the sum of its parts."""
    totals = [next((row[name] for name in TIMING_TOTALS if row.get(name) is not None), None) for row in rows]
    parts = [sum(row[n] or 0.0 for n in row if n.startswith("timing/") and n.endswith("_s")) for row in rows]
    return float(sum(part if total is None else total for total, part in zip(totals, parts, strict=True)))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def facts(rows: Rows, config: Mapping[str, Any], planned: int | None = None) -> list[tuple[str, str]]:
    """Return pairs of name and value: progress of the `planned` steps, model, algorithm and main settings."""
    done = rows[-1]["step"] if rows else 0
    restarts, lost = (sum(row.get(f"cluster/{name}") or 0.0 for row in rows) for name in ("restarts", "lost_s"))
    prompts, n = settings.get(config, "rollout", "prompts_per_step"), settings.get(config, "rollout", "n")
    scorers = settings.get(config, "reward", "scorers")
    train = settings.get(config, "model", "train") or "lora"
    lora = train == "lora"
    facts = [
        ("steps", f"{done} of {planned}" if planned and planned != done else str(done)),
        ("time", _duration(_seconds(rows)) if _seconds(rows) else None),
        ("replaced", f"{restarts:.0f} workers that died, {_duration(lost)} lost" if restarts else None),
        ("images per step", f"{prompts} prompts x {n}" if prompts and n else None),
        ("model", settings.get(config, "model", "path")),
        ("algorithm", settings.get(config, "preset") or settings.get(config, "algorithm", "name")),
        ("scorers", ", ".join(map(str, scorers)) if isinstance(scorers, dict) else None),
        ("turns", ", ".join(settings.roles(config)) or None),
        ("trained", None if lora else "all weights" if train == "full" else f"weights {train}"),
        ("LoRA rank", settings.get(config, "model", "lora_rank") if lora else None),
        ("learning rate", settings.learning_rate(config)),
        ("seed", settings.get(config, "trainer", "seed")),
    ]
    return [(name, str(value)) for name, value in facts if value is not None]


# --- The page's data, to be embedded in the report

FROZEN_STEPS = 12  # validations with images in the report
BYTES = 3 * 2**20  # budget of all images; at least one prompt is shown
SPANS = 3  # steps of the timeline
LEFT_OUT = ("health/", "scorer/")
FROZEN_PARTS = ("metrics", "validation", "live", "timeline", "guard")


def frozen(run_dir: Path, config: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Return all answers that the page asks for, and its images as data URIs; deterministic."""
    run = RunData(run_dir.resolve().name, run_dir, config)
    overview = run.overview() | {"alive": False, "writable": False, "asked": [], "signatures": {}, "lora": None}
    names = [name for name in overview["names"] if not name.startswith(LEFT_OUT)]
    held_out, pictures = _held_out(run)
    prompts = {}
    for row in held_out["shown"]:
        whole = run.prompt(row) or {"steps": [], "scores": {}}
        places = [i for i, step in enumerate(whole["steps"]) if step in held_out["steps"]]
        scores = {name: [values[i] for i in places] for name, values in whole["scores"].items()}
        prompts[f"prompt/{row}"] = {**whole, "steps": held_out["steps"], "scores": scores}
    live = run.live()
    sheet = run.sheet(live["step"]) if live else None
    episodes = run.episodes()
    turned = [values for name in ("first", "now") if (values := episodes.get(name))]
    sheets = {one["step"]: run.sheet(one["step"], held_out=True) for one in turned}
    answers = {
        "runs": {"runs": [{"name": run.name}], "chosen": run.name},
        "run": overview | {"names": names},
        "series": run.series(names, -1, -1, -1),
        "held_out": held_out,
        "live": live | {"steps": [live["step"]]} if sheet is not None else {},
        "episodes": episodes | {"steps": [one["step"] for one in turned[1:]]},
        "timeline": run.timeline(SPANS),
        "warnings": run.warnings(),
        **prompts,
    }
    hacked = {(i, k): run.hacking_picture(i, k) for i in range(PAIRS) for k in (0, 1)}
    return {
        "signatures": dict.fromkeys(FROZEN_PARTS, "frozen"),
        "answers": answers,
        "pictures": pictures,
        "sheet": data_uri(*sheet) if sheet is not None else "",
        "episodes": {str(step): data_uri(*sheet) for step, sheet in sheets.items() if sheet is not None},
        "hacked": {f"{i}/{k}": data_uri(*image) for (i, k), image in hacked.items() if image is not None},
    }


def _held_out(run: RunData) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the held-out prompts at some validations, with as many images as fit the budget."""
    values = run.held_out()
    places = _spread(range(len(values["steps"])), FROZEN_STEPS)
    steps = [values["steps"][i] for i in places]
    values = values | {"steps": steps, **{name: [values[name][i] for i in places] for name in ("rewards", "errors")}}
    pictures: dict[str, str] = {}
    most = len(values["shown"])
    rows: list[int] = []
    for row in _spread(values["shown"], most)[:1]:  # estimates the size of one prompt
        of_row = _pictures(run, steps, row)
        most = max(1, min(most, BYTES // max(1, sum(map(len, of_row.values())))))
    for row in _spread(values["shown"], most):
        of_row = _pictures(run, steps, row)
        if len(of_row) == len(steps):
            rows.append(row)
            pictures |= of_row
    return values | {"shown": rows}, pictures


def _pictures(run: RunData, steps: Sequence[int], row: int) -> dict[str, str]:
    by_step = {step: run.picture(step, row) for step in steps}
    return {f"{step}/{row}": data_uri(*picture) for step, picture in by_step.items() if picture is not None}


def _spread(values: Sequence[int], count: int) -> list[int]:
    """Return `count` evenly spaced values, with the first and the last."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]

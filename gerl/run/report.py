"""`report.html` of a run in one file: reward before and after, curves, a gallery, and code that samples an image again.

Written from the run folder at the end of a run, or at any time with `python -m gerl.run.report run=FOLDER`.
"""

if __name__ == "__main__":
    # the imports below take most of a second: handle signals before
    from gerl.commandline import signals
    from gerl.commandline.command import start

    signals.exit_with(start("gerl.run.report"))

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gerl.commandline import signals
from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import run_command
from gerl.config.bounded_text import MALFORMED
from gerl.errors import GerlError
from gerl.run.card import CARD, TRAINED, read_sessions
from gerl.run.guard import read_guard
from gerl.run.hacking import hacking_card
from gerl.run.health import Health
from gerl.run.page import facts, frozen
from gerl.run.settings import changes, planned_steps, read_config, roles, shown_config
from gerl.run.tracking import Rows, best_step, read_metrics, series
from gerl.run.usage import usage
from gerl.run.validation import BeforeAfter, Validation, estimate_gain, load_validations, mean
from gerl.utils.files import reason, write_file
from gerl.utils.pages import page_assets, render

log = logging.getLogger(__name__)


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` from the files so far and return its path.

    Damaged files are omitted with a warning. Raises `GerlError` if `run_dir` is not a run folder or cannot be written.
    """
    if not any((run_dir / name).exists() for name in ("config.yaml", "metrics.jsonl", "validation")):
        raise GerlError(
            f"{run_dir} is not a run folder: there is no config.yaml and no metrics.jsonl; give the folder that "
            "the run printed"
        )
    rows = sorted(read_metrics(run_dir / "metrics.jsonl"), key=lambda row: row["step"])
    validations = load_validations(run_dir)
    text, config = read_config(run_dir / "config.yaml")
    text = shown_config(text, config)
    hacking = hacking_card(run_dir, config)
    doubtful, last = hacking is not None and hacking.lasts, validations[-1] if validations[1:] else None
    compared = BeforeAfter(validations[0], last, doubtful) if validations else None
    health = Health(config)
    for row in rows:
        health.observe(row)
    latest = {(row["signal"], row["column"]): row for row in read_guard(run_dir)}
    sessions = read_sessions(run_dir / CARD)
    count = sessions[-1].get(TRAINED) if sessions else None
    overlap = [f"{count} {TRAINED}: their reward is not that of new prompts"] if count else []
    guarded = [f"step {row['step']}: guard, {row['signal']}/{row['column']}: {row['text']}" for row in latest.values()]
    html = render(
        "report.html.j2",
        title=run_dir.resolve().parent.name,
        run=run_dir.resolve().name,
        facts=facts(rows, config, planned_steps(run_dir, config)),
        headline=_headline(rows, compared),
        compared=compared,
        turns=roles(config),
        hacking=hacking,
        warnings=[*overlap, *(finding.text for finding in health.findings.values())],
        signals=guarded,
        code=_usage(run_dir, config, validations),
        starts=_starts(run_dir / CARD),
        changes=changes(config) if config else [],
        config_text=text,
        frozen=frozen(run_dir, (text, config)),
        **page_assets("#page"),
    )
    path = run_dir / "report.html"
    write_file(path, html)
    return path


def _usage(run_dir: Path, config: dict[str, Any], validations: list[Validation]) -> str | None:
    try:
        return usage(run_dir, config, validations)
    except (OSError, *MALFORMED) as error:  # settings of another kind
        log.warning("the report shows no code that samples an image again: %s", reason(error))
        return None


def _starts(path: Path) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return title, names and values of the sessions of the run card, latest first; empty without a usable card."""
    starts = []
    for number, session in enumerate(read_sessions(path), start=1):
        rows: list[tuple[str, str]] = []
        for name, value in session.items():
            nested = value.items() if isinstance(value, dict) else [("", value)]
            # the end of a running run is unknown, and a folder may be in no repository
            rows += [(f"{name} {part}".strip(), _words(entry)) for part, entry in nested if value is not None]
        words = [str(session[key]) for key in ("started", "command") if session.get(key)]
        starts.append((": ".join(words) or f"start {number}", rows))
    if not starts and path.exists():
        log.warning("%s has no readable session: the report omits it", path)
    return starts[::-1]


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _headline(rows: Rows, compared: BeforeAfter | None) -> dict[str, Any]:
    """Return the figures at the top: the measured reward before and after, its gain with an interval, the best step."""
    headline: dict[str, Any] = dict.fromkeys(("before", "after", "change", "counts")) | {"label": "held-out reward"}
    if compared is not None and compared.last is not None:
        first, last, best = compared.first, compared.last, best_step(rows)
        both = [(gain.before, gain.after) for gain in compared.gains]
        gain = estimate_gain(range(len(both)), [before for before, _ in both], [after for _, after in both])
        each = f", {first.each} images each" if first.each > 1 else ""
        note = f"mean over {len(first.first_rows)} held-out prompts{each}, the same noise before and after"
        change = f"{gain.mean:+z.3f}" if gain.count else None
        if gain.count > 1:
            change = f"{change} ({gain.low:+z.3f} to {gain.high:+z.3f})"
            note += "; in brackets the 95 % interval of the gain"
        counts = f"{compared.counts}, step {last.step} against step {first.step}"
        if best is not None and best[0] != last.step:
            counts += f"; the best held-out reward was {best[1]:.3f}, at step {best[0]} (on new prompts expect less)"
        figures = {"before": mean(first.rewards), "after": mean(last.rewards)}
        return {**headline, **figures, "change": change, "note": note, "counts": counts}
    for name, label in (("val/reward/mean", "held-out reward"), ("reward/mean", "training reward")):
        values = [value for value in series(rows, name)[1] if np.isfinite(value)]
        if values:
            headline |= {"label": label, "before": values[0], "note": "measured once so far"}
        if values[1:]:
            note = f"{label} of the first and the last of {len(values)} measurements"
            headline |= {"after": values[-1], "change": f"{values[-1] - values[0]:+z.3f}", "note": note}
        if values:
            return headline
    return headline | {"before": compared and mean(compared.first.rewards), "note": "no later measurement yet"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The keys of the command line."""

    run: Path = key("the run folder, which has config.yaml and metrics.jsonl", required=True)


PARSER = Parser(
    "the report",
    "python -m gerl.run.report",
    "run=FOLDER",
    "Write report.html of a run that is finished, stopped, or still training.",
    Request,
    bare="run",
)


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line; returns the exit code, see `run_command`."""
    return run_command(
        argv,
        lambda: PARSER.help(program),
        lambda given: log.info("%s", write_report(PARSER.parse(given)[0].run)),
        logger=log,
    )

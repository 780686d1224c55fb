"""`report.html` of a run: reward before and after, curves, a gallery and how to load the LoRA, in one file.

It is made from what lies in the run folder: at the end of a run, or at any time with
`python -m gerl.run.report RUN_DIR`.
"""

import argparse
import io
import json
import logging
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from gerl.commandline.command import run_command
from gerl.errors import GerlError
from gerl.pages.images import thumbnail
from gerl.pages.page import Card, Picture, descending, render
from gerl.run.charts import TIMING_TOTALS, Rows, reward_charts, series, small_charts, timing_parts
from gerl.run.checkpoint import checkpoint_paths
from gerl.run.tracking import read_metrics
from gerl.utils.files import finite, write_file, writing

log = logging.getLogger(__name__)

SMALL = 256  # pixels; up to this width pictures are kept exactly and shown with sharp pixels


@dataclass(frozen=True)
class Validation:
    """One validation: a reward for each of N held-out prompts (None: not scored) and the images of the first P."""

    step: int
    prompts: list[str]  # [N]
    rewards: list[float | None]  # [N]
    by_scorer: dict[str, list[float | None]]  # scorer -> [N]
    pixels: np.ndarray  # [P, H, W, 3] uint8


def save_validation(
    run_dir: Path,
    step: int,
    prompts: Sequence[str],
    pixels: np.ndarray,
    totals: Sequence[float | None],
    by_scorer: dict[str, list[float | None]],
) -> None:
    """Keep a validation as `validation/step_N.json` and `.npz`; pixels [P, H, W, 3] uint8 are of the first P prompts.

    Raises `GerlError` if it cannot be written.
    """
    if pixels.ndim != 4 or pixels.shape[3] != 3 or pixels.dtype != np.uint8 or len(pixels) > len(prompts):
        raise ValueError(f"pixels: expected at most [{len(prompts)}, H, W, 3] uint8, got {pixels.shape} {pixels.dtype}")
    if any(len(values) != len(prompts) for values in (totals, *by_scorer.values())):
        raise ValueError(f"expected {len(prompts)} rewards of each scorer, one per prompt")
    values = {"step": step, "rewards": totals, "by_scorer": by_scorer, "prompts": prompts}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, pixels=pixels)
    path = _validation_path(run_dir, step)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    # The JSON comes last: where it is, the images are complete.
    write_file(path.with_suffix(".npz"), buffer.getvalue())
    write_file(path, json.dumps(finite(values)))


def load_validation(run_dir: Path, step: int) -> Validation:
    """The validation of `step` that `save_validation` kept; raises `GerlError` if it is missing or damaged."""
    path = _validation_path(run_dir, step)
    try:
        values = json.loads(path.read_bytes())
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
            pixels = arrays["pixels"]
        return Validation(values["step"], values["prompts"], values["rewards"], values["by_scorer"], pixels)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise GerlError(f"the validation {path} cannot be read ({error}); delete it to leave it out") from error


def validation_steps(run_dir: Path) -> list[int]:
    """The trainer steps with a validation on disk, in order."""
    names = (re.fullmatch(r"step_(\d+)\.json", p.name) for p in (run_dir / "validation").glob("step_*.json"))
    return sorted(int(match[1]) for match in names if match)


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` from whatever the run has left so far and return its path.

    Raises `GerlError` if `run_dir` is no run folder or cannot be written.
    """
    if not any((run_dir / name).exists() for name in ("config.yaml", "metrics.jsonl", "validation")):
        raise GerlError(
            f"{run_dir} is no run folder: there is no config.yaml and no metrics.jsonl; give the folder the run printed"
        )
    rows = sorted(read_metrics(run_dir / "metrics.jsonl"), key=lambda row: row["step"])
    steps = validation_steps(run_dir)
    first = load_validation(run_dir, steps[0]) if steps else None
    last = load_validation(run_dir, steps[-1]) if steps[1:] else None
    config_text, config = _read_config(run_dir / "config.yaml")
    html = render(
        "report.html.j2",
        title=run_dir.resolve().parent.name,
        run=run_dir.resolve().name,
        facts=_facts(rows, config),
        headline=_headline(rows, first, last),
        main=reward_charts(rows),
        charts=small_charts(rows),
        cards=_cards(first, last),
        first_step=first.step if first else None,
        last_step=last.step if last else None,
        lora=_lora(run_dir),
        base=_base_path(config),
        config_text=config_text,
    )
    path = run_dir / "report.html"
    write_file(path, html)
    return path


def _validation_path(run_dir: Path, step: int) -> Path:
    return run_dir / "validation" / f"step_{step:06d}.json"


def _read_config(path: Path) -> tuple[str, dict[str, object]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return "", {}
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        log.warning("%s is not valid YAML: the report shows it as it is", path)
        values = None
    return text, values if isinstance(values, dict) else {}


def _get(config: dict[str, object], *names: str) -> object:
    value: object = config
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _base_path(config: dict[str, object]) -> str:
    """The model as Python code."""
    path = str(_get(config, "model", "path") or "BASE_MODEL")
    # A pipeline that ships with gerl is known to diffusers by its folder only.
    shipped = Path(__file__).parents[1] / "assets" / path
    return json.dumps(str(shipped) if (shipped / "model_index.json").exists() else path, ensure_ascii=False)


def _lora(run_dir: Path) -> str | None:
    folders = [path / "lora" for path in checkpoint_paths(run_dir / "checkpoints") if (path / "lora").is_dir()]
    return json.dumps(str(folders[-1].resolve()), ensure_ascii=False) if folders else None


def _mean(values: Sequence[float | None]) -> float | None:
    scored = [v for v in values if v is not None]
    return sum(scored) / len(scored) if scored else None


def _pairs(first: Validation, last: Validation) -> list[tuple[int, float | None, float | None]]:
    """(index, reward before, reward after) of the prompts that both validations have at the same place."""
    same = [i for i, (a, b) in enumerate(zip(first.prompts, last.prompts, strict=False)) if a == b]
    return [(i, first.rewards[i], last.rewards[i]) for i in same]


def _headline(rows: Rows, first: Validation | None, last: Validation | None) -> dict[str, str | None]:
    """The figures on top: what was measured, before, after, and how sure the gain is."""
    if first is not None and last is not None:
        gains = np.array([b - a for _, a, b in _pairs(first, last) if a is not None and b is not None])
        error = gains.std(ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else None
        change = f"{gains.mean():+.3f}" + (f" ± {error:.3f}" if error is not None else "") if len(gains) else None
        note = f"mean over {len(first.rewards)} held-out prompts, the same noise before and after" + (
            "; ± is the standard error of the paired gain" if error is not None else ""
        )
        return _headline_of("held-out reward", _mean(first.rewards), _mean(last.rewards), change, note)
    for name, label in (("val/reward/mean", "held-out reward"), ("reward/mean", "training reward")):
        values = [value for value in series(rows, name)[1] if np.isfinite(value)]
        if values[1:]:
            note = f"{label} of the first and the last of {len(values)} measurements"
            return _headline_of(label, values[0], values[-1], f"{values[-1] - values[0]:+.3f}", note)
        if values:
            return _headline_of(label, values[0], None, None, "measured once so far")
    before = _mean(first.rewards) if first is not None else None
    return _headline_of("held-out reward", before, None, None, "no later measurement yet")


def _headline_of(
    label: str, before: float | None, after: float | None, change: str | None, note: str
) -> dict[str, str | None]:
    show = [None if v is None else f"{v:.3f}" for v in (before, after)]
    return {"label": label, "before": show[0], "after": show[1], "change": change, "note": note}


def _seconds(rows: Rows) -> float:
    """Time of all steps: a step's total where it has one, else the sum of its parts."""
    parts = timing_parts(rows)
    totals = [next((row[name] for name in TIMING_TOTALS if row.get(name) is not None), None) for row in rows]
    added = [sum(row.get(name) or 0.0 for name in parts) for row in rows]
    return float(sum(a if total is None else total for total, a in zip(totals, added, strict=True)))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _facts(rows: Rows, config: dict[str, object]) -> list[tuple[str, str]]:
    done = rows[-1]["step"] if rows else 0
    planned = _get(config, "trainer", "steps")
    prompts, n = _get(config, "rollout", "prompts_per_step"), _get(config, "rollout", "n")
    scorers = _get(config, "reward", "scorers")
    facts = [
        ("steps", f"{done} of {planned}" if planned and planned != done else str(done)),
        ("time", _duration(_seconds(rows)) if _seconds(rows) else None),
        ("images a step", f"{prompts} prompts x {n}" if prompts and n else None),
        ("model", _get(config, "model", "path")),
        ("algorithm", _get(config, "algorithm", "name")),
        ("scorers", ", ".join(map(str, scorers)) if isinstance(scorers, dict) else None),
        ("LoRA rank", _get(config, "model", "lora_rank")),
        ("learning rate", _get(config, "actor", "lr")),
        ("seed", _get(config, "trainer", "seed")),
    ]
    return [(name, str(value)) for name, value in facts if value is not None]


def _cards(first: Validation | None, last: Validation | None) -> list[Card]:
    """Pictures of both validations side by side, largest gain first; what was not scored comes last."""
    validations = [v for v in (first, last) if v is not None]
    if first is None:
        return []
    rows = _pairs(first, last or first)
    shown = min(len(validation.pixels) for validation in validations)
    ranked: list[tuple[float | None, Card]] = []
    for i, before, after in (row for row in rows if row[0] < shown):
        gain = after - before if last is not None and before is not None and after is not None else None
        trend = "flat" if gain is None or abs(gain) < 5e-4 else "up" if gain > 0 else "down"
        pictures = [_picture(validation, i) for validation in validations]
        heading = first.prompts[i]
        ranked.append((gain, Card(pictures, (), heading, gain="" if gain is None else f"{gain:+.3f}", trend=trend)))
    return [card for _, card in sorted(ranked, key=lambda entry: descending(entry[0]))]


def _picture(validation: Validation, i: int) -> Picture:
    value = validation.rewards[i]
    reward = "not scored" if value is None else f"{value:.3f}"
    uri = thumbnail(validation.pixels[i], width=384, exact=SMALL)
    return Picture(uri, f"{validation.prompts[i]}, reward {reward}", note=reward)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gerl.run.report", description="Write report.html of a run.")
    parser.add_argument("run_dir", type=Path, help="the folder of the run, with config.yaml and metrics.jsonl")

    def work(arguments: list[str]) -> None:
        log.info("%s", write_report(parser.parse_args(arguments).run_dir))

    return run_command(argv, parser.format_help, work, logger=log)


if __name__ == "__main__":
    sys.exit(main())

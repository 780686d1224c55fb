"""Pairs of name and value that say in short which run it is."""

from collections.abc import Mapping
from typing import Any

from gerl.run.charts import TIMING_TOTALS, Rows, timing_parts
from gerl.run.settings import get, learning_rate


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


def _replaced(rows: Rows) -> str | None:
    """Workers that died and were replaced, and the time that took."""
    restarts, lost = (sum(row.get(f"cluster/{name}") or 0.0 for row in rows) for name in ("restarts", "lost_s"))
    return f"{restarts:.0f} workers that died, {_duration(lost)} lost" if restarts else None


def facts(rows: Rows, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of name and value: how far the run is, and what it trains by which settings."""
    done = rows[-1]["step"] if rows else 0
    planned = get(config, "trainer", "steps")
    prompts, n = get(config, "rollout", "prompts_per_step"), get(config, "rollout", "n")
    scorers = get(config, "reward", "scorers")
    train = get(config, "model", "train") or "lora"
    lora = train == "lora"
    facts = [
        ("steps", f"{done} of {planned}" if planned and planned != done else str(done)),
        ("time", _duration(_seconds(rows)) if _seconds(rows) else None),
        ("replaced", _replaced(rows)),
        ("images per step", f"{prompts} prompts x {n}" if prompts and n else None),
        ("model", get(config, "model", "path")),
        ("algorithm", get(config, "preset") or get(config, "algorithm", "name")),
        ("scorers", ", ".join(map(str, scorers)) if isinstance(scorers, dict) else None),
        ("trained", None if lora else "all weights" if train == "full" else f"weights {train}"),
        ("LoRA rank", get(config, "model", "lora_rank") if lora else None),
        ("learning rate", learning_rate(config)),
        ("seed", get(config, "trainer", "seed")),
    ]
    return [(name, str(value)) for name, value in facts if value is not None]

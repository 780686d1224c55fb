"""The model card of a LoRA, from its run folder: text, images, and facts about the base model."""

import io
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import yaml
from huggingface_hub import ModelCard, ModelCardData, model_info
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from gerl.config import Source, sources
from gerl.errors import ConfigError, GerlError, ModelError
from gerl.export.base import Base
from gerl.model.paths import SHIPPED, WEIGHTS, resolve
from gerl.run.card import CARD, read_sessions, redact, version_of
from gerl.run.choice import FOUND
from gerl.run.guard import read_guard
from gerl.run.hacking import NO_SIGNALS
from gerl.run.settings import changes, get, planned_steps
from gerl.run.tracking import Rows, read_metrics, series
from gerl.run.usage import ASSETS, program
from gerl.run.validation import (
    BeforeAfter,
    SamplingRecord,
    Validation,
    evenly,
    load_validation,
    load_validations,
    mean,
    standard_error,
)
from gerl.utils.files import reason
from gerl.utils.hub_errors import UNREACHED
from gerl.utils.pages import grid, render, still

logger = logging.getLogger("gerl")
PATIENCE = 10.0  # timeout of the Hub in seconds
PATH = re.compile(r"(?<![\w./@~-])(?:~|\.{1,2})?/(?!/)(?:[^\s/'\"\],}]+/)*([^\s/'\"\],}]+)")


@dataclass(frozen=True)
class BaseModel:
    """Facts about the base model. hub_id: None for a folder. pipeline: its class. licence: as on its card."""

    shown: str
    hub_id: str | None
    pipeline: str | None
    licence: str | None
    licence_fields: dict[str, Any]  # for the header of the card
    merged: str | None

    @property
    def licence_link(self) -> str | None:
        return self.licence_fields.get("license_link")


def base_model(base: Base) -> BaseModel:
    """Look up the base in its folder or on the Hub; missing facts are None, with a warning."""
    hub_id = base.path if is_hub_id(base.path) else None
    fields = _licence_entry(base.path, hub_id)
    shipped = base.path in SHIPPED
    shown = f"`{base.path}`, which ships with gerl" if shipped else f"`{without_paths(base.path)}`"
    if hub_id is not None:
        shown = f"[{hub_id}](https://huggingface.co/{hub_id})"
    licence = fields.get("license_name") if fields.get("license") == "other" else fields.get("license")
    merged = None if base.merged is None else without_paths(base.merged)
    if base.parts:
        shown += str(replace(base, path="", merged=None, quantised="none", parts=shown_parts(base)))
    return BaseModel(shown, hub_id, _pipeline(base.path), licence or fields.get("license"), fields, merged)


def shown_path(path: str) -> str:
    """Return a path for the card: a Hub id, or a text without local folders."""
    return path if is_hub_id(path) else without_paths(path)


def shown_parts(base: Base) -> dict[str, str | None]:
    """Return `model.parts` for the card, without local folders."""
    return {name: None if part is None else shown_path(part) for name, part in base.parts.items()}


def is_hub_id(path: str) -> bool:
    """Whether `model.path` names a model of the Hub."""
    try:
        return resolve(path) == path and not Path(path).exists()
    except ModelError:  # a folder that no longer exists
        return False


def without_paths(value: str) -> str:
    """Remove secrets from a text, and replace local paths by file names."""
    return PATH.sub(r"\1", redact(value))


def _pipeline(path: str) -> str | None:
    try:
        return str(diffusers.DiffusionPipeline.load_config(resolve(path)).get("_class_name"))
    except (ModelError, OSError, ValueError, *UNREACHED) as error:
        logger.warning("the base model %s is not available: its card has fewer facts (%s)", path, reason(error))
        return None


def _licence_entry(path: str, hub_id: str | None) -> dict[str, str]:
    """Return `license`, `license_name` and `license_link` of the base's card, as far as known."""
    if path in SHIPPED:
        return {"license": "apache-2.0"}  # gerl's licence
    data: Any = None
    try:
        if hub_id is not None:
            data = model_info(hub_id, timeout=PATIENCE).card_data
        elif (readme := Path(resolve(path)) / "README.md").is_file():
            data = ModelCard.load(readme, ignore_metadata_errors=True).data
    except (HfHubHTTPError, OfflineModeIsEnabled, *UNREACHED, ModelError) as error:
        logger.warning("the licence of %s is unknown: its card cannot be read (%s)", path, reason(error))
    except (OSError, ValueError, yaml.YAMLError) as error:
        logger.warning("the licence of %s is unknown: its README.md cannot be read (%s)", path, reason(error))
    entries = {} if data is None else data.to_dict()
    names = ("license", "license_name", "license_link")
    return {name: str(entries[name]) for name in names if isinstance(entries.get(name), str)}


HIDDEN = ("checkpoint", "cluster", "logger")  # blocks irrelevant for the LoRA
LONGEST = 200  # maximum characters of a value in a table


@dataclass(frozen=True)
class RunFacts:
    """A run up to a checkpoint: configuration, metrics, the first validation and that of the checkpoint's step."""

    run_dir: Path
    step: int
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    validations: list[Validation]
    first: Validation | None
    last: Validation | None


@dataclass(frozen=True)
class ComfyFiles:
    """Names of the files for ComfyUI and the workflow, or the reason why there are none."""

    files: Sequence[str] = ()
    workflow: str | None = None
    why: str = ""


def read_run(run_dir: Path, step: int, config: dict[str, Any]) -> RunFacts:
    """Read the data of a run folder up to `step`."""
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if row["step"] <= step]
    validations = [v for v in load_validations(run_dir) if v.step <= step]
    first = validations[0] if validations else None
    last = None
    if validations[1:] and validations[-1].step == step:
        try:
            last = load_validation(run_dir, step)
        except GerlError:  # only its images are damaged, not its numbers
            last = validations[-1]
    return RunFacts(run_dir, step, config, sorted(rows, key=lambda row: row["step"]), validations, first, last)


def pictures(run: RunFacts) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Render the images before and after training, and the reward curve: files, and values of the template."""
    files: dict[str, bytes] = {}
    values: dict[str, Any] = {"curve": None, "after": None, "prompts": []}
    compared = None if run.first is None or run.last is None else BeforeAfter(run.first, run.last)
    chosen = [gain.index for gain in evenly(compared.pictured, SHOWN)] if compared is not None else []
    if chosen and run.first is not None and run.last is not None:
        files |= {"pictures/before.png": prompt_grid(run.first, chosen)}
        files |= {"pictures/after.png": prompt_grid(run.last, chosen)}
        values |= {"before": "pictures/before.png", "after": "pictures/after.png"}
        values["prompts"] = [_cell(run.first.prompts[i]) for i in chosen]
        values["before_title"] = "base model" if run.first.step == 0 else f"after {run.first.step} steps"
        values["after_title"] = f"with this LoRA, {run.step} steps"
    errors = {v.step: e for v in run.validations if (e := standard_error(v.by_prompt(v.rewards))) is not None}
    if (curve := reward_curve(run.rows, errors)) is not None:
        files["pictures/reward.png"] = curve
        values["curve"] = "pictures/reward.png"
    return files, values


def numbers(run: RunFacts, weights: str) -> dict[str, Any]:
    """Return the table of the held-out prompts: total and scorers before, after, and the paired change."""
    if run.first is None:
        return {"rows": []}
    train, held_out = get(run.config, "data", "train"), get(run.config, "validation", "data")
    paths = [{source.path for source in _sources(entry)} for entry in (train, held_out)]
    entries: dict[str, Any] = {
        "rows": [],
        "count": len(run.first.first_rows),
        "each": run.first.each,
        "source": _prompts(held_out),
        "base": mean(run.first.rewards),
        "averaged": weights == "raw",
        "shared": _cell(", ".join(sorted(set.intersection(*paths)))),
    }
    if run.last is None:
        return entries
    columns = {"reward": (run.first.rewards, run.last.rewards)}
    columns |= {name: (values, run.last.by_scorer.get(name, [])) for name, values in run.first.by_scorer.items()}
    for name, (old, new) in columns.items():
        sides = zip(run.first.by_prompt(old), run.last.by_prompt(new) if new else [], strict=False)
        pairs = [(a, b) for a, b in sides if a is not None and b is not None]
        if not pairs:
            continue
        gains = [b - a for a, b in pairs]
        error = standard_error(gains)
        change = f"{sum(gains) / len(gains):+z.3f}" + ("" if error is None else f" ± {error:.3f}")
        entries["rows"].append([name, *(f"{sum(side) / len(pairs):.3f}" for side in zip(*pairs, strict=True)), change])
    return entries | {"counts": BeforeAfter(run.first, run.last).counts}


def _sources(entries: Any) -> list[Source]:
    """Return the sources in `data.train` or `validation.data`; empty if the value is invalid."""
    try:
        return [] if entries is None else list(sources(entries, "data.train"))
    except ConfigError:  # written by another version of gerl
        return []


def _prompts(entries: Any) -> str:
    parts = [s.path + ("" if s.weight is None else f" (weight {s.weight:g})") for s in _sources(entries)]
    return _cell(", ".join(parts)) or "unknown prompts"


def signals_at(run_dir: Path, step: int) -> list[str]:
    """Return what the guard saw after `step`, for the card."""
    rows = [row for row in read_guard(run_dir) if row["step"] == step and row["signal"] not in NO_SIGNALS]
    return [_cell(FOUND.split(row["text"])[0]) for row in rows]


def model_card(
    run: RunFacts, base: BaseModel, comfy: ComfyFiles, shown: dict[str, Any], repository: str, weights: str, rank: int
) -> str:
    """Render the README.md of the repository, with its header."""
    name = repository.rpartition("/")[2]
    names = ("width", "height", "num_inference_steps", "guidance_scale")
    settings, validation = get(run.config, "sampling") or {}, get(run.config, "validation") or {}
    sampling = {name: settings.get(name) for name in names}
    values: dict[str, Any] = {
        "title": name,
        "base": base,
        "version": version_of("gerl") or "",
        "algorithm": get(run.config, "algorithm", "name") or "an unknown algorithm",
        "steps": run.step,
        "images": _images(run.config),
        "pictures": shown,
        "numbers": numbers(run, weights),
        "signals": signals_at(run.run_dir, run.step),
        "program": _program(run, repository),
        "comfy": comfy,
        "weights_file": WEIGHTS,
        "scorers": _scorers(run.config),
        "facts": _facts(run, rank),
        "changes": [row for row in changes(run.config) if row[0].split(".")[0] not in HIDDEN],
        "sampling": sampling,
        "held_out": sampling | {name: value for name, value in validation.items() if value is not None},
    }
    header = _header(base, name, run.config).to_yaml()
    return render("card.md.j2", card_data=header, cell=_cell, code=_code, **values).strip() + "\n"


def _header(base: BaseModel, name: str, config: Mapping[str, Any]) -> ModelCardData:
    kind = base.pipeline or ""
    video = any(word in kind for word in ("Video", "Wan", "LTX"))
    edits = any(word in kind for word in ("Edit", "Kontext", "Img2Img", "Inpaint"))
    scorers = list(get(config, "reward", "scorers") or {})
    return ModelCardData(
        base_model=base.hub_id,
        base_model_relation=None if base.hub_id is None else "adapter",
        library_name="diffusers",
        pipeline_tag="text-to-video" if video else "image-to-image" if edits else "text-to-image",
        tags=["lora", "diffusers", "gerl", "reinforcement-learning", *(f"reward:{scorer}" for scorer in scorers)],
        model_name=name,
        **base.licence_fields,
    )


def _program(run: RunFacts, repository: str) -> str:
    validation = run.last if run.last is not None and run.last.drawing is not None and run.last.shown else None
    drawing = SamplingRecord([], [], "cpu") if validation is None or validation.drawing is None else validation.drawing
    lines = [line for line in drawing.lora_lines if not line.startswith("load_lora(")]
    text = program(run.config, Path(repository), validation, replace(drawing, lora_lines=lines))
    if (path := get(run.config, "model", "path")) in SHIPPED:  # a folder in the package
        text = text.replace(repr(str(ASSETS / str(path))), f'str(Path(gerl.__file__).parent / "assets/{path}")')
        text = f"from pathlib import Path\n\nimport gerl\n{text}"
    return without_paths(text)


def _scorers(config: Mapping[str, Any]) -> list[tuple[str, float, str]]:
    rows = []
    usual = {"scale": 1.0, "offset": 0.0}
    for name, scorer in (get(config, "reward", "scorers") or {}).items():
        values = scorer if isinstance(scorer, Mapping) else {}
        keys = ("path", "function", "kwargs", "clip", "normalise", "scale", "offset")
        others = {k: v for k in keys if (v := values.get(k)) not in (None, "none", {}, [], usual.get(k))}
        if "path" not in others:
            others.pop("function", None)
        shown = ", ".join(f"{k}={v if isinstance(v, str) else json.dumps(v, default=str)}" for k, v in others.items())
        rows.append((name, values.get("weight", 1.0), shown))
    return rows


def _facts(run: RunFacts, rank: int) -> list[tuple[str, str]]:
    config, card = run.config, read_sessions(run.run_dir / CARD)
    session = card[-1] if card else {}
    machine = session.get("gpus") or [session.get("cpu")]
    packages = session.get("packages") or {}
    facts = [
        ("run", run.run_dir.resolve().name),
        ("steps", f"{run.step} of {planned_steps(run.run_dir, config)}"),
        ("images per step", _images(config)),
        ("training prompts", _prompts(get(config, "data", "train"))),
        ("held-out prompts", _prompts(get(config, "validation", "data"))),
        ("LoRA rank, alpha", f"{rank}, {get(config, 'model', 'lora_alpha'):g}"),
        ("seed", get(config, "trainer", "seed")),
        ("machine", ", ".join(str(part) for part in machine if part) or None),
        ("versions", ", ".join(f"{name} {number}" for name, number in packages.items()) or None),
    ]
    return [(name, value) for name, value in facts if value is not None]


def _images(config: Mapping[str, Any]) -> str | None:
    prompts, n = get(config, "rollout", "prompts_per_step"), get(config, "rollout", "n")
    return f"{prompts} prompts x {n} images" if prompts and n else None


def _cell(text: str) -> str:
    line = " ".join(without_paths(text).split()).replace("|", "\\|")
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if "`" not in text else _cell(text)


# --- Images of a model card: held-out prompts before and after training, and the reward curve

SHOWN, COLUMNS = 8, 4  # prompts and columns of a grid


def prompt_grid(validation: Validation, prompts: Sequence[int]) -> bytes:
    """Render the images of `prompts` with their rewards as a PNG."""
    rewards = [validation.rewards[i] for i in prompts]
    captions = ["not scored" if reward is None else f"reward {reward:.3f}" for reward in rewards]
    images = [still(validation.pixels[validation.shown.index(i)]) for i in prompts]
    buffer = io.BytesIO()
    grid(images, captions, columns=COLUMNS, min_width=192).save(buffer, "png", optimize=True)
    return buffer.getvalue()


def reward_curve(rows: Rows, errors: Mapping[int, float]) -> bytes | None:
    """Render the reward of training and held-out prompts over the steps as a PNG; None without a reward or matplotlib.

    errors: step -> standard error of the held-out mean.
    """
    training, held_out = series(rows, "reward/mean"), series(rows, "val/reward/mean")
    if not any(np.isfinite(values).any() for _, values in (training, held_out)):
        return None
    try:
        from matplotlib.figure import Figure  # imported late, since it takes seconds, and arguments are checked first
    except ImportError as error:
        logger.warning("the model card is without the curve of the reward: pip install matplotlib (%s)", error)
        return None
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*training, linewidth=1, alpha=0.6, label="training prompts of the step")
    steps, means = held_out
    bars = [errors.get(int(step), np.nan) for step in steps]
    axes.errorbar(steps, means, bars, linewidth=2, marker="o", markersize=4, capsize=3, label="held-out prompts")
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.grid(axis="y", linewidth=0.4)
    axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()

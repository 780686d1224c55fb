"""Which checkpoint of a run is used: by export, evaluation, Python and pages, for resuming, and to be kept.

Checkpoints with signals of the guard are never used without being named: their reward says that they are good.
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gerl.config.changes import flat_settings
from gerl.config.held_out import BY_REWARD, REWARD, Criterion
from gerl.errors import CheckpointError, ConfigError, FlaggedError
from gerl.run.checkpoint import (
    MANIFEST,
    Checkpoint,
    checkpoint_paths,
    find_run_to_resume,
    intact_checkpoints,
    load_checkpoint,
    remove_checkpoints,
    verified,
)
from gerl.run.guard import ALIGNMENT, read_guard
from gerl.run.settings import get

log = logging.getLogger(__name__)
FOUND = re.compile(r", most for |; | \(by chance")  # what follows a finding in a row of guard.jsonl


@dataclass(frozen=True)
class Choice:
    """The checkpoint of a run that is to be used.

    use: its step; None: the base model, since no checkpoint was judged to be without signals of the guard. latest: the
    step of the newest. flagged: the steps of those with signals in their validation, or else in the last one before.
    why: which one it is, and why.
    """

    use: int | None
    latest: int
    flagged: tuple[int, ...]
    why: str

    @property
    def offered(self) -> int | None:
        """The step of the checkpoint that a finished run shows: the newest, unless it has signals."""
        return self.use if self.latest in self.flagged else self.latest

    def offers(self, step: int) -> bool:
        """Whether the checkpoint of a step may be shown in place of the `offered` one."""
        return step == self.use if self.latest in self.flagged else step not in self.flagged


def choice_of(run: Path) -> Choice | None:
    """Choose the checkpoint of the run in a folder, without verifying files; None: there is no checkpoint."""
    checkpoints = intact_checkpoints(run / "checkpoints", load=partial(load_checkpoint, verify=False))
    return choose(checkpoints, read_guard(run)) if checkpoints else None


def choose(checkpoints: Sequence[Checkpoint], rows: Sequence[Mapping[str, Any]] = ()) -> Choice:
    """Choose among the checkpoints of a run, at least one, in the order of their steps; `rows`: of `guard.jsonl`."""
    judged = _Judged(checkpoints)
    use, steps = judged.use, tuple(c.step for c in judged.flagged)
    return Choice(None if use is None else use.step, checkpoints[-1].step, steps, judged.why(rows))


def find_checkpoint(folder: Path, step: int | None = None) -> tuple[Path, Checkpoint, str]:
    """Find the run folder of `folder` (a run or one of its checkpoints), a checkpoint, and the reason for this one.

    The checkpoint is verified. Without `step` it is that of the `Choice`. Raises `FlaggedError`: that is the base
    model; `CheckpointError`: there is none, or it is damaged; `ConfigError`: `folder` is neither a run nor a
    checkpoint, or `step` is not that of the checkpoint.
    """
    if (folder / MANIFEST).is_file() or (folder.is_dir() and re.fullmatch(r"step_\d+", folder.name)):
        checkpoint = load_checkpoint(folder)
        if step not in (None, checkpoint.step):
            raise ConfigError(f"step={step}: run={folder} is the checkpoint of step {checkpoint.step}; remove one")
        return folder.resolve().parents[1], checkpoint, _requested(checkpoint)
    paths = {int(re.sub(r"\D", "", path.name)): path for path in checkpoint_paths(folder / "checkpoints")}
    if not paths:
        what = "has no checkpoints" if folder.is_dir() else "does not exist"
        places = [folder, *sorted(folder.iterdir())] if folder.is_dir() else []
        newest = next(filter(None, map(find_run_to_resume, places)), "outputs/signs/TIME")
        raise ConfigError(f"run={folder} {what}: give a run folder such as {newest}, or a checkpoint in it")
    if step is not None:
        if step not in paths:
            raise CheckpointError(
                f"step={step}: {folder} has no checkpoint of this step, only of {', '.join(map(str, paths))}"
            )
        checkpoint = load_checkpoint(paths[step])
        return folder, checkpoint, _requested(checkpoint)
    intact = intact_checkpoints(folder / "checkpoints", logging.WARNING, verified)
    if not intact:
        raise CheckpointError(f"run={folder}: all its checkpoints are damaged, of step {', '.join(map(str, paths))}")
    choice = choose(intact, read_guard(folder))
    if choice.use is None:
        raise FlaggedError(f"run={folder}: {choice.why}")
    return folder, next(c for c in intact if c.step == choice.use), choice.why


def comparable_checkpoints(run: Path) -> list[Checkpoint]:
    """Return the checkpoints of a run among which `find_checkpoint` chooses the best one by `checkpoint.best`."""
    intact = intact_checkpoints(run / "checkpoints", load=verified)
    judged = _Judged(intact) if intact else None
    if judged is None:
        return []
    if others := [str(c.step) for c in judged.flagged]:
        log.info("%s: no candidate because of signals of the guard: step %s", run, ", ".join(others))
    return judged.candidates


def best_checkpoint(root: Path, before: int) -> Checkpoint | None:
    """Return the best checkpoint before step `before` without signals of the guard; None if there is none."""
    intact = [c for c in intact_checkpoints(root, logging.WARNING) if c.step < before]
    return _Judged(intact).best if intact else None


def good_checkpoint(root: Path, ignored: Sequence[str] | None = None) -> Checkpoint | None:
    """Return the last checkpoint without signals of the guard, if possible one that was validated itself, or None.

    `ignored`: `guard.ignored`, by default that of the newest checkpoint.
    """
    intact = intact_checkpoints(root, logging.WARNING, verified)
    return _Judged(intact, ignored).last_good if intact else None


def signals_of(checkpoint: Checkpoint, ignored: Sequence[str] = ()) -> list[str]:
    """Return the keys of a checkpoint's signals of the guard without those that `guard.ignored` names."""
    stored = checkpoint.state.get("signals")
    keys = list(map(str, stored)) if isinstance(stored, list) else []
    return [key for key in keys if not {key, key.partition("/")[0]} & set(ignored)]


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, the one to be used, and the best with and without the guard.

    If there are signals of the guard, the earliest with some, the last one before that, and the one to resume from are
    kept too. A damaged checkpoint is neither counted nor deleted: it must not displace an intact one.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: keep at least one checkpoint")
    intact = intact_checkpoints(root, load=verified)
    needed = {c.path for c in [*intact[-keep:], *(_Judged(intact).needed if intact else [])]}
    remove_checkpoints(root, [c.path for c in intact if c.path not in needed])


def criterion_of(checkpoint: Checkpoint) -> Criterion:
    """Return `checkpoint.best` of the run that wrote a checkpoint."""
    settings = checkpoint.state.get("settings")
    setting = flat_settings(settings).get("checkpoint.best") if isinstance(settings, dict) else None
    try:
        return Criterion.parse(setting) if isinstance(setting, str) else BY_REWARD
    except ConfigError:
        return BY_REWARD


def held_out_value(checkpoint: Checkpoint, metric: str) -> float | None:
    """Return a metric of the validation after the step of a checkpoint; None if it is missing or not finite."""
    stored = checkpoint.state.get("val_metrics")
    values = {REWARD: checkpoint.state.get("val_reward"), **(stored if isinstance(stored, dict) else {})}
    value = values.get(metric)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def shortened(keys: Sequence[str]) -> str:
    """Name the first two keys and count the rest."""
    return ", ".join(keys[:2]) + (f" and {len(keys) - 2} more" if len(keys) > 2 else "")


class _Judged:
    """Checkpoints of a run, at least one, in the order of their steps, as its newest settings judge them.

    flagged: those with signals, the others are `clean`. candidates: clean ones with a value of the criterion, measured
    like that of the newest; a resumed run may have changed the validation.
    """

    def __init__(self, checkpoints: Sequence[Checkpoint], ignored: Sequence[str] | None = None) -> None:
        self.newest = checkpoints[-1]
        self.criterion = criterion_of(self.newest)
        stored = get(self.newest.state, "settings", "guard", "ignored") if ignored is None else list(ignored)
        self.ignored = list(map(str, stored)) if isinstance(stored, list) else []
        self.flagged = [c for c in checkpoints if self.signals(c)]
        self.clean = [c for c in checkpoints if not self.signals(c)]
        self.valued = [c for c in checkpoints if self.value(c) is not None]
        self.good = [c for c in self.clean if self.value(c) is not None]
        self.candidates = self._like(self.good, self.good)

    def signals(self, checkpoint: Checkpoint) -> list[str]:
        return signals_of(checkpoint, self.ignored)

    def value(self, checkpoint: Checkpoint) -> float | None:
        return held_out_value(checkpoint, self.criterion.metric)

    @property
    def use(self) -> Checkpoint | None:
        """The best candidate; without one the newest checkpoint if none has signals."""
        return self.best or (None if self.flagged else self.newest)

    @property
    def best(self) -> Checkpoint | None:
        return self._top(self.candidates)

    @property
    def largest(self) -> Checkpoint | None:
        """The best checkpoint with or without signals, among those whose value compares with the candidates'."""
        return self._top(self._like(self.valued, self.good or self.valued))

    @property
    def last_good(self) -> Checkpoint | None:
        """The last one without signals; one that was validated itself if there is any, since the others may be next."""
        return next(reversed(self.good or self.clean), None)

    @property
    def before(self) -> Checkpoint | None:
        """The last one before the first signal, as `last_good`."""
        first = self.flagged[0].step if self.flagged else math.inf
        return next(
            (c for checkpoints in (self.good, self.clean) for c in reversed(checkpoints) if c.step < first), None
        )

    @property
    def needed(self) -> list[Checkpoint]:
        """Those that are not to be deleted."""
        signalled = [self.flagged[0], self.before, self.last_good] if self.flagged else []
        return [c for c in (self.use, self.largest, *signalled) if c is not None]

    def why(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Say which one is to be used and why; `rows`: of `guard.jsonl`."""
        use, largest = self.use, self.largest
        if use is None:
            return self._refusal(rows)
        value = self.value(use)
        if value is None:
            return f"step {use.step}, the latest"
        name = "held-out reward" if self.criterion.metric == REWARD else self.criterion.metric
        words = f"{name} {value:.3f}"
        if largest is None or largest is use:
            return f"step {use.step}, the best: {words}"
        signals = shortened(self.signals(largest))
        other = f"step={largest.step} has {self.value(largest):.3f}, and signals of the guard: {signals}"
        return f"step {use.step}, the best without signals of the guard: {words}; {other}"

    def _refusal(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Say that the base model is to be used, what the earliest checkpoint has lost, and how it is taken anyway."""
        first, before = self.flagged[0], self.before
        sentence = (
            "every validated checkpoint has signals of the guard: use the base model; already at the earliest, step "
            f"{first.step}, {self._fall(first, rows)}; step={first.step}, or {first.path}, takes it anyway"
        )
        return (
            sentence
            if before is None
            else f"{sentence}, and step={before.step} one before that, which was not validated"
        )

    def _fall(self, checkpoint: Checkpoint, rows: Sequence[Mapping[str, Any]]) -> str:
        """Say what fell in the last judgement of a checkpoint: a watched column if possible, else as the judge sees."""
        keys = self.signals(checkpoint)
        sentences = {f"{r['signal']}/{r['column']}": r["text"] for r in rows if r["step"] <= checkpoint.step}
        texts = {key: FOUND.split(sentences[key])[0] for key in keys if key in sentences}
        order = sorted(texts, key=lambda key: (not key.startswith("watched/"), key != ALIGNMENT))
        return texts[order[0]] if order else f"there is {shortened(keys)}"

    def _top(self, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
        """Return the best by the criterion, the newest of equals; None if there is none."""
        ranked = [(self.criterion.rank(v), c.step, c) for c in checkpoints if (v := self.value(c)) is not None]
        return max(ranked, key=lambda entry: entry[:2])[2] if ranked else None

    def _like(self, checkpoints: Sequence[Checkpoint], references: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return the checkpoints that were measured like the last of the `references`; unknown ways count as such."""
        return [c for c in checkpoints if _measure(c) in (None, _measure(references[-1]))]


def _measure(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the settings on which the value of a checkpoint depends."""
    settings = checkpoint.state.get("settings")
    values = flat_settings(settings) if isinstance(settings, dict) else {}
    idle = ("replicas", "gpus", "timeout", "every", "micro_batch_size", "on_error", "retries", "max_failed")
    blocks = ("model", "sampling", "reward", "validation")
    return {k: v for k, v in values.items() if k.startswith(blocks) and not k.endswith(idle)} or None


def _requested(checkpoint: Checkpoint) -> str:
    signals = signals_of(checkpoint)
    return f"step {checkpoint.step}, as requested" + (
        f"; signals of the guard: {shortened(signals)}" if signals else ""
    )

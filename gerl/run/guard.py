"""Guard against reward hacking: held-out images compared with the first ones, and trends during training."""

import contextlib
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gerl.run.health import number
from gerl.run.settings import get
from gerl.run.validation import RESAMPLES, Validation, bootstrap, known, mean, paired_gains, share_interval
from gerl.utils.files import finite, write_file, writing

# --- Reward hacking: comparison of held-out images with the first ones.
#
# Thresholds are measured on the run's first validation, whose images have the same noise; none is tuned to a model. The
# guard does not know the intention: it reports how the images changed and which of them to look at.

FILE = "guard.jsonl"
CONFIDENCE = 0.999  # two-sided level of an interval: a run has about ten validations with about ten tests each
CHANCE = (1 - CONFIDENCE) / 2  # probability of a fall as large by chance alone
RARE = 0.025  # share of the first images on each side considered unusual
SHOWN = 8  # images shown per signal
FEWEST = 8  # fewest prompts for a test
WORDS = yaml.safe_load(Path(__file__).with_name("looks.yaml").read_text(encoding="utf-8"))
LOOKS, UNLIKE = WORDS["looks"], WORDS["unlike"]  # statistic -> words


@dataclass(frozen=True)
class Signal:
    """A sign of reward hacking or collapse: a `value` beyond its `threshold`, with a sentence."""

    name: str  # watched, disagreement, looks, diversity, kl or no_signal
    column: str
    step: int
    value: float
    threshold: float
    text: str
    shown: list[int]  # rows of the validation where it is most visible
    size: float | None = None  # of a fall, in standard deviations of the column over the first validation's prompts

    @property
    def key(self) -> str:
        """Name in `guard.ignored`."""
        return f"{self.name}/{self.column}"


def signals(
    first: Validation,
    later: Validation,
    config: Mapping[str, Any],
    peaks: Mapping[str, Validation] | None = None,
    importance: float = 0.0,
) -> list[Signal]:
    """Find the signs of reward hacking or collapse in a validation, compared with the run's first one.

    config: as in config.yaml. peaks: column -> the validation in which it was highest so far; a watched column is also
    compared with its peak, since it may rise before it falls. importance: smallest relevant fall of a watched column,
    in standard deviations over the prompts of the first validation. Validations of other prompts, or of fewer than
    eight, are not compared.
    """
    if first.prompts != later.prompts or len(first.first_rows) < FEWEST or first.step >= later.step:
        return []
    found = [*_looks(first, later)]
    for name in watched_columns(config, list(first.by_scorer)):
        for before in (first, (peaks or {}).get(name, first)):
            gain = paired_gains(before, later).get("reward")
            if gain is None or not gain.low > 0:
                continue
            of_prompts = known(first.by_prompt(first.by_scorer[name]))
            spread = statistics.stdev(of_prompts) if len(of_prompts) > 1 else 0.0
            fell = [s for s in _falls(before, later, name, spread) if s.size is None or s.size >= importance]
            found += fell
            if fell:
                break
    return found


def raise_peaks(peaks: dict[str, Validation], validation: Validation) -> None:
    """Set `validation` as the peak of the columns that are highest in it."""
    for name, values in validation.by_scorer.items():
        if name not in peaks or _mean(values) > _mean(peaks[name].by_scorer[name]):
            peaks[name] = validation


def watched_columns(config: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    """Return the columns that do not count in the reward: those of watched scorers, and extra columns of all scorers.

    Excludes a scorer's uncertainty (`sigma`), which is neither good nor bad.
    """
    scorers = get(config, "reward", "scorers") or {}
    return [c for c in columns if ("/" in c or get(scorers, c, "weight") == 0) and not c.endswith("/sigma")]


def _falls(first: Validation, later: Validation, name: str, spread: float) -> Iterator[Signal]:
    """Find significant falls of a watched column while the reward rises: of its mean, and on most of the prompts.

    The size of the latter is that of the median change: a few large gains do not hide it. spread: standard deviation
    of the column over the prompts; the size of a fall is unknown (always large) if it is 0.
    """
    rewards, values = _changes(first, later, None), _changes(first, later, name)
    changes = known(values)
    shown = _largest(first, later, name)
    if len(changes) >= FEWEST and (mean := statistics.fmean(changes)) < (lowest := _lowest_mean(changes)):
        before, after = (_mean(one.by_scorer[name]) for one in (first, later))
        text = (
            f"{name}, which is watched, fell from {before:.3f} at step {first.step} to {after:.3f} while the "
            f"reward rose from {_mean(first.rewards):.3f} to {_mean(later.rewards):.3f} (by chance: {lowest:+.3f})"
        )
        size = -mean / spread if spread > 0 else None
        yield Signal("watched", name, later.step, mean, lowest, text, shown, size)
    risen = [b for a, b in zip(rewards, values, strict=False) if a is not None and b is not None and a > 0]
    changed = [b for b in risen if b != 0]
    fell, enough = sum(b < 0 for b in changed), _enough_falls(len(changed))
    if len(changed) >= FEWEST and enough is not None and fell >= enough:
        text = (
            f"the reward and {name} disagree: of {len(risen)} held-out prompts whose reward rose since step "
            f"{first.step}, {name} fell on {fell} and rose on {len(changed) - fell}"
        )
        signs, least = (1 - 2 * count / len(changed) for count in (fell, enough))  # mean signs
        size = -statistics.median(changed) / spread if spread > 0 else None
        yield Signal("disagreement", name, later.step, signs, least, text, shown, size)


def _lowest_mean(changes: Sequence[float]) -> float:
    """Return the 0.05 % quantile of the mean of `changes` [N] under random signs (Fisher's randomization test).

    A bootstrap of the changes would take their spread for that of chance, which is larger.
    """
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(RESAMPLES, len(changes)))
    lowest = float(np.quantile(signs @ np.abs(changes) / len(changes), CHANCE))
    return lowest * (1 + 1e-9)  # tolerance, so that a mean of falls only is not below itself by rounding


def _enough_falls(count: int) -> int | None:
    """Return the fewest falls among `count` changes that the exact sign test needs; None if all are too few."""
    tail, enough = 0.0, None
    for falls in range(count, -1, -1):
        tail += math.comb(count, falls) / 2**count
        if tail > CHANCE:
            break
        enough = falls
    return enough


def _looks(first: Validation, later: Validation) -> Iterator[Signal]:
    for name, words in {**LOOKS, **UNLIKE}.items():
        old, new = known(first.looks.get(name, [])), known(later.looks.get(name, []))
        if len(old) < FEWEST or len(new) != len(old) or (name in LOOKS and min(old) == max(old)):
            continue
        low, high = (float(edge) for edge in np.quantile(old, [RARE, 1 - RARE]))
        surely = bootstrap(known(later.by_prompt(later.looks[name])), CONFIDENCE)
        sign = 1 if surely[0] > high and name in LOOKS else -1 if surely[1] < low else 0
        if sign == 0:
            continue
        edge, mean, most = high if sign > 0 else low, statistics.fmean(new), f"{1 - RARE:.1%} of the first images"
        if name in LOOKS:
            text = (
                f"the images have drifted from the first ones: {words} is {mean:.3g} on average, "
                f"{'above' if sign > 0 else 'below'} {most} ({edge:.3g})"
            )
        else:
            text = f"{words} has fallen from {statistics.fmean(old):.3g} to {mean:.3g}, below {most}"
        order = sorted(later.shown or range(len(new)), key=lambda i: -sign * new[i])
        kind = "looks" if name in LOOKS else "diversity"
        yield Signal(kind, name, later.step, mean, edge, text, order[:SHOWN])


def _changes(first: Validation, later: Validation, name: str | None) -> list[float | None]:
    old, new = (one.rewards if name is None else one.by_scorer.get(name, []) for one in (first, later))
    before, after = first.by_prompt(old), later.by_prompt(new) if new else []
    return [None if a is None or b is None else b - a for a, b in zip(before, after, strict=False)]


def _largest(first: Validation, later: Validation, name: str) -> list[int]:
    old, new = first.by_scorer[name], later.by_scorer.get(name, [])
    pairs = {i: (old[i], new[i]) for i in later.shown or range(len(new)) if i < len(new)}
    changed = {i: b - a for i, (a, b) in pairs.items() if a is not None and b is not None}
    return sorted(changed, key=lambda i: changed[i])[:SHOWN]


def _mean(values: Sequence[float | None]) -> float:
    return statistics.fmean(found) if (found := known(values)) else math.nan


class GuardLog:
    """`guard.jsonl` of a run folder: a row per signal and validation; rows after `step` are removed."""

    def __init__(self, run_dir: Path, step: int) -> None:
        self.path = run_dir / FILE
        rows = read_guard(run_dir)
        kept = [row for row in rows if row["step"] <= step]
        if len(kept) < len(rows):
            write_file(self.path, "".join(f"{json.dumps(row)}\n" for row in kept))
        self._said = {f"{row['signal']}/{row['column']}": int(row["step"]) for row in kept}

    def add(self, found: Sequence[Signal], action: str) -> list[Signal]:
        """Write the signals of a validation; returns those due for a log line: new ones, and old ones now and then."""
        due = [s for s in found if s.key not in self._said or s.step >= 2 * self._said[s.key]]
        self._said |= {signal.key: signal.step for signal in due}
        lines = []
        for signal in found:
            row = asdict(signal)
            row = {"step": row.pop("step"), "signal": row.pop("name"), **row, "action": action}
            lines.append(f"{json.dumps(finite(row))}\n")
        self._append(lines)
        return due

    def rolled_back_row(self, step: int, why: Sequence[Signal], kl: float) -> str:
        """Record a rollback to `step`, with its reason; returns its sentence."""
        first, reasons = why[0], ", ".join(signal.key for signal in why)
        text = (
            f"the run returned here from step {first.step} because of {reasons}, and continued with kl_coef={kl:g}: "
            f"{first.text}"
        )
        row = {"step": step, "signal": "rollback", "column": f"from step {first.step}", "value": float(first.step)}
        row |= {"threshold": kl, "text": text, "shown": [], "size": None, "action": "rollback"}
        self._append([f"{json.dumps(finite(row))}\n"])
        return text

    def _append(self, lines: Sequence[str]) -> None:
        if lines:
            with writing(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))


def read_guard(run_dir: Path) -> list[dict[str, Any]]:
    """Read the rows of `guard.jsonl`; damaged lines are skipped."""
    try:
        lines = (run_dir / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            named = isinstance(row, dict) and {"signal", "column", "text"} <= row.keys()
            found += [row] if named and isinstance(row.get("step"), int) else []
    return found


# --- Trends during training: a KL that grows without gain, and groups of equal rewards

Row = Mapping[str, Any]
MOST = 1000  # most groups counted per block; a larger block counts as this many


class TrainingTrends:
    """KL and groups of equal rewards between validations, from the rows of metrics."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows: dict[int, Row] = {}
        self.validated: list[int] = []
        for row in rows:
            self.add(row)
            if "val/reward/mean" in row:
                self.validated.append(int(row["step"]))

    def add(self, row: Row) -> None:
        """Add the row of a step."""
        self._rows[int(row["step"])] = row

    def kl(self, step: int) -> float | None:
        """Return the mean KL to the base model in the steps between the previous validation and that of `step`."""
        return mean(number(row, "actor/kl") for row in self._block(step))

    def stuck(self, step: int) -> tuple[int, int]:
        """Count the groups whose images all had the same reward below the best one so far, and all groups."""
        pairs = [[number(row, f"health/{name}") for name in ("stuck_groups", "groups")] for row in self._block(step)]
        block = [(stuck, groups) for stuck, groups in pairs if stuck is not None and groups is not None]
        return round(sum(stuck for stuck, _ in block)), round(sum(groups for _, groups in block))

    def _block(self, step: int) -> list[Row]:
        before = max((other for other in self.validated if other < step), default=0)
        return [row for place, row in self._rows.items() if before < place <= step]


def trend_signals(
    course: TrainingTrends, first: Validation, best: Validation, later: Validation, measures_kl: bool = True
) -> list[Signal]:
    """Find the signs in the steps up to the validation `later`.

    best: the earlier validation with the highest reward. measures_kl: whether the KL has a fixed reference.
    """
    if first.step >= later.step:
        return []
    return [*(_kl(course, first, best, later) if measures_kl else ()), *_no_signal(course, first, later)]


def _kl(course: TrainingTrends, first: Validation, best: Validation, later: Validation) -> Iterator[Signal]:
    """Find a KL that has grown since the best validation without the expected gain in reward.

    Without overoptimization the gain grows as the square root of the KL (Gao et al. 2022, arXiv 2210.10760).
    """
    before, now = course.kl(best.step), course.kl(later.step)
    if first.prompts != later.prompts or not first.step < best.step < later.step:
        return
    if before is None or now is None or not 0 < before < now:
        return
    sure = paired_gains(first, best).get("reward")
    if sure is None or not sure.low > 0:
        return
    growth = math.sqrt(now / before) - 1
    gains = zip(_changes(first, best, None), _changes(best, later, None), strict=True)
    pairs = [(early, late) for early, late in gains if early is not None and late is not None]
    if len(pairs) < FEWEST:
        return
    expected = growth * statistics.fmean(early for early, _ in pairs)
    gained = statistics.fmean(late for _, late in pairs)
    if bootstrap([late - growth * early for early, late in pairs], CONFIDENCE)[1] < 0:
        text = (
            f"the KL to the base model grew from {before:.3g} to {now:.3g} since step {best.step}, and the "
            f"held-out reward changed by {gained:+.3f} instead of the {expected:+.3f} expected from the gain up to "
            "that step"
        )
        rewards = enumerate(zip(best.rewards, later.rewards, strict=True))
        changes = {i: b - a for i, (a, b) in rewards if a is not None and b is not None}
        order = sorted(later.shown or range(len(later.rewards)), key=lambda i: changes.get(i, 0.0))
        yield Signal("kl", "reward", later.step, gained, expected, text, order[:8])


def _no_signal(course: TrainingTrends, first: Validation, later: Validation) -> Iterator[Signal]:
    """Find a growing share of groups whose images all have the same reward below the best one."""
    after = [step for step in course.validated if step > first.step]
    if not after or after[0] >= later.step:
        return
    counts = [course.stuck(step) for step in (after[0], later.step)]
    if not all(total for _, total in counts):
        return
    old, new = (count / total for count, total in counts)
    scales = [(count, total, min(1.0, MOST / total)) for count, total in counts]
    (_, high), (low, _) = (share_interval(round(s * count), round(s * total), CONFIDENCE) for count, total, s in scales)
    if low > high:
        text = (
            f"in {new:.0%} of the groups since the previous validation all images had the same reward, below "
            f"the best one, as in {old:.0%} of those up to step {after[0]}: they carry no training signal"
        )
        yield Signal("no_signal", "groups", later.step, new, high, text, [])


def best_of(validations: Sequence[Validation], before: int) -> Validation | None:
    """Return the validation with the highest mean reward before step `before`, the last of equals."""
    scored = [v for v in validations if v.step < before and v.rewards and None not in v.rewards]
    return max(scored, key=lambda v: (_mean(v.rewards), v.step), default=None)

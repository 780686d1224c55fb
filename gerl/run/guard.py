"""Guard against reward hacking: held-out images compared with the first ones, and trends during training."""

import contextlib
import json
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gerl.config.bounded_text import load_json, read_log
from gerl.run.health import number
from gerl.run.settings import get
from gerl.run.validation import Validation, evenly, judged, known, mean, paired_gains
from gerl.utils.files import finite, write_file, writing

# --- One-sided tests; each returns its p-value
#
# Changes are paired: of the same prompt, from the same noise. Under the null hypothesis both signs are equally likely.

ENUMERATED = 16  # most changes whose signs are enumerated
NEWTON = 50  # iterations at most


def sign_chance(changes: Sequence[float]) -> float:
    """Test for positive `changes` by the exact sign test, without zeros."""
    risen, count = sum(change > 0 for change in changes), sum(change != 0 for change in changes)
    return sum(math.comb(count, k) for k in range(risen, count + 1)) / 2**count


def mean_chance(changes: Sequence[float]) -> float:
    """Test for a positive mean of `changes` by randomizing their signs (Fisher 1935, section 21).

    The signs of up to 16 changes are enumerated; more are approximated by a saddlepoint (Lugannani and Rice 1980).
    """
    sizes = np.abs([change for change in changes if change != 0])
    total = float(np.sum(changes))
    if total <= 0 or len(sizes) == 0:
        return 1.0
    if len(sizes) <= ENUMERATED:
        sums = np.zeros(1)
        for size in sizes:
            sums = np.concatenate([sums - size, sums + size])
        return float((sums >= total - 1e-9 * sizes.sum()).mean())
    largest = float(sizes.max())
    sizes, total = sizes / largest, total / largest
    if total >= sizes.sum() * (1 - 1e-9):
        return 0.5 ** len(sizes)
    z, tanh = 0.0, np.zeros(len(sizes))  # Newton's method for the saddlepoint: sum(sizes * tanh(z * sizes)) = total
    for _ in range(NEWTON):
        missing, slope = total - float(sizes @ tanh), float(sizes**2 @ (1 - tanh**2))
        if missing <= 1e-9 * total or slope < 1e-12:
            break
        z += missing / slope
        tanh = np.tanh(z * sizes)
    cumulants = float((z * sizes + np.log1p(np.exp(-2 * z * sizes)) - math.log(2)).sum())
    root = math.sqrt(max(2 * (z * total - cumulants), 0.0))
    slope = z * math.sqrt(float(sizes**2 @ (1 - tanh**2)))
    if root < 1e-3:
        return 0.5
    density = math.exp(-(root**2) / 2) / math.sqrt(2 * math.pi)
    return min(1.0, max(math.erfc(root / math.sqrt(2)) / 2 + density * (1 / slope - 1 / root), 0.5 ** len(sizes)))


def rise_chance(changes: Sequence[float]) -> float:
    """Test for a rise by the two tests above: twice the smaller p-value (Bonferroni)."""
    return min(1.0, 2 * min(sign_chance(changes), mean_chance(changes)))


def share_chance(before: int, of: int, after: int, of_then: int) -> float:
    """Test whether the share `after / of_then` exceeds `before / of` by Fisher's exact test."""
    marked, ways = before + after, math.comb(of + of_then, before + after)
    low = max(after, marked - of)
    return sum(math.comb(of_then, k) * math.comb(of, marked - k) for k in range(low, min(of_then, marked) + 1)) / ways


# --- Reward hacking: comparison of held-out images with the first ones.
#
# The guard does not know the intention: it reports how the images changed and which of them to look at. The judgement
# of the base model needs no watched scorer. What a training changes without harm (sharper letters) is below the spread
# of the first images, by which changes of looks, of diversity and of surprise are measured.

FILE = "guard.jsonl"
# drifts beyond these many standard deviations over the first prompts count
SURPRISING, DRIFT, ALIKE = 2.0, 1.5, 1.0
TRIFLE = 0.03  # of the mean of a watched column or the reward: smaller falls are none
LOOKED_AT, LOOKED_CLOSER = 12, 64  # images of a look, and of one that seems to show something
SUSPICIOUS = 0.25  # p-value until which a signal stays
SHOWN = 8  # images shown per signal
QUOTED = 3  # prompts quoted per signal
FEWEST = 8  # fewest prompts for a test
ALIGNMENT = "base/alignment"  # key of the signal that needs no watched scorer
RAREST = 1e-6  # smallest p-value shown as a number
WORDS = yaml.safe_load(Path(__file__).with_name("guard.yaml").read_text(encoding="utf-8"))
LOOKS, UNLIKE, NEXT = WORDS["looks"], WORDS["unlike"], WORDS["next"]  # statistic -> words; signal -> words


@dataclass(frozen=True)
class Signal:
    """A sign of reward hacking or collapse: a `value` beyond its `threshold`, with a sentence.

    chance: probability of such a value by chance, in this validation alone. drift: whether it is a change beyond a
    multiple of the spread of the first images, not any change.
    """

    name: str  # base, watched, disagreement, looks, diversity, kl or no_signal
    column: str
    step: int
    value: float
    threshold: float
    text: str
    shown: list[int]  # rows of the validation where it is most visible
    size: float | None = None  # of a fall, in standard deviations of the column over the first validation's prompts
    chance: float = 0.0
    drift: bool = False
    look: bool = False  # seen between validations, in the images of a look

    @property
    def key(self) -> str:
        """Name in `guard.ignored`."""
        return f"{self.name}/{self.column}"

    @property
    def sentence(self) -> str:
        """The finding, its p-value in words, and what to do next."""
        odds = f"1 in {1 / self.chance:,.0f}" if self.chance > RAREST else f"less than 1 in {1 / RAREST:,.0f}"
        rare = f" (by chance: {odds})" if self.chance < 0.5 else ""
        return f"{self.text}{rare}; {NEXT[self.name].format(key=self.key, column=self.column)}"


@dataclass(frozen=True)
class Levels:
    """Significance levels of the tests of one validation."""

    alignment: float
    others: float
    drifts: float


def levels(config: Mapping[str, Any], others: int) -> Levels:
    """Return the levels of the tests in each validation of a run; config: as in config.yaml.

    All tests of a run together have the probability `guard.false_alarms` (alpha spending): half of it is shared by the
    tests of `base/alignment` in all planned validations and looks, the other half by the `others` in all validations,
    tests for any change. Drifts beyond a multiple of the spread of the first images need no share: without a change
    there are none.
    """
    steps, every = get(config, "trainer", "steps") or 1, get(config, "validation", "every") or 0
    validations, looks = max(1, -(-steps // every)) if every else 1, len(look_steps(steps, every))
    budget = get(config, "guard", "false_alarms") or 0.05
    half = budget / 2
    return Levels(half / (validations + looks), half / validations / max(others, 1), budget / validations)


def look_steps(steps: int, every: int) -> list[int]:
    """Return the steps of a run of `steps` after which the base model looks at some held-out images.

    Weights move at about a constant rate at first, so that judgements at doubling distances find as much change from
    one to the next: powers of two before the first validation, then half-way between validations up to the third.
    """
    every = every or steps
    powers = [2**k for k in range(every.bit_length()) if 2**k < every]
    halves = range(every + every // 2, 3 * every, every) if every > 1 else ()
    return [step for step in (*powers, *halves) if step < steps]


def look_rows(first: Validation) -> list[int]:
    """Return the rows of the `first` validation that a closer look repeats: an image each of some prompts."""
    return evenly(first.first_rows, LOOKED_CLOSER)


def fewest_changes(config: Mapping[str, Any], watched: int) -> int:
    """Return the fewest prompts on which one of `watched` columns has to fall to be a signal."""
    return math.ceil(-math.log2(levels(config, 2 * watched + 2).others))  # with two trends


def guard_scope(
    watched: Sequence[str], action: str, held_out: int, judge: bool, fewest: int, looks: Collection[int] = ()
) -> str:
    """Say what the guard can and cannot see.

    watched: the columns that it compares with the reward. action: `guard.action`. held_out: number of held-out prompts,
    0 without validation. judge: whether the base model judges the held-out images. fewest: see `fewest_changes`.
    looks: the steps after which it looks at some of them.
    """
    if action == "off":
        return "the guard is off (guard.action=off): nothing warns of reward hacking"
    if held_out < FEWEST:
        there = f"are only {held_out}" if held_out else "are none"
        return (
            f"the guard compares no images: it needs {FEWEST} held-out prompts or more, and there {there} "
            f"(validation.data{', validation.share, validation.max_prompts' if held_out else ''})"
        )
    compared = watched if held_out >= fewest else ()
    sees = [f"a fall of {', '.join(compared)} while the reward rises"] if compared else []
    sees += ["images that no longer match their prompts or that the base model finds unlikely"] if judge else []
    sees += ["drifts in look and diversity"]
    listed = ", and ".join(filter(None, (", ".join(sees[:-1]), sees[-1])))
    whole = "what none of these measures" if compared or judge else "whether images still match their prompts"
    after = f"; the base model also looks at some images after steps {', '.join(map(str, looks))}" if looks else ""
    sentence = f"the guard sees {listed}; it cannot see {whole}{after}"
    if len(compared) < len(watched):
        few = f"it needs {fewest} held-out prompts, and there are only {held_out}"
        return f"{sentence}; to compare {', '.join(watched)} {few} (validation.data, validation.max_prompts)"
    return sentence if watched else f"no scorer is watched (+reward.scorers.NAME.weight=0): {sentence}"


def found_signals(tested: Sequence[Signal], config: Mapping[str, Any], before: Collection[str] = ()) -> list[Signal]:
    """Return the tests of a validation or look whose p-value is within their level (`levels`).

    before: keys of the signals of the previous one, which stay as long as they are suspicious.
    """
    importance = get(config, "guard", "importance") or 0.0
    level = levels(config, sum(not signal.drift and signal.key != ALIGNMENT for signal in tested))
    limits = [level.drifts if s.drift else level.alignment if s.key == ALIGNMENT else level.others for s in tested]
    limits = [max(limit, SUSPICIOUS) if s.key in before else limit for s, limit in zip(tested, limits, strict=True)]
    rare = [signal for signal, limit in zip(tested, limits, strict=True) if signal.chance <= limit]
    relevant = [signal for signal in rare if signal.size is None or signal.size >= importance]
    return list({signal.key: signal for signal in reversed(relevant)}.values())[::-1]  # the first of each key


def comparable(first: Validation, later: Validation) -> bool:
    """Whether `later` has the prompts of the `first` validation, and enough of them for a test."""
    return first.prompts == later.prompts and len(first.first_rows) >= FEWEST and first.step < later.step


def candidates(
    first: Validation,
    later: Validation,
    config: Mapping[str, Any],
    peaks: Mapping[str, Validation] | None = None,
    earlier: int = 1,
) -> list[Signal]:
    """Test a validation against the run's first one; the results are signals if they are rare enough.

    config: as in config.yaml. peaks: column -> the validation in which it was highest so far; a watched column is also
    compared with its peak, since it may rise before it falls. earlier: number of earlier validations, from which the
    peaks are. Validations of other prompts, or of fewer than eight,
    are not compared.
    """
    if not comparable(first, later):
        return []
    peaks = peaks or {}
    tested = [*_base(first, later, peaks.get(ALIGNMENT, first), earlier), *_looks(first, later)]
    for name in watched_columns(config, list(first.by_scorer)):
        peak = peaks.get(name, first)
        tested += _watched(first, later, name, peak, 1 if peak.step == first.step else earlier)
    return tested


class Baselines:
    """The first validation of a run and its best ones so far, with which the next validation or look is compared.

    config: as in config.yaml, with the planned steps.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.first: Validation | None = None
        self.best: Validation | None = None  # with the highest reward after the first one
        self.peaks: dict[str, Validation] = {}  # by column
        self.rows: list[int] = []  # of the first validation, in closer looks
        self.parts: list[Validation] = []  # these rows, or fewer of them, of all validations and looks
        self.validations = 0

    def add(self, validation: Validation) -> None:
        """Add a validation to compare later ones with."""
        if self.first is None:
            self.first, self.rows = validation, look_rows(validation)
        raise_peaks(self.peaks, validation, self.first)
        self.best = best_of([validation] if self.best is None else [self.best, validation], validation.step + 1)
        self.validations += 1
        if validation.prompts == self.first.prompts:
            self.parts.append(replace(validation.part(self.rows), by_scorer={}))

    def add_look(self, look: Validation) -> None:
        """Add a look, which has the rows `look.ids` of the first validation."""
        if {*look.ids} <= {*self.rows}:
            self.parts.append(look)

    def tests(self, later: Validation, trends: "TrainingTrends", measures_kl: bool = True) -> list[Signal]:
        """Test a validation; the results are signals if they are rare enough (`found_signals`)."""
        if self.first is None:
            return []
        tested = candidates(self.first, later, self.config, self.peaks, self.validations)
        return tested + trend_candidates(trends, self.first, self.best or self.first, later, measures_kl)

    def tests_of_look(self, look: Validation) -> list[Signal]:
        """Test a look; the rows of the results are those of the first validation."""
        if self.first is None or not {*look.ids} <= {*self.rows}:
            return []
        first, peaks, earlier = self.first.part(look.ids), dict[str, Validation](), 0
        if not comparable(first, look):
            return []
        for part in self.parts:
            if {*look.ids} <= {*part.ids}:
                raise_peaks(peaks, part.part([part.ids.index(row) for row in look.ids]), first)
                earlier += 1
        tested = [*_base(first, look, peaks.get(ALIGNMENT, first), earlier), *_looks(first, look)]
        return [replace(signal, shown=[look.ids[row] for row in signal.shown], look=True) for signal in tested]

    def asks_for_more(self, look: Validation, tested: Sequence[Signal]) -> bool:
        """Whether a look shows any change in the direction of a signal, and more images can be looked at."""
        return len(look.ids) < len(self.rows) and any(signal.chance < 1 for signal in tested)


def raise_peaks(peaks: dict[str, Validation], validation: Validation, first: Validation) -> None:
    """Set `validation` as the peak of the columns that are highest in it."""
    for name, values in (validation.by_scorer | judged(validation, first)).items():
        before = peaks.get(name)
        if before is None or _mean(values) > _mean((before.by_scorer | judged(before, first))[name]):
            peaks[name] = validation


def watched_columns(config: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    """Return the columns that do not count in the reward: those of watched scorers, and extra columns of all scorers.

    Excludes a scorer's uncertainty (`sigma`), which is neither good nor bad, and the surprise of `base_alignment`.
    """
    scorers = get(config, "reward", "scorers") or {}
    watched = [c for c in columns if "/" in c or get(scorers, c, "weight") == 0]
    return [c for c in watched if c.rpartition("/")[2] not in ("sigma", "surprise")]


def _base(first: Validation, later: Validation, peak: Validation, of: int) -> Iterator[Signal]:
    """Test what the base model sees in the images: their prompt (alignment), and how unlikely they are (surprise).

    Alignment rises at first, also where a reward is hacked, and may fall a little in honest runs: it is a signal below
    the first images, and below half of what the `peak`, the best of `of` earlier validations, had gained over them.
    """
    rose = peak.step > first.step
    fallen = [_judgement(first, first, later, ALIGNMENT, -1, 0.0, 1 + rose)]
    fallen += [_judgement(first, peak, later, ALIGNMENT, -1, 0.0, 2 * of)] if rose else []
    yield from sorted(filter(None, fallen), key=lambda signal: signal.chance)[:1]
    yield from filter(None, [_judgement(first, first, later, "base/surprise", 1, SURPRISING, 1)])


def _judgement(
    first: Validation, before: Validation, later: Validation, column: str, sign: int, least: float, tests: int
) -> Signal | None:
    """Test a judgement of the base model for a change beyond half-way from the `first` validation to that `before`."""
    of_first, old, new = (judged(one, first) for one in (first, before, later))
    spread, changes = _spread(of_first, first, column), _changes(old, new, first, column)
    gained = _changes(of_first, old, first, column)
    both = [(c, g) for c, g in zip(changes, gained, strict=False) if c is not None and g is not None]
    moved = [sign * (change + gain / 2) - least * spread for change, gain in both]
    if len(moved) < FEWEST or spread == 0:
        return None
    size = statistics.fmean(sign * change for change in known(changes)) / spread
    order, worse = _order(later, changes, sign), sum(sign * change > least * spread for change in known(changes))
    what = "sees less of the prompts in" if column == ALIGNMENT else "is more surprised by"
    text = (
        f"the base model {what} the held-out images than at step {before.step}, on average by {size:.2f} standard "
        f"deviations of the first ones ({worse} of {len(moved)} prompts), most for {_quoted(later, order)}"
    )
    chance, name = min(1.0, tests * mean_chance(moved)), column.partition("/")[2]
    return Signal("base", name, later.step, sign * size, sign * least, text, order, None, chance, least > 0)


def _watched(first: Validation, later: Validation, name: str, peak: Validation, of: int) -> Iterator[Signal]:
    """Test a watched column for a fall while the reward has risen: of its mean, and on most of the prompts.

    The size of the latter is that of the median change: a few large gains do not hide it. The size is unknown (always
    large) if the column was the same on all prompts. peak: the best of several validations, which counts as `of` tests.
    The reward has risen since the first validation: at its end it no longer does, but a column may go on falling.
    """
    spread = _spread(first.by_scorer, first, name)
    fall, disagreement = list[Signal](), list[Signal]()
    gain = paired_gains(first, later).get("reward")
    if gain is None or not gain.low > 0:
        return
    for before, tests in ((first, 1), (peak, of)):
        level = abs(_mean(before.by_scorer.get(name, [])))
        changes = _changes(before.by_scorer, later.by_scorer, before, name)
        falls = [-change for change in known(changes)]
        order = _order(later, changes, -1)
        if len(falls) >= FEWEST and statistics.fmean(falls) >= TRIFLE * level:
            old, new = (_mean(one.by_scorer[name]) for one in (before, later))
            text = (
                f"{name}, which is watched, fell from {old:.3f} at step {before.step} to {new:.3f} while the reward "
                f"rose from {_mean(before.rewards):.3f} to {_mean(later.rewards):.3f}, most for {_quoted(later, order)}"
            )
            chance = min(1.0, tests * mean_chance(falls))
            size = statistics.fmean(falls) / spread if spread > 0 else None
            fall.append(Signal("watched", name, later.step, new - old, 0.0, text, order, size, chance))
        gains = _changes({"": before.rewards}, {"": later.rewards}, before, "")
        risen = [-b for a, b in zip(gains, changes, strict=True) if a is not None and b is not None and a > 0]
        moved = [move for move in risen if move != 0]
        if len(moved) >= FEWEST and statistics.median(moved) >= TRIFLE * level:
            down, up = sum(move > 0 for move in risen), sum(move < 0 for move in risen)
            text = (
                f"the reward and {name} disagree: of {len(risen)} held-out prompts whose reward rose since step "
                f"{before.step}, {name} fell on {down} and rose on {up}, most for {_quoted(later, order)}"
            )
            size = statistics.median(moved) / spread if spread > 0 else None
            chance, value = min(1.0, tests * sign_chance(risen)), (up - down) / (up + down)
            disagreement.append(Signal("disagreement", name, later.step, value, 0.0, text, order, size, chance))
    for results in (fall, disagreement):
        if results:
            yield min(results, key=lambda signal: signal.chance)


def _looks(first: Validation, later: Validation) -> Iterator[Signal]:
    """Test statistics of the images for a drift beyond the spread of the first ones, and for a loss of diversity."""
    for name, words in {**LOOKS, **UNLIKE}.items():
        changes = _changes(first.looks, later.looks, first, name)
        spread, moves = _spread(first.looks, first, name), known(changes)
        if len(moves) < FEWEST or spread == 0:
            continue
        size, kind = statistics.fmean(moves) / spread, "looks" if name in LOOKS else "diversity"
        sign, least = (math.copysign(1, size), DRIFT) if name in LOOKS else (-1.0, ALIKE)
        order = _order(later, changes, sign)
        old, new = (_mean(one.looks[name]) for one in (first, later))
        what = "the images have drifted from the first ones: " if kind == "looks" else ""
        text = (
            f"{what}{words} went from {old:.3g} to {new:.3g} on average, by {abs(size):.2f} standard deviations of "
            f"the first ones, most for {_quoted(later, order)}"
        )
        chance = mean_chance([sign * move - least * spread for move in moves])
        if name in LOOKS:
            chance = min(1.0, 2 * chance)  # up or down
        yield Signal(kind, name, later.step, size, sign * least, text, order, None, chance, drift=True)


Columns = Mapping[str, Sequence[float | None]]


def _changes(old: Columns, new: Columns, first: Validation, name: str) -> list[float | None]:
    """Return the changes of a column by prompt: those of the mean over its images."""
    if name not in old or name not in new:
        return []
    before, after = first.by_prompt(old[name]), first.by_prompt(new[name])
    return [None if a is None or b is None else b - a for a, b in zip(before, after, strict=True)]


def _spread(columns: Columns, first: Validation, name: str) -> float:
    """Return the standard deviation of a column over the first validation's prompts."""
    values = known(first.by_prompt(columns[name])) if name in columns else []
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _order(later: Validation, changes: Sequence[float | None], sign: float) -> list[int]:
    """Return the rows of the shown images whose prompts changed most in the direction of `sign`."""
    by_row = dict(zip(later.first_rows, changes, strict=True))
    rows = [row for row in by_row if by_row[row] is not None and (not later.shown or row in later.shown)]
    return sorted(rows, key=lambda row: -sign * (by_row[row] or 0.0))[:SHOWN]


def _quoted(later: Validation, rows: Sequence[int]) -> str:
    return ", ".join(repr(later.prompts[row])[:60] for row in rows[:QUOTED]) or "none of the images shown"


def _mean(values: Sequence[float | None]) -> float:
    return statistics.fmean(numbers) if (numbers := known(values)) else math.nan


class GuardLog:
    """`guard.jsonl` of a run folder: a row per signal and validation; rows after `step` are removed."""

    def __init__(self, run_dir: Path, step: int) -> None:
        self.path = run_dir / FILE
        rows = read_guard(run_dir)
        earlier = [row for row in rows if row["step"] <= step]
        if len(earlier) < len(rows):
            write_file(self.path, "".join(f"{json.dumps(row)}\n" for row in earlier))
        self.empty = not earlier
        self.advised = {row.get("action") for row in earlier if row["signal"] == "advice"}  # under these actions
        self.latest: list[Signal] = []  # of the last validation, since the log was opened
        self._said = {f"{row['signal']}/{row['column']}": int(row["step"]) for row in earlier}

    def add(self, signals: Sequence[Signal], action: str) -> list[Signal]:
        """Write the signals of a validation; returns those due for a log line: new ones, and old ones now and then."""
        self.latest = list(signals)
        due = [s for s in signals if s.key not in self._said or s.step >= 2 * self._said[s.key]]
        self._said |= {signal.key: signal.step for signal in due}
        lines = []
        for signal in signals:
            row = asdict(signal)
            row = {"step": row.pop("step"), "signal": row.pop("name"), **row, "text": signal.sentence, "action": action}
            lines.append(f"{json.dumps(finite(row))}\n")
        self._append(lines)
        return due

    def advise(self, step: int, weight: float, text: str, action: str) -> None:
        """Record a weight of the KL that would help, known since `step`, with its sentence."""
        self.advised.add(action)
        self._append_event("advice", "kl_coef", {"step": step, "value": weight, "threshold": 0.0}, text, action)

    def rolled_back_row(self, step: int, why: Sequence[Signal], kl: float | None) -> str:
        """Record a rollback to `step`, with its reason; returns its sentence."""
        first, reasons = why[0], ", ".join(signal.key for signal in why)
        weight = "a weight of the KL that the next step measures" if kl is None else f"kl_coef={kl:g}"
        text = f"the run returned here from step {first.step} because of {reasons}, with {weight}: {first.text}"
        values = {"step": step, "value": float(first.step), "threshold": kl}
        self._append_event("rollback", f"from step {first.step}", values, text, "rollback")
        return text

    def _append_event(self, name: str, column: str, values: Mapping[str, Any], text: str, action: str) -> None:
        row = {"step": values["step"], "signal": name, "column": column, **values}
        row |= {"text": text, "shown": [], "size": None, "action": action}
        self._append([f"{json.dumps(finite(row))}\n"])

    def _append(self, lines: Sequence[str]) -> None:
        if lines:
            with writing(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))


def read_guard(run_dir: Path) -> list[dict[str, Any]]:
    """Read the rows of `guard.jsonl`; damaged lines are skipped."""
    try:
        lines = read_log(run_dir / FILE)
    except OSError:
        return []
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = load_json(line)
            named = isinstance(row, dict) and all(type(row.get(k)) is str for k in ("signal", "column", "text"))
            rows += [row] if named and type(row.get("step")) is int else []
    return rows


# --- Trends during training: a reward that falls while the KL grows, and groups of equal rewards

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


def trend_candidates(
    course: TrainingTrends, first: Validation, best: Validation, later: Validation, measures_kl: bool = True
) -> list[Signal]:
    """Test the steps up to the validation `later`; the results are signals if they are rare enough.

    best: the earlier validation with the highest reward. measures_kl: whether the KL has a fixed reference.
    """
    if first.step >= later.step:
        return []
    return [*(_kl(course, best, later) if measures_kl else ()), *_no_signal(course, first, later)]


def _kl(course: TrainingTrends, best: Validation, later: Validation) -> Iterator[Signal]:
    """Test for a held-out reward that falls while the KL grows (Gao et al. 2022, arXiv 2210.10760, figure 1).

    A reward that no longer rises is none: it may be at its end, or the learning rate may have decayed.
    """
    before, now = course.kl(best.step), course.kl(later.step)
    if best.prompts != later.prompts or not best.step < later.step:
        return
    if before is None or now is None or not 0 < before < now:
        return
    changes = _changes({"": best.rewards}, {"": later.rewards}, best, "")
    order, old, new = _order(later, changes, -1), _mean(best.rewards), _mean(later.rewards)
    if len(known(changes)) < FEWEST or not old - new >= TRIFLE * abs(old):
        return
    text = (
        f"the held-out reward fell from {old:.3f} at step {best.step} to {new:.3f} while the KL to the base model grew "
        f"from {before:.3g} to {now:.3g}, most for {_quoted(later, order)}"
    )
    # the best of several validations: as many tests
    earlier = sum(step < later.step for step in course.validated)
    chance = min(1.0, max(1, earlier) * rise_chance([-change for change in known(changes)]))
    yield Signal("kl", "reward", later.step, new - old, 0.0, text, order, None, chance)


def _no_signal(course: TrainingTrends, first: Validation, later: Validation) -> Iterator[Signal]:
    """Test for a growing share of groups whose images all have the same reward below the best one."""
    after = [step for step in course.validated if step > first.step]
    if not after or after[0] >= later.step:
        return
    counts = [course.stuck(step) for step in (after[0], later.step)]
    if not all(total for _, total in counts):
        return
    old, new = (count / total for count, total in counts)
    scaled = [(round(count * min(1.0, MOST / total)), min(total, MOST)) for count, total in counts]
    text = (
        f"in {new:.0%} of the groups since the previous validation all images had the same reward, below the best one, "
        f"as in {old:.0%} of those up to step {after[0]}: they carry no training signal"
    )
    chance = share_chance(*scaled[0], *scaled[1]) if new > old else 1.0
    yield Signal("no_signal", "groups", later.step, new, old, text, [], None, chance)


def best_of(validations: Sequence[Validation], before: int) -> Validation | None:
    """Return the validation with the highest mean reward before step `before`, the last of equals."""
    scored = [v for v in validations if v.step < before and v.rewards and None not in v.rewards]
    return max(scored, key=lambda v: (_mean(v.rewards), v.step), default=None)

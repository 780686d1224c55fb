"""The results of the suite of `time_to_reward.py`, from the file of results alone: a table, a ranking, and curves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, median, median_low, stdev

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats
from suite import FINAL, TUNE, Run, best_run, evaluations, last_reward, other_groups

from gerl.commandline.composition import algorithm_of
from gerl.config.algorithms import algorithm_config

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "algorithm_benchmark.md"
PICTURE = ROOT / "docs" / "pictures" / "time_to_reward.svg"
BEGIN = "<!-- time_to_reward: begin, written by python benchmarks/time_to_reward.py --table -->"
END = "<!-- time_to_reward: end -->"
NOT_MEASURED = "not measured yet"
GOAL = 0.9  # held-out reward of which the cost is given
LEVEL = 0.05  # of the tests together
SEEDS = 5  # of an algorithm, with fewer of which nothing is claimed
LOWEST = 0.4  # reward at the lower edge of the picture
MARKERS = "os^vDPX*<>"
OTHERS = "Presets that learn from something other than the OCR, or from more, are measured by it too."
GROUPS = other_groups()  # of the presets that have a table of their own
LEARNS_FROM = {name: words for words, group in GROUPS.items() for name in group["algorithms"]}
RATE = "actor.lr"
BELOW = ("seeds", "images", "optimizer steps", RATE)  # columns that are words where most rows have the same
STAR = r"\*"  # Markdown


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its 95 % interval, None where one value says nothing about it."""

    mean: float
    half: float | None

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.half is None else f"{self.mean:.3f} ± {self.half:.3f}"


@dataclass(frozen=True)
class Summary:
    """The final runs of an algorithm with the settings that tuning chose."""

    algorithm: str
    runs: Sequence[Run]

    @property
    def rewards(self) -> list[float]:
        """Held-out reward of each seed at its last validation."""
        return [last_reward(run) for run in self.runs]

    def of_last(self, name: str) -> list[float]:
        """An entry of the last validation of each seed."""
        return [float(run["points"][-1][name]) for run in self.runs]

    @property
    def keys(self) -> Sequence[str]:
        """The settings that tuning chose."""
        keys: Sequence[str] = self.runs[0]["overrides"]
        return keys

    def to(self, goal: float) -> int | None:
        """Evaluations until a validation is at `goal`, median over the seeds; None if fewer than half reach it."""
        reached = [first_at(run, goal) for run in self.runs]
        if sum(math.isfinite(cost) for cost in reached) * 2 < len(reached):
            return None
        return int(median_low(reached))


def first_at(run: Run, goal: float) -> float:
    """Evaluations that a run needed for a held-out reward of `goal`; infinite if it never had it."""
    return next((float(evaluations(point)) for point in run["points"] if point["reward"] >= goal), math.inf)


def summaries(runs: Iterable[Run]) -> list[Summary]:
    """The algorithms that have final runs of their best candidate, the best one first."""
    by_algorithm: dict[str, list[Run]] = {}
    for run in runs:
        by_algorithm.setdefault(run["algorithm"], []).append(run)
    found = []
    for name, own in by_algorithm.items():
        if tuning := [run for run in own if run["stage"] == TUNE]:
            best = best_run(tuning)
            final = [r for r in own if r["stage"] == FINAL and same_settings(r, best)]
            found += [Summary(name, final)] if final else []
    return sorted(found, key=lambda summary: -fmean(summary.rewards))


def usual_validation(found: Iterable[Summary]) -> float:
    """CPU seconds of a validation, median of all runs: those of the machine for which the table has CPU seconds."""
    return float(median(run["validation_seconds"] for summary in found for run in summary.runs))


def cpu_seconds(run: Run, validation: float) -> float:
    """What a run's training steps would take on a machine that validates in `validation` seconds."""
    return float(run["points"][-1]["cpu_seconds"]) * validation / float(run["validation_seconds"])


def same_settings(one: Run, other: Run) -> bool:
    return (one["overrides"], one["fingerprint"]) == (other["overrides"], other["fingerprint"])


# --- statistics


def interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Mean of independent values with its interval by Student's t distribution."""
    if len(values) < 2:
        return Interval(fmean(values), None)
    t = float(stats.t.ppf((1 + level) / 2, len(values) - 1))
    return Interval(fmean(values), t * stdev(values) / math.sqrt(len(values)))


def welch(one: Sequence[float], other: Sequence[float]) -> float:
    """p-value of Welch's t test, two-sided; 1 where a sample has fewer than two values."""
    if min(len(one), len(other)) < 2:
        return 1.0
    if stdev(one) == stdev(other) == 0:
        return float(one[0] == other[0])
    return float(stats.ttest_ind(one, other, equal_var=False).pvalue)


def holm(p_values: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Which hypotheses are rejected by Holm's step-down procedure, with a family-wise error rate of `level`."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    rejected = [False] * len(p_values)
    for rank, i in enumerate(order):
        if p_values[i] > level / (len(p_values) - rank):
            break
        rejected[i] = True
    return rejected


def groups(count: int, different: Iterable[tuple[int, int]]) -> list[set[int]]:
    """The largest groups of `range(count)` in which no two are `different`, ordered by their first members.

    By inserting and absorbing (Piepho 2004, A compact letter display): a group with a different pair becomes two, each
    without one of them; groups inside others go.
    """
    found = [set(range(count))] if count else []
    for pair in different:
        split = [group - {one} for group in found if group.issuperset(pair) for one in pair]
        whole = [group for group in found if not group.issuperset(pair)]
        for group in sorted(split, key=len, reverse=True):
            if not any(group <= other for other in whole):
                whole.append(group)
        found = whole
    return sorted(found, key=sorted)


def letters(found: Sequence[Summary], level: float = LEVEL) -> list[str]:
    """A text for each of the algorithms; those that share a letter are not told apart by their rewards."""
    pairs = list(combinations(range(len(found)), 2))
    rejected = holm([welch(found[i].rewards, found[j].rewards) for i, j in pairs], level)
    members = groups(len(found), [pair for pair, is_rejected in zip(pairs, rejected, strict=True) if is_rejected])
    return ["".join(letter(k) for k, group in enumerate(members) if i in group) for i in range(len(found))]


def letter(number: int) -> str:
    """a, b, ... z, and numbers in brackets after that."""
    return chr(ord("a") + number) if number < 26 else f"({number})"


# --- the table


def table(runs: Sequence[Run], seeds: int = SEEDS) -> str:
    """The section of `PAGE`: tables, conditions and picture; of algorithms with so many `seeds`."""
    found = [summary for summary in summaries(runs) if len(summary.runs) >= seeds]
    if not found:
        return NOT_MEASURED
    by_rewards, others = ([s for s in found if (s.algorithm in LEARNS_FROM) is other] for other in (False, True))
    usual = usual_validation(found)
    pairs = [math.comb(len(own), 2) for own in (by_rewards, others) if own]
    parts = [rows_of(by_rewards, usual)] if by_rewards else []
    if others:
        explained = (GROUPS[LEARNS_FROM[summary.algorithm]].get("explained") for summary in others)
        parts += [" ".join([OTHERS, *dict.fromkeys(filter(None, explained))])]
        parts += [rows_of(others, usual)]
    picture = f"![Held-out reward against denoiser evaluations](pictures/{PICTURE.name})"
    return "\n\n".join([*parts, f"{ranking(pairs)} {conditions(found)}", picture])


def rows_of(found: Sequence[Summary], validation: float) -> str:
    """A table, and below it what most of its rows have in common; `validation`: see `cpu_seconds`."""
    rows = [cells(summary, mark, validation) for summary, mark in zip(found, letters(found), strict=True)]
    below = {name: words_of(name, rows) for name in BELOW}
    columns = [name for name in rows[0] if not below.get(name)]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(row[name] for name in columns)} |" for row in rows]
    said = list(filter(None, below.values()))
    if reached := [f"`{s.algorithm}` {cost:,}" for s in found if (cost := s.to(GOAL)) is not None]:
        said.append(f"Evaluations to {GOAL:g}: {', '.join(reached)}.")
    return "\n\n".join(["\n".join(lines), *([" ".join(said)] if said else []), *other_settings(found)])


def words_of(column: str, rows: Sequence[Mapping[str, str]]) -> str:
    """A column in words: what most rows have, and which ones have something else; empty where no value is of most."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(row[column], []).append(row["algorithm"])
    usual, *others = sorted(names, key=lambda value: -len(names[value]))
    if 2 * len(names[usual]) <= len(rows):
        return ""
    name = f"`{column}`" if "." in column else column.capitalize()
    exceptions = [f"{value} for {', '.join(names[value])}" for value in others]
    return f"{name}: {'; '.join([usual, *exceptions])}."


def other_settings(found: Sequence[Summary]) -> list[str]:
    """What tuning chose besides the learning rate: a list, of one line for algorithms with the same."""
    names: dict[tuple[str, ...], list[str]] = {}
    for summary in found:
        keys = tuple(f"`{key}`" for key in summary.keys if not key.startswith(f"{RATE}="))
        names.setdefault(keys, []).append(f"`{summary.algorithm}`")
    lines = [f"* {', '.join(same)}: {' '.join(keys)}" for keys, same in names.items() if keys]
    return ["Other settings:", "\n".join(lines)] if lines else []


def ranking(pairs: Sequence[int]) -> str:
    """How the letters are to be read; `pairs`: how many each table has."""
    return (
        "Rows of a table that share a letter do not differ significantly in held-out reward; all others do (Welch's t "
        f"tests of all {' and '.join(map(str, pairs))} pairs, Holm's correction, family-wise error rate "
        f"{100 * LEVEL:g} %)."
    )


def cells(summary: Summary, mark: str, validation: float) -> dict[str, str]:
    """An algorithm's row, by column; `validation`: see `cpu_seconds`."""
    stopped = sum(bool(run["error"]) for run in summary.runs)
    calls = fmean(evaluations(run["points"][-1]) for run in summary.runs)
    seconds = fmean(cpu_seconds(run, validation) for run in summary.runs)
    images, steps = fmean(summary.of_last("images")), fmean(run["optimizer_steps"] for run in summary.runs)
    origin = LEARNS_FROM.get(summary.algorithm)
    return {
        "algorithm": f"`{summary.algorithm}`",
        "letters": mark,
        **({} if origin is None else {"learns from": origin}),
        "held-out reward": str(interval(summary.rewards)),
        "read exactly": str(interval(summary.of_last("exact"))),
        "evaluations": f"{calls:,.0f}",
        "CPU seconds": f"{seconds:,.0f}",
        "optimizer steps": f"{steps:,.0f}",
        "images": f"{images:,.0f}",
        "seeds": f"{len(summary.runs)}{f' ({stopped} diverged)' if stopped else ''}",
        RATE: next((key.removeprefix(f"{RATE}=") for key in summary.keys if key.startswith(f"{RATE}=")), "preset"),
    }


def conditions(found: Sequence[Summary]) -> str:
    """What all runs have in common: the base model, code, versions and machine."""
    runs = [run for summary in found for run in summary.runs]
    base = words(f"{run['points'][0]['reward']:.3f}" for run in runs)
    torch, machines = words(str(run["torch"]) for run in runs), words(machine(run["hardware"]) for run in runs)
    return (
        f"Base model: {base}. gerl {versions(runs)}; torch {torch}; one thread per run; {machines}. "
        f"CPU seconds are scaled to a machine that validates in {usual_validation(found):.1f} s."
    )


def words(values: Iterable[str]) -> str:
    """The different ones among `values`."""
    return ", ".join(sorted(set(values)))


def versions(runs: Iterable[Run]) -> str:
    """The code of the runs: commits by version, those with uncommitted changes with a star."""
    commits: dict[str, set[str]] = {}
    for run in runs:
        code = run["gerl"]
        commits.setdefault(code["version"], set()).add(f"{str(code.get('commit'))[:7]}{STAR * bool(code.get('dirty'))}")
    found = "; ".join(f"{version} at {words(of)}" for version, of in sorted(commits.items()))
    return f"{found} ({STAR}: with uncommitted changes)" if STAR in found else found


def machine(hardware: Mapping[str, object]) -> str:
    return f"{hardware['cpu']} with {hardware['cores']} cores"


# --- the curves


def plot(runs: Sequence[Run], path: Path = PICTURE, seeds: int = SEEDS) -> None:
    """Draw held-out reward against denoiser evaluations, mean and 95 % interval, a line for each row of the table."""
    found = [summary for summary in summaries(runs) if len(summary.runs) >= seeds]
    if not found:
        print(f"{NOT_MEASURED}: no picture")
        return
    # texts stay texts and names do not change, so that a new picture differs only where the numbers do
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "gerl", "font.family": "sans-serif"}):
        families: dict[str, list[Summary]] = {"policy gradients": [], "forward process": [], "from something else": []}
        for summary in found:
            is_gradient = algorithm_config(algorithm_of(summary.algorithm)).needs.ratio
            other = summary.algorithm in LEARNS_FROM
            families[list(families)[2 if other else 1 - is_gradient]].append(summary)
        figure = Figure(figsize=(15, 5), layout="constrained")
        axes = figure.subplots(1, 3, sharey=True)
        axes[1].sharex(axes[0])  # which compare algorithms; what costs something else has its own scale
        for side, (title, own) in zip(axes, families.items(), strict=True):
            for number, summary in enumerate(own):
                draw(side, summary, number)
            side.set(title=title, xlabel="evaluations of the denoiser")
            side.grid(alpha=0.3)
            side.locator_params(axis="x", nbins=5)
            if own:
                side.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False)
        # not before both are drawn: a limit that is given ends the scaling; what collapses leaves the picture
        for side in axes:
            side.set(xlim=(0, None))
        axes[0].set(ylabel="held-out OCR reward", ylim=(LOWEST, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    print(path)


def draw(axes: Axes, summary: Summary, number: int) -> None:
    """The curve of an algorithm, the `number`-th of its panel."""
    points = curve(summary)
    cost, means = [x for x, _ in points], [y.mean for _, y in points]
    again = number // len(MARKERS)  # colours and markers repeat, lines do not
    (line,) = axes.plot(
        cost, means, color=f"C{number}", marker=MARKERS[number % len(MARKERS)], linestyle=("-", "--", ":")[again % 3],
        markersize=4, label=summary.algorithm,
    )  # fmt: skip
    halves = [y.half or 0.0 for _, y in points]
    low, high = ([m + sign * h for m, h in zip(means, halves, strict=True)] for sign in (-1, 1))
    axes.fill_between(cost, low, high, color=line.get_color(), alpha=0.12, linewidth=0)


def curve(summary: Summary) -> list[tuple[float, Interval]]:
    """Mean evaluations and held-out reward at each validation that all seeds have."""
    by_step = [{point["step"]: point for point in run["points"]} for run in summary.runs]
    common = sorted(set.intersection(*(set(points) for points in by_step)))
    rows = [[points[step] for points in by_step] for step in common]
    return [(fmean(map(evaluations, row)), interval([float(point["reward"]) for point in row])) for row in rows]

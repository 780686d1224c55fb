"""Tables and curves of the ladder, from its files of results alone."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from ladder import CURVE, Row, best_rate, protocol, rows
from sections import write_section
from seeds import mean_and_interval

PAGE = Path(__file__).resolve().parents[1] / "docs" / "algorithm_benchmark.md"
PICTURES = PAGE.parent / "pictures"
BEGIN = "<!-- ladder: begin, written by python benchmarks/ladder.py --table -->"
END = "<!-- ladder: end -->"
REFERENCE = "awm_fast"  # with which every row is compared: the default
GOAL = 0.8  # reward of which the cost is given
RESAMPLES, LEVEL = 10_000, 0.05
EDGE = 0.005  # rewards are at least so far from 0 and 1 on the logit scale
MARKERS = "os^vDPX*<>"
LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Summary:
    """The final runs of a row on a task: rewards at the end [S], and best rewards [S], in the order of the seeds."""

    row: Row
    ends: list[float]
    best: list[float]

    @classmethod
    def of(cls, row: Row, seeds: Sequence[int]) -> "Summary | None":
        """None: there are not all of its seeds."""
        final = {run["seed"]: run for run in row.of("final")}
        if set(final) < set(seeds):
            return None
        rewards = [[point[-1] for point in final[seed]["points"]] for seed in seeds]
        return cls(row, [r[-1] for r in rewards], [max(r[1:]) for r in rewards])

    @property
    def mean(self) -> float:
        return statistics.fmean(self.ends)

    @property
    def diverges(self) -> bool:
        """Whether the mean reward at the end is below that at an earlier validation by more than its standard error."""
        points = [run["points"] for run in self.row.of("final")]
        for k in range(1, CURVE):
            falls = [p[k][-1] - p[-1][-1] for p in points if len(p) > k + 1]
            error = statistics.stdev(falls) / len(falls) ** 0.5 if len(falls) > 1 else 0.0
            if falls and statistics.fmean(falls) > error:
                return True
        return False

    def cost(self, goal: float) -> int | None:
        """Evaluations until a validation is at `goal`, median over the seeds; None if fewer than half reach it."""
        runs = self.row.of("final")
        costs = [next((p[1] for p in run["points"][1:] if p[-1] >= goal), None) for run in runs]
        known = sorted(cost for cost in costs if cost is not None)
        return known[(len(costs) - 1) // 2] if 2 * len(known) > len(costs) else None

    def at_images(self, count: int) -> float | None:
        """Mean reward after `count` scored images, between two validations by interpolation; None: not so many."""
        points = [run["points"] for run in self.row.of("final")]
        rewards = [np.interp(count, [p[2] for p in run], [p[-1] for p in run]) for run in points if run[-1][2] >= count]
        return statistics.fmean(rewards) if len(rewards) == len(points) else None

    @property
    def images(self) -> float:
        """Scored images of a run, median over the seeds."""
        return statistics.median(run["points"][-1][2] for run in self.row.of("final"))

    def change(self, measure: str) -> float | None:
        """Mean change of a measure over the run, over the seeds."""
        pairs = [(run["first"].get(measure), run["last"].get(measure)) for run in self.row.of("final")]
        known = [after - before for before, after in pairs if before is not None and after is not None]
        return statistics.fmean(known) if known else None

    @property
    def kl(self) -> float | None:
        """Median KL to the base model at the end, in nats per image; None: not of all runs."""
        known = [run["last"].get("kl") for run in self.row.of("final")]
        return None if None in known else statistics.median(known)


# --- Statistics


def logit(values: Sequence[float]) -> np.ndarray:
    """The log-odds of rewards in [0, 1], on which rows near 0 and 1 spread as those between."""
    clipped = np.clip(np.asarray(values), EDGE, 1 - EDGE)
    return np.asarray(np.log(clipped / (1 - clipped)))


def permutation_test(one: Sequence[float], other: Sequence[float]) -> float:
    """Two-sided p-value of the difference of means of two samples, over all ways to divide them anew (Fisher)."""
    pooled, n = np.concatenate([one, other]), len(one)
    total, observed = pooled.sum(), abs(np.mean(one) - np.mean(other))
    sums = np.array([pooled[list(chosen)].sum() for chosen in combinations(range(len(pooled)), n)])
    differences = np.abs(sums / n - (total - sums) / (len(pooled) - n))
    return float(np.mean(differences >= observed - 1e-12))


def paired_test(differences: Sequence[float]) -> float:
    """Two-sided p-value of the mean of paired differences, over all ways to give them signs (Fisher)."""
    values = np.asarray(differences)
    signs = 1 - 2 * (np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1)
    return float(np.mean(np.abs(signs @ values) >= abs(values.sum()) - 1e-12))


def rank_correlation(one: Sequence[float], other: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Spearman's correlation of two samples of pairs, and the two-sided p-value over random orders."""
    ranks = [np.argsort(np.argsort(values)).astype(float) for values in (one, other)]
    centred = [values - values.mean() for values in ranks]
    scale = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    found = float(centred[0] @ centred[1]) / scale
    rng = np.random.default_rng(seed)
    orders = rng.permuted(np.tile(centred[0], (RESAMPLES, 1)), axis=1) @ centred[1] / scale
    return found, float(np.mean(np.abs(orders) >= abs(found) - 1e-12))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, which hold for all tests together."""
    order, adjusted, largest = sorted(range(len(p_values)), key=lambda i: p_values[i]), [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, p_values[i] * (len(p_values) - rank)))
        adjusted[i] = largest
    return adjusted


def rank_intervals(rewards: np.ndarray, seed: int = 0) -> list[tuple[int, int]]:
    """95 % bootstrap intervals of the rows' ranks by mean reward; rewards: [R, S], whose seeds are resampled by row."""
    rng, (count, seeds) = np.random.default_rng(seed), rewards.shape
    drawn = rng.integers(seeds, size=(RESAMPLES, count, seeds))
    means = np.take_along_axis(rewards[None], drawn, axis=2).mean(axis=2)
    ranks = (-means).argsort(axis=1).argsort(axis=1) + 1
    low, high = np.quantile(ranks, [LEVEL / 2, 1 - LEVEL / 2], axis=0, method="nearest")
    return [(int(a), int(b)) for a, b in zip(low, high, strict=True)]


# --- The page


def summaries(found: Sequence[Row], rules: dict[str, Any]) -> list[Summary]:
    """The rows of a task that are measured, the best mean first."""
    known = [summary for row in found if (summary := Summary.of(row, rules["seeds"])) is not None]
    return sorted(known, key=lambda summary: -summary.mean)


def table(task: str, found: Sequence[Summary], rules: dict[str, Any]) -> str:
    """Markdown: a row per algorithm."""
    ends = np.array([summary.ends for summary in found])
    ranks = rank_intervals(logit(ends))
    reference = next((summary for summary in found if summary.row.name == REFERENCE), None)
    others = [summary for summary in found if summary is not reference]
    p = [] if reference is None else [permutation_test(logit(s.ends), logit(reference.ends)) for s in others]
    adjusted = {summary.row.name: value for summary, value in zip(others, holm(p), strict=bool(p))}
    measures = rules["tasks"][task]["others"]
    heads = ["algorithm", "rank", "reward at the end", "median", "best", f"p, `{REFERENCE}`", f"to {GOAL:g}"]
    heads += [*(f"`{measure}`" for measure in measures), "diversity", "KL", "rate", "images", "updates"]
    fewest = round(min(summary.images for summary in found))
    heads.append(f"at {fewest} images")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for summary, (low, high) in zip(found, ranks, strict=True):
        cost = summary.cost(GOAL)
        cells = [
            f"`{summary.row.name}`{' ↓' if summary.diverges else ''}{' *' if summary.row.change else ''}",
            f"{low}" if low == high else f"{low} to {high}",
            mean_and_interval(summary.ends),
            f"{statistics.median(summary.ends):.3f}",
            f"{statistics.fmean(summary.best):.3f}",
            "" if summary is reference or not p else p_text(adjusted[summary.row.name]),
            "-" if cost is None else f"{cost:,}",
            *(signed(summary.change(measure)) for measure in (*measures, "unlike_others")),
            "-" if (kl := summary.kl) is None else f"{kl:.3g}",
            f"{best_rate(summary.row):.0e}".replace("e-0", "e-"),
            f"{summary.images:,.0f}",
            f"{statistics.median(run['updates'] for run in summary.row.of('final')):.0f}",
            "-" if (early := summary.at_images(fewest)) is None else f"{early:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tuned_means(row: Row, rules: dict[str, Any]) -> list[float]:
    """The mean reward of the row's tuning runs with each rate; none: not all are made."""
    ends: dict[float, list[float]] = {rate: [] for rate in rules["rates"]}
    for run in row.of("tune"):
        ends[run["rate"]].append(run["points"][-1][-1])
    complete = min(map(len, ends.values())) == len(rules["tuning_seeds"])
    return [statistics.fmean(values) for values in ends.values()] if complete else []


def tuning(found: Sequence[Row], rules: dict[str, Any]) -> str:
    """Markdown: the means of the rows' tuning runs, those of the chosen rates in bold."""
    rates = [f"{rate:.0e}".replace("e-0", "e-") for rate in rules["rates"]]
    lines = [f"| algorithm | {' | '.join(rates)} |", "|---" * (len(rates) + 1) + "|"]
    for row in found:
        cells = [f"{mean:.3f}" for mean in tuned_means(row, rules)]
        chosen = rules["rates"].index(best_rate(row))
        cells[chosen] = f"**{cells[chosen]}**"
        lines.append(f"| `{row.name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def p_text(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"


def changes(found: Sequence[Summary]) -> list[str]:
    """A line for each declared change of a preset."""
    by_text: dict[str, list[str]] = {}
    for summary in found:
        if summary.row.change:
            keys = " ".join(f"`{key}`" for key in summary.row.change)
            by_text.setdefault(f"{keys} ({summary.row.why})", []).append(f"`{summary.row.name}`")
    return [f"* {', '.join(names)}: {text}" for text, names in by_text.items()]


def shared(task: str, rules: dict[str, Any]) -> list[str]:
    """Return the keys that all rows of a task get in place of their preset's, and those of some rows."""
    blocks = ("sampling.", "rollout.", "actor.", "model.lora")
    keys = [key for key in (*rules["common"], *rules["tasks"][task]["keys"]) if key.startswith(blocks)]
    parts = [f"All rows have {' '.join(f'`{key}`' for key in keys)} in place of their preset's"]
    if noisy := rules["tasks"][task].get("noisy"):
        parts.append(f"those whose kernel is for flow matching {' '.join(f'`{key}`' for key in noisy)}")
    return ["; ".join(parts) + f". At most {rules['denoising_steps']} denoising steps."]


def correlations(by_task: dict[str, list[Summary]]) -> list[str]:
    """Say how the ranks of rows that two tasks share agree."""
    lines = []
    for one, other in combinations(by_task, 2):
        first, second = ({s.row.name: s.mean for s in by_task[task]} for task in (one, other))
        names = [name for name in first if name in second]
        if len(names) < 3:
            continue
        value, p = rank_correlation([first[name] for name in names], [second[name] for name in names])
        lines.append(f"| `{one}` and `{other}` | {len(names)} | {value:.2f} | {p_text(p)} |")
    head = ["| tasks | common rows | rank correlation of their mean rewards (Spearman) | p |", "|---|---|---|---|"]
    return ["\n".join([*head, *lines])] if lines else []


def measured(task: str, found: Sequence[Summary], rules: dict[str, Any]) -> list[str]:
    """The table of a task, with what belongs to it."""
    finals = [run["points"] for summary in found for run in summary.row.of("final")]
    start, spent = statistics.fmean(points[0][-1] for points in finals), [points[-1][1] for points in finals]
    parts = [f"Before training {start:.3f}. Evaluations per run: {min(spent):,} to {max(spent):,}."]
    parts += shared(task, rules)
    parts.append(table(task, found, rules))
    if lines := changes(found):
        parts += ["\\* with a declared change:", "\n".join(lines)]
    if (PICTURES / f"ladder_{task}.svg").exists():
        parts.append(f"![Held-out reward against denoiser evaluations](pictures/ladder_{task}.svg)")
    return parts


def section(rules: dict[str, Any]) -> str:
    """The part of the page that the results make."""
    everything = rows()
    by_task = {task: summaries([r for r in everything if r.task == task], rules) for task in rules["tasks"]}
    parts = correlations(by_task)
    for task in rules["tasks"]:
        own = [row for row in everything if row.task == task]
        found, tuned = by_task[task], [row for row in own if tuned_means(row, rules)]
        if not tuned:
            continue
        parts.append(f"## `{task}`")
        if found:
            parts += measured(task, found, rules)
        by_reward = [summary.row for summary in found]
        others = sorted((row for row in tuned if row not in by_reward), key=lambda row: -max(tuned_means(row, rules)))
        text = f"Reward at the end by learning rate, mean of {len(rules['tuning_seeds'])} tuning seeds"
        unfinished = "; rows that are missing above have no final runs yet" if others else ""
        parts += [f"{text}{unfinished}:", tuning([*by_reward, *others], rules)]
    runs = [run for row in everything for run in row.of("tune") + row.of("final")]
    codes, machines = ({run[key] for run in runs} for key in ("code", "machine"))
    if runs:
        parts.append(f"Trees of `gerl/`: {', '.join(sorted(codes))}; machines: {', '.join(sorted(machines))}.")
    return "\n\n".join(parts) or "not measured yet"


def plot(task: str, found: Sequence[Summary], path: Path) -> None:
    """Draw mean held-out reward against mean evaluations, a line for each row."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # texts stay texts and names do not change, so that a new picture differs only where the numbers do
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "gerl", "font.family": "sans-serif"}):
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.subplots()
        for number, summary in enumerate(found):
            points = [run["points"] for run in summary.row.of("final")]
            shortest = min(map(len, points))
            means = np.array([[p[k][1::2] for k in range(shortest)] for p in points]).mean(axis=0)  # [points, 2]
            style = {"marker": MARKERS[number % len(MARKERS)], "linestyle": LINES[number // len(MARKERS)]}
            axes.plot(means[:, 0], means[:, 1], label=summary.row.name, markersize=4, linewidth=1.2, **style)
        axes.set(title=task, xlabel="evaluations of the denoiser on an image", ylabel="held-out reward")
        axes.grid(alpha=0.3)
        columns = 1 + (len(found) > 25)  # more lines are higher than the figure
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, ncols=columns)
        figure.savefig(path, metadata={"Date": None})


def write() -> None:
    """Write the section of the page and its pictures."""
    rules = protocol()
    for task in rules["tasks"]:
        if found := summaries(rows(tasks=[task]), rules):
            plot(task, found, PICTURES / f"ladder_{task}.svg")
    write_section(PAGE, BEGIN, END, section(rules))

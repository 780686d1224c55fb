"""The curves of a run as SVG that follows the page's colours."""

from __future__ import annotations  # of matplotlib, which is only imported when something is drawn

import io
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import markupsafe
import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = list[dict[str, Any]]

# Colours drawn by matplotlib that stand for variables of the page's style sheet, so that charts follow light and dark.
COLOURS = {"#f1e1d0": "--ink", "#f1e1d1": "--line"} | {f"#f1e1c{i}": f"--c{i}" for i in range(8)}
INK, LINE, *SERIES = COLOURS
WIDE, NARROW = (9.6, 3.4), (3.7, 2.4)
MAX_POINTS = 400
LEGEND_COLUMNS = 3
LOG_FLOOR = 1e-9

SIGNALS = (
    ("standard deviation of the step's rewards", "reward/std"),
    ("groups with equal rewards, share (no signal)", "group/zero_std_fraction"),
    ("distance to the base model, mean per latent value", "actor/kl"),
    ("clipped, share of (image, timestep) pairs", "actor/clip_fraction"),
    ("outside the clip range, share of off-policy pairs", "actor/off_policy/outside_fraction"),
    ("mean log-ratio, per latent value", "actor/log_ratio_mean"),
    ("norm of the gradient before clipping", "actor/grad_norm"),
    ("largest share of a step in the squared gradient", "actor/step_grad_share"),
    ("largest weight of the LoRA", "actor/lora_max"),
    ("learning rate", "actor/lr"),
)
DEVIATION = "actor/ratio_deviation"
TIMING_TOTALS = ("timing/step_s", "timing/total_s")


class Chart(NamedTuple):
    """An SVG and what it shows."""

    title: str
    svg: markupsafe.Markup


class Constant(NamedTuple):
    """A metric that had one value at all `steps` steps that have it: nothing to draw."""

    name: str
    value: str
    steps: int


class Labels(NamedTuple):
    """Names of the two curves of a reward, and the scorers in the order in which they are shown."""

    training: str = "training"
    held_out: str = "held-out"
    scorers: Sequence[str] = ()

    def place(self, column: str) -> tuple[int, str]:
        """Where a column of a scorer, `ocr` or `ocr/exact`, stands among the others."""
        name = column.partition("/")[0]
        return (self.scorers.index(name) if name in self.scorers else len(self.scorers), column)


def series(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows that have the metric `name`; a null becomes NaN, a gap in the line."""
    found = [(row["step"], row[name]) for row in rows if name in row]
    x = np.array([step for step, _ in found], dtype=float)
    y = np.array([v if isinstance(v, int | float) else np.nan for _, v in found], dtype=float)
    return x, y


def timing_parts(rows: Rows) -> list[str]:
    names = {name for row in rows for name in row if name.startswith("timing/") and name.endswith("_s")}
    return sorted(names - set(TIMING_TOTALS))


def _chart(title: str, draw: Callable[[Axes], None], size: tuple[float, float] = NARROW, above: float = 0.0) -> Chart:
    """An SVG whose colours are variables of the page and which refers to nothing outside it.

    `size` and `above`, the room for a legend above the axes, are in inches.
    """
    # Here and not above: a wrong argument of a command is said before matplotlib is imported.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif", "font.size": 10}
    with rc_context(style):
        figure = Figure(figsize=size)
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(LINE)
        axes.tick_params(colors=INK, labelsize=9, color=LINE)
        axes.grid(axis="y", color=LINE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        draw(axes)
        if axes.get_legend_handles_labels()[1] and axes.get_legend() is None:
            axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="best")
        # Margins that fit what all charts have: a layout engine would draw each of them twice to find them.
        (width, height), named = size, bool(axes.get_ylabel())
        left, bottom = 0.65 + 0.2 * named, 0.3 + 0.2 * bool(axes.get_xlabel())
        figure.subplots_adjust(left / width, bottom / height, 1 - 0.1 / width, 1 - (0.2 + above) / height)
        buffer = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    for size_of in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?) {size_of}="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{markupsafe.escape(title)}"', 1)
    for colour, variable in COLOURS.items():
        svg = svg.replace(colour, f"var({variable})")
    # Everything in it is a number, a constant of this file or a metric's name, which matplotlib escapes.
    return Chart(title, markupsafe.Markup(svg))


def _binned(x: np.ndarray, y: np.ndarray, reduce: Callable[[np.ndarray], Any]) -> tuple[np.ndarray, np.ndarray]:
    """At most `MAX_POINTS` points, so that a long run gives no huge page."""
    if len(x) <= MAX_POINTS:
        return x, y
    parts = np.array_split(np.arange(len(x)), MAX_POINTS)
    finite = [y[p][np.isfinite(y[p])] for p in parts]
    return np.array([x[p].mean() for p in parts]), np.array([reduce(v) if len(v) else np.nan for v in finite])


def _line(axes: Axes, rows: Rows, name: str, colour: int, label: str | None = None, **style: Any) -> None:
    x, y = _binned(*series(rows, name), reduce=style.pop("reduce", np.mean))
    if np.isfinite(y).any():
        look: dict[str, Any] = {"linewidth": 1.6, "marker": "o", "markersize": 4 if len(x) < 25 else 0} | style
        axes.plot(x, y, color=SERIES[colour], label=label, **look)


def _smooth_line(axes: Axes, rows: Rows, name: str, colour: int, label: str) -> None:
    """The values pale, and their running mean over a tenth of the run."""
    x, y = _binned(*series(rows, name), reduce=np.mean)
    reach = len(x) // 20
    if reach == 0:
        return _line(axes, rows, name, colour, label)
    windows = [y[max(0, i - reach) : i + reach + 1] for i in range(len(y))]
    finite = [w[np.isfinite(w)] for w in windows]
    axes.plot(x, y, color=SERIES[colour], alpha=0.35, linewidth=1)
    axes.plot(x, [w.mean() if len(w) else np.nan for w in finite], color=SERIES[colour], label=label, linewidth=2.2)


def reward_charts(rows: Rows, labels: Labels, errors: Mapping[int, float]) -> list[Chart]:
    """The reward curve for a wide and for a narrow page; nothing if there is no reward yet.

    errors: step -> standard error of the held-out mean, drawn as a bar. The best held-out step is marked.
    """
    if not any(np.isfinite(series(rows, name)[1]).any() for name in ("reward/mean", "val/reward/mean")):
        return []

    def draw(axes: Axes) -> None:
        _smooth_line(axes, rows, "reward/mean", 0, labels.training)
        x, y = series(rows, "val/reward/mean")
        _line(axes, rows, "val/reward/mean", 1, labels.held_out, linewidth=2.2, markersize=5)
        known = [(step, value, errors[int(step)]) for step, value in zip(x, y, strict=True) if int(step) in errors]
        if 0 < len(known) <= MAX_POINTS:
            steps, means, bars = zip(*known, strict=True)
            axes.errorbar(steps, means, bars, fmt="none", ecolor=SERIES[1], elinewidth=1.2, capsize=3)
        if best := best_step(rows):
            style: dict[str, Any] = {"marker": "o", "markersize": 11, "fillstyle": "none", "linestyle": "none"}
            axes.plot(*best, color=SERIES[1], label=f"best: {best[1]:.3f} at step {best[0]}", **style)
        axes.set_xlabel("step", color=INK)
        axes.set_ylabel("reward", color=INK)

    return [_chart("reward", draw, size) for size in (WIDE, NARROW)]


def best_step(rows: Rows) -> tuple[int, float] | None:
    """The step with the highest held-out reward, of equals the last; None where fewer than two were measured."""
    x, y = series(rows, "val/reward/mean")
    known = [(float(value), int(step)) for step, value in zip(x, y, strict=True) if np.isfinite(value)]
    return max(known)[::-1] if len(known) > 1 else None


def small_charts(rows: Rows, labels: Labels) -> tuple[list[Chart], list[Constant]]:
    """Each scorer, the signals that tell a healthy update from a sick one, and where the time went.

    What was not measured is left out; what never changed is in the second list.
    """
    names = {name for row in rows for name in row}
    known = {m[1] for name in names if (m := re.fullmatch(r"(?:reward|val)/(.+)/mean", name))} - {"reward"}
    scorers = sorted(known, key=labels.place)
    charts: list[tuple[str, list[str], Callable[[Axes], None]]] = []

    def draw_pair(axes: Axes, names: Sequence[str]) -> None:
        _smooth_line(axes, rows, names[0], 0, labels.training)
        _line(axes, rows, names[1], 1, labels.held_out)

    for scorer in scorers:
        pair = [f"reward/{scorer}/mean", f"val/{scorer}/mean"]
        charts.append((f"score of {scorer}, mean", pair, partial(draw_pair, names=pair)))
    for colour, (title, name) in enumerate(SIGNALS):
        charts.append((title, [name], partial(_line, rows=rows, name=name, colour=colour % len(SERIES))))

    def draw_deviation(axes: Axes) -> None:
        measured = [row for row in rows if isinstance(row.get(DEVIATION), int | float)]
        floored = [row | {DEVIATION: max(row[DEVIATION], LOG_FLOOR)} for row in measured]
        axes.set_yscale("log")
        _line(axes, floored, DEVIATION, 7, reduce=np.max, linestyle="none", markersize=3)

    charts.append(("max |ratio - 1| on policy (0 plotted as 1e-9)", [DEVIATION], draw_deviation))
    drawn, constants = list[Chart](), list[Constant]()
    for title, wanted, draw in charts:
        found = [constant(rows, name) for name in wanted]
        if all(found):
            constants += [value for value in found if value]
        elif any(np.isfinite(series(rows, name)[1]).any() for name in wanted):
            drawn.append(_chart(title, draw))
    parts = timing_parts(rows)
    if any(np.isfinite(series(rows, name)[1]).any() for name in parts):
        above = 0.17 * -(-len(parts) // LEGEND_COLUMNS)
        drawn.append(_chart("seconds per step, by part", partial(_stack_timing, rows=rows), above=above))
    return drawn, [value for value in constants if value.steps]


def constant(rows: Rows, name: str) -> Constant | None:
    """The metric `name` if it never changes, with 0 steps if it was never measured; one value is no constant."""
    _, y = series(rows, name)
    known = y[np.isfinite(y)]
    if len(known) == 1 or (len(known) and known.min() < known.max()):
        return None
    return Constant(name, f"{known[0]:.4g}" if len(known) else "", len(known))


def _stack_timing(axes: Axes, rows: Rows) -> None:
    """Time of each part of a step, on top of each other; a part that a step did not have took no time."""
    names = timing_parts(rows)
    timed = [row for row in rows if any(name in row for name in names)]
    x = np.array([row["step"] for row in timed], dtype=float)
    values = [np.array([row.get(name) or 0.0 for row in timed], dtype=float) for name in names]
    layers = [_binned(x, y, np.mean)[1] for y in values]
    x = _binned(x, x, np.mean)[0]
    labels = [name.removeprefix("timing/").removesuffix("_s") for name in names]
    colours = [SERIES[i % len(SERIES)] for i in range(len(names))]
    if len(x) == 1:
        x, layers = np.array([x[0] - 0.5, x[0] + 0.5]), [np.repeat(layer, 2) for layer in layers]
    axes.stackplot(x, layers, labels=labels, colors=colours, alpha=0.85, linewidth=0)
    # Above the chart: inside it there is no free place.
    axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1), ncols=LEGEND_COLUMNS, frameon=False, labelcolor=INK, fontsize=8,
        columnspacing=1,
    )  # fmt: skip

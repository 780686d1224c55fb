"""Draw `docs/pictures/packages.svg` from the code: gerl's packages and the way of one prompt: `python docs/map.py`.

Layers and packages are those of `tests/unit/test_structure.py`; the text of a package is the first sentence of its
docstring, and the packages it imports from, without those that follow from others.
"""

import ast
import pkgutil
import re
import sys
import textwrap
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]
import test_structure as structure  # noqa: E402

PICTURE = ROOT / "docs" / "pictures" / "packages.svg"
# The way of one prompt through a trainer step: what happens, and the function that does it.
WAY = (
    ("load", "gerl.data.sources:load"),
    ("plan", "gerl.algorithms.planning:plan_samples"),
    ("sample", "gerl.workers.rollout:Rollout.generate"),
    ("record", "gerl.engine.record:record"),
    ("score", "gerl.rewards.worker:RewardWorker.score"),
    ("credit", "gerl.trainer.step:credit_of"),
    ("train", "gerl.workers.actor:Actor.accumulate"),
    ("replay", "gerl.engine.replay:replay"),
    ("step", "gerl.workers.actor:Actor.step"),
    ("save", "gerl.run.checkpoint:save_checkpoint"),
)
# Relative widths where the packages of a layer are not equally wide, so that the way runs from left to right.
WIDTHS = {"model": 3.2, "rewards": 3.5, "run": 3, "commandline": 2.6, "engine": 5.2}
WIDTH, MARGIN, GAP, FIRST, COLUMN = 1000, 20, 14, 92, 84  # px; one column for each stop
STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #57606a }
  .code { font: 11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328 }
  .title, .name { font-size: 19px; font-weight: 700; fill: #1f2328 } .name { font-size: 15px }
  .panel { fill: #ffffff } .box { fill: #f3f5f8; stroke: #d0d7de } .imports { fill: #8c959f }
  .halo { stroke: #f3f5f8; stroke-width: 4px; paint-order: stroke } .stop, .part { fill: #d9480f; font-weight: 700 }
  .number { fill: #ffffff; font-weight: 700; text-anchor: middle } .end { text-anchor: end }
  .way { stroke: #d9480f; stroke-width: 3; fill: none; opacity: 0.7 }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1 } .code, .title, .name { fill: #f0f6fc } .panel { fill: #0d1117 }
    .box { fill: #1b2129; stroke: #3d444d } .imports { fill: #6e7681 }
    .halo { stroke: #1b2129 } .stop, .part { fill: #f08c3a } .number { fill: #0d1117 } .way { stroke: #f08c3a }
  }"""
TITLE = "The packages of gerl, and the way of one prompt through a trainer step"
LEGEND = "Packages import from those below; named are those that do not follow from others. Orange: the way of a prompt"
Way = tuple[tuple[str, str], ...]  # (stop, function)
Box = tuple[float, float, float, float]  # left, top, right, bottom


@cache
def imports() -> dict[str, set[str]]:
    """The packages that each imports from, without those that another of them imports from; from the ground up."""
    graph: dict[str, set[str]] = {package: set() for package in structure.LAYER_OF}
    for path in structure.FILES.values():
        found = [structure.resolve(name) for _, name in structure.imports(path)]
        graph[structure.package(path)] |= {structure.package(structure.FILES[module]) for module in found if module}
    graph = {package: others - {package} for package, others in graph.items()}

    def below(package: str) -> set[str]:
        return set().union(*({other} | below(other) for other in graph[package]))

    return {package: others - set().union(*map(below, others)) for package, others in graph.items()}


def lines_of(package: str) -> str:
    """Lines of code to one digit, so that the picture changes only when the package does."""
    count = sum(
        len(path.read_text("utf-8").splitlines())
        for path in structure.FILES.values()
        if structure.package(path) == package
    )
    return f"{float(f'{count:.0e}'):,.0f} lines"


def words_of(package: str, width: float) -> list[tuple[str, str]]:
    """(style, line) of what is written in a package: the first sentence of its docstring, and its imports."""
    docstring = ast.get_docstring(structure.tree(structure.FILES[f"gerl.{package}"])) or ""
    sentence = re.split(r"(?<=\.)\s", " ".join(docstring.split()))[0].replace("`", "")
    below = ", ".join(sorted(imports()[package], key=[*structure.LAYER_OF].index, reverse=True))
    columns = int(min(width - 24, 620) / 6.4)
    lines = [("halo", line) for line in textwrap.wrap(sentence, columns)]
    return lines + [("imports halo", line) for line in textwrap.wrap(f"imports {below}" if below else "", columns)]


def boxes(way: Way) -> dict[str, Box]:
    """The place of each package."""
    visited, places, top = {name.split(".")[1] for _, name in way}, {}, 74.0
    for layer in reversed(structure.LAYERS[:-1]):  # without the package itself
        widths = [WIDTHS.get(package, 1) for package in layer]
        unit, left = (WIDTH - 2 * MARGIN - GAP * (len(layer) - 1)) / sum(widths), float(MARGIN)
        rows = max(len(words_of(package, unit * width)) for package, width in zip(layer, widths, strict=True))
        bottom = top + 34 + 15 * rows + 42 * bool(visited & {*layer})
        for package, width in zip(layer, widths, strict=True):
            places[package] = (left, top, left + unit * width, bottom)
            left += unit * width + GAP
        top = bottom + GAP
    return places


def text(x: float, y: float, kind: str, words: str) -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(words)}</text>'


def draw(way: Way = WAY) -> str:
    """The picture as SVG; raises `LookupError` for a function of the way that is gone."""
    for _, name in way:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            raise LookupError(f"{name} is gone: write the new name into WAY of docs/map.py") from error
    places = boxes(way)
    height = max(box[3] for box in places.values()) + MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">',
        "<!-- made by docs/map.py -->",
        f"<title>{TITLE}</title>",
        f"<style>{STYLE}\n</style>",
        f'<rect class="panel" width="{WIDTH}" height="{height:.0f}" rx="10"/>',
        text(MARGIN, 36, "title", TITLE),
        text(MARGIN, 56, "legend", LEGEND),
    ]
    for left, top, right, bottom in places.values():
        size = f'width="{right - left:.0f}" height="{bottom - top:.0f}"'
        out.append(f'<rect class="box" x="{left:.0f}" y="{top:.0f}" {size} rx="8"/>')
    stops = [(FIRST + COLUMN * i, places[name.split(".")[1]][3] - 24) for i, (_, name) in enumerate(way)]
    for (x, y), (to_x, to_y) in pairwise(stops):
        half = f"{(y + to_y) / 2:.0f}"
        out.append(f'<path class="way" d="M{x} {y:.0f}C{x} {half} {to_x} {half} {to_x} {to_y:.0f}"/>')
    for package, (left, top, right, _) in places.items():
        out.append(text(left + 12, top + 22, "name halo", package))
        out.append(text(right - 12, top + 22, "end halo", lines_of(package)))
        out += [text(left + 12, top + 40 + 15 * i, *row) for i, row in enumerate(words_of(package, right - left))]
    for number, ((x, y), (part, name)) in enumerate(zip(stops, way, strict=True), start=1):
        out.append(f'<circle class="stop" cx="{x}" cy="{y:.0f}" r="12"/>')
        out.append(text(x, y + 4, "number", str(number)))
        out += [text(x + 17, y - 2, "part halo", part), text(x + 17, y + 12, "code halo", name.partition(":")[2])]
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")

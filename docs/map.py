"""Draw `docs/pictures/rooms.svg` from the code: the rooms of gerl and the way of one prompt: `python docs/map.py`.

A room is a folder or a file of gerl: its floor is read from `tests/unit/test_house.py`, its text is the first sentence
of its docstring, its arrows are its imports, without those that follow from others.
"""

import ast
import re
import textwrap
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"
# The way of one prompt through a trainer step: what happens, and the function that does it.
WAY = (
    ("load", "gerl.utils.dataset.load_prompts"),
    ("plan", "gerl.algorithms.planning.plan_samples"),
    ("draw", "gerl.workers.rollout.Rollout.generate"),
    ("record", "gerl.engine.record.record"),
    ("score", "gerl.rewards.worker.RewardWorker.score"),
    ("credit", "gerl.trainer.credit.credit_step"),
    ("train", "gerl.workers.actor.Actor.accumulate"),
    ("replay", "gerl.engine.replay.replay"),
    ("step", "gerl.workers.actor.Actor.step"),
    ("save", "gerl.run.checkpoint.save_checkpoint"),
)
# Relative widths, in the order in which the rooms of a floor stand, so that the way runs from left to right.
WIDTHS: dict[str, float] = {
    **{"export": 1, "preflight": 1, "evaluate": 1, "score": 1, "trainer": 1, "workers": 1, "algorithms": 1},
    **{"model": 3.2, "rewards": 3.5, "run": 3, "commandline": 2.6, "engine": 5.2, "pages": 2.2},
    **{"utils": 5, "cluster": 5, "config": 1, "protocol": 1, "errors": 1},
}
WIDTH, MARGIN, GAP, FIRST, COLUMN = 1000, 20, 26, 92, 84  # px; one column for each stop
STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #57606a }
  .code { font: 11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328 }
  .title, .name { font-size: 19px; font-weight: 700; fill: #1f2328 } .name { font-size: 15px }
  .panel { fill: #ffffff } .box { fill: #f3f5f8; stroke: #d0d7de } .import { stroke: #a3adb8 } .head { fill: #a3adb8 }
  .halo { stroke: #f3f5f8; stroke-width: 4px; paint-order: stroke } .stop, .part { fill: #d9480f; font-weight: 700 }
  .number { fill: #ffffff; font-weight: 700; text-anchor: middle } .end { text-anchor: end }
  .way { stroke: #d9480f; stroke-width: 3; fill: none; opacity: 0.7 }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1 } .code, .title, .name { fill: #f0f6fc } .panel { fill: #0d1117 }
    .box { fill: #1b2129; stroke: #3d444d } .import { stroke: #59636e } .head { fill: #59636e }
    .halo { stroke: #1b2129 } .stop, .part { fill: #f08c3a } .number { fill: #0d1117 } .way { stroke: #f08c3a }
  }"""
TITLE = "The rooms of gerl, and the way of one prompt through a trainer step"
LEGEND = "Grey: imports, always downwards; left out where other arrows imply them. Orange: the way, stop by stop."
Way = tuple[tuple[str, str], ...]  # (stop, function)
Box = tuple[float, float, float, float]  # left, top, right, bottom


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def file_of(module: str) -> Path | None:
    """The file of a dotted module name; None if there is none."""
    path = ROOT.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def floors() -> list[list[str]]:
    """The rooms by floor, from the ground up, from left to right; without the package itself."""
    body = tree(ROOT / "tests" / "unit" / "test_house.py").body
    value = next(n.value for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "FLOORS")
    rooms = [[room for room in floor if room != "__init__"] for floor in ast.literal_eval(value)]
    return [sorted(floor, key=[*WIDTHS].index) for floor in rooms if floor]


def check_way(way: Way) -> None:
    """Raise `LookupError` for a name that no function of the code has."""
    for _, name in way:
        parts = name.split(".")
        end = next(end for end in range(len(parts), 0, -1) if file_of(".".join(parts[:end])))
        body: list[ast.stmt] = tree(file_of(".".join(parts[:end])) or PICTURE).body
        for part in parts[end:]:
            found = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
            if not found:
                raise LookupError(f"{name} is gone: write the new name into WAY of docs/map.py")
            body = found[0].body


def sources(room: str) -> list[Path]:
    """The files of a room, without those that only re-export names for users."""
    folder = ROOT / "gerl" / room
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    kinds = {path: {type(node) for node in tree(path).body} - {ast.Expr} for path in files}
    return [path for path in files if path.name == "__init__.py" or kinds[path] != {ast.ImportFrom}]


def imports(rooms: list[str]) -> dict[str, set[str]]:
    """The rooms that each room imports from, without those that another of them imports from."""
    graph: dict[str, set[str]] = {}
    for room in rooms:
        nodes = [node for path in sources(room) for node in ast.walk(tree(path))]
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {f"{n.module}.{alias.name}" for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}
        graph[room] = {p[1] for name in names if (p := name.split("."))[0] == "gerl" and p[1:]} & set(rooms) - {room}

    def below(room: str) -> set[str]:
        return set().union(*({other} | below(other) for other in graph[room]))

    return {room: {a for a in graph[room] if not any(a in below(b) for b in graph[room])} for room in rooms}


def description(room: str) -> str:
    words = ast.get_docstring(tree(file_of(f"gerl.{room}") or PICTURE)) or ""
    return re.split(r"(?<=\.)\s", " ".join(words.split()))[0].replace("`", "")


def lines_of(room: str) -> str:
    """Lines of code in words, rounded so that the picture changes only when the room does."""
    count = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources(room))
    return "under 100 lines" if count < 100 else f"{round(count, -2):,} lines"


def wrapped(room: str, width: float) -> list[str]:
    return textwrap.wrap(description(room), int(min(width - 24, 620) / 6.4))


def boxes(way: Way) -> dict[str, Box]:
    """The place of each room."""
    visited, places, top = {name.split(".")[1] for _, name in way}, {}, 74.0
    for floor in reversed(floors()):
        unit = (WIDTH - 2 * MARGIN - 14 * (len(floor) - 1)) / sum(WIDTHS[room] for room in floor)
        rows = max(len(wrapped(room, unit * WIDTHS[room])) for room in floor)
        left, bottom = float(MARGIN), top + 34 + 15 * rows + 42 * bool(visited & {*floor})
        for room in floor:
            places[room] = (left, top, left + unit * WIDTHS[room], bottom)
            left = places[room][2] + 14
        top = bottom + GAP
    return places


def draw_imports(places: dict[str, Box]) -> list[str]:
    """Arrows from the bottom of a room to the top of the room that it imports from; rooms between hide them."""
    lines, taken = [], [0.0]  # taken: where arrows start
    for room, others in imports(list(places)).items():
        for other in sorted(others, key=lambda name: places[name]):
            a, b = places[room], places[other]
            start, end = max(a[0], b[0]) + 16, min(a[2], b[2]) - 16
            if start <= end:  # one stands above the other
                start = (start + end) / 2
                while any(abs(start - x) < 18 for x in taken) and start + 18 < end:
                    start += 18
                end = start
            elif a[0] < b[0]:
                start, end = end, start
            taken.append(start)
            line = f"M{start:.0f} {a[3]:.0f}L{end:.0f} {b[1] - 2:.0f}"
            lines.append(f'<path class="import" marker-end="url(#head)" d="{line}"/>')
    return lines


def text(x: float, y: float, kind: str, words: str) -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(words)}</text>'


def draw(way: Way = WAY) -> str:
    """The picture as SVG; raises `LookupError` for a function of the way that is gone."""
    check_way(way)
    places = boxes(way)
    height = max(box[3] for box in places.values()) + MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">',
        "<!-- made by docs/map.py -->",
        f"<title>{TITLE}</title>",
        f"<style>{STYLE}\n</style>",
        '<marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">',
        '<path class="head" d="M0 1L7 4L0 7z"/></marker>',
        f'<rect class="panel" width="{WIDTH}" height="{height:.0f}" rx="10"/>',
        text(MARGIN, 36, "title", TITLE),
        text(MARGIN, 56, "legend", LEGEND),
        *draw_imports(places),
    ]
    for left, top, right, bottom in places.values():
        size = f'width="{right - left:.0f}" height="{bottom - top:.0f}"'
        out.append(f'<rect class="box" x="{left:.0f}" y="{top:.0f}" {size} rx="8"/>')
    stops = [(FIRST + COLUMN * i, places[name.split(".")[1]][3] - 24) for i, (_, name) in enumerate(way)]
    for (x, y), (to_x, to_y) in pairwise(stops):
        half = f"{(y + to_y) / 2:.0f}"
        out.append(f'<path class="way" d="M{x} {y:.0f}C{x} {half} {to_x} {half} {to_x} {to_y:.0f}"/>')
    for room, (left, top, right, _) in places.items():
        out.append(text(left + 12, top + 22, "name halo", room))
        out.append(text(right - 12, top + 22, "end halo", lines_of(room)))
        out += [text(left + 12, top + 40 + 15 * i, "halo", row) for i, row in enumerate(wrapped(room, right - left))]
    for number, ((x, y), (part, name)) in enumerate(zip(stops, way, strict=True), start=1):
        out.append(f'<circle class="stop" cx="{x}" cy="{y:.0f}" r="12"/>')
        out.append(text(x, y + 4, "number", str(number)))
        out += [text(x + 17, y - 2, "part halo", part), text(x + 17, y + 12, "code halo", name.split(".", 3)[3])]
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")

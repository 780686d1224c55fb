"""The pages for users of other programs, and the table of what those offer: every key, name and test exists.

Their keys were read in their repositories at the commits that the pages name; here it is checked that the
hints of gerl's command line say the same as the pages.
"""

import ast
import re
import shlex
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from tables import each

from gerl.commandline.composition import experiments, shipped
from gerl.config import keys, nearest_key

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "migrate").glob("*.md"))}
PROGRAMS = ("flow_grpo", "mm_grpo", "verl_omni", "flow_factory", "trl", "ai_toolkit", "kohya")
WITH_COMMIT = PROGRAMS[:5]  # others have no version that their users share
AUDIT = (ROOT / "tests" / "interfaces.md").read_text(encoding="utf-8")
ITEMS = {"000": 15, "001": 37, "002": 54, "003": 24, "004": 40, "X": 8}
STATUSES = {"has", "other name", "in part", "does not apply", "not there"}
KEYS = {name for name, _ in keys()}
CHOICES = {"algorithm", "experiment", "hydra.run.dir"}
CODE = re.compile(r"`([^`]+)`")


class Item(NamedTuple):
    """A row of the tables of what other interfaces offer."""

    row: str
    item: str
    status: str
    here: str
    shown: str


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


ROWS = [Item(*cells(line)) for line in AUDIT.splitlines() if re.match(r"\| (00\d|X)-\d\d ", line)]


def renamed() -> list[tuple[str, list[str]]]:
    """Their key, and gerl's, of every row of the tables of programs."""
    pairs = []
    for program in PROGRAMS:
        rows = [cells(line) for line in PAGES[program].splitlines() if line.startswith("| `")]
        assert len(rows) >= 15
        pairs += [(CODE.findall(theirs)[0], CODE.findall(ours)) for theirs, ours, *_ in rows]
    return pairs


@cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_row_is_there_once() -> None:
    expected = [f"{seed}-{number:02d}" for seed, count in ITEMS.items() for number in range(1, count + 1)]
    assert [row.row for row in ROWS] == expected and len(ROWS) == 178


def test_every_row_has_a_status_and_something_that_shows_it() -> None:  # one test: all rows are read locally too
    for row in ROWS:
        assert row.item and row.status in STATUSES, row
        if row.status in ("in part", "does not apply", "not there"):
            assert len(row.here) > 30, f"{row}: it needs a reason"
        shown = CODE.findall(row.shown)
        if not shown:
            assert row.shown == "-" and row.status in ("does not apply", "not there"), row
        for place in shown:
            path, _, function = place.partition("::")
            if path.startswith("tests/"):
                assert (ROOT / path).is_file(), place
                assert not function or function in functions(ROOT / path), place
            else:
                check_command(place)


def check_command(line: str) -> None:
    program, *arguments = shlex.split(line)
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M), line
    else:
        assert (program, arguments[0]) == ("python", "-m") and import_module(arguments[1]), line


def test_keys_presets_and_names_exist() -> None:
    missing = []
    blocks = {key.partition(".")[0] for key in KEYS}
    text = "\n".join(PAGES.values())
    ours = [*(row.here for row in ROWS), *re.findall(r"^(?!\| `|error: |\$ ).*$", text, re.M)]
    ours += [" | ".join(cells(line)[1:]) for line in text.splitlines() if line.startswith("| `")]
    for code in CODE.findall("\n".join(ours)):
        name, equals, value = code.partition("=")
        block, _, leaf = name.partition(".")
        if name in ("algorithm", "experiment") and equals:
            known = shipped("algorithm") if name == "algorithm" else experiments()
            missing += [] if value in known or value in ("", "NAME", "FILE.yaml") else [code]
        elif block == "gerl" and re.fullmatch(r"gerl(\.\w+)*", name):
            missing += [] if found(name) else [code]
        elif block in blocks and leaf and re.fullmatch(r"[\w.]+", name) and not name.startswith("sampling.call."):
            generic = re.sub(r"^reward\.scorers\.\w+\.(\w+).*", r"reward.scorers.NAME.\1", name)
            missing += [] if generic in KEYS else [code]
    assert not missing


def found(name: str) -> bool:
    """Whether `gerl.x.y` is a module, or the name of something in one."""
    try:
        import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return hasattr(import_module(module), attribute)
    return True


@each(("theirs", "ours"), renamed())
def test_the_command_line_says_the_same(theirs: str, ours: list[str]) -> None:
    """A key of theirs has the hint that the table has; both may have it under the same name."""
    assert all(key in KEYS | CHOICES or key.startswith("sampling.call.") for key in ours)
    assert (nearest_key(theirs) or "").split() == ours or theirs in ours


def test_sources_have_a_commit() -> None:
    assert all(re.search(r"\bat commit [0-9a-f]{7}\b", PAGES[program]) for program in WITH_COMMIT)


def test_the_first_page_links_to_all_others() -> None:
    assert {f"({program}.md)" for program in PROGRAMS} <= set(re.findall(r"\(\w+\.md\)", PAGES["index"]))
    assert set(PAGES) == {"index", *PROGRAMS}

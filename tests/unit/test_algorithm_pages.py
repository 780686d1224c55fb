"""The pages about algorithms, and what to do when a run fails: their presets, keys, metrics and numbers exist."""

import re
from pathlib import Path

import pytest

from gerl.commandline.composition import shipped
from gerl.config.suggestions import keys

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
KEYS = {name for name, _ in keys()}
BLOCKS = {name.partition(".")[0] for name in KEYS}
CODE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "gerl").rglob("*.py")))
PAGES = {
    name: (DOCS / f"{name}.md").read_text(encoding="utf-8")
    for name in (
        *("algorithms", "choose_an_algorithm", "algorithm_benchmark", "engine", "full_fine_tuning", "glossary"),
        "troubleshooting",
    )
}
METRIC = re.compile(r"`((?:actor|group|guard|health|reward|timing|val)/[\w/]+)`")
METRICS = sorted(set(METRIC.findall(" ".join(PAGES.values()))))


def test_the_reference_has_every_preset_and_every_key_of_an_algorithm() -> None:
    own = {name.removeprefix("algorithm.") for name in KEYS if name.startswith("algorithm.")} - {"name"}
    page = PAGES["algorithms"]
    assert not [name for name in shipped("algorithm") if f"`{name}`" not in page]
    assert not [name for name in sorted(own) if not re.search(rf"`(?:algorithm\.)?{name}\b", page)]
    assert re.findall(r"\b(\d+) presets", page) == [f"{len(shipped('algorithm'))}"]


@pytest.mark.parametrize("page", PAGES)
def test_keys_exist(page: str) -> None:
    text = re.sub(r"^\* `flow_factory_.*$", "", PAGES[page], flags=re.M)  # keys of another trainer
    named = re.findall(rf"(?<![\w./])(?:{'|'.join(sorted(BLOCKS))})(?:\.\w+)+\b(?<!\.md)(?<!\.jsonl)", text)
    known = [re.sub(r"^reward\.scorers\.\w+", "reward.scorers.NAME", name) in KEYS for name in named]
    assert named and all(known), [name for name, found in zip(named, known, strict=True) if not found]


@pytest.mark.parametrize("metric", METRICS)
def test_metrics_are_written(metric: str) -> None:
    """As a whole, or by their last part: others are put together from block and name."""
    name = metric.rpartition("/")[2]
    if metric.startswith("timing/"):
        assert f'watch("{name.removesuffix("_s")}")' in CODE
    elif name not in ("K", "SOURCE"):
        assert any(f'"{text}"' in CODE for text in (metric, name)) or f"/{name}" in CODE


def test_the_advice_has_the_numbers_of_the_benchmark() -> None:
    """Rewards of the recommended presets are in the row of one of them in one of the tables."""
    measured: dict[str, str] = {}
    for name, row in re.findall(r"^\| `(\w+)`[^|]*(\|.*)$", PAGES["algorithm_benchmark"], re.M):
        measured[name] = measured.get(name, "") + row.replace("**", "")
    advice = PAGES["choose_an_algorithm"].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \| ([^|]*0\.\d[^|]*) \| [^|]+ \|$", advice, re.M)
    assert len(rows) == 9
    for presets, rewards in rows:
        named = [measured[name] for name in re.findall(r"`(\w+)", presets) if name in measured]
        numbers = re.findall(r"0\.\d{3}", rewards)
        assert numbers and all(any(f" {number} " in row for row in named) for number in numbers), (presets, rewards)

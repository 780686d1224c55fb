"""The site of the documentation: built without a warning, and every link, picture and script of its pages is there."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from drills import more
from markdown_it import MarkdownIt
from mkdocs.commands.build import build
from mkdocs.config import load_config

import gerl

ROOT = Path(__file__).resolve().parents[2]
START = "index.html"
LOOKED_FOR = {  # words of a link on the start page -> where a reader of it ends
    "Install": "docs/install.html",
    "Tutorial": "docs/tutorial.html",
    "Rewards": "docs/write_a_reward.html",
    "Recipes": "docs/recipes.html",
    "Algorithms": "docs/choose_an_algorithm.html",
    "Will it fit?": "docs/memory.html",
    "Troubleshooting": "docs/troubleshooting.html",
    "stop and resume": "docs/resume.html",
    "export": "docs/export.html",
    "several machines": "docs/cluster.html",
}


@dataclass
class Page(HTMLParser):
    """What a page of the site links to, loads, and can be linked to at."""

    text: str
    links: list[tuple[str, str]] = field(default_factory=list)  # target, words
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)  # of elements in the article

    def __post_init__(self) -> None:
        super().__init__()
        self.open, self.inside = False, False
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found["id"]} if "id" in found else set()
        self.inside = self.inside or tag == "article"
        if self.inside:
            self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag == "a" and "href" in found:
            self.links.append((found["href"], ""))
            self.open = True
        elif tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(found["href"])
        elif "src" in found:
            self.loads.append(found["src"])

    def handle_endtag(self, tag: str) -> None:
        self.open = self.open and tag != "a"
        self.inside = self.inside and tag != "article"

    def handle_data(self, data: str) -> None:
        if self.open:
            target, words = self.links[-1]
            self.links[-1] = (target, f"{words} {data}".strip())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """The pages by their place in the site, from a build in which each warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder))
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    config.plugins.on_shutdown()
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.html")}
    return {name: Page(path.read_text(encoding="utf-8")) for name, path in files.items() if name != "404.html"} | {
        "": Page("\n".join(path.relative_to(folder).as_posix() for path in folder.rglob("*")))
    }


def files(site: dict[str, Page]) -> set[str]:
    return set(site[""].text.splitlines())


def pages(site: dict[str, Page]) -> dict[str, Page]:
    return {name: page for name, page in site.items() if name}


def place(page: str, target: str) -> str:
    """Where a relative link of a page leads: the path in the site, and the anchor."""
    parts = urlsplit(target)
    path = Path("/", page).parent.joinpath(unquote(parts.path)).resolve() if parts.path else Path("/", page)
    name = path.relative_to("/").as_posix()
    name = START if name == "." else name
    return f"{name}#{unquote(parts.fragment)}" if parts.fragment else name


def relative(links: list[str]) -> Iterator[str]:
    yield from (link for link in links if not link.startswith(("http:", "https:", "mailto:", "data:", "javascript:")))


@more
def test_every_page_of_the_repository_is_in_the_site(site: dict[str, Page]) -> None:
    there = {path.relative_to(ROOT).with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert there | {START, "CHANGELOG.html", "benchmarks/index.html"} <= set(site)
    assert not [name for name in files(site) if name.endswith((".py", ".css")) and name.startswith("docs/")]


def test_links_pictures_and_scripts_are_there(site: dict[str, Page]) -> None:
    wrong = []
    for name, page in pages(site).items():
        for target in relative([link for link, _ in page.links] + page.loads):
            path, _, anchor = place(name, target).partition("#")
            if path not in files(site) or (anchor and path in site and anchor not in site[path].anchors):
                wrong.append(f"{name}: {target}")
    assert not wrong, "\n".join(wrong)


def test_nothing_is_loaded_from_elsewhere(site: dict[str, Page]) -> None:
    loaded = {load for page in pages(site).values() for load in page.loads}
    assert any(load.endswith("demo.png") for load in loaded)
    assert not [load for load in loaded if load.startswith(("http", "//"))]


def test_the_search_knows_the_pages(site: dict[str, Page]) -> None:
    assert "search/search_index.json" in files(site)


def test_what_readers_look_for_is_in_two_clicks(site: dict[str, Page]) -> None:
    start = {words: place(START, target) for target, words in site[START].links}
    for words, end in LOOKED_FOR.items():
        assert start[words] == end, words
        menu = {place(name, target).partition("#")[0] for name in [START] for target, _ in site[name].links}
        assert end.partition("#")[0] in menu


def test_the_public_names_have_their_docstrings(site: dict[str, Page]) -> None:
    reference = site["docs/reference.html"].text
    for name in (*gerl.__all__, "evaluate", "score", "export", "preflight"):
        if name != "__version__":
            assert f"gerl.{name}" in reference, name
    for docstring in (gerl.train.__doc__, gerl.Trainer.__doc__, gerl.replay.__doc__):
        first = (docstring or "").split("`")[0].strip().splitlines()[0].split(":")[0]
        assert first and first in reference


def test_keys_in_tables_are_broken_between_words(site: dict[str, Page]) -> None:
    table, text = site["docs/migrate/kohya.html"].text, site["docs/migrate/index.html"].text
    assert "<code>actor.<wbr>lr_<wbr>schedule</code>" in table and "<code>actor.lr_schedule</code>" not in table
    assert text.count("<code>actor.ema_decay=0</code>") == 1, "not in a table"


def test_pages_look_as_on_github(site: dict[str, Page]) -> None:
    """As many lists, tables, pictures and pieces of code as CommonMark makes: its rules for lists are others."""
    commonmark, wrong = MarkdownIt("commonmark").enable("table"), []
    for name, page in pages(site).items():
        source = ROOT / name.replace(".html", ".md")
        if not source.exists():  # a README, which begins a folder in the site
            source = ROOT / name.replace("index.html", "README.md")
        if name == "docs/reference.html":
            continue
        expected = Page(f"<article>{commonmark.render(source.read_text(encoding='utf-8'))}</article>").counts
        for tag in ("li", "ol", "table", "tr", "img", "pre"):
            if (found := page.counts.get(tag, 0)) != expected.get(tag, 0):
                wrong.append(f"{source.relative_to(ROOT)}: {found} <{tag}>, and {expected.get(tag, 0)} on GitHub")
    assert not wrong, "\n".join(wrong)

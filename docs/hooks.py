"""Hooks of mkdocs (mkdocs.yml): the site has the pages of the repository, each where it lies, and what they link to."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from gerl.algorithms import every_exclusion
from gerl.config.exclusions import as_markdown

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r'\]\(\s*([^)\s#]+)[^)]*\)|(?:src|href)="([^"#]+)')
CELL = re.compile(r"<td.*?</td>", re.S)
CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
PART = re.compile(r"(?:[./_=]|::)(?=\w)")


def pages() -> list[Path]:
    """The pages: those of `docs`, those at the top, and those beside the code."""
    folders = ("docs", "benchmarks", "gerl", "reward_models")
    return [*sorted(ROOT.glob("*.md")), *(page for name in folders for page in sorted((ROOT / name).rglob("*.md")))]


def linked(page: Path) -> Iterator[Path]:
    """The files of the repository, other than pages, that a page links to or shows."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for match in LINK.finditer(text):
        found = (page.parent / (match[1] or match[2])).resolve()
        if found.is_file() and found.suffix != ".md" and found.is_relative_to(ROOT):
            yield found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the theme, the pages, and the files they link to; nothing else of `docs`."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    found = pages()
    for path in dict.fromkeys([*found, *(file for page in found for file in linked(page))]):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The reference has the table of keys that exclude each other."""
    return markdown.replace("<!-- exclusions -->", as_markdown(every_exclusion()))


def on_page_content(html: str, **_: Any) -> str:
    """Keys and paths in tables are broken behind a dot, slash or underscore where a column is narrow, not anywhere."""
    return CELL.sub(lambda cell: CODE.sub(lambda code: PART.sub(r"\g<0><wbr>", code[0]), cell[0]), html)

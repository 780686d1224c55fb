"""The part of a page that a benchmark writes: what stands between two marks."""

from pathlib import Path

from gerl.utils.files import write_file


def with_section(text: str, begin: str, end: str, content: str) -> str:
    """`text` with `content` between the marks; raises `ValueError` where they are not there once each, in order."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed) or begin in after or end in after:
        raise ValueError(f"the page must have {begin} and {end} once each, in this order")
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def write_section(page: Path, begin: str, end: str, content: str) -> None:
    """Replace what stands between the marks of a page."""
    write_file(page, with_section(page.read_text(encoding="utf-8"), begin, end, content))

"""The part of a page that a benchmark writes."""

from pathlib import Path

import pytest
from sections import with_section, write_section

BEGIN, END = "<!-- it: begin -->", "<!-- it: end -->"


def test_the_section_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    text = f"before\n{BEGIN}\n\nold\n\n{END}\nafter"
    once = with_section(text, BEGIN, END, "new")
    assert once == text.replace("old", "new") == with_section(once, BEGIN, END, "new")
    for wrong in ("no marks", text.replace(END, ""), text + BEGIN):
        with pytest.raises(ValueError, match="once each"):
            with_section(wrong, BEGIN, END, "new")
    page = tmp_path / "page.md"
    page.write_text(text)
    write_section(page, BEGIN, END, "new")
    assert page.read_text() == once

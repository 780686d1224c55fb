"""An HTML page as a browser sees it: closed elements, what it loads, and its text."""

import html.parser
import json
import re


class Page(html.parser.HTMLParser):
    """Checks that elements are closed and nothing is loaded from elsewhere; collects pictures, bars and the text."""

    VOID = ("meta", "img", "br", "link", "input")
    LOADING = ("src", "href", "xlink:href", "srcset", "data", "action")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.values: list[list[float | None]] = []
        self.bars: list[int] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        assert all(value.startswith(("data:image/", "#")) for value in self.loaded)
        assert not {"link", "iframe"} & set(self.tags) and "@import" not in text
        assert "http://" not in text and "https://" not in text
        assert set(re.findall(r"url\((.*?)\)", text)) <= {f"#{name}" for name in re.findall(r'id="([^"]*)"', text)}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.loaded += [given[name] for name in self.LOADING if name in given]
        if "data-values" in given:
            self.values.append(json.loads(given["data-values"]))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-2:] == ["rect", "title"]:
            self.bars.append(int(data))
        elif data.strip() and self.open[-1] not in ("style", "script"):
            self.words.append(data.strip())

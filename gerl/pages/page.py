"""Self-contained HTML pages: a table whose lines sort the cards below it, and other pages of the same cards."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2


@dataclass(frozen=True)
class Picture:
    """A picture of a card, and below it caption, gain, note, why it has no score, and its scores by column."""

    uri: str  # data: URI; JPEG is shown smooth, PNG with sharp pixels
    alt: str
    caption: str = ""
    gain: str = ""
    trend: str = ""  # up or down: the colour of the gain
    note: str = ""
    failure: str = ""
    scores: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Card:
    """Pictures that belong together under a heading. `values`: by what each line of the table sorts the cards."""

    pictures: Sequence[Picture]
    values: Sequence[float | None] = ()
    heading: str = ""
    note: str = ""
    gain: str = ""
    trend: str = ""  # up, down or flat: the colour of the card's edge


@dataclass(frozen=True)
class Line:
    """A line of the table, whose name is a button that sorts the cards; `first` of those that belong together.

    A cell of numbers is shown as a histogram: so many values of the column lie in each of equal parts.
    """

    name: str
    cells: Sequence[str | Sequence[int]]
    first: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table of its own above the others, with remarks; its lines are plain text."""

    title: str
    remarks: Sequence[str]
    head: Sequence[str] = ()
    lines: Sequence[Sequence[str]] = ()


def card_page(
    title: str,
    note: str,
    head: Sequence[str],
    lines: Sequence[Line],
    cards: Sequence[Card],
    chosen: int = 0,
    wide: str = "14rem",
    least: str = "8rem",
    sheets: Sequence[Sheet] = (),
) -> str:
    """The page of a table with `lines` under `head` and of cards, sorted at first by line `chosen`, highest first.

    Cards without a value there come last. wide, least: CSS lengths, the least width of a card and of a picture in it.
    sheets: tables above all this.
    """
    ranked = sorted(cards, key=lambda card: descending(card.values[chosen] if card.values else None))
    shown = {"note": note, "head": head, "lines": lines, "cards": ranked, "chosen": chosen, "sheets": sheets}
    return render("page.html.j2", title=title, wide=wide, least=least, **shown)


def descending(value: float | None) -> tuple[bool, float]:
    """A key that sorts the highest value first, and what has no value last."""
    return value is None, -(value or 0.0)


def show(value: float | None, sign: str = "") -> str:
    """A number with four significant digits; `sign` "+" shows the sign of positive ones too."""
    return "-" if value is None or math.isnan(value) else f"{value:{sign}.4g}"


def render(template: str, **values: object) -> str:
    """The page of `template` with `values`, escaped; a value that the template misses is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["show"] = show
    return environment.get_template(template).render(**values)


def page_assets(own: str = "") -> dict[str, str]:
    """`script` and `style` of the page that shows a run; with `own`, its rules are for what is in that element only."""
    script, style = (
        Path(__file__).parent.joinpath(f"live.{kind}").read_text(encoding="utf-8") for kind in ("js", "css")
    )
    shared, mark, rules = style.partition("/* all below")
    return {"script": script, "style": f"{shared}{own} {{\n{mark}{rules}}}\n" if own else style}

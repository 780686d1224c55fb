"""Self-contained HTML pages: a table whose lines sort the cards below it, and image grids."""

import base64
import bisect
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "pages"


@dataclass(frozen=True)
class Picture:
    """Image of a card, with caption, gain, note, reason for a missing score, and scores by column below it."""

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
    """Images that belong together, under a heading. `values`: sort keys of the card, one per line of the table."""

    pictures: Sequence[Picture]
    values: Sequence[float | None] = ()
    heading: str = ""
    note: str = ""
    gain: str = ""
    trend: str = ""  # up, down or flat: the colour of the card's edge


@dataclass(frozen=True)
class Line:
    """Table line whose name is a button that sorts the cards."""

    name: str
    cells: Sequence[str | Sequence[int]]  # numbers are shown as a histogram: counts in equal parts of the range
    first: bool = False  # of a block of lines


@dataclass(frozen=True)
class Sheet:
    """Separate table with remarks above the others; its lines are plain text."""

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
    """Render a page with a table of `lines` under `head` and cards, initially sorted by line `chosen`, descending.

    Cards without a value are last. wide, least: CSS lengths, the minimum width of a card and of an image in it. sheets:
    tables below the main table.
    """
    ranked = sorted(cards, key=lambda card: descending(card.values[chosen] if card.values else None))
    shown = {"note": note, "head": head, "lines": lines, "cards": ranked, "chosen": chosen, "sheets": sheets}
    return render("page.html.j2", title=title, wide=wide, least=least, **shown)


def descending(value: float | None) -> tuple[bool, float]:
    """Return a sort key for descending order, with missing values last."""
    return value is None, -(value or 0.0)


def show(value: float | None, sign: str = "") -> str:
    """Format a number with four significant digits; `sign` "+" also shows the sign of positive numbers."""
    return "-" if value is None or math.isnan(value) else f"{value:{sign}.4g}"


def render(template: str, **values: object) -> str:
    """Render `template` with `values`, escaped in HTML; a missing value is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["repr"] = repr
    environment.globals["show"] = show
    return environment.get_template(template).render(**values)


def page_assets(scope: str = "") -> dict[str, str]:
    """Return `script` and `style` of the page of a run; `scope`: a CSS selector outside of which no style applies."""
    script, style = ((ASSETS / f"live.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    shared, mark, rules = style.partition("/* all below")
    return {"script": script, "style": f"{shared}{scope} {{\n{mark}{rules}}}\n" if scope else style}


# --- Image grids and data URIs

PAPER, INK, GAP = (255, 255, 255), (30, 30, 30), 6


def enlarge(image: np.ndarray, min_width: int = 128, max_width: int = 512) -> Image.Image:
    """Return an image `[H, W, 3]` uint8 at a viewable width in pixels.

    Narrower than `min_width`: enlarged by an integer factor without smoothing, so that pixels stay visible; wider than
    `max_width`: downscaled.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"expected an image [H, W, 3] uint8, got {list(image.shape)} {image.dtype}")
    picture = Image.fromarray(np.ascontiguousarray(image))
    width, height = picture.size
    if width < min_width:
        factor = math.ceil(min_width / width)
        return picture.resize((width * factor, height * factor), Image.Resampling.NEAREST)
    if width > max_width:
        return picture.resize((max_width, max(1, round(height * max_width / width))), Image.Resampling.LANCZOS)
    return picture


def grid(
    images: list[np.ndarray],
    captions: list[str] | None = None,
    columns: int = 8,
    min_width: int = 128,
    max_width: int = 512,
) -> Image.Image:
    """Arrange images `[H, W, 3]` uint8 in rows of at most `columns`, with captions below, cut to the tile's width.

    Tiles are `min_width` to `max_width` pixels wide; sizes may differ. Raises `ValueError` without images, or if the
    number of captions differs.
    """
    if not images:
        raise ValueError("a grid needs at least one image")
    if captions is not None and len(captions) != len(images):
        raise ValueError(f"expected {len(images)} captions, got {len(captions)}")
    tiles = [enlarge(image, min_width, max_width) for image in images]
    width = max(tile.width for tile in tiles)
    height = max(tile.height for tile in tiles)
    font = ImageFont.load_default(size=max(11, min(20, width // 11)))
    ascent, descent = font.getmetrics() if isinstance(font, ImageFont.FreeTypeFont) else (11, 0)
    strip = ascent + descent + 4 if captions is not None else 0
    columns = max(1, min(columns, len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    sheet = Image.new("RGB", (columns * (width + GAP) + GAP, rows * (height + strip + GAP) + GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    for i, tile in enumerate(tiles):
        x = GAP + (i % columns) * (width + GAP)
        y = GAP + (i // columns) * (height + strip + GAP)
        sheet.paste(tile, (x + (width - tile.width) // 2, y + (height - tile.height) // 2))
        if captions is not None:
            text = _fit(" ".join(captions[i].split()), font, width)
            draw.text((x + (width - font.getlength(text)) / 2, y + height + 2), text, fill=INK, font=font)
    return sheet


def still(pixels: np.ndarray, frames: int = 4) -> np.ndarray:
    """Return an image `[H, W, 3]` unchanged; of a video `[F, H, W, 3]` some frames, first to last, side by side."""
    if pixels.ndim == 3:
        return pixels
    chosen = np.linspace(0, len(pixels) - 1, min(frames, len(pixels))).round().astype(int)
    return np.concatenate([pixels[k] for k in chosen], axis=1)


def thumbnail(pixels: np.ndarray, width: int, exact: int = 128) -> str:
    """Encode an image `[H, W, 3]`, or stills of a video `[F, H, W, 3]`, uint8, as a data URI.

    At most `width` pixels wide and four times as high; lossless up to a width of `exact` pixels.
    """
    image = enlarge(still(pixels), min_width=1, max_width=width)
    image.thumbnail((width, 4 * width))
    return to_data_uri(image, lossy=image.width > exact)


def to_data_uri(image: Image.Image, lossy: bool = False) -> str:
    """Encode an image as a `data:` URI."""
    return data_uri(*encode(image, lossy))


def encode(image: Image.Image, lossy: bool) -> tuple[bytes, str]:
    """Encode an image as PNG, or as JPEG if `lossy`; returns bytes and media type."""
    buffer, kind = io.BytesIO(), "jpeg" if lossy else "png"
    image.convert("RGB").save(buffer, kind, **({"quality": 88} if lossy else {"optimize": True}))
    return buffer.getvalue(), f"image/{kind}"


def data_uri(content: bytes, media: str) -> str:
    """Return a file as a `data:` URI."""
    return f"data:{media};base64,{base64.b64encode(content).decode()}"


def _fit(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    fitting = bisect.bisect_right(range(1, len(text)), width, key=lambda n: math.ceil(font.getlength(text[:n] + "...")))
    return text[:fitting].rstrip() + "..."

"""Image grids and data URIs."""

import base64
import bisect
import io
import math

import numpy as np
from PIL import Image, ImageDraw, ImageFont

PAPER = (255, 255, 255)
INK = (30, 30, 30)
GAP = 6


def enlarge(image: np.ndarray, min_width: int = 128, max_width: int = 512) -> Image.Image:
    """An image [H, W, 3] uint8 at a width in pixels that can be looked at.

    Narrower than `min_width`: enlarged by a whole factor without smoothing, so that its pixels stay visible; wider than
    `max_width`: reduced.
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
    """Images [H, W, 3] uint8 in rows of at most `columns`, each with its caption below, cut to the tile's width.

    Tiles are at least `min_width` and at most `max_width` pixels wide; sizes may differ. Raises `ValueError` if there
    is no image or the number of captions is another.
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
    """An image [H, W, 3] as it is; of a video [F, H, W, 3] some frames, from first to last, side by side."""
    if pixels.ndim == 3:
        return pixels
    chosen = np.linspace(0, len(pixels) - 1, min(frames, len(pixels))).round().astype(int)
    return np.concatenate([pixels[k] for k in chosen], axis=1)


def thumbnail(pixels: np.ndarray, width: int, exact: int = 128) -> str:
    """An image [H, W, 3] or stills of a video [F, H, W, 3], uint8, as a data URI.

    It is at most `width` pixels wide and four times as high; up to `exact` pixels width it is kept as it is.
    """
    image = enlarge(still(pixels), min_width=1, max_width=width)
    image.thumbnail((width, 4 * width))
    return to_data_uri(image, lossy=image.width > exact)


def to_data_uri(image: Image.Image, lossy: bool = False) -> str:
    """The image as a `data:` URI: PNG, or JPEG where `lossy`."""
    buffer, kind = io.BytesIO(), "jpeg" if lossy else "png"
    image.convert("RGB").save(buffer, kind, **({"quality": 88} if lossy else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _fit(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    fitting = bisect.bisect_right(range(1, len(text)), width, key=lambda n: math.ceil(font.getlength(text[:n] + "...")))
    return text[:fitting].rstrip() + "..."

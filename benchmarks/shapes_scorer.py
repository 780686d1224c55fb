"""A judge of the images of benchmarks/shapes_model.py: compares the shapes in an image with those asked for."""

import re
from collections import Counter
from functools import cache
from hashlib import sha256
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageDraw

COLOURS = {
    "red": (210, 40, 40), "green": (40, 175, 70), "blue": (40, 70, 200),
    "yellow": (240, 200, 40), "purple": (140, 50, 160), "black": (30, 30, 34),
}  # fmt: skip
GROUND = (228, 228, 224)
KINDS = ("circle", "square", "triangle")
NUMBERS = {"a": 1, "two": 2, "three": 3}
ASKED = re.compile(rf"\b({'|'.join(NUMBERS)}) ({'|'.join(COLOURS)}) ({'|'.join(KINDS)})s?\b")
NEAR = 70  # distance in RGB at most from the colour that a pixel counts as; edges, which are mixtures, lie between
LEAST_AREA = 0.008  # share of the image of the smallest patch that counts: a quarter of the smallest triangle
LEAST_OVERLAP = 0.75  # of a patch with the shape it is taken for, as intersection over union

Thing = tuple[str, str]  # colour and kind; a patch that is no shape has the kind ""


def draw_shape(draw: ImageDraw.ImageDraw, kind: str, box: tuple[float, float, float, float], fill: Any) -> None:
    """Draw a shape that fills `box` (left, top, right, bottom)."""
    left, top, right, bottom = box
    if kind == "circle":
        draw.ellipse(box, fill=fill)
    elif kind == "square":
        draw.rectangle(box, fill=fill)
    else:
        draw.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], fill=fill)


@cache
def template(kind: str, width: int, height: int) -> np.ndarray:
    """The share of each pixel [height, width] that a shape of this size covers."""
    image = Image.new("L", (8 * width, 8 * height))
    draw_shape(ImageDraw.Draw(image), kind, (0, 0, 8 * width - 1, 8 * height - 1), 255)
    return np.asarray(image.resize((width, height), Image.Resampling.BOX)) / 255


def kind_of(patch: np.ndarray) -> str:
    """The kind of shape that a patch [height, width] of booleans, cut to its size, is most like; "" if like none."""
    height, width = patch.shape
    overlaps = {}
    for kind in KINDS:
        shape = template(kind, width, height)
        overlaps[kind] = np.minimum(patch, shape).sum() / np.maximum(patch, shape).sum()
    best = max(overlaps, key=lambda kind: overlaps[kind])
    return best if overlaps[best] >= LEAST_OVERLAP and 2 / 3 <= width / height <= 3 / 2 else ""


def things_in(image: Image.Image) -> Counter[Thing]:
    """The connected patches of one colour in an image."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    palette = np.array([GROUND, *COLOURS.values()], dtype=np.float32)
    distances = np.linalg.norm(pixels[:, :, None] - palette, axis=-1)
    nearest = np.where(distances.min(-1) <= NEAR, distances.argmin(-1), -1)
    found = Counter[Thing]()
    for number, colour in enumerate(COLOURS, start=1):
        count, labels, statistics, _ = cv2.connectedComponentsWithStats((nearest == number).astype(np.uint8))
        for label in range(1, count):
            left, top, width, height, area = (int(value) for value in statistics[label])
            if area >= LEAST_AREA * nearest.size:
                patch = labels[top : top + height, left : left + width] == label
                found[colour, kind_of(patch)] += 1
    return found


def things_asked(prompt: str) -> Counter[Thing]:
    """The shapes that a prompt asks for: `two red circles and a blue square` are three."""
    asked = Counter[Thing]()
    for number, colour, kind in ASKED.findall(prompt):
        asked[colour, kind] += NUMBERS[number]
    if not asked:
        raise ValueError(f'the prompt "{prompt}" names no shape: write for example "two red circles and a blue square"')
    return asked


def matches(images: list[Image.Image], prompts: list[str], metadata: list[Any]) -> dict[str, list[float]]:
    """The share of the shapes asked for that are there, of all asked for or of all there if those are more.

    In [0, 1]. The second column, `exact`, is 1 for an image with these shapes and nothing else, otherwise 0.
    """
    scores = []
    for image, prompt in zip(images, prompts, strict=True):
        found, asked = things_in(image), things_asked(prompt)
        scores.append((found & asked).total() / max(found.total(), asked.total()))
    return {"matches": scores, "exact": [float(score == 1) for score in scores]}


def chance(images: list[Image.Image], prompts: list[str], metadata: list[Any]) -> list[float]:
    """A hash of each image as a number in [0, 1): the uninformative reward of a control run."""
    return [int(sha256(image.tobytes()).hexdigest()[:8], 16) / 2**32 for image in images]

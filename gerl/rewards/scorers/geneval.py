"""GenEval: are the objects that the prompt names there, as many as it says, in these colours and places?

Source: GenEval (arXiv 2310.11513) for detection, colours, positions and the benchmark's own verdict; the graded and the
strict reward are those of Flow-GRPO (arXiv 2505.05470).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, get_args

import torch
from PIL import Image
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from gerl.config.blocks import Dtype
from gerl.errors import DataError
from gerl.protocol import Prompt
from gerl.rewards.scorers.base import Columns, Metadata, Scorer
from gerl.rewards.scorers.clip import CLIP_L14, Device, clip_tower
from gerl.rewards.scorers.detection import Box, Detection, detector, detector_labels, find_label

Colour = Literal["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"]
Relation = Literal["left of", "right of", "above", "below"]

COLOURS: tuple[str, ...] = get_args(Colour)
TEMPLATES = ("a photo of a {} {}", "a photo of a {}-colored {}", "a photo of a {} object")  # colour, class
BACKGROUND = (153, 153, 153)


@dataclass(frozen=True)
class Objects:
    """`count` objects of class `name`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Annotated[str, Field(alias="class", min_length=1)]
    count: Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Clause(Objects):
    """Objects of a colour, each of them in a relation to each object of an earlier clause."""

    color: Colour | None = None
    position: tuple[Relation, Annotated[int, Field(ge=0)]] | None = None


def _none_is_empty(value: object) -> object:
    return () if value is None else value


@dataclass(frozen=True)
class Row:
    """The demands of GenEval's metadata of a prompt: all of `include`, and fewer than each of `exclude`."""

    tag: str
    include: Annotated[tuple[Clause, ...], BeforeValidator(_none_is_empty)] = ()
    exclude: Annotated[tuple[Objects, ...], BeforeValidator(_none_is_empty)] = ()

    def __post_init__(self) -> None:
        if not self.include and not self.exclude:
            raise ValueError("it has neither include nor exclude clauses")
        for i, clause in enumerate(self.include):
            if clause.position is not None and clause.position[1] >= i:
                raise ValueError(f"include.{i}.position must name an earlier clause than {clause.position[1]}")
        for limit in self.exclude:
            if any(clause.name == limit.name and clause.count >= limit.count for clause in self.include):
                raise ValueError(f"it asks for {limit.name} and excludes the same number")

    @property
    def classes(self) -> set[str]:
        """Every class that is asked for or excluded."""
        return {clause.name for clause in self.include} | {limit.name for limit in self.exclude}


ROW = TypeAdapter(Row)


def parse_row(metadata: Metadata) -> Row:
    """Read GenEval's metadata; raises `DataError` naming the field that is missing or wrong."""
    try:
        return ROW.validate_python(metadata)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"the GenEval metadata of the row is invalid ({where + ': ' if where else ''}{first['msg']}): it needs "
            'a "tag" and "include" clauses such as {"class": "dog", "count": 1, "color": "red", "position": ["left '
            'of", 0]}, of which the last two are optional'
        ) from None


@dataclass(frozen=True)
class Verdict:
    """How an image meets its row.

    score: the mean over all that is asked for, at most 1. strict: all of it is exactly so. benchmark: GenEval's own
    verdict, for which objects beyond the best `count` do no harm unless they are excluded.
    """

    score: float
    strict: bool
    benchmark: bool


def relations(box: Box, other: Box, margin: float = 0.1) -> set[Relation]:
    """Where `box` lies relative to `other`: none, one or two relations.

    The offset of the centres counts from `margin` times the summed widths (or heights) on; an axis has a relation if
    what is left of it there is more than half of the length of the offset.
    """
    offset = [(box[i] + box[i + 2] - other[i] - other[i + 2]) / 2 for i in (0, 1)]
    sizes = [abs(box[i + 2] - box[i]) + abs(other[i + 2] - other[i]) for i in (0, 1)]
    x, y = (
        math.copysign(max(abs(distance) - margin * size, 0.0), distance)
        for distance, size in zip(offset, sizes, strict=True)
    )
    if max(abs(x), abs(y)) < 1e-3:
        return set()
    half = math.hypot(*offset) / 2
    true: dict[Relation, bool] = {"left of": x < -half, "right of": x > half, "above": y < -half, "below": y > half}
    return {relation for relation, holds in true.items() if holds}


def judge(row: Row, found: dict[str, list[Detection]], colours: list[list[str]], margin: float = 0.1) -> Verdict:
    """Compare what was found with what is asked for.

    found: the detections of each class of the row, best first. colours: for each include clause with a colour the
    colours of the first `count` detections of its class, if there are as many.
    """
    everything = [found[clause.name] for clause in row.include]
    best = [found[clause.name][: clause.count] for clause in row.include]
    exact, enough = (_parts(row, objects, colours, margin) for objects in (everything, best))
    below = [len(found[limit.name]) < limit.count for limit in row.exclude]
    # An exact count implies the limit of its own class, which must not count twice.
    counted = {clause.name for clause in row.include}
    parts = exact + [float(ok) for limit, ok in zip(row.exclude, below, strict=True) if limit.name not in counted]
    allowed = all(below)
    return Verdict(
        score=math.fsum(parts) / len(parts),
        strict=allowed and all(part == 1 for part in exact),
        benchmark=allowed and all(part == 1 for part in enough),
    )


def _parts(row: Row, found: list[list[Detection]], colours: list[list[str]], margin: float) -> list[float]:
    """For each clause its count, colour and position, 1 where it is right; a wrong count makes the other two 0."""
    parts: list[float] = []
    matched: list[list[Detection] | None] = []
    for clause, objects, names in zip(row.include, found, colours, strict=True):
        scores = [1 - abs(len(objects) - clause.count) / clause.count]
        if clause.color is not None:
            scores.append(names.count(clause.color) / clause.count if scores[0] == 1 else 0.0)
        if clause.position is not None:
            relation, target = clause.position
            others = matched[target]
            scores.append(
                float(
                    all(score == 1 for score in scores)
                    and others is not None
                    and all(relation in relations(a.box, b.box, margin) for a in objects for b in others)
                )
            )
        matched.append(objects if all(score == 1 for score in scores) else None)
        parts += scores
    return parts


def object_crop(image: Image.Image, detection: Detection) -> Image.Image:
    """The box of a detection cut out of an RGB image; grey where its mask, if it has one, is not."""
    if detection.mask is not None:
        grey = Image.new("RGB", image.size, BACKGROUND)
        image = Image.composite(image, grey, Image.fromarray(detection.mask.astype("uint8") * 255))
    left, top = (min(math.floor(edge), side - 1) for edge, side in zip(detection.box[:2], image.size, strict=True))
    right, bottom = (math.ceil(edge) for edge in detection.box[2:])
    return image.crop((left, top, max(right, left + 1), max(bottom, top + 1)))


@dataclass(frozen=True)
class GenEvalScorer(Scorer):
    """Columns `geneval` (graded, at most 1, below 0 for many objects too many), `geneval_strict` and
    `geneval_benchmark` (both 0 or 1); see `Verdict`.

    The row's metadata are those of GenEval's own files. `model` finds the objects: a Hub id or a folder of a
    Mask2Former or MaskFormer instance segmenter, or of an object detector of transformers. A detection counts above a
    score of `threshold`, in rows tagged `counting` of `counting_threshold`; of a class the best `max_objects` do,
    overlapping or not. `colour_model` is a CLIP that names the colour of an object, on grey if there are masks. Both
    models run in `dtype`; a detection is compared with a threshold, so the default is fp32 on every device.
    """

    model: str = "facebook/mask2former-swin-small-coco-instance"
    colour_model: str = CLIP_L14
    batch_size: Annotated[int, Field(ge=1)] = 16
    device: Device = "auto"
    dtype: Dtype = "float32"
    threshold: Annotated[float, Field(ge=0, lt=1)] = 0.3
    counting_threshold: Annotated[float, Field(ge=0, lt=1)] = 0.9
    max_objects: Annotated[int, Field(ge=1)] = 16
    position_margin: Annotated[float, Field(ge=0)] = 0.1

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> Columns:
        rows = [parse_row(row) for row in metadata]
        images = [image.convert("RGB") for image in images]
        found = self._find(images, rows)
        colours = self._colours(images, rows, found)
        verdicts = [judge(*case, self.position_margin) for case in zip(rows, found, colours, strict=True)]
        return {
            "geneval": [verdict.score for verdict in verdicts],
            "geneval_strict": [float(verdict.strict) for verdict in verdicts],
            "geneval_benchmark": [float(verdict.benchmark) for verdict in verdicts],
        }

    def check_prompts(self, prompts: list[Prompt]) -> None:
        detector_labels(self.model)  # a model that cannot be read is found out even where it gets no prompts
        super().check_prompts(prompts)

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        row = parse_row(metadata)
        for name in row.classes:
            find_label(name, detector_labels(self.model))
        most = max((clause.count for clause in row.include), default=0)
        if most > self.max_objects:
            raise DataError(f"it asks for {most} objects of a class: raise max_objects={self.max_objects}")

    def _find(self, images: list[Image.Image], rows: list[Row]) -> list[dict[str, list[Detection]]]:
        """For each image the detections that count of each class of its row, best first."""
        labels = detector_labels(self.model)
        wanted = [{name: find_label(name, labels) for name in row.classes} for row in rows]
        thresholds = [self.counting_threshold if row.tag == "counting" else self.threshold for row in rows]
        lowest = min(thresholds, default=self.threshold)
        detections = detector(self.model, self.device, self.dtype)(images, lowest, self.batch_size)
        return [
            {
                name: [d for d in found if d.label == label and d.score > threshold][: self.max_objects]
                for name, label in names.items()
            }
            for names, threshold, found in zip(wanted, thresholds, detections, strict=True)
        ]

    def _colours(
        self, images: list[Image.Image], rows: list[Row], found: list[dict[str, list[Detection]]]
    ) -> list[list[list[str]]]:
        """For each image and include clause the colours that `judge` needs."""
        colours: list[list[list[str]]] = [[[] for _ in row.include] for row in rows]
        places = [
            (i, c, detection)
            for i, row in enumerate(rows)
            for c, clause in enumerate(row.include)
            if clause.color is not None and len(found[i][clause.name]) >= clause.count
            for detection in found[i][clause.name][: clause.count]
        ]
        if places:
            tower = clip_tower(self.colour_model, device=self.device, dtype=self.dtype)
            crops = [object_crop(images[i], detection) for i, _, detection in places]
            for (i, c, _), feature in zip(places, tower.image_features(crops, self.batch_size), strict=True):
                cosines = self._colour_features(rows[i].include[c].name) @ feature
                colours[i][c].append(COLOURS[int(cosines.argmax())])
        return colours

    def _colour_features(self, name: str) -> torch.Tensor:
        """CLIP's text features [10, dim], each of length 1, of a class in each of the colours."""
        if name not in self._known:
            tower = clip_tower(self.colour_model, device=self.device, dtype=self.dtype)
            texts = [template.format(colour, name) for colour in COLOURS for template in TEMPLATES]
            features = tower.text_features(texts, self.batch_size).unflatten(0, (len(COLOURS), len(TEMPLATES)))
            self._known[name] = torch.nn.functional.normalize(features.mean(1), dim=-1)
        return self._known[name]

    @cached_property
    def _known(self) -> dict[str, torch.Tensor]:
        return {}

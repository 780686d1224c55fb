"""GenEval: whether the image has the objects, counts, colours and positions that the prompt names.

Source: GenEval (arXiv 2310.11513) for detection, colours, positions and the benchmark verdict; the graded and strict
rewards are from Flow-GRPO (arXiv 2505.05470).
"""

import difflib
import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import numpy as np
import torch
from PIL import Image
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from gerl.config.blocks import Dtype
from gerl.errors import DataError, RewardError
from gerl.protocol import Prompt
from gerl.rewards.scorers.base import Columns, Metadata, require
from reward_models.scorers.clip import CLIP_L14, ClipTower, clip_tower
from reward_models.scorers.networks import (
    NetworkScorer,
    expanded,
    image_processor,
    loading,
    pretrained,
    resolve_device,
    resolve_dtype,
)

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedModel
    from transformers.utils import ModelOutput

# --- Object detection by an instance segmenter or an object detector of transformers

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels; right and bottom are exclusive

SEGMENTERS = ("mask2former", "maskformer")
KINDS = "a Mask2Former or MaskFormer instance segmenter or an object detector of transformers"

# synonymous COCO class names, without spaces: mmdetection's label file, which most checkpoints use -> GenEval
SYNONYMS = {
    "aeroplane": "airplane",
    "motorbike": "motorcycle",
    "sofa": "couch",
    "tvmonitor": "tv",
    "mouse": "computermouse",
    "remote": "tvremote",
    "keyboard": "computerkeyboard",
}


@dataclass(frozen=True, eq=False)
class Detection:
    """Detected object: class, score in [0, 1], box and mask."""

    label: str
    score: float
    box: Box
    mask: np.ndarray | None = None  # [H, W] bool, of the whole image


@dataclass(frozen=True, eq=False)
class Detector:
    """Batched object detector without gradients; use `detector` to load one."""

    model: "PreTrainedModel"
    image_processor: "BaseImageProcessor"
    segments: bool  # outputs masks, not only boxes
    dtype: torch.dtype

    def __call__(self, images: list[Image.Image], threshold: float, batch_size: int) -> list[list[Detection]]:
        """Return for each image the detections with a score above `threshold`, best first."""
        detections: dict[int, list[Detection]] = {}
        # a batch is padded to its largest image: batching only images of one size keeps scores independent of each
        # other
        for size in dict.fromkeys(image.size for image in images):
            same = [i for i, image in enumerate(images) if image.size == size]
            for start in range(0, len(same), batch_size):
                batch = same[start : start + batch_size]
                detections.update(zip(batch, self._batch([images[i] for i in batch], threshold), strict=True))
        return [detections[i] for i in range(len(images))]

    @torch.inference_mode()
    def _batch(self, images: list[Image.Image], threshold: float) -> list[list[Detection]]:
        inputs = self.image_processor(images=[image.convert("RGB") for image in images], return_tensors="pt")
        outputs = self.model(**inputs.to(self.model.device, self.dtype))
        sizes = [(image.height, image.width) for image in images]
        detections = (
            self._segments(outputs, threshold, sizes) if self.segments else self._boxes(outputs, threshold, sizes)
        )
        return [
            sorted((d for d in image if d.score > threshold), key=lambda d: d.score, reverse=True)
            for image in detections
        ]

    def _segments(
        self, outputs: "ModelOutput", threshold: float, sizes: list[tuple[int, int]]
    ) -> list[list[Detection]]:
        outputs.class_queries_logits = outputs.class_queries_logits.float()
        outputs.masks_queries_logits = outputs.masks_queries_logits.float()
        with self.model.device:  # the processor creates tensors, which must be on the device of the masks
            results = self.image_processor.post_process_instance_segmentation(
                outputs, threshold=threshold, target_sizes=sizes, return_binary_maps=True
            )
        detections: list[list[Detection]] = []
        for result in results:
            infos = result["segments_info"]
            # without segments this is not a stack of masks, but an image of -1
            masks = result["segmentation"].bool().cpu().numpy() if infos else ()
            detections.append(
                [
                    Detection(self._label(info["label_id"]), float(info["score"]), mask_box(mask), mask)
                    for info, mask in zip(infos, masks, strict=True)
                ]
            )
        return detections

    def _boxes(self, outputs: "ModelOutput", threshold: float, sizes: list[tuple[int, int]]) -> list[list[Detection]]:
        outputs.logits, outputs.pred_boxes = outputs.logits.float(), outputs.pred_boxes.float()
        results = self.image_processor.post_process_object_detection(outputs, threshold=threshold, target_sizes=sizes)
        return [
            [
                Detection(self._label(label), score, _inside(box, size))
                for label, score, box in zip(*(result[k].tolist() for k in ("labels", "scores", "boxes")), strict=True)
            ]
            for result, size in zip(results, sizes, strict=True)
        ]

    def _label(self, index: int) -> str:
        return str(self.model.config.id2label[index])


def mask_box(mask: np.ndarray) -> Box:
    """Return the bounding box of a non-empty mask `[H, W]`."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def _inside(box: list[float], size: tuple[int, int]) -> Box:
    """Clip a predicted box to the image."""
    height, width = size
    left, top, right, bottom = box
    return max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height))


def detector(model: str, device: str = "auto", dtype: str = "float32") -> Detector:
    """Load the detector `model`, a Hub id or a local folder; each is loaded once per process.

    Raises:
        RewardError: it cannot be loaded, is of another kind or incomplete, or the device is missing.
    """
    place = resolve_device(device)
    return _detector(model, str(place), resolve_dtype(dtype, place))


@cache
def _detector(model: str, device: str, dtype: torch.dtype) -> Detector:
    import transformers

    segments = _config(model).model_type in SEGMENTERS
    kind = transformers.AutoModelForUniversalSegmentation if segments else transformers.AutoModelForObjectDetection
    network = pretrained(kind, model, KINDS)
    with loading("model", model, KINDS):
        processor = image_processor(model)
    return Detector(network.to(device, dtype), processor, segments, dtype)


@cache
def _config(model: str) -> "PretrainedConfig":
    """Load the configuration of the detector, without its weights."""
    import transformers

    with loading("model", model, KINDS):
        config = transformers.AutoConfig.from_pretrained(expanded(model))
    if config.model_type in SEGMENTERS:
        require("scipy", "geneval")  # transformers always builds the training loss, which needs it
    elif not any(name.endswith("ForObjectDetection") for name in config.architectures or ()):
        raise RewardError(f"model={model} is a {config.model_type} model, which does not detect objects: give {KINDS}")
    return config


def detector_labels(model: str) -> list[str]:
    """Return the class names of the detector `model`; raises like `detector`, but reads no weights."""
    return [str(label) for label in _config(model).id2label.values()]


def find_label(name: str, labels: list[str]) -> str:
    """Return the label of the class `name`, matched without case and spaces and by `SYNONYMS`.

    Raises:
        DataError: no label matches; names the nearest.
    """
    for key in (_plain, _canonical):
        by_key = {key(label): label for label in labels}
        if key(name) in by_key:
            return by_key[key(name)]
    names = {label.lower(): label for label in labels}
    near = [names[match] for match in difflib.get_close_matches(name.lower(), names, n=3)]
    advice = f"did you mean {' or '.join(near)}?" if near else f"it knows {', '.join(labels[:5])} and others"
    raise DataError(f"the detector has no class {name!r} among its {len(labels)}: {advice}")


def _plain(name: str) -> str:
    return "".join(name.lower().split())


def _canonical(name: str) -> str:
    return SYNONYMS.get(_plain(name), _plain(name))


# --- Requirements of a prompt, and the verdict on the detections

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
    """Objects with an optional colour, each in a relation to each object of an earlier clause if `position` is set."""

    color: Colour | None = None
    position: tuple[Relation, Annotated[int, Field(ge=0)]] | None = None


def _none_is_empty(value: object) -> object:
    return () if value is None else value


@dataclass(frozen=True)
class Row:
    """GenEval's metadata of a prompt: requires all of `include`, and fewer than each of `exclude`."""

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
                raise ValueError(f"it requires and excludes the same number of {limit.name}")

    @property
    def classes(self) -> set[str]:
        """All required or excluded classes."""
        return {clause.name for clause in self.include} | {limit.name for limit in self.exclude}


ROW = TypeAdapter(Row)


def parse_row(metadata: Metadata) -> Row:
    """Parse GenEval's metadata; raises `DataError` naming the field that is missing or wrong."""
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
    """How well an image meets its row.

    score: mean over all requirements, at most 1. strict: all are met exactly. benchmark: GenEval's verdict, which
    ignores objects beyond the best `count` unless they are excluded.
    """

    score: float
    strict: bool
    benchmark: bool


def relations(box: Box, other: Box, margin: float = 0.1) -> set[Relation]:
    """Return the position of `box` relative to `other`: none, one or two relations.

    The offset of the centers is first reduced by `margin` times the summed widths (or heights); an axis has a relation
    if the remainder exceeds half of the length of the offset.
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


def judge(row: Row, detections: dict[str, list[Detection]], colours: list[list[str]], margin: float = 0.1) -> Verdict:
    """Compare the detections with the requirements.

    detections: of each class of the row, best first. colours: for each include clause with a colour, the colours
    of the first `count` detections of its class, if there are at least `count`.
    """
    everything = [detections[clause.name] for clause in row.include]
    best = [detections[clause.name][: clause.count] for clause in row.include]
    exact, enough = (_parts(row, objects, colours, margin) for objects in (everything, best))
    below = [len(detections[limit.name]) < limit.count for limit in row.exclude]
    # an exact count implies the limit of its class, which must not count twice
    counted = {clause.name for clause in row.include}
    parts = exact + [float(ok) for limit, ok in zip(row.exclude, below, strict=True) if limit.name not in counted]
    allowed = all(below)
    return Verdict(
        score=math.fsum(parts) / len(parts),
        strict=allowed and all(part == 1 for part in exact),
        benchmark=allowed and all(part == 1 for part in enough),
    )


def _parts(row: Row, detections: list[list[Detection]], colours: list[list[str]], margin: float) -> list[float]:
    """Return the scores of each clause's count, colour and position, at most 1; a wrong count zeroes the others."""
    parts: list[float] = []
    matched: list[list[Detection] | None] = []
    for clause, objects, names in zip(row.include, detections, colours, strict=True):
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
    """Crop an RGB image to the box of a detection; pixels outside its mask, if it has one, become grey."""
    if detection.mask is not None:
        grey = Image.new("RGB", image.size, BACKGROUND)
        image = Image.composite(image, grey, Image.fromarray(detection.mask.astype("uint8") * 255))
    left, top = (min(math.floor(edge), side - 1) for edge, side in zip(detection.box[:2], image.size, strict=True))
    right, bottom = (math.ceil(edge) for edge in detection.box[2:])
    return image.crop((left, top, max(right, left + 1), max(bottom, top + 1)))


@dataclass(frozen=True, kw_only=True)
class GenEvalScorer(NetworkScorer):
    """Columns `geneval` (graded), `geneval_strict` and `geneval_benchmark` (both 0 or 1); see `Verdict`.

    `geneval` is at most 1, and below 0 for many surplus objects. The row has the metadata of GenEval's files. `model`
    is the Hub id or folder of a Mask2Former or MaskFormer instance segmenter, or of an object detector of transformers.
    Detections count above a score of `threshold`, in rows tagged `counting` above `counting_threshold`, and at most the
    best `max_objects` per class, overlapping or not. `colour_model` is a CLIP that classifies the colour of an object,
    on grey if there are masks. Both models run in `dtype`, by default fp32 on every device because scores are compared
    with a threshold.
    """

    model: str = "facebook/mask2former-swin-small-coco-instance"
    colour_model: str = CLIP_L14
    batch_size: Annotated[int, Field(ge=1)] = 16
    dtype: Dtype = "float32"
    threshold: Annotated[float, Field(ge=0, lt=1)] = 0.3
    counting_threshold: Annotated[float, Field(ge=0, lt=1)] = 0.9
    max_objects: Annotated[int, Field(ge=1)] = 16
    position_margin: Annotated[float, Field(ge=0)] = 0.1

    def __call__(self, images: list[Image.Image], prompts: list[str], metadata: list[Metadata]) -> Columns:
        rows = [parse_row(row) for row in metadata]
        images = [image.convert("RGB") for image in images]
        detections = self._find(images, rows)
        colours = self._colours(images, rows, detections)
        verdicts = [judge(*case, self.position_margin) for case in zip(rows, detections, colours, strict=True)]
        return {
            "geneval": [verdict.score for verdict in verdicts],
            "geneval_strict": [float(verdict.strict) for verdict in verdicts],
            "geneval_benchmark": [float(verdict.benchmark) for verdict in verdicts],
        }

    def check_prompts(self, prompts: list[Prompt]) -> None:
        detector_labels(self.model)  # an unreadable model is reported even if there are no prompts
        super().check_prompts(prompts)

    def check_prompt(self, prompt: str, metadata: Metadata) -> None:
        row = parse_row(metadata)
        for name in row.classes:
            find_label(name, detector_labels(self.model))
        most = max((clause.count for clause in row.include), default=0)
        if most > self.max_objects:
            raise DataError(f"it requires {most} objects of a class: raise max_objects={self.max_objects}")

    def _find(self, images: list[Image.Image], rows: list[Row]) -> list[dict[str, list[Detection]]]:
        """Return for each image the accepted detections of each class of its row, best first."""
        labels = detector_labels(self.model)
        wanted = [{name: find_label(name, labels) for name in row.classes} for row in rows]
        thresholds = [self.counting_threshold if row.tag == "counting" else self.threshold for row in rows]
        lowest = min(thresholds, default=self.threshold)
        detections = detector(self.model, self.device, self.dtype)(images, lowest, self.batch_size)
        return [
            {
                name: [d for d in of_image if d.label == label and d.score > threshold][: self.max_objects]
                for name, label in names.items()
            }
            for names, threshold, of_image in zip(wanted, thresholds, detections, strict=True)
        ]

    def _colours(
        self, images: list[Image.Image], rows: list[Row], detections: list[dict[str, list[Detection]]]
    ) -> list[list[list[str]]]:
        """Return for each image and include clause the colours that `judge` needs."""
        colours: list[list[list[str]]] = [[[] for _ in row.include] for row in rows]
        places = [
            (i, c, detection)
            for i, row in enumerate(rows)
            for c, clause in enumerate(row.include)
            if clause.color is not None and len(detections[i][clause.name]) >= clause.count
            for detection in detections[i][clause.name][: clause.count]
        ]
        if places:
            crops = [object_crop(images[i], detection) for i, _, detection in places]
            for (i, c, _), feature in zip(places, self._clip.image_features(crops, self.batch_size), strict=True):
                cosines = self._colour_features(rows[i].include[c].name) @ feature
                colours[i][c].append(COLOURS[int(cosines.argmax())])
        return colours

    @property
    def _clip(self) -> ClipTower:
        return clip_tower(self.colour_model, device=self.device, dtype=self.dtype)

    def _colour_features(self, name: str) -> torch.Tensor:
        """Return CLIP's unit-norm text features `[10, dim]` of a class in each of the colours."""
        if name not in self._known:
            texts = [template.format(colour, name) for colour in COLOURS for template in TEMPLATES]
            features = self._clip.text_features(texts, self.batch_size).unflatten(0, (len(COLOURS), len(TEMPLATES)))
            self._known[name] = torch.nn.functional.normalize(features.mean(1), dim=-1)
        return self._known[name]

    @cached_property
    def _known(self) -> dict[str, torch.Tensor]:
        return {}

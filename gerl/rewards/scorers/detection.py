"""Objects on an image, found by an instance segmenter or an object detector of transformers."""

import difflib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from gerl.errors import DataError, RewardError
from gerl.rewards.scorers.base import require
from gerl.rewards.scorers.clip import expanded, loading, resolve_device, resolve_dtype

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedModel
    from transformers.utils import ModelOutput

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels; right and bottom are outside

SEGMENTERS = ("mask2former", "maskformer")
KINDS = "a Mask2Former or MaskFormer instance segmenter or an object detector of transformers"

# Names of the same class of COCO, without spaces: those of mmdetection's label file, which most checkpoints carry, and
# GenEval's.
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
    """An object that was found: its class, a score in [0, 1], and where it is."""

    label: str
    score: float
    box: Box
    mask: np.ndarray | None = None  # [H, W] bool, of the whole image


@dataclass(frozen=True, eq=False)
class Detector:
    """Finds objects, in batches and without gradients; `detector` gives one."""

    model: "PreTrainedModel"
    image_processor: "BaseImageProcessor"
    segments: bool  # gives masks, not only boxes
    dtype: torch.dtype

    def __call__(self, images: list[Image.Image], threshold: float, batch_size: int) -> list[list[Detection]]:
        """For each image what was found with a score above `threshold`, best first."""
        by_size: dict[tuple[int, int], list[int]] = {}
        for i, image in enumerate(images):
            by_size.setdefault(image.size, []).append(i)
        found: dict[int, list[Detection]] = {}
        # A batch is padded to its largest image, so only images of one size may share it: no score depends on others.
        for same in by_size.values():
            for start in range(0, len(same), batch_size):
                batch = same[start : start + batch_size]
                found.update(zip(batch, self._batch([images[i] for i in batch], threshold), strict=True))
        return [found[i] for i in range(len(images))]

    @torch.inference_mode()
    def _batch(self, images: list[Image.Image], threshold: float) -> list[list[Detection]]:
        inputs = self.image_processor(images=[image.convert("RGB") for image in images], return_tensors="pt")
        outputs = self.model(**inputs.to(self.model.device, self.dtype))
        sizes = [(image.height, image.width) for image in images]
        found = self._segments(outputs, threshold, sizes) if self.segments else self._boxes(outputs, threshold, sizes)
        return [
            sorted((d for d in image if d.score > threshold), key=lambda d: d.score, reverse=True) for image in found
        ]

    def _segments(
        self, outputs: "ModelOutput", threshold: float, sizes: list[tuple[int, int]]
    ) -> list[list[Detection]]:
        outputs.class_queries_logits = outputs.class_queries_logits.float()
        outputs.masks_queries_logits = outputs.masks_queries_logits.float()
        with self.model.device:  # the processor makes tensors of its own, which have to be where the masks are
            results = self.image_processor.post_process_instance_segmentation(
                outputs, threshold=threshold, target_sizes=sizes, return_binary_maps=True
            )
        found: list[list[Detection]] = []
        for result in results:
            infos = result["segments_info"]
            # Without segments this is not a stack of masks, but an image of -1.
            masks = result["segmentation"].bool().cpu().numpy() if infos else ()
            found.append(
                [
                    Detection(self._label(info["label_id"]), float(info["score"]), mask_box(mask), mask)
                    for info, mask in zip(infos, masks, strict=True)
                ]
            )
        return found

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
    """The smallest box around the pixels of a mask [H, W] that has at least one."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def _inside(box: list[float], size: tuple[int, int]) -> Box:
    """The part of a predicted box that is on the image."""
    height, width = size
    left, top, right, bottom = box
    return max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height))


def detector(model: str, device: str = "auto", dtype: str = "float32") -> Detector:
    """The detector with the weights of `model`, a Hub id or a local folder; it is loaded once a process.

    Raises:
        RewardError: it cannot be loaded, is of another kind or incomplete, or there is no such device.
    """
    place = resolve_device(device)
    return _detector(model, str(place), resolve_dtype(dtype, place))


@cache
def _detector(model: str, device: str, dtype: torch.dtype) -> Detector:
    import transformers

    segments = _config(model).model_type in SEGMENTERS
    kind = transformers.AutoModelForUniversalSegmentation if segments else transformers.AutoModelForObjectDetection
    with loading("model", model, KINDS):
        network, info = kind.from_pretrained(expanded(model), dtype=torch.float32, output_loading_info=True)
        # torchvision resizes to slightly other pixels than PIL: where it happens to be installed must not matter.
        processor = transformers.AutoImageProcessor.from_pretrained(expanded(model), backend="pil")
    missing = sorted(set(info["missing_keys"]) & dict(network.named_parameters()).keys())
    if missing:  # transformers fills them with random numbers, and so would the detections be
        raise RewardError(
            f"model={model} has no weights for {missing[0]} and {len(missing) - 1} more tensors: give the Hub id "
            f"or the folder of {KINDS} with trained weights"
        )
    return Detector(network.to(device, dtype).eval(), processor, segments, dtype)


@cache
def _config(model: str) -> "PretrainedConfig":
    """The configuration of the detector; its weights are not read."""
    import transformers

    with loading("model", model, KINDS):
        config = transformers.AutoConfig.from_pretrained(expanded(model))
    if config.model_type in SEGMENTERS:
        require("scipy", "geneval")  # transformers builds the training loss with it, whether or not it is used
    elif not any(name.endswith("ForObjectDetection") for name in config.architectures or ()):
        raise RewardError(f"model={model} is a {config.model_type} model, which does not detect objects: give {KINDS}")
    return config


def detector_labels(model: str) -> list[str]:
    """The classes that the detector `model` knows; raises as `detector` does, but reads no weights."""
    return [str(label) for label in _config(model).id2label.values()]


def find_label(name: str, labels: list[str]) -> str:
    """The label of the class `name`: names match without case and spaces, and by `SYNONYMS`.

    Raises:
        DataError: no label matches; names the nearest.
    """
    for key in (_plain, _canonical):
        found = {key(label): label for label in labels}
        if key(name) in found:
            return found[key(name)]
    names = {label.lower(): label for label in labels}
    near = [names[match] for match in difflib.get_close_matches(name.lower(), names, n=3)]
    advice = f"did you mean {' or '.join(near)}?" if near else f"it knows {', '.join(labels[:5])} and others"
    raise DataError(f"the detector has no class {name!r} among its {len(labels)}: {advice}")


def _plain(name: str) -> str:
    return "".join(name.lower().split())


def _canonical(name: str) -> str:
    return SYNONYMS.get(_plain(name), _plain(name))

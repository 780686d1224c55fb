import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from newer import transformers
from PIL import Image
from tiny_clip import pictures
from tiny_detectors import LABELS

from gerl.errors import DataError, RewardError
from reward_models.scorers.geneval import Detection, detector, detector_labels, find_label, mask_box

THRESHOLD = 0.15


def summary(detections: list[Detection]) -> list[tuple[str, float, Any]]:
    return [(d.label, d.score, d.box) for d in detections]


def assert_same(found: list[Detection], expected: list[Detection]) -> None:
    assert [d.label for d in found] == [d.label for d in expected]
    np.testing.assert_allclose([d.score for d in found], [d.score for d in expected], atol=1e-5)
    np.testing.assert_allclose(
        np.reshape([d.box for d in found], (-1, 4)), np.reshape([d.box for d in expected], (-1, 4)), atol=1e-3
    )
    for a, b in zip(found, expected, strict=True):
        assert (a.mask is None) == (b.mask is None)
        assert a.mask is None or b.mask is None or (a.mask != b.mask).mean() < 0.01


@torch.no_grad()
def detr_by_hand(folder: str, image: Image.Image) -> list[Detection]:
    model = transformers.DetrForObjectDetection.from_pretrained(folder).eval()
    inputs = transformers.DetrImageProcessorPil.from_pretrained(folder)(images=image, return_tensors="pt")
    output = model(pixel_values=inputs["pixel_values"])
    found = []
    for logits, (x, y, w, h) in zip(output.logits[0], output.pred_boxes[0].tolist(), strict=True):
        probabilities = logits.softmax(0).tolist()[:-1]  # the last class is "no object"
        label = int(np.argmax(probabilities))
        if probabilities[label] > THRESHOLD:
            corners = np.array([x - w / 2, y - h / 2, x + w / 2, y + h / 2]) * [*image.size, *image.size]
            box = np.clip(corners, 0, [*image.size, *image.size]).tolist()
            found.append(Detection(LABELS[label], probabilities[label], tuple(box)))
    return sorted(found, key=lambda d: -d.score)


@torch.no_grad()
def mask2former_by_hand(folder: str, image: Image.Image) -> list[Detection]:
    model = transformers.Mask2FormerForUniversalSegmentation.from_pretrained(folder).eval()
    inputs = transformers.Mask2FormerImageProcessorPil.from_pretrained(folder)(images=image, return_tensors="pt")
    output = model(pixel_values=inputs["pixel_values"])
    logits = torch.nn.functional.interpolate(output.masks_queries_logits, size=(384, 384), mode="bilinear")[0]
    classes = output.class_queries_logits[0].softmax(-1)[:, :-1]
    best = sorted(((classes[q, c].item(), q, c) for q in range(12) for c in range(3)), reverse=True)[:12]
    found = []
    for probability, query, label in best:
        inside = logits[query] > 0
        score = probability * logits[query].sigmoid()[inside].mean().item() if inside.any() else 0.0
        if score > THRESHOLD:
            rows, columns = (np.arange(side) * 384 // side for side in (image.height, image.width))
            mask = inside.numpy()[np.ix_(rows, columns)]
            ys, xs = np.nonzero(mask)
            box = (float(xs.min()), float(ys.min()), float(xs.max() + 1), float(ys.max() + 1))
            found.append(Detection(LABELS[label], score, box, mask))
    return sorted(found, key=lambda d: -d.score)


def test_boxes_are_those_of_transformers_best_first(detr: str) -> None:
    images = pictures(4)
    found = detector(detr, "cpu")(images, THRESHOLD, 2)
    for image, detections in zip(images, found, strict=True):
        assert_same(detections, detr_by_hand(detr, image))
    assert sum(map(len, found)) > 20


def test_masks_are_those_of_transformers_best_first(mask2former: str) -> None:
    images = pictures(4)
    for image, detections in zip(images, detector(mask2former, "cpu")(images, THRESHOLD, 2), strict=True):
        assert len(detections) > 3
        assert_same(detections, mask2former_by_hand(mask2former, image))
        assert all(d.mask is not None and d.mask.shape == (image.height, image.width) for d in detections)


@pytest.mark.parametrize("folder", ["detr", "mask2former"])
def test_detections_depend_on_no_other_image(folder: str, request: pytest.FixtureRequest) -> None:
    find, images = detector(request.getfixturevalue(folder), "cpu"), pictures(4)
    alone = [find([image], THRESHOLD, 8)[0] for image in images]
    for together, expected in (
        (find(images, THRESHOLD, 8), alone),  # two sizes: as one batch the smaller ones would be padded
        (find(images[::-1], THRESHOLD, 3), alone[::-1]),
    ):
        for detections, one in zip(together, expected, strict=True):
            assert_same(detections, one)


def test_threshold_selects_and_nothing_found_is_an_empty_list(detr: str) -> None:
    find, image = detector(detr, "cpu"), pictures(1)
    everything = find(image, 0.0, 1)[0]
    middle = everything[4].score
    assert len(everything) == 12
    assert summary(find(image, middle, 1)[0]) == summary(everything[:4])  # above, not at, the threshold
    assert find(image, 0.999, 1) == [[]]
    assert find([], 0.5, 1) == []


def test_no_mask_above_the_threshold_is_an_empty_list(mask2former: str) -> None:
    assert detector(mask2former, "cpu")(pictures(2), 0.9999, 2) == [[], []]


def test_half_precision_runs_and_finds_about_the_same(mask2former: str) -> None:
    image = pictures(1)
    half, full = (detector(mask2former, "cpu", dtype)(image, 0.5, 1)[0] for dtype in ("bfloat16", "float32"))
    assert half[0].label == full[0].label and half[0].score == pytest.approx(full[0].score, abs=0.1)
    assert [d.score for d in half] != [d.score for d in full[: len(half)]]


def test_grey_images_are_taken_as_rgb(detr: str) -> None:
    grey = pictures(1)[0].convert("L")
    find = detector(detr, "cpu")
    assert summary(find([grey], 0.0, 1)[0]) == summary(find([grey.convert("RGB")], 0.0, 1)[0])


def test_a_detector_is_loaded_once_and_its_labels_need_no_weights(detr: str, tmp_path: Path) -> None:
    assert detector(detr, "cpu") is detector(detr, "cpu", "float32")
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(Path(detr) / name, tmp_path)
    assert detector_labels(str(tmp_path)) == ["dog", "cat", "sofa"]
    with pytest.raises(RewardError, match="cannot be loaded"):
        detector(str(tmp_path), "cpu")


def test_what_is_no_detector_is_refused(clip: str, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=re.escape(f"model={clip} is a clip model, which does not detect objects")):
        detector(clip, "cpu")
    with pytest.raises(RewardError, match=r"model=.*nowhere cannot be loaded .*: give the Hub id of a Mask2Former"):
        detector_labels(str(tmp_path / "nowhere"))


def test_a_checkpoint_without_a_head_is_refused(detr: str, tmp_path: Path) -> None:
    shutil.copytree(detr, tmp_path, dirs_exist_ok=True)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del weights["class_labels_classifier.weight"]
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RewardError, match=r"has no weights for class_labels_classifier.weight and 0 more"):
        detector(str(tmp_path), "cpu")


def test_a_segmenter_without_scipy_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    transformers.Mask2FormerConfig().save_pretrained(tmp_path)
    with pytest.raises(RewardError, match=r"scipy.*pip install 'gerl\[geneval\]'"):
        detector_labels(str(tmp_path))


def test_mask_box_ends_after_the_last_pixel() -> None:
    mask = np.zeros((6, 8), dtype=bool)
    mask[2, 3] = mask[4, 1] = True
    assert mask_box(mask) == (1, 2, 4, 5)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("dog", "dog"),
        ("Dining Table", "diningtable"),
        ("couch", "sofa"),
        ("airplane", "aeroplane"),
        ("motorcycle", "motorbike"),
        ("tv", "tvmonitor"),
        ("computer keyboard", "keyboard"),
        ("tv remote", "remote"),
        ("sofa", "sofa"),
        ("mouse", "mouse"),
        ("computer mouse", "Computer mouse"),  # not the mouse next to it
    ],
)
def test_names_of_the_same_class_are_found(name: str, label: str) -> None:
    coco = "dog diningtable sofa aeroplane motorbike tvmonitor keyboard remote mouse".split()
    assert find_label(name, [*coco, "Computer mouse"]) == label
    assert find_label("computer mouse", coco) == "mouse"


def test_unknown_class_names_the_nearest() -> None:
    with pytest.raises(DataError, match=r"no class 'Zebr' among its 3: did you mean Zebra\?"):
        find_label("Zebr", ["dog", "cat", "Zebra"])
    with pytest.raises(DataError, match="it knows dog, cat and others"):
        find_label("spaceship", ["dog", "cat"])

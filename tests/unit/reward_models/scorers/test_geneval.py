import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from drills import more
from PIL import Image
from tiny_clip import pictures, whole_model

from gerl.errors import DataError, RewardError
from gerl.protocol import Prompt
from reward_models.scorers.geneval import (
    COLOURS,
    Box,
    Detection,
    GenEvalScorer,
    Verdict,
    detector,
    judge,
    object_crop,
    parse_row,
    relations,
)

DOG, TWO_DOGS = {"class": "dog", "count": 1}, {"class": "dog", "count": 2}
RED_DOG = DOG | {"color": "red"}
CAT_LEFT = {"class": "cat", "count": 1, "position": ["left of", 0]}
LEFT, RIGHT = (0.0, 0.0, 10.0, 10.0), (50.0, 0.0, 60.0, 10.0)


def row(*include: dict[str, Any], exclude: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"tag": "any", "include": list(include), "exclude": list(exclude)}


def boxes(label: str, *places: Box) -> list[Detection]:
    return [Detection(label, 0.9 - 0.1 * i, place) for i, place in enumerate(places)]


@pytest.mark.parametrize(
    ("box", "other", "expected"),
    [
        (LEFT, RIGHT, {"left of"}),
        (RIGHT, LEFT, {"right of"}),
        ((0, 0, 10, 10), (0, 50, 10, 60), {"above"}),
        ((0, 50, 10, 60), (0, 0, 10, 10), {"below"}),
        ((0, 0, 10, 10), (50, 50, 60, 60), {"left of", "above"}),
        ((50, 0, 60, 10), (0, 50, 10, 60), {"right of", "above"}),
        ((0, 0, 10, 10), (0, 0, 10, 10), set()),
        # The margin is 0.1 * (10 + 10): an offset of 2 is inside it, one of 3 leaves 1 of 3, one of 5 leaves 3 of 5.
        ((0, 0, 10, 10), (2, 0, 12, 10), set()),
        ((0, 0, 10, 10), (3, 0, 13, 10), set()),
        ((0, 0, 10, 10), (5, 0, 15, 10), {"left of"}),
        # 30 to the left and 60 above, less margins of 2: 28 of 67 is less than half, 58 of 67 is more.
        ((0, 0, 10, 10), (30, 60, 40, 70), {"above"}),
        # Large boxes: an offset of 25 with a margin of 0.1 * (100 + 100) leaves 5 of 25.
        ((0, 0, 100, 10), (25, 0, 125, 10), set()),
    ],
)
def test_relations_of_boxes(box: Box, other: Box, expected: set[str]) -> None:
    assert relations(box, other) == expected


def test_relations_agree_with_vectors_and_turn_around() -> None:
    rng = np.random.default_rng(0)
    seen: set[str] = set()
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    for margin, _ in itertools.product((0.0, 0.1, 0.4), range(100)):
        corners = np.sort(rng.uniform(0, 100, (2, 2, 2)), axis=1)  # box, corner, axis
        delta = corners[0].mean(0) - corners[1].mean(0)
        rest = np.maximum(np.abs(delta) - margin * (corners[:, 1] - corners[:, 0]).sum(0), 0) * np.sign(delta)
        x, y = rest / np.linalg.norm(delta)
        expected = {
            name
            for name, holds in zip(opposite, (x < -0.5, x > 0.5, y < -0.5, y > 0.5), strict=True)
            if holds and np.abs(rest).max() >= 1e-3
        }
        a, b = (tuple(box.ravel().tolist()) for box in corners)
        assert relations(a, b, margin) == expected
        assert {opposite[name] for name in relations(b, a, margin)} == expected
        seen |= expected
    assert seen == set(opposite)


@pytest.mark.parametrize(
    ("asked", "found", "colours", "verdict"),
    [
        # counts: 1 - |found - wanted| / wanted
        (row(TWO_DOGS), {"dog": 2}, [[]], (1.0, True, True)),
        (row(TWO_DOGS), {"dog": 5}, [[]], (-0.5, False, True)),
        (row(TWO_DOGS), {"dog": 1}, [[]], (0.5, False, False)),
        (row(DOG), {"dog": 0}, [[]], (0.0, False, False)),
        (row(DOG, {"class": "cat", "count": 1}), {"dog": 1, "cat": 0}, [[], []], (0.5, False, False)),
        (row(DOG, {"class": "cat", "count": 1}), {"dog": 2, "cat": 1}, [[], []], (0.5, False, True)),
        # limits: of its own class only GenEval's verdict knows it, of another class it is a part of the mean
        (row(TWO_DOGS, exclude=({"class": "dog", "count": 3},)), {"dog": 3}, [[]], (0.5, False, False)),
        (row(TWO_DOGS, exclude=({"class": "dog", "count": 3},)), {"dog": 2}, [[]], (1.0, True, True)),
        (row(DOG, exclude=({"class": "cat", "count": 1},)), {"dog": 1, "cat": 0}, [[]], (1.0, True, True)),
        (row(DOG, exclude=({"class": "cat", "count": 1},)), {"dog": 1, "cat": 2}, [[]], (0.5, False, False)),
        (row(exclude=({"class": "cat", "count": 2},)), {"cat": 1}, [], (1.0, True, True)),
        (row(exclude=({"class": "cat", "count": 2},)), {"cat": 2}, [], (0.0, False, False)),
        # colours: those of the best objects; a wrong count is a wrong colour too
        (row(RED_DOG), {"dog": 1}, [["red"]], (1.0, True, True)),
        (row(RED_DOG), {"dog": 1}, [["blue"]], (0.5, False, False)),
        (row(RED_DOG), {"dog": 0}, [[]], (0.0, False, False)),
        (row(RED_DOG), {"dog": 2}, [["red"]], (0.0, False, True)),
        (row(TWO_DOGS | {"color": "red"}), {"dog": 2}, [["red", "blue"]], (0.75, False, False)),
        (row(TWO_DOGS | {"color": "red"}), {"dog": 1}, [[]], (0.25, False, False)),
    ],
)
def test_counts_limits_and_colours(
    asked: dict[str, Any], found: dict[str, int], colours: list[list[str]], verdict: tuple[float, bool, bool]
) -> None:
    detections = {name: boxes(name, *[LEFT] * count) for name, count in found.items()}
    assert judge(parse_row(asked), detections, colours) == Verdict(*verdict)


@pytest.mark.parametrize(
    ("asked", "dogs", "cats", "dog_colours", "verdict"),
    [
        (row(DOG, CAT_LEFT), [RIGHT], [LEFT], [], (1.0, True, True)),
        (row(DOG, CAT_LEFT), [LEFT], [RIGHT], [], (2 / 3, False, False)),
        (row(DOG, CAT_LEFT), [RIGHT], [], [], (1 / 3, False, False)),
        (row(DOG, CAT_LEFT), [], [LEFT], [], (1 / 3, False, False)),  # nothing for the cat to be left of
        (row(DOG, CAT_LEFT), [RIGHT], [LEFT, RIGHT], [], (1 / 3, False, True)),  # the best cat is where it should be
        (row(DOG, CAT_LEFT), [RIGHT], [RIGHT, LEFT], [], (1 / 3, False, False)),
        (row(TWO_DOGS, CAT_LEFT), [RIGHT, RIGHT], [LEFT], [], (1.0, True, True)),
        (row(TWO_DOGS, CAT_LEFT), [RIGHT, LEFT], [LEFT], [], (2 / 3, False, False)),  # left of each of the dogs
        (row(RED_DOG, CAT_LEFT), [RIGHT], [LEFT], ["red"], (1.0, True, True)),
        (row(RED_DOG, CAT_LEFT), [RIGHT], [LEFT], ["blue"], (2 / 4, False, False)),  # no red dog to be left of
    ],
)
def test_positions(
    asked: dict[str, Any], dogs: list[Box], cats: list[Box], dog_colours: list[str], verdict: tuple[float, bool, bool]
) -> None:
    found = {"dog": boxes("dog", *dogs), "cat": boxes("cat", *cats)}
    result = judge(parse_row(asked), found, [dog_colours, []])
    assert result.score == pytest.approx(verdict[0])
    assert (result.strict, result.benchmark) == verdict[1:]


def test_the_margin_of_positions_is_the_callers() -> None:
    asked = parse_row(row(DOG, CAT_LEFT))
    found = {"dog": boxes("dog", (5, 0, 15, 10)), "cat": boxes("cat", (0, 0, 10, 10))}
    assert [judge(asked, found, [[], []], margin).strict for margin in (0.1, 0.2)] == [True, False]


def test_metadata_are_read_as_genevals_files_and_parquet_have_them() -> None:
    line = {"tag": "position", "include": [DOG, CAT_LEFT], "prompt": "a cat left of a dog", "id": 7}
    table = {
        "tag": "position",
        "include": [DOG | {"color": None, "position": None}, CAT_LEFT | {"color": None}],
        "exclude": None,
    }
    assert parse_row(line) == parse_row(table)
    assert parse_row(line).include[1].position == ("left of", 0)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "tag: Field required"),
        ({"tag": "counting"}, "neither include nor exclude"),
        (row({"class": "dog"}), "include.0.count: Field required"),
        (row({"class": "dog", "count": 0}), "include.0.count"),
        (row(DOG | {"color": "mauve"}), "include.0.color: Input should be 'red', 'orange'"),
        (row(DOG | {"colour": "red"}), "include.0.colour: Unexpected keyword argument"),
        (row(DOG | {"position": ["near", 0]}), "include.0.position.0"),
        (row(CAT_LEFT), "include.0.position must name an earlier clause than 0"),
        (row(TWO_DOGS, exclude=({"class": "dog", "count": 2},)), "it requires and excludes the same number of dog"),
    ],
)
def test_wrong_metadata_are_one_sentence(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"{re.escape(message)}.*\"tag\" and \"include\""):
        parse_row(metadata)


def test_crop_keeps_the_object_and_greys_out_the_rest() -> None:
    image = Image.new("RGB", (8, 6), (200, 10, 10))
    mask = np.zeros((6, 8), dtype=bool)
    mask[2:4, 3] = True
    crop = np.asarray(object_crop(image, Detection("dog", 1.0, (2, 1, 5, 5), mask)))
    assert crop.shape == (4, 3, 3)
    expected = np.full((4, 3, 3), 153)
    expected[1:3, 1] = (200, 10, 10)
    assert (crop == expected).all()
    assert (np.asarray(object_crop(image, Detection("dog", 1.0, (2, 1, 5, 5)))) == (200, 10, 10)).all()


@pytest.mark.parametrize(
    ("box", "size"),
    [
        ((1.2, 2.9, 3.1, 4.0), (3, 2)),  # whole pixels that it touches
        ((2.0, 2.0, 2.0, 2.0), (1, 1)),
        ((8.0, 6.0, 8.0, 6.0), (1, 1)),  # at the corner
        ((3.0, 0.0, -2.0, 6.0), (1, 6)),  # what is left of a box beside the image
    ],
)
def test_crop_is_never_empty(box: Box, size: tuple[int, int]) -> None:
    assert object_crop(Image.new("RGB", (8, 6)), Detection("dog", 1.0, box)).size == size


@pytest.fixture
def build(clip: str, detr: str) -> Callable[..., GenEvalScorer]:
    """Builds a scorer on the tiny models."""
    return partial(GenEvalScorer, model=detr, colour_model=clip, device="cpu")


def colour_by_hand(clip: str, name: str, crop: Image.Image) -> str:
    cosines = []
    for colour in COLOURS:
        texts = [f"{colour} {name}", f"{colour}-colored {name}", f"{colour} object"]
        output = whole_model(clip, [crop], [f"a photo of a {text}" for text in texts])
        mean = output.text_embeds.mean(0)
        cosines.append(float(output.image_embeds[0] @ mean / mean.norm()))
    return COLOURS[int(np.argmax(cosines))]


def test_scorer_counts_what_the_detector_finds(detr: str, build: Callable[..., GenEvalScorer]) -> None:
    image = pictures(1)[0]
    scores = [d.score for d in detector(detr, "cpu")([image], 0.0, 1)[0] if d.label == "cat"]
    low, high = (scores[3] + scores[4]) / 2, (scores[1] + scores[2]) / 2  # 4 cats, and 2 sure ones
    scorer = build(threshold=low, counting_threshold=high)
    cats = [row({"class": "cat", "count": count}) for count in (4, 5, 2)]
    cats += [asked | {"tag": "counting"} for asked in cats]
    columns = scorer([image] * 6, ["cats"] * 6, cats)
    assert list(columns) == ["geneval", "geneval_strict", "geneval_benchmark"]
    assert columns["geneval"] == pytest.approx([1, 4 / 5, 0, 1 / 2, 2 / 5, 1])
    assert columns["geneval_strict"] == [1, 0, 0, 0, 0, 1]
    assert columns["geneval_benchmark"] == [1, 0, 1, 0, 0, 1]
    few = build(threshold=low, max_objects=3)
    assert few([image], ["cats"], [row({"class": "cat", "count": 3})])["geneval_strict"] == [1]


@more
@pytest.mark.parametrize("kind", ["detr", "mask2former"])
def test_scorer_names_colours_as_clip_does(
    kind: str, clip: str, build: Callable[..., GenEvalScorer], request: pytest.FixtureRequest
) -> None:
    model, images = request.getfixturevalue(kind), pictures(4, seed=1)
    best = [found[0] for found in detector(model, "cpu")(images, 0.0, 4)]
    assert all((d.mask is not None) == (kind == "mask2former") for d in best)
    named = [colour_by_hand(clip, d.label, object_crop(image, d)) for image, d in zip(images, best, strict=True)]
    assert len(set(named)) > 1
    scorer = build(model=model, threshold=0.0, max_objects=1)
    cases = [(i, colour) for i in range(4) for colour in COLOURS]
    asked = [row({"class": best[i].label, "count": 1, "color": colour}) for i, colour in cases]
    columns = scorer([images[i] for i, _ in cases], ["a thing"] * 40, asked)
    assert columns["geneval_strict"] == [float(colour == named[i]) for i, colour in cases]
    assert columns["geneval"] == [1.0 if colour == named[i] else 0.5 for i, colour in cases]


def test_a_score_depends_on_no_other_image(build: Callable[..., GenEvalScorer]) -> None:
    images = pictures(4)
    asked = [
        row({"class": "cat", "count": 2, "color": "red"}, {"class": "dog", "count": 1, "position": ["above", 0]}),
        row({"class": "couch", "count": 1}) | {"tag": "counting"},
        row({"class": "cat", "count": 3}),
        row(exclude=({"class": "dog", "count": 1},)),
    ]
    scorer = build(threshold=0.1, counting_threshold=0.2, batch_size=3)
    together = scorer(images, ["p"] * 4, asked)
    backwards = scorer(images[::-1], ["p"] * 4, asked[::-1])
    alone = [scorer([image], ["p"], [one]) for image, one in zip(images, asked, strict=True)]
    for name, values in together.items():
        assert values == backwards[name][::-1] == [columns[name][0] for columns in alone]
    assert len(set(together["geneval"])) > 2
    assert scorer([], [], []) == {"geneval": [], "geneval_strict": [], "geneval_benchmark": []}


def test_prompts_are_checked_without_loading_a_model(detr: str) -> None:
    scorer = GenEvalScorer(model=detr, colour_model="/nowhere")
    scorer.check_prompts([Prompt(0, "a couch", row({"class": "couch", "count": 1}))])
    with pytest.raises(DataError, match=r"prompt 4: .*\(tag: "):
        scorer.check_prompts([Prompt(4, "a dog", {"include": [DOG]})])
    with pytest.raises(DataError, match=r"prompt 5: .*'dogg'.*did you mean dog"):
        scorer.check_prompts([Prompt(5, "a dogg", row(exclude=({"class": "dogg", "count": 1},)))])
    with pytest.raises(DataError, match=r"prompt 6: .*17 .*max_objects=16"):
        scorer.check_prompts([Prompt(6, "17 dogs", row({"class": "dog", "count": 17}))])
    with pytest.raises(RewardError, match="model=/nowhere cannot be loaded"):
        GenEvalScorer(model="/nowhere").check_prompts([])

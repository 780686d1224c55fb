import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gerl.config import DataConfig
from gerl.data.preferences import check_groups, images_to_imitate
from gerl.data.sources import load
from gerl.errors import DataError
from gerl.protocol import Prompt
from reward_models.votes.ballots import Preference, write_preferences

FILES = DataConfig(train_on="files")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in "abcd":
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / f"{name}.png")
    return tmp_path


def read(place: Path, *rows: dict[str, Any], data: DataConfig = FILES) -> list[Prompt]:
    file = place / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": "a fox", **row}) + "\n" for row in rows))
    return load(str(file), data, "data.train")


def given(prompt: Prompt) -> dict[str, float]:
    return {Path(image.path).stem: image.score for image in prompt.dataset_images}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"images": ["a.png", "b.png", "c.png"], "ranks": [2, 1, 2]}, {"a": -2.0, "b": -1.0, "c": -2.0}),
        ({"chosen": "a.png", "rejected": "b.png"}, {"a": 1.0, "b": 0.0}),
        ({"image_0": "a.png", "image_1": "b.png", "label_0": 0}, {"a": 0.0, "b": 1.0}),
        ({"image": "a.png", "label": True}, {"a": 1.0}),
        ({"image": "a.png", "label": "False"}, {"a": -1.0}),
        ({"image": "a.png", "label": 0}, {"a": -1.0}),
        ({"image": "a.png"}, {"a": 1.0}),
    ],
)
def test_the_kinds_of_rows(row: dict[str, Any], expected: dict[str, float], place: Path) -> None:
    (prompt,) = read(place, row | {"mood": "calm"})
    assert given(prompt) == expected and prompt.metadata == {"mood": "calm"}
    assert all(Path(image.path).is_absolute() for image in prompt.dataset_images)
    assert load(str(place / "rows.jsonl"), FILES, "validation.data")[0].dataset_images == ()  # these are drawn
    assert load(str(place / "rows.jsonl"), DataConfig(), "data.train")[0].dataset_images == ()


def test_columns_may_have_other_names_and_a_condition_stays_one(place: Path) -> None:
    data = DataConfig(train_on="files", columns={"image_0": "jpg_0", "image_1": "jpg_1"})
    (prompt,) = read(place, {"jpg_0": "a.png", "jpg_1": "b.png", "label_0": 1.0, "image": "c.png"}, data=data)
    assert given(prompt) == {"a": 1.0, "b": 0.0} and prompt.metadata == {"image": str(place / "c.png")}


def test_votes_of_several_people_are_averaged_and_those_without_a_preference_left_out(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def vote(ranks: list[int], voter: str, images: str = "abc") -> dict[str, Any]:
        return {"images": [f"{name}.png" for name in images], "ranks": ranks, "voter": voter}

    rows = [vote([1, 2, 3], "x"), vote([1, 1], "x", "ad"), vote([2, 1, 3], "y"), vote([1, 2, 2], "z")]
    with caplog.at_level(logging.INFO):
        (prompt,) = read(place, *rows)
    assert given(prompt) == pytest.approx({"a": -4 / 3, "b": -5 / 3, "c": -8 / 3}) and prompt.id == 0
    assert "1 of 2 rows" in caplog.text
    assert given(read(place, vote([1, 2], "x", "ab"), vote([2, 1], "y", "ab"), {"image": "d.png"})[0]) == {"d": 1.0}


def test_rows_about_edits_of_different_pictures_stay_apart(place: Path) -> None:
    rows = [{"chosen": "a.png", "rejected": "b.png", "image": source} for source in ("c.png", "d.png", "c.png")]
    assert [Path(prompt.metadata["image"]).stem for prompt in read(place, *rows)] == ["c", "d"]


@pytest.mark.parametrize("parquet", [True, False])
def test_what_vote_writes_is_read(parquet: bool, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not parquet:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    one = Preference(run="r", step=1, prompt_id=0, prompt="a fox",
                     images=["a.png", "b.png"], sources=["c.png"], seeds=[1, 2], ranks=[2, 1],
                     voter="me", time=1.0, used=True)  # fmt: skip
    file = write_preferences(place, [one])
    assert file is not None and file.suffix == (".parquet" if parquet else ".jsonl")
    (prompt,) = load(str(file), FILES, "data.train")
    assert prompt.text == "a fox" and given(prompt) == {"a": -2.0, "b": -1.0}
    assert prompt.metadata["image"] == str(place / "c.png") and "sources" not in prompt.metadata


def test_of_images_to_be_imitated_the_good_ones_are_taken(place: Path) -> None:
    file = place / "rows.jsonl"
    read(place, {"chosen": "a.png", "rejected": "b.png"}, {"image": "c.png", "label": False}, {"image": "d.png"})
    found = images_to_imitate(load(str(file), DataConfig(), "data.regularise"))
    assert [(prompt.id, list(given(prompt))) for prompt in found] == [(-1, ["a"]), (-2, ["d"])]
    with pytest.raises(DataError, match="disliked"):
        images_to_imitate(read(place, {"image": "c.png", "label": False}))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, r"rows\.jsonl:1 has no column in addition to its prompt.*chosen and rejected"),
        ({"text": "x", "images": ["a.png", "b.png"]}, r"columns text, images.*images and ranks"),
        ({"images": ["a.png", "b.png"], "ranks": [1]}, "a rank for each"),
        ({"images": ["a.png"], "ranks": [1]}, "two or more"),
        ({"images": "a.png", "ranks": 1}, "two or more"),
        ({"images": ["a.png", "b.png"], "ranks": [0, 1]}, "rank=0.*at least 1"),
        ({"images": ["a.png", "b.png"], "ranks": [1, "best"]}, "'best'.*number"),
        ({"images": ["a.png", 3], "ranks": [1, 2]}, "images=3.*path"),
        ({"image_0": "a.png", "image_1": "b.png", "label_0": 2}, "label_0=2.*from 0 to 1"),
        ({"image": "a.png", "label": "maybe"}, "label='maybe'.*true"),
        ({"image": "a.png", "label": 0.5}, "label=0.5.*true"),
        ({"chosen": "a.png", "rejected": "none.png"}, "rejected='none.png'.*no file"),
        ({"chosen": "rows.jsonl", "rejected": "a.png"}, "chosen='rows.jsonl'.*cannot be read as an image"),
        ({"image": "https://example.org/a.png"}, "download it"),
        ({"chosen": "a.png", "rejected": "b.png", "mask_image": "none.png"}, "mask_image='none.png'"),
        ({"images": ["a.png", "b.png"], "ranks": [1, 1]}, "none of its 1 rows prefers"),
        ({"image_0": "a.png", "image_1": "b.png", "label_0": 0.5}, "none of its 1 rows prefers"),
    ],
)
def test_a_wrong_row_is_named(row: dict[str, Any], said: str, place: Path) -> None:
    with pytest.raises(DataError, match=said):
        read(place, row)


def test_rows_that_an_algorithm_has_no_use_for_are_named(place: Path) -> None:
    pair, three = {"chosen": "a.png", "rejected": "b.png"}, {"images": ["a.png", "b.png", "c.png"], "ranks": [1, 2, 3]}
    prompts = read(place, pair, {"image": "d.png"}, three)
    check_groups(prompts, 3, True, "kto")
    with pytest.raises(DataError, match=r"has 3 images.*rollout\.n=2.*rollout\.n=3"):
        check_groups(prompts, 2, True, "kto")
    with pytest.raises(DataError, match=r"prompt 1 'a fox' has one image, and diffusion_dpo.*algorithm=kto"):
        check_groups(prompts, 3, False, "diffusion_dpo")

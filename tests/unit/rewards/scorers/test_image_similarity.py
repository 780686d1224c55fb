from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_clip import pictures, whole_model

from gerl.errors import DataError
from gerl.protocol import Prompt
from gerl.rewards.scorers import references
from gerl.rewards.scorers.image_similarity import ImageSimilarity


def test_the_score_is_the_cosine_of_the_two_image_features(clip: str, tmp_path: Path) -> None:
    images, references = pictures(3), pictures(3, seed=1)
    drawn, wanted = (whole_model(clip, batch, ["a"]).image_embeds for batch in (images, references))
    expected = torch.nn.functional.cosine_similarity(drawn, wanted).tolist()
    references[0].save(tmp_path / "0.png")
    references[1].save(tmp_path / "1.png")
    rows = [{"image": str(tmp_path / "0.png")}, {"image": tmp_path / "1.png"}, {"image": references[2]}]
    scorer = ImageSimilarity(model=clip, batch_size=2, device="cpu")
    assert scorer(images, ["a"] * 3, rows) == pytest.approx(expected, abs=1e-5)
    assert scorer(images[::-1], ["a"] * 3, rows[::-1]) == pytest.approx(expected[::-1], abs=1e-5)
    assert max(expected) < 0.999


def test_the_reference_itself_scores_1_and_another_image_less(clip: str) -> None:
    same, other = pictures(2)
    scores = ImageSimilarity(model=clip, device="cpu")([same, other], ["a", "a"], [{"image": same}] * 2)
    assert scores[0] == pytest.approx(1, abs=1e-6) and scores[1] < 0.999


def test_a_relative_path_is_from_the_current_directory_and_read_once_a_group(
    clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for i, image in enumerate(pictures(2)):
        image.save(f"{i}.png")
    reads: list[Any] = []
    original = references.read
    monkeypatch.setattr(references, "read", lambda r: reads.append(str(r)) or original(r))
    rows = [{"source": name} for name in ("1.png", "0.png", "1.png", "0.png")]
    scorer = ImageSimilarity(model=clip, metadata_key="source", device="cpu")
    one, two = pictures(2)
    scores = scorer([two, one, one, two], ["a"] * 4, rows)
    assert reads == ["1.png", "0.png"]
    assert scores[:2] == pytest.approx([1, 1], abs=1e-6)
    assert scores[2] == pytest.approx(scores[3], abs=1e-6) and scores[2] < 0.999


def test_a_photo_is_turned_as_its_camera_says(clip: str, tmp_path: Path) -> None:
    image = pictures(1)[0]
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to view
    image.rotate(90).save(tmp_path / "photo.png", exif=exif)
    scorer = ImageSimilarity(model=clip, device="cpu")
    assert scorer([image], ["a"], [{"image": str(tmp_path / "photo.png")}]) == pytest.approx([1], abs=1e-6)


def test_a_row_without_a_reference_is_found_before_any_work(clip: str, tmp_path: Path) -> None:
    image = pictures(1)[0]
    image.save(tmp_path / "there.png")
    good = [Prompt(0, "a", {"image": str(tmp_path / "there.png")}), Prompt(1, "b", {"image": image})]
    scorer = ImageSimilarity(model=clip, device="cpu")
    scorer.check_prompts(good)
    for metadata in ({}, {"image": None}, {"image": ""}, {"image": 3}, {"picture": "x.png"}):
        with pytest.raises(DataError, match=r"prompt 2: 'c' has no reference .* row's 'image'"):
            scorer.check_prompts([*good, Prompt(2, "c", metadata)])
    with pytest.raises(DataError, match=r"prompt 2: 'c' .*gone\.png: correct the path"):
        scorer.check_prompts([*good, Prompt(2, "c", {"image": str(tmp_path / "gone.png")})])
    with pytest.raises(DataError, match="'c' has no reference"):
        scorer([image], ["c"], [{}])
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(DataError, match=r"text\.png cannot be read as an image"):
        scorer([image], ["c"], [{"image": str(tmp_path / "text.png")}])

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tiny_clip import SIZE, pictures, whole_model
from tiny_dino import KINDS, dino_folder

from gerl.config import ScorerConfig
from gerl.errors import DataError, RewardError
from gerl.protocol import Prompt
from gerl.rewards.scorers import base
from gerl.rewards.scorers.base import Columns
from reward_models.replicas import Placement, Replica
from reward_models.scorers.similarity import DinoSimilarity, Diversity, ImageSimilarity
from reward_models.scoring import Item, Refusal, join


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dino_folder(tmp_path_factory.mktemp("dino"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_is_the_cosine_of_the_two_cls_features(kind: str, tmp_path: Path) -> None:
    model = dino_folder(tmp_path / "model", kind)
    network = transformers.AutoModel.from_pretrained(model)

    def features(images: list[Image.Image]) -> torch.Tensor:
        rows = []
        for image in images:
            sizes: tuple[int, int] = (SIZE, SIZE)
            if kind.startswith("dinov2"):  # by its shorter side, then cropped in the middle
                scale = SIZE / min(image.size)
                sizes = (int(image.width * scale), int(image.height * scale))
            small = image.resize(sizes, Image.Resampling(3 if kind.startswith("dinov2") else 2))
            left, top = ((small.width - SIZE) // 2, (small.height - SIZE) // 2)
            pixels = torch.from_numpy(np.array(small.crop((left, top, left + SIZE, top + SIZE)))) / 255
            mean, std = (0.5, 0.5) if not kind.startswith("dinov2") else (
                torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
            )  # fmt: skip
            rows.append(((pixels - mean) / std).permute(2, 0, 1))
        with torch.no_grad():
            output = network(torch.stack(rows))
        return output.last_hidden_state[:, 0] if kind == "vit" else output.pooler_output

    images, references = pictures(3), pictures(3, seed=1)
    expected = torch.nn.functional.cosine_similarity(features(images), features(references)).tolist()
    references[0].save(tmp_path / "0.png")
    rows: list[dict[str, Any]] = [{"image": str(tmp_path / "0.png")}, *({"image": image} for image in references[1:])]
    scorer = DinoSimilarity(model=model, batch_size=2, device="cpu")
    assert scorer(images, ["a"] * 3, rows) == pytest.approx(expected, abs=1e-5)
    assert max(expected) < 0.999 and max(expected) - min(expected) > 1e-3


def test_a_slight_change_of_the_source_scores_below_1_and_above_another_picture(folder: str) -> None:
    source, other = pictures(2)
    changed = Image.blend(source, other.resize(source.size), 0.1)
    rows = [{"source": source}] * 3
    scores = DinoSimilarity(model=folder, metadata_key="source", device="cpu")(
        [source, changed, other], ["a"] * 3, rows
    )
    assert scores[0] == pytest.approx(1, abs=1e-6)
    assert scores[0] > scores[1] > scores[2]


def test_a_row_without_a_reference_is_found_before_any_work(folder: str, tmp_path: Path) -> None:
    image = pictures(1)[0]
    image.save(tmp_path / "there.png")
    scorer = DinoSimilarity(model=folder, device="cpu")
    scorer.check_prompts([Prompt(0, "a", {"image": [str(tmp_path / "there.png")]})])
    with pytest.raises(DataError, match=r"prompt 2: 'c' has no reference for the dino_similarity .* row's 'image'"):
        scorer.check_prompts([Prompt(2, "c")])
    with pytest.raises(DataError, match=r"prompt 2: 'c' has 2 images in 'image', .*column with a single image"):
        scorer.check_prompts([Prompt(2, "c", {"image": [str(tmp_path / "there.png")] * 2})])


def test_weights_of_another_kind_or_with_a_gap_are_refused(folder: str, clip: str, tmp_path: Path) -> None:
    row = [{"image": pictures(1)[0]}]
    with pytest.raises(RewardError, match=r"model=.* is a clip model: give a DINO"):
        DinoSimilarity(model=clip)(pictures(1), ["a"], row)
    model = transformers.AutoModel.from_pretrained(folder)
    tensors = {name: value for name, value in model.state_dict().items() if not name.startswith("layernorm")}
    gap = shutil.copytree(folder, tmp_path / "gap")
    model.save_pretrained(gap, state_dict=tensors)
    with pytest.raises(RewardError, match=r"no weights for layernorm\.bias and 1 more"):
        DinoSimilarity(model=str(gap), device="cpu")(pictures(1), ["a"], row)


def test_a_model_is_loaded_once_and_half_precision_comes_close(folder: str) -> None:
    exact, half = (DinoSimilarity(model=folder, device="cpu", dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert exact.network is DinoSimilarity(model=folder, device="cpu", batch_size=1).network is not half.network
    rows = [{"image": image} for image in pictures(2, seed=1)]
    scores = exact(pictures(2), ["a"] * 2, rows)
    assert half(pictures(2), ["a"] * 2, rows) == pytest.approx(scores, abs=0.1)


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
    original = base.read
    monkeypatch.setattr(base, "read", lambda r: reads.append(str(r)) or original(r))
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


def test_a_row_without_a_reference_is_found_before_any_work_of_image_similarity(clip: str, tmp_path: Path) -> None:
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


def test_a_service_opens_references_in_its_folders_only(clip: str, tmp_path: Path) -> None:
    image = pictures(1)[0]
    for name in ("allowed/a.png", "allowed b/b.png", "secret.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        image.save(tmp_path / name)
    (tmp_path / "allowed/link.png").symlink_to(tmp_path / "secret.png")
    config = ScorerConfig(kwargs={"model": clip, "device": "cpu"})

    def score(name: str, folders: str | None) -> Columns | Refusal:
        replica = Replica("image_similarity", config, Placement(folders=folders), None)
        row = Item(0, 0, image, "a", {"image": str(tmp_path / name)})
        return join("image_similarity", replica._scored([row]))

    folders = f"{tmp_path / 'allowed'},{tmp_path / 'allowed b'}"
    for name in ("allowed/a.png", "allowed b/b.png"):
        assert score(name, folders) == {"image_similarity": [pytest.approx(1, abs=1e-5)]}
    for name in ("secret.png", "gone.png", "allowed/link.png", "allowed/../secret.png", "allowed c/c.png"):
        refused = score(name, folders)
        assert isinstance(refused, Refusal) and refused.status == 422 and "folders=FOLDER" in refused.message
    assert isinstance(score("allowed/a.png", None), Refusal)


def test_the_score_is_the_mean_distance_to_the_other_images(clip: str) -> None:
    images = pictures(4)
    images[3] = images[0].copy()
    features = whole_model(clip, images, ["a"]).image_embeds
    expected = [sum(1 - float(features[i] @ features[j]) for j in range(4) if j != i) / 3 for i in range(4)]
    scorer = Diversity(model=clip, device="cpu")
    found = scorer(images, ["a"] * 4, [{}] * 4)
    assert found == pytest.approx(expected, abs=1e-5) and found[0] == pytest.approx(found[3], abs=1e-6)
    assert scorer([images[0], images[3]], ["a"] * 2, [{}] * 2) == pytest.approx([0.0, 0.0], abs=1e-6)
    assert scorer(images[:1], ["a"], [{}]) == [0.0]


def test_the_nearest_other_image_counts_where_that_is_asked_for(clip: str) -> None:
    images = pictures(4)
    images[3] = images[0].copy()
    features = whole_model(clip, images, ["a"]).image_embeds
    expected = [min(1 - float(features[i] @ features[j]) for j in range(4) if j != i) for i in range(4)]
    scorer = Diversity(model=clip, device="cpu", nearest=True)
    assert scorer(images, ["a"] * 4, [{}] * 4) == pytest.approx(expected, abs=1e-5)
    assert scorer(images[:1], ["a"], [{}]) == [0.0]

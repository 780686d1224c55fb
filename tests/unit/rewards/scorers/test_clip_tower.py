import math
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from PIL import Image
from tiny_clip import LOGIT_SCALE, pictures, whole_model

from gerl.errors import RewardError
from gerl.rewards.scorers.clip_tower import ClipScorer, ClipTower, clip_tower, resolve_device, resolve_dtype
from gerl.rewards.scorers.clipscore import ClipScore
from gerl.rewards.scorers.image_similarity import ImageSimilarity
from gerl.rewards.scorers.pickscore import PickScore

TEXTS = ["a cat", "two dogs on a mat", "a cat", "!"]


@pytest.fixture(scope="module")
def tower(clip: str) -> ClipTower:
    return clip_tower(clip, device="cpu")


def test_features_are_those_of_the_whole_model(clip: str, tower: ClipTower) -> None:
    expected = whole_model(clip, pictures(4), TEXTS)
    image, text = tower.image_features(pictures(4), 3), tower.text_features(TEXTS, 2)
    torch.testing.assert_close(image, expected.image_embeds, atol=1e-5, rtol=0)
    torch.testing.assert_close(text, expected.text_embeds, atol=1e-5, rtol=0)
    assert tower.logit_scale == pytest.approx(math.exp(LOGIT_SCALE), rel=1e-6)
    assert tower.dim == 16 and not image.requires_grad and not text.requires_grad
    assert (image @ image.T - torch.eye(4)).max() < 0.999  # different images have different features


def test_a_feature_does_not_depend_on_the_batch_or_its_order(tower: ClipTower) -> None:
    images = pictures(5)
    together, texts = tower.image_features(images, 5), tower.text_features(TEXTS, 4)
    for size in (1, 2):
        torch.testing.assert_close(tower.image_features(images[::-1], size), together.flip(0), atol=1e-6, rtol=0)
        torch.testing.assert_close(tower.text_features(TEXTS[::-1], size), texts.flip(0), atol=1e-6, rtol=0)
    assert torch.equal(texts[0], texts[2]) and not torch.allclose(texts[0], texts[1], atol=1e-2)


def test_a_text_beyond_the_length_of_the_model_is_cut_off(tower: ClipTower) -> None:
    long = "abcdefghijklmnopqrstuvwxyz"  # 18 letters fit between start and end
    cut, whole, shorter = tower.text_features([long[:18], long, long[:17]], 8)
    torch.testing.assert_close(whole, tower.text_features(["abcdefghijklmnopqrXYZ"], 8)[0])
    assert not torch.allclose(cut, shorter, atol=1e-2)


def test_an_image_of_another_mode_is_taken_as_rgb(tower: ClipTower) -> None:
    grey = pictures(1)[0].convert("L")
    features = tower.image_features([grey, grey.convert("RGB"), grey.convert("RGBA")], 3)
    torch.testing.assert_close(features, features[:1].expand(3, -1))


def test_scorers_of_the_same_weights_load_them_once(clip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    original = transformers.CLIPModel.from_pretrained

    def counted(source: str, **kwargs: Any) -> Any:
        loaded.append(source)
        return original(source, **kwargs)

    monkeypatch.setattr(transformers.CLIPModel, "from_pretrained", counted)
    other = clip + "/"  # a name nobody has loaded yet
    device = str(resolve_device("auto"))
    scorers: list[ClipScorer] = [
        ClipScore(model=other),
        ClipScore(model=other, raw=True, batch_size=1, device=device),
        PickScore(model=other, processor=None),
        ImageSimilarity(model=other, processor=other, dtype="float32" if device == "cpu" else "bfloat16"),
    ]
    assert loaded == []
    assert len({id(scorer.tower) for scorer in scorers}) == 1
    assert loaded == [other]
    assert ClipScore(model=other, dtype="float16").tower is not scorers[0].tower


def test_half_precision_gives_normalised_fp32_features_and_the_exact_scale(clip: str, tower: ClipTower) -> None:
    half = clip_tower(clip, device="cpu", dtype="bfloat16")
    assert half.model.dtype == torch.bfloat16 and half.logit_scale == tower.logit_scale
    features = half.image_features(pictures(3), 2)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features.norm(dim=-1), torch.ones(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(features, tower.image_features(pictures(3), 2), atol=0.05, rtol=0)


def test_auto_is_what_the_machine_has() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", torch.device("cpu")) == torch.float16
    with pytest.raises(RewardError, match=r"device=cuda:99: .*device=auto"):
        resolve_device("cuda:99")


@pytest.mark.usefixtures("hub")
def test_what_cannot_be_loaded_is_named_with_a_remedy(clip: str, tmp_path: Path) -> None:
    for name in ("nobody/has-this-model", str(tmp_path / "nowhere"), str(tmp_path)):
        start = re.escape(f"model={name} cannot be loaded (")
        with pytest.raises(RewardError, match=f"^{start}.*give the Hub id of a transformers CLIP model .* folder"):
            clip_tower(name, device="cpu")
        start = re.escape(f"processor={name} cannot be loaded (")
        with pytest.raises(RewardError, match=f"^{start}.*give the Hub id of a CLIP tokenizer and image processor"):
            clip_tower(clip, name, device="cpu")


def test_weights_that_are_not_all_there_are_refused_instead_of_made_up(clip: str, tmp_path: Path) -> None:
    source = transformers.CLIPModel.from_pretrained(clip)
    source.save_pretrained(tmp_path)
    tensors = source.state_dict()
    del tensors["text_projection.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RewardError, match=r"has no weights for text_projection\.weight and 0 more"):
        clip_tower(str(tmp_path), clip, device="cpu")
    (tmp_path / "model.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(RewardError, match=r"model=.* cannot be loaded \(SafetensorError"):
        clip_tower(str(tmp_path), clip, device="cpu")


@pytest.mark.gpu
def test_on_a_gpu_the_features_are_those_of_the_cpu(clip: str, tower: ClipTower) -> None:
    fast, images = clip_tower(clip), pictures(3)
    assert fast.model.device.type == "cuda" and fast.model.dtype == torch.bfloat16
    assert clip_tower(clip, device="cuda:0") is fast
    torch.testing.assert_close(fast.image_features(images, 2), tower.image_features(images, 2), atol=0.05, rtol=0)
    torch.testing.assert_close(fast.text_features(TEXTS, 2), tower.text_features(TEXTS, 2), atol=0.05, rtol=0)


def test_images_of_any_shape_are_taken(tower: ClipTower) -> None:
    images = [Image.new("RGB", size, (200, 30, 90)) for size in ((32, 32), (7, 90), (300, 200))]
    features = tower.image_features(images, 3)
    torch.testing.assert_close(features, features[:1].expand(3, -1), atol=1e-5, rtol=0)

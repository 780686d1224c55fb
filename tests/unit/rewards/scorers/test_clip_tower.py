import re
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import safetensors.torch
import torch
import transformers
from PIL import Image
from pydantic import TypeAdapter, ValidationError
from tiny_clip import clip_folder, pictures, tokenizer

from gerl.errors import RewardError
from gerl.rewards.scorers.clip_tower import ClipScorer, clip_tower, resolve_device, resolve_dtype
from gerl.rewards.scorers.clipscore import ClipScore
from gerl.rewards.scorers.image_similarity import ImageSimilarity
from gerl.rewards.scorers.pickscore import PickScore

TEXTS = ["a cat", "two dogs on a mat", "a cat", "!"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return clip_folder(tmp_path_factory.mktemp("clip"))


def test_features_are_those_of_the_whole_model(folder: str) -> None:
    model = transformers.CLIPModel.from_pretrained(folder)
    processor = transformers.CLIPProcessor.from_pretrained(folder, backend="pil")
    inputs = processor(text=TEXTS, images=pictures(4), padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs)
    tower = clip_tower(folder, device="cpu")
    image, text = tower.image_features(pictures(4), 3), tower.text_features(TEXTS, 2)
    torch.testing.assert_close(image, expected.image_embeds, atol=1e-5, rtol=0)
    torch.testing.assert_close(text, expected.text_embeds, atol=1e-5, rtol=0)
    assert tower.logit_scale == pytest.approx(model.logit_scale.exp().item(), rel=1e-6)
    assert tower.dim == 16 and not image.requires_grad and not text.requires_grad
    assert (image @ image.T - torch.eye(4)).max() < 0.999  # different images have different features


def test_a_feature_does_not_depend_on_the_batch_or_its_order(folder: str) -> None:
    tower = clip_tower(folder, device="cpu")
    images = pictures(5)
    together, texts = tower.image_features(images, 5), tower.text_features(TEXTS, 4)
    for size in (1, 2):
        torch.testing.assert_close(tower.image_features(images[::-1], size), together.flip(0), atol=1e-6, rtol=0)
        torch.testing.assert_close(tower.text_features(TEXTS[::-1], size), texts.flip(0), atol=1e-6, rtol=0)
    assert torch.equal(texts[0], texts[2]) and not torch.allclose(texts[0], texts[1], atol=1e-2)


def test_a_text_beyond_the_length_of_the_model_is_cut_off(folder: str) -> None:
    tower = clip_tower(folder, device="cpu")
    long = "abcdefghijklmnopqrstuvwxyz"  # 18 letters fit between start and end
    cut, whole, shorter = tower.text_features([long[:18], long, long[:17]], 8)
    torch.testing.assert_close(whole, tower.text_features(["abcdefghijklmnopqrXYZ"], 8)[0])
    assert not torch.allclose(cut, shorter, atol=1e-2)


def test_an_image_of_another_mode_is_taken_as_rgb(folder: str) -> None:
    tower = clip_tower(folder, device="cpu")
    grey = pictures(1)[0].convert("L")
    features = tower.image_features([grey, grey.convert("RGB"), grey.convert("RGBA")], 3)
    torch.testing.assert_close(features, features[:1].expand(3, -1))


def test_scorers_of_the_same_weights_load_them_once(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    original = transformers.CLIPModel.from_pretrained

    def counted(source: str, **kwargs: Any) -> Any:
        loaded.append(source)
        return original(source, **kwargs)

    monkeypatch.setattr(transformers.CLIPModel, "from_pretrained", counted)
    other = folder + "/"  # a name nobody has loaded yet
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


def test_half_precision_gives_normalised_fp32_features_and_the_exact_scale(folder: str) -> None:
    exact, half = clip_tower(folder, device="cpu"), clip_tower(folder, device="cpu", dtype="bfloat16")
    assert half.model.dtype == torch.bfloat16 and half.logit_scale == exact.logit_scale
    features = half.image_features(pictures(3), 2)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features.norm(dim=-1), torch.ones(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(features, exact.image_features(pictures(3), 2), atol=0.05, rtol=0)


def test_auto_is_what_the_machine_has() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", torch.device("cpu")) == torch.float16
    with pytest.raises(RewardError, match=r"device=cuda:99: .*device=auto"):
        resolve_device("cuda:99")


@pytest.mark.parametrize(
    "kwargs", [{"device": "tpu"}, {"dtype": "int8"}, {"batch_size": 0}, {"modle": "x"}, {"model": None}]
)
def test_wrong_kwargs_are_refused_when_the_scorer_is_built(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(kwargs))):
        TypeAdapter(ClipScore).validate_python(kwargs)


def test_what_cannot_be_loaded_is_named_with_a_remedy(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("nobody/has-this-model", str(tmp_path / "nowhere"), str(tmp_path)):
        start = re.escape(f"model={name} cannot be loaded (")
        with pytest.raises(RewardError, match=f"^{start}.*give the Hub id of a transformers CLIP model .* folder"):
            clip_tower(name, device="cpu")
        start = re.escape(f"processor={name} cannot be loaded (")
        with pytest.raises(RewardError, match=f"^{start}.*give the Hub id of a CLIP tokenizer and image processor"):
            clip_tower(folder, name, device="cpu")


def test_weights_that_are_not_all_there_are_refused_instead_of_made_up(folder: str, tmp_path: Path) -> None:
    source = transformers.CLIPModel.from_pretrained(folder)
    source.save_pretrained(tmp_path)
    tensors = source.state_dict()
    del tensors["text_projection.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RewardError, match=r"has no weights for text_projection\.weight and 0 more"):
        clip_tower(str(tmp_path), folder, device="cpu")
    (tmp_path / "model.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(RewardError, match=r"model=.* cannot be loaded \(SafetensorError"):
        clip_tower(str(tmp_path), folder, device="cpu")


@pytest.mark.gpu
def test_on_a_gpu_the_features_are_those_of_the_cpu(folder: str) -> None:
    tower, exact = clip_tower(folder), clip_tower(folder, device="cpu")
    assert tower.model.device.type == "cuda" and tower.model.dtype == torch.bfloat16
    assert clip_tower(folder, device="cuda:0") is tower
    torch.testing.assert_close(
        tower.image_features(pictures(3), 2), exact.image_features(pictures(3), 2), atol=0.05, rtol=0
    )
    torch.testing.assert_close(tower.text_features(TEXTS, 2), exact.text_features(TEXTS, 2), atol=0.05, rtol=0)


def test_images_of_any_shape_are_taken(folder: str) -> None:
    images = [Image.new("RGB", size, (200, 30, 90)) for size in ((32, 32), (7, 90), (300, 200))]
    features = clip_tower(folder, device="cpu").image_features(images, 3)
    torch.testing.assert_close(features, features[:1].expand(3, -1), atol=1e-5, rtol=0)

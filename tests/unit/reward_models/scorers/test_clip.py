import hashlib
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from PIL import Image
from tensor_scores import assert_differentiable
from tiny_clip import LOGIT_SCALE, assert_scored_alone, pictures, whole_model
from torch import nn

from gerl.errors import RewardError
from gerl.protocol import Prompt
from reward_models.scorers import clip as aesthetic
from reward_models.scorers.clip import (
    AestheticScore,
    ClipScore,
    ClipScorer,
    ClipTower,
    PickScore,
    clip_tower,
)
from reward_models.scorers.networks import linear_head, read_tensors, resolve_device, resolve_dtype
from reward_models.scorers.similarity import ImageSimilarity

PROMPTS = ["a cat", "two dogs on a mat", "a cat"]


def test_the_score_is_the_models_logit_over_30_or_the_bare_cosine(clip: str) -> None:
    output = whole_model(clip, pictures(3), PROMPTS)
    scores = ClipScore(model=clip, batch_size=2, device="cpu")(pictures(3), PROMPTS, [{}] * 3)
    assert scores == pytest.approx((output.logits_per_image.diag() / 30).tolist(), abs=1e-5)
    raw = ClipScore(model=clip, raw=True, device="cpu")(pictures(3), PROMPTS, [{}] * 3)
    cosine = torch.nn.functional.cosine_similarity(output.image_embeds, output.text_embeds)
    assert raw == pytest.approx(cosine.tolist(), abs=1e-5)
    assert max(raw) - min(raw) > 0.01


def test_scores_move_with_their_images(clip: str) -> None:
    scorer = ClipScore(model=clip, device="cpu", batch_size=2)
    assert_scored_alone(scorer, pictures(4), [*PROMPTS, "something else entirely"])


def test_scores_of_tensors_have_a_gradient(clip: str) -> None:
    assert_differentiable(ClipScore(model=clip, device="cpu"), pictures(3), ["a cat", "two dogs", "a"])


REVISION = "a" * 40
PICKSCORE_PROMPTS = ["a cat", "two dogs on a mat", "a long prompt " * 20]


@pytest.fixture(scope="module")
def expected(clip: str) -> list[float]:
    """The scores of `PROMPTS`."""
    return [logit / 26 for logit in whole_model(clip, pictures(3), PICKSCORE_PROMPTS).logits_per_image.diag().tolist()]


def test_the_score_is_the_models_logit_over_26(clip: str, expected: list[float]) -> None:
    scorer = PickScore(model=clip, processor=None, batch_size=2, device="cpu")
    scores = scorer(pictures(3), PICKSCORE_PROMPTS, [{}] * 3)
    assert all(isinstance(score, float) for score in scores)
    assert scores == pytest.approx(expected, abs=1e-5)
    assert max(scores) - min(scores) > 0.01
    raw = PickScore(model=clip, processor=None, scale=1, device="cpu")(pictures(3), PICKSCORE_PROMPTS, [{}] * 3)
    assert raw == pytest.approx([26 * score for score in scores], rel=1e-5)
    assert_scored_alone(scorer, pictures(3), PICKSCORE_PROMPTS)


def test_without_kwargs_the_weights_are_pickscores_and_the_rest_is_the_clip_it_was_trained_from(
    clip: str, expected: list[float], hub: Path
) -> None:
    rest = {file.name for file in Path(clip).iterdir()} - {"model.safetensors"}
    downloaded = {
        "yuvalkirstain/PickScore_v1": {"config.json", "model.safetensors"},
        "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": rest,
    }
    for repository, names in downloaded.items():
        place = hub / f"models--{repository.replace('/', '--')}"
        for folder in (place / "refs", place / "snapshots" / REVISION):
            folder.mkdir(parents=True)
        (place / "refs" / "main").write_text(REVISION)
        for name in names:
            shutil.copy(Path(clip) / name, place / "snapshots" / REVISION)
    assert PickScore(device="cpu")(pictures(3), PICKSCORE_PROMPTS, [{}] * 3) == pytest.approx(expected, abs=1e-5)


def test_scores_of_tensors_have_a_gradient_of_pickscore(clip: str) -> None:
    assert_differentiable(PickScore(model=clip, processor=None, device="cpu"), pictures(3), ["a cat", "two dogs", "a"])


WIDTH = 16  # of a feature of the tiny tower


class Original(nn.Module):
    """The module of the published file."""

    def __init__(self, width: int = WIDTH, relu: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts: list[nn.Module] = []
        for size, dropout in ((1024, 0.2), (128, 0.2), (64, 0.1), (16, None)):
            parts.append(nn.Linear(width, size))
            parts += [nn.ReLU()] if relu else []
            parts += [nn.Dropout(dropout)] if dropout else []
            width = size
        self.layers = nn.Sequential(*parts, nn.Linear(width, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers(features)


def saved(path: Path, module: nn.Module) -> str:
    (torch.save if path.suffix == ".pth" else safetensors.torch.save_file)(module.state_dict(), path)
    return str(path)


@pytest.mark.parametrize("name", ["head.pth", "head.safetensors"])
def test_the_score_is_the_head_on_the_normalised_image_feature(clip: str, tmp_path: Path, name: str) -> None:
    original = Original().eval()
    expected = original(whole_model(clip, pictures(3), ["a"]).image_embeds).squeeze(-1)
    scorer = AestheticScore(model=clip, head=saved(tmp_path / name, original), batch_size=2, device="cpu")
    scores = scorer(pictures(3), ["a", "b", "c"], [{}] * 3)
    assert scores == pytest.approx(expected.tolist(), abs=1e-5)
    assert max(scores) - min(scores) > 1e-3
    alone = [scorer([image], ["other"], [{}])[0] for image in pictures(3)]  # the prompt does not count
    assert scores == pytest.approx(alone, abs=1e-6)
    scorer.check_prompts([Prompt(0, "anything")])


def test_the_head_is_one_affine_map() -> None:
    original = Original()
    head = linear_head(original.state_dict(), WIDTH, "head")
    product, offset = torch.eye(WIDTH), torch.zeros(WIDTH)
    for layer in original.layers:
        if isinstance(layer, nn.Linear):
            product, offset = layer.weight @ product, layer.weight @ offset + layer.bias
    features = torch.randn(4, WIDTH)
    torch.testing.assert_close(head(features), features @ product.T + offset, atol=1e-5, rtol=0)


def test_a_head_of_another_kind_or_width_is_refused(clip: str, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"layers 0, 2, 4, 6, 7 .* got layers\.0\.bias"):
        linear_head(Original(relu=True).state_dict(), WIDTH, "head=x")
    wide = AestheticScore(model=clip, head=saved(tmp_path / "wide.pth", Original(24)), device="cpu")
    with pytest.raises(RewardError, match=r"head=.*wide\.pth: expected a head from 16 to 1 .* \(1024, 24\)"):
        wide(pictures(1), ["a"], [{}])
    two = Original().state_dict() | {"layers.7.weight": torch.zeros(2, 16), "layers.7.bias": torch.zeros(2)}
    with pytest.raises(RewardError, match="a head from 16 to 1"):
        linear_head(two, WIDTH, "head=x")


def test_a_path_that_names_no_file_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        RewardError, match=r"head=/nowhere/head\.pth is neither a file .* or sac\+logos\+ava1-l14-linearMSE"
    ):
        AestheticScore(head="/nowhere/head.pth")


def test_the_published_head_is_found_by_name_and_only_the_authors_file_is_taken(
    clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = saved(tmp_path / "sac+logos+ava1-l14-linearMSE.pth", Original())
    scorer = AestheticScore(model=clip, repository=str(tmp_path), device="cpu")
    with pytest.raises(RewardError, match=r"repository=.* has the SHA-256 [0-9a-f]{64}, not 21dd590f3ccd.*path of the"):
        scorer(pictures(1), ["a"], [{}])
    # where the tiny file is the authors', it is taken
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    monkeypatch.setattr(aesthetic, "HEADS", {"sac+logos+ava1-l14-linearMSE": digest})
    by_path = AestheticScore(model=clip, head=file, device="cpu")
    assert scorer(pictures(2), ["a"] * 2, [{}] * 2) == by_path(pictures(2), ["a"] * 2, [{}] * 2)


@pytest.mark.usefixtures("hub")
def test_a_head_that_cannot_be_downloaded_is_named(clip: str) -> None:
    message = r"^repository=camenduru/improved-aesthetic-predictor cannot be loaded .*linearMSE\.pth"
    with pytest.raises(RewardError, match=message):
        AestheticScore(model=clip, device="cpu")(pictures(1), ["a"], [{}])


def test_a_file_that_is_not_named_tensors_is_refused(tmp_path: Path) -> None:
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    with pytest.raises(RewardError, match=r"head=.*list\.pth contains list, not named tensors"):
        read_tensors("head", str(tmp_path / "list.pth"))
    (tmp_path / "broken.safetensors").write_text("nothing of the kind")
    with pytest.raises(RewardError, match=re.escape("broken.safetensors cannot be loaded (SafetensorError")):
        read_tensors("head", str(tmp_path / "broken.safetensors"))


class Payload:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("ran",)


def test_a_file_with_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"layers.0.weight": Payload()}, "evil.pth")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        read_tensors("head", "evil.pth")
    assert not Path("ran").exists()


def test_scores_of_tensors_have_a_gradient_of_aesthetic(clip: str, tmp_path: Path) -> None:
    head = saved(tmp_path / "head.pth", Original())
    assert_differentiable(AestheticScore(model=clip, head=head, device="cpu"), pictures(2), ["a", "b"])


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

import shutil
from collections.abc import Collection
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from tiny_clip import clip_folder, pictures

from gerl.rewards.scorers.pickscore import PickScore

REVISION = "a" * 40
PROMPTS = ["a cat", "two dogs on a mat", "a cat"]


def logits(folder: str, prompts: list[str]) -> torch.Tensor:
    """The diagonal of what the whole model says, image by image."""
    model = transformers.CLIPModel.from_pretrained(folder)
    processor = transformers.CLIPProcessor.from_pretrained(folder, backend="pil")
    found = []
    for image, prompt in zip(pictures(len(prompts)), prompts, strict=True):
        inputs = processor(text=[prompt], images=[image], return_tensors="pt", truncation=True, max_length=20)
        with torch.no_grad():
            found.append(model(**inputs).logits_per_image[0, 0])
    return torch.stack(found)


def test_the_score_is_the_models_logit_over_26(tmp_path: Path) -> None:
    folder = clip_folder(tmp_path)
    scorer = PickScore(model=folder, processor=None, batch_size=2, device="cpu")
    scores = scorer(pictures(3), PROMPTS, [{}] * 3)
    assert all(isinstance(score, float) for score in scores)
    assert scores == pytest.approx((logits(folder, PROMPTS) / 26).tolist(), abs=1e-5)
    assert max(scores) - min(scores) > 0.01
    raw = PickScore(model=folder, processor=None, scale=1, device="cpu")(pictures(3), PROMPTS, [{}] * 3)
    assert raw == pytest.approx([26 * score for score in scores], rel=1e-5)


def test_tokenizer_and_image_processor_may_lie_elsewhere_than_the_weights(tmp_path: Path) -> None:
    whole = clip_folder(tmp_path / "whole")
    weights, rest = tmp_path / "weights", tmp_path / "rest"
    shutil.copytree(whole, rest)
    weights.mkdir()
    for name in ("config.json", "model.safetensors"):
        (rest / name).rename(weights / name)
    scorer = PickScore(model=str(weights), processor=str(rest), device="cpu")
    assert scorer(pictures(3), PROMPTS, [{}] * 3) == pytest.approx((logits(whole, PROMPTS) / 26).tolist(), abs=1e-5)


def test_a_score_does_not_depend_on_its_neighbours_and_long_prompts_are_cut(tmp_path: Path) -> None:
    folder = clip_folder(tmp_path)
    scorer = PickScore(model=folder, processor=None, device="cpu")
    prompts = ["a", "a long prompt " * 20, "b"]
    together = scorer(pictures(3), prompts, [{}] * 3)
    alone = [scorer([image], [prompt], [{}])[0] for image, prompt in zip(pictures(3), prompts, strict=True)]
    assert together == pytest.approx(alone, abs=1e-6)
    assert together == pytest.approx((logits(folder, prompts) / 26).tolist(), abs=1e-5)


def test_without_kwargs_the_weights_are_pickscores_and_the_rest_is_the_clip_it_was_trained_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = clip_folder(tmp_path / "whole")
    files: dict[str, Collection[str]] = {
        "yuvalkirstain/PickScore_v1": ("config.json", "model.safetensors"),
        "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": {file.name for file in Path(whole).iterdir()} - {"model.safetensors"},
    }
    for repository, names in files.items():  # as if they had been downloaded
        place = tmp_path / f"models--{repository.replace('/', '--')}"
        for folder in (place / "refs", place / "snapshots" / REVISION):
            folder.mkdir(parents=True)
        (place / "refs" / "main").write_text(REVISION)
        for name in names:
            shutil.copy(Path(whole) / name, place / "snapshots" / REVISION)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    scores = PickScore(device="cpu")(pictures(3), PROMPTS, [{}] * 3)
    assert scores == pytest.approx((logits(whole, PROMPTS) / 26).tolist(), abs=1e-5)

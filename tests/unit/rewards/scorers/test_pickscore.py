import shutil
from pathlib import Path

import pytest
import torch
import transformers
from tiny_clip import clip_folder, pictures

from gerl.protocol import Prompt
from gerl.rewards.scorers.pickscore import PickScore

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


def test_the_published_weights_are_the_default_and_any_prompt_will_do() -> None:
    scorer = PickScore()
    assert (scorer.model, scorer.processor) == ("yuvalkirstain/PickScore_v1", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K")
    scorer.check_prompts([Prompt(0, "anything")])

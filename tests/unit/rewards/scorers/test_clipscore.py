from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from tiny_clip import clip_folder, pictures

from gerl.errors import RewardError
from gerl.protocol import Prompt
from gerl.rewards.scorers.clipscore import ClipScore

PROMPTS = ["a cat", "two dogs on a mat", "a cat"]


def test_the_score_is_the_models_logit_over_30_or_the_bare_cosine(tmp_path: Path) -> None:
    folder = clip_folder(tmp_path)
    model = transformers.CLIPModel.from_pretrained(folder)
    processor = transformers.CLIPProcessor.from_pretrained(folder, backend="pil")
    inputs = processor(text=PROMPTS, images=pictures(3), padding=True, return_tensors="pt")
    with torch.no_grad():
        output = model(**inputs)
    scores = ClipScore(model=folder, batch_size=2, device="cpu")(pictures(3), PROMPTS, [{}] * 3)
    assert scores == pytest.approx((output.logits_per_image.diag() / 30).tolist(), abs=1e-5)
    raw = ClipScore(model=folder, raw=True, device="cpu")(pictures(3), PROMPTS, [{}] * 3)
    cosine = torch.nn.functional.cosine_similarity(output.image_embeds, output.text_embeds)
    assert raw == pytest.approx(cosine.tolist(), abs=1e-5)
    assert max(raw) - min(raw) > 0.01


def test_scores_move_with_their_images(tmp_path: Path) -> None:
    scorer = ClipScore(model=clip_folder(tmp_path), device="cpu", batch_size=2)
    images = pictures(4)
    prompts = [*PROMPTS, "something else entirely"]
    scores = scorer(images, prompts, [{}] * 4)
    assert scorer(images[::-1], prompts[::-1], [{}] * 4) == pytest.approx(scores[::-1], abs=1e-6)


def test_without_kwargs_the_published_weights_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    ClipScore().check_prompts([Prompt(0, "anything")])
    with pytest.raises(RewardError, match="model=openai/clip-vit-large-patch14 cannot be loaded"):
        ClipScore()(pictures(1), ["anything"], [{}])

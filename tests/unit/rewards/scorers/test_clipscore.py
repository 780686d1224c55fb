import pytest
import torch
from tensor_scores import assert_differentiable
from tiny_clip import assert_scored_alone, pictures, whole_model

from gerl.rewards.scorers.clipscore import ClipScore

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

import shutil
from pathlib import Path

import pytest
from tensor_scores import assert_differentiable
from tiny_clip import assert_scored_alone, pictures, whole_model

from gerl.rewards.scorers.pickscore import PickScore

REVISION = "a" * 40
PROMPTS = ["a cat", "two dogs on a mat", "a long prompt " * 20]


@pytest.fixture(scope="module")
def expected(clip: str) -> list[float]:
    """The scores of `PROMPTS`."""
    return [logit / 26 for logit in whole_model(clip, pictures(3), PROMPTS).logits_per_image.diag().tolist()]


def test_the_score_is_the_models_logit_over_26(clip: str, expected: list[float]) -> None:
    scorer = PickScore(model=clip, processor=None, batch_size=2, device="cpu")
    scores = scorer(pictures(3), PROMPTS, [{}] * 3)
    assert all(isinstance(score, float) for score in scores)
    assert scores == pytest.approx(expected, abs=1e-5)
    assert max(scores) - min(scores) > 0.01
    raw = PickScore(model=clip, processor=None, scale=1, device="cpu")(pictures(3), PROMPTS, [{}] * 3)
    assert raw == pytest.approx([26 * score for score in scores], rel=1e-5)
    assert_scored_alone(scorer, pictures(3), PROMPTS)


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
    assert PickScore(device="cpu")(pictures(3), PROMPTS, [{}] * 3) == pytest.approx(expected, abs=1e-5)


def test_scores_of_tensors_have_a_gradient(clip: str) -> None:
    assert_differentiable(PickScore(model=clip, processor=None, device="cpu"), pictures(3), ["a cat", "two dogs", "a"])

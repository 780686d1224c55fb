import pytest
from tiny_clip import pictures, whole_model

from gerl.rewards.scorers.diversity import Diversity


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

"""The total reward with a gradient: what counts how much, and which scorers have none."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gerl.config import RewardConfig, ScorerConfig
from gerl.errors import ConfigError, RewardError
from gerl.objects import PREFIX, offered
from gerl.protocol import Prompt
from gerl.rewards.gradients import TensorReward, differentiable_scorers
from gerl.rewards.scorers import SCORERS, Scorer, scorer_class


def red(images: torch.Tensor) -> torch.Tensor:
    return images[:, 0].flatten(1).mean(1)


def words(images: torch.Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> torch.Tensor:
    counts = torch.tensor([len(p.split()) * row["x"] for p, row in zip(prompts, metadata, strict=True)])
    return images[:, 1].flatten(1).mean(1) * counts


red.takes_tensors = words.takes_tensors = True  # type: ignore[attr-defined]
OFFERED = {"red": red, "words": words}


def config(**scorers: Any) -> RewardConfig:
    return RewardConfig({name: ScorerConfig(path=PREFIX + name, **keys) for name, keys in scorers.items()})


def test_the_total_is_the_weighted_sum_of_what_applies_on_the_scale_on_which_it_counts() -> None:
    reward = config(
        red=dict(weight=2.0, scale=3.0, offset=-1.0, clip=(0.0, 0.5)),
        words=dict(weight=0.5, data_sources=["b"]),
    )
    prompts = [Prompt(0, "one", {"data_source": "a", "x": 1}), Prompt(1, "two words", {"data_source": "b", "x": 10})]
    images = torch.tensor([0.4, 0.6]).view(2, 1, 1, 1).expand(2, 3, 2, 2).clone().requires_grad_()
    with offered(OFFERED, {}):
        total = TensorReward(reward, ["red", "words"], "cpu")
        found = total(images, prompts)
        longer = total(images, prompts, lambda text: f"{text} and more")
    assert found.tolist() == pytest.approx([2 * 0.2, 2 * 0.5 + 0.5 * 20 * 0.6])
    assert longer.tolist() == pytest.approx([2 * 0.2, 2 * 0.5 + 0.5 * 40 * 0.6])
    (gradient,) = torch.autograd.grad(found.sum(), images)
    assert torch.allclose(gradient.sum((2, 3)), torch.tensor([[6.0, 0.0, 0.0], [0.0, 10.0, 0.0]]))  # red is clipped


def test_a_video_counts_by_the_mean_of_some_of_its_frames() -> None:
    videos = torch.linspace(0, 1, 15).view(1, 15, 1, 1, 1).expand(1, 15, 3, 2, 2).clone().requires_grad_()
    with offered(OFFERED, {}):
        found = TensorReward(config(red={}), ["red"], "cpu")(videos, [Prompt(0, "a")])
    (gradient,) = torch.autograd.grad(found.sum(), videos)
    assert [k for k in range(15) if gradient[0, k].any()] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert found.tolist() == pytest.approx([0.5])


@pytest.mark.parametrize(
    ("scorer", "why"),
    [
        ({"jpeg_compressibility": ScorerConfig()}, "its scores have no gradient"),
        ({"image_similarity": ScorerConfig()}, "its scores have no gradient"),
        ({"diversity": ScorerConfig()}, "it compares the images of a group"),
        ({"pickscore": ScorerConfig(normalise="group")}, "normalise=group compares it with the scores of other images"),
        ({"pickscore": ScorerConfig(env={"pip": ["x"]})}, "it runs in its own environment"),
    ],
)
def test_scorers_without_gradient_are_named_with_those_that_have_one(scorer: dict[str, Any], why: str) -> None:
    (name,) = scorer
    message = rf"^reward\.scorers\.{name}: {why}, and this .*clipscore, aesthetic.*weight of others to 0"
    for all_of_them in (True, False):
        with pytest.raises(ConfigError, match=message):
            differentiable_scorers(RewardConfig(scorer), all_of_them)
    both = RewardConfig({"clipscore": ScorerConfig()} | scorer)
    assert name != "pickscore" or differentiable_scorers(both, False) == ["clipscore"]
    watched = RewardConfig({"clipscore": ScorerConfig(), "jpeg_compressibility": ScorerConfig(weight=0)})
    assert differentiable_scorers(watched, True) == ["clipscore"]


def test_the_scorers_of_gerl_that_say_that_they_have_a_gradient_have_one() -> None:
    found = {name for name in SCORERS if scorer_class(name).differentiable}
    on_images = {"pickscore", "clipscore", "hpsv2", "aesthetic", "imagereward"}
    assert found == on_images | {"base_alignment"}  # see docs/combine_rewards.md
    assert on_images == {name for name in SCORERS if scorer_class(name).tensor_scores is not Scorer.tensor_scores}


def test_a_failure_names_its_scorer(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_text(
        "def compute_score(images, prompts, metadata):\n    return 1.0\ncompute_score.takes_tensors = True\n"
    )
    total = TensorReward(RewardConfig({"mine": ScorerConfig(path=str(file))}), ["mine"], "cpu")
    with pytest.raises(RewardError, match=r"^reward\.scorers\.mine: a reward that takes tensors returned float"):
        total(torch.rand(1, 3, 2, 2, requires_grad=True), [Prompt(0, "a")])

"""Advantages and diversity: closed forms, and a twin in plain numpy of GARDO's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from training import rewards, samples_of

from gerl.algorithms import build_algorithm
from gerl.algorithms.core_algos import group_advantages
from gerl.algorithms.shaping import scaled_by_diversity, shaped_by_diversity
from gerl.config import Config, RewardConfig, ScorerConfig, algorithm_config

GROUPS = torch.tensor([3, 3, 3, 3, 8, 8, 8, 8])
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5, 0.5, -0.5, -0.5])
DIVERSITY = torch.tensor([0.1, 0.3, 0.3, 0.1, 0.0, 0.0, 0.0, 0.0])


def test_scaling_raises_good_images_that_are_unlike_the_others_and_leaves_bad_ones() -> None:
    found = scaled_by_diversity(ADVANTAGES, DIVERSITY, GROUPS)
    assert found.tolist() == pytest.approx([0.5, -1.0, 3.0, -2.0, 0.5, 0.5, -0.5, -0.5])  # the second is all alike


def test_scaling_is_that_of_the_authors_code() -> None:
    """(reward - mean) * (1 where it is below 0, else distance / mean distance), prompt by prompt."""
    generator = np.random.default_rng(0)
    rewards, distances = generator.random((5, 6)), 0.1 + generator.random((5, 6))
    expected = []
    for own, far in zip(rewards, distances, strict=True):
        centred = own - own.mean()
        expected.append(centred * np.where(centred < 0, np.ones_like(far), far / far.mean()))
    ids = torch.arange(5).repeat_interleave(6)
    advantages = group_advantages(torch.tensor(rewards).flatten(), ids, std="none")
    found = scaled_by_diversity(advantages, torch.tensor(distances).flatten(), ids)
    np.testing.assert_allclose(found.numpy(), np.concatenate(expected), rtol=1e-12)


def test_a_potential_adds_the_advantage_of_the_diversity_itself() -> None:
    found = shaped_by_diversity(ADVANTAGES, DIVERSITY, GROUPS, 0.5)
    one = 0.1 / (0.1 + 1e-4)
    expected = [1 - one / 2, -1 + one / 2, 2 + one / 2, -2 - one / 2, 0.5, 0.5, -0.5, -0.5]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert found[:4].sum() == pytest.approx(0.0, abs=1e-6)  # nothing is given or taken on average


def test_the_differences_of_a_potential_along_a_trajectory_are_that_of_its_end() -> None:
    """What the key adds is the whole of potential-based shaping: its sum telescopes, whatever the steps between."""
    potentials = torch.rand(8, 5, generator=torch.Generator().manual_seed(2))
    potentials[:, 0] = 0.7  # noise, the same for all
    shaping = (potentials[:, 1:] - potentials[:, :-1]).sum(1)
    torch.testing.assert_close(group_advantages(shaping, GROUPS), group_advantages(potentials[:, -1], GROUPS))


@pytest.mark.parametrize("kind", ["scale", "add"])
def test_algorithms_shape_their_credit_before_the_clip(kind: str) -> None:
    config = Config(
        algorithm=algorithm_config("flow_grpo", diversity=kind, diversity_coef=2.0, advantage_clip=1.2),
        reward=RewardConfig({"ocr": ScorerConfig(), "diversity": ScorerConfig(weight=0)}),
    )
    algorithm = build_algorithm(config)
    given = rewards(samples_of(GROUPS.tolist()), [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0])
    plain = algorithm.credit(given)
    shaped = algorithm.credit(replace(given, diversity=DIVERSITY))
    own = group_advantages(given.totals, GROUPS)
    function = scaled_by_diversity if kind == "scale" else lambda a, d, g: shaped_by_diversity(a, d, g, 2.0)
    torch.testing.assert_close(shaped[:, 0], function(own, DIVERSITY, GROUPS).clamp(-1.2, 1.2))
    assert not torch.equal(plain, shaped)

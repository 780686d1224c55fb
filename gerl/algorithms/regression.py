"""Regression to the images that turned out well: flow matching on the rollout, weighted by a function of the reward.

    L = weight * mean((v - target)^2)

Reward-weighted regression (Peters & Schaal 2007; of diffusion models arXiv 2302.12192) weighs the images of a group by
a softmax of their rewards, the exponentiated advantages of a KL-regularised optimum; best-of-n (RAFT, arXiv 2304.06767)
keeps the best of each group. Weights are never negative: nothing is pushed away, so nothing diverges, but images that
are merely less bad are imitated too.
"""

from dataclasses import replace

import torch

from gerl.algorithms.base import Rewards
from gerl.algorithms.core_algos import best_of_group, regression_weights
from gerl.algorithms.forward_process import ForwardProcess, Noised, per_sample
from gerl.config import Config
from gerl.config.noised_images import BestOfNConfig, RWRConfig, SFTConfig


class _Regression(ForwardProcess):
    def loss(self, s: Noised) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss above; reports the mean `squared_error` without weights."""
        errors = (s.output - s.target) ** 2
        return s.advantages * per_sample(errors), {"squared_error": float(errors.detach().mean())}


class RewardWeightedRegression(_Regression):
    """The credit is `group size * softmax(beta * advantage)`: mean 1 in a group, 0 where all rewards are equal."""

    settings: RWRConfig

    def advantages(self, rewards: Rewards) -> torch.Tensor:
        """`beta` is the inverse temperature."""
        return regression_weights(rewards.totals, rewards.group_ids, temperature=1 / self.settings.beta)


class BestOfN(_Regression):
    """The credit is 1 for the best of each group and 0 for the others, which are not trained on."""

    settings: BestOfNConfig

    def advantages(self, rewards: Rewards) -> torch.Tensor:
        """Nothing where all rewards are equal."""
        return best_of_group(rewards.totals, rewards.group_ids)


def regularising(config: Config) -> Config:
    """The configuration by which the images of `data.regularise` are imitated beside another algorithm."""
    data = replace(config.data, train_on="files", regularise=None)
    return replace(config, algorithm=SFTConfig("sft"), data=data)


class SFT(_Regression):
    """Supervised fine-tuning: the credit is 1 for what a file has as good, and others are not trained on.

    That is the best image of a row with several, and one alone unless it is disliked.
    """

    settings: SFTConfig

    def advantages(self, rewards: Rewards) -> torch.Tensor:
        """1, or NaN for what is left out."""
        ids, totals = rewards.group_ids, rewards.totals
        alone = ids.bincount()[ids] == 1
        good = torch.where(alone, totals > 0, best_of_group(totals, ids) > 0)
        return torch.where(good, 1.0, torch.nan)

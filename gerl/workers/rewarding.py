"""The reward of an algorithm that differentiates it: computed in the process that decodes and trains."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gerl.algorithms import Algorithm
from gerl.algorithms.reward_gradient import RewardGradient
from gerl.config import Config
from gerl.objects import PREFIX, Function, offer
from gerl.rewards.gradients import TensorReward, differentiated


def give_reward(algorithm: Algorithm, device: str, functions: Mapping[str, Function]) -> None:
    """Give `algorithm` its reward, if it differentiates one; `functions`: those of the driver's program, by name.

    Scorers load their models when they are first called.
    """
    if not isinstance(algorithm, RewardGradient):
        return
    offer(functions)
    algorithm.reward = TensorReward(algorithm.config.reward, differentiated(algorithm.config), device)


def with_scorers_found(config: Config) -> Config:
    """`config` for workers that build scorers: files of scorers by paths that are the same in any current directory."""
    if not config.algorithm.differentiates:
        return config
    scorers = {
        name: scorer
        if scorer.path is None or scorer.path.startswith(PREFIX)
        else replace(scorer, path=str(Path(scorer.path).expanduser().absolute()))
        for name, scorer in config.reward.scorers.items()
    }
    return replace(config, reward=replace(config.reward, scorers=scorers))


def without_decoder(algorithm: Algorithm) -> None:
    """Let `algorithm` differentiate something of its latents in place of a reward, if it differentiates one.

    For a model without weights, of which only the denoiser is run.
    """
    if isinstance(algorithm, RewardGradient):
        algorithm.decode = lambda pipe, tape, latents: latents
        algorithm.reward = lambda images, prompts: images.reshape(len(prompts), -1).mean(1)

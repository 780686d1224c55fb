"""Differentiable total reward, computed in the process that decodes the images."""

from __future__ import annotations  # of torch, which a run's driver may lack

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gerl.config import Config, RewardConfig, ScorerConfig
from gerl.errors import ConfigError, RewardError
from gerl.objects import PREFIX
from gerl.protocol import Prompt
from gerl.rewards.scorers import SCORERS, Scorer, build_scorer, known_scorer, scorer_class
from gerl.rewards.total import applies
from gerl.rewards.worker import FRAMES
from gerl.utils.seeding import isolated

if TYPE_CHECKING:
    import torch


def differentiable_scorers(reward: RewardConfig, all_of_them: bool) -> list[str]:
    """Return the weighted scorers with a gradient; raises `ConfigError` if there are none, or not `all_of_them`."""
    weighted = {name: scorer for name, scorer in reward.scorers.items() if scorer.weight}
    without = {name: why for name, scorer in weighted.items() if (why := _why_without_gradient(name, scorer))}
    differentiable = [name for name in weighted if name not in without]
    if without and (all_of_them or not differentiable):
        name, why = next(iter(without.items()))
        raise ConfigError(
            f"reward.scorers.{name}: {why}, and this algorithm differentiates rewards; those of "
            f"{', '.join(_built_in())} and of functions with takes_tensors can be differentiated: set the weight of "
            "others to 0, so they are only watched"
        )
    return differentiable


def scorers_with_gradient(config: Config) -> list[str]:
    """Return the scorers whose gradient is used; raises `ConfigError` if a required one is not differentiable."""
    # next to a policy gradient, which learns from all scorers, non-differentiable ones are allowed
    return differentiable_scorers(config.reward, all_of_them=not config.algorithm.needs.ratio)


def with_absolute_paths(config: Config) -> Config:
    """Return `config` with absolute paths of scorer files, for workers with another current directory."""
    if not config.algorithm.needs.reward_gradient:
        return config
    scorers = {
        name: scorer
        if scorer.path is None or scorer.path.startswith(PREFIX)
        else dataclasses.replace(scorer, path=str(Path(scorer.path).expanduser().absolute()))
        for name, scorer in config.reward.scorers.items()
    }
    return dataclasses.replace(config, reward=dataclasses.replace(config.reward, scorers=scorers))


def _built_in() -> list[str]:
    return [name for name in SCORERS if scorer_class(name).differentiable]


def _why_without_gradient(name: str, config: ScorerConfig) -> str:
    """Return the reason why a scorer is not differentiable; "" if it is."""
    if config.env:
        return "it runs in its own environment"
    if config.normalise != "none":
        return f"normalise={config.normalise} compares it with the scores of other images"
    scorer = known_scorer(name, config)
    if scorer.groupwise:
        return "it compares the images of a group"
    return "" if scorer.differentiable else "its scores have no gradient"


def rescaled_tensor(config: ScorerConfig, score: torch.Tensor) -> torch.Tensor:
    """Return `clip(scale * score + offset)`."""
    value = config.scale * score + config.offset
    return value if config.clip is None else value.clamp(*config.clip)


class TensorReward:
    """Weighted sum of differentiable scores; scorers are built on first use, with paths from this process's folder."""

    def __init__(self, reward: RewardConfig, names: Sequence[str], device: str) -> None:
        self.configs = {name: reward.scorers[name] for name in names}
        self.device = device
        self.scorers: dict[str, Scorer] = {}

    def __call__(
        self, images: torch.Tensor, prompts: Sequence[Prompt], text: Callable[[str], str] = str
    ) -> torch.Tensor:
        """Return totals `[B]` of images or videos in [0, 1]; `text` transforms prompts. 0: no scorer applies."""
        import torch

        totals = torch.zeros(len(images), device=images.device)
        for name, config in self.configs.items():
            rows = [i for i, prompt in enumerate(prompts) if applies(config, prompt)]
            if rows:
                score = self._score(name, images[rows], [prompts[i] for i in rows], text)
                value = config.weight * rescaled_tensor(config, score.float().to(images.device))
                totals = totals.index_add(0, torch.tensor(rows, device=images.device), value)
        return totals

    @isolated()
    def _score(
        self, name: str, images: torch.Tensor, prompts: Sequence[Prompt], text: Callable[[str], str]
    ) -> torch.Tensor:
        import torch

        scorer = self._scorer(name)
        texts, metadata = [text(prompt.text) for prompt in prompts], [prompt.metadata for prompt in prompts]
        try:
            if images.ndim == 4 or scorer.takes_frames:
                return scorer.tensor_scores(images, texts, metadata)
            shown = torch.linspace(0, images.shape[1] - 1, min(images.shape[1], FRAMES)).round().long()
            parts = [scorer.tensor_scores(images[:, k], texts, metadata) for k in shown.tolist()]
        except RewardError as error:
            raise RewardError(f"reward.scorers.{name}: {error}") from error
        return torch.stack(parts).mean(0)

    def _scorer(self, name: str) -> Scorer:
        if name not in self.scorers:
            scorer: Any = build_scorer(name, self.configs[name])
            if getattr(scorer, "device", None) == "auto":
                scorer = dataclasses.replace(scorer, device=self.device)  # the device of the images
            self.scorers[name] = scorer
        return self.scorers[name]

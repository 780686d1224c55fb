"""TreeGRPO (arXiv 2512.08153): BranchGRPO with noise only in a window of steps, and a split at each of them.

Leaf advantages are normalised over all leaves of a prompt; a node has the mean of its leaves (`node_std: leaves`).
The paper weighs a node's children by their densities; here they count equally, since they are sampled from these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gerl.algorithms.planning import sde_window
from gerl.algorithms.trees import BranchGRPO, BranchGRPOConfig
from gerl.config.blocks import SamplingConfig
from gerl.errors import ConfigError


@dataclass(frozen=True)
class TreeGRPOConfig(BranchGRPOConfig):
    """Keys of BranchGRPO, except that `split_steps` may be null."""

    def check_sampling(self, sampling: SamplingConfig) -> None:
        if self.split_steps is None:
            if sampling.window_size is None or sampling.window_per == "group":
                raise ConfigError(
                    "algorithm.split_steps=null: trees split at the steps of a window; set a sampling.window_size "
                    "and window_per=step"
                )
            sampling = replace(sampling, window_size=None, window_schedule="random")  # windows are allowed here
        super().check_sampling(sampling)

    def check_splits(self, sampling: SamplingConfig) -> None:
        if self.split_steps is not None:
            super().check_splits(sampling)


class TreeGRPO(BranchGRPO):
    """TreeGRPO; trees split at the steps of the trainer step's window."""

    names = "tree_grpo"
    settings: TreeGRPOConfig

    def splits(self, step: int) -> list[int]:
        return list(sde_window(self.config, step)) if self.settings.split_steps is None else super().splits(step)

    def stochastic_steps(self, step: int) -> tuple[int, int]:
        splits = self.splits(step)
        return (splits[0], splits[-1] + 1) if self.settings.split_steps is None else super().stochastic_steps(step)

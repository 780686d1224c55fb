"""TempFlow-GRPO (arXiv 2508.04324): every step is credited with the rewards of images that differ in it alone.

From each of `rollout.n` deterministic trajectories of a prompt, `branch_factor` branches leave at every step: one
stochastic step, then deterministic ones to the end. The advantages of step k compare the branches that left at k, so
the reward is that of the step, not of the whole trajectory. Steps with more noise explore more and weigh more:
`timestep_weights: std` gives w_k = std_k / mean(std).

Branches share the denoiser's work before they leave: n trajectories of T steps cost
n (T - 1 + branch_factor T (T - 1) / 2) denoiser evaluations and n branch_factor (T - 1) scored images.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from gerl.algorithms.base import Rewards
from gerl.algorithms.planning import micro_batches
from gerl.algorithms.policy_gradient import PolicyGradient
from gerl.config.policy_gradients import TempFlowGRPOConfig
from gerl.protocol import RolloutTask, Sample, Segment
from gerl.utils.seeding import derive_seed


class TempFlowGRPO(PolicyGradient):
    """One branching point per step; the group of a sample is (prompt, step it branched at)."""

    settings: TempFlowGRPOConfig

    def plan(self, samples: Sequence[Sample], first_id: int = 0) -> list[RolloutTask]:
        size = max(1, self.config.rollout.micro_batch_size // self.settings.branch_factor)
        roots = micro_batches(samples, size)
        return [self._task(first_id + i, chunk) for i, chunk in enumerate(roots)]

    def _task(self, number: int, roots: list[Sample]) -> RolloutTask:
        (first, end), factor = self.config.sampling.steps_range, self.settings.branch_factor
        leaves: list[Sample] = []
        branches: list[Segment] = []
        for k in range(first, end):
            children = [(row, self._leaf(root, k, j)) for row, root in enumerate(roots) for j in range(factor)]
            position = len(leaves)
            leaves += [leaf for _, leaf in children]
            segment = Segment(
                seeds=tuple(leaf.seed for _, leaf in children),
                leaves=tuple(range(position, len(leaves))),
                window=(k,),
                trained=(k,),
                parent=0,
                rows=tuple(row for row, _ in children),
                start=k,
            )
            branches.append(segment)
        trunk = Segment(tuple(r.seed for r in roots), branches[0].leaves[::factor], (), (), stop=end - 1)
        return RolloutTask(number, leaves, (trunk, *branches))

    def _leaf(self, root: Sample, k: int, j: int) -> Sample:
        steps, factor = self.config.sampling.num_inference_steps, self.settings.branch_factor
        index = (root.index * steps + k) * factor + j
        return replace(root, index=index, seed=derive_seed("branch", root.seed, k, j), branch=k)

    def credit(self, rewards: Rewards) -> torch.Tensor:
        branched_at = torch.tensor([sample.branch for sample in rewards.samples])
        steps = torch.arange(self.config.sampling.num_inference_steps)
        return super().credit(rewards).masked_fill(branched_at[:, None] != steps, torch.nan)

"""BranchGRPO (arXiv 2509.06040): rollouts as trees, credit by depth.

Every trajectory splits into `branch_factor` children at each of `split_steps`; the children share all that came
before, its computation included, and draw noise of their own from there on. A node's reward is the mean of its leaves;
its advantage compares it with the nodes of the same depth and prompt, and credits the steps up to the next split. Every
edge of the tree is trained once.

At a split the noise level is `split_noise` times as high, so that the children differ enough for their rewards to. It
is that of the recorded step, mean and log-probability included; the published code widens the noise that it draws there
without telling the likelihood, which makes its ratios wrong.

TreeGRPO (arXiv 2512.08153) is the same with other settings: noise in a window of steps only, which each trainer step
places anew (`split_steps: null`), and a split at each of them; the advantages of the leaves are normalised once, over
all leaves of a prompt, and that of a node is their mean (`node_std: leaves`), so that early edges, a mean of many, have
smaller ones. The paper weighs a node's children by their densities; here they count alike: they are drawn by these
densities, which so would count twice.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from gerl.algorithms.base import Rewards
from gerl.algorithms.core_algos import tree_advantages
from gerl.algorithms.planning import group_ids, micro_batches, sde_window
from gerl.algorithms.policy_gradient import PolicyGradient
from gerl.config.policy_gradients import BranchGRPOConfig
from gerl.protocol import RolloutTask, Sample, Segment
from gerl.utils.seeding import derive_seed


class BranchGRPO(PolicyGradient):
    """`rollout.n` trees per prompt, each with `branch_factor` images to the power of the number of splits."""

    settings: BranchGRPOConfig

    @property
    def leaves_per_tree(self) -> int:
        """Images of a tree."""
        splits = self.settings.split_steps
        depth = self.config.sampling.trained_steps if splits is None else len(splits)
        return int(self.settings.branch_factor**depth)

    def splits(self, step: int) -> list[int]:
        """The steps at which the trees of trainer step `step` split."""
        splits = self.settings.split_steps
        return list(sde_window(self.config, step)) if splits is None else list(splits)

    def plan(self, samples: Sequence[Sample], first_id: int = 0) -> list[RolloutTask]:
        trees = max(1, self.config.rollout.micro_batch_size // self.leaves_per_tree)
        return [self._task(first_id + i, chunk) for i, chunk in enumerate(micro_batches(samples, trees))]

    def _task(self, number: int, roots: list[Sample]) -> RolloutTask:
        factor, splits = self.settings.branch_factor, self.splits(roots[0].step)
        first, end = self.config.sampling.steps_range
        if self.settings.split_steps is None:
            first, end = splits[0], splits[-1] + 1
        ends = [*splits[1:], end]
        window = tuple(range(first, splits[0]))
        per_row, count = self.leaves_per_tree, len(roots)
        seeds = [root.seed for root in roots]
        segments = [Segment(tuple(seeds), tuple(range(0, count * per_row, per_row)), window, window, stop=splits[0])]
        for depth, (start, stop) in enumerate(zip(splits, ends, strict=True)):
            rows = tuple(row for row in range(count) for _ in range(factor))
            seeds = [derive_seed("branch", seeds[row], start, child % factor) for child, row in enumerate(rows)]
            per_row, count = per_row // factor, count * factor
            window = tuple(range(start, stop))
            leaves = tuple(range(0, count * per_row, per_row))
            last = depth == len(splits) - 1
            noise = ((start, self.settings.split_noise * self.config.sampling.noise_level),)
            segment = Segment(tuple(seeds), leaves, window, window, depth, rows, start, None if last else stop, noise)
            segments.append(segment)
        samples = [
            replace(root, index=root.index * self.leaves_per_tree + i, seed=seeds[row * self.leaves_per_tree + i])
            for row, root in enumerate(roots)
            for i in range(self.leaves_per_tree)
        ]
        return RolloutTask(number, samples, tuple(segments))

    def credit(self, rewards: Rewards) -> torch.Tensor:
        settings, steps = self.settings, self.config.sampling.num_inference_steps
        splits = self.splits(rewards.samples[0].step)
        depths = len(splits)
        index = torch.tensor([s.index for s in rewards.samples])
        nodes = torch.stack([index // settings.branch_factor**up for up in range(depths, -1, -1)], dim=1)
        by_depth = tree_advantages(rewards.totals, nodes, group_ids(rewards.samples), std=settings.node_std)
        depth_of = [sum(split <= k for split in splits) for k in range(steps)]
        return by_depth.clamp(-settings.advantage_clip, settings.advantage_clip)[:, depth_of]

"""Credit per step from trees and branches of trajectories: BranchGRPO, TreeGRPO, TempFlow-GRPO and DenseGRPO."""

from __future__ import annotations  # torch is imported lazily

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gerl.algorithms.base import NormalisedConfig, Rewards, group_ids
from gerl.algorithms.common import requires
from gerl.algorithms.core_algos import tree_advantages
from gerl.algorithms.flow_grpo import PolicyGradient, PolicyGradientConfig, TrajectoryClipConfig, WeightedConfig
from gerl.algorithms.lazily import torch
from gerl.algorithms.planning import micro_batches, sde_window
from gerl.config.blocks import NodeStdKind, SamplingConfig
from gerl.config.schema import key, main_key
from gerl.errors import ConfigError
from gerl.protocol import RolloutTask, Sample, Segment
from gerl.utils.seeding import derive_seed


@requires(tree=True, single_images=True)
@dataclass(frozen=True)
class TreeConfig(PolicyGradientConfig, TrajectoryClipConfig):
    """Keys of algorithms whose images share the beginning of a trajectory."""

    branch_factor: int = main_key(2, "children of a node of a tree", low=2)

    def check_sampling(self, sampling: SamplingConfig) -> None:
        super().check_sampling(sampling)
        if sampling.window_size is not None or sampling.compression < 1 or sampling.same_init_noise:
            raise ConfigError(
                f"sampling.window_size, compression and same_init_noise have no effect for {self.name}, whose tree "
                "defines which steps are stochastic; leave them at their defaults"
            )


@dataclass(frozen=True)
class BranchGRPOConfig(TreeConfig):
    """Keys of BranchGRPO."""

    split_steps: list[int] | None = key(
        [0, 2, 4], "steps at which a trajectory splits; null: those of the window, the only ones with noise (tree_grpo)"
    )
    node_std: NodeStdKind = key(
        "depth", "divisor of a node's advantage: the std of the nodes at its depth, or of the leaves (TreeGRPO)"
    )
    split_noise: float = key(
        1.0,
        "factor of sampling.noise_level at the steps at which a trajectory splits, so that its children differ",
        above=0,
    )

    def check(self) -> None:
        super().check()
        if (splits := self.split_steps) is not None and (not splits or sorted(set(splits)) != list(splits)):
            raise ConfigError(f"algorithm.split_steps={list(splits)}: expected increasing step indices")

    def check_sampling(self, sampling: SamplingConfig) -> None:
        super().check_sampling(sampling)
        self.check_splits(sampling)
        if self.split_noise > 1 and sampling.kernel in ("cps", "ddim") and self.split_noise * sampling.noise_level > 1:
            raise ConfigError(
                f"algorithm.split_noise={self.split_noise}: times sampling.noise_level={sampling.noise_level} it "
                f"exceeds 1, the maximum of {sampling.kernel}; lower one"
            )

    def check_splits(self, sampling: SamplingConfig) -> None:
        """Raise `ConfigError` unless trees can split at `split_steps`."""
        last = sampling.steps_range[1] - 1
        if self.split_steps is None:
            raise ConfigError("algorithm.split_steps=null: only algorithm=tree_grpo splits at the steps of a window")
        if self.split_steps[-1] > last:
            raise ConfigError(
                f"algorithm.split_steps={list(self.split_steps)}: the last stochastic step is {last}, split before it"
            )


@dataclass(frozen=True)
class TempFlowGRPOConfig(WeightedConfig, TreeConfig, NormalisedConfig):
    """Keys of TempFlow-GRPO."""


@requires(tree=True)
@dataclass(frozen=True)
class DenseGRPOConfig(WeightedConfig, TrajectoryClipConfig, NormalisedConfig):
    """Keys of DenseGRPO."""

    def check_sampling(self, sampling: SamplingConfig) -> None:
        super().check_sampling(sampling)
        if sampling.compression < 1:
            raise ConfigError(
                f"sampling.compression={sampling.compression}: {self.name} turns the latents of every step into an "
                "image, which must be comparable; use 1"
            )


# --- BranchGRPO (arXiv 2509.06040): rollouts as trees, credit by depth.
#
# A trajectory splits into `branch_factor` children at each of `split_steps`; the children share the prefix, computed
# once, and sample their own noise from there on. A node's reward is the mean of its leaves; its advantage compares it
# with the nodes of the same depth and prompt, and credits the steps up to the next split. Every edge is trained once.
# The published code raises only the sampled noise at a split, which makes its ratios wrong; here mean and
# log-probability have the noise level of `split_noise` too.


class BranchGRPO(PolicyGradient):
    """`rollout.n` trees per prompt, each with `branch_factor` images to the power of the number of splits."""

    names = "branch_grpo"
    settings: BranchGRPOConfig

    @property
    def leaves_per_tree(self) -> int:
        """Number of images per tree."""
        return int(self.settings.branch_factor ** len(self.splits(1)))

    def splits(self, step: int) -> list[int]:
        """Return the steps at which the trees of trainer step `step` split."""
        del step
        return list(self.settings.split_steps or ())

    def stochastic_steps(self, step: int) -> tuple[int, int]:
        """Return the range of stochastic steps of trainer step `step`: first and end."""
        del step
        return self.config.sampling.steps_range

    def plan(self, samples: Sequence[Sample], first_id: int = 0) -> list[RolloutTask]:
        trees = max(1, self.config.rollout.micro_batch_size // self.leaves_per_tree)
        return [self._task(first_id + i, chunk) for i, chunk in enumerate(micro_batches(samples, trees))]

    def _task(self, number: int, roots: list[Sample]) -> RolloutTask:
        factor, splits = self.settings.branch_factor, self.splits(roots[0].step)
        first, end = self.stochastic_steps(roots[0].step)
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


# --- TempFlow-GRPO (arXiv 2508.04324): a step is credited with rewards of images that differ only in this step.
#
# Each of `rollout.n` deterministic trajectories of a prompt has `branch_factor` branches at every step: one stochastic
# step, then deterministic ones. The advantages of step k compare the branches at k. n trajectories of T steps cost
# n (T - 1 + branch_factor T (T - 1) / 2) denoiser evaluations and n branch_factor (T - 1) scored images.


class TempFlowGRPO(PolicyGradient):
    """One branching point per step; a group is (prompt, branching step)."""

    names = "tempflow_grpo"
    settings: TempFlowGRPOConfig

    def plan(self, samples: Sequence[Sample], first_id: int = 0) -> list[RolloutTask]:
        size = max(1, self.config.rollout.micro_batch_size // self.settings.branch_factor)
        return [self._task(first_id + i, chunk) for i, chunk in enumerate(micro_batches(samples, size))]

    def _task(self, number: int, roots: list[Sample]) -> RolloutTask:
        (first, end), factor = self.config.sampling.steps_range, self.settings.branch_factor
        leaves: list[Sample] = []
        branches: list[Segment] = []
        for k in range(first, end):
            children = [(row, self._leaf(root, k, j)) for row, root in enumerate(roots) for j in range(factor)]
            places = tuple(range(len(leaves), len(leaves) + len(children)))
            rows, seeds = tuple(row for row, _ in children), tuple(leaf.seed for _, leaf in children)
            branches.append(Segment(seeds, places, (k,), (k,), parent=0, rows=rows, start=k))
            leaves += [leaf for _, leaf in children]
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


# --- DenseGRPO (arXiv 2601.20218): a step is credited with its change of the predicted reward.
#
# The value of latents is the reward of the image that the deterministic sampler makes from them, `V(x_k) = R(ode(x_k))`
# (equations 8 and 9), and the credit of the step from `x_k` to `x_{k+1}` is its gain, `dR_k = V(x_{k+1}) - V(x_k)`
# (equation 7), normalised over the images of a prompt, per step (equation 10). Since `V(x_k)` is fixed before the noise
# of step k is sampled, subtracting it keeps the expected gradient.
#
# The trajectory is a trunk with a deterministic branch before each stochastic step, and a last one, which yields the
# trajectory's own image. Without a window T steps cost T + T (T - 1) / 2 denoiser evaluations and T scored images.
# Gains are differences of rewards on one scale, so all images of a prompt are one group.


class DenseGRPO(PolicyGradient):
    """`rollout.n` trajectories per prompt; the images of each, in the order of the steps, have consecutive `index`."""

    names = "dense_grpo"
    settings: DenseGRPOConfig

    @property
    def images_per_trajectory(self) -> int:
        """Number of images per trajectory: one more than its stochastic steps."""
        return self.config.sampling.trained_steps + 1

    def plan(self, samples: Sequence[Sample], first_id: int = 0) -> list[RolloutTask]:
        return [self._branched(task) for task in super().plan(samples, first_id)]

    def _branched(self, task: RolloutTask) -> RolloutTask:
        """Return `task` with its only segment as the trunk of scored branches."""
        (trunk,), roots = task.segments, task.samples
        # not before the end of the range, whose steps have weights relative to each other
        forks = (*trunk.window, self.config.sampling.steps_range[1])
        images = [
            replace(root, index=root.index * len(forks) + j, seed=derive_seed("branch", root.seed, k))
            for j, k in enumerate(forks)
            for root in roots
        ]
        rows = tuple(range(len(roots)))
        branches = []
        for j, k in enumerate(forks):
            places = tuple(range(j * len(roots), (j + 1) * len(roots)))
            seeds = tuple(images[i].seed for i in places)
            branches.append(Segment(seeds, places, (), (), parent=0, rows=rows, start=k))
        return replace(task, samples=images, segments=(replace(trunk, stop=forks[-1]), *branches))

    def credit(self, rewards: Rewards) -> torch.Tensor:
        count, clip = self.images_per_trajectory, self.settings.advantage_clip
        index = torch.tensor([sample.index for sample in rewards.samples])
        # one row per trajectory: groups are dropped as a whole, so its images are complete
        pairs, row = torch.stack([rewards.group_ids, index // count], 1).unique(dim=0, return_inverse=True)
        order = (row * count + index % count).argsort()
        totals = rewards.totals[order].view(len(pairs), count)
        by_scorer = rewards.by_scorer[order].view(len(pairs), count, -1)
        samples = [rewards.samples[i] for i in order[::count].tolist()]
        first = torch.tensor([sde_window(self.config, s.step, s.group)[0] for s in samples])
        credit = torch.full((len(pairs), self.config.sampling.num_inference_steps), torch.nan)
        for j in range(count - 1):
            gains, of_scorers = totals[:, j + 1] - totals[:, j], by_scorer[:, j + 1] - by_scorer[:, j]
            advantages = self.advantages(Rewards(samples, gains, of_scorers, rewards.weights))
            credit[torch.arange(len(pairs)), first + j] = advantages.clamp(-clip, clip)
        return credit[row]

"""DenseGRPO (arXiv 2601.20218): every step is credited with what it changed in the reward of the image to come.

The value of latents is the reward of the image that the deterministic sampler makes of them, `V(x_k) = R(ode(x_k))`
(equations 8 and 9), and the credit of the step from `x_k` to `x_{k+1}` is its gain, `dR_k = V(x_{k+1}) - V(x_k)`
(equation 7), in place of the reward of the whole trajectory. That is the advantage of one step with `V` as the critic:
since `V(x_k)` is fixed before the noise of step k is drawn, subtracting it leaves the expected gradient as it is and
takes away what the initial noise and the steps before have done to the reward. Gains are normalised over the images of
a prompt, each step by itself (equation 10). Those of a trajectory add up to its reward minus that of the image which
its first latents would have become without noise.

The trajectory is a trunk, from which a deterministic branch leaves before each stochastic step, and a last one when
there are none to come, whose image is the trajectory's own. Branches share the denoiser's work up to and including the
step at which they leave: without a window a trajectory of T steps costs T + T (T - 1) / 2 denoiser evaluations and T
scored images.

Gains are differences of rewards, which must be on one scale, so all images of a prompt are one group: one that has no
reward takes the group with it, and `normalise` of a scorer treats them alike.

The paper's noise level per step, calibrated before training until gains are as often positive as negative, is not
built: the level it starts from, and the numbers of images and of iterations, are not given.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from gerl.algorithms.base import Rewards
from gerl.algorithms.policy_gradient import PolicyGradient
from gerl.config.policy_gradients import DenseGRPOConfig
from gerl.protocol import RolloutTask, Sample, Segment
from gerl.utils.seeding import derive_seed


class DenseGRPO(PolicyGradient):
    """`rollout.n` trajectories per prompt, each with the images of the latents between which its trained steps lead.

    The images of a trajectory have consecutive `index`, in the order of the steps, and all of them its credit.
    """

    settings: DenseGRPOConfig

    @property
    def images_per_trajectory(self) -> int:
        """One more than there are stochastic steps."""
        return self.config.sampling.trained_steps + 1

    def plan(self, samples: Sequence[Sample], first_id: int = 0) -> list[RolloutTask]:
        return [self._branched(task) for task in super().plan(samples, first_id)]

    def _branched(self, task: RolloutTask) -> RolloutTask:
        """`task`, whose only segment becomes the trunk of the branches that are scored."""
        (trunk,), roots = task.segments, task.samples
        # not sooner than the end of the range: its steps have weights relative to each other
        forks = (*trunk.window, self.config.sampling.steps_range[1])
        images = [
            replace(root, index=root.index * len(forks) + j, seed=derive_seed("branch", root.seed, k))
            for j, k in enumerate(forks)
            for root in roots
        ]
        rows = tuple(range(len(roots)))
        branches = [
            Segment(
                seeds=tuple(images[j * len(roots) + r].seed for r in rows),
                leaves=tuple(j * len(roots) + r for r in rows),
                window=(),
                trained=(),
                parent=0,
                rows=rows,
                start=k,
            )
            for j, k in enumerate(forks)
        ]
        return replace(task, samples=images, segments=(replace(trunk, stop=forks[-1]), *branches))

    def credit(self, rewards: Rewards) -> torch.Tensor:
        count, clip = self.images_per_trajectory, self.settings.advantage_clip
        index = torch.tensor([sample.index for sample in rewards.samples])
        # one row per trajectory: its images are complete, since a group is dropped as a whole
        found, row = torch.stack([rewards.group_ids, index // count], 1).unique(dim=0, return_inverse=True)
        order = (row * count + index % count).argsort()
        totals = rewards.totals[order].view(len(found), count)
        by_scorer = rewards.by_scorer[order].view(len(found), count, -1)
        samples = [rewards.samples[i] for i in order[::count].tolist()]
        first = torch.tensor([self.window(sample)[0] for sample in samples])
        credit = torch.full((len(found), self.config.sampling.num_inference_steps), torch.nan)
        for j in range(count - 1):
            gains, of_scorers = totals[:, j + 1] - totals[:, j], by_scorer[:, j + 1] - by_scorer[:, j]
            advantages = self.advantages(Rewards(samples, gains, of_scorers, rewards.weights))
            credit[torch.arange(len(found)), first + j] = advantages.clamp(-clip, clip)
        return credit[row]

"""What the tests of the algorithms' training share: a tiny policy, its rollouts, gradients of them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import tiny
import torch

from gerl.algorithms import Algorithm, Batch, Rewards, build_algorithm, count_pairs, row_credit
from gerl.algorithms.base import Pooled
from gerl.algorithms.forward_process import Noised
from gerl.algorithms.planning import plan_samples
from gerl.algorithms.reward_gradient import RewardGradient
from gerl.config import (
    ActorConfig,
    Config,
    DataConfig,
    RolloutConfig,
    SamplingConfig,
    ValidationConfig,
    algorithm_config,
)
from gerl.engine import Tape
from gerl.engine.transitions import FlowRule
from gerl.model.lora import add_lora
from gerl.model.policy import EMA, Policy
from gerl.model.teachers import TeacherModel, add_fake, fake_parameters
from gerl.protocol import Prompt, RolloutTask, Sample, UpdateStats
from gerl.workers.actor import Actor
from gerl.workers.rollout import Rollout

# what an algorithm refuses to do without
DRAWN: dict[str, dict[str, Any]] = {
    "neighbor_grpo": {"kernel": "ode", "same_init_noise": True, "init_noise_spread": 0.3}
}
GRADIENTS = "refl draft draft_lv drtune srpo leapalign flowbp_sparse flowbp_bridge flowbp_lagrange".split()
DRAWN |= {name: {"kernel": "ode"} for name in GRADIENTS}
PROMPTS = [Prompt(0, "a red fox"), Prompt(1, "blue")]


def new_policy(name: str = "sd3", perturbed: bool = True, blocks: int = 1) -> Policy:
    """A tiny pipeline with a LoRA; the same weights every time. `blocks` are those of SD3's denoiser."""
    case = tiny.CASES[name]
    pipe = tiny.build(replace(case, build=partial(tiny.sd3, blocks)) if name == "sd3" else case)
    denoiser = tiny.denoiser_of(pipe)
    lora = {f"denoiser.{key}": p for key, p in add_lora(denoiser, 4, 4.0, None, seed=0).items()}
    if perturbed:
        torch.manual_seed(2)
        for p in lora.values():
            p.data.normal_(0, 0.2)
    return Policy(pipe, {"transformer": denoiser}, lora, EMA(lora, 0.9))


def on_device(policy: Policy) -> Policy:
    """The same policy with all its modules on the pretended device."""
    import pretended  # only here: it needs a newer torch than gerl

    (name, denoiser), *_ = policy.denoisers.items()
    for component in policy.pipe.components.values():
        if isinstance(component, torch.nn.Module):
            pretended.movable(component)
    policy.pipe.to(pretended.DEVICE)
    lora = {f"denoiser.{key}": p for key, p in denoiser.named_parameters() if p.requires_grad}
    return Policy(policy.pipe, {name: denoiser}, lora, EMA(lora, 0.9))


def config(
    name: str,
    n: int = 4,
    guidance: float = 1.0,
    steps: int = 4,
    micro: int | None = None,
    actor_micro: int | None = None,
    **keys: Any,
) -> Config:
    """A configuration for the tiny Stable Diffusion 3; `sampling_*` keys belong to that block."""
    sampling = {k.removeprefix("sampling_"): v for k, v in keys.items() if k.startswith("sampling_")}
    own = {k: v for k, v in keys.items() if not k.startswith("sampling_")}
    if name == "opd":
        own = {"teachers": [{"guidance": 3.0}], **own}  # another one than a guided rollout's
    fixed = {"height": 16, "width": 16, "num_inference_steps": steps, "guidance_scale": guidance}
    fixed["call"] = {"max_sequence_length": 8}
    return Config(
        algorithm=algorithm_config(name, **own),
        sampling=SamplingConfig(**{**fixed, **DRAWN.get(name, {}), **sampling}),  # type: ignore[arg-type]
        rollout=RolloutConfig(prompts_per_step=2, n=n, micro_batch_size=micro or 2 * n),
        actor=ActorConfig(micro_batch_size=actor_micro),
        data=DataConfig(train_on="files" if name == "sft" else "rollouts"),
    )


class Training:
    """An algorithm on a policy, and one rollout of two groups."""

    def __init__(self, c: Config, policy: Policy | None = None, samples: Sequence[Sample] | None = None) -> None:
        self.config, self.policy = c, policy or new_policy()
        if not self.policy.teachers:
            self.policy.teachers = [TeacherModel(teacher) for teacher in c.algorithm.needs.teachers]
        if c.algorithm.needs.imitation:
            denoisers = self.policy.denoisers
            device = next(iter(self.policy.trained.values())).device
            fake = fake_parameters(denoisers) or add_fake(denoisers, 2.0, str(device), 0)
            self.policy = replace(self.policy, trained=self.policy.trained | fake)
        self.algorithm: Algorithm = build_algorithm(c)
        if isinstance(self.algorithm, RewardGradient):
            self.algorithm.reward = lambda images, prompts: images.flatten(1).mean(1)
        self.actor = Actor(self.policy, c.actor, self.algorithm, total_updates=10)
        self.rollout = Rollout(self.policy, c.sampling, ValidationConfig())
        drawn = samples or plan_samples(c, PROMPTS, 1, 0)
        found = [(task, *self.rollout.generate(task, self.algorithm)) for task in self.algorithm.plan(drawn)]
        self.tasks = [(task, pixels, trajectory.tapes) for task, pixels, trajectory in found]

    def batches(
        self, task: RolloutTask, tapes: Sequence[Tape], credit: torch.Tensor, pooled: Pooled | None = None
    ) -> list[Batch]:
        return [
            Batch(tape, [task.samples[i] for i in segment.leaves], segment.trained, row_credit(segment, credit), pooled)
            for segment, tape in zip(task.segments, tapes, strict=True)
            if segment.trained
        ]

    def gradient(
        self,
        credit: torch.Tensor,
        pairs: int | None = None,
        algorithm: Algorithm | None = None,
        pooled: Pooled | None = None,
    ) -> tuple[torch.Tensor, UpdateStats]:
        """The gradient for the credit `[B, T]` of all samples, and what was reported.

        `pooled`: of all workers, where this is one of several.
        """
        parts = credit.split([len(task.samples) for task, _, _ in self.tasks])
        given = list(zip(self.tasks, parts, strict=True))
        pairs = pairs or count_pairs((task, part) for (task, _, _), part in given)
        self.actor.algorithm = algorithm or self.algorithm
        if pooled is None and self.actor.algorithm.pools:
            pooled = self.pooled(credit)
        self.actor.optimizer.zero_grad(set_to_none=True)
        found = [b for (task, _, tapes), part in given for b in self.batches(task, tapes, part, pooled)]
        stats = self.actor.accumulate(found, pairs)
        return self.actor.flat_gradient(), stats

    def pooled(self, credit: torch.Tensor) -> Pooled:
        """What the samples contribute to their groups."""
        parts = zip(self.tasks, credit.split([len(task.samples) for task, _, _ in self.tasks]), strict=True)
        batches = [b for (task, _, tapes), part in parts for b in self.batches(task, tapes, part)]
        return self.actor.pool(batches)


def noised(
    output: torch.Tensor,
    target: torch.Tensor,
    credit: torch.Tensor,
    groups: torch.Tensor | None = None,
    old: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
) -> Noised:
    """Rows `[B, ...]` at noise level 0.6 whose clean latents are 0, so that the noise is the target; one group."""
    groups = torch.zeros(len(target), dtype=torch.long) if groups is None else groups
    rule, x0 = FlowRule(0.6, 0.4, 0.4, 0.0), torch.zeros_like(target)
    return Noised(rule, x0, target, 0.6 * target, output, old, reference, credit, groups)


def samples_of(groups: Sequence[int]) -> list[Sample]:
    """A sample of each of these groups."""
    return [Sample(Prompt(group, "a"), i, i, 1) for i, group in enumerate(groups)]


def rewards(samples: Sequence[Sample], totals: Sequence[float]) -> Rewards:
    """Those of a single scorer."""
    values = torch.tensor(totals)
    return Rewards(samples, values, values[:, None], torch.ones(1))


def chain_credit(values: Sequence[float], steps: int = 4) -> torch.Tensor:
    """One advantage per sample for all its steps."""
    return torch.tensor(list(values))[:, None].expand(-1, steps)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference relative to the norm of the second."""
    return float((a - b).norm() / b.norm())

"""The actor worker: tapes and credit in, a LoRA update out."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from diffusers.optimization import get_scheduler

from gerl.algorithms import Algorithm, Batch
from gerl.algorithms.core_algos import decay_at
from gerl.config import ActorConfig
from gerl.model.ema import EMA
from gerl.model.loading import Policy
from gerl.protocol import StepResult, UpdateStats


class Actor:
    """Accumulates the algorithm's gradient of a whole update, then takes one optimizer step."""

    def __init__(self, policy: Policy, config: ActorConfig, algorithm: Algorithm, total_updates: int) -> None:
        self.policy, self.config, self.algorithm = policy, config, algorithm
        self.parameters = list(policy.lora.values())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.lr, betas=(config.betas[0], config.betas[1]), weight_decay=config.weight_decay
        )
        name = "constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule
        self.schedule = get_scheduler(
            name, self.optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=total_updates
        )
        if algorithm.old_decay is not None:
            policy.old = EMA(policy.lora, partial(decay_at, algorithm.old_decay))
        if algorithm.rollout_decay is not None:
            policy.sampler = EMA(policy.lora, partial(decay_at, algorithm.rollout_decay))

    def accumulate(self, batches: Sequence[Batch], num_pairs: int) -> UpdateStats:
        """Add the gradient of `batches`, as a part of an update of `num_pairs` (sample, timestep) pairs in all.

        Dividing by the whole update's size makes the gradient the same for any micro-batch size and any number of
        workers.
        """
        stats = UpdateStats()
        for batch in batches:
            for rows in self.algorithm.micro_batches(batch):
                stats += self.algorithm.train(self.policy, batch, rows, num_pairs)
        return stats

    def flat_gradient(self) -> torch.Tensor:
        """All gradients in one vector, zeros where there is none."""
        return torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in self.parameters])

    def set_flat_gradient(self, flat: torch.Tensor) -> None:
        """Replace all gradients by those in `flat`."""
        for p, values in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            p.grad = values.view_as(p).to(p.device, copy=True)

    def step(self) -> StepResult:
        """Clip the gradient and take an optimizer step; a non-finite gradient is dropped instead."""
        lr = self.schedule.get_last_lr()[0]
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm))
        finite = norm == norm and norm != float("inf")
        if finite:
            self.optimizer.step()
            self.policy.ema.update()
            self.policy.version += 1
            self.policy.old_is_current = False
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(norm, lr, finite)

    def finish_step(self, step: int) -> None:
        """End of trainer step `step`: the old policies follow the trained one."""
        policy = self.policy
        if policy.old is not None and self.algorithm.renews_old(step):
            policy.old_is_current |= policy.old.next_decay == 0
            policy.old.update()
        if policy.sampler is not None:
            policy.sampler.update()

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors and numbers from which `load_state` continues exactly."""
        tensors = {f"lora/{name}": p.detach() for name, p in self.policy.lora.items()}
        averages = self.policy.averages()
        for kind, average in averages.items():
            tensors |= {f"{kind}/{name}": value for name, value in average.average.items()}
        for name, p in self.policy.lora.items():
            tensors |= {f"optimizer/{key}/{name}": value for key, value in self.optimizer.state.get(p, {}).items()}
        numbers = {
            "policy_version": self.policy.version,
            "averages": {kind: average.updates for kind, average in averages.items()},
            "old_is_current": self.policy.old_is_current,
            "lr_schedule": {k: v for k, v in self.schedule.state_dict().items() if k != "lr_lambdas"},
        }
        return tensors, numbers

    @torch.no_grad()
    def load_state(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        for name, p in self.policy.lora.items():
            p.copy_(tensors[f"lora/{name}"])
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"optimizer/{key}/{name}" in tensors]
            # AdamW keeps its step counter on the CPU
            restored = {k: tensors[f"optimizer/{k}/{name}"].to("cpu" if k == "step" else p.device) for k in keys}
            if restored:
                self.optimizer.state[p] = {k: v.clone() for k, v in restored.items()}
        for kind, average in self.policy.averages().items():
            average.load({name: tensors[f"{kind}/{name}"] for name in self.policy.lora}, numbers["averages"][kind])
        self.policy.old_is_current = numbers["old_is_current"]
        self.policy.version = numbers["policy_version"]
        # the lambdas are functions, made anew by the constructor
        self.schedule.load_state_dict({**numbers["lr_schedule"], "lr_lambdas": [None]})
        for group, lr in zip(self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True):
            group["lr"] = lr

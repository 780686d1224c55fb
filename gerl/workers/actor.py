"""The actor worker: tapes and advantages in, a LoRA update out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.optimization import get_scheduler

from gerl.config import ActorConfig, AlgorithmConfig
from gerl.protocol import StepResult, UpdateStats
from gerl.trainer.ppo.core_algos import clipped_policy_loss, gaussian_kl
from gerl.utils.lora import lora_disabled
from gerl.workers.diffusers_model import ReplayedStep, Tape, replay
from gerl.workers.diffusers_model.loading import Policy


@dataclass(frozen=True)
class Batch:
    """A tape and the advantages of its samples; a sample whose advantage is None is not trained on."""

    tape: Tape
    advantages: Sequence[float | None]  # [B]


class Actor:
    """Accumulates the policy gradient of a whole update, then takes one optimizer step."""

    def __init__(self, policy: Policy, config: ActorConfig, algorithm: AlgorithmConfig, total_updates: int) -> None:
        self.policy, self.config, self.algorithm = policy, config, algorithm
        self.parameters = list(policy.lora.values())
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        name = "constant_with_warmup" if config.lr_schedule == "constant" else config.lr_schedule
        self.schedule = get_scheduler(
            name, self.optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=total_updates
        )

    def accumulate(self, batches: Sequence[Batch], num_pairs: int) -> UpdateStats:
        """Add the gradient of `batches`, as a part of an update of `num_pairs` (sample, timestep) pairs in all.

        Dividing by the whole update's size makes the gradient the same for any micro-batch size and any number of
        workers.
        """
        stats = UpdateStats()
        for batch in batches:
            for index in self._micro_batches(batch):
                stats += self._micro_batch(batch, index, num_pairs)
        return stats

    def _micro_batches(self, batch: Batch) -> Iterator[list[int]]:
        kept = [i for i, advantage in enumerate(batch.advantages) if advantage is not None]
        size = self.config.micro_batch_size or len(batch.advantages)
        for start in range(0, len(kept), size):
            yield kept[start : start + size]

    def _micro_batch(self, batch: Batch, index: list[int], num_pairs: int) -> UpdateStats:
        tape, pipe = batch.tape, self.policy.pipe
        samples = None if len(index) == tape.batch_size else index
        device = tape.steps[0].x.device
        advantages = torch.tensor([batch.advantages[i] for i in index], dtype=torch.float32, device=device)
        stats = UpdateStats()
        reference: dict[int, torch.Tensor] = {}
        if self.algorithm.kl_coef > 0:

            def keep(k: int, step: ReplayedStep) -> None:
                reference[k] = step.mean

            with lora_disabled(list(self.policy.denoisers.values())):
                replay(pipe, tape, keep, index=samples, grad=False)

        def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
            nonlocal stats
            assert step.recorded_log_prob is not None
            loss, metrics = clipped_policy_loss(
                step.log_prob, step.recorded_log_prob, advantages, self.algorithm.clip_low, self.algorithm.clip_high
            )
            kl = gaussian_kl(step.mean, reference[k], step.std).mean() if reference else torch.zeros((), device=device)
            total = loss + self.algorithm.kl_coef * kl
            stats += _sums(len(index), float(total.detach()), float(kl.detach()), metrics)
            return total * (len(index) / num_pairs)

        replay(pipe, tape, on_step, index=samples)
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
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(norm, lr, finite)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors and numbers from which `load_state` continues exactly."""
        tensors = {f"lora/{name}": p.detach() for name, p in self.policy.lora.items()}
        tensors |= {f"ema/{name}": value for name, value in self.policy.ema.average.items()}
        for name, p in self.policy.lora.items():
            tensors |= {f"optimizer/{key}/{name}": value for key, value in self.optimizer.state.get(p, {}).items()}
        numbers = {
            "policy_version": self.policy.version,
            "ema_updates": self.policy.ema.updates,
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
        average = {name: tensors[f"ema/{name}"] for name in self.policy.lora}
        self.policy.ema.load(average, numbers["ema_updates"])
        self.policy.version = numbers["policy_version"]
        # the lambdas are functions, made anew by the constructor
        self.schedule.load_state_dict({**numbers["lr_schedule"], "lr_lambdas": [None]})
        for group, lr in zip(self.optimizer.param_groups, self.schedule.get_last_lr(), strict=True):
            group["lr"] = lr


def _sums(samples: int, loss: float, kl: float, metrics: dict[str, float]) -> UpdateStats:
    return UpdateStats(
        pairs=samples,
        loss=loss * samples,
        kl=kl * samples,
        clip_low=metrics["clip_fraction_low"] * samples,
        clip_high=metrics["clip_fraction_high"] * samples,
        log_ratio=metrics["log_ratio_mean"] * samples,
        ratio_deviation=metrics["ratio_deviation"],
    )

"""GRPO over the tokens of a language model that rewrites prompts (`episode.roles.NAME.kind=text`).

The tokens of a rewrite are its actions (DeepSeekMath, arXiv 2402.03300). Their log-probabilities are recorded by one
forward pass over the finished text and replayed by the same pass with gradient, so the ratio is exactly 1 on policy.
"""

from __future__ import annotations  # torch is imported lazily

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from gerl.algorithms.base import Algorithm, Batch, Measures, summed
from gerl.algorithms.core_algos import clipped_policy_loss, ratio_spread
from gerl.algorithms.flow_grpo import FlowGRPOConfig
from gerl.algorithms.lazily import Policy, StepGradients, torch
from gerl.protocol import RolloutTask, Sample, Segment, UpdateStats

if TYPE_CHECKING:
    from gerl.model.language import LanguageModel

TRAINED = (0,)  # a text is one action: all its tokens share the credit


@dataclass(frozen=True)
class TextTape:
    """Texts sampled for one request: the request's tokens `[P]`, the texts' tokens, and their log-probabilities.

    `mask`: tokens that were sampled; those after the end of a text, and all of a text that was kept, are padding.
    """

    prompt: torch.Tensor  # [P] int64
    tokens: torch.Tensor  # [B, L] int64
    mask: torch.Tensor  # [B, L] bool
    log_probs: torch.Tensor  # [B, L]


class TokenGRPO(Algorithm):
    """Clipped surrogate on the tokens of texts, averaged over the tokens of each text, and a KL to the base model."""

    settings: FlowGRPOConfig
    kl_on_all = True

    def plan(self, samples: Sequence[Sample], first_id: int = 0) -> list[RolloutTask]:
        """Split `samples` into micro-batches of one prompt each."""
        size, tasks = self.config.rollout.micro_batch_size, list[RolloutTask]()
        for _, members in groupby(samples, key=lambda sample: sample.group):
            group = list(members)
            for part in (group[i : i + size] for i in range(0, len(group), size)):
                segment = Segment(tuple(s.seed for s in part), tuple(range(len(part))), (), TRAINED)
                tasks.append(RolloutTask(first_id + len(tasks), part, (segment,)))
        return tasks

    def train(
        self, policy: Policy, batch: Batch, rows: list[int], num_pairs: float, meter: StepGradients[Any] | None = None
    ) -> UpdateStats:
        model: LanguageModel = policy.pipe
        tape: TextTape = batch.tape  # type: ignore[assignment]
        # all rows in one pass, as they were recorded, unless memory is to be saved: the ratio is then exactly 1
        index = list(range(len(tape.tokens))) if self.config.actor.micro_batch_size is None else rows
        places = [index.index(row) for row in rows]
        if meter is not None:
            meter.begin(TRAINED[0])
        now = model.log_probs(tape.prompt, tape.tokens[index])[places]
        before, mask = tape.log_probs[rows], tape.mask[rows]
        counts = mask.sum(1).clamp(min=1)
        credit = batch.credit[rows, TRAINED[0]].to(now)
        low, high = self.settings.clip_low, self.settings.clip_high
        difference = torch.where(mask, now - before, 0.0)
        flat, advantages = difference.flatten(), credit.repeat_interleave(mask.shape[1])
        losses, metrics = clipped_policy_loss(flat, torch.zeros_like(flat), advantages, low, high)
        off = difference.detach().expm1()
        metrics = metrics | ratio_spread(flat, ((off > high) | (off < -low)).flatten())
        deviation = metrics.pop("ratio_deviation")
        by_text = (losses.view_as(difference) * mask).sum(1) / counts
        total = by_text.mean()
        if self.kl_coef > 0:
            with torch.no_grad(), policy.base():
                reference = model.log_probs(tape.prompt, tape.tokens[index])[places]
            gap = torch.where(mask, reference - now, 0.0)
            kl = ((gap.exp() - gap - 1) * mask).sum(1) / counts
            total = total + self.kl_coef * self.weighted_kl(kl, batch, rows).mean()
            metrics |= {"kl": kl.detach().mean()}
        (total * (len(rows) / num_pairs)).backward()
        means = {"loss": total.detach(), "tokens": counts.float().mean()} | metrics
        return summed([Measures(len(rows), means=means, deviation=deviation)])

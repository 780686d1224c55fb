"""A loaded policy, in what the driver wants to know of it."""

import inspect

import torch

from gerl.model.loading import lora_lines, replaced_scheduler
from gerl.model.policy import Policy
from gerl.protocol import ModelFacts
from gerl.utils.condition_images import COLUMNS


def facts_of(policy: Policy, path: str, notes: list[str]) -> ModelFacts:
    """The facts of a policy that was loaded from `path`; `notes`: what was logged by it."""
    return ModelFacts(
        type(policy.pipe).__name__,
        list(policy.denoisers),
        sum(p.numel() for p in policy.trained.values()),
        any(d.dtype != torch.float32 for d in policy.denoisers.values()),
        policy.fingerprint,
        notes,
        replaced_scheduler(policy.pipe, path),
        [] if policy.whole else lora_lines(policy.pipe, policy.denoisers),
        [name for name in COLUMNS if name in inspect.signature(type(policy.pipe).__call__).parameters],
    )

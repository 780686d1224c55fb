"""A loaded policy, in what the driver wants to know of it."""

import inspect

import torch

from gerl.config import Config
from gerl.model.call import unguided
from gerl.model.distilled import distilled_warnings, guidance_notes
from gerl.model.loading import lora_lines, replaced_scheduler
from gerl.model.policy import Policy
from gerl.protocol import ModelFacts


def facts_of(policy: Policy, config: Config, notes: list[str]) -> ModelFacts:
    """The facts of a policy that was loaded for `config`; `notes`: what was logged by it."""
    unheeded = unguided(type(policy.pipe), config.sampling)
    replaced = replaced_scheduler(policy.pipe, config.model.path)
    warnings = distilled_warnings(config, replaced or type(policy.pipe.scheduler).__name__)
    return ModelFacts(
        type(policy.pipe).__name__,
        list(policy.denoisers),
        sum(p.numel() for p in policy.trained.values()),
        any(d.dtype != torch.float32 for d in policy.denoisers.values()),
        policy.fingerprint,
        notes + guidance_notes(policy.denoisers),
        replaced,
        [] if policy.whole else lora_lines(policy.pipe, policy.denoisers),
        list(inspect.signature(type(policy.pipe).__call__).parameters),
        warnings + ([] if unheeded is None else [unheeded]),
    )

"""What the tests of the update share: an actor with a tiny policy, and steps with given gradients."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from training import new_policy

from gerl.algorithms import build_algorithm
from gerl.config import ActorConfig, Config, GuardConfig, SamplingConfig, algorithm_config
from gerl.model.policy import Policy
from gerl.protocol import StepResult
from gerl.workers.actor import Actor


def new_actor(
    policy: Policy | None = None,
    kl_coef: float = 0.0,
    total_updates: int = 10,
    clip: float = 0.2,
    judge: Literal["base", "off"] = "off",
    **config: Any,
) -> Actor:
    own = {name: config.pop(name) for name in list(config) if name.startswith("kl_")}
    algorithm = algorithm_config(kl_coef=kl_coef, clip_low=clip, clip_high=clip, clip_dimensions=None, **own)
    whole = Config(
        algorithm=algorithm,
        actor=ActorConfig(**config),
        sampling=SamplingConfig(num_inference_steps=4),
        guard=GuardConfig(judge=judge),
    )
    return Actor(policy or new_policy(), whole.actor, build_algorithm(whole), total_updates)


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def weights(actor: Actor) -> torch.Tensor:
    return flat(actor.parameters)


def stepped(actor: Actor, gradient: torch.Tensor) -> StepResult:
    """An optimizer step with this gradient."""
    actor.set_flat_gradient(gradient)
    return actor.step()

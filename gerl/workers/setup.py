"""Loading of a worker's policy, and checks before its weights are loaded."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from gerl.algorithms import Algorithm
from gerl.algorithms.reward_gradient import RewardGradient
from gerl.algorithms.srpo import SRPO
from gerl.cluster.gpus import start_device
from gerl.config import Config
from gerl.config.call_arguments import idle_shift, scaled_lora
from gerl.engine.hidden_states import HiddenStates
from gerl.errors import ConfigError
from gerl.model.latents import ImageLatents, latents_folder
from gerl.model.loading import (
    check_model,
    check_teachers,
    component_arguments,
    load_policy,
    load_teachers,
    lora_lines,
    precision,
    replaced_scheduler,
)
from gerl.model.placement import QuantizedRollout, check_attention, check_quantized_rollout
from gerl.model.policy import EMA, Policy
from gerl.model.prompts import PromptCache, folder_of, unguided
from gerl.model.quantization import check_quantisation
from gerl.model.schedulers import distilled_warnings, guidance_notes
from gerl.model.teachers import add_fake
from gerl.objects import Function, offer
from gerl.protocol import ModelFacts
from gerl.rewards.gradients import TensorReward, scorers_with_gradient
from gerl.utils.files import reason
from gerl.workers.actor import check_optimizer
from gerl.workers.base_judge import BaseJudge, LatentReward
from gerl.workers.collective import Ranks
from gerl.workers.rollout import Rollout


def check_start(config: Config, device: str) -> None:
    """Fetch the model of `config`; raises `ModelError`, `ConfigError` or `ClusterError` if `device` cannot train it."""
    start_device(device)
    check_quantisation(config.model, device)
    if config.model.attention is not None:
        check_attention(config.model.attention, device, precision(config.model, device))
    if config.rollout.quantize != "none":
        check_quantized_rollout(config.rollout.quantize, device, precision(config.model, device))
    check_model(config.model, config.sampling, config.cluster.context)
    if taught_by := config.algorithm.needs.teachers:
        check_teachers(taught_by, config.model, config.sampling)
    check_optimizer(config.actor, device)
    if config.data.cache is not None:
        folder = Path(config.data.cache).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"data.cache={config.data.cache}: {reason(error)}; give a folder, or use null") from None


def encoded_folder(config: Config, device: str) -> Path | None:
    """Return the folder inside `data.cache` for text encoder outputs; None without a cache."""
    cache, model = config.data.cache, config.model
    return None if cache is None else folder_of(Path(cache), model, precision(model, device))


def load_worker_policy(config: Config, device: str, ranks: Ranks | None) -> Policy:
    """Load the policy on `device`; sharded text encoders must be called equally often, so prompts are not cached."""
    model, data = config.model, config.data
    mesh = None if ranks is None or model.shard == "none" else ranks.mesh
    context = None if ranks is None else ranks.context
    keeps = mesh is None or model.shard != "all"
    late = keeps and data.cache is not None and model.offload == "none"
    taught_by = config.algorithm.needs.teachers
    policy = load_policy(model, config.actor.ema_decay, device, config.trainer.seed, mesh, context, late, taught_by)
    load_teachers(policy, model, device, mesh)
    if scale := config.algorithm.needs.imitation:
        policy.trained |= add_fake(policy.denoisers, scale, device, config.trainer.seed)
        policy.ema = EMA(policy.trained, config.actor.ema_decay)
    if config.rollout.quantize != "none":
        policy.quantized = QuantizedRollout(policy.denoisers, config.rollout.quantize)
    if keeps:
        PromptCache(data.cache_gb, encoded_folder(config, device)).attach(policy.pipe)
        for pipe in {id(t.pipe): t.pipe for t in policy.teachers if t.pipe is not None}.values():
            PromptCache(data.cache_gb).attach(pipe)
    if data.train_on == "files" or data.regularise is not None:
        folder = None if data.cache is None else latents_folder(Path(data.cache), model, precision(model, device))
        policy.images = ImageLatents(data.cache_gb, folder)
    return policy


def model_facts(policy: Policy, config: Config, notes: list[str]) -> ModelFacts:
    """Describe a loaded policy to the driver; `notes`: messages logged while it was loaded."""
    call = config.sampling.call
    unheeded = [unguided(type(policy.pipe), config.sampling), scaled_lora(call)]
    unheeded.append(idle_shift(call, policy.pipe.scheduler.config))
    replaced = replaced_scheduler(policy.pipe, config.model)
    warnings = distilled_warnings(config, replaced or type(policy.pipe.scheduler).__name__)
    return ModelFacts(
        type(policy.pipe).__name__,
        [name for name in policy.denoisers if name not in policy.frozen],
        sum(p.numel() for p in policy.trained.values()),
        any(d.dtype != torch.float32 for d in policy.denoisers.values()),
        policy.fingerprint,
        notes + guidance_notes(policy.denoisers),
        replaced,
        [] if policy.whole else lora_lines(policy.pipe, policy.denoisers),
        list(inspect.signature(type(policy.pipe).__call__).parameters),
        warnings + [sentence for sentence in unheeded if sentence is not None],
        component_arguments(policy.pipe, config.model),
    )


def give_reward(
    algorithm: Algorithm, device: str, functions: Mapping[str, Function], judge: BaseJudge | None = None
) -> None:
    """Set the differentiable reward of `algorithm`, if needed; `functions`: scorers of the driver by name."""
    if not isinstance(algorithm, RewardGradient):
        return
    offer(functions)
    reward, names = algorithm.config.reward, scorers_with_gradient(algorithm.config)
    by_latents = reward.by_latents("training")
    if judge is not None and by_latents is not None and by_latents.weight:
        if isinstance(algorithm, SRPO):
            raise ConfigError(
                "reward.scorers.base_alignment: srpo compares prompts with words before them, which this scorer does "
                "not support; use another algorithm, such as draft"
            )
        algorithm.latent_reward = LatentReward(judge, by_latents)
        names = [name for name in names if reward.scorers[name] is not by_latents]
        algorithm.decodes = bool(names)
    algorithm.reward = TensorReward(reward, names, device)


def observe_states(rollout: Rollout, config: Config) -> None:
    """Let `rollout` record what a critic sees of the latents."""
    # with cluster.context each rank has the hidden states of its own tokens
    hidden = config.critic.features != "latents" and config.cluster.context == 1
    rollout.plan = replace(rollout.plan, observer=HiddenStates(rollout.policy.denoisers.values(), hidden))


def without_decoder(algorithm: Algorithm) -> None:
    """Let `algorithm` differentiate a function of the latents instead of a reward, for a model without weights."""
    if isinstance(algorithm, RewardGradient):
        algorithm.decode = lambda pipe, tape, latents: latents
        algorithm.reward = lambda images, prompts: images.reshape(len(prompts), -1).mean(1)

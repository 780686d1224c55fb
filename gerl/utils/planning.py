"""What a trainer step draws: a pure function of the configuration and the step, the same on any number of workers."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from gerl.config import Config
from gerl.protocol import Prompt, RolloutTask, Sample
from gerl.utils.dataset import PromptSchedule
from gerl.utils.seeding import derive_seed


def sde_window(config: Config, step: int) -> tuple[int, ...]:
    """The stochastic steps of trainer step `step`: the same for all groups, drawn from the run seed."""
    first, end = config.sampling.steps_range
    size = config.sampling.trained_steps
    generator = torch.Generator().manual_seed(derive_seed("window", config.trainer.seed, step))
    start = first + int(torch.randint(end - first - size + 1, (), generator=generator))
    return tuple(range(start, start + size))


def plan_step(config: Config, prompts: Sequence[Prompt], step: int, policy_version: int) -> list[RolloutTask]:
    """The micro-batches of trainer step `step` (from 1); the last batch of an epoch may be smaller."""
    schedule = prompt_schedule(config, len(prompts))
    samples = [
        Sample(prompts[i], k, derive_seed("sample", config.trainer.seed, step, prompts[i].id, k), step, policy_version)
        for i in schedule.batch(step - 1)
        for k in range(config.rollout.n)
    ]
    window = sde_window(config, step)
    chunks = _chunks(samples, config.rollout.micro_batch_size)
    return [RolloutTask(i, chunk, window) for i, chunk in enumerate(chunks)]


def plan_validation(config: Config, prompts: Sequence[Prompt], step: int) -> list[list[Sample]]:
    """Micro-batches of one image per held-out prompt, with noise that depends on the prompt only."""
    samples = [Sample(p, 0, derive_seed("validation", config.validation.seed, p.id), step) for p in prompts]
    return _chunks(samples, config.validation.micro_batch_size)


def prompt_schedule(config: Config, count: int) -> PromptSchedule:
    """The order in which the run visits `count` prompts."""
    return PromptSchedule(count, config.rollout.prompts_per_step, config.data.shuffle, config.trainer.seed)


def update_parts(tasks: Sequence[RolloutTask], updates: int) -> list[list[RolloutTask]]:
    """`tasks` in `updates` runs of nearly equal length, one per optimizer step; empty ones are left out."""
    bounds = [round(i * len(tasks) / updates) for i in range(updates + 1)]
    parts = [list(tasks[a:b]) for a, b in pairwise(bounds)]
    return [part for part in parts if part]


def _chunks(samples: list[Sample], size: int) -> list[list[Sample]]:
    return [samples[i : i + size] for i in range(0, len(samples), size)]

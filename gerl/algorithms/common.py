"""Helpers shared by several algorithms: declared needs, values of replayed steps, noise and means."""

from __future__ import annotations  # torch is imported lazily

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from gerl.algorithms.lazily import DiffusionPipeline, ReplayedStep, Tape, engine, torch, transitions
from gerl.config.algorithms import AlgorithmConfig
from gerl.utils.seeding import derive_seed, sample_generators

T = TypeVar("T")
C = TypeVar("C", bound=AlgorithmConfig)


def requires(**fields: Any) -> Callable[[type[C]], type[C]]:
    """Decorate a configuration class: its algorithm has these `fields` of `Needs` in addition to those of its bases."""

    def declared(cls: type[C]) -> type[C]:
        cls.needs = property(lambda self: replace(super(cls, self).needs, **fields))  # type: ignore[assignment]
        return cls

    return declared


def replayed(pipe: DiffusionPipeline, tape: Tape, value: Callable[[ReplayedStep], T], **options: Any) -> dict[int, T]:
    """Return `value` of each replayed step, by step, without gradient; `options`: of `engine.replay`."""
    values: dict[int, T] = {}
    engine.replay(pipe, tape, lambda k, step: values.update({k: value(step)}), grad=False, **options)
    return values


def predicted(step: ReplayedStep) -> torch.Tensor:
    """Return the clean latents that a step predicts."""
    return step.rule.clean(step.x, step.model_output)


def per_sample(values: torch.Tensor) -> torch.Tensor:
    """Return the mean over all non-batch dimensions, [B, ...] -> [B]."""
    return values.flatten(1).mean(1)


def sampled_noise(like: torch.Tensor, seeds: Sequence[tuple[int | str, ...]]) -> torch.Tensor:
    """Return standard normal noise as `like` [B, ...], with a seed per sample, independent of the micro-batch."""
    shape = (len(like) // len(seeds), *like.shape[1:])
    noise = [torch.randn(shape, generator=g) for g in sample_generators([derive_seed(*seed) for seed in seeds])]
    return transitions.on_device(torch.cat(noise), like.device)

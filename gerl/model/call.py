"""Arguments of a pipeline call, built from the configuration."""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gerl.config import SamplingConfig
from gerl.engine.transitions import FLOW, family
from gerl.errors import ModelError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, SchedulerMixin


def pipeline_call(
    pipe: DiffusionPipeline, sampling: SamplingConfig, prompts: list[str], **overrides: object
) -> dict[str, object]:
    """Return the pipeline's keyword arguments for `prompts`. Raises `ModelError` for an argument it does not accept."""
    given = _arguments(sampling, **overrides)
    _check_prompt(pipe)
    _check_names(type(pipe), given)
    for name in given:  # not every pipeline repeats a single text for all prompts
        if "prompt" in name and isinstance(given[name], str):
            given[name] = [given[name]] * len(prompts)
    return {"prompt": prompts, "output_type": "np", **given}


def check_arguments(kind: type, sampling: SamplingConfig, **overrides: object) -> None:
    """Raise `ModelError` if pipelines of class `kind` do not accept an argument of a rollout or of `overrides`."""
    _check_names(kind, _arguments(sampling, sigmas=training_sigmas(sampling), **overrides))


def _arguments(sampling: SamplingConfig, **overrides: object) -> dict[str, object]:
    """Return the arguments of a call except prompts and output type."""
    arguments: dict[str, object] = {
        "height": sampling.height,
        "width": sampling.width,
        "guidance_scale": sampling.guidance_scale,
        "num_inference_steps": sampling.num_inference_steps,
        **sampling.call,
    }
    arguments |= {name: value for name, value in overrides.items() if value is not None}
    return {name: value for name, value in arguments.items() if value is not None}


def _check_prompt(pipe: DiffusionPipeline) -> None:
    """Raise `ModelError` if the pipeline takes no prompt, naming the pipelines inside it."""
    from diffusers import DiffusionPipeline  # imported lazily: the driver of a run does not need diffusers

    if "prompt" in inspect.signature(type(pipe).__call__).parameters:
        return
    inner = {name: part for name, part in vars(pipe).items() if isinstance(part, DiffusionPipeline)}
    parts = [f"{name} ({type(part).__name__})" for name, part in inner.items()]
    others = f"it consists of the pipelines {', '.join(parts)}; train one of them that does"
    remedy = others if parts else "choose a pipeline that does"
    raise ModelError(f"{type(pipe).__name__} takes no argument 'prompt', which gerl needs to pass a prompt: {remedy}")


def _check_names(kind: type, names: Iterable[str]) -> None:
    accepted = inspect.signature(kind.__call__).parameters
    unknown = [name for name in names if name not in accepted]
    if unknown:
        sigmas = unknown[0] == "sigmas"
        remedy = "set sampling.sigmas=scheduler" if sigmas else "remove it from sampling or sampling.call"
        raise ModelError(f"{kind.__name__} takes no argument {unknown[0]!r}: {remedy}")


def unguided(kind: type, sampling: SamplingConfig) -> str | None:
    """Return a warning if true guidance has a scale above 1 but lacks the negative prompt it needs, else None."""
    parameters, name = inspect.signature(kind.__call__).parameters, "true_cfg_scale"
    if name not in parameters or any(sampling.call.get(k) is not None for k in parameters if "negative_prompt" in k):
        return None
    scale = sampling.call.get(name, parameters[name].default)
    if not isinstance(scale, int | float) or scale <= 1:
        return None
    given = f"sampling.call.{name}={scale:g}" if name in sampling.call else f"the {name} of {kind.__name__}, {scale:g},"
    return (
        f"{given} has no effect without a negative prompt, so images are sampled without guidance: add "
        f"sampling.call.negative_prompt=' ' for guidance, or sampling.call.{name}=1"
    )


def training_sigmas(sampling: SamplingConfig) -> list[float] | None:
    """Return the noise levels of `sampling.sigmas` before the scheduler's shift; None selects the scheduler's own."""
    n = sampling.num_inference_steps
    return None if sampling.sigmas == "scheduler" else [1 - i * (1 - 1 / n) / (n - 1) for i in range(n)]


def check_sigmas(scheduler: SchedulerMixin, sampling: SamplingConfig) -> None:
    """Raise `ModelError` if `scheduler` does not support the noise levels of `sampling.sigmas`."""
    if training_sigmas(sampling) is not None and family(scheduler) not in (*FLOW, "flow_map"):
        raise ModelError(
            f"sampling.sigmas={sampling.sigmas} requires flow matching, whose noise levels are in [0, 1]: this "
            f"pipeline has the scheduler {type(scheduler).__name__}, use sampling.sigmas=scheduler"
        )

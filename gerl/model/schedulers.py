"""Replacement of schedulers without a transition kernel, and notes on distilled models."""

import copy
import inspect
import logging
import re
from collections.abc import Mapping

import diffusers
import numpy as np
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    DDIMScheduler,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FlowMatchLCMScheduler,
    LCMScheduler,
    SchedulerMixin,
    SCMScheduler,
    TCDScheduler,
)
from diffusers.schedulers.scheduling_utils import SchedulerOutput

from gerl.config import Config
from gerl.engine.transitions import FLOW, Timestep, Transitions, family
from gerl.errors import ModelError
from gerl.utils.files import first_line

# --- Replacements with a transition kernel: Euler for flow matching and EDM, otherwise DDIM

logger = logging.getLogger(__name__)
KEPT = (
    FlowMatchEulerDiscreteScheduler, DDIMScheduler, SCMScheduler, LCMScheduler, TCDScheduler, EDMEulerScheduler,
    *(getattr(diffusers, name) for name in ["FlowMapEulerDiscreteScheduler"] if hasattr(diffusers, name)),
)  # fmt: skip
NOISE_SCHEDULE = (
    "num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "prediction_type",
)  # fmt: skip
SPACING = ("timestep_spacing", "steps_offset")  # attributes that hold the position in the schedule
# arguments of a general solver's `set_timesteps`; schedulers with more are specific to a pipeline, and are kept
USUAL = {"num_inference_steps", "device", "sigmas", "mu", "timesteps"}
SHOWN = 10  # schedule steps shown in the log
UNEVEN = 28  # steps that do not divide a usual number of timesteps


def trainable_scheduler(scheduler: SchedulerMixin) -> SchedulerMixin:
    """Return `scheduler`, or one with a transition kernel and the same noise levels, with a log message.

    Flow matching with another solver than Euler (UniPC, DPM++, Heun ...) becomes `SameSigmas`, EDM's DPM++ its Euler
    steps, and other schedulers DDIM on the same noise schedule; those of consistency models are kept. Raises
    `ModelError` if none of these fits.
    """
    if isinstance(scheduler, KEPT):
        return scheduler
    try:
        return _substitute(scheduler)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError) as error:
        name, kind = (
            type(scheduler).__name__,
            "FlowMatchEulerDiscreteScheduler" if is_flow(scheduler) else "DDIMScheduler",
        )
        raise ModelError(
            f"the pipeline's scheduler {name} makes no schedule with its settings ({type(error).__name__}: "
            f"{first_line(error)}): set pipe.scheduler to {kind}.from_config(pipe.scheduler.config)"
        ) from error


def is_flow(scheduler: SchedulerMixin) -> bool:
    """Whether `scheduler` is one of flow matching, of a model that predicts velocities."""
    return isinstance(scheduler, FlowMatchHeunDiscreteScheduler) or family(scheduler) in FLOW


def _substitute(scheduler: SchedulerMixin) -> SchedulerMixin:
    if isinstance(scheduler, FlowMatchLCMScheduler):
        if scheduler.config.get("scale_factors"):
            raise ModelError(
                f"the pipeline's scheduler {type(scheduler).__name__} enlarges the latents between steps "
                f"(scale_factors={scheduler.config.scale_factors}), but a transition keeps their size: set "
                "scale_factors=None"
            )
        return scheduler
    if isinstance(scheduler, EDMDPMSolverMultistepScheduler):
        return _edm_euler(scheduler)
    if not is_flow(scheduler):
        return _ddim(scheduler)
    if _arguments(scheduler) <= USUAL:
        return SameSigmas.of(scheduler)
    if scheduler.config.get("scheduler_type") == "unipc":  # Helios: the same steps in rollout and validation
        scheduler.register_to_config(scheduler_type="euler")
        logger.info("%s takes Euler steps, which have a transition kernel, unlike UniPC's", type(scheduler).__name__)
    return scheduler


class SameSigmas(FlowMatchEulerDiscreteScheduler):
    """Euler steps along another flow-matching scheduler's noise levels, which no configuration of Euler's gives."""

    original: SchedulerMixin
    init_noise_sigma = 1.0

    @classmethod
    def of(cls, original: SchedulerMixin) -> "SameSigmas":
        """Return a substitute for `original`. Raises `ModelError` if its noise levels do not fit flow matching."""
        name, config = type(original).__name__, original.config
        accepted = inspect.signature(FlowMatchEulerDiscreteScheduler.__init__).parameters
        shift = config.get("flow_shift", config.get("shift", 1.0))
        scheduler = cls(**{key: value for key, value in config.items() if key in accepted} | {"shift": shift})
        # pipelines read attributes of the configuration
        scheduler.register_to_config(**{key: value for key, value in config.items() if key not in scheduler.config})
        scheduler.original = original
        shown, note = "a dynamic shift", ""
        if not config.get("use_dynamic_shifting", False):
            scheduler.set_timesteps(SHOWN)
            levels, last = scheduler.sigmas.tolist(), float(original.sigmas[-1])
            if not 1.001 > levels[0] > levels[-1] >= 0:
                raise ModelError(
                    f"the pipeline's scheduler {name} has noise levels from {levels[0]:.4g} to {levels[-1]:.4g}, "
                    "those of flow matching go from 1 to 0: set use_flow_sigmas in its configuration"
                )
            shown = f"shift {shift:g}; in {SHOWN} steps {' '.join(f'{level:.3f}' for level in levels)}"
            note = "" if last == levels[-1] else f", except that the last step, which stayed at {last:.3f}, goes to 0"
        logger.info("replaced %s by FlowMatchEulerDiscreteScheduler with the same sigmas (%s)%s", name, shown, note)
        return scheduler

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        """Take the noise levels of the original scheduler; given `sigmas` or `timesteps` are shifted as by Euler's."""
        super().set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)
        if sigmas is not None or timesteps is not None:
            return
        dynamic = {"mu": mu} if self.config.use_dynamic_shifting and "mu" in _arguments(self.original) else {}
        self.original.set_timesteps(num_inference_steps, device=device, **dynamic)
        levels = self.original.sigmas.tolist()
        # Heun has each twice, for its two evaluations
        distinct = [i for i, level in enumerate(levels[:-1]) if i == 0 or level != levels[i - 1]]
        # some solvers end with a step of length 0, which would leave the last level's noise in the image
        last = levels[-1] if levels[-1] < levels[distinct[-1]] else 0.0
        self.timesteps = self.original.timesteps[distinct].to(device, torch.float32)  # Euler rejects integers
        self.sigmas = torch.tensor([*(levels[i] for i in distinct), last], device=device)
        self.num_inference_steps = len(distinct)

    def step(
        self, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor, *args: object, **kwargs: object
    ) -> SchedulerOutput | tuple[torch.Tensor, ...]:
        """Take Euler's step, also at integer timesteps, which some pipelines pass and Euler refuses."""
        return super().step(model_output, torch.as_tensor(timestep).to(torch.float32), sample, *args, **kwargs)

    def scale_model_input(self, sample: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Return `sample`: flow matching has no input scale, but pipelines for other solvers call this method."""
        return sample

    def add_noise(self, original_samples: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Return `(1 - s) x0 + s eps`, `scale_noise` under the name used by other solvers."""
        return self.scale_noise(original_samples, timesteps, noise)


def _arguments(scheduler: SchedulerMixin) -> set[str]:
    return set(inspect.signature(scheduler.set_timesteps).parameters)


def _edm_euler(scheduler: EDMDPMSolverMultistepScheduler) -> EDMEulerScheduler:
    """Return a scheduler with Euler steps along the noise levels of `scheduler`."""
    euler, name = EDMEulerScheduler.from_config(scheduler.config), type(scheduler).__name__
    for kind in (euler, scheduler):
        kind.set_timesteps(SHOWN)
    if not torch.allclose(euler.sigmas, scheduler.sigmas.float(), rtol=1e-5):
        raise ModelError(f"the pipeline's scheduler {name} has other noise levels than EDMEulerScheduler")
    logger.info("replaced %s by EDMEulerScheduler with the same sigmas, which has a transition kernel", name)
    return euler


def _ddim(scheduler: SchedulerMixin) -> DDIMScheduler:
    """Return DDIM on the noise schedule of `scheduler`."""
    config, alphas = scheduler.config, getattr(scheduler, "alphas_cumprod", None)  # EDM schedulers have no alphas
    if config.get("prediction_type") not in ("epsilon", "v_prediction", "sample") or alphas is None:
        raise ModelError(f"the pipeline's scheduler {type(scheduler).__name__} has no transition kernel")
    sampled = copy.deepcopy(scheduler)
    sampled.set_timesteps(SHOWN)
    if sampled.timesteps[0] < sampled.timesteps[-1]:
        raise ModelError(
            f"the pipeline's scheduler {type(scheduler).__name__} goes from images to noise: set pipe.scheduler to "
            "DDIMScheduler.from_config(pipe.scheduler.config)"
        )
    # `from_config` does not carry over defaults of the other class, and DDIM clips the predicted sample by default,
    # which would ruin latents of schedulers that never clip
    shared = {name: config[name] for name in (*NOISE_SCHEDULE, *SPACING) if name in config}
    # schedulers that never clip, independent of their configuration
    shifted = isinstance(scheduler, CogVideoXDDIMScheduler | CogVideoXDPMScheduler)
    clips = config.get("clip_sample", False) and not shifted
    ddim = DDIMScheduler.from_config(config, clip_sample=clips, **shared)
    if shifted:  # snr_shift_scale changes the alphas, and DDIM does not have it
        ddim.alphas_cumprod = alphas.float()
        ddim.final_alpha_cumprod = ddim.final_alpha_cumprod if config.set_alpha_to_one else ddim.alphas_cumprod[0]
    # with zero terminal SNR other schedulers keep a last level of 2^-24, DDIM has 0
    if not torch.allclose(ddim.alphas_cumprod, alphas.float(), rtol=0, atol=1e-7):
        raise ModelError(f"the pipeline's scheduler {type(scheduler).__name__} has another noise schedule than DDIM")
    if hasattr(scheduler, "sigmas") and not all(_same_levels(scheduler, ddim, steps) for steps in (SHOWN, UNEVEN)):
        return SameLevels.of(scheduler, ddim)
    logger.info("replaced %s by DDIMScheduler, which has a transition kernel", type(scheduler).__name__)
    _note_spacing(scheduler, ddim)
    return ddim


class SameLevels(DDIMScheduler):
    """DDIM steps along another scheduler's noise levels, from each to the next.

    DDIM itself steps by a constant number of timesteps, whatever the next one is.
    """

    original: SchedulerMixin
    alphas_of_steps: torch.Tensor  # [steps + 1] fp32 on the CPU

    @classmethod
    def of(cls, original: SchedulerMixin, ddim: DDIMScheduler) -> "SameLevels":
        """Return `ddim` with the levels of `original`."""
        scheduler = cls.from_config(ddim.config)
        scheduler.alphas_cumprod, scheduler.original = ddim.alphas_cumprod, original
        scheduler.set_timesteps(SHOWN)
        levels = " ".join(f"{sigma:.3g}" for sigma in _distinct_levels(original)[1])
        logger.info(
            "replaced %s by DDIMScheduler with the same noise levels (in %d steps sigma %s)",
            type(original).__name__, SHOWN, levels,
        )  # fmt: skip
        return scheduler

    def set_timesteps(self, num_inference_steps: int, device: str | torch.device | None = None) -> None:
        """Take timesteps and noise levels of the original scheduler."""
        self.original.set_timesteps(num_inference_steps)
        timesteps, levels = _distinct_levels(self.original)
        if len(set(timesteps)) < len(timesteps):  # rounded to equal integers, but a step is known by its timestep
            trained = ((1 - self.alphas_cumprod) / self.alphas_cumprod).log().double() / 2
            timesteps = np.interp(np.log(levels[:-1]), trained.numpy(), np.arange(len(trained))).tolist()
        self.timesteps = torch.tensor(timesteps, device=device)
        self.alphas_of_steps = 1 / (1 + torch.tensor(levels, dtype=torch.float64) ** 2).float()
        self.num_inference_steps = len(timesteps)
        first = float(self.original.init_noise_sigma)  # of latents that are not scaled, if it is above 1
        self.init_noise_sigma = first / (1 + levels[0] ** 2) ** 0.5 if first > 1 else first

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Timestep,
        sample: torch.Tensor,
        *args: object,
        return_dict: bool = True,
        **kwargs: object,
    ) -> SchedulerOutput | tuple[torch.Tensor, ...]:
        """Take the step without noise."""
        del args, kwargs
        following = Transitions("ode", noise_level=0.0).next_rule(self, timestep, False)
        x_next = following.mean(sample, model_output).to(sample.dtype)
        return SchedulerOutput(prev_sample=x_next) if return_dict else (x_next,)

    def add_noise(self, original_samples: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Return `sqrt(alpha_bar) x0 + sqrt(1 - alpha_bar) noise` at `timesteps`, some of the schedule's."""
        steps = (self.timesteps[None].cpu() == timesteps.flatten()[:, None].cpu()).int().argmax(1)
        alphas = self.alphas_of_steps[steps].to(original_samples)
        alphas = alphas.view(-1, *[1] * (original_samples.ndim - 1))
        return alphas.sqrt() * original_samples + (1 - alphas).sqrt() * noise


def _distinct_levels(scheduler: SchedulerMixin) -> tuple[list[float], list[float]]:
    """Return the timesteps of `scheduler` and its noise levels sigma, one more, without repeated evaluations."""
    times, levels = scheduler.timesteps.tolist(), scheduler.sigmas.tolist()
    # solvers of second order have each level but the first twice, the second time at its own timestep
    chosen = [i for i in range(len(times)) if levels[i] not in (0, levels[i + 1]) or i + 1 == len(times)]
    return [float(times[i]) for i in chosen], [*(levels[i] for i in chosen), levels[-1]]


def _same_levels(scheduler: SchedulerMixin, ddim: DDIMScheduler, steps: int) -> bool:
    """Whether `ddim` calls the model at the levels of `scheduler`, and its steps write those of the next calls."""
    theirs, ours = (copy.deepcopy(kind) for kind in (scheduler, ddim))
    for kind in (theirs, ours):
        kind.set_timesteps(steps)
    timesteps, levels = _distinct_levels(theirs)
    actual = [int(t) for t in ours.timesteps]
    alphas = [float(ours.alphas_cumprod[t]) if t >= 0 else float(ours.final_alpha_cumprod)
              for t in (step - ours.config.num_train_timesteps // steps for step in actual)]  # fmt: skip
    written = [((1 - alpha) / alpha) ** 0.5 for alpha in alphas]
    return timesteps == actual and all(abs(a - b) <= 1e-3 * b for a, b in zip(written, levels[1:], strict=True))


def _note_spacing(scheduler: SchedulerMixin, ddim: DDIMScheduler) -> None:
    """Warn if the steps are at other timesteps than the pipeline's scheduler would take (with Karras sigmas, say)."""
    theirs, ours = (copy.deepcopy(kind) for kind in (scheduler, ddim))
    for kind in (theirs, ours):
        kind.set_timesteps(SHOWN)
    # higher-order solvers evaluate some timesteps twice
    expected, actual = (list(dict.fromkeys(round(float(t)) for t in kind.timesteps)) for kind in (theirs, ours))
    if len(expected) != len(actual) or any(abs(a - b) > 1 for a, b in zip(expected, actual, strict=True)):
        logger.warning(
            "in %d steps %s samples at the timesteps %s, and DDIMScheduler at %s: images differ from those of the "
            "plain pipeline; set a DDIMScheduler there to get the same ones",
            SHOWN, type(scheduler).__name__, " ".join(map(str, expected)), " ".join(map(str, actual)),
        )  # fmt: skip


SUBSTITUTES = (SameSigmas, SameLevels)


# --- Distilled models: few-step models, and models with guidance as an input

# schedulers used only by few-step models: consistency models and flow maps
SCHEDULERS = ("LCMScheduler", "TCDScheduler", "SCMScheduler", "FlowMatchLCMScheduler", "FlowMapEulerDiscreteScheduler")
# names of few-step models; FLUX.2 klein is one, but not its base, nor de-distilled models
NAMES = re.compile(
    r"(?<![a-z])(turbo|schnell|lightning|lcm|tcd|dmd2?|tdm|sprint|hyper-?(?:sd|flux)|(?<!\d)[1-8]-?steps?"
    r"|(?<!de-)(?<!guidance-)(?<!cfg-)distill(?:ed|ation)?|klein(?!-base))(?![a-z])",
    re.IGNORECASE,
)
EXCESS = ("flow_sde", "dance_sde")  # kernels that leave more noise in late steps than the schedule has


def few_steps(path: str, scheduler: str) -> str | None:
    """Return why the pipeline of `path` counts as a few-step model, or None; `scheduler`: its original class."""
    if scheduler in SCHEDULERS:
        return f"it comes with {scheduler}"
    match = NAMES.search(re.split(r"[/\\]", path.rstrip("/\\"))[-1].replace("_", "-"))
    return f"its name has {match[0]!r}" if match else None


def distilled_warnings(config: Config, scheduler: str) -> list[str]:
    """Return warnings about harmful ways to train a few-step model; `scheduler`: as for `few_steps`."""
    algorithm, path = config.algorithm, config.model.path
    reason = few_steps(path, scheduler)
    if reason is None:
        return []
    model = f"{path} is a few-step model ({reason})"
    if not algorithm.needs.trajectory:
        return [
            f"{model}: algorithm.name={algorithm.name} trains on noised images, which blurs such models "
            "(docs/models.md); use a policy gradient on its own steps, such as algorithm=few_step_grpo, or train "
            "the model that it was distilled from"
        ]
    if algorithm.needs.ratio and config.sampling.kernel in EXCESS:
        return [
            f"{model}: sampling.kernel={config.sampling.kernel} leaves more noise in its steps than it was trained "
            "with; use kernel=cps"
        ]
    return []


def guidance_notes(denoisers: Mapping[str, torch.nn.Module]) -> list[str]:
    """Return a note for each denoiser that takes the guidance scale as an input."""
    taken = [name for name, d in denoisers.items() if getattr(d, "config", {}).get("guidance_embeds")]
    return [f"{name} is guidance-distilled (one pass per step): algorithm.cfg has no effect" for name in taken]

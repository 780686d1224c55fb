"""From a diffusers scheduler to the transition of its next step: its rule, and the solver of deterministic steps.

Families of schedulers are known here, models are not.
"""

from __future__ import annotations  # of diffusers, which the driver of a run does without

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

import torch

from gerl.config.blocks import SolverName
from gerl.engine.feature_cache import NO_CACHE, FeatureCache
from gerl.engine.kernels import DDIMRule, DenoisedRule, EDMRule, FlowMapRule, FlowRule, Rule, coefficients
from gerl.errors import ModelError

Timestep = torch.Tensor | float

if TYPE_CHECKING:
    from diffusers import (
        DDIMScheduler,
        EDMEulerScheduler,
        FlowMapEulerDiscreteScheduler,
        LCMScheduler,
        SchedulerMixin,
        SCMScheduler,
        TCDScheduler,
    )


# --- The deterministic steps of a rollout: to which order each is taken (solver), and how far it goes (compression)

SOLVERS: tuple[str, ...] = get_args(SolverName)

Span = tuple[int, int]  # of step k: from the sigma of step k + start to that of step k + end
ONE_STEP: Span = (0, 1)


class OdeSolver:
    """Takes deterministic steps; remembers the last one of each scheduler.

    `euler` is the scheduler's own step (`rule.mean`). `dpm2` is DPM-Solver++(2M), arXiv 2211.01095, algorithm 2, for
    flow matching: with `lambda = log((1 - s) / s)`, `h = lambda' - lambda` and the clean latents `x0h` predicted here
    and at the last step,

        D = (1 + w) x0h - w x0h_last,  w = h / (2 h_last),  x' = (1 - s') D + s' (x - (1 - s) D) / s

    It is of first order, hence `euler`, without a last step, where lambda is infinite (a last step from sigma 1, a step
    to sigma 0), and after noise was added.
    """

    def __init__(self, name: str) -> None:
        self.second_order = name == "dpm2"
        self._last: dict[int, tuple[float, torch.Tensor]] = {}  # scheduler -> sigma and x0h of its last step

    def step(self, scheduler: SchedulerMixin, rule: Rule, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        """The next latents, fp32, shape of `x`."""
        last = self._last.get(id(scheduler))
        self.observe(scheduler, rule, x, model_output)
        s, s_next = rule.sigma, rule.sigma_next
        if last is None or s_next <= 0 or not s < last[0] < 1:
            return rule.mean(x, model_output)
        x0 = self._last[id(scheduler)][1]
        w = 0.5 * (_log_snr(s_next) - _log_snr(s)) / (_log_snr(s) - _log_snr(last[0]))
        ratio = s_next / s  # (1 - s') - s' (1 - s) / s = 1 - s' / s
        return ratio * x.float() + (1 - ratio) * ((1 + w) * x0 - w * last[1])

    def observe(self, scheduler: SchedulerMixin, rule: Rule, x: torch.Tensor, model_output: torch.Tensor) -> None:
        """Take note of a step of `scheduler`; after noise the latents are not on the path of earlier steps."""
        if rule.std > 0:
            self._last.pop(id(scheduler), None)
        elif self.second_order and rule.dt < 0:
            self._last[id(scheduler)] = (rule.sigma, rule.clean(x, model_output))


def _log_snr(sigma: float) -> float:
    return math.log((1 - sigma) / sigma)


# --- From a diffusers scheduler to the rule of its next step. Families of schedulers are known here, models are not.


@dataclass(frozen=True)
class SamplingPlan:
    """How a rollout takes its denoising steps; the arguments are explained in `record`.

    Example: `SamplingPlan("flow_sde", 0.7, window=frozenset({1, 2}))` adds noise at steps 1 and 2 of the schedule and
    takes the scheduler's own Euler steps elsewhere.
    """

    kernel: str
    noise_level: float
    solver: str = "euler"
    compression: float = 1.0
    cache: FeatureCache = NO_CACHE
    window: frozenset[int] | None = None  # stochastic steps; None: all but the last
    stop: int | None = None  # leave the pipeline where it is about to take this step
    noise_at: Mapping[int, float] = field(default_factory=dict)  # noise levels of single steps

    def __post_init__(self) -> None:
        if self.solver not in SOLVERS:
            raise ValueError(f"unknown solver {self.solver!r}: choose one of {', '.join(SOLVERS)}")
        if not 0 < self.compression <= 1:
            raise ValueError(f"compression must be above 0 and at most 1, got {self.compression}")


class Transitions:
    """Gives the rule of each scheduler step of one pipeline call, and advances the scheduler's own step index."""

    def __init__(self, plan: SamplingPlan) -> None:
        self.plan = plan
        self._tables: dict[int, tuple[torch.Tensor, list[float]]] = {}
        self._rules: dict[int, tuple[SchedulerMixin, Callable[..., Rule]]] = {}  # of each scheduler, by id

    def next_rule(
        self, scheduler: SchedulerMixin, timestep: Timestep, stochastic: bool | None, span: Span = ONE_STEP
    ) -> Rule:
        """The rule of the step `scheduler` is about to take at `timestep`.

        `stochastic`: whether it adds noise; None: unless it is the last. `span`: see `skipping.compressed_spans`.
        Raises `ModelError` for schedulers without a transition kernel and for noise on the last step, which has no
        density.
        """
        if id(scheduler) not in self._rules:
            check_scheduler(scheduler, self.plan)
            self._rules[id(scheduler)] = scheduler, self._rule_of(scheduler)
        return self._rules[id(scheduler)][1](scheduler, timestep, stochastic, span)

    def _rule_of(self, scheduler: SchedulerMixin) -> Callable[..., Rule]:
        """How the rules of the family of `scheduler` are made."""
        if is_flow_matching(scheduler):
            return self._flow
        if is_trigflow(scheduler):
            return self._trigflow
        if is_lcm(scheduler) or is_tcd(scheduler):
            return self._lcm
        if is_edm(scheduler):
            return self._denoised
        return self._flow_map if is_flow_map(scheduler) else self._ddim

    def num_steps(self, scheduler: SchedulerMixin, timestep: Timestep) -> int:
        """Number of steps that `scheduler`, about to take one at `timestep`, has in its schedule from there."""
        total = len(scheduler.timesteps)
        if is_trigflow(scheduler):  # its timesteps end with the noise level after the last step
            total -= 1
        elif is_flow_matching(scheduler):
            total = len(scheduler.sigmas) - 1
        return total - self._position(scheduler, timestep)

    def _position(self, scheduler: SchedulerMixin, timestep: Timestep) -> int:
        """Index in the schedule of the step that `scheduler` is about to take at `timestep`."""
        if not counts_steps(scheduler):
            return self._table(scheduler.timesteps).index(float(timestep))
        return step_index(scheduler, timestep)

    def _noise(self, stochastic: bool | None, last: bool) -> float:
        if stochastic and last:
            raise ModelError(
                "the last denoising step is deterministic and has no log-probability: exclude it from the window "
                "(sampling.window_range), or, if the pipeline takes fewer steps than sampling.num_inference_steps, "
                "as when starting from an image with strength < 1, end the window before its last one"
            )
        return self.plan.noise_level if (stochastic or (stochastic is None and not last)) else 0.0

    def _flow(
        self, scheduler: SchedulerMixin, timestep: Timestep, stochastic: bool | None, span: Span
    ) -> FlowRule | EDMRule:
        i = take_step(scheduler, timestep)
        sigmas = self._table(scheduler.sigmas)
        s, s_next, s_one = sigmas[i + span[0]], sigmas[i + span[1]], sigmas[1]
        if max(sigmas) > 1.001:  # of flow matching they lie in [0, 1]
            return EDMRule(s, s_next, *self._edm(s, s_next, s_one, stochastic))
        inverted = sigmas[i + 1] > sigmas[i]
        if inverted:
            s, s_next, s_one = 1 - s, 1 - s_next, 1 - s_one
        s = min(s, 1.0)
        noise = self._noise(stochastic, last=s_next <= 0)
        kappa, std = coefficients(self.plan.kernel, s, s_next, noise, s_one)
        return FlowRule(s, s_next, kappa, std, inverted)

    def _edm(self, c: float, c_next: float, c_one: float, stochastic: bool | None) -> tuple[float, float]:
        """Kappa and std of a step along the sigmas of EDM: see `EDMRule`."""
        if self.plan.solver != "euler":
            raise ModelError(
                f"sampling.solver={self.plan.solver} is for sigmas in [0, 1], those of this scheduler go up to "
                f"{c_one:.3g} and beyond: use euler"
            )
        s, s_next, s_one = (value / (1 + value) for value in (c, c_next, c_one))
        kappa, std = coefficients(self.plan.kernel, s, s_next, self._noise(stochastic, last=c_next in (0, c)), s_one)
        return kappa, (1 + c_next) * std

    def _denoised(
        self, scheduler: EDMEulerScheduler, timestep: Timestep, stochastic: bool | None, span: Span
    ) -> DenoisedRule:
        """A step along the sigmas of EDM, of a preconditioned output (Cosmos 1, Playground 2.5)."""
        i = take_step(scheduler, timestep)
        sigmas = self._table(scheduler.sigmas)
        c, c_next = sigmas[i + span[0]], sigmas[i + span[1]]
        kappa, std = self._edm(c, c_next, sigmas[1], stochastic)
        skip, out = (0.0, 1.0) if output_is_clean(scheduler) else edm_scalings(scheduler, sigmas[i])
        return DenoisedRule(c, c_next, kappa, std, skip, out)

    def _lcm(
        self, scheduler: LCMScheduler | TCDScheduler, timestep: Timestep, stochastic: bool | None, span: Span
    ) -> DDIMRule:
        """A step of a latent consistency model; the scheduler's own has noise level 1 (LCM), or 0 (TCD with eta 0)."""
        i, config = take_step(scheduler, timestep), scheduler.config
        times = [int(t) for t in self._table(scheduler.timesteps)]
        here, last = min(i + span[0], len(times) - 1), i + span[1] >= len(times)
        alpha = scheduler.alphas_cumprod[times[here]]
        end = torch.ones(()) if is_lcm(scheduler) else scheduler.alphas_cumprod[0]
        alpha_next = end if last else scheduler.alphas_cumprod[times[i + span[1]]]
        s_next = float((1 - alpha_next) ** 0.5)
        kappa, std = coefficients(self.plan.kernel, 1.0, s_next, self._noise(stochastic, last=last), 1.0)
        boundary = (0.0, 1.0)
        if is_lcm(scheduler):
            boundary = scheduler.get_scalings_for_boundary_condition_discrete(times[here])
        return DDIMRule(
            sigma=float((1 - alpha) ** 0.5),
            sigma_next=s_next,
            sqrt_alpha=float(alpha**0.5),
            sqrt_alpha_next=float(alpha_next**0.5),
            direction=kappa,
            std=std,
            prediction_type=config.prediction_type,
            # TCD has the setting and never clips
            clip_range=config.clip_sample_range if config.clip_sample and is_lcm(scheduler) else None,
            boundary=boundary,
        )

    def _flow_map(
        self, scheduler: FlowMapEulerDiscreteScheduler, timestep: Timestep, stochastic: bool | None, span: Span
    ) -> FlowMapRule:
        """A step of a flow map, always deterministic; the model was asked for it alone, so that none is longer."""
        if stochastic or span != ONE_STEP:
            raise ModelError("a flow map takes its own steps, without noise: use sampling.kernel=ode and compression=1")
        i = take_step(scheduler, timestep)
        sigmas = self._table(scheduler.sigmas)
        return FlowMapRule(sigmas[i], sigmas[i + 1])

    def _trigflow(self, scheduler: SCMScheduler, timestep: Timestep, stochastic: bool | None, span: Span) -> DDIMRule:
        """A step of a consistency model in TrigFlow; with noise level 1 of the kernel cps it is the scheduler's own."""
        i = take_step(scheduler, timestep)
        times = self._table(scheduler.timesteps)
        t, t_next = times[i + span[0]], times[i + span[1]]
        s, s_next = math.sin(t), math.sin(t_next)
        kappa, std = coefficients(self.plan.kernel, s, s_next, self._noise(stochastic, last=s_next <= 0), s)
        scale = float(scheduler.config.sigma_data)
        return DDIMRule(
            sigma=s,
            sigma_next=s_next,
            sqrt_alpha=math.cos(t),
            sqrt_alpha_next=math.cos(t_next),
            direction=kappa,
            std=std * scale,
            prediction_type="v_prediction",
            clip_range=None,
            noise_scale=scale,
        )

    def _ddim(self, scheduler: DDIMScheduler, timestep: Timestep, stochastic: bool | None, span: Span) -> DDIMRule:
        kernel, config, timestep = self.plan.kernel, scheduler.config, int(timestep)
        here, previous = (self._ddim_timestep(scheduler, timestep, steps) for steps in span)
        noise = 0.0 if kernel == "ode" else self._noise(stochastic, last=previous < 0)
        alpha, alpha_next = (
            scheduler.alphas_cumprod[t] if t >= 0 else scheduler.final_alpha_cumprod for t in (here, previous)
        )
        std = noise * scheduler._get_variance(timestep, previous) ** 0.5 if noise else torch.zeros(())
        return DDIMRule(
            sigma=float((1 - alpha) ** 0.5),
            sigma_next=float((1 - alpha_next) ** 0.5),
            sqrt_alpha=float(alpha**0.5),
            sqrt_alpha_next=float(alpha_next**0.5),
            direction=float((1 - alpha_next - std**2).clamp(min=0) ** 0.5),  # 0 but for rounding where alpha is 0
            std=float(std),
            prediction_type=config.prediction_type,
            clip_range=config.clip_sample_range if config.clip_sample else None,
        )

    def _ddim_timestep(self, scheduler: DDIMScheduler, timestep: int, steps: int) -> int:
        """The timestep whose noise the latents have `steps` steps after `timestep`; negative at the end."""
        if steps == 0:
            return timestep
        if steps > 1:
            timestep = int(self._table(scheduler.timesteps)[self._position(scheduler, timestep) + steps - 1])
        return timestep - scheduler.config.num_train_timesteps // scheduler.num_inference_steps

    def _table(self, schedule: torch.Tensor) -> list[float]:
        """Sigmas or timesteps as floats: one device synchronisation a pipeline call instead of one a step."""
        if id(schedule) not in self._tables:
            self._tables[id(schedule)] = (schedule, schedule.tolist())  # the tensor is kept so that its id stays taken
        return self._tables[id(schedule)][1]


def check_scheduler(scheduler: SchedulerMixin, plan: SamplingPlan) -> None:
    """Raise `ModelError` if `scheduler` has no transition kernel, or not that of `plan`."""
    name, given = type(scheduler).__name__, f"sampling.kernel={plan.kernel} with sampling.solver={plan.solver}"
    if is_consistency(scheduler):
        if plan.kernel not in ("cps", "ode") or plan.solver != "euler":
            raise ModelError(
                f"{given} is incompatible with the {name} of this consistency model pipeline: use cps "
                f"(noise_level={int(resamples_noise(scheduler))} is its own sampler) and euler"
            )
        if scheduler.config.get("thresholding", False):
            raise ModelError(f"{name} with thresholding has no transition kernel: set thresholding=False")
    elif is_flow_matching(scheduler):
        if scheduler.config.get("stochastic_sampling", False):
            raise ModelError("the scheduler has stochastic_sampling=True: gerl adds the noise itself, set it to False")
    elif is_edm(scheduler):
        if plan.solver != "euler":
            raise ModelError(
                f"sampling.solver={plan.solver} is for sigmas in [0, 1], those of this pipeline's {name} go far "
                "beyond: use euler"
            )
    elif is_flow_map(scheduler):
        if (plan.kernel != "ode" and plan.noise_level > 0) or plan.solver != "euler":
            raise ModelError(
                f"{given} is incompatible with this pipeline's {name}, whose model jumps between noise levels by "
                "an average velocity and does not model the noise in between: use ode and euler, with an algorithm "
                "that needs no noise (neighbor_grpo), or train the model that it was distilled from"
            )
    else:
        _check_ddim(scheduler, plan)


def _check_ddim(scheduler: SchedulerMixin, plan: SamplingPlan) -> None:
    """Raise `ModelError` if `scheduler` is no DDIM with the kernel of `plan`."""
    config, name = scheduler.config, type(scheduler).__name__
    from diffusers import DDIMScheduler  # in here: the driver of a run does without diffusers

    if not isinstance(scheduler, DDIMScheduler):
        raise ModelError(
            f"the pipeline's scheduler is {name}, which has no transition kernel: set "
            "pipe.scheduler to FlowMatchEulerDiscreteScheduler or DDIMScheduler .from_config(pipe.scheduler.config)"
        )
    if plan.kernel not in ("ddim", "ode"):
        raise ModelError(
            f"sampling.kernel={plan.kernel} is for flow matching: this pipeline has a DDIMScheduler, use ddim"
        )
    if plan.solver != "euler":
        raise ModelError(
            f"sampling.solver={plan.solver} is for flow matching: this pipeline has a DDIMScheduler, use euler"
        )
    if config.thresholding:
        raise ModelError(
            "DDIM with thresholding has no transition kernel, since the latents are clipped by their own "
            "magnitude: set thresholding=False, as for every latent diffusion model"
        )
    if config.rescale_betas_zero_snr and config.prediction_type == "epsilon":
        raise ModelError(
            "DDIM with rescale_betas_zero_snr starts at pure noise, where an epsilon prediction carries no "
            "information: use a v-prediction model, or rescale_betas_zero_snr=False"
        )


# --- The families of diffusers' schedulers that have transition kernels, and what each needs besides its rule

# diffusers is imported in the functions: the driver of a run does without


def is_flow_matching(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler's model output is a velocity and its sigmas those of `x = (1 - s) x0 + s eps`."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return (
        isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
        or is_flow_lcm(scheduler)
        or scheduler.config.get("prediction_type") == "flow_prediction"
    )


def is_flow_lcm(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler is that of consistency models of flow matching: it noises anew at each step."""
    from diffusers import FlowMatchLCMScheduler

    return isinstance(scheduler, FlowMatchLCMScheduler)


def is_trigflow(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler's noise levels are angles, as those of consistency models in TrigFlow."""
    from diffusers import SCMScheduler

    return isinstance(scheduler, SCMScheduler)


def is_lcm(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler is that of latent consistency models (arXiv 2310.04378)."""
    from diffusers import LCMScheduler

    return isinstance(scheduler, LCMScheduler)


def is_tcd(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler is that of trajectory consistency models (arXiv 2402.19159)."""
    from diffusers import TCDScheduler

    return isinstance(scheduler, TCDScheduler)


def resamples_noise(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler's own sampler predicts clean latents and noises them anew: the kernel cps at level 1."""
    return is_trigflow(scheduler) or is_lcm(scheduler) or is_flow_lcm(scheduler)


def is_consistency(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler is that of a consistency model, whose steps have the kernel cps."""
    return resamples_noise(scheduler) or is_tcd(scheduler)


def is_edm(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler preconditions input and output as EDM does (arXiv 2206.00364)."""
    from diffusers import EDMEulerScheduler

    return isinstance(scheduler, EDMEulerScheduler)


def is_flow_map(scheduler: SchedulerMixin) -> bool:
    """Whether the model's output is the average velocity between two noise levels (AnyFlow)."""
    from diffusers import FlowMapEulerDiscreteScheduler

    return isinstance(scheduler, FlowMapEulerDiscreteScheduler)


def counts_steps(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler looks its noise level up by the number of the step."""
    kinds = (is_flow_matching, is_consistency, is_edm, is_flow_map)
    return any(kind(scheduler) for kind in kinds)


def gives_model_dtype(scheduler: SchedulerMixin) -> bool:
    """Whether the scheduler's next latents have the dtype of the model output, not that of the latents."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    euler = isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
    return euler or is_flow_lcm(scheduler) or is_edm(scheduler) or is_flow_map(scheduler)


def step_index(scheduler: SchedulerMixin, timestep: torch.Tensor | float) -> int:
    """Index of the step that a scheduler that counts them is about to take at `timestep`."""
    if scheduler.step_index is None:
        scheduler._init_step_index(timestep)
    index: int = scheduler.step_index
    return index


def take_step(scheduler: SchedulerMixin, timestep: torch.Tensor | float) -> int:
    """Let a scheduler that counts its steps pass the one it is about to take at `timestep`; returns its index."""
    index = step_index(scheduler, timestep)
    scheduler._step_index = index + 1
    return index


def advance(scheduler: SchedulerMixin, timestep: torch.Tensor | float) -> None:
    """Let `scheduler` pass the step it is about to take at `timestep`.

    Pipelines that noise an image for the next step (inpainting) let the scheduler look its sigma up by step index.
    """
    if counts_steps(scheduler):
        scheduler._step_index = step_index(scheduler, timestep) + 1


def edm_scalings(scheduler: EDMEulerScheduler, c: float) -> tuple[float, float]:
    """`(skip, out)` of `x0h = skip x + out F` at noise level `c`, the fp32 numbers that the scheduler computes with."""
    data, scale = scheduler.config.sigma_data, torch.tensor(c)
    sign = 1 if scheduler.config.prediction_type == "epsilon" else -1
    return float(data**2 / (scale**2 + data**2)), float(sign * scale * data / (scale**2 + data**2) ** 0.5)


@contextlib.contextmanager
def predicts_clean(scheduler: SchedulerMixin, given: bool) -> Iterator[None]:
    """With `given`, let the rule of the step that `scheduler` takes in here read the model output as clean latents."""
    if given:
        scheduler.__dict__["gerl_clean_output"] = True
    try:
        yield
    finally:
        scheduler.__dict__.pop("gerl_clean_output", None)


def output_is_clean(scheduler: SchedulerMixin) -> bool:
    """Whether the step that `scheduler` takes has clean latents for a model output, see `predicts_clean`."""
    return "gerl_clean_output" in scheduler.__dict__


def scm_clean(timestep: torch.Tensor | float, model_output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The clean latents that an `SCMScheduler` returns besides the next ones, shape of `x`."""
    t = torch.as_tensor(timestep).flatten()[0]
    return torch.cos(t) * x - torch.sin(t) * model_output


def lcm_clean(
    scheduler: LCMScheduler, timestep: torch.Tensor | float, model_output: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """The clean latents that an `LCMScheduler` returns besides the next ones, shape of `x`."""
    t, config = int(timestep), scheduler.config
    alpha = scheduler.alphas_cumprod[t]
    skip, out = scheduler.get_scalings_for_boundary_condition_discrete(t)
    match config.prediction_type:
        case "epsilon":
            x0 = (x - (1 - alpha).sqrt() * model_output) / alpha.sqrt()
        case "v_prediction":
            x0 = alpha.sqrt() * x - (1 - alpha).sqrt() * model_output
        case _:  # sample
            x0 = model_output
    if config.clip_sample:
        x0 = x0.clamp(-config.clip_sample_range, config.clip_sample_range)
    clean: torch.Tensor = out * x0 + skip * x
    return clean

"""Transitions of denoising steps: one formula, one table of kernels, and the step rules of diffusers schedulers.

With `s` = sigma, `s'` = next sigma, velocity `v`, `x0h = x - s v` and `eps_h = x + (1 - s) v`, every published sampler
is

    x' ~ Normal((1 - s') x0h + kappa * eps_h, std)

so a sampler is the pair `(kappa, std)`. Sigmas are Python floats: no look-up by timestep, no device synchronisation.
"""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import torch

from gerl.config.blocks import KernelName, SolverName
from gerl.errors import ModelError, ReplayError

if TYPE_CHECKING:
    from diffusers import SchedulerMixin

Timestep = torch.Tensor | float


# --- Kernels as pure functions of sigmas, and the rule of a step

KERNELS: tuple[str, ...] = get_args(KernelName)
NEARLY_ONE = 0.999  # UniPC-like schedules start at 0.9999, where sigma / (1 - sigma) explodes just as at 1
NO_CLEAN_LATENTS = (
    "a flow map is trained at its own latents: it predicts no clean ones, so algorithms that noise images again "
    "cannot train it; use one that replays its steps (neighbor_grpo)"
)


def coefficients(
    name: str, sigma: float, sigma_next: float, noise_level: float, sigma_one: float
) -> tuple[float, float]:
    """Return `(kappa, std)` of one step from `sigma` to `sigma_next`, both in [0, 1] and decreasing.

    `noise_level` is the eta of the respective paper; at 0 every kernel is the Euler step `(sigma_next, 0.0)`.
    `sigma_one`, the schedule's second sigma, replaces `sigma` in Flow-SDE's `1 - sigma` where that vanishes (sigma
    above 0.999). A step to `sigma_next` 0 of CPS, Precise and DDIM has std 0, hence no density.

    Sources: Flow-SDE, arXiv 2505.05470; Dance-SDE, arXiv 2505.07818; CPS, arXiv 2509.05952; Precise, arXiv 2605.23522;
    DDIM, arXiv 2010.02502 in the variance-exploding form of DiffusionNFT's solver.
    """
    if name not in KERNELS:
        raise ValueError(f"unknown kernel {name!r}: choose one of {', '.join(KERNELS)}")
    if not 0.0 <= sigma_next <= sigma <= 1.0:
        raise ValueError(f"sigmas must satisfy 0 <= next <= sigma <= 1, got sigma {sigma} and next {sigma_next}")
    if noise_level < 0:
        raise ValueError(f"noise_level must be >= 0, got {noise_level}")
    if name == "ode" or noise_level == 0 or sigma == sigma_next:
        return sigma_next, 0.0
    match name:
        case "flow_sde" | "dance_sde":
            regular = min(sigma, sigma_one) if sigma > NEARLY_ONE else sigma
            if name == "flow_sde" and regular >= 1.0:
                raise ValueError(f"sigma_one must be below 1 if sigma is 1, got {sigma_one}")
            g = noise_level * math.sqrt(sigma / (1 - regular)) if name == "flow_sde" else noise_level
            h = sigma - sigma_next
            return sigma_next - g * g * h / (2 * sigma), g * math.sqrt(h)
        case "cps":
            if noise_level > 1:
                raise ValueError(f"noise_level must be at most 1 (full re-noising) for cps, got {noise_level}")
            angle = noise_level * math.pi / 2
            # cos(pi/2) is 6e-17 in floating point: full re-noising has kappa 0
            return sigma_next * (0.0 if noise_level == 1 else math.cos(angle)), sigma_next * math.sin(angle)
        case "precise":
            r = sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))
            return sigma_next * r ** (noise_level**2 / 2), sigma_next * math.sqrt(1 - r ** (noise_level**2))
        case "dance_precise":
            if sigma_next == 0:
                return 0.0, 0.0
            decay = noise_level**2 * (1 / sigma_next - 1 / sigma)
            return sigma_next * math.exp(-decay / 2), sigma_next * math.sqrt(-math.expm1(-decay))
        case _:  # ddim
            r = sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))
            std = noise_level * sigma_next * math.sqrt(1 - r * r)
            if std > sigma_next:
                raise ValueError(f"ddim with noise_level {noise_level} has no real kappa at sigma {sigma}: lower it")
            return math.sqrt(sigma_next**2 - std**2), std


def transition_mean(
    x: torch.Tensor, velocity: torch.Tensor, sigma: float, sigma_next: float, kappa: float
) -> torch.Tensor:
    """Return `(1 - s') x0h + kappa eps_h`, same shape as `x`, in fp32.

    Written as the Euler step plus the deviation of `kappa` from `s'`, so that `kappa == s'` gives bitwise the result of
    `FlowMatchEulerDiscreteScheduler.step`.
    """
    deviation = kappa - sigma_next
    a = 1.0 + deviation
    b = (sigma_next - sigma) + deviation * (1.0 - sigma)
    return a * x.float() + b * velocity.float()


def differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return where `a` and `b` are different, bool; NaN is equal to NaN, otherwise it would count as overwritten."""
    return (a != b) & ~(a.isnan() & b.isnan())


def numbers_left(written: torch.Tensor) -> torch.Tensor:
    """Return how many elements of each row are not `written` `[B, ...]`, `[B]`; raises `ReplayError` if none is."""
    counts = (~written).flatten(1).sum(1)
    if not bool(counts.all()):
        raise ReplayError("the pipeline's condition leaves nothing of a sample to learn: use a mask with an opening")
    return counts


def unwritten(values: torch.Tensor, written: torch.Tensor | None) -> torch.Tensor:
    """Return each row of `values` `[B, ...]` without its elements `written` (bool, same shape), `[B, N]`.

    Returns `values` if `written` is None. A row with fewer elements than N ends in zeros and is scaled by the square
    root of N over their number, so that a mean of squares is that of its own elements: their number differs between
    rows already because in half precision an overwritten value may by chance stay the same. Raises `ReplayError` if
    nothing is left of a row.
    """
    if written is None:
        return values
    left, counts = (~written).flatten(1), numbers_left(written)[:, None]
    most = int(counts.max())
    places = left.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    scaled = values.flatten(1).gather(1, places) * (most / counts).sqrt().to(values.dtype)
    return scaled.masked_fill(torch.arange(most, device=left.device) >= counts, 0.0)


def gaussian_log_prob(
    x_next: torch.Tensor, mean: torch.Tensor, std: float, overwritten: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the log-density of Normal(mean, std) at `x_next`, averaged over all non-batch dimensions, fp32 `[B]`.

    `x_next` is detached. `overwritten` `[B, ...]` bool: elements that the pipeline replaces before the next step, which
    the average leaves out.
    """
    if std <= 0:
        raise ValueError("a step with std 0 is deterministic and has no log-probability")
    z = (x_next.detach().float() - mean.float()) / std
    squares = (z * z).flatten(1)
    if overwritten is None:
        distance = squares.mean(1)
    else:  # a sum of all, whose order does not depend on the other rows
        distance = squares.masked_fill(overwritten.flatten(1), 0.0).sum(1) / numbers_left(overwritten)
    return -0.5 * distance - math.log(std) - 0.5 * math.log(2 * math.pi)


class TransitionRule:
    """Step of a schedule: mean and std of the next latents as functions of the model output.

    `sigma` and `sigma_next` are noise levels in [0, 1], that of flow matching; `std` is 0.0 at a deterministic step.
    The methods take latents and model outputs `[B, ...]` and return fp32 of that shape: `mean` of the next latents,
    `noised` clean latents at `sigma`, the `target` output of a perfect model there, and the `clean` latents that a
    model output predicts.
    """

    sigma: float
    sigma_next: float
    std: float

    @property
    def dt(self) -> float:
        """`sigma_next - sigma`, negative."""
        return self.sigma_next - self.sigma


@dataclass(frozen=True)
class FlowRule(TransitionRule):
    """Step of a flow-matching schedule.

    `inverted`: the schedule runs from 0 to 1 (Mochi), where `v -> -v` and `sigma -> 1 - sigma` give the usual one;
    `sigma` and `sigma_next` are stored in the usual direction.
    """

    sigma: float
    sigma_next: float
    kappa: float
    std: float
    inverted: bool = False

    @property
    def jacobian(self) -> float:
        """`|d mean / d model_output| = |kappa (1 - s) - (1 - s') s|` (Precise, arXiv 2605.23522)."""
        return abs(self.kappa * (1 - self.sigma) - (1 - self.sigma_next) * self.sigma)

    def mean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        return transition_mean(x, self._velocity(model_output), self.sigma, self.sigma_next, self.kappa)

    def noised(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return `(1 - s) x0 + s noise`."""
        return (1 - self.sigma) * x0.float() + self.sigma * noise.float()

    def target(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return the velocity `noise - x0`."""
        return self._velocity(noise.float() - x0.float())

    def clean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        """Return `x - s v`."""
        return x.float() - self.sigma * self._velocity(model_output.float())

    def _velocity(self, model_output: torch.Tensor) -> torch.Tensor:
        return -model_output if self.inverted else model_output


@dataclass(frozen=True)
class EDMRule(TransitionRule):
    """Step of a schedule of `x = x0 + c eps` (EDM, arXiv 2206.00364), whose model output is the predicted noise.

    With `s = c / (1 + c)`, `x / (1 + c)` is on the path of flow matching at sigma `s`. So its transition to `c'` is

        x' ~ Normal(x0h + (1 + c') kappa eps_h, (1 + c') std),    x0h = x - c eps_h

    with the `(kappa, std)` of `coefficients` at `s` and `s'`, which are `sigma` and `sigma_next` here. At noise level 0
    this is bitwise the scheduler's Euler step `x + (c' - c) eps_h`.
    """

    scale: float  # c, any positive number
    scale_next: float  # c'
    kappa: float
    std: float  # of x', hence times 1 + c'

    @property
    def sigma(self) -> float:  # type: ignore[override]
        return self.scale / (1 + self.scale)

    @property
    def sigma_next(self) -> float:  # type: ignore[override]
        return self.scale_next / (1 + self.scale_next)

    @property
    def jacobian(self) -> float:
        return abs((1 + self.scale_next) * self.kappa - self.scale)

    def mean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        deviation = (1 + self.scale_next) * (self.kappa - self.sigma_next)
        return x.float() + ((self.scale_next - self.scale) + deviation) * model_output.float()

    def noised(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return `x0 + c noise`."""
        return x0.float() + self.scale * noise.float()

    def target(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return the noise."""
        del x0
        return noise.float()

    def clean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        """Return `x - c eps_h`."""
        return x.float() - self.scale * model_output.float()


@dataclass(frozen=True)
class DenoisedRule(EDMRule):
    """EDM step with a preconditioned output F, which predicts the clean latents `skip x + out F`.

    The transition is that of `EDMRule`, with `eps_h = (x - x0h) / c`. If a pipeline guides clean latents and steps with
    them (Cosmos 1), the output is `x0h` itself: skip 0, out 1.
    """

    skip: float
    out: float

    @property
    def jacobian(self) -> float:
        return abs(self.out * (1 - (1 + self.scale_next) * self.kappa / self.scale))

    def mean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        return super().mean(x, (x.float() - self.clean(x, model_output)) / self.scale)

    def target(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        # (x0 - skip (x0 + c noise)) / out, without a difference of large numbers
        return ((1 - self.skip) * x0.float() - self.skip * self.scale * noise.float()) / self.out

    def clean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        if (self.skip, self.out) == (0.0, 1.0):
            return model_output.float()
        return self.skip * x.float() + self.out * model_output.float()


@dataclass(frozen=True)
class DDIMRule(TransitionRule):
    """DDIM step (arXiv 2010.02502, equations 12 and 16) of an epsilon-, v- or sample-prediction model.

    The coefficients are fp32 numbers, computed as in `DDIMScheduler.step`: at `std` 0 the result is bitwise equal.
    `sigma` is sqrt(1 - alpha_bar). Raises `ValueError` for other prediction types.

    TrigFlow (arXiv 2410.11081), x = cos(t) x0 + sin(t) z with z ~ Normal(0, noise_scale), is a v prediction with
    sqrt(alpha_bar) = cos(t).
    """

    sigma: float
    sigma_next: float
    sqrt_alpha: float
    sqrt_alpha_next: float
    direction: float  # sqrt(1 - alpha_bar_next - std^2)
    std: float
    prediction_type: str
    clip_range: float | None
    noise_scale: float = 1.0  # std of the noise added at noise level 1
    boundary: tuple[float, float] = (0.0, 1.0)  # c_skip, c_out of a consistency model (LCM): x0h is c_out x0 + c_skip x

    def __post_init__(self) -> None:
        if self.prediction_type not in ("epsilon", "v_prediction", "sample"):
            raise ValueError(f"unknown prediction_type {self.prediction_type!r}")

    @property
    def jacobian(self) -> float:
        """`|d mean / d model_output|` without clipping."""
        clean = self.sqrt_alpha_next * self.boundary[1]  # factor of the clean latents
        match self.prediction_type:
            case "epsilon":
                return abs(self.direction - clean * self.sigma / self.sqrt_alpha)
            case "v_prediction":
                return abs(self.direction * self.sqrt_alpha - clean * self.sigma)
            case _:  # sample
                return abs(clean - self.direction * self.sqrt_alpha / self.sigma)

    def mean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        x0, epsilon = self._predictions(x.float(), model_output.float())
        return self.sqrt_alpha_next * x0 + self.direction * epsilon

    def noised(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return `sqrt(alpha_bar) x0 + sigma noise`."""
        return self.sqrt_alpha * x0.float() + self.sigma * self._scaled(noise)

    def target(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        match self.prediction_type:
            case "epsilon":
                return self._scaled(noise)
            case "v_prediction":
                return self.sqrt_alpha * self._scaled(noise) - self.sigma * x0.float()
            case _:  # sample
                return x0.float()

    def clean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        """Return the predicted clean latents, clipped as in `mean`."""
        return self._predictions(x.float(), model_output.float())[0]

    def _scaled(self, noise: torch.Tensor) -> torch.Tensor:
        return noise.float() * self.noise_scale if self.noise_scale != 1.0 else noise.float()

    def _predictions(self, x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the predicted clean latents, clipped, and the predicted noise."""
        match self.prediction_type:
            case "epsilon":
                x0, epsilon = (x - self.sigma * out) / self.sqrt_alpha, out
            case "v_prediction":
                x0 = self.sqrt_alpha * x - self.sigma * out
                epsilon = self.sqrt_alpha * out + self.sigma * x
            case _:  # sample
                x0, epsilon = out, (x - self.sqrt_alpha * out) / self.sigma
        if self.clip_range is not None:
            x0 = x0.clamp(-self.clip_range, self.clip_range)
        if self.boundary != (0.0, 1.0):
            x0 = self.boundary[1] * x0 + self.boundary[0] * x
        return x0, epsilon


@dataclass(frozen=True)
class FlowMapRule(TransitionRule):
    """Step of a flow map (AnyFlow): the output is the average velocity to `sigma_next`; no clean latents exist."""

    sigma: float
    sigma_next: float
    std: float = 0.0

    @property
    def jacobian(self) -> float:
        return abs(self.dt)

    def mean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        """Return the next latents, bitwise equal to the scheduler's, which computes in fp64."""
        return (x.double() - (self.sigma - self.sigma_next) * model_output.double()).float()

    def noised(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        raise ReplayError(NO_CLEAN_LATENTS)

    target = clean = noised


Rule = FlowRule | EDMRule | DDIMRule | FlowMapRule


def with_noise(rule: Rule, kernel: str, noise_level: float, sigma_one: float) -> Rule:
    """Return `rule` with the noise of `kernel` (see `coefficients`), unless a flow map's or of length 0."""
    if isinstance(rule, FlowMapRule) or rule.dt == 0:
        return rule
    if isinstance(rule, DDIMRule):
        direction, std = _ddim_noise(rule, kernel, noise_level)
        return replace(rule, direction=direction, std=std)
    kappa, std = coefficients(kernel, rule.sigma, rule.sigma_next, noise_level, sigma_one)
    factor = 1.0 if isinstance(rule, FlowRule) else 1 + rule.scale_next
    return replace(rule, kappa=kappa, std=factor * std)


def _ddim_noise(rule: DDIMRule, kernel: str, noise_level: float) -> tuple[float, float]:
    """Return direction and std of a step with noise: of DDIM, or of a consistency model, whose kernel is cps."""
    if kernel == "cps":
        kappa, std = coefficients("cps", 1.0, rule.sigma_next, noise_level, 1.0)
        return kappa, std * rule.noise_scale
    left = 1 - (rule.sqrt_alpha / rule.sqrt_alpha_next) ** 2
    std = noise_level * rule.sigma_next / rule.sigma * math.sqrt(max(left, 0.0)) if kernel == "ddim" else 0.0
    return math.sqrt(max(rule.sigma_next**2 - std**2, 0.0)), std


def leap(rule: FlowRule, sigma: float) -> FlowRule:
    """Return the Euler step from the noise level of `rule` to `sigma`, of any length: `x + (sigma - s) v`."""
    return replace(rule, sigma_next=sigma, kappa=sigma, std=0.0)


# --- Deterministic steps of a rollout: their order (solver) and length (compression)

SOLVERS: tuple[str, ...] = get_args(SolverName)

Span = tuple[int, int]  # of step k: from the sigma of step k + start to that of step k + end
ONE_STEP: Span = (0, 1)


class OdeSolver:
    """Solver for deterministic steps, which remembers the last step of each scheduler.

    `euler` is the scheduler's own step (`rule.mean`). `dpm2` is DPM-Solver++(2M), arXiv 2211.01095, algorithm 2, for
    flow matching: with `lambda = log((1 - s) / s)`, `h = lambda' - lambda` and the clean latents `x0h` predicted here
    and at the last step,

        D = (1 + w) x0h - w x0h_last,  w = h / (2 h_last),  x' = (1 - s') D + s' (x - (1 - s) D) / s

    It is of first order, hence `euler`, without a last step, where lambda is infinite (last step from sigma 1, step to
    sigma 0), and after noise.
    """

    def __init__(self, name: str) -> None:
        self.name, self.second_order = name, name == "dpm2"
        self._last: dict[int, tuple[float, torch.Tensor]] = {}  # scheduler -> sigma and x0h of its last step

    def step(self, scheduler: SchedulerMixin, rule: Rule, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        """Return the next latents, fp32, shape of `x`."""
        last = self._last.get(id(scheduler))
        self.observe(scheduler, rule, x, model_output)
        s, s_next = rule.sigma, rule.sigma_next
        if last is None or s_next <= 0 or not s < last[0] < 1:
            return rule.mean(x, model_output)
        x0 = self._last[id(scheduler)][1]
        before, now, after = (math.log((1 - sigma) / sigma) for sigma in (last[0], s, s_next))
        w = 0.5 * (after - now) / (now - before)
        ratio = s_next / s  # (1 - s') - s' (1 - s) / s = 1 - s' / s
        return ratio * x.float() + (1 - ratio) * ((1 + w) * x0 - w * last[1])

    def observe(self, scheduler: SchedulerMixin, rule: Rule, x: torch.Tensor, model_output: torch.Tensor) -> None:
        """Remember a step of `scheduler`; after noise the latents are not on the path of earlier steps."""
        if rule.std > 0:
            self._last.pop(id(scheduler), None)
        elif self.second_order and rule.dt < 0:
            self._last[id(scheduler)] = (rule.sigma, rule.clean(x, model_output))


# --- The rule of a diffusers scheduler's next step. The code knows families of schedulers, not models.


class Transitions:
    """Scheduler steps of one pipeline call; also advances the scheduler's step index."""

    def __init__(self, kernel: str, noise_level: float, solver: str = "euler") -> None:
        self.kernel, self.default_level, self.noise_level = kernel, noise_level, noise_level
        self.solver = OdeSolver(solver)
        self._tables: dict[int, tuple[torch.Tensor, list[float]]] = {}
        self._rules: dict[int, tuple[SchedulerMixin, Callable[..., Rule]]] = {}  # by id of the scheduler

    def take(
        self,
        scheduler: SchedulerMixin,
        timestep: Timestep,
        x: torch.Tensor,
        model_output: torch.Tensor,
        stochastic: bool | None,
        span: Span = ONE_STEP,
        skips: bool = False,
        noise_level: float | None = None,
        generators: Sequence[torch.Generator] | None = None,
    ) -> tuple[Rule, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Take a step from `x` `[B, ...]`; return its rule, the next latents, log-probability and mean.

        The latents and the mean are `[B, ...]`, the log-probability is `[B]`, all fp32; the last two are None if the
        step adds no noise. `skips`: leave the latents unchanged. `noise_level`: of this step. `generators`: one per
        sample. The other arguments are those of `next_rule`.
        """
        self.noise_level = self.default_level if noise_level is None else noise_level
        rule = self.next_rule(scheduler, timestep, stochastic, span)
        if rule.std > 0:
            mean = rule.mean(x, model_output)
            x_next = mean + rule.std * _noise(x, generators)
            self.solver.observe(scheduler, rule, x, model_output)
            return rule, x_next, gaussian_log_prob(x_next, mean, rule.std), mean
        return rule, x if skips else self.solver.step(scheduler, rule, x, model_output), None, None

    def next_rule(
        self, scheduler: SchedulerMixin, timestep: Timestep, stochastic: bool | None, span: Span = ONE_STEP
    ) -> Rule:
        """Return the rule of the step `scheduler` is about to take at `timestep`.

        `stochastic`: whether it adds noise; None: unless it is the last. `span`: see `skipping.compressed_spans`.
        Raises `ModelError` for schedulers without a transition kernel, and for noise on the last step.
        """
        if id(scheduler) not in self._rules:
            check_scheduler(scheduler, self.kernel, self.default_level, self.solver.name)
            self._rules[id(scheduler)] = scheduler, self._rule_of(scheduler)
        return self._rules[id(scheduler)][1](scheduler, timestep, stochastic, span)

    def _rule_of(self, scheduler: SchedulerMixin) -> Callable[..., Rule]:
        """Return the function that makes rules for the family of `scheduler`."""
        rules: dict[str | None, Callable[..., Rule]] = dict.fromkeys(FLOW, self._flow)
        rules |= {"trigflow": self._trigflow, "lcm": self._lcm, "tcd": self._lcm, "edm": self._denoised}
        return (rules | {"flow_map": self._flow_map}).get(family(scheduler), self._ddim)

    def num_steps(self, scheduler: SchedulerMixin, timestep: Timestep) -> int:
        """Return the number of remaining steps in the schedule of `scheduler`, about to take one at `timestep`."""
        total = len(scheduler.timesteps)
        kind = family(scheduler)
        if kind == "trigflow":  # its timesteps end with the noise level after the last step
            total -= 1
        elif kind in FLOW:
            total = len(scheduler.sigmas) - 1
        return total - self._position(scheduler, timestep)

    def _position(self, scheduler: SchedulerMixin, timestep: Timestep) -> int:
        """Return the schedule index of the step that `scheduler` is about to take at `timestep`."""
        if family(scheduler) not in COUNTS_STEPS:
            return self._table(scheduler.timesteps).index(self._value(scheduler, timestep))
        return step_index(scheduler, timestep)

    def _noise(self, stochastic: bool | None, last: bool) -> float:
        if stochastic and last:
            raise ModelError(
                "the last denoising step is deterministic and has no log-probability: exclude it from the window "
                "(sampling.window_range), or, if the pipeline takes fewer steps than sampling.num_inference_steps, "
                "as when starting from an image with strength < 1, end the window before its last one"
            )
        return self.noise_level if (stochastic or (stochastic is None and not last)) else 0.0

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
        kappa, std = coefficients(self.kernel, s, s_next, noise, s_one)
        return FlowRule(s, s_next, kappa, std, inverted)

    def _edm(self, c: float, c_next: float, c_one: float, stochastic: bool | None) -> tuple[float, float]:
        """Return kappa and std of a step along the sigmas of EDM: see `EDMRule`."""
        if self.solver.name != "euler":
            raise ModelError(
                f"sampling.solver={self.solver.name} is for sigmas in [0, 1], those of this scheduler go up to "
                f"{c_one:.3g} and beyond: use euler"
            )
        s, s_next, s_one = (value / (1 + value) for value in (c, c_next, c_one))
        kappa, std = coefficients(self.kernel, s, s_next, self._noise(stochastic, last=c_next in (0, c)), s_one)
        return kappa, (1 + c_next) * std

    def _denoised(
        self, scheduler: SchedulerMixin, timestep: Timestep, stochastic: bool | None, span: Span
    ) -> DenoisedRule:
        """Return a step along the sigmas of EDM with a preconditioned output (Cosmos 1, Playground 2.5)."""
        i = take_step(scheduler, timestep)
        sigmas = self._table(scheduler.sigmas)
        c, c_next = sigmas[i + span[0]], sigmas[i + span[1]]
        kappa, std = self._edm(c, c_next, sigmas[1], stochastic)
        skip, out = (0.0, 1.0) if output_is_clean(scheduler) else edm_scalings(scheduler, sigmas[i])
        return DenoisedRule(c, c_next, kappa, std, skip, out)

    def _lcm(self, scheduler: SchedulerMixin, timestep: Timestep, stochastic: bool | None, span: Span) -> DDIMRule:
        """Return a step of a latent consistency model; the scheduler's has noise level 1 (LCM) or 0 (TCD, eta 0)."""
        i, config, lcm = take_step(scheduler, timestep), scheduler.config, family(scheduler) == "lcm"
        times = [int(t) for t in self._table(scheduler.timesteps)]
        here, last = min(i + span[0], len(times) - 1), i + span[1] >= len(times)
        alpha = scheduler.alphas_cumprod[times[here]]
        end = torch.ones(()) if lcm else scheduler.alphas_cumprod[0]
        alpha_next = end if last else scheduler.alphas_cumprod[times[i + span[1]]]
        s_next = float((1 - alpha_next) ** 0.5)
        kappa, std = coefficients(self.kernel, 1.0, s_next, self._noise(stochastic, last=last), 1.0)
        clips = config.clip_sample and lcm  # TCD has the setting but never clips
        rule = _ddim_rule(config, alpha, alpha_next, kappa, std, clips)
        if not lcm:
            return rule
        return replace(rule, boundary=scheduler.get_scalings_for_boundary_condition_discrete(times[here]))

    def _flow_map(
        self, scheduler: SchedulerMixin, timestep: Timestep, stochastic: bool | None, span: Span
    ) -> FlowMapRule:
        """Return a step of a flow map, always deterministic and of the length that the model was called for."""
        if stochastic or span != ONE_STEP:
            raise ModelError("a flow map takes its own steps, without noise: use sampling.kernel=ode and compression=1")
        i = take_step(scheduler, timestep)
        sigmas = self._table(scheduler.sigmas)
        return FlowMapRule(sigmas[i], sigmas[i + 1])

    def _trigflow(self, scheduler: SchedulerMixin, timestep: Timestep, stochastic: bool | None, span: Span) -> DDIMRule:
        """Return a step of a consistency model in TrigFlow; kernel cps at noise level 1 is the scheduler's own."""
        i = take_step(scheduler, timestep)
        times = self._table(scheduler.timesteps)
        t, t_next = times[i + span[0]], times[i + span[1]]
        s, s_next = math.sin(t), math.sin(t_next)
        kappa, std = coefficients(self.kernel, s, s_next, self._noise(stochastic, last=s_next <= 0), s)
        scale = float(scheduler.config.sigma_data)
        cosines = math.cos(t), math.cos(t_next)
        return DDIMRule(s, s_next, *cosines, kappa, std * scale, "v_prediction", None, noise_scale=scale)

    def _ddim(self, scheduler: SchedulerMixin, timestep: Timestep, stochastic: bool | None, span: Span) -> DDIMRule:
        kernel, config = self.kernel, scheduler.config
        if hasattr(scheduler, "alphas_of_steps"):
            return self._ddim_along(scheduler, scheduler.alphas_of_steps, timestep, stochastic, span)
        timestep = int(self._value(scheduler, timestep))
        here, previous = (self._ddim_timestep(scheduler, timestep, steps) for steps in span)
        noise = 0.0 if kernel == "ode" else self._noise(stochastic, last=previous < 0)
        alpha, alpha_next = (
            scheduler.alphas_cumprod[t] if t >= 0 else scheduler.final_alpha_cumprod for t in (here, previous)
        )
        std = noise * scheduler._get_variance(timestep, previous) ** 0.5 if noise else torch.zeros(())
        direction = float((1 - alpha_next - std**2).clamp(min=0) ** 0.5)  # 0 up to rounding where alpha is 0
        return _ddim_rule(config, alpha, alpha_next, direction, float(std), config.clip_sample)

    def _ddim_along(
        self, scheduler: SchedulerMixin, alphas: torch.Tensor, timestep: Timestep, stochastic: bool | None, span: Span
    ) -> DDIMRule:
        """Return a step between values of alpha_bar that are known by step, `alphas` [steps + 1]."""
        here, following = (self._position(scheduler, timestep) + steps for steps in span)
        noise = 0.0 if self.kernel == "ode" else self._noise(stochastic, last=following + 1 >= len(alphas))
        alpha, alpha_next = alphas[here], alphas[following]
        variance = (1 - alpha_next) / (1 - alpha) * (1 - alpha / alpha_next)
        std = noise * float(variance.clamp(min=0)) ** 0.5
        direction = float((1 - alpha_next - std**2).clamp(min=0) ** 0.5)
        return _ddim_rule(scheduler.config, alpha, alpha_next, direction, std, scheduler.config.clip_sample)

    def _ddim_timestep(self, scheduler: SchedulerMixin, timestep: int, steps: int) -> int:
        """Return the timestep of the latents' noise level `steps` steps after `timestep`; negative at the end."""
        if steps == 0:
            return timestep
        if steps > 1:
            timestep = int(self._table(scheduler.timesteps)[self._position(scheduler, timestep) + steps - 1])
        return timestep - scheduler.config.num_train_timesteps // scheduler.num_inference_steps

    def _value(self, scheduler: SchedulerMixin, timestep: Timestep) -> float:
        """Return `timestep` as a number, looked up in the table of the schedule where it is an element of that."""
        schedule: torch.Tensor = scheduler.timesteps
        if isinstance(timestep, torch.Tensor) and timestep._base is schedule and timestep.numel() == 1:
            return self._table(schedule)[(timestep.storage_offset() - schedule.storage_offset()) // schedule.stride(0)]
        return float(timestep)

    def _table(self, schedule: torch.Tensor) -> list[float]:
        """Return sigmas or timesteps as floats: one device synchronisation per pipeline call, not per step."""
        if id(schedule) not in self._tables:
            # the tensor is kept so that its id is not reused
            self._tables[id(schedule)] = (schedule, schedule.tolist())
        return self._tables[id(schedule)][1]


def _ddim_rule(
    config: Any, alpha: torch.Tensor, alpha_next: torch.Tensor, direction: float, std: float, clips: bool
) -> DDIMRule:
    """Return the rule of a step between two values of alpha_bar; `config`: of the scheduler."""
    sigma, sigma_next = float((1 - alpha) ** 0.5), float((1 - alpha_next) ** 0.5)
    clip_range = config.clip_sample_range if clips else None
    roots = float(alpha**0.5), float(alpha_next**0.5)
    return DDIMRule(sigma, sigma_next, *roots, direction, std, config.prediction_type, clip_range)


def _noise(x: torch.Tensor, generators: Sequence[torch.Generator] | None) -> torch.Tensor:
    """Return standard normal fp32 noise shaped like `x`, sample by sample so that it is independent of the batch."""
    if generators is None:
        return torch.randn(x.shape, device=x.device)
    rows, remainder = divmod(len(x), len(generators))
    if remainder:
        raise ModelError(
            f"the latents have {len(x)} rows for {len(generators)} samples: their noise cannot be assigned"
        )
    shape = (rows, *x.shape[1:])
    return on_device(torch.cat([torch.randn(shape, generator=g, device=g.device) for g in generators]), x.device)


def on_device(noise: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `noise` to `device` without waiting: the device is still busy with what was launched before."""
    return noise if noise.device == device else noise.pin_memory().to(device, non_blocking=True)


def check_scheduler(scheduler: SchedulerMixin, kernel: str, noise_level: float, solver: str = "euler") -> None:
    """Raise `ModelError` if `scheduler` has no transition kernel, or does not support `kernel` with `solver`."""
    name, settings = type(scheduler).__name__, f"sampling.kernel={kernel} with sampling.solver={solver}"
    kind = family(scheduler)
    if kind in CONSISTENCY:
        if kernel not in ("cps", "ode") or solver != "euler":
            raise ModelError(
                f"{settings} is incompatible with the {name} of this consistency model pipeline: use cps "
                f"(noise_level={int(kind in RESAMPLES)} is its own sampler) and euler"
            )
        if scheduler.config.get("thresholding", False):
            raise ModelError(f"{name} with thresholding has no transition kernel: set thresholding=False")
    elif kind in FLOW:
        if scheduler.config.get("stochastic_sampling", False):
            raise ModelError("the scheduler has stochastic_sampling=True: gerl adds the noise itself, set it to False")
    elif kind == "edm":
        if solver != "euler":
            raise ModelError(
                f"sampling.solver={solver} is for sigmas in [0, 1], those of this pipeline's {name} go far "
                "beyond: use euler"
            )
    elif kind == "flow_map":
        if (kernel != "ode" and noise_level > 0) or solver != "euler":
            raise ModelError(
                f"{settings} is incompatible with this pipeline's {name}, whose model jumps between noise levels by "
                "an average velocity and does not model the noise in between: use ode and euler, with an algorithm "
                "that needs no noise (neighbor_grpo), or train the model that it was distilled from"
            )
    else:
        _check_ddim(scheduler, kernel, solver)


def _check_ddim(scheduler: SchedulerMixin, kernel: str, solver: str) -> None:
    """Raise `ModelError` if `scheduler` is not DDIM with `kernel` and `solver`."""
    config, name = scheduler.config, type(scheduler).__name__
    if family(scheduler) != "ddim":
        raise ModelError(
            f"the pipeline's scheduler is {name}, which has no transition kernel: set "
            "pipe.scheduler to FlowMatchEulerDiscreteScheduler or DDIMScheduler .from_config(pipe.scheduler.config)"
        )
    for key, value, allowed in (("kernel", kernel, ("ddim", "ode")), ("solver", solver, ("euler",))):
        if value not in allowed:
            raise ModelError(
                f"sampling.{key}={value} is for flow matching: this pipeline has a DDIMScheduler, use {allowed[0]}"
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


# --- Families of diffusers' schedulers that have transition kernels, and their requirements besides the rule

FAMILIES = {
    "FlowMatchEulerDiscreteScheduler": "euler",
    "FlowMatchLCMScheduler": "flow_lcm",  # consistency models of flow matching, which add new noise at each step
    "SCMScheduler": "trigflow",  # consistency models in TrigFlow, whose noise levels are angles
    "LCMScheduler": "lcm",  # latent consistency models (arXiv 2310.04378)
    "TCDScheduler": "tcd",  # trajectory consistency models (arXiv 2402.19159)
    "EDMEulerScheduler": "edm",  # preconditions input and output as EDM does (arXiv 2206.00364)
    "FlowMapEulerDiscreteScheduler": "flow_map",  # the output is the average velocity between two levels (AnyFlow)
    "DDIMScheduler": "ddim",
}
FLOW = ("euler", "flow_lcm", "flow")  # the output is a velocity, the sigmas are those of `x = (1 - s) x0 + s eps`
RESAMPLES = ("trigflow", "lcm", "flow_lcm")  # predict clean latents and noise them again: kernel cps at level 1
CONSISTENCY = (*RESAMPLES, "tcd")  # consistency models, whose steps have the kernel cps
COUNTS_STEPS = (*FLOW, *CONSISTENCY, "edm", "flow_map")  # look up their noise level by the step index
GIVES_MODEL_DTYPE = ("euler", "flow_lcm", "edm", "flow_map")  # the next latents have the dtype of the model output


def family(scheduler: SchedulerMixin) -> str | None:
    """Return the family of `scheduler`, None without transition kernel; "flow": flow matching of another class."""
    import diffusers  # imported lazily: the driver of a run does not need diffusers

    # older versions lack some of them
    kind_name = next(
        (name for kind, name in FAMILIES.items() if isinstance(scheduler, getattr(diffusers, kind, ()))), None
    )
    if kind_name not in FLOW and scheduler.config.get("prediction_type") == "flow_prediction":
        return "flow"
    return kind_name


def step_index(scheduler: SchedulerMixin, timestep: torch.Tensor | float) -> int:
    """Return the index of the step that a step-counting scheduler is about to take at `timestep`."""
    if scheduler.step_index is None:
        scheduler._init_step_index(timestep)
    index: int = scheduler.step_index
    return index


def take_step(scheduler: SchedulerMixin, timestep: torch.Tensor | float) -> int:
    """Let a step-counting scheduler pass the step it is about to take at `timestep`; return its index."""
    index = step_index(scheduler, timestep)
    scheduler._step_index = index + 1
    return index


def advance(scheduler: SchedulerMixin, timestep: torch.Tensor | float) -> None:
    """Move the step index of `scheduler` past `timestep`; inpainting reads the next sigma at that index."""
    if family(scheduler) in COUNTS_STEPS:
        scheduler._step_index = step_index(scheduler, timestep) + 1


def edm_scalings(scheduler: SchedulerMixin, c: float) -> tuple[float, float]:
    """Return `(skip, out)` of `x0h = skip x + out F` at noise level `c`, the fp32 numbers that the scheduler uses."""
    data, scale = scheduler.config.sigma_data, torch.tensor(c)
    sign = 1 if scheduler.config.prediction_type == "epsilon" else -1
    return float(data**2 / (scale**2 + data**2)), float(sign * scale * data / (scale**2 + data**2) ** 0.5)


@contextlib.contextmanager
def predicts_clean(scheduler: SchedulerMixin, on: bool) -> Iterator[None]:
    """With `on`, read the model output as clean latents in the next step of `scheduler` within the block."""
    if on:
        scheduler.__dict__["gerl_clean_output"] = True
    try:
        yield
    finally:
        scheduler.__dict__.pop("gerl_clean_output", None)


def output_is_clean(scheduler: SchedulerMixin) -> bool:
    """Whether the model output of the next step of `scheduler` is clean latents, see `predicts_clean`."""
    return "gerl_clean_output" in scheduler.__dict__


def scm_clean(timestep: torch.Tensor | float, model_output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the clean latents that an `SCMScheduler` returns besides the next ones, shape of `x`."""
    t = torch.as_tensor(timestep).flatten()[0]
    return torch.cos(t) * x - torch.sin(t) * model_output


def lcm_clean(
    scheduler: SchedulerMixin, timestep: torch.Tensor | float, model_output: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Return the clean latents that an `LCMScheduler` returns besides the next ones, shape of `x`."""
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

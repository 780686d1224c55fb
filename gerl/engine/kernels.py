"""The transition kernels of flow matching: one formula, one table.

With `s` = sigma, `s'` = next sigma, velocity `v`, `x0h = x - s v` and `eps_h = x + (1 - s) v`, every published sampler
is

    x' ~ Normal((1 - s') x0h + kappa * eps_h, std)

so a sampler is the pair `(kappa, std)`. Sigmas are Python floats: no look-up by timestep, no device synchronisation.
"""

import math
from dataclasses import dataclass, replace
from typing import get_args

import torch

from gerl.config.blocks import KernelName
from gerl.engine.batching import unwritten
from gerl.errors import ReplayError

KERNELS: tuple[str, ...] = get_args(KernelName)
NEARLY_ONE = 0.999  # UniPC-like schedules start at 0.9999, where sigma / (1 - sigma) explodes just as at 1
NO_CLEAN_LATENTS = (
    "a flow map is trained at its own latents: it predicts no clean ones, so algorithms that noise images again "
    "cannot train it; use one that replays its steps (neighbor_grpo)"
)


def coefficients(
    name: str, sigma: float, sigma_next: float, noise_level: float, sigma_one: float
) -> tuple[float, float]:
    """`(kappa, std)` of one step from `sigma` to `sigma_next`, both in [0, 1] and decreasing.

    `noise_level` is the eta of the respective paper; at 0 every kernel is the Euler step `(sigma_next, 0.0)`.
    `sigma_one`, the schedule's second sigma, stands in for `sigma` in Flow-SDE's `1 - sigma` where that vanishes (sigma
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
    """`(1 - s') x0h + kappa eps_h`, same shape as `x`, in fp32.

    Written as the Euler step plus the deviation of `kappa` from `s'`, so that `kappa == s'` gives bitwise what
    `FlowMatchEulerDiscreteScheduler.step` computes.
    """
    deviation = kappa - sigma_next
    a = 1.0 + deviation
    b = (sigma_next - sigma) + deviation * (1.0 - sigma)
    return a * x.float() + b * velocity.float()


def gaussian_log_prob(
    x_next: torch.Tensor, mean: torch.Tensor, std: float, overwritten: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-density of Normal(mean, std) at `x_next`, averaged over all non-batch dimensions, fp32: `[B]`.

    `x_next` is treated as data: no gradient flows into it. `overwritten` `[B, ...]` bool: what of it the pipeline
    replaces before the next step, and the average is not over.
    """
    if std <= 0:
        raise ValueError("a step with std 0 is deterministic and has no log-probability")
    z = (x_next.detach().float() - mean.float()) / std
    if overwritten is not None:
        z = unwritten(z, overwritten)
    return -0.5 * (z * z).flatten(1).mean(1) - math.log(std) - 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class FlowRule:
    """One step of a flow-matching schedule: how mean and std of the next latents follow from the model output.

    `inverted`: the schedule runs from 0 to 1 (Mochi), where `v -> -v` and `sigma -> 1 - sigma` give the usual one;
    `sigma` and `sigma_next` are stored in the usual direction.
    """

    sigma: float
    sigma_next: float
    kappa: float
    std: float
    inverted: bool = False

    @property
    def dt(self) -> float:
        """`sigma_next - sigma`, negative."""
        return self.sigma_next - self.sigma

    @property
    def jacobian(self) -> float:
        """`|d mean / d model_output| = |kappa (1 - s) - (1 - s') s|` (Precise, arXiv 2605.23522)."""
        return abs(self.kappa * (1 - self.sigma) - (1 - self.sigma_next) * self.sigma)

    def mean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        """Mean of the next latents, fp32, shape of `x`."""
        return transition_mean(x, self._velocity(model_output), self.sigma, self.sigma_next, self.kappa)

    def noised(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Clean latents noised to `sigma`: `(1 - s) x0 + s noise`, fp32, shape of `x0`."""
        return (1 - self.sigma) * x0.float() + self.sigma * noise.float()

    def target(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The output of a perfect model at `noised(x0, noise)`: the velocity `noise - x0`, fp32, shape of `x0`."""
        return self._velocity(noise.float() - x0.float())

    def clean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        """The clean latents that `model_output` predicts at `x`: `x - s v`, fp32, shape of `x`."""
        return x.float() - self.sigma * self._velocity(model_output.float())

    def _velocity(self, model_output: torch.Tensor) -> torch.Tensor:
        return -model_output if self.inverted else model_output


@dataclass(frozen=True)
class EDMRule:
    """One step of a schedule of `x = x0 + c eps` (EDM, arXiv 2206.00364), whose model output is the predicted noise.

    With `s = c / (1 + c)`, `x / (1 + c)` is on the path of flow matching at sigma `s`. So its transition to `c'` is

        x' ~ Normal(x0h + (1 + c') kappa eps_h, (1 + c') std),    x0h = x - c eps_h

    with the `(kappa, std)` of `coefficients` at `s` and `s'`, which are `sigma` and `sigma_next` here. At noise 0 that
    is the Euler step `x + (c' - c) eps_h`.
    """

    scale: float  # c, any positive number
    scale_next: float  # c'
    kappa: float
    std: float  # of x', hence times 1 + c'

    @property
    def sigma(self) -> float:
        """Noise level in [0, 1], that of flow matching."""
        return self.scale / (1 + self.scale)

    @property
    def sigma_next(self) -> float:
        """Noise level after the step, in [0, 1]."""
        return self.scale_next / (1 + self.scale_next)

    @property
    def dt(self) -> float:
        """`sigma_next - sigma`, negative."""
        return self.sigma_next - self.sigma

    @property
    def jacobian(self) -> float:
        """`|d mean / d model_output|`."""
        return abs((1 + self.scale_next) * self.kappa - self.scale)

    def mean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        """Mean of the next latents, fp32, shape of `x`; at noise 0 bitwise the scheduler's."""
        deviation = (1 + self.scale_next) * (self.kappa - self.sigma_next)
        return x.float() + ((self.scale_next - self.scale) + deviation) * model_output.float()

    def noised(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Clean latents noised: `x0 + c noise`, fp32, shape of `x0`."""
        return x0.float() + self.scale * noise.float()

    def target(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The output of a perfect model at `noised(x0, noise)`: the noise, fp32, shape of `x0`."""
        del x0
        return noise.float()

    def clean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        """The clean latents that `model_output` predicts at `x`: `x - c eps_h`, fp32, shape of `x`."""
        return x.float() - self.scale * model_output.float()


@dataclass(frozen=True)
class DenoisedRule(EDMRule):
    """A step of EDM with a preconditioned output F, which predicts the clean latents `skip x + out F`.

    The transition is that of `EDMRule`, with `eps_h = (x - x0h) / c`. Where a pipeline guides clean latents and steps
    with those (Cosmos 1), the output is `x0h` itself: skip 0, out 1.
    """

    skip: float
    out: float

    @property
    def jacobian(self) -> float:
        """`|d mean / d model_output|`."""
        return abs(self.out * (1 - (1 + self.scale_next) * self.kappa / self.scale))

    def mean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        """Mean of the next latents, fp32, shape of `x`; at noise 0 bitwise the scheduler's."""
        return super().mean(x, (x.float() - self.clean(x, model_output)) / self.scale)

    def target(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The output of a perfect model at `noised(x0, noise)`, fp32, shape of `x0`."""
        # (x0 - skip (x0 + c noise)) / out, without the difference of large numbers
        return ((1 - self.skip) * x0.float() - self.skip * self.scale * noise.float()) / self.out

    def clean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        """The clean latents that `model_output` predicts at `x`, fp32, shape of `x`."""
        if (self.skip, self.out) == (0.0, 1.0):
            return model_output.float()
        return self.skip * x.float() + self.out * model_output.float()


@dataclass(frozen=True)
class DDIMRule:
    """One DDIM step (arXiv 2010.02502, equations 12 and 16) of an epsilon-, v- or sample-prediction model.

    The coefficients are fp32 numbers, computed as `DDIMScheduler.step` computes them: at `std` 0 the result is bitwise
    the same. `sigma` is sqrt(1 - alpha_bar). Raises `ValueError` for other prediction types.

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
    noise_scale: float = 1.0  # std of what is added at noise level 1
    boundary: tuple[float, float] = (0.0, 1.0)  # c_skip, c_out of a consistency model (LCM): x0h is c_out x0 + c_skip x

    def __post_init__(self) -> None:
        if self.prediction_type not in ("epsilon", "v_prediction", "sample"):
            raise ValueError(f"unknown prediction_type {self.prediction_type!r}")

    @property
    def dt(self) -> float:
        """`sigma_next - sigma`, negative."""
        return self.sigma_next - self.sigma

    @property
    def jacobian(self) -> float:
        """`|d mean / d model_output|` where nothing is clipped."""
        clean = self.sqrt_alpha_next * self.boundary[1]  # the factor of the clean latents
        match self.prediction_type:
            case "epsilon":
                return abs(self.direction - clean * self.sigma / self.sqrt_alpha)
            case "v_prediction":
                return abs(self.direction * self.sqrt_alpha - clean * self.sigma)
            case _:  # sample
                return abs(clean - self.direction * self.sqrt_alpha / self.sigma)

    def mean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        """Mean of the next latents, fp32, shape of `x`."""
        x0, epsilon = self._predictions(x.float(), model_output.float())
        return self.sqrt_alpha_next * x0 + self.direction * epsilon

    def noised(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Clean latents noised to `sigma`: `sqrt(alpha_bar) x0 + sigma noise`, fp32, shape of `x0`."""
        return self.sqrt_alpha * x0.float() + self.sigma * self._scaled(noise)

    def target(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The output of a perfect model at `noised(x0, noise)`, fp32, shape of `x0`."""
        match self.prediction_type:
            case "epsilon":
                return self._scaled(noise)
            case "v_prediction":
                return self.sqrt_alpha * self._scaled(noise) - self.sigma * x0.float()
            case _:  # sample
                return x0.float()

    def clean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        """The clean latents that `model_output` predicts at `x`, clipped as in `mean`, fp32, shape of `x`."""
        return self._predictions(x.float(), model_output.float())[0]

    def _scaled(self, noise: torch.Tensor) -> torch.Tensor:
        return noise.float() * self.noise_scale if self.noise_scale != 1.0 else noise.float()

    def _predictions(self, x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Predicted clean latents, clipped, and predicted noise."""
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
class FlowMapRule:
    """One step of a flow map (AnyFlow), whose output is the average velocity from `sigma` to `sigma_next`.

    It says nothing of the clean latents, so there is no noise to add and none to train on: only the step itself is
    defined. Raises `ReplayError` for what forward-process algorithms ask.
    """

    sigma: float
    sigma_next: float
    std: float = 0.0

    @property
    def dt(self) -> float:
        """`sigma_next - sigma`, negative."""
        return self.sigma_next - self.sigma

    @property
    def jacobian(self) -> float:
        """`|d mean / d model_output|`."""
        return abs(self.dt)

    def mean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        """The next latents, fp32, shape of `x`; bitwise the scheduler's, which computes in fp64."""
        return (x.double() - (self.sigma - self.sigma_next) * model_output.double()).float()

    def noised(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        raise ReplayError(NO_CLEAN_LATENTS)

    def target(self, x0: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        raise ReplayError(NO_CLEAN_LATENTS)

    def clean(self, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        raise ReplayError(NO_CLEAN_LATENTS)


Rule = FlowRule | EDMRule | DDIMRule | FlowMapRule


def with_noise(rule: Rule, kernel: str, noise_level: float, sigma_one: float) -> Rule:
    """The rule of the same step with the noise of `kernel`; `sigma_one`: see `coefficients`.

    Of a flow map, and of a step of length 0, it is `rule`.
    """
    if isinstance(rule, FlowMapRule) or rule.dt == 0:
        return rule
    if isinstance(rule, DDIMRule):
        direction, std = _ddim_noise(rule, kernel, noise_level)
        return replace(rule, direction=direction, std=std)
    kappa, std = coefficients(kernel, rule.sigma, rule.sigma_next, noise_level, sigma_one)
    factor = 1.0 if isinstance(rule, FlowRule) else 1 + rule.scale_next
    return replace(rule, kappa=kappa, std=factor * std)


def _ddim_noise(rule: DDIMRule, kernel: str, noise_level: float) -> tuple[float, float]:
    """Direction and std of a step with noise: of DDIM, or of a consistency model, whose kernel is cps."""
    if kernel == "cps":
        kappa, std = coefficients("cps", 1.0, rule.sigma_next, noise_level, 1.0)
        return kappa, std * rule.noise_scale
    left = 1 - (rule.sqrt_alpha / rule.sqrt_alpha_next) ** 2
    std = noise_level * rule.sigma_next / rule.sigma * math.sqrt(max(left, 0.0)) if kernel == "ddim" else 0.0
    return math.sqrt(max(rule.sigma_next**2 - std**2, 0.0)), std


def leap(rule: FlowRule, sigma: float) -> FlowRule:
    """The Euler step from the noise level of `rule` to `sigma`, of any length: `x + (sigma - s) v`."""
    return replace(rule, sigma_next=sigma, kappa=sigma, std=0.0)

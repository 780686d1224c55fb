"""From a diffusers scheduler to the rule of its next step. Families of schedulers are known here, models are not."""

from typing import Any

import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from gerl.errors import ModelError
from gerl.workers.diffusers_model.kernels import DDIMRule, FlowRule, Rule, coefficients


class Transitions:
    """Gives the rule of each scheduler step of one pipeline call, and advances the scheduler's own step index."""

    def __init__(self, kernel: str, noise_level: float) -> None:
        self.kernel = kernel
        self.noise_level = noise_level
        self._sigmas: dict[int, tuple[torch.Tensor, list[float]]] = {}

    def next_rule(self, scheduler: Any, timestep: Any, stochastic: bool | None) -> Rule:
        """The rule of the step `scheduler` is about to take at `timestep`.

        `stochastic`: whether it adds noise; None: unless it is the last. Raises `ModelError` for schedulers without a
        transition kernel and for noise on the last step, which has no density.
        """
        if is_flow_matching(scheduler):
            return self._flow(scheduler, timestep, stochastic)
        if isinstance(scheduler, DDIMScheduler):
            return self._ddim(scheduler, int(timestep), stochastic)
        raise ModelError(
            f"the pipeline's scheduler is {type(scheduler).__name__}, which has no transition kernel: set "
            "pipe.scheduler to FlowMatchEulerDiscreteScheduler or DDIMScheduler .from_config(pipe.scheduler.config)"
        )

    def _noise(self, stochastic: bool | None, last: bool) -> float:
        if stochastic and last:
            raise ModelError(
                "the last denoising step is deterministic and has no log-probability: leave it out of the window"
            )
        return self.noise_level if (stochastic or (stochastic is None and not last)) else 0.0

    def _flow(self, scheduler: Any, timestep: Any, stochastic: bool | None) -> FlowRule:
        if scheduler.config.get("stochastic_sampling", False):
            raise ModelError("the scheduler has stochastic_sampling=True: gerl adds the noise itself, set it to False")
        if scheduler.step_index is None:
            scheduler._init_step_index(timestep)
        i = scheduler.step_index
        scheduler._step_index += 1
        sigmas = self._table(scheduler.sigmas)
        s, s_next, s_one = sigmas[i], sigmas[i + 1], sigmas[1]
        inverted = s_next > s
        if inverted:
            s, s_next, s_one = 1 - s, 1 - s_next, 1 - s_one
        if s > 1.001:
            raise ModelError(
                f"the scheduler's sigma is {s:.3g}: sigmas of flow matching lie in [0, 1], those of EDM have no kernel"
            )
        s = min(s, 1.0)
        noise = self._noise(stochastic, last=s_next <= 0)
        kappa, std = coefficients(self.kernel, s, s_next, noise, s_one)
        return FlowRule(s, s_next, kappa, std, inverted)

    def _ddim(self, scheduler: DDIMScheduler, timestep: int, stochastic: bool | None) -> DDIMRule:
        if self.kernel not in ("ddim", "ode"):
            raise ModelError(
                f"sampling.kernel={self.kernel} is for flow matching: this pipeline has a DDIMScheduler, use ddim"
            )
        config = scheduler.config
        if config.thresholding or config.rescale_betas_zero_snr:
            raise ModelError("DDIM with thresholding or rescale_betas_zero_snr has no transition kernel")
        previous = timestep - config.num_train_timesteps // scheduler.num_inference_steps
        noise = 0.0 if self.kernel == "ode" else self._noise(stochastic, last=previous < 0)
        alpha = scheduler.alphas_cumprod[timestep]
        alpha_next = scheduler.alphas_cumprod[previous] if previous >= 0 else scheduler.final_alpha_cumprod
        std = noise * scheduler._get_variance(timestep, previous) ** 0.5 if noise else torch.zeros(())
        return DDIMRule(
            sigma=float((1 - alpha) ** 0.5),
            sigma_next=float((1 - alpha_next) ** 0.5),
            sqrt_alpha=float(alpha**0.5),
            sqrt_alpha_next=float(alpha_next**0.5),
            direction=float((1 - alpha_next - std**2) ** 0.5),
            std=float(std),
            prediction_type=config.prediction_type,
            clip_range=config.clip_sample_range if config.clip_sample else None,
        )

    def _table(self, sigmas: torch.Tensor) -> list[float]:
        """`sigmas` as floats: one device synchronisation a pipeline call instead of one a step."""
        if id(sigmas) not in self._sigmas:
            self._sigmas[id(sigmas)] = (sigmas, sigmas.tolist())  # the tensor is kept so that its id stays taken
        return self._sigmas[id(sigmas)][1]


def is_flow_matching(scheduler: Any) -> bool:
    """Whether the scheduler's model output is a velocity and its sigmas those of `x = (1 - s) x0 + s eps`."""
    return (
        isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
        or scheduler.config.get("prediction_type") == "flow_prediction"
    )

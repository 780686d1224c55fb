"""What a rollout leaves behind: everything a replay needs to run the same denoising loop again."""

from dataclasses import dataclass, field
from typing import Any

import torch

from gerl.engine.kernels import Rule


@dataclass
class TapeStep:
    """One `scheduler.step` of the rollout."""

    rule: Rule
    x: torch.Tensor  # [B, ...] fp32 latents before the step
    x_next: torch.Tensor  # [B, ...] fp32 latents after it
    log_prob: torch.Tensor | None  # [B] fp32, None where the step was deterministic
    mean: torch.Tensor | None  # [B, ...] fp32 mean that x_next was drawn around, None where deterministic
    num_answers: int  # answers the pipeline had received when it took the step


@dataclass
class Answer:
    """What a method (`encode_prompt`, `prepare_latents`, ...) returned."""

    method: str
    value: Any


@dataclass
class ComponentCall:
    """What a component (`transformer`, `controlnet`, ...) returned during scheduler step `step`.

    `inputs`: the shapes of what it was given, as positional and named arguments on the device `meta`.
    """

    step: int
    component: str
    output: Any
    inputs: Any = None


@dataclass
class Tape:
    """A recorded call of a pipeline.

    One that was stopped has the component calls of the step it was stopped at, but not the step. `probe` is the tape of
    the same call for one sample, stopped at the first step: it shows where the batch dimension of each value is. Needed
    only to replay sub-batches and to branch.
    """

    call: dict[str, Any]
    batch_size: int
    steps: list[TapeStep] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    component_calls: list[ComponentCall] = field(default_factory=list)
    probe: "Tape | None" = None

    @property
    def stochastic_steps(self) -> list[int]:
        """Indices of the steps that drew noise, hence have a log-probability."""
        return [k for k, step in enumerate(self.steps) if step.log_prob is not None]

    def looped_components(self) -> set[str]:
        """Names of the components called in the denoising loop, not just before it.

        The last call before the first step is the loop's own: an expert for high noise may be called nowhere else.
        """
        inside = {c.component for c in self.component_calls if c.step > 0}
        first = [c.component for c in self.component_calls if c.step == 0]
        return inside | set(first[-1:]) if inside else set(first)

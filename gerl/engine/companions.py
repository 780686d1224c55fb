"""The modality that goes along with the trained one (the sound of a video), answered from a tape."""

from __future__ import annotations  # of diffusers, which the driver of a run does without

from typing import TYPE_CHECKING

import torch

from gerl.engine.families import advance
from gerl.engine.instrument import Timestep
from gerl.engine.tape import Tape

if TYPE_CHECKING:
    from diffusers import SchedulerMixin


class CompanionsFromTape:
    """The part of a head that hands out the recorded steps of the companion, in order: see `instrument.Head`."""

    tape: Tape
    accompanied = 0  # steps handed out so far

    def on_companion_step(
        self, scheduler: SchedulerMixin, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor
    ) -> torch.Tensor:
        """The latents after the step, fp32; raises `ReplayError` where `sample` are not those recorded before it."""
        del model_output
        recorded = self.tape.companion(self.accompanied, sample)
        self.accompanied += 1
        advance(scheduler, timestep)
        return recorded.x_next

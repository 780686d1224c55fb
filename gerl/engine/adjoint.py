"""The gradient of one step: of the parameters, and of the latents that the step began with.

The tape has the latents of every step, so a gradient goes back through a whole trajectory step by step: each one is
replayed with its latents as a leaf, is given the gradient of what it leads to, and gives that of its latents to the
step before. One denoiser graph is alive at a time, and memory does not grow with the number of steps.
"""

from __future__ import annotations  # of diffusers, which the driver of a run does without

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gerl.engine.guidance import CfgMode, guidance_roles
from gerl.engine.player import Player, ReplayedStep
from gerl.engine.replay import play
from gerl.engine.start import started_at
from gerl.engine.tape import Tape
from gerl.errors import ReplayError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class LatentsGradient:
    """The gradient of the latents before a step, `[B, ...]` fp32, as the two parts it is the sum of."""

    direct: torch.Tensor  # by the rule of the step, and what the pipeline does to the latents in between
    through: torch.Tensor  # by the denoiser, which is called with them


def pull_back(
    pipe: DiffusionPipeline,
    tape: Tape,
    k: int,
    leads_to: Callable[[ReplayedStep], torch.Tensor],
    gradient: torch.Tensor,
    index: Sequence[int] | None = None,
    latents: torch.Tensor | None = None,
    cfg: CfgMode = "joint",
    carry: bool = False,
) -> LatentsGradient | None:
    """Replay step `k`, add to the parameters' gradient that of `sum(leads_to(step) * gradient)`.

    `leads_to`: latents that follow from the step, such as `step.mean`; `gradient`: that of these, `[B, ...]`. With
    `carry` the gradient of the latents before the step is returned (None at the first one, whose latents are noise):
    these come out of the step before, so what a pipeline does to them in between is part of it. `latents`: others in
    place of the recorded ones of step `k`, which have no gradient. `index` and `cfg`: as for `replay`. A second
    modality (sound) is data: its gradient does not go back.

    Raises `ReplayError` as `replay` does, and with `carry` where a step has no call of the denoiser to itself.
    """
    part = tape if index is None else tape.rows(index)
    given: Mapping[int, torch.Tensor] = {} if latents is None else {k: latents}
    start = started_at(pipe, part, given[0]) if 0 in given else {}

    def on_step(_: int, step: ReplayedStep) -> torch.Tensor:
        return (leads_to(step) * gradient).sum()

    player = Player(part, on_step, [k], given, True, cfg)
    if cfg != "joint":
        player.roles = guidance_roles(pipe, tape, player.live_at, cfg)
    if carry and k > 0:
        if player.live_at != {k}:
            raise ReplayError(
                f"the denoiser call of step {k} is reused by the previous step, whose latents have a gradient of "
                "their own: rewards can only be differentiated through the last step of this pipeline"
            )
        player.carries_from, player.differentiable.carries = k, True
    with player.differentiable:
        play(pipe, player, start)
    if player.leaf is None:
        return None
    direct, through = player.direct, player.leaf.grad
    zero = torch.zeros_like(player.leaf)
    return LatentsGradient(zero if direct is None else direct, zero if through is None else through)

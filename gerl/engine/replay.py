"""Replay: the pipeline's own `__call__` once more, with gradient, teacher-forced by a tape.

The whole denoising loop runs, so loop index, sigmas, guidance intervals and expert switching are as in the rollout.
Methods answer from the tape; the denoiser runs only where a trained step needs it and hands out its recorded output
elsewhere; `scheduler.step` returns the recorded next latents. The graph is cut at the denoiser's output: a step's loss
is back-propagated through the pipeline's arithmetic (guidance) to that cut at once, and from there through the
denoiser before it runs again. So one step's graph is alive at a time, and none reaches from one step into another.

How a guided step runs the denoiser, with gradient through both halves or less, is `guidance`'s.
"""

from __future__ import annotations  # of diffusers, which the driver of a run does without

import contextlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gerl.engine.batching import Tree, select_call
from gerl.engine.guidance import CfgMode, guidance_roles
from gerl.engine.instrument import StopPipeline, routed, unguided
from gerl.engine.player import OnStep, Player
from gerl.engine.record import record_probe
from gerl.engine.stacked import Gatherer, StackedPlayer
from gerl.engine.start import started_at
from gerl.engine.tape import Tape
from gerl.errors import ReplayError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def replay(
    pipe: DiffusionPipeline,
    tape: Tape,
    on_step: OnStep,
    steps: Iterable[int] | None = None,
    index: Sequence[int] | None = None,
    latents: Mapping[int, torch.Tensor] | None = None,
    grad: bool = True,
    cfg: CfgMode = "joint",
    step_batch: int = 1,
) -> None:
    """Run the recorded call again and hand its trained steps to `on_step(k, step) -> loss or None`.

    A returned loss (scalar) is back-propagated at once; gradients accumulate in the parameters. `steps`: the trained
    steps, None: all stochastic ones. `index`: which samples of the tape, None: all. `latents`: `{k: x_k [B, ...]}` to
    train on instead of the recorded ones (forward-process algorithms), in the order of `index`. A pipeline that writes
    a condition into the latents (a first frame, what surrounds an inpainted part) gets them before it does, and
    `ReplayedStep.written` says where it did. `grad`: False runs without gradient, for reference outputs.

    `cfg`: what becomes of classifier-free guidance `u + w (c - u)` at the trained steps that have it. joint: gradient
    through the conditional output `c` and the unconditional one `u`. detach_uncond: the same values, but `u` is
    computed without gradient, which saves a quarter of the time or more. off: only `c` is computed and stands for `u`
    too, so that the model output is `c`: training without guidance what was sampled with it (CFG distillation).

    `step_batch`: so many trained steps in one forward and backward pass of the denoiser, whose memory grows with them;
    the same but for rounding. See `stacked`.

    Raises `ReplayError` where the pipeline does not do what it did in the rollout, or guides in a way that `cfg` other
    than joint cannot take apart.
    """
    part = tape if index is None else tape.rows(index)
    if step_batch > 1 and (part.probe is None or part.probe.batch_size == part.batch_size):
        part = replace(part, probe=_probe_of(pipe, part))
    given = latents or {}
    start = started_at(pipe, part, given[0]) if 0 in given else {}
    player = Player(part, on_step, steps, given, grad, cfg)
    if step_batch > 1 and len(player.live_at) > 1:
        gatherer = Gatherer(part, on_step, steps, given, False, cfg)
        play(pipe, gatherer, start)
        player = stacked = StackedPlayer(part, on_step, steps, given, grad, cfg)
        stacked.plan(gatherer.gathered, step_batch)
    if cfg != "joint":
        player.roles = guidance_roles(pipe, tape, player.live_at, cfg)
    with player.differentiable:
        play(pipe, player, start)


def play(pipe: DiffusionPipeline, player: Player, start: dict[int, Tree]) -> None:
    """Run the pipeline with `player`, up to the last trained step; `start`: see `started_at`."""
    player.components, player.start = pipe.components, start
    call = select_call(player.tape.call, range(player.tape.batch_size))  # fresh: some pipelines write into their lists
    # diffusers decorates `__call__` with torch.no_grad, under which nothing could be trained
    undecorated = inspect.unwrap(type(pipe).__call__)
    plainly = unguided(pipe) if player.cfg == "off" else contextlib.nullcontext()
    with contextlib.suppress(StopPipeline), torch.set_grad_enabled(player.grad), routed(pipe, player), plainly:
        undecorated(pipe, **call)
        raise ReplayError(
            f"the pipeline ended before trained step {max(player.trained)}: it took fewer steps than recorded"
        )


def _probe_of(pipe: DiffusionPipeline, tape: Tape) -> Tape:
    """A probe of `tape` of another number of samples, which shows batch dimensions."""
    try:
        return record_probe(pipe, tape.call, [0] if tape.batch_size > 1 else [0, 0])
    except (ValueError, RuntimeError, IndexError, TypeError, AttributeError) as error:
        raise ReplayError(
            f"{type(pipe).__name__} takes one prompt per call, which does not reveal its batch dimensions: use "
            f"step_batch=1 ({error})"
        ) from error

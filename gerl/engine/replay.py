"""Replay: the pipeline's own `__call__` once more, with gradient, teacher-forced by a tape.

The whole denoising loop runs, so loop index, sigmas, guidance intervals and expert switching are as in the rollout.
Methods answer from the tape; the denoiser runs only where a trained step needs it and hands out its recorded output
elsewhere; `scheduler.step` returns the recorded next latents. The graph is cut at the denoiser's output: a step's loss
is back-propagated through the pipeline's arithmetic (guidance) to that cut at once, and from there through the
denoiser before it runs again. So one step's graph is alive at a time, and none reaches from one step into another.

How a guided step runs the denoiser, with gradient through both halves or less, is `guidance`'s.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gerl.engine.batching import detached_copy, materialised, rows, select_call, take
from gerl.engine.differentiable import Differentiable
from gerl.engine.guidance import (
    CfgMode,
    Role,
    check_stands_for,
    guidance_roles,
    guided,
    has_rows_in_list,
)
from gerl.engine.instrument import StopPipeline, routed
from gerl.engine.kernels import Rule, gaussian_log_prob
from gerl.engine.tape import Tape
from gerl.engine.transitions import advance
from gerl.errors import ReplayError


@dataclass
class ReplayedStep:
    """A trained step of a replay; `B` is the number of replayed samples. `x`, `x_next` and recorded values are data."""

    rule: Rule
    x: torch.Tensor  # [B, ...] fp32
    x_next: torch.Tensor | None  # [B, ...] fp32; None where `latents` replaced the recorded x
    recorded_log_prob: torch.Tensor | None  # [B] fp32; None there and where the step was deterministic
    recorded_mean: torch.Tensor | None  # [B, ...] fp32 mean under the rollout's weights; None as recorded_log_prob
    model_output: torch.Tensor  # [B, ...] fp32, with graph

    @property
    def std(self) -> float:
        """Standard deviation of the transition, 0.0 at a deterministic step."""
        return self.rule.std

    @property
    def sigma(self) -> float:
        """Noise level of `x`, in [0, 1]."""
        return self.rule.sigma

    @property
    def sigma_next(self) -> float:
        """Noise level of `x_next`, in [0, 1]."""
        return self.rule.sigma_next

    @cached_property
    def mean(self) -> torch.Tensor:
        """Mean of the transition, `[B, ...]` fp32, with graph."""
        return self.rule.mean(self.x, self.model_output)

    @cached_property
    def log_prob(self) -> torch.Tensor:
        """Log-probability of the recorded `x_next` under the current weights, `[B]` fp32, with graph."""
        if self.x_next is None or self.std == 0:
            raise ReplayError("only stochastic steps with their recorded latents have a log-probability")
        return gaussian_log_prob(self.x_next, self.mean, self.std)


OnStep = Callable[[int, ReplayedStep], torch.Tensor | None]


def replay(
    pipe: Any,
    tape: Tape,
    on_step: OnStep,
    steps: Iterable[int] | None = None,
    index: Sequence[int] | None = None,
    latents: Mapping[int, torch.Tensor] | None = None,
    grad: bool = True,
    cfg: CfgMode = "joint",
) -> None:
    """Run the recorded call again and hand its trained steps to `on_step(k, step) -> loss or None`.

    A returned loss (scalar) is back-propagated at once; gradients accumulate in the parameters. `steps`: the trained
    steps, None: all stochastic ones. `index`: which samples of the tape, None: all. `latents`: `{k: x_k [B, ...]}` to
    train on instead of the recorded ones (forward-process algorithms), in the order of `index`. `grad`: False runs
    without gradient, for reference outputs.

    `cfg`: what becomes of classifier-free guidance `u + w (c - u)` at the trained steps that have it. joint: gradient
    through the conditional output `c` and the unconditional one `u`. detach_uncond: the same values, but `u` is
    computed without gradient, which saves a quarter of the time or more. off: only `c` is computed and stands for `u`
    too, so that the model output is `c`: training without guidance what was sampled with it (CFG distillation).

    Raises `ReplayError` where the pipeline does not do what it did in the rollout, or guides in a way that `cfg` other
    than joint cannot take apart.
    """
    call = select_call(tape.call, range(tape.batch_size) if index is None else index)
    player = Player(tape, on_step, steps, index, latents or {}, grad, cfg)
    player.components = pipe.components
    if cfg != "joint":
        player.roles = guidance_roles(pipe, tape, player.live_at, cfg)
    undecorated = inspect.unwrap(type(pipe).__call__)  # without @torch.no_grad
    finished = False
    with torch.set_grad_enabled(grad), player.differentiable, routed(pipe, player):
        try:
            undecorated(pipe, **call)
        except StopPipeline:
            finished = True
    if not finished:
        raise ReplayError(
            f"the pipeline ended before trained step {max(player.trained)}: it took fewer steps than recorded"
        )


class Player:
    """The head of a replay: see `instrument.Head`."""

    def __init__(
        self,
        tape: Tape,
        on_step: OnStep,
        steps: Iterable[int] | None,
        index: Sequence[int] | None,
        latents: Mapping[int, torch.Tensor],
        grad: bool,
        cfg: CfgMode,
    ) -> None:
        self.tape, self.on_step, self.index, self.latents, self.grad = tape, on_step, index, latents, grad
        self.cfg = cfg
        self.roles: dict[tuple[int, int], Role] = {}  # of the live calls by position, where cfg is not joint
        self.components: Mapping[str, Any] = {}  # of the pipeline, by name
        self.differentiable = Differentiable()
        self.conditional: Any = None  # the latest output of a separate conditional call
        self.trained = set(tape.stochastic_steps if steps is None else steps)
        if not self.trained or self.trained - set(range(len(tape.steps))):
            raise ReplayError(f"steps {sorted(self.trained)} cannot be replayed: the tape has {len(tape.steps)} steps")
        if index is not None and tape.batch_size > 1 and tape.probe is None:
            raise ReplayError("replaying a sub-batch needs a tape recorded with probe=True")
        for k, given in latents.items():
            if given.shape != self._rows(tape.steps[k].x).shape:
                raise ReplayError(
                    f"latents of step {k} have shape {list(given.shape)}, the replayed ones "
                    f"{list(self._rows(tape.steps[k].x).shape)}: give one row per replayed sample"
                )
        self.step = 0
        self.answered = 0
        self.looped = tape.looped_components()
        loop = [c for c in tape.component_calls if c.component in self.looped]
        if not loop:
            raise ReplayError(
                "the pipeline called none of its components in the denoising loop: nothing can be trained"
            )
        # two scheduler streams may share one denoiser call: a step is served by the last call before it
        self.live_at = {max(c.step for c in loop if c.step <= k) for k in self.trained}
        self.calls = iter(loop)
        self.position = (-1, 0)  # (scheduler step, component calls within it)
        probe = tape.probe.component_calls if tape.probe else []
        self.probed = [c for c in probe if c.component in self.looped]
        self.cuts: list[tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]] = []

    def on_method(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        del method, args, kwargs
        if self.answered == len(self.tape.answers) or self.tape.answers[self.answered].method != name:
            raise ReplayError(f"the replay calls {name}, which the rollout did not call at this point")
        recorded = self.tape.answers[self.answered].value
        probe = self.tape.probe.answers if self.tape.probe else []
        # past the probe's end (later loops of a long pipeline) the last value of that name shows the batch dimension
        alike = probe[self.answered : self.answered + 1] or [a for a in probe if a.method == name]
        self.answered += 1
        value = self._samples(recorded, alike[-1].value if alike else None)
        return self._with_given_start(value) if 0 in self.latents and self.step == 0 else value

    def on_component(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name not in self.looped:
            return forward(*args, **kwargs)
        recorded = next(self.calls, None)
        if recorded is None or (recorded.component, recorded.step) != (name, self.step):
            raise ReplayError(f"the replay calls {name} at step {self.step}, which the rollout did not do")
        nth = self.position[1] + 1 if self.position[0] == self.step else 0
        self.position = (self.step, nth)
        if self.step not in self.live_at:
            probed = self.probed[nth].output if nth < len(self.probed) else None
            return materialised(self._samples(recorded.output, probed), self.tape.steps[0].x.device)
        if self.cuts and self.cuts[0][0] != self.step:
            self._backward_through_denoiser()
        forward = functools.partial(self.differentiable.run, self.components[name], forward)
        role = self.roles.get(self.position)
        if role == "unconditional" and self.cfg == "off":
            check_stands_for(self.conditional, recorded.output, self.step)
            return self.conditional  # the same cut: the gradients of both meet in it
        if role:
            half = len(self._rows(self.tape.steps[self.step].x))
            alike = [c for c in (self.probed[nth : nth + 1] + [recorded]) if c.component == name]
            forward = guided(forward, role, self.cfg, half, has_rows_in_list(recorded.output), alike)
        cut: list[tuple[torch.Tensor, torch.Tensor]] = []

        def leaf(value: Any) -> Any:
            if not (torch.is_tensor(value) and value.requires_grad):
                return value
            cut.append((value, value.detach().requires_grad_()))
            return cut[-1][1]

        output = tree_map(leaf, forward(*args, **kwargs))
        self.cuts.append((self.step, cut))
        if role == "conditional":
            self.conditional = output
        return output

    def on_scheduler_step(
        self, scheduler: Any, model_output: torch.Tensor, timestep: Any, sample: torch.Tensor
    ) -> torch.Tensor:
        k, recorded = self.step, self.tape.steps[self.step]
        x = self.latents[k].float() if k in self.latents else self._rows(recorded.x)
        if sample.shape != x.shape or not torch.equal(x.to(sample.dtype), sample):
            raise ReplayError(f"the pipeline did not arrive at the recorded latents at step {k}: it cannot be replayed")
        if self.answered != recorded.num_answers:
            raise ReplayError(
                f"the pipeline had {self.answered} answers at step {k}, {recorded.num_answers} in the rollout: it "
                "draws noise once per sample and can only be replayed in whole batches"
            )
        advance(scheduler, timestep)
        if k in self.trained:
            self._train(k, x, model_output)
        self.step += 1
        if self.step > max(self.trained):
            self._backward_through_denoiser()
            raise StopPipeline
        return self.latents[k + 1].float() if k + 1 in self.latents else self._rows(recorded.x_next)

    def _train(self, k: int, x: torch.Tensor, model_output: torch.Tensor) -> None:
        if self.grad and not model_output.requires_grad:
            raise ReplayError(f"no gradient reaches the model output at step {k}: nothing of the denoiser is trained")
        recorded = self.tape.steps[k]
        given = k in self.latents
        x_next, log_prob, mean = (
            None if value is None or given else self._rows(value)
            for value in (recorded.x_next, recorded.log_prob, recorded.mean)
        )
        loss = self.on_step(k, ReplayedStep(recorded.rule, x, x_next, log_prob, mean, model_output.float()))
        if loss is not None:
            leaves = [leaf for _, cut in self.cuts for _, leaf in cut]
            # retain_graph: a second scheduler stream may share this denoiser call
            torch.autograd.backward(loss, inputs=leaves, retain_graph=True)

    def _backward_through_denoiser(self) -> None:
        """Second half of the backward pass: from the cut to the parameters."""
        for _, cut in reversed(self.cuts):
            reached = [(value, leaf.grad) for value, leaf in cut if leaf.grad is not None]
            if reached:
                torch.autograd.backward([v for v, _ in reached], [g for _, g in reached])
        self.cuts = []

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The replayed samples of a recorded `[B, ...]` or `[r * B, ...]` (rows of a sample together) tensor."""
        return tensor if self.index is None else rows(tensor, self.index, self.tape.batch_size)

    def _samples(self, full: Any, one: Any) -> Any:
        return detached_copy(full) if self.index is None else take(full, one, self.index, self.tape.batch_size)

    def _with_given_start(self, value: Any) -> Any:
        """`value` with the recorded initial latents, where it holds them, replaced by the caller's."""
        start, given = self._rows(self.tape.steps[0].x), self.latents[0]

        def swap(v: Any) -> Any:
            same = torch.is_tensor(v) and v.shape == start.shape and torch.equal(v, start.to(v.dtype))
            return given.to(v.dtype, copy=True) if same else v

        return tree_map(swap, value)

"""The head of a replay: answers from a tape, runs the denoiser where a trained step needs it, and goes back through it.

Every answer is compared with the recording (name, step, latents): a pipeline that does something else, because of a
cache, a random draw or a changed argument, would give a ratio and a gradient that look sane and are wrong.
"""

from __future__ import annotations  # of diffusers, which the driver of a run does without

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_map

from gerl.engine.alike import first_of_kind, once_per_kind
from gerl.engine.batching import Tree, detached_copy, materialised, unwritten
from gerl.engine.companions import CompanionsFromTape
from gerl.engine.differentiable import Differentiable
from gerl.engine.families import advance
from gerl.engine.guidance import CfgMode, Role, check_stands_for, guided, has_rows_in_list
from gerl.engine.instrument import StopPipeline, Timestep
from gerl.engine.kernels import Rule, gaussian_log_prob
from gerl.engine.loss_scale import loss_scale, unscaled
from gerl.engine.tape import ComponentCall, Tape, TapeStep, probed_call
from gerl.errors import ReplayError

if TYPE_CHECKING:
    from diffusers import SchedulerMixin


@dataclass
class ReplayedStep:
    """A trained step of a replay; `B` is the number of replayed samples. `x`, `x_next` and recorded values are data."""

    rule: Rule
    x: torch.Tensor  # [B, ...] fp32
    x_next: torch.Tensor | None  # [B, ...] fp32; None where `latents` replaced the recorded x
    recorded_log_prob: torch.Tensor | None  # [B] fp32; None there and where the step was deterministic
    tape_mean: torch.Tensor | None  # [B, ...] fp32; None as recorded_log_prob, on the device meta where not kept
    model_output: torch.Tensor  # [B, ...] fp32, with graph
    written: torch.Tensor | None = None  # [B, ...] bool, where the pipeline wrote its condition over `latents` given
    overwritten: torch.Tensor | None = None  # [B, ...] bool, what of `x_next` it writes over: see `Tape.overwritten`

    def part(self, values: torch.Tensor) -> torch.Tensor:
        """The part of `values` `[B, ...]` of latents that reach the images: `[B, N]`, or `values` where all do."""
        return unwritten(values, self.overwritten)

    def reached(self) -> ReplayedStep:
        """The step of the latents that reach the images, all tensors as `[B, N]`; itself where all do."""
        if self.overwritten is None:
            return self
        x_next = None if self.x_next is None else self.part(self.x_next)
        kept = self.tape_mean is None or self.tape_mean.is_meta
        mean = self.tape_mean if kept or self.tape_mean is None else self.part(self.tape_mean)
        x, output = self.part(self.x), self.part(self.model_output)
        return replace(self, x=x, x_next=x_next, tape_mean=mean, model_output=output, overwritten=None)

    @property
    def recorded_mean(self) -> torch.Tensor | None:
        """Mean under the rollout's weights, `[B, ...]` fp32; `ReplayError` where a lean tape was kept without."""
        if self.tape_mean is not None and self.tape_mean.is_meta:
            raise ReplayError("the recorded mean was not kept: an algorithm that reads it must declare reads_means")
        return self.tape_mean

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
        """Log-probability of the recorded `x_next` over the latents that reach the images, `[B]` fp32, with graph."""
        if self.x_next is None or self.std == 0:
            raise ReplayError("only stochastic steps with their recorded latents have a log-probability")
        return gaussian_log_prob(self.x_next, self.mean, self.std, self.overwritten)


Cut = list[tuple[torch.Tensor, torch.Tensor]]  # an output of the denoiser, and the leaf that stands for it
OnStep = Callable[[int, ReplayedStep], torch.Tensor | None]
OfRows = Callable[[int], Callable[..., object]]  # rows of latents -> what is called for so many


class Player(CompanionsFromTape):
    """The head of a replay: see `instrument.Head`."""

    def __init__(
        self,
        tape: Tape,
        on_step: OnStep,
        steps: Iterable[int] | None,
        latents: Mapping[int, torch.Tensor],
        grad: bool,
        cfg: CfgMode,
    ) -> None:
        self.tape, self.on_step, self.latents, self.grad = tape, on_step, latents, grad
        self.cfg = cfg
        self.roles: dict[tuple[int, int], Role] = {}  # of the live calls by position, where cfg is not joint
        self.components: Mapping[str, torch.nn.Module] = {}  # of the pipeline, by name
        self.differentiable = Differentiable()
        self.conditional: Tree = None  # the latest output of a separate conditional call
        self.trained = set(tape.stochastic_steps if steps is None else steps)
        if not self.trained or self.trained - set(range(len(tape.steps))):
            raise ReplayError(f"steps {sorted(self.trained)} cannot be replayed: the tape has {len(tape.steps)} steps")
        check_kept(tape, self.trained, latents, cfg)
        for k, given in latents.items():
            if given.shape != tape.steps[k].x.shape:
                raise ReplayError(
                    f"latents of step {k} have shape {list(given.shape)}, the replayed ones "
                    f"{list(tape.steps[k].x.shape)}: expected one row per replayed sample"
                )
        self.start: dict[int, Tree] = {}  # answers that start at the caller's latents, by position
        self.step = 0
        self.answered = 0
        self.looped = tape.looped_components()
        loop = [c for c in tape.component_calls if c.component in self.looped]
        if not loop:
            raise ReplayError(
                "the pipeline called none of its components in the denoising loop: there is nothing to train"
            )
        self.live_at = tape.live_at(self.trained)
        self.calls = iter(loop)
        self.position = (-1, 0)  # (scheduler step, component calls within it)
        probe = tape.probe.component_calls if tape.probe else []
        self.probed = [c for c in probe if c.component in self.looped]
        self.parted = False  # whether a step was seen at which no two samples are at the same latents
        self.cuts: list[tuple[int, Cut]] = []
        self.scales: dict[int, float] = {}  # of the losses that went back to the leaves of a step; absent: 1
        self.carries_from: int | None = None  # the step whose latents get a gradient, see `adjoint`
        self.leaf: torch.Tensor | None = None  # these latents, as the step before it hands them out
        self.direct: torch.Tensor | None = None  # the part of their gradient that does not go through the denoiser

    def on_method(self, name: str, method: Callable[..., object], *args: object, **kwargs: object) -> object:
        del method, args, kwargs
        if self.answered == len(self.tape.answers) or self.tape.answers[self.answered].method != name:
            raise ReplayError(f"the replay calls {name}, which the rollout did not call at this point")
        value = self.start.get(self.answered, self.tape.answers[self.answered].value)
        self.answered += 1
        return detached_copy(value)

    def on_component(self, name: str, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        if name not in self.looped:
            return forward(*args, **kwargs)
        recorded = next(self.calls, None)
        if recorded is None or (recorded.component, recorded.step) != (name, self.step):
            raise ReplayError(f"the replay calls {name} at step {self.step}, which the rollout did not")
        nth = self.position[1] + 1 if self.position[0] == self.step else 0
        self.position = (self.step, nth)
        if self.step not in self.live_at:
            return self._recorded(recorded)
        return self._run(name, forward, recorded, args, kwargs)

    def _recorded(self, call: ComponentCall) -> object:
        return materialised(detached_copy(call.output), self.tape.steps[0].x.device)

    def _run(
        self,
        name: str,
        forward: Callable[..., object],
        recorded: ComponentCall,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        """The output of component `name` at a step that is trained."""
        # not before: a second scheduler stream may have used the same output, and one pass serves both; and not later:
        # the graph of this step has to be gone before the next one is built
        if self.cuts and self.cuts[0][0] != self.step:
            self._backward_through_denoiser()
        forward = functools.partial(self.differentiable.run, self.components[name], forward)
        role = self.roles.get(self.position)
        if role == "unconditional" and self.cfg == "off":
            check_stands_for(self.conditional, recorded.output, self.step)
            return self.conditional  # the same cut: the gradients of both meet in it
        output = self._cut(self._once_per_kind(self._guided(forward, role, recorded), recorded)(*args, **kwargs))
        if role == "conditional":
            self.conditional = output
        return output

    def _guided(self, forward: Callable[..., object], role: Role | None, recorded: ComponentCall) -> OfRows:
        """`forward` as a function of how many rows of latents it is called for."""
        if role is None:
            return lambda rows: forward
        nth = self.position[1]
        alike = [c for c in (self.probed[nth : nth + 1] + [recorded]) if c.component == recorded.component]
        in_list = has_rows_in_list(recorded.output)
        return lambda rows: guided(forward, role, self.cfg, rows, in_list, alike)

    def _once_per_kind(self, of_rows: OfRows, recorded: ComponentCall) -> Callable[..., object]:
        """The denoiser, run once for samples that are at the same latents."""
        x, n, probe = self.tape.steps[self.step].x, self.tape.batch_size, self.tape.probe
        # merged, samples would get a gradient of their latents together
        self.parted = self.parted or self.leaf is not None
        if self.parted or self.step in self.latents or probe is None or probe.batch_size == n or not self.probed:
            return of_rows(len(x))
        kinds = first_of_kind(x)
        self.parted = len(set(kinds)) == len(kinds)  # trajectories that have parted do not meet again
        if self.parted or len(kinds) != n:
            return of_rows(len(x))
        shown = probed_call(self.probed, recorded, self.position[1], n, probe.batch_size)
        return once_per_kind(of_rows, kinds, recorded, shown, probe.batch_size)

    def _cut(self, value: object) -> object:
        """`value`, an output of the denoiser at this step, in leaves that the losses go back to."""
        # the pipeline goes on from leaves: the graph of a loss is then the pipeline's own arithmetic, which is small,
        # and through latents that carry over (momentum of guidance, say) it cannot reach an earlier step's denoiser
        cut: Cut = []

        def leaf(value: object) -> object:
            if not (torch.is_tensor(value) and value.requires_grad):
                return value
            cut.append((value, value.detach().requires_grad_()))
            return cut[-1][1]

        found = tree_map(leaf, value)
        self.cuts.append((self.step, cut))
        return found

    def on_scheduler_step(
        self, scheduler: SchedulerMixin, model_output: torch.Tensor, timestep: Timestep, sample: torch.Tensor
    ) -> torch.Tensor:
        k, recorded = self.step, self.tape.steps[self.step]
        x, written = self._arrived(k, recorded, sample)
        if self.answered != recorded.num_answers:
            raise ReplayError(
                f"the pipeline had {self.answered} outputs at step {k}, {recorded.num_answers} in the rollout: it "
                "samples noise once per sample and can only be replayed in whole batches"
            )
        advance(scheduler, timestep)
        if k in self.trained:
            self._train(k, x, model_output, written)
        self.step += 1
        if self.step > max(self.trained):
            self._backward_through_denoiser()
            raise StopPipeline
        if k + 1 == self.carries_from:
            self.leaf = recorded.x_next.detach().clone().requires_grad_()
            return self.leaf
        return self.latents[k + 1].float() if k + 1 in self.latents else recorded.x_next

    def _arrived(self, k: int, recorded: TapeStep, sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The fp32 latents of step `k`, and where the pipeline wrote its condition over the caller's (None: nowhere).

        Such values have to be those of the recording.
        """
        given = self.latents.get(k)
        x = recorded.x if given is None else given.float()
        if sample.shape == x.shape and torch.equal(x.to(sample.dtype), sample):
            if k == self.carries_from and self.leaf is not None:
                moved = sample.float()
                x = x + (moved - moved.detach())  # the exact values, with the graph of what the pipeline did to them
            return x, None if given is None else recorded.written
        if given is not None and (sample.shape != x.shape or recorded.x.is_meta):
            raise ReplayError(
                f"the pipeline did not reach the latents given for step {k} (it steps several latents in turn, or "
                "edits them): algorithms that noise images again cannot train it, policy gradients can"
            )
        if given is None:
            raise ReplayError(f"the pipeline did not reach the recorded latents at step {k}: it cannot be replayed")
        written = sample != x.to(sample.dtype)
        if recorded.written is not None:
            written = written | recorded.written
        if not torch.equal(torch.where(written, recorded.x.to(sample.dtype), x.to(sample.dtype)), sample):
            raise ReplayError(
                f"the pipeline did not reach the latents given for step {k}: it mixes its condition with them, and "
                "cannot be trained on noised images"
            )
        return torch.where(written, recorded.x, x), written

    def _train(self, k: int, x: torch.Tensor, model_output: torch.Tensor, written: torch.Tensor | None) -> None:
        if self.grad and not model_output.requires_grad:
            raise ReplayError(f"no gradient reaches the model output at step {k}: no part of the denoiser is trained")
        recorded = self.tape.steps[k]
        given = k in self.latents
        x_next, log_prob, mean = (
            None if given else value for value in (recorded.x_next, recorded.log_prob, recorded.mean)
        )
        output = model_output.float()
        overwritten = None if given else self.tape.overwritten(k)
        loss = self.on_step(k, ReplayedStep(recorded.rule, x, x_next, log_prob, mean, output, written, overwritten))
        if loss is not None:
            latest = self.cuts[-1][0]  # those of earlier steps are there where several run in one forward pass
            leaves = [leaf for step, cut in self.cuts if step == latest for _, leaf in cut]
            if any(leaf.dtype == torch.float16 for leaf in leaves):  # one scale for all that goes back to these leaves
                loss = loss * self.scales.setdefault(latest, loss_scale(loss, output))
            # retain_graph: a second scheduler stream may share this denoiser call
            leaves += [] if self.leaf is None else [self.leaf]
            torch.autograd.backward(loss, inputs=leaves, retain_graph=True)
            if self.leaf is not None:
                self.direct, self.leaf.grad = self.leaf.grad, None
                if self.direct is not None and latest in self.scales:
                    self.direct /= self.scales[latest]

    def _backward_through_denoiser(self) -> None:
        """Second half of the backward pass: from the cut to the parameters."""
        for step, cut in reversed(self.cuts):
            self._backward(cut, self.scales.get(step, 1.0))
        self.cuts, self.scales = [], {}

    def _backward(self, cut: Cut, scale: float) -> None:
        """From the leaves in `cut`, whose gradients are `scale` times as large, to the parameters."""
        reached = [(value, leaf.grad) for value, leaf in cut if leaf.grad is not None]
        if not reached:
            return
        looped = (p for name in self.looped for p in self.components[name].parameters() if p.requires_grad)
        with unscaled([*looped, *([] if self.leaf is None else [self.leaf])] if scale != 1 else [], scale):
            torch.autograd.backward([v for v, _ in reached], [g for _, g in reached])


def check_kept(tape: Tape, trained: set[int], latents: Mapping[int, torch.Tensor], cfg: CfgMode) -> None:
    """Raise `ReplayError` if a lean tape lacks what this replay reads."""
    reads = tape.reads
    if reads is None:
        return
    known = trained <= reads.steps if reads.chain else trained == {k for k in reads.steps if k <= max(trained)}
    if not known:
        raise ReplayError(
            f"steps {sorted(trained)} cannot be replayed: the lean tape was kept for steps {sorted(reads.steps)}"
        )
    if cfg != "joint" and not reads.outputs:
        raise ReplayError(f"cfg {cfg} reads recorded outputs of the denoiser, which the lean tape does not have")
    if reads.forward and trained - latents.keys():
        raise ReplayError("the lean tape does not have the latents of its trained steps: pass them as latents")

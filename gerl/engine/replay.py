"""Replay: another pass through the pipeline's own `__call__`, with gradient, teacher-forced by a tape."""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gerl.engine.guidance import CfgMode, Role, check_same_output, guidance_roles, guided, has_list_rows
from gerl.engine.hooks import COUNTED, StopPipeline, TapeHead, rerun, unguided
from gerl.engine.kv_caches import cut_caches, objects_of, tensors_inside
from gerl.engine.latents import started_at
from gerl.engine.recomputing import constant_scale
from gerl.engine.record import record_batch_probe
from gerl.engine.rows import Arguments, Tree, batch_dim, detached_copy, entries, map_rows, pairs, same, take
from gerl.engine.tape import ComponentCall, Tape, TapeStep, probed_call
from gerl.engine.transitions import Rule, differs, gaussian_log_prob, unwritten
from gerl.errors import ReplayError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


# --- Loss scaling for denoisers in fp16 (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).
#
# The loss of one image among hundreds, averaged over tens of thousands of latents, gives cotangents below the smallest
# number of fp16 (6e-8). So the loss is multiplied by a power of two, and the gradient of the parameters, in fp32,
# divided by it: both are exact. The largest cotangent of the model output is then in [1/2, 1), which leaves 16 powers
# of two for cotangents that grow in the backward pass, and 24 for those that shrink.


def loss_scale(loss: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return the power of two that scales the largest gradient of `output` (fp32) into [1/2, 1), a scalar like it."""
    (gradient,) = torch.autograd.grad(loss, output, retain_graph=True, allow_unused=True)
    largest = torch.zeros((), device=output.device) if gradient is None else gradient.abs().max()
    power = (-torch.frexp(largest).exponent).clamp(-126, 126)
    exact = ((power + 127) << 23).to(torch.int32).view(torch.float32)  # `pow` rounds on some devices
    return torch.where(largest.isfinite() & (largest > 0), exact, 1.0)


@contextlib.contextmanager
def unscaled(leaves: Sequence[torch.Tensor], scale: torch.Tensor) -> Iterator[None]:
    """Divide the gradients that backward passes in this block add to `leaves` by `scale`."""
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    yield
    for leaf, gradient in zip(leaves, before, strict=True):
        if leaf.grad is not None:
            leaf.grad /= scale
        if gradient is not None:
            leaf.grad = gradient if leaf.grad is None else gradient.add_(leaf.grad)


# --- Denoisers with parts that run without gradient: made differentiable for a replay, or rejected.
#
# Mixtures of experts may have a fast inference branch under `torch.no_grad` in eval mode (as HiDream has). A replay
# through it is exact, but its gradient misses the branch, which nothing else would reveal. So the first forward pass of
# each denoiser is checked.

# the modules to switch, by denoiser: if only the weights need a gradient, and if the latents do too
_Blocked: TypeAlias = "WeakKeyDictionary[torch.nn.Module, list[torch.nn.Module]]"
_BLOCKED: tuple[_Blocked, _Blocked] = WeakKeyDictionary(), WeakKeyDictionary()


class Differentiable:
    """Context manager in which gradient flows through all modules of denoisers; restores their mode on exit.

    A module that disables gradients in eval mode is switched to training mode, but not its children, so that dropout
    stays off. This must enable the gradient and leave the output unchanged.
    """

    def __init__(self) -> None:
        self.switched: list[torch.nn.Module] = []
        self.carries = False  # whether the denoiser's inputs need a gradient

    def __enter__(self) -> Differentiable:
        return self

    def __exit__(self, *_: object) -> None:
        for module in self.switched:
            module.training = False

    def run(self, denoiser: torch.nn.Module, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Run `forward`, which calls `denoiser`, and count it. Raises `ReplayError` if its gradient would be wrong."""
        output = self._run(denoiser, partial(forward, *args, **kwargs))
        if (evaluations := COUNTED.get(denoiser)) is not None:
            values = tree_leaves(output, is_leaf=lambda value: isinstance(value, list))
            rows = next(len(v) for v in values if isinstance(v, list) or (torch.is_tensor(v) and v.ndim))
            evaluations.forward += rows
            evaluations.backward += rows if torch.is_grad_enabled() else 0
        return output

    def _run(self, denoiser: torch.nn.Module, compute: Callable[[], object]) -> object:
        if not torch.is_grad_enabled():
            return compute()
        if (blocked := _BLOCKED[self.carries].get(denoiser)) is not None:
            self._switch(blocked)
            return compute()
        wrapped = "_orig_mod" in dict(denoiser.named_children())  # compiled by torch.compile(denoiser)
        if not wrapped and all(m._compiled_call_impl is None for m in denoiser.modules()):
            return self._checked(denoiser, compute)
        with torch.compiler.set_stance("force_eager"):  # compiled code calls no hooks
            self._checked(denoiser, compute)
        return compute()

    def _checked(self, denoiser: torch.nn.Module, forward: Callable[[], object]) -> object:
        output, blocked = watch_gradients(denoiser, forward)
        if blocked:
            self._switch([b.module for b in blocked])
            again, still = watch_gradients(denoiser, forward)
            if still or not is_close(again, output):
                where = (still or blocked)[0]
                raise ReplayError(
                    f"{where.name} ({type(where.module).__name__}) runs {where.part} without gradient, "
                    f"{'even in training mode' if still else 'and differs numerically in training mode'}: the "
                    "gradient would be wrong, so this model cannot be trained"
                )
            output = again
        _BLOCKED[self.carries][denoiser] = [b.module for b in blocked]
        return output

    def _switch(self, modules: list[torch.nn.Module]) -> None:
        for module in modules:
            if not module.training:
                module.training = True
                self.switched.append(module)


@dataclass
class NoGradPart:
    """Module that runs with gradient but runs one of its parts without."""

    module: torch.nn.Module
    name: str
    part: str


def watch_gradients(denoiser: torch.nn.Module, forward: Callable[[], object]) -> tuple[object, list[NoGradPart]]:
    """Return the output, and the modules that ran a part without its gradient: trained, or its input has one."""
    names = {module: name for name, module in denoiser.named_modules()}
    entered: list[tuple[torch.nn.Module, bool, bool]] = [(denoiser, torch.is_grad_enabled(), False)]
    parts: dict[torch.nn.Module, NoGradPart] = {}

    def enter(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        outer, with_grad, has_gradient = entered[-1]
        on = torch.is_grad_enabled()
        missed = any(p.requires_grad or has_gradient for p in module.parameters())
        if with_grad and not on and outer not in parts and missed:
            parts[outer] = NoGradPart(outer, names[outer] or "the denoiser", names[module])
        leaves = tree_leaves((args, kwargs)) if on else []
        entered.append((module, on, any(torch.is_tensor(v) and v.requires_grad for v in leaves)))

    def leave(*_: object) -> None:
        entered.pop()

    modules = [m for m in names if m is not denoiser]
    handles = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in modules]
    handles += [m.register_forward_hook(leave) for m in modules]
    try:
        return forward(), list(parts.values())
    finally:
        for handle in handles:
            handle.remove()


def is_close(a: Tree, b: Tree) -> bool:
    """Whether two outputs are equal up to rounding, in the norm of each tensor."""
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    tensors = [(x.detach(), y.detach()) for x, y in pairs if torch.is_tensor(x) and x.is_floating_point()]
    return all(
        bool((x - y).float().norm() <= max(1e-4, 8 * torch.finfo(x.dtype).eps) * y.float().norm()) for x, y in tensors
    )


# --- Replay: another pass through the pipeline's own `__call__`, with gradient, teacher-forced by a tape.
#
# The whole denoising loop runs, so loop index, sigmas, guidance intervals and expert switching are as in the rollout.
# Methods are answered from the tape; the denoiser runs only if a trained step needs it, other calls return its recorded
# output; `scheduler.step` returns the recorded next latents. The graph is cut at the denoiser's output: a step's loss
# is back-propagated through the pipeline's arithmetic (guidance) to that cut at once, and from there through the
# denoiser before it runs again. So one step's graph is alive at a time, and none reaches from one step into another.
#
# `guidance` decides how a guided step runs the denoiser, with gradient through both halves or less.


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
    meter: StepGradients[Any] | None = None,
) -> None:
    """Run the recorded call again and pass its trained steps to `on_step(k, step) -> loss or None`.

    A returned loss (scalar) is back-propagated at once; gradients accumulate in the parameters. `steps`: the trained
    steps, None: all stochastic ones. `index`: samples of the tape, None: all. `latents`: `{k: x_k [B, ...]}` to train
    on instead of the recorded ones (forward-process algorithms), in the order of `index`; a pipeline that writes a
    condition into the latents (a first frame, an inpainting surround) does so afterwards, see `ReplayedStep.written`.
    `grad`: False runs without gradient, for reference outputs.

    `cfg`: treatment of classifier-free guidance `u + w (c - u)` at trained steps. joint: gradient through the
    conditional output `c` and the unconditional `u`. detach_uncond: the same values, but `u` is computed without
    gradient, which saves a quarter of the time or more. off: only `c` is computed, and is the model output (CFG
    distillation). `step_batch`: number of trained steps in one forward and backward pass of the denoiser; memory grows
    with it, results are equal up to rounding. `meter`: measures what each step
    adds to the gradients, with `step_batch` 1.

    Raises `ReplayError` if the pipeline deviates from the rollout, or guides in a way that only `cfg` joint supports.
    """
    part = tape if index is None else tape.rows(index)
    if step_batch > 1 and tape.filling_steps:
        raise ReplayError("the denoiser reads a cache of an earlier step: use step_batch=1")
    if step_batch > 1 and (part.probe is None or part.probe.batch_size == part.batch_size):
        part = replace(part, probe=_probe_of(pipe, part))
    replaced = latents or {}
    start = started_at(pipe, part, replaced[0]) if 0 in replaced else {}
    player = Replayer(part, on_step, steps, replaced, grad, cfg)
    if step_batch > 1 and len(player.live_at) > 1:
        gatherer = CallCollector(part, on_step, steps, replaced, False, cfg)
        play(pipe, gatherer, start)
        player = BatchedReplayer(gatherer.gathered, step_batch, part, on_step, steps, replaced, grad, cfg)
    if cfg != "joint":
        player.roles = guidance_roles(pipe, tape, player.live_at, cfg)
    player.meter = meter if grad else None
    with player.differentiable:
        play(pipe, player, start)


def play(pipe: DiffusionPipeline, player: Replayer, start: dict[int, Tree]) -> None:
    """Run the pipeline with `player` up to the last trained step; `start`: see `started_at`."""
    player.components, player.start = pipe.components, start
    plainly = unguided(pipe) if player.cfg == "off" else contextlib.nullcontext()
    scales = player.grad and any(isinstance(v, Mapping) and "scale" in v for v in player.tape.call.values())
    scaled = constant_scale(pipe.components.values()) if scales else contextlib.nullcontext()  # of the LoRA
    with torch.set_grad_enabled(player.grad), plainly, scaled:
        if rerun(pipe, player) is not None:
            raise ReplayError(
                f"the pipeline ended before trained step {max(player.trained)}: it took fewer steps than recorded"
            )


def _probe_of(pipe: DiffusionPipeline, tape: Tape) -> Tape:
    """Return a probe of `tape` with another number of samples, which reveals batch dimensions."""
    try:
        return record_batch_probe(pipe, tape.call, [0] if tape.batch_size > 1 else [0, 0])
    except (ValueError, RuntimeError, IndexError, TypeError, AttributeError) as error:
        raise ReplayError(
            f"{type(pipe).__name__} takes one prompt per call, which does not reveal its batch dimensions: use "
            f"step_batch=1 ({error})"
        ) from error


@dataclass
class ReplayedStep:
    """Trained step of a replay of `B` samples; `x`, `x_next` and recorded values are constants without gradient."""

    rule: Rule
    x: torch.Tensor  # [B, ...] fp32
    x_next: torch.Tensor | None  # [B, ...] fp32; None if `latents` replaced the recorded x
    recorded_log_prob: torch.Tensor | None  # [B] fp32; None then and at deterministic steps
    tape_mean: torch.Tensor | None  # [B, ...] fp32; None as recorded_log_prob, on the meta device if not kept
    model_output: torch.Tensor  # [B, ...] fp32, with graph
    written: torch.Tensor | None = None  # [B, ...] bool, given `latents` overwritten by a condition
    overwritten: torch.Tensor | None = None  # [B, ...] bool, overwritten part of `x_next`, see `Tape.overwritten`

    def part(self, values: torch.Tensor) -> torch.Tensor:
        """Select from `values` `[B, ...]` the latents that reach the images: `[B, N]`, or `values` if all do."""
        return unwritten(values, self.overwritten)

    def reached(self) -> ReplayedStep:
        """Return the step restricted to the latents that reach the images, tensors as `[B, N]`; itself if all do."""
        if self.overwritten is None:
            return self
        x_next = None if self.x_next is None else self.part(self.x_next)
        is_whole = self.tape_mean is None or self.tape_mean.is_meta
        mean = self.tape_mean if is_whole or self.tape_mean is None else self.part(self.tape_mean)
        x, output = self.part(self.x), self.part(self.model_output)
        scaled = replace(self, x=x, x_next=x_next, tape_mean=mean, model_output=output, overwritten=None)
        scaled.__dict__["mean"] = self.part(self.mean)  # the rule of scaled rows may clip at another value
        if self.x_next is not None and self.rule.std > 0:
            scaled.__dict__["log_prob"] = self.log_prob  # bitwise that of the record
        return scaled

    @property
    def recorded_mean(self) -> torch.Tensor | None:
        """Mean under the rollout's weights, `[B, ...]` fp32. Raises `ReplayError` if a compacted tape lacks it."""
        if self.tape_mean is not None and self.tape_mean.is_meta:
            raise ReplayError(
                "the recorded mean was not kept: an algorithm that reads it must declare Needs.recorded_means"
            )
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
        if self.x_next is None or self.rule.std == 0:
            raise ReplayError("only stochastic steps with their recorded latents have a log-probability")
        return gaussian_log_prob(self.x_next, self.mean, self.rule.std, self.overwritten)


Cut = list[tuple[torch.Tensor, torch.Tensor]]  # an output of the denoiser, and the leaf that replaces it
OnStep = Callable[[int, ReplayedStep], torch.Tensor | None]
OfRows = Callable[[int], Callable[..., object]]  # number of rows of latents -> the function to call for them


class Replayer(TapeHead):
    """Head of a replay."""

    def __init__(
        self,
        tape: Tape,
        on_step: OnStep,
        steps: Iterable[int] | None,
        latents: Mapping[int, torch.Tensor],
        grad: bool,
        cfg: CfgMode,
    ) -> None:
        self.on_step, self.grad, self.cfg = on_step, grad, cfg
        self.roles: dict[tuple[int, int], Role] = {}  # of the denoiser calls by position, unless cfg is joint
        self.components: Mapping[str, torch.nn.Module] = {}  # of the pipeline, by name
        self.differentiable = Differentiable()
        self.meter: StepGradients[Any] | None = None
        self.conditional: Tree = None  # latest output of a separate conditional call
        self.trained = set(tape.stochastic_steps if steps is None else steps)
        if not self.trained or self.trained - set(range(len(tape.steps))):
            raise ReplayError(f"steps {sorted(self.trained)} cannot be replayed: the tape has {len(tape.steps)} steps")
        self.live_at, self.filling = tape.live_at(self.trained), tape.filling_steps
        super().__init__(tape)
        self.latents = {k: value.float() for k, value in latents.items()}
        check_compacted(tape, self.trained, latents, cfg)
        for k, value in latents.items():
            if value.shape != tape.steps[k].x.shape:
                raise ReplayError(
                    f"latents of step {k} have shape {list(value.shape)}, the replayed ones "
                    f"{list(tape.steps[k].x.shape)}: expected one row per replayed sample"
                )
        self.overwrites = any([step.written is not None for step in tape.steps])
        if not self.looped:
            raise ReplayError(
                "the pipeline called none of its components in the denoising loop: there is nothing to train"
            )
        self.position = (-1, 0)  # (scheduler step, component calls within it)
        probe = tape.probe.component_calls if tape.probe else []
        self.probed = [c for c in probe if c.component in self.looped]
        self.parted = False  # whether a step without two samples at the same latents was reached
        self.cuts: list[tuple[int, Cut]] = []
        self.kept: list[Cut] = []  # of steps that filled caches, whose gradient is complete after the last step
        self.scales: dict[int, torch.Tensor] = {}  # of losses back-propagated to the leaves of a step, where scaled
        self.carries_from: int | None = None  # the step whose latents get a gradient, see `adjoint`
        self.leaf: torch.Tensor | None = None  # these latents, as returned by the step before
        self.direct: torch.Tensor | None = None  # the part of their gradient that bypasses the denoiser

    def on_component(self, name: str, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        if name not in self.looped:
            return forward(*args, **kwargs)
        recorded = next(self.calls, None)
        if recorded is None or (recorded.component, recorded.step) != (name, self.step):
            raise ReplayError(f"the replay calls {name} at step {self.step}, which the rollout did not")
        nth = self.position[1] + 1 if self.position[0] == self.step else 0
        self.position = (self.step, nth)
        if self.step not in self.live_at:
            return self.recorded(recorded)
        return self._run(name, forward, recorded, (args, kwargs))

    def _run(self, name: str, forward: Callable[..., object], recorded: ComponentCall, arguments: Arguments) -> object:
        """Run component `name` at a trained step."""
        # not earlier, since a second scheduler stream may have used the same output, and one pass serves both; and not
        # later, since this step's graph must be freed before the next one is built
        if self.cuts and self.cuts[0][0] != self.step:
            self._backward_through_denoiser()
        forward = partial(self.differentiable.run, self.components[name], forward)
        role = self.roles.get(self.position)
        if role == "unconditional" and self.cfg == "off":
            check_same_output(self.conditional, recorded.output, self.step)
            return self.conditional  # the same cut, which accumulates the gradients of both
        of_rows = self._guided(forward, role, recorded)
        if recorded.reads is None and self.step not in self.filling:
            output = self._cut(self._once_per_kind(of_rows, recorded)(*arguments[0], **arguments[1]))
        elif role in (None, "conditional", "unconditional"):
            output = self._cut_with_caches(of_rows(len(self.tape.steps[self.step].x)), arguments)
        else:
            raise ReplayError("the denoiser's cache has the rows of both halves of guidance: use cfg joint")
        if role == "conditional":
            self.conditional = output
        return output

    def _cut_with_caches(self, forward: Callable[..., object], arguments: Arguments) -> object:
        """Run a component and cut its graph at its output, and at what it puts into a cache."""
        before = {id(tensor) for value in objects_of(arguments) for tensor in tensors_inside(value)}
        value = forward(*arguments[0], **arguments[1])
        caches = cut_caches(arguments, value, before)
        output = self._cut(value)
        self.cuts[-1][1].extend(caches)
        return output

    def _guided(self, forward: Callable[..., object], role: Role | None, recorded: ComponentCall) -> OfRows:
        """Wrap `forward` for its role in guidance; returns a function of the number of rows."""
        if role is None:
            return lambda rows: forward
        nth = self.position[1]
        alike = [c for c in (self.probed[nth : nth + 1] + [recorded]) if c.component == recorded.component]
        in_list = has_list_rows(recorded.output)
        return lambda rows: guided(forward, role, self.cfg, rows, in_list, alike)

    def _once_per_kind(self, of_rows: OfRows, recorded: ComponentCall) -> Callable[..., object]:
        """Wrap the denoiser so that samples at the same latents are computed once."""
        x = self.latents[self.step] if self.step in self.latents else self.tape.steps[self.step].x
        n, probe = self.tape.batch_size, self.tape.probe
        # merged samples would share the gradient of their latents
        self.parted = self.parted or self.leaf is not None or not _DEDUPLICATES.get()
        # given latents are noised images, equal only where no image is left: not compared later, as that synchronises
        later = self.step in self.latents and self.step > 0
        if self.parted or later or probe is None or probe.batch_size == n or not self.probed:
            return of_rows(len(x))
        kinds = first_of_duplicates(x)
        self.parted = len(set(kinds)) == len(kinds)  # diverged trajectories do not meet again
        if self.parted or len(kinds) != n:
            return of_rows(len(x))
        shown = probed_call(self.probed, recorded, self.position[1], n, probe.batch_size)
        return deduplicate(of_rows, kinds, recorded, shown, probe.batch_size)

    def _cut(self, value: object) -> object:
        """Replace an output of the denoiser by leaves, at which the backward passes of the losses end."""
        # the pipeline continues from leaves, so the graph of a loss is the pipeline's own arithmetic, which is small,
        # and cannot reach an earlier step's denoiser through latents that carry over (momentum of guidance, say)
        cut: Cut = []

        def leaf(value: object) -> object:
            if not (torch.is_tensor(value) and value.requires_grad):
                return value
            cut.append((value, value.detach().requires_grad_()))
            return cut[-1][1]

        leaves = tree_map(leaf, value)
        self.cuts.append((self.step, cut))
        return leaves

    def next_latents(
        self, model_output: torch.Tensor, sample: torch.Tensor, source: torch.Tensor | None
    ) -> torch.Tensor:
        k, recorded = self.step, self.tape.steps[self.step]
        x, written = self._arrived(k, recorded, sample, source)
        if self.answered != recorded.num_answers:
            raise ReplayError(
                f"the pipeline had {self.answered} outputs at step {k}, {recorded.num_answers} in the rollout: it "
                "samples noise once per sample and can only be replayed in whole batches"
            )
        if k in self.trained:
            self._train(k, x, model_output, written)
        self.step += 1
        if self.step > max(self.trained):
            self._backward_through_denoiser()
            for cut in reversed(self.kept):
                self._backward(cut, None)
            raise StopPipeline
        if k + 1 == self.carries_from:
            self.leaf = recorded.x_next.detach().clone().requires_grad_()
            return self.leaf
        return self.latents.get(k + 1, recorded.x_next)

    def _arrived(
        self, k: int, recorded: TapeStep, sample: torch.Tensor, source: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the fp32 latents of step `k`, and where the pipeline replaced the caller's by its condition."""
        replaced = self.latents.get(k)
        if replaced is not None:
            return self._given(k, replaced, recorded, sample, source)
        x = recorded.x
        if source is not x:
            message = f"the pipeline did not reach the recorded latents at step {k}: it cannot be replayed"
            self.expect(x, sample, source, message)
        if k == self.carries_from and self.leaf is not None:
            moved = sample.float()
            x = x + (moved - moved.detach())  # the exact values, with the graph of the pipeline's changes to them
        return x, None

    def _given(
        self, k: int, x: torch.Tensor, recorded: TapeStep, sample: torch.Tensor, source: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the caller's latents `x` of step `k` with the pipeline's condition, and where that is."""
        if source is x:
            return x, recorded.written
        missed = (
            f"the pipeline did not reach the latents given for step {k} (it steps several latents in turn, or edits "
            "them): algorithms that noise images again cannot train it, policy gradients can"
        )
        if sample.shape != x.shape:
            raise ReplayError(missed)
        changed = differs(x.to(sample.dtype), sample)
        if recorded.x.is_meta or not (self.overwrites or k == 0):
            self.refuse_if(changed.any(), missed)
            return x, recorded.written
        condition = torch.where(changed, recorded.x.to(sample.dtype), sample)
        self.refuse_if(
            differs(condition, sample).any(),
            f"the pipeline did not reach the latents given for step {k}: it mixes its condition with them, and "
            "cannot be trained on noised images",
        )
        if k == 0 and not bool(changed.any()):  # only this comparison reveals a condition in the initial latents
            return x, recorded.written
        written = changed if recorded.written is None else changed | recorded.written
        return torch.where(changed, recorded.x, x), written

    def _train(self, k: int, x: torch.Tensor, model_output: torch.Tensor, written: torch.Tensor | None) -> None:
        if self.grad and not model_output.requires_grad:
            if self._is_frozen(k):
                return
            raise ReplayError(f"no gradient reaches the model output at step {k}: no part of the denoiser is trained")
        recorded = self.tape.steps[k]
        is_replaced = k in self.latents
        x_next, log_prob, mean = (
            None if is_replaced else value for value in (recorded.x_next, recorded.log_prob, recorded.mean)
        )
        output = model_output.float()
        overwritten = None if is_replaced or not self.overwrites else self.tape.overwritten(k)
        if self.meter is not None:
            self.meter.begin(k)
        loss = self.on_step(k, ReplayedStep(recorded.rule, x, x_next, log_prob, mean, output, written, overwritten))
        if loss is not None:
            latest = self.cuts[-1][0]  # leaves of earlier steps are present if several steps run in one forward pass
            leaves = [leaf for step, cut in self.cuts if step == latest for _, leaf in cut]
            if any(leaf.dtype == torch.float16 for leaf in leaves):  # one scale for all losses of these leaves
                if self.filling:
                    raise ReplayError("the gradient of a cache is computed in bf16 or fp32: use model.dtype=bfloat16")
                loss = loss * self.scales.setdefault(latest, loss_scale(loss, output))
            leaves += [] if self.leaf is None else [self.leaf]
            # retain_graph: a second scheduler stream may share this denoiser call
            torch.autograd.backward(loss, inputs=leaves, retain_graph=True)
            if self.leaf is not None:
                self.direct, self.leaf.grad = self.leaf.grad, None
                if self.direct is not None and latest in self.scales:
                    self.direct /= self.scales[latest]

    def _is_frozen(self, k: int) -> bool:
        """Whether the denoiser of step `k` is not trained, and that of other steps is."""
        called = {call.component for call in self.tape.component_calls if call.step == k} & self.looped
        trained = {name for name in self.looped if is_trained(self.components[name])}
        return bool(trained) and not trained & called

    def _backward_through_denoiser(self) -> None:
        """Second half of the backward pass: from the cut to the parameters."""
        for step, cut in reversed(self.cuts):
            if step in self.filling:
                self.kept.append(cut)
            else:
                self._backward(cut, self.scales.get(step))
        self.cuts, self.scales = [], {}

    def _backward(self, cut: Cut, scale: torch.Tensor | None) -> None:
        """Back-propagate from the leaves in `cut`, with gradients multiplied by `scale`, to the parameters."""
        reached = [(value, leaf.grad) for value, leaf in cut if leaf.grad is not None]
        if not reached:
            return
        looped = (p for name in self.looped for p in self.components[name].parameters() if p.requires_grad)
        leaves = [*looped, *([] if self.leaf is None else [self.leaf])]
        with contextlib.nullcontext() if scale is None else unscaled(leaves, scale):
            torch.autograd.backward([v for v, _ in reached], [g for _, g in reached])


def check_compacted(tape: Tape, trained: set[int], latents: Mapping[int, torch.Tensor], cfg: CfgMode) -> None:
    """Raise `ReplayError` if a compacted tape lacks what this replay needs."""
    reads = tape.reads
    if reads is None:
        return
    complete = trained <= reads.steps if reads.chain else trained == {k for k in reads.steps if k <= max(trained)}
    if not complete:
        raise ReplayError(
            f"steps {sorted(trained)} cannot be replayed: the compacted tape was kept for steps {sorted(reads.steps)}"
        )
    if cfg != "joint" and not reads.outputs:
        raise ReplayError(f"cfg {cfg} reads recorded outputs of the denoiser, which the compacted tape does not have")
    if reads.forward and trained - latents.keys():
        raise ReplayError("the compacted tape does not have the latents of its trained steps: pass them as latents")


# --- Deduplication: equal rows of a denoiser call are computed once.
#
# Trajectories are at the same latents until they diverge: children of a branch, or images of a group with the same
# initial noise, at their first stochastic step. If all arguments are equal, so is the output: one row of each kind runs
# and replaces the others, and its gradient is the sum of theirs.

KEY = 16  # number of values used to hash a row before rows are compared
_DEDUPLICATES = ContextVar("deduplicates", default=True)


@contextlib.contextmanager
def without_deduplication() -> Iterator[None]:
    """Compute equal rows separately within the block."""
    before = _DEDUPLICATES.set(False)
    try:
        yield
    finally:
        _DEDUPLICATES.reset(before)


def first_of_duplicates(x: torch.Tensor) -> list[int]:
    """Return the index of the first equal row for each row of `x` `[B, ...]`."""
    flat = x.flatten(1)
    keys = flat[:, :: max(1, flat.shape[1] // KEY)].tolist()
    first: dict[tuple[float, ...], int] = {}
    firsts = [first.setdefault(tuple(key), i) for i, key in enumerate(keys)]
    pairs = [(i, j) for i, j in enumerate(firsts) if i != j]
    if pairs:
        equal = torch.stack([(flat[i] == flat[j]).all() for i, j in pairs]).tolist()
        for (i, _), same in zip(pairs, equal, strict=True):
            firsts[i] = firsts[i] if same else i
    return firsts


def deduplicate(
    of_rows: Callable[[int], Callable[..., object]],
    kinds: Sequence[int],
    recorded: ComponentCall,
    like: ComponentCall,
    probed: int,
) -> Callable[..., object]:
    """Wrap a denoiser to run only the first row of each kind in `kinds` `[B]`; the result has all rows.

    `of_rows(B)` returns the denoiser for B rows of latents. `recorded`: the same call of the rollout; `like`: that call
    for `probed` samples, which reveals the batch dimensions. If rows of a kind differ in any argument, all rows run.
    """
    n, firsts = len(kinds), sorted(set(kinds))
    positions = [firsts.index(k) for k in kinds]

    def spread(value: torch.Tensor, dim: int, _: torch.Tensor) -> torch.Tensor:
        where = torch.as_tensor(positions, device=value.device)
        return value.unflatten(dim, (-1, len(firsts))).index_select(dim + 1, where).flatten(dim, dim + 1)

    def spread_list(value: list[object], _: list[object]) -> list[object]:
        return [value[start + i] for start in range(0, len(value), len(firsts)) for i in positions]

    def run(*args: object, **kwargs: object) -> object:
        arguments = (args, kwargs)
        with_graph = any(torch.is_tensor(v) and v.requires_grad for v in tree_leaves(arguments))
        if with_graph or not same(take(arguments, like.inputs, kinds, n, probed), arguments):
            return of_rows(n)(*args, **kwargs)
        few_args, few_kwargs = take(arguments, like.inputs, firsts, n, probed)
        output = of_rows(len(firsts))(*few_args, **few_kwargs)
        return map_rows(output, recorded.output, like.output, n, probed, spread, spread_list)

    return run


# --- Several trained steps in one forward and backward pass of the denoiser.
#
# All latents are on the tape, so the arguments of the denoiser at a trained step are known before it runs. A first pass
# of the pipeline collects them, with recorded outputs instead of the denoiser's (`CallCollector`). The calls of several
# steps, joined along their batch dimensions, become one call, whose output a second pass returns step by step
# (`BatchedReplayer`); the losses are back-propagated to this output, and from there through the denoiser once.
#
# The arguments of the second pass are compared with the collected ones, so a pipeline whose calls depend on outputs of
# other steps is rejected. Components without trained weights (ControlNets) run step by step.

Position = tuple[int, int]  # step, and index of the call within it
Call = tuple[str, Arguments]  # component and arguments


class CallCollector(Replayer):
    """Replayer that collects the denoiser calls of the trained steps without running them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gathered: dict[Position, Call] = {}

    def _run(self, name: str, forward: Callable[..., object], recorded: ComponentCall, arguments: Arguments) -> object:
        if not is_trained(self.components[name]):
            return forward(*arguments[0], **arguments[1])
        self.gathered[self.position] = (name, detached_copy(arguments))
        return self.recorded(recorded)

    def _train(self, k: int, x: torch.Tensor, model_output: torch.Tensor, written: torch.Tensor | None) -> None:
        del k, x, model_output, written


class BatchedReplayer(Replayer):
    """Replayer of collected calls, with several timesteps in one pass of the denoiser."""

    def __init__(self, calls: Mapping[Position, Call], size: int, *args: Any) -> None:
        """Prepare to join the collected `calls` of `size` steps each."""
        super().__init__(*args)
        steps = sorted({k for k, _ in calls})
        self.gathered, self.stack = calls, {k: i // size for i, k in enumerate(steps)}
        self.running = -1
        self.outputs: dict[Position, object] = {}  # of the current stack

    def _run(self, name: str, forward: Callable[..., object], recorded: ComponentCall, arguments: Arguments) -> object:
        if not is_trained(self.components[name]):
            return forward(*arguments[0], **arguments[1])
        if self.roles:
            raise ReplayError(
                f"step_batch needs a gradient through both halves of the guidance: cfg=joint, not cfg={self.cfg}"
            )
        if self.stack[self.step] != self.running:
            self._backward_through_denoiser()
            self.running = self.stack[self.step]
        if self.position not in self.outputs:
            self._run_stack(name, forward, recorded)
        _, gathered = self.gathered[self.position]
        if not same(arguments, gathered):
            raise ReplayError(
                f"the arguments of {name} at step {self.step} depend on its output at an earlier step: use step_batch=1"
            )
        return self._cut(self.outputs.pop(self.position))

    def _run_stack(self, name: str, forward: Callable[..., object], recorded: ComponentCall) -> None:
        """Run this call together with those of the other steps in its stack."""
        nth, n = self.position[1], self.tape.batch_size
        if self.tape.probe is None or self.tape.probe.batch_size == n or not self.probed:
            raise ReplayError(
                "replaying several steps at once needs a tape with a probe of another number of samples, which "
                "reveals the batch dimensions"
            )
        probed = self.tape.probe.batch_size
        probe = probed_call(self.probed, recorded, nth, n, probed)
        places = [p for p, (c, _) in self.gathered.items() if (c, p[1], self.stack[p[0]]) == (name, nth, self.running)]
        calls = [self.gathered[p][1] for p in places]
        counts: list[int] = []  # row counts of the values that have rows

        def count(value: Any, dim: Any, *_: object) -> Any:
            counts.append(value.shape[dim] if isinstance(value, torch.Tensor) else len(value))
            return value

        map_rows(calls[0], calls[0], probe.inputs, n, probed, count, count)
        rows = counts[0] if counts else 0
        args, kwargs = _joined(calls, probe.inputs, n, probed, rows)
        output = self.differentiable.run(self.components[name], forward, *args, **kwargs)
        shapes = (recorded.output, probe.output, n, probed)

        def narrowed(i: int, value: torch.Tensor, dim: int, of_one: torch.Tensor) -> torch.Tensor:
            return value.narrow(dim, i * of_one.shape[dim], of_one.shape[dim])

        def sliced(i: int, value: list[object], of_one: list[object]) -> list[object]:
            return value[i * len(of_one) : (i + 1) * len(of_one)]

        for i, place in enumerate(places):
            self.outputs[place] = map_rows(output, *shapes, partial(narrowed, i), partial(sliced, i))

    def _backward_through_denoiser(self) -> None:
        scale = torch.stack(list(self.scales.values())).min() if self.scales else None  # a pass has a single scale
        for step, cut in self.cuts:
            for _, leaf in cut:
                if scale is not None and leaf.grad is not None and step in self.scales:
                    leaf.grad *= scale / self.scales[step]
        self._backward([pair for _, cut in self.cuts for pair in cut], scale)
        self.cuts, self.scales = [], {}


def is_trained(component: torch.nn.Module) -> bool:
    """Whether any parameter of `component` requires a gradient."""
    return any(p.requires_grad for p in component.parameters())


def _joined(values: Sequence[Any], like: Any, n: int, probed: int, rows: int) -> Any:
    """Join the arguments of several calls with `rows` rows each into those of one call."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        dim = batch_dim(first, like, n, probed)
        if dim is not None:
            return torch.cat(list(values), dim)
        if all(torch.equal(first, value) for value in values[1:]):
            return first
        if first.numel() == 1:  # one timestep for the whole batch
            return torch.cat([value.reshape(1).expand(rows) for value in values])
    elif isinstance(first, list) and entries(first, like, n, probed):
        return [entry for value in values for entry in value]
    elif isinstance(first, list | tuple | dict):
        others = [other for _, other in pairs(first, like)]
        columns = zip(*(v.values() if isinstance(v, dict) else v for v in values), strict=True)
        parts = [_joined(column, other, n, probed, rows) for column, other in zip(columns, others, strict=True)]
        return type(first)(zip(first, parts, strict=True)) if isinstance(first, dict) else type(first)(parts)
    elif isinstance(first, float | int) and not isinstance(first, bool) and any(value != first for value in values):
        return torch.cat([torch.full((rows,), value) for value in values])
    else:
        return first
    raise ReplayError(
        f"the denoiser is called with a tensor {list(first.shape)} that varies between steps and has no batch "
        "dimension: use step_batch=1"
    )


# --- Gradient of one step, for the parameters and for the latents before the step.
#
# The tape has the latents of every step, so a gradient is propagated back through a whole trajectory step by step: each
# step is replayed with its latents as a leaf, receives the gradient of its result, and passes the gradient of its
# latents to the step before. One denoiser graph is alive at a time, and memory does not grow with the number of steps.


@dataclass(frozen=True)
class LatentsGradient:
    """Gradient of the latents before a step, `[B, ...]` fp32, as the sum of two parts."""

    direct: torch.Tensor  # through the rule of the step, and the pipeline's changes to the latents in between
    through: torch.Tensor  # through the denoiser's input


def backprop_step(
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
    """Replay step `k`, and add the gradient of `sum(leads_to(step) * gradient)` to the parameters' gradient.

    `leads_to`: latents computed from the step, such as `step.mean`; `gradient`: their gradient, `[B, ...]`. With
    `carry`, returns the gradient of the latents produced by the step before, including the pipeline's arithmetic in
    between (None at the first step). `latents`: replace the recorded ones of step `k`, without gradient. `index` and
    `cfg`: as for `replay`. A second modality (sound) is constant.

    Raises `ReplayError` as `replay` does, and with `carry` if a step shares its denoiser call with another.
    """
    part = tape if index is None else tape.rows(index)
    replaced: Mapping[int, torch.Tensor] = {} if latents is None else {k: latents}
    start = started_at(pipe, part, replaced[0]) if 0 in replaced else {}

    def on_step(_: int, step: ReplayedStep) -> torch.Tensor:
        return (leads_to(step) * gradient).sum()

    player = Replayer(part, on_step, [k], replaced, True, cfg)
    if cfg != "joint":
        player.roles = guidance_roles(pipe, tape, player.live_at, cfg)
    if carry and k > 0:
        if part.called_at([k]) != {k}:
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


# --- Gradient of a replay by trained step

T = TypeVar("T")


class StepGradients(Generic[T]):
    """Measures what each trained step of a replay adds to the gradients of `parameters`, as `reduce` summarises it.

    A replay backpropagates through a step before the next one runs, so a step adds the difference of the gradients
    between its begin and that of the next one. Gradients are only read.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], reduce: Callable[[Sequence[torch.Tensor]], T]) -> None:
        self.parameters, self.reduce = parameters, reduce
        self._results: dict[int, T] = {}
        self._step: int | None = None
        self._before: list[torch.Tensor | None] = []

    def begin(self, step: int) -> None:
        """Mark the begin of `step`; call before its loss is computed."""
        self._close()
        self._step = step
        self._before = [None if p.grad is None else p.grad.clone() for p in self.parameters]

    def end(self) -> dict[int, T]:
        """Return the results by step; call after the replay."""
        self._close()
        return self._results

    def _close(self) -> None:
        if self._step is None:
            return
        added = []
        for p, before in zip(self.parameters, self._before, strict=True):
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            added.append(grad if before is None else grad - before)
        self._results[self._step] = self.reduce(added)
        self._step, self._before = None, []


def squared_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of all values, a scalar on their device, without synchronising."""
    return torch.nn.utils.get_total_norm(gradients).square()

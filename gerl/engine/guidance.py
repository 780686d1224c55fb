"""Classifier-free guidance in a replay: which denoiser calls, or halves of one, are conditional, and how they run.

A guided step combines a conditional output `c` and an unconditional one `u` to the model output `u + w (c - u)`,
possibly rescaled or negated. The gradient with respect to `c` is proportional to `w`, that with respect to `u` to `1 -
w`: for any `w` above 1/2 the gradient of the conditional output is larger. So the roles are found once per pipeline and
kind of step, by running the pipeline's arithmetic on the recorded outputs (made nearly equal), without the denoiser.
"""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gerl.config.blocks import CfgMode
from gerl.engine.hooks import StopPipeline, TapeHead, rerun, unguided
from gerl.engine.rows import Arguments, Nested, Tree, detached_copy, leading, take
from gerl.engine.tape import ComponentCall, Structure, Tape, call_structure, has_roles, looped_calls
from gerl.errors import ReplayError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

# role of a denoiser call in a guided step; the last two are single calls with both halves, named by their first rows
Role = Literal["conditional", "unconditional", "conditional_first", "unconditional_first"]
Roles = dict[int, Role]  # by index of the call within its step; only the calls that take part in guidance

CLEARLY_LARGER = 1.001  # w = 500 still gives 1.002; without a difference the two norms agree up to rounding
NEAR = 1e-2  # distance of two outputs whose weights are compared, in units of their standard deviation
_FOUND: WeakKeyDictionary[DiffusionPipeline, dict[Structure, Roles]] = WeakKeyDictionary()
_CHECKED: WeakKeyDictionary[DiffusionPipeline, set[Structure]] = WeakKeyDictionary()  # for cfg off


def guidance_roles(
    pipe: DiffusionPipeline, tape: Tape, steps: Iterable[int], cfg: CfgMode
) -> dict[tuple[int, int], Role]:
    """Return `{(step, index of the call within it): role}` of the guided denoiser calls at `steps`.

    Raises `ReplayError` if guidance consists neither of one call with two halves nor of two calls. With `cfg` off also
    if the unconditional call comes first, or if guidance has no gradient when the conditional output replaces both.
    """
    known_roles = _FOUND.setdefault(pipe, {})
    calls = looped_calls(tape)
    structures = {k: call_structure(tape, calls[k]) for k in steps}
    known_roles.update({structure: {} for structure in structures.values() if not has_roles(structure)})
    new = {structure: k for k, structure in structures.items() if structure not in known_roles}
    if new:
        influence = _influence(pipe, tape, set(new.values()), NEAR)
        known_roles.update({structure: _roles(k, structure, influence[k]) for structure, k in new.items()})
    for k, structure in structures.items():
        if cfg == "off" and next(iter(known_roles[structure].values()), None) == "unconditional":
            raise ReplayError(
                f"the first denoiser call at step {k} is the unconditional one, before the conditional output that "
                "replaces it is known: use cfg joint or detach_uncond"
            )
    if cfg == "off":
        _check_off(
            pipe, tape, {structure: k for k, structure in reversed(structures.items()) if known_roles[structure]}
        )
    return {(k, nth): role for k, structure in structures.items() for nth, role in known_roles[structure].items()}


def guided(
    forward: Callable[..., object],
    role: Role,
    cfg: CfgMode,
    half: int,
    rows_in_list: bool,
    alike: Iterable[ComponentCall] = (),
) -> Callable[..., object]:
    """Wrap `forward` of a call with `role` to run according to `cfg`; the result has the same rows.

    `half`: number of rows in one half of a call with both. `rows_in_list`: its output, and hence its input, is a list
    with an entry per row. `alike`: the same call for other numbers of rows, which reveal the batch dimensions.
    """
    if cfg == "joint" or role == "conditional":
        return forward
    if role == "unconditional":
        return torch.no_grad()(forward)

    def in_halves(*args: object, **kwargs: object) -> object:
        first, second = _halves((args, kwargs), half, rows_in_list, alike)
        conditional, unconditional = (first, second) if role == "conditional_first" else (second, first)
        u = None
        if cfg == "detach_uncond":  # first, while the graph of the other half takes no memory
            with torch.no_grad():
                u = forward(*unconditional[0], **unconditional[1])
        c = forward(*conditional[0], **conditional[1])
        u = c if cfg == "off" else u
        a, b = (c, u) if role == "conditional_first" else (u, c)
        return _join_rows(a, b, half, rows_in_list)

    return in_halves


def has_list_rows(output: Tree) -> bool:
    """Whether a denoiser's output is a list with an entry per row (Z-Image) rather than a tensor."""
    return isinstance(leading(output), list)


def check_same_output(conditional: Tree, unconditional: Tree, step: int) -> None:
    """Raise `ReplayError` if rows of the two outputs differ in shape, so that one cannot replace the other."""
    outputs = (conditional, unconditional)
    c, u = (next((v.shape[1:] for v in tree_leaves(x) if torch.is_tensor(v)), None) for x in outputs)
    if c != u:
        raise ReplayError(
            f"the unconditional denoiser output at step {step} has rows of another shape than the conditional one, "
            "which cannot replace it: use cfg joint or detach_uncond"
        )


def _halves(
    tree: Arguments, half: int, rows_in_list: bool, alike: Iterable[ComponentCall]
) -> tuple[Arguments, Arguments]:
    """Return both halves of a call's arguments; without an `alike` call rows are in the first dimension."""
    total = 2 * half
    for call in alike:
        count = len(leading(call.output))
        if call.inputs is not None and count and count != total:
            rows = (range(half), range(half, total))
            one, other = (take(tree, call.inputs, part, total, count, graph=True) for part in rows)
            return one, other
    for value in [] if rows_in_list else tree_leaves(tree):
        if torch.is_tensor(value) and total in value.shape[1:] and value.shape[0] != total:
            raise ReplayError(
                "one prompt is not enough to locate the halves of guidance in an input of shape "
                f"{list(value.shape)}: use cfg joint, or more prompts per batch"
            )
    first, second = (_slice_rows(tree, part, total, rows_in_list) for part in (slice(0, half), slice(half, None)))
    return first, second


def _slice_rows(tree: Nested, rows: slice, total: int, rows_in_list: bool) -> Nested:
    """Select `rows` in all values with `total` rows: tensors by their first dimension, lists by their length."""

    def is_row_tensor(value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.shape[:1] == (total,)

    def is_row_list(value: object) -> bool:
        # a list of as many tensors as rows, each with all rows, holds residuals or embeddings of several images
        if not isinstance(value, list) or len(value) != total:
            return False
        return rows_in_list or not all(is_row_tensor(entry) for entry in value)

    def part(value: object) -> object:
        if isinstance(value, torch.Tensor | list) and (is_row_tensor(value) or is_row_list(value)):
            return value[rows]
        return value

    sliced: Nested = tree_map(part, tree, is_leaf=is_row_list)
    return sliced


def _join_rows(first: Tree, second: Tree, half: int, rows_in_list: bool) -> Tree:
    """Join the halves `first` and `second` of an output."""

    def is_row_list(value: object) -> bool:
        return rows_in_list and isinstance(value, list) and len(value) == half

    def join(a: object, b: object) -> object:
        if isinstance(a, list) and isinstance(b, list):
            return a + b
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape[:1] == (half,):
            return torch.cat([a, b])
        return a

    joined: Tree = tree_map(join, first, second, is_leaf=is_row_list)
    return joined


def _roles(step: int, structure: Structure, influence: list[torch.Tensor | None]) -> Roles:
    """Return the roles in a step from the `_influence` of each of its calls."""
    calls = [nth for nth, rows in enumerate(influence) if rows is not None]  # no ControlNet's: it only affects another
    gradients = [rows for rows in influence if rows is not None]
    match [structure[nth][1] for nth in calls]:
        case [1.0]:
            return {}
        case [2.0]:
            rows = gradients[0]  # [2B]
            half = len(rows) // 2
            first, second = float(rows[0]), float(rows[half])
            others = torch.cat([rows[1:half], rows[half + 1 :]])
            if len(others) and float(others.max()) > min(first, second):
                raise ReplayError(
                    f"the denoiser's output at step {step} does not consist of two halves of rows: use cfg joint"
                )
            larger = _first_is_larger(step, first, second)
            return {calls[0]: "conditional_first" if larger else "unconditional_first"}
        case [1.0, 1.0]:
            if _first_is_larger(step, *(float(rows.sum()) for rows in gradients)):
                return {calls[0]: "conditional", calls[1]: "unconditional"}
            return {calls[0]: "unconditional", calls[1]: "conditional"}
        case multiples:
            raise ReplayError(
                f"step {step} uses {len(multiples)} denoiser outputs with {multiples} rows per row of latents, not a "
                "conditional and an unconditional one: use cfg joint"
            )


def _first_is_larger(step: int, first: float, second: float) -> bool:
    if not max(first, second) > CLEARLY_LARGER**2 * min(first, second):
        raise ReplayError(
            f"the two denoiser outputs at step {step} have the same weight in the model output, so the conditional "
            "one cannot be identified: use cfg joint"
        )
    return first > second


def _check_off(pipe: DiffusionPipeline, tape: Tape, steps: dict[Structure, int]) -> None:
    """Raise `ReplayError` if guidance at `steps` has no gradient when its two outputs are identical."""
    checked = _CHECKED.setdefault(pipe, set())
    new = {k for structure, k in steps.items() if structure not in checked}
    if not new:
        return
    with unguided(pipe):
        influence = _influence(pipe, tape, new, 0.0)
    for k in sorted(new):
        if not all(rows is None or bool(rows.isfinite().all()) for rows in influence[k]):
            raise ReplayError(
                f"guidance at step {k} has no gradient when the conditional output also replaces the unconditional "
                "one (it may divide by their distance): use cfg joint or detach_uncond"
            )
    checked.update(steps)


def _influence(
    pipe: DiffusionPipeline, tape: Tape, steps: set[int], apart: float
) -> dict[int, list[torch.Tensor | None]]:
    """Return, for each call at `steps`, the squared gradients `[rows]` of the first row of the model output.

    None for a call without gradient. The gradient is that of a random projection, through the pipeline's arithmetic on
    the recorded outputs; `apart`: distance of the outputs, in units of their standard deviation.
    """
    head = _Inspector(tape, steps, apart)
    with torch.enable_grad():
        rerun(pipe, head)
    if missing := steps - head.influence.keys():
        raise ReplayError(f"no gradient of the denoiser's outputs reaches the model output at step {min(missing)}")
    return head.influence


class _Inspector(TapeHead):
    """Head of a pass that answers everything from the tape, including the denoiser."""

    def __init__(self, tape: Tape, steps: set[int], apart: float) -> None:
        super().__init__(tape)
        self.steps, self.apart = steps, apart
        self.by_step = looped_calls(tape)
        self.served = -1  # step of the latest calls, which several scheduler streams may share
        self.outputs: list[Tree] = []  # of the latest calls
        self.influence: dict[int, list[torch.Tensor | None]] = {}
        self.generator = torch.Generator().manual_seed(0)  # does not change the global generator

    def on_component(self, name: str, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        if name not in self.looped:
            return forward(*args, **kwargs)
        if self.served != self.step:
            self.served, self.outputs = self.step, []
        recorded = self.by_step.get(self.step, [])[len(self.outputs) :]
        if not recorded or recorded[0].component != name:
            raise ReplayError(f"the replay calls {name} at step {self.step}, which the rollout did not")

        def leaf(value: object) -> object:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return value.requires_grad_()
            return value

        output = self._nearly_equal(tree_map(self._with_values, detached_copy(recorded[0].output)))
        self.outputs.append(tree_map(leaf, output))
        return self.outputs[-1]

    def next_latents(
        self, model_output: torch.Tensor, sample: torch.Tensor, source: torch.Tensor | None
    ) -> torch.Tensor:
        del sample, source
        if self.served in self.steps and self.served not in self.influence and model_output.requires_grad:
            row = model_output[0].float()
            projection = (row * torch.randn(row.shape, generator=self.generator).to(row.device)).sum()
            squares = [_squared_gradients(projection, output) for output in self.outputs]
            if any(rows is not None for rows in squares):
                self.influence[self.served] = squares
        self.step += 1
        if self.steps <= self.influence.keys() or self.step == len(self.tape.steps):
            raise StopPipeline
        return self.tape.steps[self.step - 1].x_next

    def _nearly_equal(self, output: Tree) -> Tree:
        """Return a guided `output` with nearly the values of the step's first half or call.

        Adaptive projected guidance drops the part of `c - u` along `c`, which lowers the weight of `c`, for an
        untrained model below that of `u`. If `c` is nearly `u`, that part is tiny; at `c = u` the norm has no
        derivative.
        """
        half = len(self.tape.steps[self.step].x)
        first = next((o for o in self.outputs if _shapes(o) == _shapes(output)), None)
        if first is None and len(leading(output)) != 2 * half:
            return output

        def near(value: object, other: object) -> object:
            if not (isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and value.is_floating_point()):
                return value
            noise = torch.randn(other.shape, generator=self.generator).to(other.device, other.dtype)
            return other.detach() + self.apart * other.detach().std() * noise

        if first is not None:
            return tree_map(near, output, first)
        in_list = has_list_rows(output)
        one, two = (_slice_rows(output, part, 2 * half, in_list) for part in (slice(0, half), slice(half, None)))
        if _shapes(one) != _shapes(two):
            return output
        return _join_rows(one, tree_map(near, two, one), half, in_list)

    def _with_values(self, value: object) -> object:
        """Return `value`, or noise if only its shape was kept: with zeros, rescaled guidance has no gradient."""
        if not (isinstance(value, torch.Tensor) and value.is_meta):
            return value
        noise = torch.randn(value.shape, generator=self.generator)
        return noise.to(value.dtype).to(self.device)


def _shapes(tree: Tree) -> list[object]:
    return [v.shape if isinstance(v, torch.Tensor) else type(v) for v in tree_leaves(tree)]


def _squared_gradients(loss: torch.Tensor, output: Tree) -> torch.Tensor | None:
    """Return the squared norm of the gradient of `loss` for each row of a call's output; None without gradient."""
    first, in_list = leading(output), has_list_rows(output)
    leaves = [v for v in tree_leaves(first if in_list else output) if torch.is_tensor(v) and v.requires_grad]
    rows = leaves if in_list else [v for v in leaves if v.ndim and len(v) == len(first)]
    grads = torch.autograd.grad(loss, rows, retain_graph=True, allow_unused=True) if rows else ()
    if all(g is None for g in grads):
        return None
    squared = [(torch.zeros_like(v) if g is None else g).float().square() for v, g in zip(rows, grads, strict=True)]
    if in_list:
        return torch.stack([g.sum() for g in squared]).cpu()
    return torch.stack([g.flatten(1).sum(1) for g in squared]).sum(0).cpu()

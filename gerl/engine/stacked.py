"""Several trained steps in one forward and backward pass of the denoiser.

All latents are on the tape, so what the denoiser is called with at a trained step is known before it runs. A first pass
of the pipeline gathers these arguments, with recorded outputs in place of the denoiser's (`Gatherer`). The calls of
several steps, put together along their batch dimensions, are one call, whose output a second pass hands out step by
step (`StackedPlayer`): the losses go back to it, and from there through the denoiser once.

The arguments of the second pass are compared with the gathered ones, so a pipeline whose calls depend on what the
denoiser said at other steps is refused. Components without trained weights (ControlNets) run step by step.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gerl.engine.batching import Arguments, batch_dim, detached_copy, entries, map_rows, pairs, same
from gerl.engine.player import Player
from gerl.engine.tape import ComponentCall, probed_call
from gerl.errors import ReplayError

Position = tuple[int, int]  # step, and which of its calls
Call = tuple[str, Arguments]  # of a component


class Gatherer(Player):
    """A replay that notes the calls of the denoiser at its trained steps, and makes none."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gathered: dict[Position, Call] = {}

    def _run(
        self,
        name: str,
        forward: Callable[..., object],
        recorded: ComponentCall,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        if not is_trained(self.components[name]):
            return forward(*args, **kwargs)
        self.gathered[self.position] = (name, detached_copy((args, kwargs)))
        return self._recorded(recorded)

    def _train(self, k: int, x: torch.Tensor, model_output: torch.Tensor, written: torch.Tensor | None) -> None:
        del k, x, model_output, written


class StackedPlayer(Player):
    """A replay of calls that were gathered."""

    def plan(self, calls: Mapping[Position, Call], size: int) -> None:
        """Make the calls of `size` steps at a time one."""
        steps = sorted({k for k, _ in calls})
        self.gathered, self.stack = calls, {k: i // size for i, k in enumerate(steps)}
        self.running = -1
        self.outputs: dict[Position, object] = {}  # of the stack that runs

    def _run(
        self,
        name: str,
        forward: Callable[..., object],
        recorded: ComponentCall,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        if not is_trained(self.components[name]):
            return forward(*args, **kwargs)
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
        if not same((args, kwargs), gathered):
            raise ReplayError(
                f"the arguments of {name} at step {self.step} depend on its output at an earlier step: use step_batch=1"
            )
        return self._cut(self.outputs.pop(self.position))

    def _run_stack(self, name: str, forward: Callable[..., object], recorded: ComponentCall) -> None:
        """The outputs of this call and those like it at the other steps of the stack."""
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
        rows = _rows(calls[0], probe.inputs, n, probed)
        args, kwargs = _joined(calls, probe.inputs, n, probed, rows)
        output = self.differentiable.run(self.components[name], forward, *args, **kwargs)
        shapes = (recorded.output, probe.output, n, probed)
        for i, place in enumerate(places):
            self.outputs[place] = map_rows(output, *shapes, partial(_narrowed, i), partial(_sliced, i))

    def _backward_through_denoiser(self) -> None:
        scale = min(self.scales.values(), default=1.0)  # one pass has one scale
        for step, cut in self.cuts:
            for _, leaf in cut:
                if leaf.grad is not None and step in self.scales:
                    leaf.grad *= scale / self.scales[step]
        self._backward([pair for _, cut in self.cuts for pair in cut], scale)
        self.cuts, self.scales = [], {}


def is_trained(component: torch.nn.Module) -> bool:
    """Whether anything in `component` has a gradient."""
    return any(p.requires_grad for p in component.parameters())


def _rows(value: Any, like: Any, n: int, probed: int) -> int:
    """Rows of the first value in `value` that has a batch dimension; 0 where none has."""
    if isinstance(value, torch.Tensor):
        dim = batch_dim(value, like, n, probed)
        return 0 if dim is None else value.shape[dim]
    if isinstance(value, list | tuple | dict):
        if isinstance(value, list) and entries(value, like, n, probed):
            return len(value)
        found = (_rows(part, other, n, probed) for part, other in pairs(value, like))
        return next((rows for rows in found if rows), 0)
    return 0


def _joined(values: Sequence[Any], like: Any, n: int, probed: int, rows: int) -> Any:
    """The argument of one call that stands for those of several, which have `rows` rows each."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        dim = batch_dim(first, like, n, probed)
        if dim is not None:
            return torch.cat(list(values), dim)
        if all(torch.equal(first, value) for value in values[1:]):
            return first
        if first.numel() == 1:  # a timestep for the whole batch
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


def _narrowed(i: int, value: torch.Tensor, dim: int, of_one: torch.Tensor) -> torch.Tensor:
    """Of the output of a stack that of its call `i`, which is like `of_one`."""
    return value.narrow(dim, i * of_one.shape[dim], of_one.shape[dim])


def _sliced(i: int, value: list[object], of_one: list[object]) -> list[object]:
    return value[i * len(of_one) : (i + 1) * len(of_one)]

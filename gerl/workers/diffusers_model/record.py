"""Record: the pipeline's own `__call__`, with its scheduler steps sampled and written on a tape."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gerl.errors import ModelError
from gerl.workers.diffusers_model.batching import batch_size, detached_copy, num_elements, select_call
from gerl.workers.diffusers_model.instrument import StopPipeline, routed
from gerl.workers.diffusers_model.kernels import gaussian_log_prob
from gerl.workers.diffusers_model.tape import Answer, ComponentCall, Tape, TapeStep
from gerl.workers.diffusers_model.transitions import Transitions

# component outputs larger than this many times the latents (ControlNet residuals) are kept as shapes only
MAX_KEPT_OUTPUT = 16


def record(
    pipe: Any,
    call: dict[str, Any],
    kernel: str = "flow_sde",
    noise_level: float = 0.7,
    window: Iterable[int] | None = None,
    generators: Sequence[torch.Generator] | None = None,
    probe: Tape | bool = True,
) -> tuple[Any, Tape]:
    """Run `pipe(**call)` without gradient; return its output and the tape that `replay` needs.

    `call`: keyword arguments of the pipeline with one prompt per sample (a list). `kernel`, `noise_level`: the
    transition kernel of the stochastic steps, see `kernels.coefficients`; other steps are Euler (ODE) steps. `window`:
    indices of the stochastic steps, None: all but the last. `generators`: one `torch.Generator` per sample, from which
    its initial latents and then its step noise are drawn; None: the global generator. `probe`: True makes the
    one-sample tape needed to replay sub-batches, a tape reuses that of an earlier call of the same kind, False
    goes without.

    Raises `ModelError` where the scheduler has no transition kernel or `window` names the last or a missing step.
    """
    n = batch_size(call)
    if generators is not None and len(generators) != n:
        raise ValueError(f"{len(generators)} generators for {n} samples: give one per sample")
    arguments = {name: value for name, value in call.items() if name != "generator"}
    tape = Tape(select_call(arguments, range(n)), n)
    arguments = select_call(arguments, range(n))  # fresh lists both times: some pipelines write into theirs
    window = None if window is None else frozenset(window)
    recorder = Recorder(tape, Transitions(kernel, noise_level), window, generators)
    if generators is not None:
        arguments["generator"] = list(generators)
    with torch.no_grad(), routed(pipe, recorder):
        output = pipe(**arguments)
    if window is not None and window - set(range(len(tape.steps))):
        raise ModelError(f"the window names steps {sorted(window)}, but the pipeline took {len(tape.steps)} steps")
    # what runs after the last step (VAE, safety checker) is not replayed
    tape.component_calls = [c for c in tape.component_calls if c.step < len(tape.steps)]
    if isinstance(probe, Tape):
        tape.probe = probe
    elif probe and n > 1:
        tape.probe = record_probe(pipe, tape.call)
    return output, tape


def record_probe(pipe: Any, call: dict[str, Any]) -> Tape:
    """The tape of `call` for its first sample up to the first scheduler step: where batch dimensions are."""
    tape = Tape(select_call(call, [0]), 1)
    probe = Recorder(tape, Transitions("ode", 0.0), frozenset(), None, stop_at_first_step=True)
    arguments = select_call(call, [0])
    if "generator" in inspect.signature(type(pipe).__call__).parameters:
        arguments["generator"] = torch.Generator().manual_seed(0)  # leaves the global generator as it is
    with torch.no_grad(), routed(pipe, probe), contextlib.suppress(StopPipeline):
        pipe(**arguments)
    return tape


class Recorder:
    """The head of a rollout: see `instrument.Head`."""

    def __init__(
        self,
        tape: Tape,
        transitions: Transitions,
        window: frozenset[int] | None,
        generators: Sequence[torch.Generator] | None,
        stop_at_first_step: bool = False,
    ) -> None:
        self.tape, self.transitions, self.window, self.generators = tape, transitions, window, generators
        self.stop_at_first_step = stop_at_first_step
        self.depth = 0  # nesting of answered methods: only the outermost is answered in a replay
        self.carried: dict[int, torch.Tensor] = {}  # scheduler -> fp32 latents before rounding to the pipeline's dtype

    def on_method(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.depth += 1
        try:
            value = method(*args, **kwargs)
        finally:
            self.depth -= 1
        if self.depth == 0:
            self.tape.answers.append(Answer(name, detached_copy(value)))
        return value

    def on_component(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if self.depth == 0:
            self.tape.component_calls.append(ComponentCall(len(self.tape.steps), name, detached_copy(output)))
        return output

    def on_scheduler_step(
        self, scheduler: Any, model_output: torch.Tensor, timestep: Any, sample: torch.Tensor
    ) -> torch.Tensor:
        if self.stop_at_first_step:
            raise StopPipeline
        k = len(self.tape.steps)
        x = self.carried.get(id(scheduler))
        if x is None or x.shape != sample.shape or not torch.equal(x.to(sample.dtype), sample):
            x = sample.float().clone()  # the first step, or the pipeline edited the latents in between
        self._drop_large_outputs(k, MAX_KEPT_OUTPUT * x.numel())
        rule = self.transitions.next_rule(scheduler, timestep, None if self.window is None else k in self.window)
        mean = rule.mean(x, model_output)
        x_next, log_prob = mean, None
        if rule.std > 0:
            x_next = mean + rule.std * self._noise(x)
            log_prob = gaussian_log_prob(x_next, mean, rule.std)
        self.tape.steps.append(TapeStep(rule, x, x_next, log_prob, len(self.tape.answers)))
        self.carried[id(scheduler)] = x_next
        return x_next

    def _noise(self, x: torch.Tensor) -> torch.Tensor:
        """Standard normal fp32 noise in the shape of `x`, sample by sample so that it does not depend on the batch."""
        if self.generators is None:
            return torch.randn(x.shape, device=x.device)
        rows, remainder = divmod(len(x), len(self.generators))
        if remainder:
            raise ModelError(
                f"the latents have {len(x)} rows for {len(self.generators)} samples: their noise cannot be assigned"
            )
        shape = (rows, *x.shape[1:])
        return torch.cat([torch.randn(shape, generator=g, device=g.device).to(x.device) for g in self.generators])

    def _drop_large_outputs(self, step: int, limit: int) -> None:
        for call in reversed(self.tape.component_calls):
            if call.step < step:
                break
            if num_elements(call.output) > limit:
                call.output = tree_map(lambda v: v.to("meta") if torch.is_tensor(v) else v, call.output)

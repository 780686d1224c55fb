"""Features for a critic that a denoiser computes anyway: its last hidden states and its prompt embedding, pooled."""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gerl.engine.rows import leading
from gerl.engine.tape import Features, Tape

PROMPTS = ("pooled_projections", "pooled_embeds", "text_embeds", "encoder_hidden_states")  # in order of preference


class HiddenStates:
    """Records `Features` of calls of `denoisers` on tapes; `hidden`: also the hidden states.

    These are the input of the submodule that a denoiser calls last, its output layer. Several calls of a step, and
    several rows of a sample (guidance), are averaged.
    """

    def __init__(self, denoisers: Iterable[torch.nn.Module], hidden: bool = True) -> None:
        self.denoisers, self.hidden = list(denoisers), hidden
        self.last: torch.Tensor | None = None  # input of the submodule called last
        self.calls: dict[int, int] = {}  # by step

    @contextlib.contextmanager
    def recorded_on(self, tape: Tape) -> Iterator[None]:
        """Record the calls in the block on `tape`."""
        self.calls.clear()
        self.last = None
        tape.features = tape.features or Features()
        with contextlib.ExitStack() as undo:
            for denoiser in self.denoisers:
                for part in submodules(denoiser) if self.hidden else ():
                    undo.callback(part.register_forward_pre_hook(self._note, with_kwargs=True).remove)
                keep = partial(self._keep, tape, tape.features)
                undo.callback(denoiser.register_forward_hook(keep, with_kwargs=True).remove)
            yield

    def _note(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.last = next((v for v in (*args, *kwargs.values()) if torch.is_tensor(v)), None)

    def _keep(
        self, tape: Tape, features: Features, module: torch.nn.Module, args: object, kwargs: dict[str, Any], output: Any
    ) -> None:
        k, count, last = len(tape.steps), len(leading(output)), self.last
        self.last = None
        if features.prompt is None and (prompt := prompt_embedding(kwargs)) is not None:
            features.prompt = pooled(prompt, None, count, tape.batch_size)
        if last is None or (hidden := pooled(last, output, count, tape.batch_size)) is None:
            return
        self.calls[k] = self.calls.get(k, 0) + 1
        before = features.hidden.get(k, hidden)
        features.hidden[k] = before + (hidden - before) / self.calls[k]


def submodules(denoiser: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the submodules called by `denoiser` itself, without compiled ones, in which hooks would be traced."""
    for part in denoiser.children():
        if isinstance(part, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from submodules(part)
        elif part._compiled_call_impl is None:
            yield part


def pooled(value: torch.Tensor, output: Any, count: int, n: int) -> torch.Tensor | None:
    """Return the mean of `value` over everything but samples and channels, `[n, d]` fp32; None if its form is unknown.

    `count`: rows of the denoiser's `output`, in which the samples vary fastest; a row may have several ones in `value`
    (frames). Channels are the last dimension, or the second one of maps of the same height and width as `output`.
    Tokens may come before rows.
    """
    if value.ndim == 3 and value.shape[1] == count != value.shape[0]:
        value = value.transpose(0, 1)
    if value.ndim < 2 or count % n or value.shape[0] % max(count, 1):
        return None
    sizes = {v.shape[-2:] for v in tree_leaves(output) if torch.is_tensor(v)}
    if value.ndim > 3 and value.shape[-2:] in sizes:
        value = value.movedim(1, -1)
    means = value.flatten(1, -2).mean(1, dtype=torch.float32) if value.ndim > 2 else value.float()
    return means.unflatten(0, (count // n, n, -1)).mean((0, 2))


def prompt_embedding(kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the pooled prompt embedding among a denoiser's arguments, else that of its tokens; None without either."""
    more = kwargs.get("added_cond_kwargs")
    arguments = {**kwargs, **(more if isinstance(more, Mapping) else {})}
    return next((v for name in PROMPTS if torch.is_tensor(v := arguments.get(name)) and v.ndim in (2, 3)), None)

"""Denoisers of which a part runs without gradient: made differentiable for a replay, or refused.

Mixtures of experts may have a fast inference branch under `torch.no_grad` in eval mode (HiDream's do). A replay through
it is exact, and its gradient misses the branch: nothing else would show it. So the first forward pass of each denoiser
is watched.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves

from gerl.engine.batching import Tree
from gerl.errors import ReplayError

_Found: TypeAlias = "WeakKeyDictionary[torch.nn.Module, list[torch.nn.Module]]"  # modules to switch, by denoiser
_FOUND: _Found = WeakKeyDictionary()  # where the weights need a gradient
_CARRYING: _Found = WeakKeyDictionary()  # where the latents do too: more modules pass one on


class Differentiable:
    """Runs denoisers so that gradient flows through all of their modules; a context that puts everything back.

    A module that switches the gradient off in eval mode is switched, alone, to training mode: not what is inside of it,
    so that no dropout starts. That has to bring the gradient and leave the numbers as they are.
    """

    def __init__(self) -> None:
        self.switched: list[torch.nn.Module] = []
        self.carries = False  # whether what the denoiser is called with needs a gradient

    def __enter__(self) -> "Differentiable":
        return self

    def __exit__(self, *_: object) -> None:
        for module in self.switched:
            module.training = False

    def run(self, denoiser: torch.nn.Module, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        """The output of `forward`, which runs `denoiser`; raises `ReplayError` where its gradient would be wrong."""
        compute = functools.partial(forward, *args, **kwargs)
        if not torch.is_grad_enabled():
            return compute()
        if denoiser in self._found:
            self._switch(self._found[denoiser])
            return compute()
        if not is_compiled(denoiser):
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
        self._found[denoiser] = [b.module for b in blocked]
        return output

    @property
    def _found(self) -> _Found:
        return _CARRYING if self.carries else _FOUND

    def _switch(self, modules: list[torch.nn.Module]) -> None:
        for module in modules:
            if not module.training:
                module.training = True
                self.switched.append(module)


@dataclass
class NoGradPart:
    """A module that is run with gradient, but runs one of its parts without."""

    module: torch.nn.Module
    name: str
    part: str


def watch_gradients(denoiser: torch.nn.Module, forward: Callable[[], object]) -> tuple[object, list[NoGradPart]]:
    """The output of `forward`, and the modules of `denoiser` that switched the gradient off for a part that needs it.

    A part with weights needs it where these are trained, or where what goes into the module has a gradient.
    """
    names = {module: name for name, module in denoiser.named_modules()}
    entered: list[tuple[torch.nn.Module, bool, bool]] = [(denoiser, torch.is_grad_enabled(), False)]
    found: dict[torch.nn.Module, NoGradPart] = {}

    def enter(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        outer, with_grad, has_gradient = entered[-1]
        on = torch.is_grad_enabled()
        if with_grad and not on and outer not in found and needs_gradient(module, has_gradient):
            found[outer] = NoGradPart(outer, names[outer] or "the denoiser", names[module])
        leaves = tree_leaves((args, kwargs)) if on else []
        entered.append((module, on, any(torch.is_tensor(v) and v.requires_grad for v in leaves)))

    def leave(*_: object) -> None:
        entered.pop()

    with hooked([m for m in names if m is not denoiser], enter, leave):
        return forward(), list(found.values())


def needs_gradient(part: torch.nn.Module, has_gradient: bool) -> bool:
    """Whether a gradient is missed if `part` runs without; `has_gradient`: what surrounds it has one to pass on."""
    return any(p.requires_grad or has_gradient for p in part.parameters())


@contextlib.contextmanager
def hooked(modules: list[torch.nn.Module], enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Call `enter` before and `leave` after each forward pass of `modules`."""
    handles = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in modules]
    handles += [m.register_forward_hook(leave) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_compiled(denoiser: torch.nn.Module) -> bool:
    """Whether `denoiser` or a part of it goes through torch.compile."""
    wrapped = "_orig_mod" in dict(denoiser.named_children())  # by torch.compile(denoiser)
    return wrapped or any(m._compiled_call_impl is not None for m in denoiser.modules())


def is_close(a: Tree, b: Tree) -> bool:
    """Whether two outputs are equal but for rounding, in the norm of each tensor."""
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    tensors = [(x.detach(), y.detach()) for x, y in pairs if torch.is_tensor(x) and x.is_floating_point()]
    return all(
        bool((x - y).float().norm() <= max(1e-4, 8 * torch.finfo(x.dtype).eps) * y.float().norm()) for x, y in tensors
    )

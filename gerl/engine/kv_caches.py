"""Caches filled in one denoising step and read in later ones: keys and values of a prompt or a reference image.

A replay that trains a step which reads a cache also runs the step that fills it, and the gradient flows through the
cache. Any object with tensors inside that is not a container may be a cache. A cache that later steps fill again is
refused: the gradient of a step would flow through all steps before it.
"""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gerl.engine.rows import Nested, Tree
from gerl.errors import ModelError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

HOOKS = "_diffusers_hook"  # the attribute in which diffusers keeps a module's hooks
DEPTH = 4  # levels of attributes, lists and dictionaries inside a cache: layers, their parts, keys and values


class Caches:
    """Detector of objects that carry state from one denoising step to later ones, in one rollout."""

    def __init__(self) -> None:
        self.way = "if the pipeline has an argument that disables it, set it in sampling.call"
        self.filled: dict[int, tuple[object, int]] = {}  # id of an object -> the object and the step that filled it

    def belong_to(self, pipe: DiffusionPipeline) -> None:
        """Find out how to run `pipe` without caches, for the error messages. Raises `ModelError` for stateful hooks."""
        for component, model in pipe.components.items():
            if isinstance(model, torch.nn.Module) and (hooks := stateful_hooks(model)):
                raise ModelError(
                    f"{component} keeps state between denoising steps ({', '.join(hooks)}), which cannot be "
                    f"replayed: call pipe.{component}.disable_cache() first"
                )
        switches = [p for p in inspect.signature(type(pipe).__call__).parameters if "cache" in p]
        if switches:
            self.way = f"set sampling.call.{switches[0]}=false"

    def arguments(self, step: int, arguments: Tree) -> tuple[dict[int, set[int]], int | None]:
        """Return the ids of the tensors in each object of a call, and the earlier step that filled one of them."""
        held, reads = {}, None
        for value in objects_of(arguments):
            if (filled := self.filled.get(id(value), (None, step))[1]) != step:
                reads = filled
            held[id(value)] = {id(tensor) for tensor in tensors_inside(value)}
        return held, reads

    def note(self, step: int, component: str, arguments: Tree, before: dict[int, set[int]], output: Tree) -> bool:
        """Remember objects that contain new tensors after the call, and return whether there are any.

        Raises `ModelError` if one is filled again.
        """
        fills = False
        for value in objects_of((arguments, output)):
            if {id(tensor) for tensor in tensors_inside(value)} - before.get(id(value), set()):
                fills = True
                filled = self.filled.setdefault(id(value), (value, step))[1]
                if filled != step:
                    raise ModelError(
                        f"{component} fills at step {step} a {type(value).__name__} again that step {filled} filled, "
                        f"and such a cache cannot be replayed: {self.way}"
                    )
        return fills


def without_caches(tree: Nested) -> Nested:
    """Return `tree` with None for objects that have tensors inside."""
    stripped: Nested = tree_map(
        lambda v: None if any(True for o in objects_of(v) for _ in tensors_inside(o)) else v, tree
    )
    return stripped


def cut_caches(arguments: Tree, output: Tree, before: set[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut the graph at the tensors that a call has put into caches; return pairs of a tensor and the leaf in its place.

    `before`: the ids of the tensors that the caches held before the call.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in before or not tensor.requires_grad:
            return tensor
        pairs.append((tensor, tensor.detach().requires_grad_()))
        return pairs[-1][1]

    for value in {id(value): value for value in objects_of((arguments, output))}.values():
        _replace_tensors(value, leaf)
    return pairs


def _replace_tensors(value: object, new: Callable[[torch.Tensor], torch.Tensor], depth: int = DEPTH) -> None:
    """Replace the tensors inside `value`, in place."""
    inner: Any = value if isinstance(value, list | dict) else vars(value) if hasattr(value, "__dict__") else ()
    for key in list(inner) if isinstance(inner, dict) else range(len(inner)):
        if isinstance(inner[key], torch.Tensor):
            inner[key] = new(inner[key])
        elif depth:
            _replace_tensors(inner[key], new, depth - 1)


def stateful_hooks(model: torch.nn.Module) -> list[str]:
    """Return the names of stateful hooks in `model`, such as those of diffusers' `enable_cache`."""
    registries = [registry for module in model.modules() if (registry := vars(module).get(HOOKS)) is not None]
    return sorted({name for r in registries for name, hook in r.hooks.items() if hook._is_stateful})


def objects_of(tree: Tree) -> Iterator[object]:
    """Yield the leaves of `tree` that have attributes."""
    for leaf in tree_leaves(tree):
        if hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor | torch.nn.Module | type):
            yield leaf


def tensors_inside(value: object, depth: int = DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors inside `value`."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    inner: Iterable[object] = ()
    if isinstance(value, list | tuple):
        inner = value
    elif isinstance(value, dict):
        inner = value.values()
    elif hasattr(value, "__dict__"):
        inner = vars(value).values()
    if depth:
        for part in inner:
            yield from tensors_inside(part, depth - 1)

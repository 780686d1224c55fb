"""Caches that a denoiser fills in one denoising step and reads in a later one (KV caches): they cannot be replayed.

A replay runs the denoiser at trained steps only, so what an untrained step would have left is missing; and the graph
of one step would reach into another. An object that has tensors inside, but is no container of them, may be a cache.
"""

from __future__ import annotations  # of diffusers, which the driver of a run does without

import inspect
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves

from gerl.engine.batching import Tree
from gerl.errors import ModelError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

HOOKS = "_diffusers_hook"  # the attribute in which diffusers keeps the hooks of a module
DEPTH = 4  # of attributes, lists and dictionaries inside a cache: layers, their parts, keys and values


class Caches:
    """Watches what a pipeline's components are given and give back, in one rollout."""

    def __init__(self) -> None:
        self.way = "if the pipeline has an argument that disables it, set it in sampling.call"
        self.filled: dict[int, tuple[object, int]] = {}  # id of an object -> the object and the step that filled it

    def belong_to(self, pipe: DiffusionPipeline) -> None:
        """Say in errors how `pipe` does without, where that can be told."""
        import diffusers  # in here: the driver of a run does without

        for component, model in pipe.components.items():
            if isinstance(model, torch.nn.Module) and (found := stateful_hooks(model)):
                raise ModelError(
                    f"{component} keeps state between denoising steps ({', '.join(found)}), which cannot be "
                    f"replayed: call pipe.{component}.disable_cache() first"
                )
        name = type(pipe).__name__
        switches = [p for p in inspect.signature(type(pipe).__call__).parameters if "cache" in p]
        if switches:
            self.way = f"set sampling.call.{switches[0]}=false"
        elif hasattr(diffusers, sibling := name.replace("KV", "")) and sibling != name:
            self.way = f"no argument disables it, but {sibling} has no cache: use it with these weights"

    def check_arguments(self, step: int, component: str, arguments: Tree) -> dict[int, set[int]]:
        """The tensors that each object in `arguments` holds, by id.

        Raises `ModelError` for an object that was filled in another step.
        """
        held = {}
        for value in _objects(arguments):
            if self.filled.get(id(value), (None, step))[1] != step:
                raise ModelError(
                    f"{component} reads at step {step} what an earlier step stored in a {type(value).__name__}, "
                    f"and a cache cannot be replayed: {self.way}"
                )
            held[id(value)] = {id(tensor) for tensor in _tensors(value)}
        return held

    def note(self, step: int, arguments: Tree, before: dict[int, set[int]], output: Tree) -> None:
        """Remember the objects that hold tensors which they did not hold before the call."""
        for value in _objects((arguments, output)):
            if {id(tensor) for tensor in _tensors(value)} - before.get(id(value), set()):
                self.filled.setdefault(id(value), (value, step))


def stateful_hooks(model: torch.nn.Module) -> list[str]:
    """Names of the hooks in `model` that keep state between calls, as those of diffusers' `enable_cache` do."""
    registries = [registry for module in model.modules() if (registry := getattr(module, HOOKS, None)) is not None]
    return sorted({name for r in registries for name, hook in r.hooks.items() if hook._is_stateful})


def _objects(tree: Tree) -> Iterator[object]:
    """The leaves of `tree` that have attributes of their own."""
    for leaf in tree_leaves(tree):
        if hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor | torch.nn.Module | type):
            yield leaf


def _tensors(value: object, depth: int = DEPTH) -> Iterator[torch.Tensor]:
    """The tensors inside `value`."""
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
            yield from _tensors(part, depth - 1)

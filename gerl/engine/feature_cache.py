"""Feature caches for the denoisers of a rollout, used at steps that need only the latents.

With a cache the blocks of a denoiser repeat or extrapolate their outputs from an earlier step. The cache is off, and
emptied, at steps that are trained or branched from, so a replay computes what was recorded.
"""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gerl.config.blocks import FeatureCacheName
from gerl.errors import ModelError
from gerl.utils.versions import require

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

NAMES: tuple[str, ...] = get_args(FeatureCacheName)
Forward = Callable[..., object]
Tree = object  # tensors and other values, in nested lists, tuples and dictionaries


@dataclass(frozen=True)
class FeatureCache:
    """Kind of cache and its settings.

    `first_block`: all blocks but the first are skipped if the first block's output is within `threshold` (relative) of
    the one at their last computation, and their contribution from then is added again (after ParaAttention's First
    Block Cache, which compares the first block's residual). All rows of a call are judged together. `taylorseer`:
    attention is computed at every `interval`-th step after the first two, and extrapolated in between (TaylorSeer,
    arXiv 2503.06923). `exact`: steps besides the stochastic ones at which the cache is off, because others branch from
    them.
    """

    name: str = "none"
    threshold: float = 0.05
    interval: int = 2
    exact: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"unknown cache {self.name!r}: choose one of {', '.join(NAMES)}")


NO_CACHE = FeatureCache()


class CachedDenoisers:
    """Context manager for the cached denoisers of a pipeline in one rollout; restores them on exit."""

    def __init__(self, pipe: DiffusionPipeline, cache: FeatureCache) -> None:
        self.cache, self.components = cache, pipe.components
        self.active: dict[str, _FirstBlock | _TaylorSeer] = {}

    def __enter__(self) -> CachedDenoisers:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.active):
            self.active.pop(name).remove()

    def run(self, name: str, nth: int, exact: bool, forward: Forward, *args: object, **kwargs: object) -> object:
        """Return the output of `name` in its `nth` call at a step; `exact`: uncached. May raise `ModelError`."""
        if not any(p.requires_grad for p in self.components[name].parameters()):  # not a denoiser
            return forward(*args, **kwargs)
        if exact:
            if name in self.active:
                self.active.pop(name).remove()
            return forward(*args, **kwargs)
        if name not in self.active:
            made = _FirstBlock if self.cache.name == "first_block" else _TaylorSeer
            self.active[name] = made(self.components[name], self.cache)
        # each kind of call has its own entries: the halves of guidance may be separate calls, at some steps only
        sizes = [tuple(v.shape) for v in tree_leaves((args, kwargs)) if torch.is_tensor(v)]
        return self.active[name].call(f"{nth} {sizes}", functools.partial(forward, *args, **kwargs))


@dataclass
class _BlockOutputs:
    """Block outputs at the last step that computed them, for one kind of call."""

    first: Tree = None  # the first block's output
    added: list[torch.Tensor | None] = field(default_factory=list)  # added to its tensors by the other blocks
    outputs: list[Tree] = field(default_factory=list)  # of the other blocks, as shapes


class _FirstBlock:
    """First-block cache of all block lists, or only the longest if the outputs of all do not add up."""

    def __init__(self, model: torch.nn.Module, cache: FeatureCache) -> None:
        self.model, self.cache = model, cache
        lists = [list(part) for part in model.children() if isinstance(part, torch.nn.ModuleList) and len(part)]
        self.choices = [[block for part in lists for block in part], max(reversed(lists), key=len, default=[])]
        self.patched: list[tuple[torch.nn.Module, object]] = []
        self._take_next()

    def _take_next(self) -> None:
        self.remove()
        blocks = self.choices.pop(0) if self.choices else []
        if len(blocks) < 2:
            raise _refused(self.cache, self.model, "the output of its last block does not extend that of the first one")
        self.kept: dict[str, _BlockOutputs] = {}
        self.now = _BlockOutputs()  # of the current call
        self.first: Tree = None  # output of the first block in a call that skips the others
        self.position, self.skips = 0, False
        for block in blocks:
            self.patched.append((block, block.__dict__.get("forward")))
            block.__dict__["forward"] = functools.partial(self._forward, block.forward)

    def remove(self) -> None:
        for block, forward in self.patched:
            if forward is None:
                del block.__dict__["forward"]
            else:
                block.__dict__["forward"] = forward
        self.patched = []

    def call(self, kind: str, forward: Callable[[], object]) -> object:
        self.now, self.position, self.skips = self.kept.setdefault(kind, _BlockOutputs()), 0, False
        output = forward()
        now = self.now
        if not self.skips:
            last = now.outputs.pop() if now.outputs else None
            now.added = _difference(last, now.first)
            now.outputs.append(_shapes(last))
            if not now.added:
                self._take_next()
        return output

    def _forward(self, forward: Forward, *args: object, **kwargs: object) -> object:
        position, now = self.position, self.now
        self.position += 1
        if self.skips and 0 < position <= len(now.outputs):
            like = now.outputs[position - 1]
            if position == len(now.outputs):  # last block: the first block's output plus the others' contribution
                parts = zip(_tensors(self.first), now.added, strict=True)
                sums = [None if a is None or d is None else a + d for a, d in parts]
                return type(like)(sums) if isinstance(like, list | tuple) else sums[0]
            # outputs in between are read only by the next block, which does not run either
            device = next(v.device for v in tree_leaves(self.first) if torch.is_tensor(v))
            return tree_map(lambda v: torch.zeros_like(v, device=device) if torch.is_tensor(v) else v, like)
        output = forward(*args, **kwargs)
        if position > 0:
            now.outputs[-1:] = [_shapes(v) for v in now.outputs[-1:]]  # only the last one is needed with values
            now.outputs.append(output)
            return output
        self.skips = bool(now.added) and _change(output, now.first) < self.cache.threshold
        if self.skips:
            self.first = output
        else:
            now.first, now.added, now.outputs = output, [], []
        return output


class _TaylorSeer:
    """TaylorSeer cache, by diffusers' hooks on the attention of a model's blocks."""

    def __init__(self, model: torch.nn.Module, cache: FeatureCache) -> None:
        require("diffusers", "0.41", "sampling.cache=taylorseer")
        from diffusers import TaylorSeerCacheConfig  # imported lazily: the driver of a run does not need it
        from diffusers.hooks import HookRegistry, apply_taylorseer_cache

        names = _attention(model)
        if not names:
            raise _refused(cache, model, "no attention found in its blocks")
        before = _hooks(model)
        dtype = next(model.parameters()).dtype
        apply_taylorseer_cache(
            model,
            TaylorSeerCacheConfig(
                cache_interval=cache.interval,
                disable_cache_before_step=2,
                taylor_factors_dtype=dtype,
                cache_identifiers=[re.escape(name) for name in names],
            ),
        )
        self.model, self.added = model, _hooks(model) - before
        self.registry = HookRegistry.check_if_exists_or_initialize(model)
        self.registry.invalidate_child_registries_cache()

    def remove(self) -> None:
        for name in self.added:
            self.registry.remove_hook(name, recurse=True)
        self.registry.invalidate_child_registries_cache()

    def call(self, kind: str, forward: Callable[[], object]) -> object:
        from diffusers.models.cache_utils import CacheMixin  # imported lazily, as above

        with CacheMixin.cache_context(self.model, kind):  # works for any model with hooks
            return forward()


def _refused(cache: FeatureCache, model: torch.nn.Module, why: str) -> ModelError:
    return ModelError(f"sampling.cache={cache.name} does not support {type(model).__name__}: {why}; use none")


def _attention(model: torch.nn.Module) -> list[str]:
    """Return the names of the attention modules of `model`, without nested ones."""
    from diffusers.models.attention import AttentionModuleMixin  # imported lazily, as above
    from diffusers.models.attention_processor import Attention

    names: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, Attention | AttentionModuleMixin) and not any(name.startswith(f"{n}.") for n in names):
            names.append(name)
    return names


def _hooks(model: torch.nn.Module) -> set[str]:
    """Return the names of diffusers' hooks in `model`."""
    registries = [getattr(module, "_diffusers_hook", None) for module in model.modules()]
    return {name for registry in registries if registry is not None for name in registry.hooks}


def _shapes(output: Tree) -> Tree:
    return tree_map(lambda v: v.detach().to("meta") if torch.is_tensor(v) else v, output)


def _tensors(output: Tree) -> list[torch.Tensor | None]:
    """Return the items of a block's output, with None for other values than tensors."""
    values: Sequence[object] = output if isinstance(output, list | tuple) else [output]
    return [value if torch.is_tensor(value) else None for value in values]


def _change(output: Tree, before: Tree) -> float:
    """Return mean |output - before| over mean |before|."""
    pairs = [(a, b) for a, b in zip(_tensors(output), _tensors(before), strict=True) if a is not None and b is not None]
    difference = sum((a - b).abs().mean() for a, b in pairs)
    return float(difference / sum(b.abs().mean() for _, b in pairs))


def _difference(last: Tree, first: Tree) -> list[torch.Tensor | None]:
    """Return `last - first` for tensors at the same position with the same shape."""
    one, other = _tensors(last), _tensors(first)
    if len(one) != len(other):
        return []
    pairs = zip(one, other, strict=True)
    differences = [None if a is None or b is None or a.shape != b.shape else a - b for a, b in pairs]
    complete = all(a is None or d is not None for a, d in zip(one, differences, strict=True))
    return differences if complete and any(d is not None for d in differences) else []

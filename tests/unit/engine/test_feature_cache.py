"""Feature caches: fewer blocks at untrained steps, nothing changed at trained ones, nothing left behind."""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
import torch
from replaying import Recorded, deviation, distance, fresh, gradients, own

from gerl.engine import FeatureCache
from gerl.engine.feature_cache import _change
from gerl.errors import ModelError

FIRST_BLOCK = FeatureCache("first_block", threshold=10.0)  # every step may leave blocks out
TAYLOR = FeatureCache("taylorseer", interval=3)
BOTH = pytest.mark.parametrize("cache", [FIRST_BLOCK, TAYLOR], ids=lambda c: c.name)
STEPS = 8
WINDOW = [2, 3]


@contextmanager
def computed(pipe: Any) -> Iterator[Counter[str]]:
    """How often the second block, and the attention in it, really computed."""
    found: Counter[str] = Counter()
    block = tiny.denoiser_of(pipe).transformer_blocks[1]
    layers = {"block": block.ff.net[-1], "attention": block.attn.to_out[0]}
    handles = [
        layer.register_forward_hook(lambda *_, name=name: found.update([name])) for name, layer in layers.items()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def case(guided: bool = False) -> Recorded:
    r = fresh("sd3", guided)
    r.call["num_inference_steps"] = STEPS
    return r


@BOTH
@pytest.mark.parametrize("guided", [False, True], ids=["plain", "cfg"])
def test_trained_steps_are_exact_and_others_cheaper(cache: FeatureCache, guided: bool) -> None:
    r = case(guided)
    with computed(r.pipe) as plain:
        images, exact = r.record(window=WINDOW)
    with computed(r.pipe) as cached:
        others, tape = r.record(window=WINDOW, cache=cache)
    what = "block" if cache.name == "first_block" else "attention"
    probes = plain[what] - STEPS  # of the one-sample call that shows batch dimensions
    # first block: one step before the window and one after it; TaylorSeer: two of two, then three of four (0, 1, 3)
    assert cached[what] - probes == len(WINDOW) + (1 + 1 if cache.name == "first_block" else 2 + 3)
    assert not torch.allclose(images, others, atol=1e-4)  # an approximation
    assert deviation(r, tape, steps=WINDOW) == 0.0
    twin = r.record(window=WINDOW)[1]
    assert torch.equal(twin.steps[2].x, exact.steps[2].x)  # and it is gone
    grads, moved, _ = gradients(r, tape, steps=WINDOW)
    assert moved == 0.0 and sum(float(g.norm()) for g in grads) > 0


@BOTH
def test_nothing_is_left_of_a_cache(cache: FeatureCache) -> None:
    r = case()
    before = r.record(window=WINDOW)[1]
    r.record(window=WINDOW, cache=cache)
    modules = list(tiny.denoiser_of(r.pipe).modules())
    assert not any(registry.hooks for m in modules if (registry := getattr(m, "_diffusers_hook", None)))
    assert not any(isinstance(m.__dict__.get("forward"), functools.partial) for m in modules)
    after = r.record(window=WINDOW)[1]
    assert all(torch.equal(a.x_next, b.x_next) for a, b in zip(before.steps, after.steps, strict=True))


def test_where_a_rollout_is_stopped_to_be_branched_the_denoiser_computes() -> None:
    r = case()
    _, plain = r.record(window=[], stop=3)
    _, trunk = r.record(window=[], stop=3, cache=FIRST_BLOCK)
    assert not torch.equal(plain.steps[2].x_next, trunk.steps[2].x_next)
    children = r.branch(trunk, 3, [0, 0, 1, 2], window=[3, 4], cache=FIRST_BLOCK)[1]
    assert deviation(r, children, steps=[3, 4], index=[0, 2, 3]) < 1e-5


def test_a_threshold_of_nothing_leaves_nothing_out() -> None:
    r = case()
    exact, cached = (r.record(window=WINDOW, **k)[1] for k in ({}, {"cache": FeatureCache("first_block", 1e-12)}))
    assert all(torch.allclose(a.x_next, b.x_next, atol=1e-5) for a, b in zip(exact.steps, cached.steps, strict=True))


def test_the_more_is_left_out_the_further_the_image_is() -> None:
    r = case()
    images = r.record(window=WINDOW)[0]
    off = []
    for threshold in (0.01, 0.3, 10.0):
        others = r.record(window=WINDOW, cache=FeatureCache("first_block", threshold))[0]
        off.append(distance([others], [images]))
    assert off == sorted(off) and off[0] < off[-1]


def test_a_denoiser_without_blocks_one_after_the_other_is_refused() -> None:
    r = own("sd15")
    with pytest.raises(ModelError, match=r"sampling\.cache=first_block .*UNet2DConditionModel.*use none"):
        r.record(window=[0], cache=FIRST_BLOCK)
    assert not any("forward" in m.__dict__ for m in tiny.denoiser_of(r.pipe).modules())
    with pytest.raises(ValueError, match="unknown cache 'lru'"):
        FeatureCache("lru")


@pytest.mark.parametrize("name", [name for name in tiny.CASES if name != "sd15"])
@pytest.mark.parametrize("guided", [False, True], ids=["plain", "cfg"])
@BOTH
def test_every_transformer_has_them(name: str, guided: bool, cache: FeatureCache) -> None:
    r = own(name, guided)
    r.call["num_inference_steps"] = STEPS
    r.pipe.set_progress_bar_config(disable=True)
    images = r.record(window=WINDOW)[0]
    others, tape = r.record(window=WINDOW, cache=cache)
    assert deviation(r, tape, steps=WINDOW) == 0.0
    assert not torch.equal(torch.as_tensor(images), torch.as_tensor(others))


def test_a_change_is_relative_to_what_was_before() -> None:
    before = (torch.tensor([1.0, -3.0]), None, torch.tensor([2.0]))
    after = (torch.tensor([2.0, -5.0]), None, torch.tensor([2.5]))
    assert _change(after, before) == pytest.approx((1.5 + 0.5) / (2.0 + 2.0))

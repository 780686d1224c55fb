"""Sub-batches of values whose batch dimension is only known by comparison with one sample."""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils._pytree import tree_leaves

from gerl.engine.rows import batch_size, detached_copy, num_elements, select_call, take, tensor_bytes
from gerl.protocol import References

Layout = Callable[[Sequence[int]], Any]
Pair = namedtuple("Pair", ["hidden", "pooled"])


def of(sample: int, *shape: int) -> torch.Tensor:
    """A value computed for a sample: the same in any batch."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sample))


def rows(samples: Sequence[int], *shape: int, shift: int = 0) -> torch.Tensor:
    return torch.stack([of(i + shift, *shape) for i in samples])


LAYOUTS: dict[str, Layout] = {
    "batch first": lambda s: rows(s, 3, 2),
    "one number a sample": lambda s: rows(s),
    "negative and positive": lambda s: torch.cat([rows(s, 3, shift=100), rows(s, 3)]),
    "three guidance branches": lambda s: torch.cat([rows(s, 2, shift=shift) for shift in (0, 100, 200)]),
    "layers first": lambda s: torch.stack([rows(s, 3, shift=100 * layer) for layer in range(4)]),
    "batch last": lambda s: rows(s, 3).T.contiguous(),
    "layers, then negative and positive": lambda s: torch.stack(
        [torch.cat([rows(s, 5, shift=layer), rows(s, 5, shift=50 + layer)]) for layer in range(3)]
    ),
    "list a sample": lambda s: [of(i, 2 + i, 3) for i in s],
    "list of negatives and positives": lambda s: [of(100 + i, 2) for i in s] + [of(i, 2) for i in s],
    "strings": lambda s: [f"prompt {i}" for i in s],
    "no batch": lambda s: of(7, 16, 3),
    "a number": lambda s: 0.5,
    "nothing": lambda s: None,
    "encode_prompt": lambda s: (rows(s, 4, 2), None, rows(s, 2), None),
    "nested": lambda s: {"a": (rows(s, 2), [of(i, 3) for i in s]), "ids": of(9, 6, 3), "scale": 2},
    "lists in a tuple": lambda s: ([of(i, 1 + i) for i in s], [of(100 + i, 2) for i in s]),
    "output object": lambda s: Transformer2DModelOutput(sample=torch.cat([rows(s, 3, shift=100), rows(s, 3)])),
    "named tuple": lambda s: Pair(rows(s, 2), of(3, 5)),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(st.sampled_from(sorted(LAYOUTS)), st.data())
def test_take_computes_what_the_sub_batch_would_have_given(name: str, data: st.DataObject) -> None:
    layout, n = LAYOUTS[name], data.draw(st.integers(2, 6))
    index = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
    full, one = layout(range(n)), layout([0])
    assert same(take(full, one, index, n), layout(index))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_take_returns_a_copy_without_graph(name: str) -> None:
    full, one = LAYOUTS[name](range(3)), LAYOUTS[name]([0])
    for tensor in tree_leaves(full):
        if isinstance(tensor, torch.Tensor):
            tensor.requires_grad_()
    for index in ([0, 1, 2], [2]):
        taken = take(full, one, index, 3)
        for tensor in tree_leaves(taken):
            if isinstance(tensor, torch.Tensor):
                assert not tensor.requires_grad
                tensor.zero_()
    assert same(full, LAYOUTS[name](range(3)))


def test_a_batch_of_one_is_taken_whole() -> None:
    full = [torch.ones(1, 2)]
    taken = take(full, None, [0], 1)
    assert same(taken, full) and taken[0] is not full[0]


@pytest.mark.parametrize("one", [None, "other", torch.zeros(2, 2, 2)])
def test_where_the_probe_has_another_structure_the_first_dimension_of_the_batch_counts(one: Any) -> None:
    mask = torch.arange(12).reshape(4, 3)  # a mask, while the probe, without padding, has none
    assert torch.equal(take(mask, one, [3, 1], 4), mask[[3, 1]])
    assert torch.equal(take(mask.T, one, [3, 1], 4), mask.T[:, [3, 1]])
    assert torch.equal(take(mask[:3], one, [3, 1], 4), mask[:3])  # no batch dimension
    assert same(take(["a", "b", "c", "d"], one if one is None else 3, [3, 1], 4), ["d", "b"])
    assert same(take({"mask": mask}, one, [0], 4), {"mask": mask[:1]})


def test_padding_to_the_longest_prompt_does_not_confuse() -> None:
    def padded(samples: Sequence[int], length: int) -> torch.Tensor:
        return torch.cat([rows(samples, 2, 4), torch.zeros(len(samples), length - 2, 4)], dim=1)

    # a single short prompt has 2 positions, the batch has 8: four times as many, as if it were the batch
    assert torch.equal(take(padded(range(4), 8), padded([0], 2), [1, 3], 4), padded([1, 3], 8))


def test_detached_copy_and_num_elements() -> None:
    tree = {"a": [torch.ones(2, 3, requires_grad=True)], "b": (torch.zeros(4), "text", None)}
    copied = detached_copy(tree)
    copied["a"][0].zero_()
    assert tree["a"][0].sum() == 6 and not copied["a"][0].requires_grad and copied["b"][1:] == ("text", None)
    assert num_elements(tree) == 10
    assert num_elements(Transformer2DModelOutput(sample=torch.zeros(2, 5))) == 10


def test_shared_storage_counts_once() -> None:
    whole = torch.zeros(10, 10)
    assert tensor_bytes([whole, whole[:2], {"a": (torch.zeros(5), None, "text")}, torch.zeros(9, device="meta")]) == 420


# --- calls


def test_batch_size() -> None:
    assert batch_size({"prompt": ["a", "b", "c"], "height": 8}) == 3
    assert batch_size({"prompt_embeds": torch.zeros(5, 2, 3)}) == 5
    assert batch_size({"prompt": None, "prompt_embeds": torch.zeros(2, 2, 3)}) == 2
    assert batch_size({"height": 8}) == 1
    assert batch_size({"prompt": "a cat"}) == 1


def test_select_call_picks_what_is_there_once_a_sample() -> None:
    images = [object(), object(), object()]
    references = References([Image.new("RGB", (8, 8))] * 3)
    embeds = torch.randn(3, 2)
    call = {
        "prompt": ["a", "b", "c"],
        "negative_prompt": ["x", "y", "z"],
        "image": images,
        "references": references,
        "ip_adapter_image_embeds": embeds,
        "sigmas": [1.0, 0.6, 0.3],
        "timesteps": [3, 2, 1],
        "original_size": (3, 3, 3),
        "two": ["p", "q"],
        "shared": torch.arange(7),
        "guidance_scale": 3.5,
        "prompt_2": None,
        "scalar": torch.tensor(3.0),
    }
    picked = select_call(call, [2, 0])
    assert picked["prompt"] == ["c", "a"] and picked["negative_prompt"] == ["z", "x"]
    assert picked["image"] == [images[2], images[0]]
    assert torch.equal(picked["ip_adapter_image_embeds"], embeds[[2, 0]])
    assert picked["references"] is references
    for name in ("sigmas", "timesteps", "original_size", "two", "shared", "guidance_scale", "prompt_2", "scalar"):
        assert picked[name] is call[name]
    assert list(picked) == list(call)


@given(st.lists(st.text(), min_size=1, max_size=6), st.data())
def test_select_call_of_all_samples_is_a_copy(prompts: list[str], data: st.DataObject) -> None:
    call = {"prompt": prompts, "negative_prompt": list(prompts)}
    everything = select_call(call, range(len(prompts)))
    assert everything == call and everything["prompt"] is not prompts
    first = data.draw(st.permutations(range(len(prompts))))
    second = data.draw(st.permutations(range(len(prompts))))
    both = select_call(select_call(call, first), second)
    assert both == select_call(call, [first[i] for i in second])

"""A joint call of the denoiser in halves: which rows of its arguments belong to which half."""

from typing import Any

import pytest
import torch

from gerl.engine.guidance import CfgMode, check_same_output, guided
from gerl.engine.tape import ComponentCall
from gerl.errors import ReplayError


def halved(value: Any, cfg: CfgMode = "detach_uncond", rows_in_list: bool = False) -> list[Any]:
    """A denoiser's input for `value` among the arguments of a joint call with four rows, prompts last."""
    seen: list[Any] = []

    def forward(x: Any, extra: Any) -> Any:
        seen.append(extra["nested"][0])
        return (x,)

    x: Any = list(torch.arange(4.0)) if rows_in_list else torch.arange(4.0)
    out = guided(forward, "unconditional_first", cfg, 2, rows_in_list)(x, extra={"nested": (value,)})
    assert [float(v) for v in out[0]] == ([2, 3, 2, 3] if cfg == "off" else [0, 1, 2, 3])
    return seen


def test_tensors_and_lists_with_all_rows_are_halved_and_others_are_whole() -> None:
    t = torch.arange(8.0).view(4, 2)
    unconditional, conditional = halved(t)
    assert torch.equal(unconditional, t[:2]) and torch.equal(conditional, t[2:])
    assert halved(list("abcd")) == [["a", "b"], ["c", "d"]]
    assert halved(list("abcd"), cfg="off") == [["c", "d"]]
    for whole in (torch.ones(()), torch.ones(1, 3), torch.ones(3, 2), ("a", "b", "c", "d"), ["a", "b"], 4, None):
        assert all(part is whole or part == whole for part in halved(whole))


def test_outputs_of_other_shapes_do_not_stand_for_each_other() -> None:
    check_same_output((torch.ones(2, 3),), (torch.ones(4, 3),), 1)
    with pytest.raises(ReplayError, match=r"unconditional .*step 1 .*shape"):
        check_same_output((torch.ones(2, 5),), (torch.ones(2, 3),), 1)  # Ideogram 4 returns text tokens as well


def test_rows_in_a_later_dimension_are_found_by_another_number_of_rows() -> None:
    seen: list[torch.Tensor] = []

    def forward(x: torch.Tensor, layers: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor]:
        assert ids.shape == (4, 3)  # as long as the batch, but not of it
        seen.append(layers)
        return (x,)

    layers = torch.randn(3, 4, 5)  # [layers, 2B, features], as HiDream has it
    inputs = ((torch.ones(2), torch.ones(3, 2, 5), torch.ones(4, 3)), {})
    alike = [ComponentCall(0, "x", (torch.ones(n),), shapes) for n, shapes in ((4, inputs), (2, None), (2, inputs))]
    run = guided(forward, "conditional_first", "detach_uncond", 2, False, alike)
    assert torch.equal(run(torch.arange(4.0), layers, torch.ones(4, 3))[0], torch.arange(4.0))
    assert torch.equal(seen[0], layers[:, 2:]) and torch.equal(seen[1], layers[:, :2])
    with pytest.raises(ReplayError, match=r"one prompt is not enough .* of shape \[3, 4, 5\]: use cfg joint"):
        guided(forward, "conditional_first", "off", 2, False)(torch.arange(4.0), layers, torch.ones(4, 3))


def test_as_many_tensors_as_rows_are_rows_only_for_a_denoiser_of_lists() -> None:
    tensors = [torch.arange(4.0) + i for i in range(4)]  # four ControlNet residuals of four rows, or rows of length 4
    unconditional, conditional = halved(tensors)
    assert [v.tolist() for v in unconditional] == [v[:2].tolist() for v in tensors]
    assert [v.tolist() for v in conditional] == [v[2:].tolist() for v in tensors]
    unconditional, conditional = halved(tensors, rows_in_list=True)
    assert [id(v) for v in unconditional + conditional] == [id(v) for v in tensors]

"""Denoisers that run a part of themselves without gradient: the whole gradient all the same, or an error."""

from typing import Any

import pytest
import torch
from replaying import Recorded, distance, gradients, own, rolled_out

from gerl.errors import ReplayError

# who computes the branch without gradient: in eval mode, always, or in eval mode with another result
Kind = str


class Experts(torch.nn.Module):
    """A feed-forward network that computes in eval mode under `no_grad`, as HiDream's mixture of experts does."""

    def __init__(self, inner: torch.nn.Module, kind: Kind) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind
        self.dropout = torch.nn.Dropout(0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.kind != "always":
            return x + self.dropout(self.inner(x)) * (2 if self.kind == "different" else 1)
        with torch.no_grad():
            inner = self.inner(x)
        return x + inner


def with_experts(kind: Kind, trained: bool) -> Recorded:
    r = own("sd3")
    block = r.pipe.transformer.transformer_blocks[0]
    block.ff = Experts(block.ff, kind).eval()
    if trained:
        r.parameters += [p.requires_grad_() for p in block.ff.parameters()]
    return rolled_out(r)


@pytest.mark.parametrize("trained", [True, False])
def test_the_gradient_goes_through_the_inference_branch(trained: bool) -> None:
    differentiable, r = with_experts("in eval", trained=True), with_experts("in eval", trained)
    differentiable.pipe.transformer.transformer_blocks[0].ff.training = True  # with gradient throughout
    expected = gradients(differentiable)[0][: len(r.parameters)]
    for _ in range(2):  # found at the first replay, known at the second
        grads, deviation, _ = gradients(r)
        assert deviation == 0.0
        assert distance(grads, expected) == 0.0
        assert not r.pipe.transformer.transformer_blocks[0].ff.training
    sub, deviation, _ = gradients(r, index=[3, 1], cfg="detach_uncond")
    assert deviation <= 1e-5 and all(torch.isfinite(g).all() for g in sub)


@pytest.mark.parametrize("trained", [True, False])
def test_a_branch_that_never_has_a_gradient_is_named(trained: bool) -> None:
    r = with_experts("always", trained)
    name = r"transformer_blocks\.0\.ff \(Experts\) runs transformer_blocks\.0\.ff\.inner without gradient"
    for _ in range(2):
        with pytest.raises(ReplayError, match=f"{name}, even in training mode: the gradient would be wrong"):
            gradients(r)
    assert not r.pipe.transformer.transformer_blocks[0].ff.training


def test_a_training_mode_with_other_numbers_is_refused() -> None:
    r = with_experts("different", trained=True)
    with pytest.raises(ReplayError, match=r"\(Experts\) .* and differs numerically in training mode"):
        gradients(r)
    assert not r.pipe.transformer.transformer_blocks[0].ff.training


def test_a_part_that_needs_no_gradient_may_go_without() -> None:
    r = with_experts("in eval", trained=False)
    transformer: Any = r.pipe.transformer
    embed = transformer.time_text_embed  # frozen, and so is all that goes into it
    embed.forward = torch.no_grad()(embed.forward)
    assert gradients(rolled_out(r))[1] == 0.0

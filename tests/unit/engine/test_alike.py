"""Samples at the same latents: the denoiser runs once for all that are alike, with the gradient of each by itself."""

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from replaying import EACH, GUIDED, Recorded, counted_rows, distance, fresh, gradients, recorded, replayed

from gerl.engine import replay
from gerl.engine.alike import first_of_kind
from gerl.engine.tape import Tape

CHILDREN = [2, 0, 2, 3, 0, 2]  # of three parents
WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 0.25])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_the_first_row_of_each_kind_is_found(kinds: list[int]) -> None:
    rows = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    rows[1] = rows[0]
    rows[1, 2, 4, 3] += 1e-3  # where no key looks
    found = first_of_kind(rows[kinds])
    assert [kinds[i] for i in found] == kinds
    assert all(i == kinds.index(kinds[i]) or kinds[i] in (0, 1) for i in found)


def branched(r: Recorded, step: int) -> Tape:
    """Children that part at `step`, each with noise of its own from there on."""
    generators = [torch.Generator().manual_seed(100 + i) for i in range(len(CHILDREN))]
    return r.branch(r.tape, step, CHILDREN, generators=generators)[1]


def one_by_one(r: Recorded, tape: Tape, **options: Any) -> list[torch.Tensor]:
    """The gradient of all children, each replayed by itself."""
    total = [torch.zeros_like(p) for p in r.parameters]
    for i in range(tape.batch_size):
        grads = weighted(r, tape, [i], **options)
        total = [a + b for a, b in zip(total, grads, strict=True)]
    return total


def weighted(r: Recorded, tape: Tape, index: list[int] | None = None, **options: Any) -> list[torch.Tensor]:
    weights = WEIGHTS[index] if index else WEIGHTS
    return replayed(r, tape, lambda step: (weights * step.log_prob).sum(), index=index, **options)[1]


@EACH
@GUIDED
def test_children_of_one_parent_run_as_one_row_where_they_part(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    tape = branched(r, 1)
    with counted_rows(r.pipe) as rows:
        whole = weighted(r, tape, steps=[1, 2])
    assert rows.total() in [m * (len(set(CHILDREN)) + len(CHILDREN)) for m in (1, 2)]  # with guidance twice as many
    assert distance(whole, one_by_one(r, tape, steps=[1, 2])) < 1e-4


def test_on_policy_the_ratio_at_the_common_step_is_one_to_the_bit() -> None:
    r = fresh("sd3")
    first = [torch.Generator().manual_seed(7) for _ in range(4)]
    call = {**r.call, "prompt": [r.call["prompt"][0]] * 4}
    _, common = r.record({**call, "prompt": call["prompt"][:1]}, window=[], stop=1, init_generators=first[:1])
    common.probe = r.tape.probe if common.probe is None else common.probe
    generators = [torch.Generator().manual_seed(i) for i in range(4)]
    _, tape = r.branch(common, 1, [0, 0, 0, 0], generators=generators)
    assert gradients(r, tape, steps=[1])[1] == 0.0  # recorded with one row, and replayed with one


def test_samples_that_differ_in_their_prompt_are_not_alike() -> None:
    r = fresh("sd3", guided=False)
    assert len(set(r.call["prompt"])) == 4
    same = [torch.Generator().manual_seed(7) for _ in range(4)]
    _, tape = r.record(init_generators=same)
    assert first_of_kind(tape.steps[0].x) == [0, 0, 0, 0]
    with counted_rows(r.pipe) as rows:
        whole = gradients(r, tape, steps=[0])[0]
    assert rows == Counter({True: 4})
    total = [torch.zeros_like(p) for p in r.parameters]
    for i in range(4):
        total = [a + b for a, b in zip(total, gradients(r, tape, steps=[0], index=[i])[0], strict=True)]
    assert distance(whole, total) < 1e-4


@pytest.mark.parametrize("cfg", ["joint", "detach_uncond", "off"])
def test_with_every_way_of_guidance_the_gradient_is_that_of_each_child(cfg: str) -> None:
    r = recorded("sd3", True)
    tape = branched(r, 1)
    with counted_rows(r.pipe) as rows:
        weighted(r, tape, steps=[1, 2], cfg=cfg)
    halves = 1 if cfg == "off" else 2
    assert rows.total() == halves * (len(set(CHILDREN)) + len(CHILDREN))
    assert distance(weighted(r, tape, steps=[1, 2], cfg=cfg), one_by_one(r, tape, steps=[1, 2], cfg=cfg)) < 1e-4


def test_the_reference_pass_is_spared_too() -> None:
    r = recorded("sd3", False)
    tape = branched(r, 1)
    with counted_rows(r.pipe) as rows:
        replay(r.pipe, tape, lambda k, step: None, steps=[1], grad=False)
    assert rows == Counter({False: len(set(CHILDREN))})

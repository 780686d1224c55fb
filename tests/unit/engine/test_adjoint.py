"""The gradient of a reward through decoder and denoising steps: against finite differences, and what it costs."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from replaying import Recorded, counted_rows, distance, own, randomise

from gerl.engine import Reads, Tape, decoded, lean, pull_back
from gerl.errors import ReplayError

THROUGH = pytest.mark.parametrize(
    ("name", "window"), [("sd3", ()), ("sd3", (0, 1)), ("flux", ()), ("sd15", ()), ("sd15", (0, 1)), ("wan", ())]
)  # fmt: skip


def seen(images: torch.Tensor) -> torch.Tensor:
    """A reward `[B]` that is smooth, and another one for every pixel."""
    weights = torch.randn(images.shape[1:], generator=torch.Generator().manual_seed(5))
    return (weights * images).flatten(1).sum(1)


@functools.cache
def pipeline(name: str) -> Recorded:
    r = own(name)
    r.call["prompt"] = r.call["prompt"][:2]
    if "negative_prompt" in r.call:
        r.call["negative_prompt"] = r.call["negative_prompt"][:2]
    r.call |= {"num_inference_steps": 3, "output_type": "pt"}
    randomise(r.parameters, 0.05)
    return r


def drawn(r: Recorded, window: tuple[int, ...]) -> tuple[torch.Tensor, Tape]:
    output, tape = r.record(window=window)
    return torch.stack(list(output)), tape


def chained(r: Recorded, tape: Tape, steps: int, cfg: Any = "joint") -> list[torch.Tensor]:
    """The gradient of the summed rewards through the last so many steps."""
    for p in r.parameters:
        p.grad = None
    finished = tape.steps[-1].x_next.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(seen(decoded(r.pipe, tape, finished)).sum(), finished)
    last = len(tape.steps) - 1
    for k in range(last, last - steps, -1):
        found = pull_back(r.pipe, tape, k, lambda step: step.mean, gradient, cfg=cfg, carry=k > last - steps + 1)
        if found is not None:
            gradient = found.direct + found.through
    return [p.grad.clone() for p in r.parameters]


def slope(r: Recorded, reward: Callable[[], float], grads: Sequence[torch.Tensor]) -> tuple[float, float]:
    """The derivative of `reward` along a direction of the parameters: by differences, and by `grads`."""
    generator = torch.Generator().manual_seed(3)
    direction = [torch.randn(p.shape, generator=generator) for p in r.parameters]

    def at(size: float) -> float:
        for p, d in zip(r.parameters, direction, strict=True):
            p.data.add_(size * d)
        try:
            return reward()
        finally:
            for p, d in zip(r.parameters, direction, strict=True):
                p.data.sub_(size * d)

    def central(size: float) -> float:
        return (at(size) - at(-size)) / (2 * size)

    exact = float(sum((g * d).sum() for g, d in zip(grads, direction, strict=True)))
    return (4 * central(1e-2) - central(2e-2)) / 3, exact


@THROUGH
def test_the_gradient_through_the_whole_chain_is_that_of_finite_differences(name: str, window: tuple[int, ...]) -> None:
    r = pipeline(name)
    _, tape = drawn(r, window)
    measured, exact = slope(r, lambda: float(seen(drawn(r, window)[0]).double().sum()), chained(r, tape, 3))
    assert exact == pytest.approx(measured, rel=0.01) and abs(measured) > 1e-2


@pytest.mark.parametrize("name", ["sd3", "sd15"])
def test_the_gradient_through_the_last_steps_is_that_of_weights_that_change_there(name: str) -> None:
    r = pipeline(name)
    _, tape = drawn(r, ())

    def changed_after_the_first_step() -> float:
        images, _ = r.branch(tape, 0, [0, 1], window=())
        return float(seen(images).double().sum())

    measured, exact = slope(r, changed_after_the_first_step, chained(r, tape, 2))
    assert exact == pytest.approx(measured, rel=0.01) and abs(measured) > 1e-2


def test_guidance_whose_negative_half_is_data_is_that_of_a_loop_written_by_hand() -> None:
    r = pipeline("sd3")
    _, tape = drawn(r, ())
    ours = chained(r, tape, 2, cfg="detach_uncond")
    images = by_hand(r, tape, 1, detached=True)
    naive = torch.autograd.grad(seen(images).sum(), r.parameters)
    assert distance(ours, naive) < 1e-5
    joint = torch.autograd.grad(seen(by_hand(r, tape, 1, detached=False)).sum(), r.parameters)
    assert distance(chained(r, tape, 2), joint) < 1e-5 < 0.01 < distance(ours, joint)


def by_hand(r: Recorded, tape: Tape, first: int, detached: bool) -> torch.Tensor:
    """Images of a tape of SD3, whose steps from `first` on are computed again with one graph."""
    prompts = {answer.method: answer.value for answer in tape.answers}["encode_prompt"]
    positive, negative, pooled, pooled_negative = prompts
    timesteps = r.pipe.scheduler.timesteps
    x = tape.steps[first].x
    for k in range(first, len(tape.steps)):
        t = timesteps[k].expand(len(x))
        say = functools.partial(r.pipe.transformer, x, timestep=t, return_dict=False)
        c = say(encoder_hidden_states=positive, pooled_projections=pooled)[0]
        u = say(encoder_hidden_states=negative, pooled_projections=pooled_negative)[0]
        u = u.detach() if detached else u
        rule = tape.steps[k].rule
        x = x + (rule.sigma_next - rule.sigma) * (u + r.call["guidance_scale"] * (c - u))
    vae = r.pipe.vae
    pixels = vae.decode(x / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
    return (pixels * 0.5 + 0.5).clamp(0, 1)


def test_memory_does_not_grow_with_the_steps() -> None:
    r = pipeline("sd3")
    r.call["num_inference_steps"] = 6
    try:
        _, tape = drawn(r, ())
        peaks = {steps: held_at_most(r, tape, steps) for steps in (1, 2, 3, 6)}
    finally:
        r.call["num_inference_steps"] = 3
    assert peaks[1] <= peaks[2] == peaks[3] == peaks[6]


def held_at_most(r: Recorded, tape: Tape, steps: int) -> int:
    """Bytes that graphs hold at the same time, at most, while the gradient goes through the last so many steps."""
    largest, held = 0, 0
    lean_tape = lean(tape, Reads(frozenset(range(6)), means=False, outputs=False, chain=True))

    def pack(tensor: torch.Tensor) -> Saved:
        nonlocal largest, held
        held += tensor.nbytes
        largest = max(largest, held)
        return Saved(tensor, release)

    def release(size: int) -> None:
        nonlocal held
        held -= size

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor), counted_rows(r.pipe) as rows:
        whole = chained(r, lean_tape, steps)
    assert rows == {True: 4 * steps}  # two samples, guided: each step is computed once
    assert distance(whole, chained(r, tape, steps)) == 0
    return largest


class Saved:
    """A tensor that a graph holds."""

    def __init__(self, tensor: torch.Tensor, release: Callable[[int], None]) -> None:
        self.tensor, self.release = tensor, release

    def __del__(self) -> None:
        self.release(self.tensor.nbytes)


def test_a_part_of_the_samples_has_its_part_of_the_gradient() -> None:
    r = pipeline("sd3")
    _, tape = drawn(r, ())
    whole = chained(r, tape, 2)
    parts = [chained(r, tape.rows([i]), 2) for i in (0, 1)]
    assert distance([a + b for a, b in zip(*parts, strict=True)], whole) < 1e-5


def test_what_the_pipeline_writes_into_its_latents_gets_no_gradient() -> None:
    r = own("sd3")
    randomise(r.parameters, 0.05)
    r.call |= {"num_inference_steps": 3, "output_type": "pt"}
    kept = torch.zeros(4, 4, 8, 8)
    kept[..., :4] = 1

    def blend(pipe: Any, i: int, t: Any, values: dict[str, Any]) -> dict[str, Any]:
        return {"latents": (1 - kept) * values["latents"] + kept * 0.3}

    r.call["callback_on_step_end"] = blend
    _, tape = drawn(r, ())
    finished = tape.steps[-1].x_next.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(seen(decoded(r.pipe, tape, finished)).sum(), finished)
    assert gradient[..., :4].abs().max() == 0 < gradient[..., 4:].abs().min()
    found = pull_back(r.pipe, tape, 2, lambda step: step.mean, gradient, carry=True)
    assert found is not None
    assert all(part[..., :4].abs().max() == 0 for part in (found.direct, found.through))
    measured, exact = slope(r, lambda: float(seen(drawn(r, ())[0]).double().sum()), chained(r, tape, 3))
    assert exact == pytest.approx(measured, rel=0.02)


def test_two_steps_that_share_a_denoiser_call_are_refused() -> None:
    r = pipeline("sd3")
    _, tape = drawn(r, ())
    calls = [c for c in tape.component_calls if c.step != 2]
    shared = replace(tape, component_calls=calls)
    with pytest.raises(ReplayError, match="the denoiser call of step 2 is reused by the previous step"):
        pull_back(r.pipe, shared, 2, lambda step: step.mean, tape.steps[2].x, carry=True)


def test_a_lean_tape_serves_any_of_its_steps() -> None:
    r = pipeline("wan")
    _, tape = drawn(r, ())
    kept = lean(tape, Reads(frozenset({0, 2}), means=False, outputs=False, chain=True))
    for k in (2, 0):
        one, other = (pull_back(r.pipe, t, k, lambda step: step.mean, tape.steps[k].x) for t in (tape, kept))
        assert one is other is None
    with pytest.raises(ReplayError, match="kept for steps"):
        pull_back(r.pipe, kept, 1, lambda step: step.mean, tape.steps[1].x)

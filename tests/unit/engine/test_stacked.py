"""Replays of several trained steps in one forward pass: the gradient of those step by step, in fewer passes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import tiny
import torch
from replaying import EACH, GUIDED, distance, gradients, own, recorded, rolled_out, with_controlnet

from gerl.engine import Reads, lean, replay
from gerl.errors import ReplayError


@contextmanager
def counted_passes(pipe: object) -> Iterator[list[int]]:
    """The rows of each forward pass of the denoiser that is really made."""
    found: list[int] = []
    layer = next(m for m in tiny.denoiser_of(pipe).modules() if hasattr(m, "lora_A"))
    with layer.register_forward_hook(lambda module, args, output: found.append(len(args[0]))):
        yield found


@EACH
@GUIDED
@pytest.mark.parametrize("index", [None, [2, 0], [1]], ids=str)
def test_steps_in_one_pass_have_the_gradient_of_one_by_one(name: str, guided: bool, index: list[int] | None) -> None:
    r = recorded(name, guided)
    with counted_passes(r.pipe) as passes:
        single, _, seen = gradients(r, index=index)
        by_step = list(passes)
        for size, share in ((2, 2 / 3), (3, 1 / 3), (9, 1 / 3)):
            passes.clear()
            stacked, deviation, again = gradients(r, index=index, step_batch=size)
            assert again == seen == [0, 1, 2] and deviation < 1e-4
            assert distance(stacked, single) < 1e-4, size
            assert len(passes) == share * len(by_step) and sum(passes) == sum(by_step)


def test_a_lean_tape_and_latents_of_the_callers_are_stacked_too() -> None:
    r = recorded("sd3", True)
    kept = lean(r.tape, Reads(frozenset({0, 2}), means=False, outputs=False))
    assert distance(gradients(r, kept, step_batch=2, steps=[0, 2])[0], gradients(r, kept, steps=[0, 2])[0]) < 1e-4
    given = {k: torch.randn(r.tape.steps[k].x.shape, generator=torch.Generator().manual_seed(k)) for k in (0, 1, 2)}

    def outputs(size: int) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        options = {"steps": range(3), "latents": given, "grad": False, "step_batch": size}
        replay(r.pipe, r.tape, lambda k, step: found.append(step.model_output), **options)
        return found

    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(outputs(1), outputs(3), strict=True))


def test_a_controlnet_runs_step_by_step() -> None:
    r = rolled_out(with_controlnet(own("sd3", True)))
    assert distance(gradients(r, step_batch=3)[0], gradients(r)[0]) < 1e-4


def test_one_sample_recorded_without_a_probe_is_stacked() -> None:
    r = own("sd3", False)
    _, tape = r.record({**r.call, "prompt": r.call["prompt"][:1]})
    assert tape.probe is None
    assert distance(gradients(r, tape, step_batch=3, index=[0])[0], gradients(r, tape, index=[0])[0]) < 1e-4


def test_what_cannot_be_stacked_is_refused() -> None:
    r = recorded("sd3", True)
    with pytest.raises(ReplayError, match="cfg=joint, not cfg=detach_uncond"):
        gradients(r, step_batch=2, cfg="detach_uncond")

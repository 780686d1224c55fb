"""The latents of images that were not drawn: what is found backwards is what the pipeline would decode."""

from typing import Any

import pytest
import tiny
import torch

from gerl.engine import record
from gerl.engine.batching import select_call
from gerl.engine.encode import Inverse, _decoded, record_loop
from gerl.errors import ModelError


def call_of(name: str) -> dict[str, Any]:
    return tiny.call_for(tiny.CASES[name], guided=False, steps=2) | {"output_type": "np"}


@pytest.mark.parametrize("name", tiny.CASES)
def test_the_latents_of_a_drawn_image_are_found_from_what_its_vae_decodes(name: str) -> None:
    pipe, call = tiny.build(tiny.CASES[name]), call_of(name)
    _, drawn = record(pipe, call, kernel="ode", window=(), generators=tiny.generators())
    loop = record_loop(pipe, select_call(call, [0]))
    assert [step.rule for step in loop.steps] == [step.rule for step in drawn.steps]
    inverse, expected = Inverse(pipe, loop), drawn.steps[-1].x_next[:1]
    z = _decoded(pipe, loop, expected)
    assert z is not None and tuple(z.shape) == inverse.shape
    torch.testing.assert_close(inverse.of(z.detach()), expected, rtol=1e-5, atol=1e-6)
    other = torch.randn(inverse.shape, generator=torch.Generator().manual_seed(3))
    again = _decoded(pipe, loop, inverse.of(other))
    assert again is not None
    torch.testing.assert_close(again.detach(), other, rtol=1e-5, atol=1e-5)


def test_the_denoiser_runs_once_and_nothing_is_decoded() -> None:
    pipe, ran = tiny.sd3(), list[str]()
    pipe.transformer.proj_out.register_forward_hook(lambda *_: ran.append("denoiser"))
    pipe.vae.decoder.register_forward_hook(lambda *_: ran.append("decoder"))
    loop = record_loop(pipe, tiny.call_for(tiny.CASES["sd3"], guided=True, steps=5) | {"output_type": "np"})
    assert ran == ["denoiser"] and len(loop.steps) == 5
    Inverse(pipe, record_loop(pipe, select_call(call_of("sd3"), [0])))
    assert ran == ["denoiser", "denoiser"] and "decode" not in pipe.vae.__dict__


class Squared:
    """In the place of a number that is added: what it is added to is squared."""

    def __radd__(self, other: torch.Tensor) -> torch.Tensor:
        return other * other


class Mixed(Squared):
    """What it is added to is averaged with its neighbours."""

    def __radd__(self, other: torch.Tensor) -> torch.Tensor:
        return other + other.roll(1, -1)


@pytest.mark.parametrize("shift", [Squared(), Mixed()])
def test_a_pipeline_that_does_something_else_to_its_latents_is_refused(shift: Squared) -> None:
    pipe = tiny.sd3()
    pipe.vae.register_to_config(shift_factor=shift)
    with pytest.raises(ModelError, match=r"StableDiffusion3Pipeline.*value by value"):
        inverse = Inverse(pipe, record_loop(pipe, select_call(call_of("sd3"), [0])))
        inverse.of(torch.randn(inverse.shape, generator=torch.Generator().manual_seed(3)))


def test_a_pipeline_that_decodes_otherwise_is_refused() -> None:
    pipe, call = tiny.sd3(), select_call(call_of("sd3"), [0])
    with pytest.raises(ModelError, match=r"vae\.decode"):
        record_loop(pipe, call | {"output_type": "latent"})
    pipe.vae = None
    with pytest.raises(ModelError, match="no VAE"):
        record_loop(pipe, call)


def test_latents_of_another_shape_are_refused_with_the_key_to_change() -> None:
    pipe = tiny.wan()
    inverse = Inverse(pipe, record_loop(pipe, select_call(call_of("wan"), [0])))
    one_frame = torch.zeros(*inverse.shape[:2], 1, *inverse.shape[3:])
    with pytest.raises(ModelError, match=r"sampling\.call\.num_frames=1"):
        inverse.of(one_frame)

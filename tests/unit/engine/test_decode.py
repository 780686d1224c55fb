"""Decoding with gradient: the rollout's own images, from latents of the caller's."""

import diffusers
import pytest
import tiny
import torch
from replaying import EACH, GUIDED, own
from torch.autograd.graph import allow_mutation_on_saved_tensors
from zoo.checks import build, call_for
from zoo.entries import BY_NAME

from gerl.engine import Reads, Tape, decoded, lean, record
from gerl.errors import ReplayError


@EACH
@GUIDED
def test_finished_latents_are_decoded_to_the_images_of_the_rollout(name: str, guided: bool) -> None:
    r = own(name, guided)
    r.call["output_type"] = "pt"
    output, tape = r.record()
    expected = torch.stack(list(output))
    expected = expected[:, 0] if expected.ndim == 5 and expected.shape[1] == 1 else expected
    kept = lean(tape, Reads(frozenset({3}), means=False, outputs=False, chain=True))
    finished = kept.steps[-1].x_next
    assert torch.equal(decoded(r.pipe, kept, finished), expected)
    leaf = finished.clone().requires_grad_()
    images = decoded(r.pipe, kept, leaf)
    assert torch.equal(images, expected) and torch.is_grad_enabled()
    (gradient,) = torch.autograd.grad(images[1].square().sum(), leaf)
    assert [bool(g.any()) for g in gradient] == [False, True, False, False]  # samples do not mix
    part = decoded(r.pipe, kept.rows([2, 0]), finished[[2, 0]])
    assert torch.allclose(part, expected[[2, 0]], atol=1e-5)
    assert not any(p.grad is not None for p in r.pipe.vae.parameters())


def test_a_decoder_without_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    r = own("sd3")
    _, tape = r.record()
    leaf = tape.steps[-1].x_next.clone().requires_grad_()
    with monkeypatch.context() as patch:
        patch.setattr(diffusers.AutoencoderKL, "decode", torch.no_grad()(diffusers.AutoencoderKL.decode))
        with pytest.raises(ReplayError, match="StableDiffusion3Pipeline decodes its latents without gradient"):
            decoded(r.pipe, tape, leaf)
    with pytest.raises(ReplayError, match=r"latents to decode have shape \[2, 4, 8, 8\], those of the rollout \[4, "):
        decoded(r.pipe, tape, leaf[:2])
    assert decoded(r.pipe, tape, leaf).requires_grad


def test_a_pipeline_may_write_into_what_its_derivative_needs() -> None:
    """Kandinsky 5 normalises the first frame in place, by numbers that the derivative needs as they were."""
    (entry,) = (entry for name, entry in BY_NAME.items() if name.startswith("Kandinsky5I2VPipeline"))
    pipe, _ = build(entry)
    call = call_for(entry, pipe, False) | {"output_type": "pt"}
    options = {"kernel": entry.kernel, "noise_level": 0.5, "generators": tiny.generators(entry.batch)}
    _, tape = record(pipe, call, **options)
    finished = tape.steps[-1].x_next
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(pipe, tape, finished)
    with allow_mutation_on_saved_tensors():
        found = gradient(pipe, tape, finished)
    direction, eps = found / found.norm(), 1e-2
    up, down = (decoded(pipe, tape, finished + sign * eps * direction).double().sum() for sign in (1, -1))
    assert torch.isclose((up - down) / (2 * eps), found.norm().double(), rtol=0.01)


def gradient(pipe: diffusers.DiffusionPipeline, tape: Tape, latents: torch.Tensor) -> torch.Tensor:
    leaf = latents.clone().requires_grad_()
    return torch.autograd.grad(decoded(pipe, tape, leaf).sum(), leaf)[0]

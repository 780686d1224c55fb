"""Initial latents of the caller's, in pipelines that do not hand on what they prepared as it is."""

from typing import Any

import diffusers
import pytest
import tiny
import torch
from replaying import EACH, GUIDED, own
from torch.autograd.graph import allow_mutation_on_saved_tensors
from zoo.checks import build, call_for
from zoo.entries import BY_NAME

from gerl.engine import ReplayedStep, RequiredTensors, Tape, compact, decoded, record, replay
from gerl.engine.latents import Inverse, _decoded, record_decoding
from gerl.engine.rows import select_call
from gerl.errors import ModelError, ReplayError


class WithReference(diffusers.StableDiffusion3Pipeline):
    """A picture below its reference, which is prepared with the noise and written again in each step."""

    def prepare_latents(self, *arguments: Any) -> Any:
        noise = super().prepare_latents(*arguments)
        return noise, noise.flip(-1).tanh()

    @torch.no_grad()
    def __call__(self, prompt: list[str], generator: Any = None) -> dict[str, torch.Tensor]:
        embeds, _, pooled, _ = self.encode_prompt(prompt, None, None, max_sequence_length=8)
        noise, reference = self.prepare_latents(len(prompt), 4, 8, 16, embeds.dtype, embeds.device, generator)
        height = reference.shape[2]
        x = torch.cat([reference, noise], 2)
        self.scheduler.set_timesteps(4)
        for t in self.scheduler.timesteps:
            x[:, :, :height] = reference
            v = self.transformer(x, embeds, pooled, t.expand(len(prompt)), return_dict=False)[0]
            x = self.scheduler.step(v, t, x, return_dict=False)[0]
        return {"images": x}


@pytest.mark.parametrize("index", [[0, 1, 2, 3], [2, 0]], ids=["whole", "part"])
def test_a_reference_that_is_handed_on_as_well_is_not_taken_for_the_noise(index: list[int]) -> None:
    torch.manual_seed(0)
    pipe = WithReference(**tiny.build(tiny.CASES["sd3"]).components)
    pipe.set_progress_bar_config(disable=True)
    tiny.add_lora(pipe)
    _, tape = record(pipe, {"prompt": list(tiny.PROMPTS)}, generators=tiny.generators(), noise_level=0.0)
    kept = compact(tape, RequiredTensors(frozenset({0}), means=False, outputs=False, forward=True))
    given = torch.randn(tape.steps[0].x.shape)[index]
    height, found = given.shape[2] // 2, list[torch.Tensor]()

    def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
        assert step.written is not None and not step.written[:, :, height:].any()
        found.append(step.x)
        return step.model_output.sum()

    replay(pipe, kept, on_step, steps=[0], index=index, latents={0: given})
    (x,) = found
    assert torch.equal(x[:, :, height:], given[:, :, height:])
    assert torch.equal(x[:, :, :height], tape.steps[0].x[index][:, :, :height])


@EACH
@GUIDED
def test_finished_latents_are_decoded_to_the_images_of_the_rollout(name: str, guided: bool) -> None:
    r = own(name, guided)
    r.call["output_type"] = "pt"
    output, tape = r.record()
    expected = torch.stack(list(output))
    expected = expected[:, 0] if expected.ndim == 5 and expected.shape[1] == 1 else expected
    kept = compact(tape, RequiredTensors(frozenset({3}), means=False, outputs=False, chain=True))
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


def call_of(name: str) -> dict[str, Any]:
    return tiny.call_for(tiny.CASES[name], guided=False, steps=2) | {"output_type": "np"}


@pytest.mark.parametrize("name", tiny.CASES)
def test_the_latents_of_a_drawn_image_are_found_from_what_its_vae_decodes(name: str) -> None:
    pipe, call = tiny.build(tiny.CASES[name]), call_of(name)
    _, drawn = record(pipe, call, kernel="ode", window=(), generators=tiny.generators())
    loop = record_decoding(pipe, select_call(call, [0]))
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
    loop = record_decoding(pipe, tiny.call_for(tiny.CASES["sd3"], guided=True, steps=5) | {"output_type": "np"})
    assert ran == ["denoiser"] and len(loop.steps) == 5
    Inverse(pipe, record_decoding(pipe, select_call(call_of("sd3"), [0])))
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
        inverse = Inverse(pipe, record_decoding(pipe, select_call(call_of("sd3"), [0])))
        inverse.of(torch.randn(inverse.shape, generator=torch.Generator().manual_seed(3)))


def test_a_pipeline_that_decodes_otherwise_is_refused() -> None:
    pipe, call = tiny.sd3(), select_call(call_of("sd3"), [0])
    with pytest.raises(ModelError, match=r"vae\.decode"):
        record_decoding(pipe, call | {"output_type": "latent"})
    pipe.vae = None
    with pytest.raises(ModelError, match="no VAE"):
        record_decoding(pipe, call)


def test_latents_of_another_shape_are_refused_with_the_key_to_change() -> None:
    pipe = tiny.wan()
    inverse = Inverse(pipe, record_decoding(pipe, select_call(call_of("wan"), [0])))
    one_frame = torch.zeros(*inverse.shape[:2], 1, *inverse.shape[3:])
    with pytest.raises(ModelError, match=r"sampling\.call\.num_frames=1"):
        inverse.of(one_frame)

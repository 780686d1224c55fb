"""Record: the stock pipeline's images, per-sample noise, nothing left patched, and the calls it refuses."""

import copy
import functools
import itertools
import math
import sys
from typing import Any

import diffusers
import pytest
import tiny
import torch
from diffusers.models.autoencoders import vae as vae_module
from replaying import (
    EACH,
    GUIDED,
    NOISE,
    all_equal,
    as_class,
    counted_rows,
    gradients,
    own,
    recorded,
    replayed,
    rolled_out,
)
from torch.utils._pytree import tree_leaves

from gerl.engine import instrument, replay
from gerl.engine.batching import select_call
from gerl.errors import ModelError, ReplayError

# --- record


@EACH
@GUIDED
def test_without_noise_the_stock_pipeline_is_drawn_bitwise(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    stock = tiny.output_of(r.pipe(**tiny.call_for(tiny.CASES[name], guided), generator=tiny.generators()))
    for kernel in (r.kernel, "ode"):
        images, tape = r.record(kernel=kernel, noise_level=0.0, probe=False)
        assert torch.equal(images, stock)
        assert len(tape.steps) == 4 and tape.stochastic_steps == []
    assert not torch.equal(r.output, stock)  # with noise it differs, and so do the cases
    assert guided or not torch.equal(stock, recorded(name, True).output)


@EACH
@GUIDED
def test_log_prob_is_that_of_a_normal_distribution(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    assert r.tape.stochastic_steps == [0, 1, 2] and r.tape.steps[3].rule.std == 0
    for k, step in replayed(r)[0].items():
        assert step.x_next is not None and step.std > 0
        exact = torch.distributions.Normal(step.mean.double(), step.std).log_prob(step.x_next.double())
        expected = exact.flatten(1).mean(1).float()
        torch.testing.assert_close(r.tape.steps[k].log_prob, expected, rtol=1e-5, atol=1e-6)
        z = (step.x_next - step.mean) / step.std
        error = 5 / math.sqrt(z.numel())
        assert z.mean().item() == pytest.approx(0, abs=error) and z.std().item() == pytest.approx(1, abs=error)


@EACH
@GUIDED
def test_a_sample_is_drawn_the_same_in_any_batch(name: str, guided: bool) -> None:
    r, gens = recorded(name, guided), tiny.generators()
    images, tape = r.record(select_call(r.call, [3, 1]), generators=[gens[3], gens[1]], probe=False)
    torch.testing.assert_close(images, r.output[[3, 1]], rtol=1e-4, atol=1e-4)
    for step, full in zip(tape.steps, r.tape.steps, strict=True):
        torch.testing.assert_close(step.x_next, full.x_next[[3, 1]], rtol=1e-4, atol=1e-4)
    assert torch.equal(tape.steps[0].x, r.tape.steps[0].x[[3, 1]])  # the initial latents are only drawn


def test_without_generators_the_global_one_is_used_and_the_probe_does_not_draw_from_it() -> None:
    drawn = []
    for seed, probe in ((5, True), (5, False), (6, False)):
        torch.manual_seed(seed)
        images, _ = recorded("sd3", False).record(generators=None, probe=probe)
        drawn.append([images, torch.rand(3)])
    assert all_equal(drawn[0], drawn[1]) and not torch.equal(drawn[2][0], drawn[0][0])


@EACH
def test_the_callers_arguments_stay_as_they_are(name: str) -> None:
    r = recorded(name, True)
    call = tiny.call_for(tiny.CASES[name], True)
    before, identity = copy.deepcopy(call), {key: id(value) for key, value in call.items()}
    _, tape = r.record(call)
    assert call == before and {key: id(value) for key, value in call.items()} == identity
    assert tape.call == before and tape.call["prompt"] is not call["prompt"]


class WritesIntoItsPrompts(diffusers.StableDiffusion3Pipeline):
    """Like ZImageOmni, which edits the list it is given."""

    def encode_prompt(self, prompt: list[str], *args: Any, **kwargs: Any) -> Any:
        encoded = super().encode_prompt(list(prompt), *args, **kwargs)
        prompt[:] = [p + "!" for p in prompt]
        return encoded


def test_a_pipeline_that_writes_into_its_arguments_harms_nobody() -> None:
    r = own()
    r.pipe = as_class(r.pipe, WritesIntoItsPrompts)
    rolled_out(r)
    assert r.call["prompt"] == r.tape.call["prompt"] == tiny.PROMPTS
    assert gradients(r)[1] == 0.0
    assert gradients(r, index=[2, 0])[1] <= 1e-5
    assert r.tape.call["prompt"] == tiny.PROMPTS


@pytest.mark.parametrize("eta", [1.0, 0.4])
def test_ddim_std_and_mean_are_those_of_ddpo(eta: float) -> None:
    r = recorded("sd15", True)
    _, tape = r.record(noise_level=eta, probe=False)
    alphas, timesteps = r.pipe.scheduler.alphas_cumprod.double(), r.pipe.scheduler.timesteps.tolist()
    for k, step in replayed(r, tape)[0].items():
        a, a_next = alphas[timesteps[k]], alphas[timesteps[k + 1]]
        std = eta * ((1 - a_next) / (1 - a) * (1 - a / a_next)).sqrt()
        assert step.std == pytest.approx(float(std), rel=1e-4)
        x0 = (step.x.double() - (1 - a).sqrt() * step.model_output.double()) / a.sqrt()
        mean = a_next.sqrt() * x0 + (1 - a_next - std**2).sqrt() * step.model_output.double()
        torch.testing.assert_close(step.mean, mean.float(), rtol=1e-4, atol=1e-4)


@EACH
def test_the_mean_of_a_step_is_recorded(name: str) -> None:
    tape = recorded(name, True).tape
    drawn = tiny.generators()
    assert tape.steps[3].mean is None and tape.steps[3].log_prob is None
    torch.stack([torch.randn(tape.steps[0].x[0].shape, generator=g) for g in drawn])  # the initial latents
    for step in tape.steps[:3]:
        assert step.mean is not None and step.mean.dtype == torch.float32 and step.mean.shape == step.x.shape
        noise = torch.stack([torch.randn(step.x[0].shape, generator=g) for g in drawn])
        assert torch.equal(step.x_next, step.mean + step.rule.std * noise)


@EACH
def test_samples_with_the_same_initial_generator_share_their_start(name: str) -> None:
    first = [torch.Generator().manual_seed(seed) for seed in (7, 7, 8, 7)]
    _, tape = recorded(name, True).record(init_generators=first, probe=False)
    start = tape.steps[0].x
    assert torch.equal(start[0], start[1]) and torch.equal(start[0], start[3]) and not torch.equal(start[0], start[2])
    noise = torch.stack([torch.randn(start[0].shape, generator=g) for g in tiny.generators()])
    assert torch.equal(tape.steps[0].x_next, tape.steps[0].mean + tape.steps[0].rule.std * noise)


class LooksAtItsImages(diffusers.StableDiffusion3Pipeline):
    """Calls a component after the last step, as a safety checker is called."""

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__.__wrapped__(self, *args, **kwargs)
        tokens = self.tokenizer(kwargs["prompt"], padding="max_length", max_length=16, return_tensors="pt")
        self.text_encoder(tokens.input_ids)
        return output


def test_what_is_called_after_the_last_step_is_not_on_the_tape() -> None:
    r = own()
    r.pipe = as_class(r.pipe, LooksAtItsImages)
    seen: list[int] = []
    with r.pipe.text_encoder.text_model.register_forward_hook(lambda *_: seen.append(1)):
        rolled_out(r)
    assert len(seen) > 2  # by encode_prompt, there and for the probe; and afterwards
    assert [(c.step, c.component) for c in r.tape.component_calls] == [(k, "transformer") for k in range(4)]
    assert r.tape.looped_components() == {"transformer"} and gradients(r)[1] == 0.0


# --- recordings that are stopped


@EACH
@GUIDED
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_stopped_recording_is_the_beginning_of_the_whole(name: str, guided: bool, stop: int) -> None:
    r = recorded(name, guided)
    with counted_rows(r.pipe) as rows:
        images, tape = r.record(stop=stop, probe=False)
        stopped = rows.total()
        r.record(probe=False)
    assert stopped / (stop + 1) == (rows.total() - stopped) / 4
    assert images is None and len(tape.steps) == stop
    for step, whole in zip(tape.steps, r.tape.steps, strict=False):
        assert torch.equal(step.x_next, whole.x_next) and torch.equal(step.log_prob, whole.log_prob)
    expected = [c for c in r.tape.component_calls if c.step <= stop]
    assert [(c.step, c.component) for c in tape.component_calls] == [(c.step, c.component) for c in expected]
    for call, whole in zip(tape.component_calls, expected, strict=True):
        assert all_equal(*([v for v in tree_leaves(c.output) if torch.is_tensor(v)] for c in (call, whole)))
    if stop:
        assert gradients(r, tape, steps=range(stop))[1] == 0.0


def test_what_a_stopped_recording_does_not_reach_may_be_in_its_window() -> None:
    assert recorded("sd3", False).record(window=[0, 2], stop=1, probe=False)[1].stochastic_steps == [0]


@pytest.mark.parametrize(("name", "dtype"), [("flux", torch.float32), ("sd15", torch.bfloat16)])
def test_a_step_returns_the_dtype_of_the_scheduler(name: str, dtype: torch.dtype) -> None:
    pipe, seen = recorded(name, False).pipe, []
    scheduler = copy.deepcopy(pipe.scheduler)
    scheduler.set_timesteps(4, **({"mu": 1.0} if name == "flux" else {}))
    sample = torch.zeros(1, 4, 8, 8, dtype=torch.bfloat16)

    class OneStep:
        def on_scheduler_step(self, *args: Any) -> torch.Tensor:
            seen.append(args[3].dtype)
            return sample.float()

    output = sample.float() if name == "flux" else sample  # Z-Image's pipelines cast it, and assert the result
    step = instrument._Step(OneStep(), scheduler)
    x_next = step(output, scheduler.timesteps[0], sample, return_dict=False)[0]
    assert seen == [torch.bfloat16]
    assert x_next.dtype == scheduler.step(output, scheduler.timesteps[0], sample, return_dict=False)[0].dtype == dtype


# --- nothing stays patched


def attributes(pipe: Any) -> dict[str, Any]:
    """Everything that a patch could change, of the pipeline, its scheduler, its components and modules."""
    owners = {"pipe": pipe, **{key: value for key, value in pipe.components.items() if value is not None}}
    found: dict[str, Any] = {}
    for label, owner in owners.items():
        changing = ("timesteps", "sigmas", "num_inference_steps", "_step_index", "_begin_index", "_guidance_scale")
        found |= {f"{label}.{key}": id(value) for key, value in vars(owner).items() if key not in changing}
    modules = {sys.modules[cls.__module__] for cls in type(pipe).__mro__} | {vae_module}
    found |= {m.__name__: m.randn_tensor for m in modules if hasattr(m, "randn_tensor")}
    return {key: value for key, value in found.items() if not key.startswith("pipe._")}


@EACH
def test_nothing_stays_patched(name: str) -> None:
    r = recorded(name, True)
    before = attributes(r.pipe)
    assert any(key.startswith("diffusers.pipelines.") for key in before) and vae_module.__name__ in before
    during: list[dict[str, Any]] = []
    replay(r.pipe, r.tape, lambda k, step: during.append(attributes(r.pipe)))
    assert len(during) == 3 and all(d != before for d in during)
    assert {"scheduler.step", "pipe.encode_prompt"} <= set(during[0]) - set(before)
    assert attributes(r.pipe) == before

    def broken(*_: Any) -> None:
        raise KeyError("in the middle")

    with pytest.raises(KeyError):
        replay(r.pipe, r.tape, broken)
    assert attributes(r.pipe) == before
    with tiny.denoiser_of(r.pipe).register_forward_pre_hook(broken), pytest.raises(KeyError):
        r.record()
    assert attributes(r.pipe) == before
    assert torch.is_grad_enabled()


def test_attributes_that_the_user_set_come_back() -> None:
    r, calls = own("sd15", guided=False), []
    mine = functools.partial(lambda f, *a, **k: calls.append(1) or f(*a, **k), r.pipe.unet.forward)
    r.pipe.unet.forward = mine
    rolled_out(r)
    assert r.pipe.unet.forward is mine and len(calls) == 5  # four steps and the probe
    assert gradients(r)[1] == 0.0
    assert r.pipe.unet.forward is mine and len(calls) == 8


# --- calls that cannot work


@pytest.mark.parametrize(
    ("name", "scheduler", "config", "kernel", "message"),
    [
        ("sd15", diffusers.EulerDiscreteScheduler, {}, "ddim", r"EulerDiscreteScheduler.* DDIMScheduler"),
        ("sd15", diffusers.PNDMScheduler, {}, "ddim", r"PNDMScheduler.* DDIMScheduler"),
        ("sd15", diffusers.DPMSolverMultistepScheduler, {}, "ddim", r"DPMSolverMultistepScheduler.* DDIMScheduler"),
        ("sd15", diffusers.DDIMScheduler, {}, "flow_sde", r"sampling\.kernel=flow_sde is for flow matching"),
        ("sd15", diffusers.DDIMScheduler, {"thresholding": True}, "ddim", "has no transition kernel"),
        ("sd15", diffusers.DDIMScheduler, {"rescale_betas_zero_snr": True}, "ddim", "starts at pure noise"),
        ("sd3", diffusers.FlowMatchEulerDiscreteScheduler, {"stochastic_sampling": True}, "ode", "stochastic_sampling"),
    ],
)
def test_a_scheduler_without_the_kernel_is_refused(
    name: str, scheduler: Any, config: dict[str, bool], kernel: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = recorded(name, False)
    monkeypatch.setattr(r.pipe, "scheduler", scheduler.from_config(r.pipe.scheduler.config, **config))
    with pytest.raises(ModelError, match=message):
        r.record(kernel=kernel)


@pytest.mark.parametrize("name", ["sd3", "sd15"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": [2, 3]}, ModelError, r"last denoising step .*window"),
        ({"window": [1, 7]}, ModelError, r"window .*\[1, 7\].* 4 steps"),
        ({"stop": 4}, ModelError, r"stop at step 4.* 4 steps"),
        ({"generators": tiny.generators(3)}, ValueError, "3 generators for 4 samples"),
        ({"init_generators": tiny.generators(3)}, ValueError, "3 generators for 4 samples"),
    ],
)
def test_recordings_that_cannot_be(name: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        recorded(name, False).record(**options)


def test_replays_that_cannot_be() -> None:
    r = recorded("sd3", False)
    _, tape = r.record(probe=False)
    with pytest.raises(ReplayError, match="recorded with probe=True"):
        gradients(r, tape, index=[0, 1])
    assert gradients(r, tape)[1] == 0.0
    with pytest.raises(ReplayError, match=r"steps \[1, 9\].* 4 steps"):
        gradients(r, steps=[1, 9])
    _, ode = r.record(noise_level=0.0)
    with pytest.raises(ReplayError, match=r"steps \[\] cannot be replayed"):
        gradients(r, ode)
    with pytest.raises(ReplayError, match="only stochastic steps"):
        gradients(r, steps=[3])


def test_sigma_and_std_of_a_replayed_step_are_those_of_the_schedule() -> None:
    r = recorded("sd3", False)
    sigmas, steps = r.pipe.scheduler.sigmas.tolist(), replayed(r)[0].values()
    assert [(step.sigma, step.sigma_next) for step in steps] == list(itertools.pairwise(sigmas[:4]))
    regular = [sigmas[1], *sigmas[1:3]]  # the first sigma is 1, where s / (1 - s) is infinite
    expected = [
        NOISE * math.sqrt(a / (1 - s)) * math.sqrt(a - b) for s, a, b in zip(regular, sigmas, sigmas[1:], strict=False)
    ]
    assert [step.std for step in steps] == pytest.approx(expected)

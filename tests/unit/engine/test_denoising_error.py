"""Denoising errors of finished latents against a loop that calls the denoiser itself."""

from typing import Any

import diffusers
import numpy as np
import pytest
import tiny
import torch

from gerl.engine.denoising_error import (
    denoising_errors,
    differentiable_errors,
    finished_latents,
    nearest_steps,
    noise_level,
    structure_of,
)
from gerl.engine.transitions import FlowMapRule, FlowRule
from gerl.errors import ReplayError

STEPS, DRAWS, SHIFTED = 8, 2, [*tiny.PROMPTS[1:], tiny.PROMPTS[0]]


def noise(i: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(i))


def model(kind: str) -> tuple[Any, dict[str, Any]]:
    """A pipeline whose model predicts `kind`, and the arguments of a call with four prompts."""
    case = tiny.CASES["sd3" if kind == "flow" else "sd15"]
    pipe = tiny.build(case)
    if kind == "edm":
        pipe.scheduler = diffusers.EDMEulerScheduler()
    elif kind != "flow":
        pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config, prediction_type=kind)
    return pipe, tiny.call_for(case, guided=False, steps=STEPS)


def naive_errors(pipe: Any, kind: str, prompts: list[str], clean: torch.Tensor, levels: list[int]) -> torch.Tensor:
    """The errors written out, from the formula of each parametrisation."""
    scheduler = pipe.scheduler
    scheduler.set_timesteps(STEPS)
    errors = []
    for i in range(DRAWS * len(levels)):
        k, eps = levels[i % len(levels)], noise(i, clean)
        t = scheduler.timesteps[k]
        if kind == "flow":
            s = scheduler.sigmas[k]
            text, _, pooled, _ = pipe.encode_prompt(
                prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=8
            )
            x = (1 - s) * clean + s * eps
            out = pipe.transformer(x, text, pooled, t.expand(len(x)), return_dict=False)[0]
            errors.append((out - (eps - clean)) ** 2)
            continue
        text, _ = pipe.encode_prompt(prompts, "cpu", 1, False)
        if kind == "edm":
            c, data = scheduler.sigmas[k], scheduler.config.sigma_data
            x = clean + c * eps
            out = pipe.unet(x / (c**2 + data**2) ** 0.5, t, text, return_dict=False)[0]
            skip, scale = data**2 / (c**2 + data**2), c * data / (c**2 + data**2) ** 0.5
            errors.append((out - (clean - skip * x) / scale) ** 2)
            continue
        a = scheduler.alphas_cumprod[t]
        x = a**0.5 * clean + (1 - a) ** 0.5 * eps
        out = pipe.unet(x, t, text, return_dict=False)[0]
        wanted = {"epsilon": eps, "v_prediction": a**0.5 * eps - (1 - a) ** 0.5 * clean, "sample": clean}[kind]
        errors.append((out - wanted) ** 2)
    return torch.stack(errors).flatten(2).mean(2).reshape(DRAWS, len(levels), -1).mean(0).T


@pytest.mark.parametrize("kind", ["flow", "epsilon", "v_prediction", "edm", "sample"])
def test_errors_equal_those_of_a_naive_loop(kind: str) -> None:
    pipe, call = model(kind)
    with finished_latents(pipe) as finished:
        output = pipe(**call, generator=tiny.generators())
    assert finished.latents is not None and finished.steps == STEPS
    assert torch.equal(finished.latents, tiny.output_of(output))
    for prompts in (tiny.PROMPTS, SHIFTED):
        tape = structure_of(pipe, call | {"prompt": prompts}, finished.steps)
        levels = nearest_steps([step.rule for step in tape.steps])
        errors = denoising_errors(pipe, tape, finished.latents, noise, DRAWS)
        with torch.no_grad():
            expected = naive_errors(pipe, kind, prompts, finished.latents, levels)
        torch.testing.assert_close(errors, expected, rtol=1e-4, atol=1e-6)


def test_watching_the_latents_leaves_the_images_and_the_scheduler_as_they_are() -> None:
    pipe, call = model("flow")
    plain = pipe(**call, generator=tiny.generators())
    with finished_latents(pipe):
        watched = pipe(**call, generator=tiny.generators())
    assert np.array_equal(tiny.output_of(plain), tiny.output_of(watched))
    assert "step" not in vars(pipe.scheduler)


def test_guidance_is_left_out() -> None:
    case = tiny.CASES["sd3"]
    pipe = tiny.build(case)
    clean = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(5))
    found = [
        denoising_errors(pipe, structure_of(pipe, tiny.call_for(case, guided, STEPS), STEPS), clean, noise)
        for guided in (False, True)
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_levels_are_the_nearest_of_the_schedule_without_pure_noise() -> None:
    sigmas = [1.0, 0.9, 0.65, 0.45, 0.1, 0.0]
    rules = [FlowRule(s, 0.0, 0.0, 0.0) for s in sigmas]
    assert nearest_steps(rules) == [1, 2, 3]
    assert nearest_steps(rules, (0.4, 0.95)) == [1, 3]
    with pytest.raises(ReplayError, match="sample with more steps"):
        nearest_steps([FlowRule(1.0, 0.0, 0.0, 0.0)])


def test_a_flow_map_cannot_be_noised_again() -> None:
    pipe, call = model("flow")
    tape = structure_of(pipe, call, STEPS)
    tape.steps = [
        type(s)(FlowMapRule(s.rule.sigma, s.rule.sigma_next), *list(vars(s).values())[1:]) for s in tape.steps
    ]
    with pytest.raises(ReplayError, match="a flow map is trained at its own latents"):
        denoising_errors(pipe, tape, tape.steps[-1].x_next, noise)


@pytest.mark.parametrize("kind", ["flow", "epsilon", "v_prediction", "edm", "sample"])
def test_the_gradient_is_that_of_the_naive_loop(kind: str) -> None:
    pipe, call = model(kind)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False)
    clean = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(5)).requires_grad_()
    tape = structure_of(pipe, call, STEPS)
    levels = nearest_steps([step.rule for step in tape.steps])
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0])[:, None]
    errors = differentiable_errors(pipe, tape, clean, noise, DRAWS)
    expected = naive_errors(pipe, kind, tiny.PROMPTS, clean, levels)
    torch.testing.assert_close(errors, expected, rtol=1e-4, atol=1e-6)
    found, wanted = (torch.autograd.grad((weights * e).sum(), clean)[0] for e in (errors, expected))
    assert wanted.abs().max() > 0
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()) + 1e-7)


def test_the_noise_level_is_the_share_of_the_noise_in_the_latents() -> None:
    differ = []
    for kind in ("flow", "epsilon"):
        pipe, call = model(kind)
        for k, step in enumerate(structure_of(pipe, call, STEPS).steps):
            one, nothing = torch.ones(len(tiny.PROMPTS), 1), torch.zeros(len(tiny.PROMPTS), 1)
            image, noised = (float(step.rule.noised(x, eps)[0]) for x, eps in ((one, nothing), (nothing, one)))
            if noise_level(step.rule) != pytest.approx(noised / (image + noised), rel=1e-5):
                differ.append((kind, k, noise_level(step.rule), noised / (image + noised)))
    assert not differ

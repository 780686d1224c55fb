"""Guidance in a replay: what is run and differentiated in each mode, and how the conditional half is found."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import diffusers
import pytest
import tiny
import torch
from diffusers.guiders.adaptive_projected_guidance import normalized_guidance
from replaying import (
    EACH,
    WEIGHTS,
    Recorded,
    all_equal,
    as_class,
    counted_rows,
    distance,
    fresh,
    gradients,
    own,
    recorded,
    replayed,
    rolled_out,
    with_controlnet,
)
from torch.utils._pytree import tree_map
from zoo.video import motif_video

from gerl.engine import ReplayedStep, Tape, guidance, record, replay
from gerl.engine.guidance import CfgMode
from gerl.engine.rows import shapes
from gerl.errors import ReplayError

MODES: tuple[CfgMode, ...] = ("detach_uncond", "off")


@contextmanager
def unconditional_rows_detached(r: Recorded, name: str) -> Iterator[None]:
    """The denoiser's joint output has its unconditional rows detached."""
    calls = count()

    def hook(module: Any, args: Any, output: Any) -> Any:
        nth = next(calls)
        match name:
            case "sd3" | "sd15":
                without, with_prompt = output[0].chunk(2)
                return (torch.cat([without.detach(), with_prompt]),)
            case "z_image":
                half = len(output[0]) // 2
                return ([row if i < half else row.detach() for i, row in enumerate(output[0])],)
            case _:  # the second of two calls
                return tree_map(torch.Tensor.detach, output) if nth % 2 else output

    with tiny.denoiser_of(r.pipe).register_forward_hook(hook):
        yield


def outputs_and_gradients(
    r: Recorded, tape: Tape | None = None, **options: Any
) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
    """Model outputs by step, and LoRA gradients of a weighted sum of their squared distances to 1."""

    def loss(step: ReplayedStep) -> torch.Tensor:
        return (WEIGHTS * (step.model_output - 1).square().flatten(1).mean(1)).sum()

    steps, grads = replayed(r, tape, loss, **options)
    return {k: step.model_output for k, step in steps.items()}, grads


# --- values and gradients


@EACH
def test_a_detached_half_has_the_gradient_of_a_joint_forward_with_that_half_detached(name: str) -> None:
    r = recorded(name, True)
    grads, deviation, seen = gradients(r, cfg="detach_uncond")
    joint, _, _ = gradients(r)
    with unconditional_rows_detached(r, name):
        expected, hooked_deviation, _ = gradients(r)
    assert seen == [0, 1, 2] and deviation <= 1e-5 and hooked_deviation == 0.0
    assert distance(grads, expected) < 1e-5
    assert distance(grads, joint) > 0.1


@EACH
def test_without_guidance_outputs_and_gradients_are_those_of_the_unguided_pipeline(name: str) -> None:
    r = recorded(name, True)
    _, tape = r.record(tiny.call_for(tiny.CASES[name], False))
    given = {k: r.tape.steps[k].x for k in range(3)}
    expected, expected_grads = outputs_and_gradients(r, tape, latents=given)
    joint, joint_grads = outputs_and_gradients(r)
    outputs, grads = outputs_and_gradients(r, cfg="off")
    for k in given:
        torch.testing.assert_close(outputs[k], expected[k], rtol=1e-5, atol=1e-5)
        assert float((joint[k] - expected[k]).norm() / expected[k].norm()) > 1e-3
    assert distance(grads, expected_grads) < 1e-5
    assert distance(grads, joint_grads) > 0.01


@EACH
def test_the_denoiser_computes_only_the_rows_of_the_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "_FOUND", WeakKeyDictionary())  # nor is it needed to find the roles
    r, computed = recorded(name, True), []
    for cfg in ("joint", *MODES):
        with counted_rows(r.pipe) as rows:
            outputs, _ = outputs_and_gradients(r, cfg=cfg)
        computed.append(dict(rows))
        with counted_rows(r.pipe) as rows:
            steps, _ = replayed(r, cfg=cfg)
        computed.append(dict(rows))
        assert all_equal([step.model_output for step in steps.values()], list(outputs.values()))
    assert computed == [{True: 24}, {False: 24}, {True: 12, False: 12}, {False: 24}, {True: 12}, {False: 12}]


@EACH
def test_without_guidance_in_the_rollout_all_modes_are_the_same(name: str) -> None:
    r = recorded(name, False)
    joint, joint_grads = outputs_and_gradients(r, steps=[0, 2])
    for cfg in MODES:
        outputs, grads = outputs_and_gradients(r, steps=[0, 2], cfg=cfg)
        assert all(torch.equal(outputs[k], joint[k]) for k in joint) and all_equal(grads, joint_grads)


@pytest.mark.parametrize("name", ["sd3", "flux", "wan", "sd15"])
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    r, modes = fresh(name), ("joint", *MODES)
    plain = [gradients(r, cfg=cfg) for cfg in modes]
    tiny.denoiser_of(r.pipe).enable_gradient_checkpointing()
    computed = []
    for cfg, (expected, deviation, _) in zip(modes, plain, strict=True):
        with counted_rows(r.pipe) as rows:
            grads, again, _ = gradients(r, cfg=cfg)
        computed.append(dict(rows))
        assert all_equal(grads, expected) and again == deviation
    assert computed == [{True: 48}, {True: 24, False: 12}, {True: 24}]  # recomputed where differentiated


@pytest.mark.parametrize("name", ["sd3", "qwen_image"])
@pytest.mark.parametrize("cfg", MODES)
def test_a_compiled_denoiser_is_run_compiled(name: str, cfg: CfgMode, monkeypatch: pytest.MonkeyPatch) -> None:
    r, rows = recorded(name, True), []
    plain, denoiser = gradients(r, cfg=cfg)[0], tiny.denoiser_of(r.pipe)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        rows.append(len(kwargs["hidden_states"]))
        return denoiser._call_impl(*args, **kwargs)

    monkeypatch.setattr(denoiser, "_compiled_call_impl", compiled)
    assert all_equal(gradients(r, cfg=cfg)[0], plain)
    assert rows == [4] * (6 if cfg == "detach_uncond" else 3)


def test_a_half_precision_denoiser_tells_its_halves_apart() -> None:
    r = fresh("sd3", dtype=torch.bfloat16)
    grads, _, _ = gradients(r, cfg="detach_uncond")
    with unconditional_rows_detached(r, "sd3"):
        expected, _, _ = gradients(r)
    assert distance(grads, expected) < 0.05 < distance(gradients(r)[0], expected)


def test_steps_outside_a_guidance_interval_are_as_they_were() -> None:
    r = fresh("z_image")
    r.call["cfg_truncation"] = 0.2
    rolled_out(r)
    assert [len(c.output[0]) for c in r.tape.component_calls] == [8, 8, 4, 4]
    joint, _ = outputs_and_gradients(r)
    for cfg, expected in zip(MODES, ({True: 12, False: 8}, {True: 12}), strict=True):
        with counted_rows(r.pipe) as rows:
            outputs, _ = outputs_and_gradients(r, cfg=cfg)
        assert rows == expected and torch.equal(outputs[2], joint[2])
        same = [torch.allclose(outputs[k], joint[k], rtol=1e-4, atol=1e-5) for k in (0, 1)]
        assert same == [cfg == "detach_uncond"] * 2


def test_a_controlnet_runs_as_before_and_its_residuals_are_halved() -> None:
    r = rolled_out(with_controlnet(fresh("sd3")))
    assert [c.component for c in r.tape.component_calls[:2]] == ["controlnet", "transformer"]
    for index in (None, [2]):  # of one sample there are as many residuals as rows
        grads, deviation, _ = gradients(r, index=index, cfg="detach_uncond")
        with unconditional_rows_detached(r, "sd3"):
            expected, _, _ = gradients(r, index=index)
        assert deviation <= 1e-5 and distance(grads, expected) < 1e-4
    with counted_rows(r.pipe) as rows:
        gradients(r, cfg="off")
    assert rows == {True: 12}


# --- which half is the conditional one

Denoise = Callable[[str], torch.Tensor]  # "cu": one call for a conditional and an unconditional half
Guide = Callable[[Denoise], torch.Tensor]


def halves(denoise: Denoise) -> torch.Tensor:
    c, u = denoise("cu").chunk(2)
    return u + 3 * (c - u)


def halves_negated_and_rescaled(denoise: Denoise) -> torch.Tensor:
    u, c = denoise("uc").chunk(2)
    m = u + 3 * (c - u)
    return -m * (c.std(dim=(1, 2, 3), keepdim=True) / m.std(dim=(1, 2, 3), keepdim=True))


def projected_calls(denoise: Denoise) -> torch.Tensor:
    u, c = denoise("u"), denoise("c")
    return normalized_guidance(c, u, 6.0, None, 0.0, use_original_formulation=True)


def projected_within_bounds(denoise: Denoise) -> torch.Tensor:
    c, u = denoise("c"), denoise("u")
    return normalized_guidance(c, u, 6.0, None, 0.0, norm_threshold=15.0)


def prompt_call_last(denoise: Denoise) -> torch.Tensor:
    u, c = denoise("u"), denoise("c")
    return u + 3 * (c - u)


def alike(denoise: Denoise) -> torch.Tensor:
    return denoise("cu").unflatten(0, (2, -1)).mean(0)


def alike_calls(denoise: Denoise) -> torch.Tensor:
    return denoise("c") + denoise("u")


def interleaved(denoise: Denoise) -> torch.Tensor:
    c, u = denoise("cu").unflatten(0, (-1, 2)).unbind(1)
    return u + 3 * (c - u)


def thirds(denoise: Denoise) -> torch.Tensor:
    c, u, other = denoise("cuu").chunk(3)
    return u + 3 * (c - u) + 0.1 * other


class Guided(diffusers.StableDiffusion3Pipeline):
    """Guided as `guide` says. `idle_stream`: a second scheduler stream steps first, without using the denoiser."""

    guide: Guide
    idle_stream = False

    @torch.no_grad()
    def __call__(self, prompt: list[str], generator: Any = None) -> dict[str, torch.Tensor]:
        prompts, negative, pooled, negative_pooled = self.encode_prompt(prompt, None, None, max_sequence_length=8)
        x = self.prepare_latents(len(prompt), 4, 16, 16, prompts.dtype, prompts.device, generator)
        self.scheduler.set_timesteps(4)
        other, scheduler = x, copy.deepcopy(self.scheduler)
        for t in self.scheduler.timesteps:

            def denoise(parts: str, x: torch.Tensor = x, t: torch.Tensor = t) -> torch.Tensor:
                return self.transformer(
                    torch.cat([x] * len(parts)),
                    torch.cat([{"c": prompts, "u": negative}[part] for part in parts]),
                    torch.cat([{"c": pooled, "u": negative_pooled}[part] for part in parts]),
                    t.expand(len(parts) * len(x)),
                    return_dict=False,
                )[0]

            v = type(self).guide(denoise)
            if self.idle_stream:
                other = scheduler.step(torch.ones_like(x), t, other, return_dict=False)[0]
            x = self.scheduler.step(v, t, x, return_dict=False)[0]
        return {"latents": x}


def guided_by(guide: Guide, idle_stream: bool = False) -> Recorded:
    cls = type("Guided", (Guided,), {"guide": staticmethod(guide), "idle_stream": idle_stream})
    r = own("sd3")
    r.pipe, r.call = as_class(r.pipe, cls), {"prompt": list(tiny.PROMPTS)}
    return rolled_out(r)


def detaching_the_unconditional(r: Recorded) -> None:
    """From now on the unconditional rows of the denoiser's joint output are detached."""
    guide = type(r.pipe).guide

    def detached_guide(denoise: Denoise) -> torch.Tensor:
        def split(parts: str) -> torch.Tensor:
            rows = denoise(parts).chunk(len(parts))
            return torch.cat([row.detach() if part == "u" else row for row, part in zip(rows, parts, strict=True)])

        return guide(split)

    type(r.pipe).guide = staticmethod(detached_guide)


@pytest.mark.parametrize("guide", [halves, halves_negated_and_rescaled, prompt_call_last, projected_calls])
def test_the_conditional_half_is_found(guide: Guide) -> None:
    r = guided_by(guide)
    grads, deviation, _ = gradients(r, cfg="detach_uncond")
    assert deviation <= 1e-5
    detaching_the_unconditional(r)
    assert distance(grads, gradients(r)[0]) < 1e-5


def test_the_roles_in_projected_guidance_do_not_depend_on_how_far_the_outputs_are_apart() -> None:
    r = guided_by(projected_calls)
    for call in r.tape.component_calls[::2]:  # the unconditional ones: next to nothing of them lies along the others
        call.output = tree_map(lambda v: v.flip(-1) if torch.is_tensor(v) else v, call.output)
    grads, _, _ = gradients(r, cfg="detach_uncond")
    detaching_the_unconditional(r)
    assert distance(grads, gradients(r)[0]) < 1e-5


def test_the_roles_are_found_once_for_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, find = [], guidance._influence

    def found(pipe: Any, tape: Any, steps: Any, apart: float) -> Any:
        if apart:  # the check of cfg=off is another pass
            passes.append(pipe)
        return find(pipe, tape, steps, apart)

    monkeypatch.setattr(guidance, "_influence", found)
    one, other = guided_by(halves), guided_by(halves)
    state = torch.get_rng_state()
    for index in ([0, 2], [1]):
        gradients(one, cfg="detach_uncond", index=index)
        gradients(one, cfg="off", steps=[1])
    gradients(other, cfg="off")
    assert passes == [one.pipe, other.pipe]
    assert torch.equal(torch.get_rng_state(), state)


def test_an_unconditional_call_before_the_conditional_one_cannot_be_left_out() -> None:
    r = guided_by(prompt_call_last)
    with pytest.raises(ReplayError, match=r"first denoiser call at step 0 is the unconditional .* detach_uncond"):
        gradients(r, cfg="off")


def test_guidance_without_a_gradient_where_both_outputs_are_one_is_refused() -> None:
    r = guided_by(projected_within_bounds)
    assert gradients(r, cfg="detach_uncond")[1] <= 1e-5
    for _ in range(2):
        with pytest.raises(ReplayError, match=r"guidance at step 0 has no gradient .*: use cfg joint or detach_uncond"):
            gradients(r, cfg="off")


def test_a_guider_hands_on_the_conditional_output() -> None:
    pipe, seen = motif_video(), list[torch.Tensor]()  # its guider has momentum, and bounds the norm of a difference
    call = {"prompt": list(tiny.PROMPTS), "height": 16, "width": 16, "num_frames": 9, "max_sequence_length": 16}
    _, tape = record(pipe, call | {"num_inference_steps": 3}, "flow_sde", 0.7, generators=tiny.generators())
    weight = pipe.transformer.proj_out.weight

    def loss(k: int, step: ReplayedStep) -> torch.Tensor:
        seen.append(step.model_output.detach())
        return (step.model_output - 1).square().mean()

    with pipe.transformer.register_forward_hook(lambda module, args, output: seen.append(output[0].detach())):
        replay(pipe, tape, loss, steps=[1], cfg="off")
    conditional, in_its_place, handed_on = seen[-3:]
    assert torch.equal(conditional, in_its_place) and torch.equal(handed_on, conditional)
    assert weight.grad is not None and weight.grad.isfinite().all() and weight.grad.any()
    assert "forward" not in pipe.guider.__dict__


@pytest.mark.parametrize(
    "guide, message",
    [
        (alike, "have the same weight in the model output"),
        (alike_calls, "have the same weight in the model output"),
        (interleaved, "not consist of two halves of rows"),
        (thirds, r"1 denoiser outputs with \[3.0\] rows"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused(guide: Guide, message: str) -> None:
    r = guided_by(guide)
    assert gradients(r)[1] == 0.0
    for cfg in MODES:
        with pytest.raises(ReplayError, match=message + ".*use cfg joint"):
            gradients(r, cfg=cfg)


def test_a_call_that_serves_the_second_of_two_streams_is_guided() -> None:
    r = guided_by(halves, idle_stream=True)
    assert [c.step for c in r.tape.component_calls] == [0, 2, 4, 6] and len(r.tape.steps) == 8
    grads, deviation, _ = gradients(r, steps=[1, 3], cfg="detach_uncond")
    assert deviation <= 1e-5
    detaching_the_unconditional(r)
    assert distance(grads, gradients(r, steps=[1, 3])[0]) < 1e-5


def test_roles_are_found_where_only_the_shapes_of_outputs_were_kept() -> None:
    r = fresh("qwen_image")  # rescales: 0 / 0 if the outputs were zero
    for call in r.tape.component_calls:
        call.output = shapes(call.output)
    assert gradients(r, steps=[0], cfg="detach_uncond")[1] == 0.0

"""Record and replay of six pipelines built from their real classes, with and without classifier-free guidance."""

import copy
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import pytest
import tiny
import torch
from diffusers.models.autoencoders import vae as vae_module

from gerl.errors import ModelError, ReplayError
from gerl.utils.lora import add_lora
from gerl.workers.diffusers_model import ReplayedStep, Tape, record, replay
from gerl.workers.diffusers_model.batching import select_call

EACH = pytest.mark.parametrize("name", list(tiny.CASES))
GUIDED = pytest.mark.parametrize("guided", [False, True], ids=["plain", "cfg"])
NOISE = 0.7
WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 3.0])  # a different one for each sample, so that mixed-up samples show


@dataclass
class Recorded:
    """A pipeline with a LoRA, and what a rollout of its call left."""

    pipe: Any
    parameters: list[torch.nn.Parameter]
    call: dict[str, Any]
    output: Any
    tape: Tape
    kernel: str


@functools.cache
def recorded(name: str, guided: bool) -> Recorded:
    """Shared by the tests of this file: they leave the pipeline and the tape as they are."""
    case = tiny.CASES[name]
    pipe = tiny.build(case)
    parameters = tiny.add_lora(pipe)
    call = tiny.call_for(case, guided)
    output, tape = record(pipe, call, kernel=case.kernel, noise_level=NOISE, generators=tiny.generators())
    return Recorded(pipe, parameters, call, tiny.output_of(output), tape, case.kernel)


def gradients(r: Recorded, tape: Tape | None = None, **options: Any) -> tuple[list[torch.Tensor], float, list[int]]:
    """LoRA gradients of a weighted sum of log-probs, largest |ratio - 1|, and the steps that were trained."""
    index = options.get("index")
    weights = WEIGHTS if index is None else WEIGHTS[list(index)]
    deviation, seen = [0.0], []

    def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
        assert step.recorded_log_prob is not None and step.log_prob.shape == weights.shape
        seen.append(k)
        deviation.append(float(((step.log_prob.detach() - step.recorded_log_prob).exp() - 1).abs().max()))
        return (weights * step.log_prob).sum()

    for p in r.parameters:
        p.grad = None
    replay(r.pipe, tape or r.tape, on_step, **options)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in r.parameters]
    return grads, max(deviation), seen


def distance(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Norm of the difference of two gradients relative to the norm of the second."""
    one, other = (torch.cat([g.flatten() for g in grads]).double() for grads in (a, b))
    return float((one - other).norm() / other.norm())


class CountedLinear:
    """Counts how often the denoiser really computes: the calls of its first linear layer with a LoRA."""

    def __init__(self, pipe: Any) -> None:
        layer = next(m for m in tiny.denoiser_of(pipe).modules() if hasattr(m, "lora_A"))
        self.calls = 0
        self.handle = layer.register_forward_hook(self)

    def __call__(self, *_: Any) -> None:
        self.calls += 1

    def __enter__(self) -> "CountedLinear":
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


# --- record


@EACH
@GUIDED
def test_without_noise_the_stock_pipeline_is_drawn_bitwise(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    stock = tiny.output_of(r.pipe(**tiny.call_for(tiny.CASES[name], guided), generator=tiny.generators()))
    for kernel in (r.kernel, "ode"):
        output, tape = record(r.pipe, r.call, kernel=kernel, noise_level=0.0, generators=tiny.generators(), probe=False)
        assert torch.equal(tiny.output_of(output), stock)
        assert len(tape.steps) == 4 and tape.stochastic_steps == []
    assert not torch.equal(r.output, stock)  # with noise it differs, and so do the cases
    assert guided or not torch.equal(stock, recorded(name, True).output)


@EACH
@GUIDED
def test_log_prob_is_that_of_a_normal_distribution(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    assert r.tape.stochastic_steps == [0, 1, 2] and r.tape.steps[3].rule.std == 0

    def on_step(k: int, step: ReplayedStep) -> None:
        assert step.x_next is not None and step.std > 0
        exact = torch.distributions.Normal(step.mean.double(), step.std).log_prob(step.x_next.double())
        expected = exact.flatten(1).mean(1).float()
        torch.testing.assert_close(r.tape.steps[k].log_prob, expected, rtol=1e-5, atol=1e-6)
        z = (step.x_next - step.mean) / step.std
        error = 5 / math.sqrt(z.numel())
        assert z.mean().item() == pytest.approx(0, abs=error) and z.std().item() == pytest.approx(1, abs=error)

    replay(r.pipe, r.tape, on_step, grad=False)


@EACH
@GUIDED
def test_a_sample_is_drawn_the_same_in_any_batch(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    gens = tiny.generators()
    part = select_call(r.call, [3, 1])
    output, tape = record(r.pipe, part, kernel=r.kernel, noise_level=NOISE, generators=[gens[3], gens[1]], probe=False)
    torch.testing.assert_close(tiny.output_of(output), r.output[[3, 1]], rtol=1e-4, atol=1e-4)
    for step, full in zip(tape.steps, r.tape.steps, strict=True):
        torch.testing.assert_close(step.x_next, full.x_next[[3, 1]], rtol=1e-4, atol=1e-4)
    assert torch.equal(tape.steps[0].x, r.tape.steps[0].x[[3, 1]])  # the initial latents are only drawn


def test_without_generators_the_global_one_is_used_and_the_probe_does_not_draw_from_it() -> None:
    r = recorded("sd3", False)
    drawn = []
    for probe in (True, False):
        torch.manual_seed(5)
        output, _ = record(r.pipe, r.call, noise_level=NOISE, probe=probe)
        drawn.append((tiny.output_of(output), torch.rand(3)))
    assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])
    torch.manual_seed(6)
    other, _ = record(r.pipe, r.call, noise_level=NOISE, probe=False)
    assert not torch.equal(tiny.output_of(other), drawn[0][0])


@EACH
def test_the_callers_arguments_stay_as_they_are(name: str) -> None:
    r = recorded(name, True)
    call = tiny.call_for(tiny.CASES[name], True)
    before, identity = copy.deepcopy(call), {key: id(value) for key, value in call.items()}
    _, tape = record(r.pipe, call, kernel=r.kernel, generators=tiny.generators())
    assert call == before and {key: id(value) for key, value in call.items()} == identity
    assert tape.call == before and tape.call["prompt"] is not call["prompt"]


class WritesIntoItsPrompts(diffusers.StableDiffusion3Pipeline):
    """Like ZImageOmni, which edits the list it is given."""

    def encode_prompt(self, prompt: list[str], *args: Any, **kwargs: Any) -> Any:
        encoded = super().encode_prompt(list(prompt), *args, **kwargs)
        prompt[:] = [p + "!" for p in prompt]
        return encoded


def as_class(pipe: Any, cls: type) -> Any:
    """A pipeline of another class with the components of `pipe`."""
    other = cls(**pipe.components)
    other.set_progress_bar_config(disable=True)
    return other


def test_a_pipeline_that_writes_into_its_arguments_harms_nobody() -> None:
    pipe = as_class(tiny.build(tiny.CASES["sd3"]), WritesIntoItsPrompts)
    r = Recorded(pipe, tiny.add_lora(pipe), {}, None, Tape({}, 0), "flow_sde")
    call = tiny.call_for(tiny.CASES["sd3"], True)
    _, tape = record(pipe, call, generators=tiny.generators())
    assert call["prompt"] == tape.call["prompt"] == tiny.PROMPTS
    assert gradients(r, tape)[1] == 0.0
    assert gradients(r, tape, index=[2, 0])[1] <= 1e-5
    assert tape.call["prompt"] == tiny.PROMPTS


def test_ddim_std_and_mean_are_those_of_ddpo() -> None:
    r = recorded("sd15", True)
    for eta in (1.0, 0.4):
        _, tape = record(r.pipe, r.call, kernel="ddim", noise_level=eta, generators=tiny.generators(), probe=False)
        alphas = r.pipe.scheduler.alphas_cumprod
        timesteps = r.pipe.scheduler.timesteps.tolist()

        def check(
            k: int,
            step: ReplayedStep,
            eta: float = eta,
            alphas: torch.Tensor = alphas,
            timesteps: Sequence[int] = timesteps,
        ) -> None:
            a, a_next = alphas[timesteps[k]].double(), alphas[timesteps[k + 1]].double()
            std = eta * ((1 - a_next) / (1 - a) * (1 - a / a_next)).sqrt()
            assert step.std == pytest.approx(float(std), rel=1e-4)
            x0 = (step.x.double() - (1 - a).sqrt() * step.model_output.double()) / a.sqrt()
            mean = a_next.sqrt() * x0 + (1 - a_next - std**2).sqrt() * step.model_output.double()
            torch.testing.assert_close(step.mean, mean.float(), rtol=1e-4, atol=1e-4)

        replay(r.pipe, tape, check, grad=False)


# --- replay: ratio 1 and the gradient


@EACH
@GUIDED
def test_replay_is_exact_and_every_lora_weight_gets_a_gradient(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    grads, deviation, seen = gradients(r)
    assert seen == [0, 1, 2]
    assert deviation == 0.0
    assert all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in grads)
    p = r.parameters[0]
    before = p.detach().clone()
    try:
        p.data.mul_(1.5)
        assert gradients(r)[1] > 1e-6  # off policy the ratio moves: it is measured
    finally:
        p.data.copy_(before)


@EACH
@GUIDED
def test_a_window_is_replayed_exactly_and_other_steps_cost_nothing(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    with CountedLinear(r.pipe) as counted:
        _, deviation, seen = gradients(r, steps=[0, 1, 2])
        a_step = counted.calls // 3
        counted.calls = 0
        one, one_deviation, one_seen = gradients(r, steps=[1])
        assert counted.calls == a_step > 0
    assert (deviation, one_deviation, seen, one_seen) == (0.0, 0.0, [0, 1, 2], [1])
    assert all(g.abs().sum() > 0 for g in one)
    parts = [gradients(r, steps=[k])[0] for k in (0, 2)]
    summed = [a + b + c for a, b, c in zip(one, *parts, strict=True)]
    assert distance(summed, gradients(r)[0]) < 1e-5

    gens = tiny.generators()
    _, tape = record(r.pipe, r.call, kernel=r.kernel, noise_level=NOISE, window=[1, 2], generators=gens)
    assert tape.stochastic_steps == [1, 2] and tape.steps[0].rule.std == 0 and tape.steps[0].log_prob is None
    grads, deviation, seen = gradients(r, tape)
    assert (deviation, seen) == (0.0, [1, 2]) and all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in grads)
    assert gradients(r, tape, index=[1])[1] <= 1e-5


@EACH
@GUIDED
def test_sub_batches_are_near_one_and_their_gradients_add_up(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    full, _, _ = gradients(r)
    parts = []
    for index in ([2, 0], [3], [1]):
        grads, deviation, seen = gradients(r, index=index)
        assert deviation <= 1e-5 and seen == [0, 1, 2]
        parts.append(grads)
    assert distance([sum(g) for g in zip(*parts, strict=True)], full) < 2e-4
    assert distance(parts[0], full) > 1e-2


@EACH
def test_a_sub_batch_hands_out_the_rows_of_its_samples(name: str) -> None:
    r, index = recorded(name, True), [2, 0]
    outputs: dict[int, torch.Tensor] = {}

    def keep(k: int, step: ReplayedStep) -> None:
        outputs[k] = step.model_output

    def check(k: int, step: ReplayedStep) -> None:
        kept = r.tape.steps[k]
        assert step.x_next is not None and step.recorded_log_prob is not None and kept.log_prob is not None
        assert torch.equal(step.x, kept.x[index]) and torch.equal(step.x_next, kept.x_next[index])
        assert torch.equal(step.recorded_log_prob, kept.log_prob[index])
        assert (step.sigma, step.sigma_next, step.std) == (kept.rule.sigma, kept.rule.sigma_next, kept.rule.std)
        torch.testing.assert_close(step.model_output, outputs[k][index], rtol=1e-4, atol=1e-5)

    replay(r.pipe, r.tape, keep, grad=False)
    replay(r.pipe, r.tape, check, index=index, grad=False)


def test_a_probe_of_an_earlier_call_serves_again() -> None:
    r = recorded("qwen_image", True)
    call = {**r.call, "prompt": ["much longer words", "b", "c c c", "dd"]}
    _, tape = record(r.pipe, call, generators=tiny.generators(seed=3), probe=r.tape.probe)
    assert tape.probe is r.tape.probe
    assert gradients(r, tape, index=[1, 3])[1] <= 1e-5


def test_a_batch_of_one_needs_no_probe() -> None:
    r = recorded("flux", True)
    _, tape = record(r.pipe, select_call(r.call, [2]), generators=tiny.generators(1))
    assert tape.probe is None
    assert gradients(r, tape, index=[0])[1] == 0.0


@GUIDED
def test_gradient_equals_that_of_a_loop_written_by_hand(guided: bool) -> None:
    r = recorded("sd3", guided)
    pipe, scale = r.pipe, r.call["guidance_scale"]
    with torch.no_grad():
        prompt, negative, pooled, negative_pooled = pipe.encode_prompt(
            r.call["prompt"], None, None, do_classifier_free_guidance=guided, max_sequence_length=8
        )
    scheduler = tiny.euler(shift=3.0)
    scheduler.set_timesteps(4)
    sigmas = scheduler.sigmas
    for p in r.parameters:
        p.grad = None
    for k in range(3):
        x, x_next = r.tape.steps[k].x, r.tape.steps[k].x_next
        s, dt = sigmas[k], sigmas[k + 1] - sigmas[k]
        velocity = pipe.transformer(
            hidden_states=torch.cat([x, x]) if guided else x,
            timestep=scheduler.timesteps[k].expand(8 if guided else 4),
            encoder_hidden_states=torch.cat([negative, prompt]) if guided else prompt,
            pooled_projections=torch.cat([negative_pooled, pooled]) if guided else pooled,
        ).sample
        if guided:
            without, with_prompt = velocity.chunk(2)
            velocity = without + scale * (with_prompt - without)
        g = NOISE * (s / (1 - (sigmas[1] if s == 1 else s))).sqrt()  # Flow-GRPO, arXiv 2505.05470, equation 9
        mean = x * (1 + g**2 / (2 * s) * dt) + velocity * (1 + g**2 * (1 - s) / (2 * s)) * dt
        log_prob = torch.distributions.Normal(mean, g * (-dt).sqrt()).log_prob(x_next).mean((1, 2, 3))
        torch.testing.assert_close(log_prob.detach(), r.tape.steps[k].log_prob, rtol=1e-5, atol=1e-5)
        (WEIGHTS * log_prob).sum().backward()
    by_hand = [p.grad.clone() for p in r.parameters if p.grad is not None]
    assert len(by_hand) == len(r.parameters)
    assert distance(gradients(r)[0], by_hand) < 1e-5


@EACH
def test_without_grad_there_is_no_graph_and_the_means_are_the_same(name: str) -> None:
    r = recorded(name, True)
    means: dict[bool, list[torch.Tensor]] = {True: [], False: []}

    def on_step(k: int, step: ReplayedStep) -> None:
        means[step.mean.requires_grad].append(step.mean.detach())
        assert step.model_output.dtype == step.mean.dtype == torch.float32

    for p in r.parameters:
        p.grad = None
    replay(r.pipe, r.tape, on_step, grad=True)
    replay(r.pipe, r.tape, on_step, grad=False)
    assert len(means[True]) == len(means[False]) == 3
    assert all(torch.equal(a, b) for a, b in zip(means[True], means[False], strict=True))
    assert all(p.grad is None for p in r.parameters)  # no loss was returned
    assert torch.is_grad_enabled()


@EACH
def test_text_encoders_are_not_needed_for_a_replay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    r = recorded(name, True)
    full, _, _ = gradients(r)
    for key in [key for key in r.pipe.components if key.startswith("text_encoder")]:
        monkeypatch.setattr(r.pipe, key, None)
    assert r.pipe.text_encoder is None
    without, deviation, _ = gradients(r)
    assert deviation == 0.0 and all(torch.equal(a, b) for a, b in zip(without, full, strict=True))
    assert gradients(r, index=[2, 0])[1] <= 1e-5


def test_one_graph_is_alive_at_a_time() -> None:
    r = recorded("sd3", True)

    def peak(steps: Sequence[int]) -> tuple[int, int]:
        alive, most = 0, 0

        class Held:
            def __init__(self, tensor: torch.Tensor) -> None:
                nonlocal alive, most
                self.tensor = tensor.detach()  # with its graph, a saved output would keep itself alive
                alive += tensor.numel()
                most = max(most, alive)

            def __del__(self) -> None:
                nonlocal alive
                alive -= self.tensor.numel()

        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            gradients(r, steps=steps)
        return most, alive

    (one, left), (three, left_of_three) = peak([1]), peak([0, 1, 2])
    assert one > 0 and three == one
    assert left == left_of_three == 0


# --- forward-process algorithms: other latents


@EACH
@GUIDED
def test_given_latents_replace_the_recorded_ones(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    outputs: dict[str, list[torch.Tensor]] = {"recorded": [], "same": [], "other": []}
    same = {k: r.tape.steps[k].x for k in (0, 1, 3)}
    other = {k: torch.randn(x.shape, generator=torch.Generator().manual_seed(k)) for k, x in same.items()}

    def keep(label: str, given: dict[int, torch.Tensor]) -> Callable[[int, ReplayedStep], torch.Tensor]:
        def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
            outputs[label].append(step.model_output.detach())
            if given:
                assert torch.equal(step.x, given[k])
                assert step.x_next is None and step.recorded_log_prob is None
                with pytest.raises(ReplayError, match="log-probability"):
                    _ = step.log_prob
                torch.testing.assert_close(step.mean, r.tape.steps[k].rule.mean(given[k], step.model_output))
            return step.model_output.square().mean()

        return on_step

    grads = {}
    for label, latents in (("recorded", {}), ("same", same), ("other", other)):
        for p in r.parameters:
            p.grad = None
        replay(r.pipe, r.tape, keep(label, latents), steps=[0, 1, 3], latents=latents)
        grads[label] = [p.grad.clone() for p in r.parameters if p.grad is not None]
        assert len(grads[label]) == len(r.parameters) and all(g.abs().sum() > 0 for g in grads[label])
    assert all(torch.equal(a, b) for a, b in zip(outputs["same"], outputs["recorded"], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(grads["same"], grads["recorded"], strict=True))
    assert not any(torch.allclose(a, b) for a, b in zip(outputs["other"], outputs["recorded"], strict=True))


def test_the_denoiser_sees_the_given_latents() -> None:
    r = recorded("sd3", True)
    seen: list[dict[str, torch.Tensor]] = []

    def on_step(k: int, step: ReplayedStep) -> None:
        outputs[k] = step.model_output

    def look(*args: Any) -> None:
        seen.append(args[-1])

    given = {k: torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(k)) for k in (0, 2)}
    outputs: dict[int, torch.Tensor] = {}
    handle = r.pipe.transformer.register_forward_pre_hook(look, with_kwargs=True)
    try:
        replay(r.pipe, r.tape, on_step, steps=[0, 2], index=[3, 0], latents=given)
    finally:
        handle.remove()
    rows = [given[0], r.tape.steps[1].x[[3, 0]], given[2]]
    assert [torch.equal(s["hidden_states"], torch.cat([x, x])) for s, x in zip(seen, rows, strict=True)] == [True] * 3
    for k in (0, 2):
        with torch.no_grad():
            without, prompt = r.pipe.transformer(**seen[k])[0].chunk(2)
        expected = without + r.call["guidance_scale"] * (prompt - without)
        assert torch.equal(outputs[k], expected) and outputs[k].requires_grad


# --- how the denoiser is run


def fresh(name: str, guided: bool = True, dtype: torch.dtype = torch.float32) -> Recorded:
    """A pipeline of one's own with gerl's LoRA (fp32, all default targets), and a rollout of it."""
    case = tiny.CASES[name]
    pipe = tiny.build(case).to(dtype)
    parameters = list(add_lora(tiny.denoiser_of(pipe), 4, 8.0, None, seed=0).values())
    torch.manual_seed(1)
    for p in parameters:
        p.data.normal_(0, 0.2)
    return rolled_out(Recorded(pipe, parameters, tiny.call_for(case, guided), None, Tape({}, 0), case.kernel))


def rolled_out(r: Recorded) -> Recorded:
    output, r.tape = record(r.pipe, r.call, kernel=r.kernel, noise_level=NOISE, generators=tiny.generators())
    r.output = tiny.output_of(output)
    return r


@EACH
def test_half_precision_base_with_a_full_precision_tape(name: str) -> None:
    r = fresh(name, dtype=torch.bfloat16)
    assert tiny.denoiser_of(r.pipe).dtype == torch.bfloat16 and all(p.dtype == torch.float32 for p in r.parameters)
    for step, following in zip(r.tape.steps, r.tape.steps[1:], strict=False):
        assert step.x_next.dtype == torch.float32 and torch.equal(step.x_next, following.x)
        assert step.log_prob is not None and step.log_prob.dtype == torch.float32
        assert not torch.equal(step.x_next, step.x_next.bfloat16().float())  # not rounded to the pipeline's precision
    grads, deviation, _ = gradients(r)
    assert deviation == 0.0
    assert all(g.dtype == torch.float32 and torch.isfinite(g).all() for g in grads)
    # the last block of SD3 and Qwen-Image computes text features that nothing reads
    assert sum(bool(g.abs().sum() > 0) for g in grads) > 0.8 * len(grads)
    assert gradients(r, steps=[1])[1] == 0.0


@pytest.mark.parametrize("name", ["sd3", "flux", "wan", "sd15"])
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    r = fresh(name)
    plain, _, _ = gradients(r)
    denoiser = tiny.denoiser_of(r.pipe)
    denoiser.enable_gradient_checkpointing()
    with CountedLinear(r.pipe) as counted:
        grads, deviation, _ = gradients(r, steps=[0, 1, 2])
    calls = counted.calls
    denoiser.disable_gradient_checkpointing()
    with CountedLinear(r.pipe) as counted:
        gradients(r)
    assert calls == 2 * counted.calls  # it was recomputed
    assert deviation == 0.0 and all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))


def test_a_compiled_denoiser_replays_exactly() -> None:
    r = fresh("flux")
    plain, plain_one, output = gradients(r)[0], gradients(r, steps=[1])[0], r.output
    denoiser = tiny.denoiser_of(r.pipe)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    denoiser.compile(backend="aot_eager")
    try:
        before = copy.copy(vars(denoiser))
        rolled_out(r)
        grads, deviation, _ = gradients(r)
        one, one_deviation, _ = gradients(r, steps=[1])
        # the rollout, its one-sample probe and the gradient: what gerl does around the denoiser is not compiled
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
        assert vars(denoiser) == before
    finally:
        denoiser._compiled_call_impl = None
        torch._dynamo.reset()
    torch.testing.assert_close(r.output, output, rtol=1e-4, atol=1e-4)
    assert deviation == one_deviation == 0.0
    assert distance(grads, plain) < 1e-4 and distance(one, plain_one) < 1e-4


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

    def broken(k: int, step: ReplayedStep) -> None:
        raise KeyError("in the middle")

    with pytest.raises(KeyError):
        replay(r.pipe, r.tape, broken)
    assert attributes(r.pipe) == before

    def out_of_memory(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = tiny.denoiser_of(r.pipe).register_forward_pre_hook(out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        record(r.pipe, r.call, kernel=r.kernel)
    handle.remove()
    assert attributes(r.pipe) == before
    assert torch.is_grad_enabled()


def test_attributes_that_the_user_set_come_back() -> None:
    r = fresh("sd15", guided=False)
    calls = []
    own = functools.partial(lambda f, *a, **k: calls.append(1) or f(*a, **k), r.pipe.unet.forward)
    r.pipe.unet.forward = own
    rolled_out(r)
    assert r.pipe.unet.forward is own and len(calls) == 5  # four steps and the probe
    assert gradients(r)[1] == 0.0
    assert r.pipe.unet.forward is own and len(calls) == 8


# --- pipelines that do something else in the replay


@pytest.fixture
def sd3() -> Iterator[Recorded]:
    """SD3 with a LoRA of its own, for tests that meddle with the pipeline."""
    pipe = tiny.build(tiny.CASES["sd3"])
    call = tiny.call_for(tiny.CASES["sd3"], True)
    yield Recorded(pipe, tiny.add_lora(pipe), call, None, Tape({}, 0), "flow_sde")


Edit = Callable[[Any, int, dict[str, torch.Tensor]], dict[str, torch.Tensor] | None]


def after_each_step(r: Recorded, edit: Edit) -> None:
    """Let `edit(pipe, step, {"latents": ...})` run after each denoising step, as the pipeline's callback."""
    r.call["callback_on_step_end"] = lambda pipe, i, t, values: edit(pipe, i, values) or {}


def test_latents_edited_by_the_pipeline_are_replayed(sd3: Recorded) -> None:
    after_each_step(sd3, lambda pipe, i, values: {"latents": values["latents"].mul_(0.9)})  # in place: not in the tape
    rolled_out(sd3)
    first, second = sd3.tape.steps[:2]
    torch.testing.assert_close(second.x, 0.9 * first.x_next)
    assert gradients(sd3)[1] == 0.0
    assert gradients(sd3, steps=[2])[1] == 0.0
    assert gradients(sd3, index=[1, 2])[1] <= 1e-5


def test_noise_that_the_vae_draws_inline_is_replayed(sd3: Recorded) -> None:
    image = torch.linspace(-1, 1, 16).expand(4, 3, 16, 16)

    def add_encoding(pipe: Any, i: int, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        noisy = pipe.vae.encode(image[: len(values["latents"])]).latent_dist.sample()  # as Flux control does
        return {"latents": values["latents"] + noisy}

    after_each_step(sd3, add_encoding)
    rolled_out(sd3)
    assert gradients(sd3)[1] == 0.0
    assert gradients(sd3, index=[3, 1])[1] <= 1e-5


def test_guidance_with_a_memory_is_replayed(sd3: Recorded) -> None:
    memory: dict[str, Any] = {}

    def momentum(module: Any, args: Any, kwargs: dict[str, torch.Tensor], output: Any) -> Any:
        first = kwargs["timestep"].max() == 1000
        memory["mean"] = output[0] if first else 0.5 * memory["mean"] + 0.5 * output[0]
        return (memory["mean"],)

    sd3.pipe.transformer.register_forward_hook(momentum, with_kwargs=True)  # outside of forward, as a guider is
    rolled_out(sd3)
    grads, deviation, _ = gradients(sd3)
    assert deviation == 0.0 and all(g.abs().sum() > 0 for g in grads)
    late, deviation, _ = gradients(sd3, steps=[2])  # steps 0 and 1 are answered with what they gave
    assert deviation == 0.0 and distance(late, grads) > 0.1
    assert gradients(sd3, steps=[1, 2], index=[3, 1])[1] <= 1e-5


def test_latents_that_do_not_arrive_as_recorded_stop_the_replay(sd3: Recorded) -> None:
    after_each_step(sd3, lambda pipe, i, values: {"latents": values["latents"] + torch.rand(())} if i == 1 else None)
    rolled_out(sd3)
    gradients(sd3, steps=[0, 1])
    with pytest.raises(ReplayError, match="did not arrive at the recorded latents at step 2"):
        gradients(sd3)


def test_a_method_that_the_rollout_did_not_call_stops_the_replay(sd3: Recorded) -> None:
    def encode_again(pipe: Any, i: int, values: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            pipe.encode_prompt("x", None, None)

    after_each_step(sd3, encode_again)
    rolled_out(sd3)
    with pytest.raises(ReplayError, match="the replay calls encode_prompt, which the rollout did not call"):
        gradients(sd3)


def test_another_method_than_in_the_rollout_stops_the_replay(sd3: Recorded) -> None:
    class Reordered(diffusers.StableDiffusion3Pipeline):
        def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
            return super().encode_prompt(*args, **kwargs)

        def _encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
            return super().encode_prompt(*args, **kwargs)

    sd3.pipe = as_class(sd3.pipe, Reordered)
    rolled_out(sd3)
    sd3.tape.answers[0].method = "_encode_prompt"  # as if the rollout had called the older name
    with pytest.raises(ReplayError, match="the replay calls encode_prompt"):
        gradients(sd3)


def test_a_method_that_the_replay_does_not_call_stops_it(sd3: Recorded) -> None:
    def encode_again(pipe: Any, i: int, values: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            pipe.encode_prompt("x", None, None)

    after_each_step(sd3, encode_again)
    rolled_out(sd3)
    with pytest.raises(ReplayError, match="2 answers at step 1, 3 in the rollout"):
        gradients(sd3)


def test_a_denoiser_without_gradient_stops_the_replay(sd3: Recorded) -> None:
    sd3.pipe.transformer.forward = torch.no_grad()(sd3.pipe.transformer.forward)
    rolled_out(sd3)
    with pytest.raises(ReplayError, match="no gradient reaches the model output at step 0"):
        gradients(sd3)
    replay(sd3.pipe, sd3.tape, lambda k, step: None, grad=False)  # a reference pass needs none


def test_nothing_trainable_stops_the_replay(sd3: Recorded) -> None:
    rolled_out(sd3)
    sd3.pipe.transformer.requires_grad_(False)
    with pytest.raises(ReplayError, match="no gradient reaches the model output"):
        gradients(sd3)


def test_fewer_steps_than_recorded_stop_the_replay(sd3: Recorded) -> None:
    def interrupt(pipe: Any, i: int, values: dict[str, Any]) -> None:
        pipe._interrupt = torch.is_grad_enabled() and i == 1

    after_each_step(sd3, interrupt)
    rolled_out(sd3)
    assert len(sd3.tape.steps) == 4
    gradients(sd3, steps=[0, 1])
    with pytest.raises(ReplayError, match="ended before trained step 2: it took fewer steps"):
        gradients(sd3)


def test_another_call_of_the_denoiser_stops_the_replay(sd3: Recorded) -> None:
    def denoise_again(pipe: Any, i: int, values: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            pipe.transformer(values["latents"])

    after_each_step(sd3, denoise_again)
    rolled_out(sd3)
    with pytest.raises(ReplayError, match="the replay calls transformer at step 1, which the rollout did not do"):
        gradients(sd3, steps=[2])


def test_samples_that_depend_on_each_other_show_in_the_ratio(sd3: Recorded) -> None:
    def first_sample_decides(module: Any, args: Any, output: Any) -> Any:
        return (output[0] + output[0][:1],)  # as OmniGen's rotary table does

    sd3.pipe.transformer.register_forward_hook(first_sample_decides)
    rolled_out(sd3)
    assert gradients(sd3)[1] == 0.0
    assert gradients(sd3, index=[2, 3])[1] > 1e-3  # what actor.max_ratio_deviation stops


# --- calls that cannot work


@pytest.mark.parametrize(
    "scheduler",
    [diffusers.EulerDiscreteScheduler, diffusers.PNDMScheduler, diffusers.DPMSolverMultistepScheduler],
)
def test_a_scheduler_without_kernel_is_refused(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    r = recorded("sd15", False)
    monkeypatch.setattr(r.pipe, "scheduler", scheduler.from_config(r.pipe.scheduler.config))
    with pytest.raises(ModelError, match=rf"scheduler is {scheduler.__name__}, which has no transition kernel"):
        record(r.pipe, r.call, kernel="ddim")


def test_a_kernel_of_flow_matching_is_refused_for_ddim() -> None:
    r = recorded("sd15", False)
    with pytest.raises(ModelError, match=r"sampling\.kernel=flow_sde is for flow matching"):
        record(r.pipe, r.call, kernel="flow_sde")


@pytest.mark.parametrize("config", [{"thresholding": True}, {"rescale_betas_zero_snr": True}])
def test_variants_of_ddim_without_kernel_are_refused(config: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    r = recorded("sd15", False)
    monkeypatch.setattr(r.pipe, "scheduler", diffusers.DDIMScheduler.from_config(r.pipe.scheduler.config, **config))
    with pytest.raises(ModelError, match="has no transition kernel"):
        record(r.pipe, r.call, kernel="ddim")


def test_a_scheduler_that_adds_noise_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    r = recorded("sd3", False)
    monkeypatch.setattr(r.pipe, "scheduler", tiny.euler(stochastic_sampling=True))
    with pytest.raises(ModelError, match="stochastic_sampling"):
        record(r.pipe, r.call)


@pytest.mark.parametrize("name", ["sd3", "sd15"])
def test_windows_that_cannot_be(name: str) -> None:
    r = recorded(name, False)
    with pytest.raises(ModelError, match="the last denoising step is deterministic and has no log-probability"):
        record(r.pipe, r.call, kernel=r.kernel, window=[2, 3])
    with pytest.raises(ModelError, match=r"the window names steps \[1, 7\], but the pipeline took 4 steps"):
        record(r.pipe, r.call, kernel=r.kernel, window=[1, 7])


def test_generators_are_one_per_sample() -> None:
    r = recorded("sd3", False)
    with pytest.raises(ValueError, match="3 generators for 4 samples"):
        record(r.pipe, r.call, generators=tiny.generators(3))


def test_a_single_string_is_no_batch() -> None:
    r = recorded("sd3", False)
    with pytest.raises(ReplayError, match="one prompt per sample"):
        record(r.pipe, {**r.call, "prompt": "a cat"})


def test_replays_that_cannot_be() -> None:
    r = recorded("sd3", False)
    _, tape = record(r.pipe, r.call, generators=tiny.generators(), probe=False)
    with pytest.raises(ReplayError, match="recorded with probe=True"):
        gradients(r, tape, index=[0, 1])
    assert gradients(r, tape)[1] == 0.0
    with pytest.raises(ReplayError, match=r"steps \[1, 9\] cannot be replayed: the tape has 4 steps"):
        gradients(r, steps=[1, 9])
    _, ode = record(r.pipe, r.call, noise_level=0.0, generators=tiny.generators())
    with pytest.raises(ReplayError, match=r"steps \[\] cannot be replayed"):
        gradients(r, ode)
    with pytest.raises(ReplayError, match="only stochastic steps"):
        replay(r.pipe, r.tape, lambda k, step: step.log_prob.sum(), steps=[3])


def test_sigma_and_std_of_a_replayed_step_are_those_of_the_schedule() -> None:
    r = recorded("sd3", False)
    sigmas = r.pipe.scheduler.sigmas.tolist()
    seen: list[tuple[float, float, float]] = []
    replay(r.pipe, r.tape, lambda k, step: seen.append((step.sigma, step.sigma_next, step.std)), grad=False)
    assert [s[:2] for s in seen] == list(itertools.pairwise(sigmas[:4]))
    regular = [sigmas[1], *sigmas[1:3]]  # the first sigma is 1, where s / (1 - s) is infinite
    expected = [
        NOISE * math.sqrt(a / (1 - s)) * math.sqrt(a - b) for s, a, b in zip(regular, sigmas, sigmas[1:], strict=False)
    ]
    assert [s[2] for s in seen] == pytest.approx(expected)

"""Replay: ratio 1, the gradient of a loop written by hand, other latents, and how the denoiser is run."""

import copy
from collections.abc import Sequence

import pytest
import tiny
import torch
from replaying import (
    EACH,
    GUIDED,
    NOISE,
    WEIGHTS,
    all_equal,
    counted_rows,
    distance,
    fresh,
    gradients,
    recorded,
    replayed,
    rolled_out,
    squares,
)

from gerl.engine import replay
from gerl.engine.batching import select_call
from gerl.errors import ReplayError

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
    with counted_rows(r.pipe) as rows:
        gradients(r, steps=[0, 1, 2])
        a_step = rows.total() // 3
        rows.clear()
        one, deviation, seen = gradients(r, steps=[1])
        assert rows.total() == a_step > 0
    assert (deviation, seen) == (0.0, [1]) and all(g.abs().sum() > 0 for g in one)
    parts = [gradients(r, steps=[k])[0] for k in (0, 2)]
    summed = [a + b + c for a, b, c in zip(one, *parts, strict=True)]
    assert distance(summed, gradients(r)[0]) < 1e-5

    _, tape = r.record(window=[1, 2])
    assert tape.stochastic_steps == [1, 2] and tape.steps[0].rule.std == 0 and tape.steps[0].log_prob is None
    grads, deviation, seen = gradients(r, tape)
    assert (deviation, seen) == (0.0, [1, 2]) and all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in grads)
    assert gradients(r, tape, index=[1])[1] <= 1e-5


def test_a_deterministic_step_has_neither_a_recorded_mean_nor_a_log_prob() -> None:
    step = replayed(recorded("flux", False), steps=[3])[0][3]
    assert step.recorded_mean is None and step.recorded_log_prob is None


def test_a_probe_of_an_earlier_call_serves_again() -> None:
    r = recorded("qwen_image", True)
    call = {**r.call, "prompt": ["much longer words", "b", "c c c", "dd"]}
    _, tape = r.record(call, generators=tiny.generators(seed=3), probe=r.tape.probe)
    assert tape.probe is r.tape.probe
    assert gradients(r, tape, index=[1, 3])[1] <= 1e-5


def test_a_batch_of_one_needs_no_probe() -> None:
    r = recorded("flux", True)
    _, tape = r.record(select_call(r.call, [2]))
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
    trained, plain = replayed(r, loss=lambda step: step.mean.sum())[0], replayed(r)[0]
    assert list(trained) == list(plain) == [0, 1, 2] and torch.is_grad_enabled()
    assert all_equal([step.mean for step in trained.values()], [step.mean for step in plain.values()])
    assert {v.dtype for step in trained.values() for v in (step.model_output, step.mean)} == {torch.float32}
    replay(r.pipe, r.tape, lambda k, step: None)
    assert all(p.grad is None for p in r.parameters)  # no loss was returned


@EACH
def test_text_encoders_are_not_needed_for_a_replay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    r = recorded(name, True)
    full, _, _ = gradients(r)
    for key in [key for key in r.pipe.components if key.startswith("text_encoder")]:
        monkeypatch.setattr(r.pipe, key, None)
    assert r.pipe.text_encoder is None
    without, deviation, _ = gradients(r)
    assert deviation == 0.0 and all_equal(without, full)
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
    same = {k: r.tape.steps[k].x for k in (0, 1, 3)}
    other = {k: torch.randn(x.shape, generator=torch.Generator().manual_seed(k)) for k, x in same.items()}
    outputs, grads = {}, {}
    for label, given in (("recorded", {}), ("same", same), ("other", other)):
        steps, grads[label] = replayed(r, None, squares, steps=[0, 1, 3], latents=given)
        outputs[label] = [step.model_output for step in steps.values()]
        assert all(g.abs().sum() > 0 for g in grads[label])
        for k, x in given.items():
            assert torch.equal(steps[k].x, x)
            assert steps[k].x_next is None and steps[k].recorded_log_prob is None and steps[k].recorded_mean is None
            with pytest.raises(ReplayError, match="log-probability"):
                _ = steps[k].log_prob
            torch.testing.assert_close(steps[k].mean, r.tape.steps[k].rule.mean(x, steps[k].model_output))
    assert all_equal(outputs["same"], outputs["recorded"]) and all_equal(grads["same"], grads["recorded"])
    assert not any(torch.allclose(a, b) for a, b in zip(outputs["other"], outputs["recorded"], strict=True))


def test_the_denoiser_sees_the_given_latents() -> None:
    r = recorded("sd3", True)
    seen: list[dict[str, torch.Tensor]] = []
    given = {k: torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(k)) for k in (0, 2)}
    with r.pipe.transformer.register_forward_pre_hook(lambda *args: seen.append(args[-1]), with_kwargs=True):
        steps, _ = replayed(r, loss=lambda step: step.mean.sum(), steps=[0, 2], index=[3, 0], latents=given)
    rows = [given[0], r.tape.steps[1].x[[3, 0]], given[2]]
    assert [torch.equal(s["hidden_states"], torch.cat([x, x])) for s, x in zip(seen, rows, strict=True)] == [True] * 3
    for k in (0, 2):
        with torch.no_grad():
            without, prompt = r.pipe.transformer(**seen[k])[0].chunk(2)
        assert torch.equal(steps[k].model_output, without + r.call["guidance_scale"] * (prompt - without))


# --- how the denoiser is run


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

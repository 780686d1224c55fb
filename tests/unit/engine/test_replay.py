"""Replay: ratio 1, the gradient of a loop written by hand, other latents, and how the denoiser is run."""

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import tiny
import torch
from drills import more
from hypothesis import given
from newer import needs
from replaying import (
    EACH,
    GUIDED,
    NOISE,
    WEIGHTS,
    Recorded,
    all_equal,
    counted_rows,
    distance,
    fresh,
    gradients,
    own,
    randomise,
    recorded,
    replayed,
    rolled_out,
    squares,
    with_controlnet,
)
from torch.utils._pytree import tree_leaves
from zoo import checks
from zoo.entries import BY_NAME

from gerl.engine import RequiredTensors, backprop_step, branch, compact, decoded, record, replay
from gerl.engine.replay import first_of_duplicates, loss_scale, unscaled
from gerl.engine.rows import select_call
from gerl.engine.tape import Tape
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


@needs("diffusers", "0.37", "takes the length of Qwen-Image's texts from the rows that are replayed")
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
    for label, start in (("recorded", {}), ("same", same), ("other", other)):
        steps, grads[label] = replayed(r, None, squares, steps=[0, 1, 3], latents=start)
        outputs[label] = [step.model_output for step in steps.values()]
        assert all(g.abs().sum() > 0 for g in grads[label])
        for k, x in start.items():
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


@more
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


CHILDREN = [2, 0, 2, 3, 0, 2]  # of three parents
ALIKE_WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 0.25])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_the_first_row_of_each_kind_is_found(kinds: list[int]) -> None:
    rows = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    rows[1] = rows[0]
    rows[1, 2, 4, 3] += 1e-3  # where no key looks
    found = first_of_duplicates(rows[kinds])
    assert [kinds[i] for i in found] == kinds
    assert all(i == kinds.index(kinds[i]) or kinds[i] in (0, 1) for i in found)


def branched(r: Recorded, step: int) -> Tape:
    """Children that part at `step`, each with noise of its own from there on."""
    generators = [torch.Generator().manual_seed(100 + i) for i in range(len(CHILDREN))]
    return r.branch(r.tape, step, CHILDREN, generators=generators)[1]


def one_by_one(r: Recorded, tape: Tape, **options: Any) -> list[torch.Tensor]:
    """The gradient of all children, each replayed by itself."""
    total = [torch.zeros_like(p) for p in r.parameters]
    for i in range(tape.batch_size):
        grads = weighted(r, tape, [i], **options)
        total = [a + b for a, b in zip(total, grads, strict=True)]
    return total


def weighted(r: Recorded, tape: Tape, index: list[int] | None = None, **options: Any) -> list[torch.Tensor]:
    weights = ALIKE_WEIGHTS[index] if index else ALIKE_WEIGHTS
    return replayed(r, tape, lambda step: (weights * step.log_prob).sum(), index=index, **options)[1]


@EACH
@GUIDED
def test_children_of_one_parent_run_as_one_row_where_they_part(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    tape = branched(r, 1)
    with counted_rows(r.pipe) as rows:
        whole = weighted(r, tape, steps=[1, 2])
    assert rows.total() in [m * (len(set(CHILDREN)) + len(CHILDREN)) for m in (1, 2)]  # with guidance twice as many
    assert distance(whole, one_by_one(r, tape, steps=[1, 2])) < 1e-4


@GUIDED
def test_samples_at_the_same_given_latents_run_as_one_row(guided: bool) -> None:
    r = recorded("sd3", guided)
    tape = branched(r, 1)
    x = tape.steps[0].x
    given = {
        0: torch.randn(x.shape, generator=torch.Generator().manual_seed(0))[CHILDREN],  # equal where the prompt is
        1: torch.randn(x.shape, generator=torch.Generator().manual_seed(1)),
    }

    def gradient(index: list[int]) -> list[torch.Tensor]:
        latents = {k: values[index] for k, values in given.items()}
        weights = ALIKE_WEIGHTS[index]
        loss = lambda step: (weights * step.model_output.flatten(1).sum(1)).sum()  # noqa: E731
        return replayed(r, tape, loss, index=index, steps=[0, 1], latents=latents)[1]

    everything = list(range(len(CHILDREN)))
    with counted_rows(r.pipe) as rows:
        whole = gradient(everything)
    assert rows.total() in [m * (len(set(CHILDREN)) + len(CHILDREN)) for m in (1, 2)]  # with guidance twice as many
    total = [sum(parts) for parts in zip(*(gradient([i]) for i in everything), strict=True)]
    assert distance(whole, total) < 1e-4


def test_on_policy_the_ratio_at_the_common_step_is_one_to_the_bit() -> None:
    r = fresh("sd3")
    first = [torch.Generator().manual_seed(7) for _ in range(4)]
    call = {**r.call, "prompt": [r.call["prompt"][0]] * 4}
    _, common = r.record({**call, "prompt": call["prompt"][:1]}, window=[], stop=1, init_generators=first[:1])
    common.probe = r.tape.probe if common.probe is None else common.probe
    generators = [torch.Generator().manual_seed(i) for i in range(4)]
    _, tape = r.branch(common, 1, [0, 0, 0, 0], generators=generators)
    assert gradients(r, tape, steps=[1])[1] == 0.0  # recorded with one row, and replayed with one


def test_samples_that_differ_in_their_prompt_are_not_alike() -> None:
    r = fresh("sd3", guided=False)
    assert len(set(r.call["prompt"])) == 4
    same = [torch.Generator().manual_seed(7) for _ in range(4)]
    _, tape = r.record(init_generators=same)
    assert first_of_duplicates(tape.steps[0].x) == [0, 0, 0, 0]
    with counted_rows(r.pipe) as rows:
        whole = gradients(r, tape, steps=[0])[0]
    assert rows == Counter({True: 4})
    total = [torch.zeros_like(p) for p in r.parameters]
    for i in range(4):
        total = [a + b for a, b in zip(total, gradients(r, tape, steps=[0], index=[i])[0], strict=True)]
    assert distance(whole, total) < 1e-4


@pytest.mark.parametrize("cfg", ["joint", "detach_uncond", "off"])
def test_with_every_way_of_guidance_the_gradient_is_that_of_each_child(cfg: str) -> None:
    r = recorded("sd3", True)
    tape = branched(r, 1)
    with counted_rows(r.pipe) as rows:
        weighted(r, tape, steps=[1, 2], cfg=cfg)
    halves = 1 if cfg == "off" else 2
    assert rows.total() == halves * (len(set(CHILDREN)) + len(CHILDREN))
    assert distance(weighted(r, tape, steps=[1, 2], cfg=cfg), one_by_one(r, tape, steps=[1, 2], cfg=cfg)) < 1e-4


def test_the_reference_pass_is_spared_too() -> None:
    r = recorded("sd3", False)
    tape = branched(r, 1)
    with counted_rows(r.pipe) as rows:
        replay(r.pipe, tape, lambda k, step: None, steps=[1], grad=False)
    assert rows == Counter({False: len(set(CHILDREN))})


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
    kept = compact(r.tape, RequiredTensors(frozenset({0, 2}), means=False, outputs=False))
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
        found = backprop_step(r.pipe, tape, k, lambda step: step.mean, gradient, cfg=cfg, carry=k > last - steps + 1)
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
    lean_tape = compact(tape, RequiredTensors(frozenset(range(6)), means=False, outputs=False, chain=True))

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
    found = backprop_step(r.pipe, tape, 2, lambda step: step.mean, gradient, carry=True)
    assert found is not None
    assert all(part[..., :4].abs().max() == 0 for part in (found.direct, found.through))
    measured, exact = slope(r, lambda: float(seen(drawn(r, ())[0]).double().sum()), chained(r, tape, 3))
    assert exact == pytest.approx(measured, rel=0.02, abs=0.05)  # of sums in fp32


def test_two_steps_that_share_a_denoiser_call_are_refused() -> None:
    r = pipeline("sd3")
    _, tape = drawn(r, ())
    calls = [c for c in tape.component_calls if c.step != 2]
    shared = replace(tape, component_calls=calls)
    with pytest.raises(ReplayError, match="the denoiser call of step 2 is reused by the previous step"):
        backprop_step(r.pipe, shared, 2, lambda step: step.mean, tape.steps[2].x, carry=True)


def test_a_lean_tape_serves_any_of_its_steps() -> None:
    r = pipeline("wan")
    _, tape = drawn(r, ())
    kept = compact(tape, RequiredTensors(frozenset({0, 2}), means=False, outputs=False, chain=True))
    for k in (2, 0):
        one, other = (backprop_step(r.pipe, t, k, lambda step: step.mean, tape.steps[k].x) for t in (tape, kept))
        assert one is other is None
    with pytest.raises(ReplayError, match="kept for steps"):
        backprop_step(r.pipe, kept, 1, lambda step: step.mean, tape.steps[1].x)


# each image's loss is divided by the (image, step) pairs of an update, 96 x 9, and each latent's by those of an image
PAIRS, LATENTS = 96 * 9, 16 * 64 * 64
PRECISIONS = {torch.float16: 0.999, torch.bfloat16: 0.99}  # and how far the gradient points where fp32's does


def pipeline_of_loss_scale(dtype: torch.dtype) -> tuple[Any, list[torch.nn.Parameter]]:
    pipe = tiny.build(tiny.CASES["sd3"])
    parameters = tiny.add_lora(pipe)
    pipe.to(dtype)
    for p in parameters:
        p.data = p.data.float()
    return pipe, parameters


@pytest.fixture(scope="module")
def tape() -> Tape:
    call = tiny.call_for(tiny.CASES["sd3"], guided=True)
    # older torch, such as 2.11, draws other numbers in half precision than in fp32 on CPUs
    call["latents"] = torch.randn(len(call["prompt"]), 4, 8, 8, generator=torch.Generator().manual_seed(5))
    return record(pipeline_of_loss_scale(torch.float32)[0], call, window=[1, 2], generators=tiny.generators())[1]


def share(tape: Tape) -> float:
    return tape.steps[0].x[0].numel() / LATENTS / PAIRS


def policy_gradient(pipe: Any, tape: Tape, **options: Any) -> None:
    signs = torch.tensor([1.0, -1.0, 0.5, -0.5])
    replay(pipe, tape, lambda k, s: -(signs * s.log_prob).sum() * share(tape), **options)


def noised(pipe: Any, tape: Tape) -> None:
    given = {1: torch.randn(tape.steps[1].x.shape, generator=torch.Generator().manual_seed(3))}
    replay(pipe, tape, lambda k, s: s.model_output.square().mean() * share(tape), steps=[1], latents=given)


def reward_gradient(pipe: Any, tape: Tape) -> torch.Tensor:
    gradient = torch.randn(tape.steps[2].x.shape, generator=torch.Generator().manual_seed(4)) / LATENTS / PAIRS
    found = backprop_step(pipe, tape, 2, lambda step: step.mean, gradient, carry=True)
    assert found is not None
    return torch.cat([found.direct.flatten(), found.through.flatten()])


WAYS = {
    "policy gradient": policy_gradient,
    "several steps in one pass": lambda pipe, tape: policy_gradient(pipe, tape, step_batch=2),
    "without the unconditional half": lambda pipe, tape: policy_gradient(pipe, tape, cfg="detach_uncond"),
    "noised images": noised,
    "reward gradient": reward_gradient,
}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_that_of_fp32(tape: Tape, way: str, dtype: torch.dtype) -> None:
    found = []
    for precision in (torch.float32, dtype):
        pipe, parameters = pipeline_of_loss_scale(precision)
        if precision != torch.float32:
            tape = in_precision(tape, pipe)
        latents = WAYS[way](pipe, tape)
        gradient = [p.grad.flatten() for p in parameters if p.grad is not None]
        found.append(torch.cat([*gradient, *([] if latents is None else [latents * share(tape)])]))
    assert torch.nn.functional.cosine_similarity(*found, 0) > PRECISIONS[dtype]
    assert float(found[1].norm() / found[0].norm()) == pytest.approx(1, abs=0.02)
    assert (found[1] == 0).float().mean() < 0.05 + (found[0] == 0).float().mean()


def in_precision(tape: Tape, pipe: Any) -> Tape:
    """The call of `tape` in the precision of `pipe`, with its trajectory."""
    return record(pipe, copy.deepcopy(tape.call), window=[1, 2], generators=tiny.generators())[1]


def test_gradients_add_up_to_those_that_were_there(tape: Tape) -> None:
    pipe, parameters = pipeline_of_loss_scale(torch.float16)
    again = in_precision(tape, pipe)
    policy_gradient(pipe, again)
    once = [p.grad.clone() for p in parameters if p.grad is not None]
    policy_gradient(pipe, again)
    for p, first in zip((p for p in parameters if p.grad is not None), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * first, rtol=1e-5, atol=0)


def test_the_scale_is_a_power_of_two_that_brings_the_largest_below_one() -> None:
    output = torch.tensor([1.0, -3.0], requires_grad=True)
    for factor in (1e-9, 1e-3, 1.0, 5e4, 1e-42):
        scale = loss_scale((output * torch.tensor([factor, -2 * factor])).sum(), output)
        assert math.frexp(scale)[0] == 0.5 and 2 * factor * scale < 1
        assert 2 * factor * scale >= 0.5 or factor == 1e-42
    assert loss_scale((output * 0).sum(), output) == 1.0
    assert loss_scale((output * math.inf).sum(), output) == 1.0
    with unscaled([output], torch.tensor(8.0)):
        (output * 8.0).sum().backward()
    assert output.grad is not None and output.grad.tolist() == [1.0, 1.0]


# who computes the branch without gradient: in eval mode, always, or in eval mode with another result
Kind = str


class Experts(torch.nn.Module):
    """A feed-forward network that computes in eval mode under `no_grad`, as HiDream's mixture of experts does."""

    def __init__(self, inner: torch.nn.Module, kind: Kind) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind
        self.dropout = torch.nn.Dropout(0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.kind != "always":
            return x + self.dropout(self.inner(x)) * (2 if self.kind == "different" else 1)
        with torch.no_grad():
            inner = self.inner(x)
        return x + inner


def with_experts(kind: Kind, trained: bool) -> Recorded:
    r = own("sd3")
    block = r.pipe.transformer.transformer_blocks[0]
    block.ff = Experts(block.ff, kind).eval()
    if trained:
        r.parameters += [p.requires_grad_() for p in block.ff.parameters()]
    return rolled_out(r)


@pytest.mark.parametrize("trained", [True, False])
def test_the_gradient_goes_through_the_inference_branch(trained: bool) -> None:
    differentiable, r = with_experts("in eval", trained=True), with_experts("in eval", trained)
    differentiable.pipe.transformer.transformer_blocks[0].ff.training = True  # with gradient throughout
    expected = gradients(differentiable)[0][: len(r.parameters)]
    for _ in range(2):  # found at the first replay, known at the second
        grads, deviation, _ = gradients(r)
        assert deviation == 0.0
        assert distance(grads, expected) == 0.0
        assert not r.pipe.transformer.transformer_blocks[0].ff.training
    sub, deviation, _ = gradients(r, index=[3, 1], cfg="detach_uncond")
    assert deviation <= 1e-5 and all(torch.isfinite(g).all() for g in sub)


@pytest.mark.parametrize("trained", [True, False])
def test_a_branch_that_never_has_a_gradient_is_named(trained: bool) -> None:
    r = with_experts("always", trained)
    name = r"transformer_blocks\.0\.ff \(Experts\) runs transformer_blocks\.0\.ff\.inner without gradient"
    for _ in range(2):
        with pytest.raises(ReplayError, match=f"{name}, even in training mode: the gradient would be wrong"):
            gradients(r)
    assert not r.pipe.transformer.transformer_blocks[0].ff.training


def test_a_training_mode_with_other_numbers_is_refused() -> None:
    r = with_experts("different", trained=True)
    with pytest.raises(ReplayError, match=r"\(Experts\) .* and differs numerically in training mode"):
        gradients(r)
    assert not r.pipe.transformer.transformer_blocks[0].ff.training


def test_a_part_that_needs_no_gradient_may_go_without() -> None:
    r = with_experts("in eval", trained=False)
    transformer: Any = r.pipe.transformer
    embed = transformer.time_text_embed  # frozen, and so is all that goes into it
    embed.forward = torch.no_grad()(embed.forward)
    assert gradients(rolled_out(r))[1] == 0.0


def test_a_cache_of_an_earlier_step_is_neither_branched_from_nor_trained_in_fp16() -> None:
    entry = BY_NAME["Flux2KleinKVPipeline-editing"]
    pipe, _ = checks.build(entry)
    call = checks.call_for(entry, pipe, guided=False)
    _, tape = record(pipe, call, generators=tiny.generators(entry.batch))
    assert tape.filling_steps == {0} and tape.live_at([1]) == {0, 1}
    assert not any(torch.is_tensor(v) and not v.is_meta for c in tape.component_calls for v in tree_leaves(c.inputs))
    _, shared = record(pipe, call, generators=tiny.generators(entry.batch), stop=0)
    for parents, fork in ((tape, 1), (shared, 0)):
        with pytest.raises(ReplayError, match="fills a cache that later steps read"):
            branch(pipe, parents, fork, [0, 1])
    pipe.to(torch.float16)
    _, tape = record(pipe, call, generators=tiny.generators(entry.batch))
    with pytest.raises(ReplayError, match="bfloat16"):
        replay(pipe, tape, lambda k, step: step.log_prob.sum())


def test_both_parts_of_a_gradient_of_latents_are_free_of_the_loss_scale(tape: Tape) -> None:
    pipes = [pipeline_of_loss_scale(dtype)[0] for dtype in (torch.float32, torch.float16)]
    exact, scaled = (reward_gradient(pipe, in_precision(tape, pipe)).chunk(2) for pipe in pipes)
    for part, expected in zip(scaled, exact, strict=True):
        assert float(part.norm() / expected.norm()) == pytest.approx(1, abs=0.02)

"""Branch: the same as a recording of its own, at the cost of what is new, and replayed as any tape."""

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import tiny
import torch
from replaying import (
    EACH,
    GUIDED,
    after_each_step,
    as_class,
    counted_rows,
    deviation,
    fresh,
    gradients,
    own,
    recorded,
    with_controlnet,
)
from torch.utils._pytree import tree_leaves
from zoo import conditioned
from zoo.checks import build, call_for

from gerl.engine import Tape, replay
from gerl.engine import branch as branch_function
from gerl.engine import record as record_function
from gerl.engine.batching import select_call
from gerl.errors import ModelError, ReplayError

INDEX = [2, 0, 2, 3, 1, 2]  # children: parents in another order, some more than once


def same_rollout(images: Any, tape: Tape, others: Any, twin: Tape, exact: bool = True) -> None:
    """Two recordings agree in all that a replay or a reward sees."""
    limits = {"atol": 0.0, "rtol": 0.0} if exact else {"atol": 2e-5, "rtol": 2e-5}
    torch.testing.assert_close(images, others, **limits)
    assert tape.call["prompt"] == twin.call["prompt"] and list(tape.call) == list(twin.call)
    assert tape.batch_size == twin.batch_size and tape.stochastic_steps == twin.stochastic_steps
    steps, twins = ([(s.rule, s.num_answers) for s in t.steps] for t in (tape, twin))
    assert steps == twins
    latents, others = ([[s.x, s.x_next, s.log_prob, s.mean] for s in t.steps] for t in (tape, twin))
    torch.testing.assert_close(latents, others, **limits)
    calls, twins = ([(c.step, c.component) for c in t.component_calls] for t in (tape, twin))
    assert calls == twins and [a.method for a in tape.answers] == [a.method for a in twin.answers]


# --- a branch is a recording


@EACH
@GUIDED
def test_a_branch_of_a_deterministic_recording_is_one_with_noise_at_that_step(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    _, parent = r.record(window=[], generators=tiny.generators(seed=5))
    with counted_rows(r.pipe) as rows:
        r.record(window=[], probe=False, stop=0)
        a_step = rows.total()
        rows.clear()
        images, tape = r.branch(parent, 1, range(4), window=[1], generators=tiny.generators())
        assert rows.total() == 2 * a_step  # steps 2 and 3
    twin = r.record(window=[1], init_generators=tiny.generators(seed=5), probe=False)
    same_rollout(images, tape, *twin)
    grads, off, seen = gradients(r, tape)
    assert (off, seen) == (0.0, [1]) and any(g.abs().sum() > 0 for g in grads)
    assert deviation(r, tape, index=[3, 1]) <= 1e-5


@EACH
@GUIDED
def test_children_of_picked_parents_are_recordings_of_their_prompts(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    parent = r.tape  # with noise at steps 0, 1 and 2
    images, tape = r.branch(parent, 2, INDEX, window=[2], generators=tiny.generators(6, seed=9))
    assert tape.call["prompt"] == [tiny.PROMPTS[i] for i in INDEX] and tape.stochastic_steps == [0, 1, 2]
    for k in (0, 1):
        kept, step = parent.steps[k], tape.steps[k]
        for field in ("x", "x_next", "log_prob", "mean"):
            assert torch.equal(getattr(step, field), getattr(kept, field)[INDEX])
    forked = tape.steps[2]
    assert torch.equal(forked.x, parent.steps[2].x[INDEX])
    torch.testing.assert_close(forked.mean, parent.steps[2].mean[INDEX], atol=1e-6, rtol=1e-6)
    noise = torch.stack([torch.randn(forked.x[0].shape, generator=g) for g in tiny.generators(6, seed=9)])
    assert torch.equal(forked.x_next, forked.mean + forked.rule.std * noise)
    assert len(images) == 6 and not torch.equal(images[0], images[2])
    assert deviation(r, tape) <= 1e-5 and deviation(r, tape, index=[5, 2], steps=[2]) <= 1e-5


@EACH
@GUIDED
def test_a_tree_that_goes_on_with_the_same_generators_is_one_recording(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    gens, everybody = tiny.generators(), range(4)
    with counted_rows(r.pipe) as rows:
        _, trunk = r.record(generators=gens, stop=1, probe=r.tape.probe)
        a_step = rows.total() // 2  # steps 0 and 1
        rows.clear()
        images, boughs = r.branch(trunk, 1, everybody, generators=gens, stop=2)
        assert images is None and len(boughs.steps) == 2
        images, leaves = r.branch(boughs, 2, everybody, generators=gens)
        assert rows.total() == 2 * a_step  # steps 2 and 3: the trunk made the others
    same_rollout(images, leaves, r.output, r.tape)
    assert gradients(r, leaves)[1] == 0.0 and deviation(r, leaves, index=[1]) <= 1e-5


@EACH
def test_a_tree_of_two_levels_from_the_first_step(name: str) -> None:
    r = recorded(name, True)
    with counted_rows(r.pipe) as rows:
        _, root = r.record(stop=0, probe=r.tape.probe)
        a_sample = rows.total() // 4
        rows.clear()
        assert root.steps == []
        _, two = r.branch(root, 0, [1, 1, 3], window=[0], generators=tiny.generators(3), stop=2)
        assert rows.total() == 2 * 3 * a_sample
        rows.clear()
        images, leaves = r.branch(two, 2, [0, 0, 2, 1], window=[2], generators=tiny.generators(4, 1))
        assert rows.total() == 4 * a_sample
    assert leaves.call["prompt"] == [tiny.PROMPTS[i] for i in (1, 1, 3, 1)]
    assert leaves.stochastic_steps == [0, 2] and len(images) == 4
    x = leaves.steps[1].x
    assert torch.equal(x[0], x[1]) and not torch.equal(x[0], x[3])  # brothers, cousins
    assert torch.equal(leaves.steps[0].x[0], leaves.steps[0].x[3])
    assert deviation(r, leaves) <= 1e-5 and deviation(r, leaves, index=[3, 0]) <= 1e-5


@pytest.mark.parametrize("name", ["sd3", "z_image", "qwen_image", "sd15"])
def test_children_of_a_single_sample(name: str) -> None:
    r = recorded(name, True)
    one = select_call(r.call, [2])
    _, parent = r.record(one, window=[])
    for step in (0, 2):
        drawn: dict[str, Any] = {"window": [step], "generators": tiny.generators(3, seed=2)}
        images, tape = r.branch(parent, step, [0, 0, 0], **drawn)
        drawn["generators"] = tiny.generators(3, seed=2)
        same = [torch.Generator().manual_seed(0) for _ in range(3)]
        twin = r.record(select_call(one, [0, 0, 0]), init_generators=same, probe=False, **drawn)
        same_rollout(images, tape, *twin, exact=False)
        assert tape.probe is not None and tape.probe.batch_size == 1
        assert deviation(r, tape) <= 1e-5 and deviation(r, tape, index=[2, 0]) <= 1e-5
    only, again = r.branch(tape, 2, [1], window=[])
    _, thrice = r.branch(again, 2, [0, 0], window=[2])
    assert len(only) == 1 and deviation(r, thrice) <= 1e-5


def test_the_arguments_of_a_single_sample_are_repeated() -> None:
    call = select_call({"prompt": ["a"], "image": torch.ones(1, 3), "sigmas": [1.0]}, [0, 0])
    assert call["prompt"] == ["a", "a"] and call["image"].shape == (2, 3) and call["sigmas"] == [1.0]


def test_a_probe_that_is_missing_is_made_once() -> None:
    r = recorded("sd3", True)
    _, parent = r.record(probe=False)
    r.branch(parent, 1, range(4))
    assert parent.probe is None  # not needed
    r.branch(parent, 1, [3, 3])
    probe = parent.probe
    _, tape = r.branch(parent, 1, [1, 1])
    assert probe is not None and parent.probe is probe and tape.probe is probe


@pytest.mark.parametrize(("solver", "compression"), [("dpm2", 1.0), ("euler", 0.5), ("dpm2", 0.5)])
def test_solver_and_compression_of_a_branch_are_those_of_a_recording(solver: str, compression: float) -> None:
    r, call = recorded("flux", True), tiny.call_for(tiny.CASES["flux"], True, steps=8)
    taken: dict[str, Any] = {"solver": solver, "compression": compression}
    _, parent = r.record(call, window=[], stop=2, **taken)
    assert torch.equal(parent.steps[0].x, r.tape.steps[0].x)
    first, again = tiny.generators(seed=1), tiny.generators(seed=1)
    branched = r.branch(parent, 2, range(4), window=[3], generators=first, **taken)
    twin = r.record(call, window=[3], generators=again, init_generators=tiny.generators(), probe=False, **taken)
    same_rollout(*branched, *twin)  # step 2 of dpm2 looks back at step 1, which was not taken again
    assert gradients(r, branched[1])[1] == 0.0


@pytest.mark.parametrize("name", ["sd3", "sd15"])
def test_a_branch_in_half_precision(name: str) -> None:
    r = fresh(name, dtype=torch.bfloat16)
    images, tape = r.branch(r.tape, 1, range(4), window=[1], generators=tiny.generators())
    assert all(torch.equal(a.x_next, b.x) for a, b in zip(tape.steps, tape.steps[1:], strict=False))
    assert not torch.equal(tape.steps[0].x_next, tape.steps[0].x_next.bfloat16().float())
    assert gradients(r, tape)[1] == 0.0 and images.dtype == torch.bfloat16


def test_without_generators_the_global_one_is_used() -> None:
    r = recorded("sd3", False)
    ends = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        ends.append(r.branch(r.tape, 1, range(4))[0])
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])


# --- pipelines that do more


def test_methods_called_after_the_branching_step_run() -> None:
    r = own()
    after_each_step(r, lambda pipe, i, values: pipe.encode_prompt([f"step {i}"], None, None) and None)
    _, parent = r.record()
    _, tape = r.branch(parent, 1, INDEX)
    assert [a.method for a in tape.answers] == [a.method for a in parent.answers]
    assert [s.num_answers for s in tape.steps] == [s.num_answers for s in parent.steps]
    late = [tree_leaves(t.answers[-1].value)[0] for t in (tape, parent)]
    assert torch.equal(*late) and deviation(r, tape) <= 1e-5


def test_latents_that_the_pipeline_edits_stay_edited() -> None:
    r, gens = own(), tiny.generators()
    after_each_step(r, lambda pipe, i, values: {"latents": 0.9 * values["latents"]})
    _, trunk = r.record(generators=gens, stop=2)
    same_rollout(*r.branch(trunk, 2, range(4), generators=gens), *r.record())


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda pipe, x: pipe.encode_prompt("x", None, None) and None, "branch calls encode_prompt"),
        (lambda pipe, x: [pipe.transformer(x) for _ in range(2)] and None, "branch calls transformer at step 1"),
        (lambda pipe, x: {"latents": x + 1}, r"recorded latents at step 1.* branched"),
    ],
)
def test_another_call_than_in_the_recording_stops_the_branch(what: Callable[..., Any], message: str) -> None:
    r = own()
    _, parent = r.record(probe=False)
    after_each_step(r, lambda pipe, i, values: what(pipe, values["latents"]) if i == 0 else None)
    parent.call.update(r.call)
    with pytest.raises(ReplayError, match=message):
        r.branch(parent, 2, range(4))


def test_a_method_that_the_branch_does_not_call_stops_it() -> None:
    r = own()
    after_each_step(r, lambda pipe, i, values: pipe.encode_prompt("x", None, None) and None)
    _, parent = r.record(probe=False)
    del parent.call["callback_on_step_end"]
    with pytest.raises(ReplayError, match="2 outputs at step 1, 3 in the recording"):
        r.branch(parent, 2, range(4))


# --- outputs too large for the tape


def test_residuals_of_which_only_the_shape_was_kept_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    r = with_controlnet(own())
    monkeypatch.setitem(record_function.__globals__, "MAX_KEPT_OUTPUT", 3)
    gens, calls = tiny.generators(), []
    torch.manual_seed(0)  # the encoding of the image is drawn
    whole = r.record()
    kept = {c.component: tree_leaves(c.output)[0].is_meta for c in whole[1].component_calls}
    assert kept == {"controlnet": True, "transformer": False}
    torch.manual_seed(0)
    _, trunk = r.record(generators=gens, stop=2)
    given: list[bool] = []
    look = r.pipe.transformer.register_forward_pre_hook(
        lambda m, args, kwargs: given.append(kwargs["block_controlnet_hidden_states"][0].is_meta), with_kwargs=True
    )
    with look, r.pipe.controlnet.time_text_embed.register_forward_hook(lambda *_: calls.append(1)):
        same_rollout(*r.branch(trunk, 2, range(4), generators=gens), *whole)
    assert len(calls) == 1 and given == [False] * 4  # computed at step 3
    _, tape = r.branch(trunk, 2, INDEX)
    assert deviation(r, tape) <= 1e-5
    monkeypatch.setitem(record_function.__globals__, "MAX_KEPT_OUTPUT", 1)
    _, parent = r.record(generators=gens, probe=False)
    with pytest.raises(ReplayError, match=r"the output of transformer was too large to be kept.*stop=1"):
        r.branch(parent, 1, range(4))


class EncodesInline(diffusers.StableDiffusion3Pipeline):
    """Calls a component once before the loop, and uses what it said in the loop, as image-to-video pipelines do."""

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tokens = self.tokenizer(kwargs["prompt"], padding="max_length", max_length=16, return_tensors="pt")
        states = self.text_encoder(tokens.input_ids, output_hidden_states=True).hidden_states[-1]
        shift = states.flatten(1).mean(1)[:, None, None, None]
        kwargs["callback_on_step_end"] = lambda pipe, i, t, values: {"latents": values["latents"] + shift}
        return super().__call__.__wrapped__(self, *args, **kwargs)


@pytest.mark.parametrize("limit", [16, 2])
@pytest.mark.parametrize("stop", [0, 2])
def test_what_was_called_once_before_the_loop_says_the_same(
    limit: float, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = own()
    r.pipe = as_class(r.pipe, EncodesInline)
    monkeypatch.setitem(record_function.__globals__, "MAX_KEPT_OUTPUT", limit)
    gens = tiny.generators()
    whole = r.record()
    _, trunk = r.record(generators=gens, stop=stop)
    assert [c.component for c in trunk.component_calls[:2]] == ["text_encoder", "transformer"]
    assert tree_leaves(trunk.component_calls[0].output)[0].is_meta == (limit == 2)
    assert r.record(stop=1, probe=False)[1].looped_components() == {"transformer"}
    calls: list[int] = []
    inner = next(m for m in r.pipe.text_encoder.modules() if isinstance(m, torch.nn.Embedding))
    with inner.register_forward_hook(lambda *_: calls.append(1)):
        same_rollout(*r.branch(trunk, stop, range(4), generators=gens), *whole)
    assert len(calls) == (limit == 2)  # only what was not kept has to run again
    monkeypatch.setitem(record_function.__globals__, "MAX_KEPT_OUTPUT", 16)
    _, trunk = r.record(stop=stop)
    _, tape = r.branch(trunk, stop, [2, 2, 0])
    torch.testing.assert_close(tape.steps[stop].x, whole[1].steps[stop].x[[2, 2, 0]])


# --- branches that cannot be


@pytest.mark.parametrize(
    ("step", "index", "options", "error", "message"),
    [
        (3, [0, 1], {}, ReplayError, r"step 3 .*2 steps"),
        (-1, [0, 1], {}, ReplayError, r"step -1 .*2 steps"),
        *((2, index, {}, ReplayError, "branched: the tape has 4 samples") for index in ([4], [-1, 0], [])),
        (2, [0], {"window": [1, 2]}, ModelError, r"branch at step 2 .* window .* stop"),
        (2, [0], {"stop": 1}, ModelError, r"branch at step 2 .* window .* stop"),
        (2, [0], {"window": [3]}, ModelError, "the last denoising step is deterministic"),
        (2, [0], {"window": [2, 7]}, ModelError, r"window .*\[2, 7\].* 4 steps"),
        (2, [0, 0], {"generators": tiny.generators()}, ValueError, "4 generators for 2 samples"),
    ],
)
def test_branches_that_cannot_be(
    step: int, index: list[int], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    r = recorded("sd3", False)
    _, trunk = r.record(stop=2)
    with pytest.raises(error, match=message):
        r.branch(trunk, step, index, **options)


def test_steps_that_a_tape_does_not_have_cannot_be_branched_at() -> None:
    r = recorded("sd3", False)
    with pytest.raises(ReplayError, match=r"step 4 .*4 steps"):
        r.branch(r.tape, 4, [0, 1])
    _, compressed = r.record(window=[0], compression=0.5)
    with pytest.raises(ReplayError, match=r"step 2 .*compression"):
        r.branch(compressed, 2, [0])


def test_the_output_of_a_denoiser_is_kept_where_it_is_branched_from_however_large() -> None:
    entry = next(e for e in conditioned.ENTRIES if e.name == "FluxKontextPipeline")
    pipe, _ = build(entry)
    large = {"image": conditioned.pictures(4, 96), "max_area": 16 * 16, "_auto_resize": False}
    call = call_for(entry, pipe, guided=True) | large | {"height": 16, "width": 16}
    noise: dict[str, Any] = {"kernel": "flow_sde", "noise_level": 0.7}
    _, trunk = record_function(pipe, call, window=(), generators=tiny.generators(), stop=1, **noise)
    tokens = trunk.component_calls[-1].output[0]
    assert tokens.numel() > 16 * trunk.steps[0].x.numel() and not tokens.is_meta
    _, tape = branch_function(pipe, trunk, 1, [1, 1, 3], window=[1], generators=tiny.generators(3), **noise)
    found: list[float] = []
    replay(pipe, tape, lambda k, s: found.append(float((s.log_prob - s.recorded_log_prob).abs().max())), grad=False)
    assert found and max(found) < 1e-5

    _, whole = record_function(pipe, call, window=(), generators=tiny.generators(), **noise)
    with pytest.raises(ReplayError, match=r"transformer was too large to be kept.*stop=1"):
        branch_function(pipe, whole, 1, [1, 1, 3], window=[1], generators=tiny.generators(3), **noise)

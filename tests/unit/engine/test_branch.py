"""Branch: the same as a recording of its own, at the cost of what is new, and replayed as any tape."""

from collections.abc import Callable, Sequence
from typing import Any

import diffusers
import pytest
import tiny
import torch
from replaying import EACH, GUIDED, NOISE, CountedLinear, Recorded, as_class, fresh, gradients, recorded
from torch.utils._pytree import tree_leaves

from gerl.engine import Tape, branch, record, replay
from gerl.engine import record as record_function
from gerl.engine.batching import select_call
from gerl.errors import ModelError, ReplayError

INDEX = [2, 0, 2, 3, 1, 2]  # children: parents in another order, some more than once


def own(name: str, guided: bool = True) -> Recorded:
    """A pipeline that a test may meddle with."""
    case = tiny.CASES[name]
    pipe = tiny.build(case)
    return Recorded(pipe, tiny.add_lora(pipe), tiny.call_for(case, guided), None, Tape({}, 0), case.kernel)


def drawn(r: Recorded) -> dict[str, Any]:
    return {"kernel": r.kernel, "noise_level": NOISE}


def same_rollout(output: Any, tape: Tape, other: Any, twin: Tape, exact: bool = True) -> None:
    """Two recordings agree in all that a replay or a reward sees."""
    limits = {"atol": 0.0, "rtol": 0.0} if exact else {"atol": 2e-5, "rtol": 2e-5}
    torch.testing.assert_close(tiny.output_of(output), tiny.output_of(other), **limits)
    assert (tape.call["prompt"], list(tape.call)) == (
        twin.call["prompt"],
        list(twin.call),
    ) and tape.batch_size == twin.batch_size
    assert tape.stochastic_steps == twin.stochastic_steps and len(tape.steps) == len(twin.steps)
    for one, two in zip(tape.steps, twin.steps, strict=True):
        assert one.rule == two.rule and one.num_answers == two.num_answers
        for a, b in ((one.x, two.x), (one.x_next, two.x_next), (one.log_prob, two.log_prob), (one.mean, two.mean)):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, **limits)
    calls, twins = ([(c.step, c.component) for c in t.component_calls] for t in (tape, twin))
    assert calls == twins and [a.method for a in tape.answers] == [a.method for a in twin.answers]


def deviation(r: Recorded, tape: Tape, **options: Any) -> float:
    """Largest |ratio - 1| of a replay."""
    found: list[float] = []

    def on_step(k: int, step: Any) -> None:
        found.append(float(((step.log_prob - step.recorded_log_prob).exp() - 1).abs().max()))

    replay(r.pipe, tape, on_step, grad=False, **options)
    return max(found)


# --- a branch is a recording


@EACH
@GUIDED
def test_a_branch_of_a_deterministic_recording_is_one_with_noise_at_that_step(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    options = drawn(r)
    first = tiny.generators(seed=5)
    _, parent = record(r.pipe, r.call, window=[], generators=first, **options)
    everybody = range(4)
    with CountedLinear(r.pipe) as counted:
        record(r.pipe, r.call, window=[], probe=False, stop=0, **options)
        a_step, counted.calls = counted.calls, 0
        output, tape = branch(r.pipe, parent, 1, everybody, window=[1], generators=tiny.generators(), **options)
        assert counted.calls == 2 * a_step  # steps 2 and 3
    first = tiny.generators(seed=5)
    twin = record(
        r.pipe, r.call, window=[1], generators=tiny.generators(), init_generators=first, probe=False, **options
    )
    same_rollout(output, tape, *twin)
    grads, off, seen = gradients(r, tape)
    assert (off, seen) == (0.0, [1]) and any(g.abs().sum() > 0 for g in grads)
    assert deviation(r, tape, index=[3, 1]) <= 1e-5


@EACH
@GUIDED
def test_children_of_picked_parents_are_recordings_of_their_prompts(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    options, seeds = drawn(r), tiny.generators(6, seed=9)
    parent = r.tape  # with noise at steps 0, 1 and 2
    output, tape = branch(r.pipe, parent, 2, INDEX, window=[2], generators=seeds, **options)
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
    assert len(tiny.output_of(output)) == 6 and not torch.equal(tiny.output_of(output)[0], tiny.output_of(output)[2])
    assert deviation(r, tape) <= 1e-5 and deviation(r, tape, index=[5, 2], steps=[2]) <= 1e-5


@EACH
@GUIDED
def test_a_tree_that_goes_on_with_the_same_generators_is_one_recording(name: str, guided: bool) -> None:
    r = recorded(name, guided)
    options, gens, everybody = drawn(r), tiny.generators(), range(4)
    with CountedLinear(r.pipe) as counted:
        _, trunk = record(r.pipe, r.call, generators=gens, stop=1, **options)
        a_step, counted.calls = counted.calls // 3, 0  # steps 0 and 1, and the probe
        output, boughs = branch(r.pipe, trunk, 1, everybody, generators=gens, stop=2, **options)
        assert output is None and len(boughs.steps) == 2
        output, leaves = branch(r.pipe, boughs, 2, everybody, generators=gens, **options)
        assert counted.calls == 2 * a_step  # steps 2 and 3: the trunk made the others
    same_rollout(output, leaves, {"images": r.output}, r.tape)
    assert gradients(r, leaves)[1] == 0.0 and deviation(r, leaves, index=[1]) <= 1e-5


@EACH
def test_a_tree_of_two_levels_from_the_first_step(name: str) -> None:
    r = recorded(name, True)
    options = drawn(r)
    _, root = record(r.pipe, r.call, generators=tiny.generators(), stop=0, **options)
    assert root.steps == []
    with CountedLinear(r.pipe) as counted:
        record(r.pipe, select_call(r.call, [0]), stop=0, **options)
        a_step, counted.calls = counted.calls, 0
        _, two = branch(r.pipe, root, 0, [1, 1, 3], window=[0], generators=tiny.generators(3), stop=2, **options)
        assert counted.calls == 2 * a_step
        counted.calls = 0
        output, leaves = branch(r.pipe, two, 2, [0, 0, 2, 1], window=[2], generators=tiny.generators(4, 1), **options)
        assert counted.calls == a_step
    assert leaves.call["prompt"] == [tiny.PROMPTS[i] for i in (1, 1, 3, 1)]
    assert leaves.stochastic_steps == [0, 2] and len(tiny.output_of(output)) == 4
    x = leaves.steps[1].x
    assert torch.equal(x[0], x[1]) and not torch.equal(x[0], x[3])  # brothers, cousins
    assert torch.equal(leaves.steps[0].x[0], leaves.steps[0].x[3])
    assert deviation(r, leaves) <= 1e-5 and deviation(r, leaves, index=[3, 0]) <= 1e-5


@pytest.mark.parametrize("name", ["sd3", "z_image", "qwen_image", "sd15"])
def test_children_of_a_single_sample(name: str) -> None:
    r = recorded(name, True)
    options, one = drawn(r), select_call(r.call, [2])
    _, parent = record(r.pipe, one, window=[], generators=tiny.generators(1), **options)
    same = [torch.Generator().manual_seed(0) for _ in range(3)]
    for step in (0, 2):
        output, tape = branch(
            r.pipe, parent, step, [0, 0, 0], window=[step], generators=tiny.generators(3, seed=2), **options
        )
        twin = record(
            r.pipe,
            select_call(one, [0, 0, 0]),
            window=[step],
            generators=tiny.generators(3, seed=2),
            init_generators=[g.manual_seed(0) for g in same],
            probe=False,
            **options,
        )
        same_rollout(output, tape, *twin, exact=False)
        assert tape.probe is not None and tape.probe.batch_size == 1
        assert deviation(r, tape) <= 1e-5 and deviation(r, tape, index=[2, 0]) <= 1e-5
    only, again = branch(r.pipe, tape, 2, [1], window=[], **options)
    _, thrice = branch(r.pipe, again, 2, [0, 0], window=[2], **options)
    assert len(tiny.output_of(only)) == 1 and deviation(r, thrice) <= 1e-5


def test_the_arguments_of_a_single_sample_are_repeated() -> None:
    call = select_call({"prompt": ["a"], "image": torch.ones(1, 3), "sigmas": [1.0]}, [0, 0])
    assert call["prompt"] == ["a", "a"] and call["image"].shape == (2, 3) and call["sigmas"] == [1.0]


def test_a_probe_that_is_missing_is_made_once() -> None:
    r = recorded("sd3", True)
    _, parent = record(r.pipe, r.call, generators=tiny.generators(), probe=False, **drawn(r))
    branch(r.pipe, parent, 1, range(4), **drawn(r))
    assert parent.probe is None  # not needed
    branch(r.pipe, parent, 1, [3, 3], **drawn(r))
    probe = parent.probe
    _, tape = branch(r.pipe, parent, 1, [1, 1], **drawn(r))
    assert probe is not None and parent.probe is probe and tape.probe is probe


def test_solver_and_compression_of_a_branch_are_those_of_a_recording() -> None:
    r, call = recorded("flux", True), tiny.call_for(tiny.CASES["flux"], True, steps=8)
    for solver, compression in (("dpm2", 1.0), ("euler", 0.5), ("dpm2", 0.5)):
        options = {**drawn(r), "solver": solver, "compression": compression}
        _, parent = record(r.pipe, call, window=[], generators=tiny.generators(), stop=2, **options)
        assert torch.equal(parent.steps[0].x, r.tape.steps[0].x)
        output, tape = branch(r.pipe, parent, 2, range(4), window=[3], generators=tiny.generators(seed=1), **options)
        init = tiny.generators()
        gens = tiny.generators(seed=1)
        twin = record(r.pipe, call, window=[3], generators=gens, init_generators=init, probe=False, **options)
        same_rollout(output, tape, *twin)  # step 2 of dpm2 looks back at step 1, which was not taken again
        assert gradients(r, tape)[1] == 0.0


@pytest.mark.parametrize("name", ["sd3", "sd15"])
def test_a_branch_in_half_precision(name: str) -> None:
    r = fresh(name, dtype=torch.bfloat16)
    output, tape = branch(r.pipe, r.tape, 1, range(4), window=[1], generators=tiny.generators(), **drawn(r))
    assert all(torch.equal(a.x_next, b.x) for a, b in zip(tape.steps, tape.steps[1:], strict=False))
    assert not torch.equal(tape.steps[0].x_next, tape.steps[0].x_next.bfloat16().float())
    assert gradients(r, tape)[1] == 0.0 and tiny.output_of(output).dtype == torch.bfloat16


def test_without_generators_the_global_one_is_used() -> None:
    r = recorded("sd3", False)
    ends = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        ends.append(tiny.output_of(branch(r.pipe, r.tape, 1, range(4), **drawn(r))[0]))
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])


# --- pipelines that do more


def after_each_step(r: Recorded, edit: Callable[[Any, int, dict[str, Any]], dict[str, Any] | None]) -> None:
    r.call["callback_on_step_end"] = lambda pipe, i, t, values: edit(pipe, i, values) or {}


def test_methods_called_after_the_branching_step_run() -> None:
    r = own("sd3")
    after_each_step(r, lambda pipe, i, values: pipe.encode_prompt([f"step {i}"], None, None) and None)
    _, parent = record(r.pipe, r.call, generators=tiny.generators(), **drawn(r))
    _, tape = branch(r.pipe, parent, 1, INDEX, **drawn(r))
    assert [a.method for a in tape.answers] == [a.method for a in parent.answers]
    assert [s.num_answers for s in tape.steps] == [s.num_answers for s in parent.steps]
    late = [tree_leaves(t.answers[-1].value)[0] for t in (tape, parent)]
    assert torch.equal(*late) and deviation(r, tape) <= 1e-5


def test_latents_that_the_pipeline_edits_stay_edited() -> None:
    r = own("sd3")
    after_each_step(r, lambda pipe, i, values: {"latents": 0.9 * values["latents"]})
    gens = tiny.generators()
    whole = record(r.pipe, r.call, generators=tiny.generators(), **drawn(r))
    _, trunk = record(r.pipe, r.call, generators=gens, stop=2, **drawn(r))
    same_rollout(*branch(r.pipe, trunk, 2, range(4), generators=gens, **drawn(r)), *whole)


def test_another_call_than_in_the_recording_stops_the_branch() -> None:
    r, now = own("sd3"), {"branching": False}

    def differently(what: Callable[[Any, dict[str, Any]], Any]) -> None:
        after_each_step(r, lambda pipe, i, values: what(pipe, values) if now["branching"] and i == 0 else None)
        now["branching"] = False
        _, parent = record(r.pipe, r.call, generators=tiny.generators(), probe=False, **drawn(r))
        now["branching"] = True
        branch(r.pipe, parent, 2, range(4), **drawn(r))

    with pytest.raises(ReplayError, match="branch calls encode_prompt"):
        differently(lambda pipe, values: pipe.encode_prompt("x", None, None))
    with pytest.raises(ReplayError, match="branch calls transformer at step 1"):
        differently(lambda pipe, values: [pipe.transformer(values["latents"]) for _ in range(2)] and None)
    with pytest.raises(ReplayError, match=r"recorded latents at step 1.* branched"):
        differently(lambda pipe, values: {"latents": values["latents"] + 1})


def test_a_method_that_the_branch_does_not_call_stops_it() -> None:
    r = own("sd3")
    after_each_step(r, lambda pipe, i, values: pipe.encode_prompt("x", None, None) and None)
    _, parent = record(r.pipe, r.call, generators=tiny.generators(), probe=False, **drawn(r))
    after_each_step(r, lambda pipe, i, values: None)
    parent.call.update(r.call)
    with pytest.raises(ReplayError, match="2 answers at step 1, 3 in the recording"):
        branch(r.pipe, parent, 2, range(4), **drawn(r))


# --- outputs too large for the tape


def with_controlnet() -> Recorded:
    r = own("sd3")
    torch.manual_seed(2)
    components = dict(r.pipe.components)
    controlnet = diffusers.SD3ControlNetModel.from_config(
        components["transformer"].config, extra_conditioning_channels=0
    )
    for p in controlnet.parameters():
        torch.nn.init.normal_(p, 0, 0.05)
    components["controlnet"] = controlnet.eval().requires_grad_(False)
    r.pipe = diffusers.StableDiffusion3ControlNetPipeline(**components)
    r.pipe.set_progress_bar_config(disable=True)
    image = torch.linspace(0, 1, 4 * 3 * 16 * 16).reshape(4, 3, 16, 16)
    r.call = {**r.call, "control_image": image, "controlnet_conditioning_scale": 0.7}
    return r


def test_residuals_of_which_only_the_shape_was_kept_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    r = with_controlnet()
    monkeypatch.setitem(record_function.__globals__, "MAX_KEPT_OUTPUT", 3)
    gens, calls = tiny.generators(), []
    torch.manual_seed(0)  # the encoding of the image is drawn
    whole = record(r.pipe, r.call, generators=tiny.generators(), **drawn(r))
    kept = {c.component: tree_leaves(c.output)[0].is_meta for c in whole[1].component_calls}
    assert kept == {"controlnet": True, "transformer": False}
    torch.manual_seed(0)
    _, trunk = record(r.pipe, r.call, generators=gens, stop=2, **drawn(r))
    handle = r.pipe.controlnet.time_text_embed.register_forward_hook(lambda *_: calls.append(1))
    given: list[bool] = []
    watch = r.pipe.transformer.register_forward_pre_hook(
        lambda m, args, kwargs: given.append(kwargs["block_controlnet_hidden_states"][0].is_meta), with_kwargs=True
    )
    same_rollout(*branch(r.pipe, trunk, 2, range(4), generators=gens, **drawn(r)), *whole)
    assert len(calls) == 1 and given == [False] * 4  # computed at step 3
    handle.remove()
    watch.remove()
    _, tape = branch(r.pipe, trunk, 2, INDEX, **drawn(r))
    assert deviation(r, tape) <= 1e-5
    monkeypatch.setitem(record_function.__globals__, "MAX_KEPT_OUTPUT", 1)
    _, parent = record(r.pipe, r.call, generators=gens, probe=False, **drawn(r))
    with pytest.raises(ReplayError, match="the output of transformer is too large for the tape"):
        branch(r.pipe, parent, 1, range(4), **drawn(r))


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
    r = own("sd3")
    r.pipe = as_class(r.pipe, EncodesInline)
    monkeypatch.setitem(record_function.__globals__, "MAX_KEPT_OUTPUT", limit)
    gens = tiny.generators()
    whole = record(r.pipe, r.call, generators=tiny.generators(), **drawn(r))
    _, trunk = record(r.pipe, r.call, generators=gens, stop=stop, **drawn(r))
    assert [c.component for c in trunk.component_calls[:2]] == ["text_encoder", "transformer"]
    assert tree_leaves(trunk.component_calls[0].output)[0].is_meta == (limit == 2)
    assert record(r.pipe, r.call, stop=1, probe=False)[1].looped_components() == {"transformer"}
    calls: list[int] = []
    inner = next(m for m in r.pipe.text_encoder.modules() if isinstance(m, torch.nn.Embedding))
    handle = inner.register_forward_hook(lambda *_: calls.append(1))
    same_rollout(*branch(r.pipe, trunk, stop, range(4), generators=gens, **drawn(r)), *whole)
    assert len(calls) == (limit == 2)  # only what was not kept has to run again
    handle.remove()
    monkeypatch.setitem(record_function.__globals__, "MAX_KEPT_OUTPUT", 16)
    _, trunk = record(r.pipe, r.call, generators=tiny.generators(), stop=stop, **drawn(r))
    _, tape = branch(r.pipe, trunk, stop, [2, 2, 0], **drawn(r))
    torch.testing.assert_close(tape.steps[stop].x, whole[1].steps[stop].x[[2, 2, 0]])


# --- branches that cannot be


def test_branches_that_cannot_be() -> None:
    r = recorded("sd3", False)
    options = drawn(r)
    _, trunk = record(r.pipe, r.call, generators=tiny.generators(), stop=2, **options)
    for tape, step in ((trunk, 3), (trunk, -1), (r.tape, 4)):
        with pytest.raises(ReplayError, match=rf"step {step} .*{len(tape.steps)} steps"):
            branch(r.pipe, tape, step, [0, 1], **options)
    wrong: Sequence[list[int]] = ([4], [-1, 0], [])
    for index in wrong:
        with pytest.raises(ReplayError, match="cannot be branched: the tape has 4 samples"):
            branch(r.pipe, trunk, 2, index, **options)
    for given in ({"window": [1, 2]}, {"stop": 1}):
        with pytest.raises(ModelError, match=r"branch at step 2 .* window .* stop"):
            branch(r.pipe, trunk, 2, [0], **given, **options)
    with pytest.raises(ModelError, match="the last denoising step is deterministic"):
        branch(r.pipe, trunk, 2, [0], window=[3], **options)
    with pytest.raises(ModelError, match=r"window .*\[2, 7\].* 4 steps"):
        branch(r.pipe, trunk, 2, [0], window=[2, 7], **options)
    with pytest.raises(ValueError, match="4 generators for 2 samples"):
        branch(r.pipe, trunk, 2, [0, 0], generators=tiny.generators(), **options)
    _, compressed = record(r.pipe, r.call, window=[0], compression=0.5, **options)
    with pytest.raises(ReplayError, match=r"step 2 .*compression"):
        branch(r.pipe, compressed, 2, [0], **options)

"""Features for a critic: hidden states and prompt embeddings of a rollout's own calls, of any pipeline."""

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from zoo import text_to_image
from zoo.entries import BY_NAME

from gerl.engine import RequiredTensors, compact
from gerl.engine.branch import branch_plan
from gerl.engine.hidden_states import Features, HiddenStates, pooled, prompt_embedding
from gerl.engine.record import SamplingPlan, record_plan
from gerl.engine.tape import Tape

SDXL = tiny.Case(text_to_image.sdxl, {"guidance_scale": 5.0}, {"guidance_scale": 1.0}, kernel="ddim")
CASES = tiny.CASES | {"sdxl": SDXL}
# width of the last hidden states, and of the prompt embedding; Z-Image is given lists of embeddings
SIZES = {
    "sd3": (16, 32), "flux": (32, 16), "qwen_image": (32, 16), "z_image": (32, None), "wan": (24, 32), "sd15": (8, 16),
    "sdxl": (8, 16),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", list(SIZES))
LAST = {"sd15": "conv_out", "sdxl": "conv_out", "z_image": "all_final_layer.2-1"}  # else proj_out


def observed(name: str, guided: bool = False, **plan: Any) -> tuple[Any, Tape, SamplingPlan]:
    case = CASES[name]
    pipe = tiny.build(case)
    own = SamplingPlan(case.kernel, 0.7, observer=HiddenStates([tiny.denoiser_of(pipe)]), **plan)
    call = tiny.call_for(case, guided)
    return pipe, record_plan(pipe, call, own, tiny.generators())[1], own


def features_of(tape: Tape) -> Features:
    assert tape.features is not None
    return tape.features


def equal(one: Features, other: Features) -> bool:
    prompts = (one.prompt, other.prompt)
    same = prompts == (None, None) or torch.equal(*prompts)  # type: ignore[arg-type]
    return same and all(torch.equal(one.hidden[k], other.hidden[k]) for k in {**one.hidden, **other.hidden})


@EACH
@pytest.mark.parametrize("guided", [False, True], ids=["plain", "cfg"])
def test_every_pipeline_has_features_at_every_step(name: str, guided: bool) -> None:
    _, tape, _ = observed(name, guided)
    features, (width, prompt) = features_of(tape), SIZES[name]
    assert sorted(features.hidden) == [0, 1, 2, 3]
    assert {(tuple(v.shape), v.dtype) for v in features.hidden.values()} == {((4, width), torch.float32)}
    assert all(v.std(0).min() > 0 for v in features.hidden.values())  # samples differ
    assert prompt is None if features.prompt is None else tuple(features.prompt.shape) == (4, prompt)


@EACH
def test_they_are_the_mean_of_what_enters_the_output_layer(name: str) -> None:
    case = CASES[name]
    pipe = tiny.build(case)
    seen: list[torch.Tensor] = []
    output = tiny.denoiser_of(pipe).get_submodule(LAST.get(name, "proj_out"))
    output.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    own = SamplingPlan(case.kernel, 0.7, observer=HiddenStates([tiny.denoiser_of(pipe)]))
    tape = record_plan(pipe, tiny.call_for(case, guided=False), own, tiny.generators(), probe=False)[1]
    for k, value in enumerate(seen):
        expected = value.mean((2, 3)) if value.ndim == 4 else value.mean(1)
        torch.testing.assert_close(features_of(tape).hidden[k], expected)


@EACH
def test_the_rollout_is_the_same_and_nothing_is_left_on_the_denoiser(name: str) -> None:
    pipe, tape, own = observed(name, guided=True)
    _, plain = record_plan(pipe, tape.fresh_call(), replace(own, observer=None), tiny.generators())
    assert plain.features is None
    assert all(torch.equal(a.x_next, b.x_next) for a, b in zip(tape.steps, plain.steps, strict=True))
    modules = list(tiny.denoiser_of(pipe).modules())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in modules)


def test_rows_of_guidance_and_several_calls_of_a_step_are_averaged() -> None:
    """SD3 doubles the batch, Qwen-Image calls twice."""
    for name in ("sd3", "qwen_image"):
        pipe, seen = tiny.build(CASES[name]), list[torch.Tensor]()
        pipe.transformer.proj_out.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].mean(1)))
        own = SamplingPlan("flow_sde", 0.7, observer=HiddenStates([pipe.transformer]))
        tape = record_plan(pipe, tiny.call_for(CASES[name], guided=True), own, tiny.generators(), probe=False)[1]
        for k, rows in enumerate(torch.cat(seen).split(8)):
            torch.testing.assert_close(features_of(tape).hidden[k], rows.unflatten(0, (2, 4)).mean(0))


def test_without_hidden_states_only_the_prompt_is_recorded() -> None:
    pipe = tiny.build(CASES["sd3"])
    own = SamplingPlan("flow_sde", 0.7, observer=HiddenStates([pipe.transformer], hidden=False))
    tape = record_plan(pipe, tiny.call_for(CASES["sd3"], guided=False), own, tiny.generators(), probe=False)[1]
    assert features_of(tape).hidden == {} and features_of(tape).prompt is not None


@pytest.mark.parametrize("name", ["sd3", "sd15"])
def test_a_branch_and_some_samples_of_a_tape_keep_their_features(name: str) -> None:
    pipe, trunk, own = observed(name, stop=2, window=frozenset({0, 1}))
    rows = [2, 2, 0]
    child = branch_plan(pipe, trunk, 2, rows, replace(own, stop=None, window=frozenset({2})), tiny.generators(3))[1]
    whole, inner = features_of(trunk), features_of(child)
    assert sorted(whole.hidden) == [0, 1, 2] and sorted(inner.hidden) == [0, 1, 2, 3]
    assert all(torch.equal(inner.hidden[k], whole.hidden[k][rows]) for k in (0, 1, 2))
    assert not torch.equal(inner.hidden[3][0], inner.hidden[3][1])  # siblings with noise of their own
    kept = compact(child, RequiredTensors(frozenset({2})))
    assert equal(features_of(kept), inner) and equal(features_of(kept.rows([1])), inner.rows([1], 3))
    assert sorted(whole.hidden) == [0, 1, 2]  # the trunk has not changed


def test_forms_of_hidden_states() -> None:
    n, width = 3, 5
    tokens, maps = torch.randn(2 * n, 7, width), torch.randn(n, width, 4, 6)
    output = torch.randn(n, 2, 4, 6)
    torch.testing.assert_close(pooled(tokens, None, 2 * n, n), tokens.mean(1).unflatten(0, (2, n)).mean(0))
    torch.testing.assert_close(pooled(tokens.transpose(0, 1), None, 2 * n, n), pooled(tokens, None, 2 * n, n))
    torch.testing.assert_close(pooled(maps, (output,), n, n), maps.mean((2, 3)))
    frames = torch.randn(n * 2, width, 4, 6)  # two of each sample, one after the other
    video = torch.randn(n, 2, 2, 4, 6)
    torch.testing.assert_close(pooled(frames, video, n, n), frames.mean((2, 3)).unflatten(0, (n, 2)).mean(1))
    volume = torch.randn(n, 2, 3, 4, width)  # channels last
    torch.testing.assert_close(pooled(volume, video, n, n), volume.mean((1, 2, 3)))
    for unknown in (torch.randn(n), torch.randn(4, 7, width)):
        assert pooled(unknown, None, n, n) is None
    assert pooled(tokens, None, 4, n) is None  # rows that do not belong to the samples


def test_the_pooled_embedding_is_preferred_to_that_of_tokens() -> None:
    tokens, whole = torch.randn(2, 4, 3), torch.randn(2, 6)
    assert prompt_embedding({"encoder_hidden_states": tokens, "pooled_projections": whole}) is whole
    assert prompt_embedding({"encoder_hidden_states": tokens, "added_cond_kwargs": {"text_embeds": whole}}) is whole
    assert prompt_embedding({"encoder_hidden_states": tokens}) is tokens
    assert prompt_embedding({"encoder_hidden_states": [tokens], "sample": tokens}) is None


def test_two_experts_are_both_observed() -> None:
    from zoo.checks import build, call_for

    entry = BY_NAME["WanPipeline-text-to-video-(Wan-2.2,-two-experts)"]
    pipe, _ = build(entry)
    own = SamplingPlan(entry.kernel, 0.7, observer=HiddenStates([pipe.transformer, pipe.transformer_2]))
    tape = record_plan(pipe, call_for(entry, pipe, guided=False), own, tiny.generators(entry.batch), probe=False)[1]
    assert {c.component for c in tape.component_calls} >= {"transformer", "transformer_2"}
    assert sorted(features_of(tape).hidden) == [0, 1, 2]

"""Record: the stock pipeline's images, per-sample noise, nothing left patched, and the calls it refuses."""

import copy
import functools
import itertools
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import diffusers
import pytest
import tiny
import torch
from diffusers.models.autoencoders import vae as vae_module
from drills import more
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying import (
    EACH,
    GUIDED,
    NOISE,
    WEIGHTS,
    Recorded,
    after_each_step,
    all_equal,
    as_class,
    counted_rows,
    deviation,
    distance,
    fresh,
    gradients,
    largest_deviation,
    own,
    recorded,
    replayed,
    rolled_out,
    squares,
    with_controlnet,
)
from torch.utils._pytree import tree_leaves
from zoo import conditioned
from zoo.checks import build, call_for

from gerl.engine import ReplayedStep, RequiredTensors, Tape, Trajectory, branch, compact, record, replay
from gerl.engine import branch as branch_function
from gerl.engine import record as record_function
from gerl.engine.hooks import LatentsTracker, _Step, count_evaluations, uncounted
from gerl.engine.kv_caches import Caches
from gerl.engine.rows import num_elements, select_call, tensor_bytes
from gerl.errors import ModelError, ReplayError
from gerl.protocol import Prompt, RolloutTask, Sample, Segment

# --- record


@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_evaluations_are_those_that_the_denoiser_computes(name: str, guided: bool) -> None:
    r = fresh(name, guided)
    evaluations = count_evaluations([tiny.denoiser_of(r.pipe)])
    with counted_rows(r.pipe) as rows:
        tape = rolled_out(r).tape
        first = 2 if guided else 1  # of the one-sample call that finds batch dimensions
        assert evaluations.taken() == (rows[False] - first, 0)
        rows.clear()
        replayed(r, tape, squares)
        replayed(r, tape)
    assert evaluations.taken() == (rows[True] + rows[False], rows[True]) and evaluations.taken() == (0, 0)
    with uncounted(r.pipe):
        rolled_out(r)
    assert evaluations.taken() == (0, 0)


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
    drawn, r = [], recorded("sd3", False)
    for seed, probe in ((5, True), (5, False), (6, False)):
        torch.manual_seed(seed)
        images, _ = r.record(generators=None, probe=probe)
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

    class OneStep(LatentsTracker):
        def on_scheduler_step(self, *args: Any) -> torch.Tensor:
            seen.append(args[3].dtype)
            return sample.float()

    output = sample.float() if name == "flux" else sample  # Z-Image's pipelines cast it, and assert the result
    step = _Step(OneStep(), scheduler)
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


@dataclass
class Layer:
    keys: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Cache:
    layers: dict[str, Layer] = field(default_factory=lambda: {"first": Layer()})


def call_component(caches: Caches, step: int, argument: Any, output: Any = None, fill: bool = False) -> int | None:
    held, reads = caches.arguments(step, ((), {"attention": {"cache": argument}}))
    if fill:
        argument.layers["first"].keys.append(torch.zeros(1))
    caches.note(step, "transformer", ((), {"attention": {"cache": argument}}), held, output)
    return reads


def test_a_step_that_reads_a_cache_knows_the_one_that_filled_it() -> None:
    caches, cache, returned = Caches(), Cache(), Cache({"first": Layer([torch.zeros(1)])})
    assert call_component(caches, 0, cache, output=(torch.zeros(1), returned), fill=True) is None
    assert call_component(caches, 0, cache) is None  # the second half of guidance
    assert call_component(caches, 2, cache) == call_component(caches, 2, returned) == 0


def test_a_cache_that_is_filled_again_cannot_be_replayed() -> None:
    caches, cache = Caches(), Cache()
    call_component(caches, 0, cache, fill=True)
    with pytest.raises(ModelError, match=r"transformer .*step 1 .*Cache .* set it in sampling\.call"):
        call_component(caches, 1, cache, fill=True)


def test_constants_and_caches_of_one_step_are_none() -> None:
    caches, constant = Caches(), Cache({"mask": Layer([torch.ones(1)])})
    for step in range(3):
        assert call_component(caches, step, constant) is None
        assert call_component(caches, step, Cache(), fill=True) is None
        others = [torch.zeros(1), {"scale": 1.0}, None, "text", torch.nn.Linear(1, 1)]
        assert call_component(caches, step, others) is None


def test_a_rollout_with_a_cache_is_refused() -> None:
    case, cache = tiny.CASES["sd3"], Cache()
    pipe = tiny.build(case)
    call = tiny.call_for(case, False) | {"joint_attention_kwargs": {"cache": cache}}
    record(pipe, call, noise_level=0.7)

    def remember(module: Any, args: Any, kwargs: dict[str, torch.Tensor]) -> None:
        cache.layers["first"].keys.append(kwargs["hidden_states"])

    pipe.transformer.transformer_blocks[0].register_forward_pre_hook(remember, with_kwargs=True)
    with pytest.raises(ModelError, match="fills at step 1 a Cache again"):
        record(pipe, call, noise_level=0.7)


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
        for name in ("x", "x_next", "log_prob", "mean"):
            assert torch.equal(getattr(step, name), getattr(kept, name)[INDEX])
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


def outputs(r: Recorded, tape: Tape, **options: Any) -> list[torch.Tensor]:
    """All that a replay without gradient hands out."""
    found: list[torch.Tensor] = []
    for step in replayed(r, tape, **options)[0].values():
        found += [step.x, step.model_output, step.mean]
        if step.x_next is not None and step.recorded_log_prob is not None:
            found += [step.x_next, step.log_prob, step.recorded_log_prob]
    return found


def same_gradients(r: Recorded, one: Tape, other: Tape, **options: Any) -> bool:
    a, b = (gradients(r, tape, **options) for tape in (one, other))
    return a[1:] == b[1:] and all_equal(a[0], b[0])


# --- rows of a tape


@cache
def whole(name: str, guided: bool) -> dict[int, ReplayedStep]:
    return replayed(recorded(name, guided))[0]


@EACH
@GUIDED
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_the_rows_of_a_tape_are_a_tape_of_their_own(name: str, guided: bool, data: st.DataObject) -> None:
    r = recorded(name, guided)
    index = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
    part = r.tape.rows(index)
    assert part.batch_size == len(index) and part.call["prompt"] == [tiny.PROMPTS[i] for i in index]
    assert all_equal(outputs(r, part), outputs(r, r.tape, index=index))
    for k, step in replayed(r, part)[0].items():
        expected = whole(name, guided)[k]
        assert step.rule == expected.rule
        for key in ("x", "x_next", "recorded_log_prob", "recorded_mean"):
            assert torch.equal(getattr(step, key), getattr(expected, key)[index])
        torch.testing.assert_close(step.model_output, expected.model_output[index], rtol=1e-4, atol=1e-5)
    # rows of rows are rows: also of one sample, whose probe is of two
    inner = data.draw(st.lists(st.integers(0, len(index) - 1), min_size=1, max_size=3))
    again = part.rows(inner)
    assert all(torch.equal(a.x, b.x[[index[i] for i in inner]]) for a, b in zip(again.steps, r.tape.steps, strict=True))
    assert deviation(r, again) <= 1e-5


@pytest.mark.parametrize(("guided", "cfg"), [(False, "joint"), (True, "joint"), (True, "detach_uncond"), (True, "off")])
@EACH
def test_the_gradients_of_the_parts_add_up_to_those_of_the_whole(name: str, guided: bool, cfg: str) -> None:
    r = recorded(name, guided)

    def train(tape: Tape, samples: list[int], **options: Any) -> tuple[dict[int, ReplayedStep], list[torch.Tensor]]:
        def loss(step: ReplayedStep) -> torch.Tensor:
            return (WEIGHTS[samples] * step.log_prob).sum()

        return replayed(r, tape, loss, steps=[0, 2], cfg=cfg, **options)

    steps, full = train(r.tape, [0, 1, 2, 3])
    parts = []
    for samples in ([2, 0], [3], [1]):  # with two samples Z-Image has as many rows as channels
        found, grads = train(r.tape, samples, index=samples)
        assert list(found) == [0, 2] and (cfg == "off" or largest_deviation(found) <= 1e-5)
        for k, step in found.items():
            torch.testing.assert_close(step.model_output, steps[k].model_output[samples], rtol=1e-4, atol=1e-5)
        assert all_equal(train(r.tape.rows(samples), samples)[1], grads)
        parts.append(grads)
    assert distance([sum(g) for g in zip(*parts, strict=True)], full) < 2e-4
    assert distance(parts[0], full) > 1e-2


def test_latents_that_steps_share_stay_shared() -> None:
    tape = recorded("sd3", True).tape.rows([3, 1])
    assert all(a.x_next is b.x for a, b in zip(tape.steps, tape.steps[1:], strict=False))
    kept = compact(tape, RequiredTensors(frozenset({1, 2})))
    assert kept.steps[0].x_next is kept.steps[1].x is tape.steps[1].x


def test_a_row_of_a_tape_is_branched_and_replayed() -> None:
    r = recorded("qwen_image", True)
    one = r.tape.rows([2])
    assert one.probe is not None and one.probe.batch_size == 2
    _, tape = r.branch(one, 1, [0, 0, 0], window=[1], generators=tiny.generators(3))
    _, twin = r.branch(r.tape, 1, [2, 2, 2], window=[1], generators=tiny.generators(3))
    assert tape.probe is not None and tape.probe.batch_size == 1
    for a, b in zip(tape.steps, twin.steps, strict=True):
        assert torch.equal(a.x, b.x) and torch.equal(a.x_next, b.x_next)
    assert same_gradients(r, tape.rows([0, 1, 2]), tape, index=[2, 0])


def test_without_a_probe_there_are_no_rows() -> None:
    r = recorded("sd3", False)
    bare = replace(r.tape, probe=None)
    assert bare.rows(range(4)) is bare
    with pytest.raises(ReplayError, match="probe=True"):
        bare.rows([0, 1])
    _, one = record(r.pipe, select_call(r.call, [0]))
    with pytest.raises(ReplayError, match="probe=True"):
        one.rows([0, 0])


# --- lean tapes


def held(tape: Tape) -> int:
    return Trajectory(RolloutTask(0, [], ()), (tape,), 0, 0).nbytes


@EACH
@GUIDED
@settings(max_examples=3, deadline=None)
@given(steps=st.sets(st.integers(0, 2), min_size=1), means=st.booleans())
def test_a_lean_tape_replays_as_the_whole_one(name: str, guided: bool, steps: set[int], means: bool) -> None:
    r = recorded(name, guided)
    kept = compact(r.tape, RequiredTensors(frozenset(steps), means=means, outputs=False))
    assert all_equal(outputs(r, kept, steps=steps), outputs(r, r.tape, steps=steps))
    assert same_gradients(r, kept, r.tape, steps=steps)
    assert held(kept) < held(r.tape)
    first = {"steps": sorted(steps)[:1], "index": [2, 0]}
    assert all_equal(outputs(r, kept, **first), outputs(r, r.tape, **first))


def noise(r: Recorded, steps: Sequence[int]) -> dict[int, torch.Tensor]:
    """Latents for `steps` that were not recorded."""
    shape = r.tape.steps[0].x.shape
    return {k: torch.randn(shape, generator=torch.Generator().manual_seed(k)) for k in steps}


def on_forward(r: Recorded, tape: Tape, latents: dict[int, torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Model outputs at the given latents, and gradients of their squares."""
    steps, grads = replayed(r, tape, squares, steps=latents.keys(), latents=latents, **options)
    return [step.model_output for step in steps.values()] + grads


@EACH
@pytest.mark.parametrize("steps", [s for n in (1, 2, 4) for s in combinations(range(4), n)])
def test_a_lean_tape_of_noised_clean_latents(name: str, steps: tuple[int, ...]) -> None:
    r = recorded(name, True)
    kept = compact(r.tape, RequiredTensors(frozenset(steps), means=False, outputs=False, forward=True))
    assert kept.steps[-1].x_next is r.tape.steps[-1].x_next and held(kept) < held(r.tape)
    assert all_equal(on_forward(r, kept, noise(r, steps)), on_forward(r, r.tape, noise(r, steps)))


@EACH
def test_a_lean_tape_may_keep_the_finished_latents_besides_those_of_its_steps(name: str) -> None:
    r = recorded(name, True)
    with_them, without = (
        compact(r.tape, RequiredTensors(frozenset({1}), outputs=False, finished=finished)) for finished in (True, False)
    )
    assert with_them.steps[-1].x_next is r.tape.steps[-1].x_next and without.steps[-1].x_next.is_meta
    assert all_equal(outputs(r, with_them, steps=[1]), outputs(r, r.tape, steps=[1]))
    assert held(without) < held(with_them) < held(r.tape)


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("cfg", ["detach_uncond", "off"])
@pytest.mark.parametrize("name", ["sd3", "wan"])
def test_a_lean_tape_for_guidance_keeps_the_outputs_that_tell_its_roles(name: str, cfg: str, forward: bool) -> None:
    whole, r = recorded(name, True).tape, own(name)  # a pipeline of which the roles are not known yet
    r.tape = whole
    kept = compact(whole, RequiredTensors(frozenset({1, 2}), means=False, forward=forward))
    latents = noise(r, (1, 2)) if forward else {k: whole.steps[k].x for k in (1, 2)}
    assert all_equal(on_forward(r, kept, latents, cfg=cfg), on_forward(r, whole, latents, cfg=cfg))
    assert forward or same_gradients(r, kept, whole, steps=[1, 2], cfg=cfg)


def test_a_replay_of_tensors_that_a_compacted_tape_lacks_is_refused() -> None:
    r = recorded("sd3", True)
    kept = compact(r.tape, RequiredTensors(frozenset({1, 2}), means=False, outputs=False))
    for steps in ([2], [0], [0, 1, 2], [3]):
        with pytest.raises(ReplayError, match=r"tape was kept for steps \[1, 2\]"):
            outputs(r, kept, steps=steps)
    with pytest.raises(ReplayError, match="cfg off reads recorded outputs"):
        outputs(r, kept, steps=[1, 2], cfg="off")
    with pytest.raises(ReplayError, match="recorded_means"):
        replay(r.pipe, kept, lambda k, step: step.recorded_mean, steps=[1], grad=False)
    with pytest.raises(ReplayError, match="cannot be branched"):
        branch(r.pipe, kept, 1, range(4), kernel=r.kernel)
    forward = compact(r.tape, RequiredTensors(frozenset({1, 2}), outputs=False, forward=True))
    with pytest.raises(ReplayError, match="pass them as latents"):
        outputs(r, forward, steps=[1, 2])
    beyond = compact(
        r.tape, RequiredTensors(frozenset({1, 7}))
    )  # a configuration for more steps than the pipeline takes
    with pytest.raises(ReplayError, match=r"steps \[1, 7\] cannot be replayed: the tape has 4 steps"):
        outputs(r, beyond, steps=[1, 7])
    with pytest.raises(ReplayError, match="called none of its components in the denoising loop"):
        outputs(r, compact(replace(r.tape, component_calls=[]), RequiredTensors(frozenset({1}))), steps=[1])
    nothing = compact(r.tape, RequiredTensors(frozenset()))
    assert sum(num_elements([s.x, s.x_next, s.mean]) for s in nothing.steps) > 0
    assert held(nothing) == tensor_bytes([s.log_prob for s in nothing.steps])


def test_a_lean_tape_keeps_what_it_should_and_no_more() -> None:
    r = recorded("sd3", True)
    assert len(r.tape.steps) == 4

    def values(tape: Tape) -> list[set[str]]:
        tensors = [{"x": s.x, "x_next": s.x_next, "mean": s.mean} for s in tape.steps]
        return [{name for name, v in step.items() if v is not None and not v.is_meta} for step in tensors]

    kept = compact(r.tape, RequiredTensors(frozenset({1}), means=True, outputs=False))
    assert values(kept) == [{"x", "x_next"}, {"x", "x_next", "mean"}, set(), set()]
    assert [tree_leaves(c.output)[0].is_meta for c in kept.component_calls] == [False, True, True, True]
    forward = compact(r.tape, RequiredTensors(frozenset({1, 3}), outputs=False, forward=True))
    # x_next of step 0 is given, that of step 3 is the image's
    assert values(forward) == [{"x"}, {"x_next"}, {"x"}, {"x_next"}]


# --- trajectories


def trajectory(r: Recorded, steps: Sequence[int] = (0, 1)) -> Trajectory:
    samples = [Sample(Prompt(i, text), 0, 10 + i, 1) for i, text in enumerate(tiny.PROMPTS)]
    segment = Segment(tuple(s.seed for s in samples), tuple(range(4)), (0, 1, 2), tuple(steps))
    kept = compact(r.tape, RequiredTensors(frozenset(steps), means=False, outputs=False))
    return Trajectory(RolloutTask(7, samples, (segment,)), (kept,), policy_version=3, owner=1)


@given(index=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
@settings(max_examples=10, deadline=None)
def test_a_trajectory_is_split_by_samples(index: list[int]) -> None:
    r = recorded("flux", False)
    whole = trajectory(r)
    part = whole.rows(index)
    assert (part.task.id, part.policy_version, part.owner) == (7, 3, 1)
    assert [s.prompt.id for s in part.task.samples] == index
    (segment,), (tape,) = part.task.segments, part.tapes
    assert segment.seeds == tuple(10 + i for i in index) and segment.leaves == tuple(range(len(index)))
    assert (segment.window, segment.trained) == ((0, 1, 2), (0, 1))
    expected = outputs(r, whole.tapes[0], steps=segment.trained, index=index)
    assert all_equal(outputs(r, tape, steps=segment.trained), expected)
    assert part.nbytes == whole.nbytes * len(index) // 4 or len(index) < 4  # nothing is held twice
    assert whole.rows(range(4)).nbytes == whole.nbytes > part.rows([0]).nbytes - 1


def test_a_tree_cannot_be_split() -> None:
    whole = trajectory(recorded("flux", False))
    (trunk,) = whole.task.segments
    segments = (trunk, replace(trunk, parent=0, rows=tuple(range(len(trunk.seeds)))))
    tree = replace(whole, task=replace(whole.task, segments=segments), tapes=whole.tapes * 2)
    with pytest.raises(ReplayError, match="task 7 is a tree"):
        tree.rows([0])
    assert tree.nbytes == whole.nbytes  # what segments share is counted once


def replay_elsewhere(folder: Path) -> None:
    """Run by another process: replays the trajectories in `folder` and writes the results beside them."""
    for file in folder.glob("*.pkl"):
        sent = pickle.loads(file.read_bytes())
        train = partial(gradients, own(file.stem), sent.tapes[0], steps=sent.task.segments[0].trained)
        torch.save([train(), train(index=[2, 0])], file.with_suffix(".pt"))


@more
def test_trajectories_are_replayed_in_another_process(tmp_path: Path) -> None:
    sent = {name: trajectory(recorded(name, True), (0, 2)) for name in ("sd3", "z_image")}
    for name, value in sent.items():
        file = tmp_path / f"{name}.pkl"
        file.write_bytes(pickle.dumps(value))
        assert file.stat().st_size < 1.3 * value.nbytes + 60_000  # shared latents are sent once
    code = f"import test_record, pathlib; test_record.replay_elsewhere(pathlib.Path({str(tmp_path)!r}))"
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), str(here.parents[2])]
    script = f"import sys; sys.path[:0] = {paths!r}; import torch; torch.set_num_threads({torch.get_num_threads()})\n"
    subprocess.run([sys.executable, "-c", script + code], check=True, timeout=300)
    for name, value in sent.items():
        results = torch.load(tmp_path / f"{name}.pt")
        for options, (grads, *rest) in zip(({}, {"index": [2, 0]}), results, strict=True):
            found = gradients(recorded(name, True), value.tapes[0], steps=[0, 2], **options)
            assert all_equal(found[0], grads) and list(found[1:]) == rest

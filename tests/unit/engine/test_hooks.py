"""What a routed `scheduler.step` hands to the head and to the pipeline, where that is more than the next latents."""

import inspect
from typing import Any

import diffusers
import pytest
import torch

from gerl.engine.hooks import LatentsTracker, LazySchedulerOutput, _Step, noise_from
from gerl.engine.transitions import Transitions, output_is_clean
from gerl.errors import ModelError

GENERATOR = torch.Generator().manual_seed(0)


class Euler(LatentsTracker):
    """A head that takes the scheduler's step without noise, as a rollout does, and notes what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.transitions = Transitions("ode", 0.0)
        self.asked: list[torch.Tensor] = []

    def on_scheduler_step(self, scheduler: Any, output: torch.Tensor, timestep: Any, sample: torch.Tensor) -> Any:
        self.asked.append(output)
        return self.transitions.next_rule(scheduler, timestep, False).mean(sample, output)

    def on_method(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    on_component = on_secondary_step = on_method


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def edm() -> diffusers.EDMEulerScheduler:
    scheduler = diffusers.EDMEulerScheduler()
    scheduler.set_timesteps(4)
    scheduler.is_scale_input_called = True
    return scheduler


def cosmos_loop(scheduler: Any, step: Any, outputs: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The denoising loop of Cosmos 1: clean latents of a doubled batch, guided, and a step with those."""
    for t, output in zip(scheduler.timesteps, outputs, strict=True):
        x0 = step(output, t, torch.cat([x, x]), return_dict=False)[1]
        scheduler._step_index -= 1
        uncond, cond = x0.chunk(2)
        guided = cond + 3 * (cond - uncond)
        x = step(guided, t, x, return_dict=False, pred_original_sample=guided)[0]
    return x


def test_a_loop_that_steps_twice_takes_one_step_of_the_rollout_each_time() -> None:
    x, outputs, head, ours = normal(2, 3, 4) * 80, [normal(4, 3, 4) for _ in range(4)], Euler(), edm()
    own = edm()
    expected = cosmos_loop(own, own.step, outputs, x)
    assert torch.equal(cosmos_loop(ours, _Step(head, ours), outputs, x), expected)
    assert len(head.asked) == 4 and all(len(output) == 2 for output in head.asked)
    assert own.step_index == ours.step_index == 4 and not output_is_clean(ours)


def test_what_was_read_of_a_step_is_the_same_in_any_order() -> None:
    x, output, own = normal(2, 3), normal(2, 3), edm()
    stock = own.step(output, own.timesteps[0], x)
    read: list[Any] = [
        lambda pair: (pair[0], pair[1]),
        lambda pair: (pair[-1], pair[0])[::-1],
        tuple,
        lambda pair: (pair.prev_sample, pair.pred_original_sample),
    ]
    for how in read:
        head, ours = Euler(), edm()
        pair = _Step(head, ours)(output, ours.timesteps[0], x)
        assert isinstance(pair, LazySchedulerOutput) and len(pair) == 2 and head.asked == []
        next_latents, clean = how(pair)
        assert torch.equal(next_latents, stock.prev_sample) and torch.equal(clean, stock.pred_original_sample)
        assert len(head.asked) == 1 and ours.step_index == 1
        with pytest.raises(IndexError):
            pair[2]


def test_the_steps_of_single_tokens_are_those_of_the_level_that_the_pipeline_keeps() -> None:
    scheduler, own = (diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0) for _ in range(2))
    for each in (scheduler, own):
        each.set_timesteps(4)
    x, head = normal(2, 8, 3), Euler()
    step, ours, stock = _Step(head, scheduler), x, x
    condition = torch.zeros(2, 8)
    condition[:, :2], condition[:, 2] = 1.0, 0.5  # kept all along, and kept until half the noise is left
    for t in own.timesteps:
        velocity = normal(2, 8, 3)
        levels = torch.min(t.expand(2).unsqueeze(-1).float(), (1 - condition) * 1000.0)
        moving = (t / 1000 - 1e-6 < (1.0 - condition)).unsqueeze(-1)
        arguments = {"per_token_timesteps": levels, "return_dict": False}
        stock = torch.where(moving, own.step(-velocity, t, stock, **arguments)[0], stock)
        ours = torch.where(moving, step(-velocity, t, ours, **arguments)[0], ours)
        torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-6)
    assert torch.equal(ours[:, :2], x[:, :2]) and not torch.equal(ours[:, 2], x[:, 2])


def test_the_next_latents_of_single_tokens_have_full_precision() -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    t, half = scheduler.timesteps[0], normal(2, 8, 3).half()
    stepped = _Step(Euler(), scheduler)(half, t, half, per_token_timesteps=t.expand(2, 8))
    assert isinstance(stepped, diffusers.schedulers.scheduling_utils.SchedulerOutput)
    assert stepped.prev_sample.dtype == torch.float32  # as those of the scheduler


def test_a_latent_consistency_model_hands_out_the_clean_latents_too() -> None:
    schedulers = [diffusers.LCMScheduler(prediction_type="v_prediction") for _ in range(2)]
    for scheduler in schedulers:
        scheduler.set_timesteps(4)
    own, ours = schedulers
    x, output, t = normal(2, 3), normal(2, 3), own.timesteps[0]
    stock = own.step(output, t, x)
    for return_dict in (True, False):
        ours._step_index = None
        stepped: Any = _Step(Euler(), ours)(output, t, x, return_dict=return_dict)
        assert torch.equal(stepped.denoised if return_dict else stepped[1], stock.denoised)


def test_a_flow_map_that_jumps_elsewhere_is_refused() -> None:
    scheduler = diffusers.FlowMapEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    with pytest.raises(ModelError, match=r"of its own choice \(r_timestep\)"):
        _Step(Euler(), scheduler)(normal(2, 3), scheduler.timesteps[0], normal(2, 3), r_timestep=0.0)


def test_a_scheduler_that_draws_does_so_from_the_samples_generators() -> None:
    scheduler, x = diffusers.FlowMatchLCMScheduler(), normal(2, 3, 4)
    own = scheduler.step

    def drawn(seeds: list[int]) -> torch.Tensor:
        scheduler.set_timesteps(4)
        with noise_from(scheduler, [torch.Generator().manual_seed(seed) for seed in seeds]):
            assert "generator" in inspect.signature(scheduler.step).parameters  # pipelines look for it
            return scheduler.step(x, scheduler.timesteps[0], x).prev_sample

    first = drawn([1, 2])
    assert torch.equal(first, drawn([1, 2])) and torch.equal(first[0], drawn([1, 3])[0])
    assert not torch.equal(first[1], drawn([1, 3])[1])
    assert scheduler.step == own
    euler = diffusers.FlowMatchEulerDiscreteScheduler()
    with noise_from(euler, torch.Generator()):
        assert "step" not in vars(euler)

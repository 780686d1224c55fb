"""The components that a tape shows to be in the denoising loop."""

import copy
from typing import Any

import diffusers
import pytest
import tiny
import torch

from gerl.engine import ReplayedStep, RequiredTensors, branch, compact, record, replay
from gerl.engine.tape import ComponentCall, Tape
from gerl.errors import ReplayError


@pytest.mark.parametrize(
    ("calls", "looped"),
    [
        (["encoder", "transformer"], {"encoder", "transformer"}),  # one step: nobody knows
        (["transformer", "transformer 1"], {"transformer"}),
        (["encoder", "transformer", "transformer 1"], {"transformer"}),
        (["controlnet", "transformer", "controlnet 1", "transformer 1"], {"controlnet", "transformer"}),
        (["encoder", "high noise", "low noise 1", "low noise 2"], {"high noise", "low noise"}),
        ([], set()),
    ],
)
def test_components_of_the_denoising_loop(calls: list[str], looped: set[str]) -> None:
    tape = Tape({}, 1)
    for call in calls:
        name, step = (call[:-2], int(call[-1])) if call[-1].isdigit() else (call, 0)
        tape.component_calls.append(ComponentCall(step, name, None))
    assert tape.looped_components() == looped


class WithSound(diffusers.StableDiffusion3Pipeline):
    """A picture and its sound, each with a scheduler of its own; the denoiser sees both."""

    loud = 1.0

    @torch.no_grad()
    def __call__(self, prompt: list[str], generator: Any = None) -> dict[str, torch.Tensor]:
        embeds, _, pooled, _ = self.encode_prompt(prompt, None, None, max_sequence_length=8)
        x = self.prepare_latents(len(prompt), 4, 16, 16, embeds.dtype, embeds.device, generator)
        sound = x[:, :, 0].clone()
        self.scheduler.set_timesteps(4)
        scheduler = copy.deepcopy(self.scheduler)
        for t in self.scheduler.timesteps:
            heard = x + 0.1 * sound[:, :, None]
            v = self.transformer(heard, embeds, pooled, t.expand(len(prompt)), return_dict=False)[0]
            x = self.scheduler.step(v, t, x, return_dict=False)[0]
            sound = scheduler.step(self.loud * v.mean(2), t, sound, return_dict=False)[0]
        return {"images": x, "sound": sound}


@pytest.fixture(scope="module")
def pipe() -> Any:
    torch.manual_seed(0)
    made = WithSound(**tiny.build(tiny.CASES["sd3"]).components)
    made.set_progress_bar_config(disable=True)
    tiny.add_lora(made)
    return made


def rolled_out(pipe: Any, **options: Any) -> tuple[Any, Tape]:
    return record(pipe, {"prompt": list(tiny.PROMPTS)}, generators=tiny.generators(), **options)


def deviation(pipe: Any, tape: Tape, **options: Any) -> float:
    found: list[float] = []

    def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
        assert step.recorded_log_prob is not None
        found.append(float((step.log_prob.detach() - step.recorded_log_prob).abs().max()))
        return step.log_prob.sum()

    replay(pipe, tape, on_step, **options)
    return max(found)


def test_the_steps_of_the_sound_are_no_steps_of_the_tape(pipe: Any) -> None:
    output, tape = rolled_out(pipe, window=[1, 2])
    assert len(tape.steps) == len(tape.companions) == 4 and tape.stochastic_steps == [1, 2]
    assert [c.step for c in tape.companions] == [1, 2, 3, 4]
    assert torch.equal(tape.companions[-1].x_next, output["sound"])
    assert all(torch.equal(a.x_next, b.x) for a, b in zip(tape.companions, tape.companions[1:], strict=False))


def test_noise_0_gives_the_sound_of_the_stock_pipeline(pipe: Any) -> None:
    stock = pipe(list(tiny.PROMPTS), generator=tiny.generators())
    ours, _ = rolled_out(pipe, noise_level=0.0)
    assert torch.equal(stock["sound"], ours["sound"]) and torch.equal(stock["images"], ours["images"])


def test_it_is_replayed_whole_in_part_and_lean(pipe: Any) -> None:
    _, tape = rolled_out(pipe)
    assert deviation(pipe, tape) == 0.0
    assert deviation(pipe, tape, index=[2, 0]) < 1e-5
    kept = compact(tape, RequiredTensors(frozenset({1}), means=False, outputs=False))
    assert deviation(pipe, kept, steps=[1], index=[3]) < 1e-5
    assert [c.x_next.is_meta for c in kept.companions] == [False, True, True, True]


def test_a_branch_has_the_sound_of_its_parents_up_to_the_fork(pipe: Any) -> None:
    _, trunk = rolled_out(pipe, window=(), stop=2)
    output, tape = branch(pipe, trunk, 2, [1, 1, 3], window=[2], generators=tiny.generators(3))
    assert output is not None and len(tape.companions) == len(tape.steps) == 4
    for ours, parents in zip(tape.companions[:2], trunk.companions, strict=True):
        assert torch.equal(ours.x_next, parents.x_next[[1, 1, 3]])
    assert deviation(pipe, tape) < 1e-5


def test_the_sound_stays_where_other_latents_are_given(pipe: Any) -> None:
    _, tape = rolled_out(pipe, kernel="ode")
    x = torch.randn(tape.steps[2].x.shape, generator=torch.Generator().manual_seed(5))
    outputs: list[torch.Tensor] = []
    replay(pipe, tape, lambda k, step: outputs.append(step.model_output), steps=[2], latents={2: x}, grad=False)
    embeds = tape.answers[0].value
    heard = x + 0.1 * tape.companions[1].x_next[:, :, None]
    t = pipe.scheduler.timesteps[2].expand(4)
    with torch.no_grad():
        expected = pipe.transformer(heard, embeds[0], embeds[2], t, return_dict=False)[0]
    assert torch.equal(outputs[0], expected)


def test_a_sound_that_arrives_otherwise_is_no_replay(pipe: Any) -> None:
    _, tape = rolled_out(pipe)
    tape.companions[1].x = tape.companions[1].x + 1
    with pytest.raises(ReplayError, match="second modality differ from the recorded ones after step 1"):
        deviation(pipe, tape)

"""Initial latents of the caller's, in pipelines that do not hand on what they prepared as it is."""

from typing import Any

import diffusers
import pytest
import tiny
import torch

from gerl.engine import Reads, ReplayedStep, lean, record, replay


class WithReference(diffusers.StableDiffusion3Pipeline):
    """A picture below its reference, which is prepared with the noise and written again in each step."""

    def prepare_latents(self, *arguments: Any) -> Any:
        noise = super().prepare_latents(*arguments)
        return noise, noise.flip(-1).tanh()

    @torch.no_grad()
    def __call__(self, prompt: list[str], generator: Any = None) -> dict[str, torch.Tensor]:
        embeds, _, pooled, _ = self.encode_prompt(prompt, None, None, max_sequence_length=8)
        noise, reference = self.prepare_latents(len(prompt), 4, 8, 16, embeds.dtype, embeds.device, generator)
        height = reference.shape[2]
        x = torch.cat([reference, noise], 2)
        self.scheduler.set_timesteps(4)
        for t in self.scheduler.timesteps:
            x[:, :, :height] = reference
            v = self.transformer(x, embeds, pooled, t.expand(len(prompt)), return_dict=False)[0]
            x = self.scheduler.step(v, t, x, return_dict=False)[0]
        return {"images": x}


@pytest.mark.parametrize("index", [[0, 1, 2, 3], [2, 0]], ids=["whole", "part"])
def test_a_reference_that_is_handed_on_as_well_is_not_taken_for_the_noise(index: list[int]) -> None:
    torch.manual_seed(0)
    pipe = WithReference(**tiny.build(tiny.CASES["sd3"]).components)
    pipe.set_progress_bar_config(disable=True)
    tiny.add_lora(pipe)
    _, tape = record(pipe, {"prompt": list(tiny.PROMPTS)}, generators=tiny.generators(), noise_level=0.0)
    kept = lean(tape, Reads(frozenset({0}), means=False, outputs=False, forward=True))
    given = torch.randn(tape.steps[0].x.shape)[index]
    height, found = given.shape[2] // 2, list[torch.Tensor]()

    def on_step(k: int, step: ReplayedStep) -> torch.Tensor:
        assert step.written is not None and not step.written[:, :, height:].any()
        found.append(step.x)
        return step.model_output.sum()

    replay(pipe, kept, on_step, steps=[0], index=index, latents={0: given})
    (x,) = found
    assert torch.equal(x[:, :, height:], given[:, :, height:])
    assert torch.equal(x[:, :, :height], tape.steps[0].x[index][:, :, :height])

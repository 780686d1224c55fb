"""Pipelines that do something else in the replay than in the rollout: replayed all the same, or stopped."""

from typing import Any

import diffusers
import pytest
import torch
from replaying import Edit, Recorded, after_each_step, as_class, distance, gradients, own, rolled_out

from gerl.engine import replay
from gerl.errors import ReplayError

# --- pipelines that do something else in the replay


@pytest.fixture
def sd3() -> Recorded:
    """SD3 with a LoRA of its own, for tests that meddle with the pipeline."""
    return own("sd3")


def test_latents_edited_by_the_pipeline_are_replayed(sd3: Recorded) -> None:
    after_each_step(sd3, lambda pipe, i, values: {"latents": values["latents"].mul_(0.9)})  # in place: not in the tape
    rolled_out(sd3)
    first, second = sd3.tape.steps[:2]
    torch.testing.assert_close(second.x, 0.9 * first.x_next)
    assert gradients(sd3)[1] == 0.0
    assert gradients(sd3, steps=[2])[1] == 0.0
    assert gradients(sd3, index=[1, 2])[1] <= 1e-5


def test_the_schedule_is_where_it_was_in_the_rollout(sd3: Recorded) -> None:
    def noise_for_next_step(pipe: Any, i: int, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert pipe.scheduler.step_index == i + 1  # inpainting blends with an image of this noise level
        return {"latents": values["latents"] * (1 - pipe.scheduler.sigmas[pipe.scheduler.step_index])}

    after_each_step(sd3, noise_for_next_step)
    rolled_out(sd3)
    for cfg in ("joint", "detach_uncond"):
        assert gradients(sd3, cfg=cfg)[1] == 0.0


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


def add_noise_once(pipe: Any, i: int, values: dict[str, Any]) -> dict[str, Any] | None:
    return {"latents": values["latents"] + torch.rand(())} if i == 1 else None


def encode_again(pipe: Any, i: int, values: dict[str, Any]) -> None:
    pipe.encode_prompt("x", None, None)


def denoise_again(pipe: Any, i: int, values: dict[str, Any]) -> None:
    pipe.transformer(values["latents"])


def interrupt(pipe: Any, i: int, values: dict[str, Any]) -> None:
    pipe._interrupt = i == 1


@pytest.mark.parametrize(
    ("edit", "only", "message"),
    [
        (add_noise_once, "", "recorded latents at step 2"),
        (encode_again, "in the replay", "replay calls encode_prompt"),
        (encode_again, "in the rollout", "2 outputs at step 1, 3 in the rollout"),
        (denoise_again, "in the replay", "replay calls transformer at step 1"),
        (interrupt, "in the replay", "ended before trained step 2"),
    ],
)
def test_a_pipeline_that_does_something_else_stops_the_replay(
    sd3: Recorded, edit: Edit, only: str, message: str
) -> None:
    def now_and_then(pipe: Any, i: int, values: dict[str, Any]) -> dict[str, Any] | None:
        now = "in the replay" if torch.is_grad_enabled() else "in the rollout"
        return edit(pipe, i, values) if only in ("", now) else None

    after_each_step(sd3, now_and_then)
    rolled_out(sd3)
    assert len(sd3.tape.steps) == 4
    if edit in (add_noise_once, interrupt):
        gradients(sd3, steps=[0, 1])
    with pytest.raises(ReplayError, match=message):
        gradients(sd3, steps=[2])


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


def test_a_denoiser_without_gradient_stops_the_replay(sd3: Recorded) -> None:
    sd3.pipe.transformer.forward = torch.no_grad()(sd3.pipe.transformer.forward)
    rolled_out(sd3)
    with pytest.raises(
        ReplayError, match=r"the denoiser \(SD3Transformer2DModel\) runs .* without gradient, even in training mode"
    ):
        gradients(sd3)
    replay(sd3.pipe, sd3.tape, lambda k, step: None, grad=False)  # a reference pass needs none


def test_nothing_trainable_stops_the_replay(sd3: Recorded) -> None:
    rolled_out(sd3)
    sd3.pipe.transformer.requires_grad_(False)
    with pytest.raises(ReplayError, match="no gradient reaches the model output"):
        gradients(sd3)


def test_samples_that_depend_on_each_other_show_in_the_ratio(sd3: Recorded) -> None:
    def first_sample_decides(module: Any, args: Any, output: Any) -> Any:
        return (output[0] + output[0][:1],)  # as OmniGen's rotary table does

    sd3.pipe.transformer.register_forward_hook(first_sample_decides)
    rolled_out(sd3)
    assert gradients(sd3)[1] == 0.0
    assert gradients(sd3, index=[2, 3])[1] > 1e-3  # what actor.max_ratio_deviation stops


def test_skipped_layers_cannot_be_taken_apart_where_they_are_used(sd3: Recorded) -> None:
    sd3.call |= {"skip_guidance_layers": [0], "skip_layer_guidance_start": 0.01, "skip_layer_guidance_stop": 0.5}
    rolled_out(sd3)
    assert [c.step for c in sd3.tape.component_calls] == [0, 1, 1, 2, 3]
    assert gradients(sd3)[1] == 0.0
    for cfg in ("detach_uncond", "off"):
        assert gradients(sd3, steps=[0, 2], cfg=cfg)[2] == [0, 2]
        with pytest.raises(ReplayError, match=r"step 1 uses 2 denoiser outputs with \[2.0, 1.0\] rows .*use cfg joint"):
            gradients(sd3, cfg=cfg)

import dataclasses
from typing import Any

import pytest

from gerl.commandline.composition import compose_run
from gerl.run.settings import changes, explanation, training_label


def config(*overrides: str) -> dict[str, Any]:
    return dataclasses.asdict(compose_run(["experiment=plain", *overrides]).config)


def test_only_what_differs_from_the_algorithms_defaults_is_listed() -> None:
    assert changes(config("algorithm=flow_grpo")) == [] == changes(config("algorithm=diffusion_nft"))
    found = changes(
        config("algorithm=awm", "actor.lr=1e-5", "validation.data=null", "algorithm.clip_low=0.5",
               "reward.scorers.sharpness.weight=0.5", "sampling.call={max_sequence_length: 8}")
    )  # fmt: skip
    assert {key: (value, default) for key, value, default in found} == {
        "algorithm.clip_low": ("0.5", "1.0"),
        "actor.lr": ("1e-05", "0.0003"),
        "validation.data": ("null", "auto"),
        "sampling.call.max_sequence_length": ("8", "-"),
        "reward.scorers.sharpness.weight": ("0.5", "1.0"),
    }


def test_an_unknown_algorithm_shows_no_difference() -> None:
    assert changes({"algorithm": {"name": "of another version"}}) == []


@pytest.mark.parametrize(
    ("overrides", "noisy", "said"),
    [
        (["algorithm=flow_grpo"], True, ["with noise in the steps (flow_sde, noise_level 0.7)"]),
        (["algorithm=awm"], False, ["without noise in the steps (kernel ode)", "another file", "actor.ema_decay"]),
        (["algorithm=diffusion_nft"], False, ["an average of the trained weights"]),
        (["validation.num_inference_steps=40", "validation.guidance_scale=2"], True, ["steps 40", "guidance 2"]),
        (["validation.images_per_prompt=3", "validation.width=64"], True, ["3 images per prompt", "width of 64"]),
        (["data.train=signs_train", "validation.data=signs_train"], True, ["of the training file"]),
        (["algorithm=flow_grpo", "actor.ema_decay=0"], True, ["sampled by the trained weights without"]),
    ],
)  # fmt: skip
def test_the_curves_are_described_as_they_were_drawn(overrides: list[str], noisy: bool, said: list[str]) -> None:
    preset = [] if overrides[0].startswith("algorithm=") else ["algorithm=flow_grpo"]
    values = config(*preset, *overrides)
    assert ("noise" in training_label(values)) == noisy
    text = explanation(values)
    assert all(part in text for part in said), text
    assert "12 images for each of 8 prompts" in text


def test_without_a_configuration_nothing_is_claimed() -> None:
    assert "noise" not in training_label({}) and "kernel" not in explanation({})

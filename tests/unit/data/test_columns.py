"""Columns with a known name that no pipeline is given."""

from typing import Any

import pytest

from gerl.config import Config, RewardConfig, ScorerConfig
from gerl.data.columns import unused_columns
from gerl.protocol import Prompt

ARGUMENTS = ["prompt", "negative_prompt", "height", "num_inference_steps", "image", "ip_adapter_image", "strength"]


def said(accepted: list[str] = ARGUMENTS, scorer: str = "sharpness", **row: Any) -> str:
    config = Config(reward=RewardConfig({scorer: ScorerConfig()}))
    return "".join(unused_columns([Prompt(0, "a"), Prompt(1, "b", row)], config, accepted))


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ({"negative_prompt": "blurry"}, "negative_prompt (sampling.call.negative_prompt applies to all prompts)"),
        ({"seed": 3}, "seed (noise is sampled from trainer.seed)"),
        ({"height": 3}, "sampling.height"),
        ({"steps": 20}, "sampling.num_inference_steps"),
        ({"cfg": 7}, "sampling.guidance_scale"),
        ({"strength": 0.5}, "sampling.call.strength"),
        ({"ip_adapter_image": "a.png"}, "pictures are given in image, mask_image, control_image"),
        ({"mask": "a.png"}, "data.columns={mask_image: mask}"),
        ({"mask_image": "a.png"}, "takes no such argument"),
        ({"caption": "a long one"}, "data.prompt_key"),
        ({"text": "A"}, "data.prompt_key"),
    ],
)
def test_a_column_with_a_known_name_is_named_with_what_is_read_instead(row: dict[str, Any], remedy: str) -> None:
    assert remedy in said(**row) and said(**row).startswith("prompt columns")


def test_what_is_used_or_has_no_known_name_is_not_mentioned() -> None:
    assert said(image="a.png", tag="counting", include=[1], seed=None, data_source="x", turn=1) == ""
    assert said(scorer="ocr", text="A") == ""
    assert "takes no such argument" in said(["prompt"], negative_prompt="blurry")
    assert said(seed=1, steps=2).count("columns") == 1

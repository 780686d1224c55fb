"""The arguments of a pipeline's call that depend on its scheduler."""

import re
from typing import Any

import pytest
from newer import diffusers

from gerl.config import SamplingConfig
from gerl.errors import ModelError
from gerl.model.prompts import check_sigmas, unguided


@pytest.mark.parametrize(
    "kind", [diffusers.DDIMScheduler, diffusers.EDMEulerScheduler, diffusers.LCMScheduler, diffusers.SCMScheduler]
)
def test_sigmas_of_flow_matching_are_refused_for_another_schedule(kind: Any) -> None:
    check_sigmas(kind(), SamplingConfig())
    with pytest.raises(
        ModelError, match=rf"sampling\.sigmas=linear requires flow matching.*{kind.__name__}, use .*=sched"
    ):
        check_sigmas(kind(), SamplingConfig(sigmas="linear"))


@pytest.mark.parametrize(
    "kind",
    [
        diffusers.FlowMatchEulerDiscreteScheduler,
        diffusers.FlowMatchLCMScheduler,
        diffusers.FlowMapEulerDiscreteScheduler,
    ],
)
def test_sigmas_of_flow_matching_are_those_of_its_schedulers(kind: Any) -> None:
    check_sigmas(kind(), SamplingConfig(sigmas="linear"))


@pytest.mark.parametrize(
    ("kind", "call", "said"),
    [
        (diffusers.QwenImagePipeline, {}, "true_cfg_scale of QwenImagePipeline, 4,.*negative_prompt"),
        (diffusers.QwenImagePipeline, {"true_cfg_scale": 3.0}, r"sampling\.call\.true_cfg_scale=3 .*negative_prompt"),
        (diffusers.FluxPipeline, {"true_cfg_scale": 2.0}, r"sampling\.call\.true_cfg_scale=2 .*negative_prompt"),
        (diffusers.QwenImagePipeline, {"negative_prompt": " "}, None),
        (diffusers.QwenImagePipeline, {"true_cfg_scale": 1.0}, None),
        (diffusers.FluxPipeline, {}, None),
        (diffusers.StableDiffusion3Pipeline, {}, None),
    ],
)
def test_a_scale_of_guidance_without_a_negative_prompt_is_said(
    kind: Any, call: dict[str, Any], said: str | None
) -> None:
    found = unguided(kind, SamplingConfig(call=call))
    assert found is None if said is None else re.search(said, found or "")

"""The arguments of a pipeline's call that depend on its scheduler."""

from typing import Any

import diffusers
import pytest

from gerl.config import SamplingConfig
from gerl.errors import ModelError
from gerl.model.call import check_sigmas


@pytest.mark.parametrize(
    "kind", [diffusers.DDIMScheduler, diffusers.EDMEulerScheduler, diffusers.LCMScheduler, diffusers.SCMScheduler]
)
def test_sigmas_of_flow_matching_are_refused_for_another_schedule(kind: Any) -> None:
    check_sigmas(kind(), SamplingConfig())
    with pytest.raises(
        ModelError, match=rf"sampling\.sigmas=linear is for flow matching.*{kind.__name__}, use .*=sched"
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

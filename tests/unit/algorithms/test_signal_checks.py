import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from schedules import sd3_sigmas

from gerl.algorithms.core_algos import step_weights
from gerl.algorithms.signal_checks import probe_warnings, ratio_limit, ratio_problem
from gerl.config import ActorConfig
from gerl.engine.transitions import FlowRule, coefficients
from gerl.protocol import SamplingProbe, StepFacts


@pytest.mark.parametrize(
    ("noise", "clip", "warned"), [(1.1e-7, 1e-9, True), (1.1e-7, 1e-4, False), (1e-4, 1e-4, True), (1.0, None, False)]
)
def test_a_clip_range_below_the_noise_of_the_log_ratio_is_warned_of(
    noise: float, clip: float | None, warned: bool
) -> None:
    said = probe_warnings(SamplingProbe(noise, []), clip)
    assert len(said) == warned
    if warned:
        assert said[0].startswith(
            f"the clip range {clip:g} is below twice the numerical noise of the log-ratio, {noise:.1e}"
        )


def test_steps_that_flip_the_noise_are_named() -> None:
    (said,) = probe_warnings(SamplingProbe(0.0, [(4, 0.432, 0.009, -0.17)]), 1e-4)
    assert said.startswith(
        "step 4 of the window, from sigma 0.432 to 0.009, flips the sign of the predicted noise (kappa -0.17 < 0)"
    )
    assert said.endswith("end sampling.window_range before it")  # precise has a step with hardly any noise


def probe_of(kernel: str, noise: float, steps: int, weighting: str = "uniform", trained: int | None = None) -> Any:
    """Of the schedule of Stable Diffusion 3, all steps but the last."""
    sigmas = sd3_sigmas(steps)
    pairs = list(pairwise(sigmas[:-1]))[:trained]
    rules = [FlowRule(s, n, *coefficients(kernel, s, n, noise, sigmas[1])) for s, n in pairs]
    parts = [r.std for r in rules], [r.dt for r in rules], [r.jacobian for r in rules]
    weights = step_weights(weighting, *parts)  # type: ignore[arg-type]
    facts = [
        StepFacts(k, r.sigma, r.dt, r.std, r.jacobian, w, w * r.jacobian / r.std)
        for k, (r, w) in enumerate(zip(rules, weights, strict=True))
    ]
    return SamplingProbe(0.0, [], steps=facts, weighting=weighting)


@pytest.mark.parametrize("kernel", ["precise", "cps", "dance_precise"])
def test_a_step_with_hardly_any_noise_that_outweighs_all_others_is_named(kernel: str) -> None:
    (said,) = probe_warnings(probe_of(kernel, 0.7, 10), None)
    assert said.startswith("the noise of step 8 (std 0.00") and "std2_over_jacobian, or end" in said
    assert "preflight signal=" in said and "kernel" not in said


def test_steps_that_may_be_kept_are_within_the_spread() -> None:
    (said,) = probe_warnings(probe_of("flow_sde", 0.7, 28), None)
    end = int(re.search(r"before step (\d+) at the latest;", said)[1])  # type: ignore[index]
    assert not probe_warnings(probe_of("flow_sde", 0.7, 28, trained=end), None)
    assert probe_warnings(probe_of("flow_sde", 0.7, 28, trained=end + 1), None)


@pytest.mark.parametrize(
    ("kernel", "weighting"),
    [("flow_sde", "std2_over_jacobian"), ("precise", "std2_over_jacobian"), ("flow_sde", "std")],
)
def test_weights_that_count_the_noisy_steps_most_are_not_warned_of(kernel: str, weighting: str) -> None:
    assert not probe_warnings(probe_of(kernel, 0.7, 10, weighting), None)


def test_without_weights_to_choose_the_window_is_the_remedy() -> None:
    probe = replace(probe_of("precise", 0.7, 10), weighting=None)
    (said,) = probe_warnings(probe, None)
    assert "timestep_weights" not in said and "steps: end sampling.window_range before step" in said
    assert not probe_warnings(replace(probe, steps=[StepFacts(0, 1.0, -0.1)]), None)  # of another family


def test_the_ratio_on_policy_has_a_limit() -> None:
    assert ratio_limit(ActorConfig(), False) == 1e-3 and ratio_limit(ActorConfig(), True) == 2e-2
    assert ratio_limit(ActorConfig(max_ratio_deviation=0.5), True) == 0.5
    assert ratio_problem(0.25, 1e-3).startswith("max |ratio - 1| is 2.50e-01 before the first optimizer step, above ")

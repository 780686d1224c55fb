"""From a scheduler to the rule of its next step: schedules that run the other way, and those that start below 1."""

import math
from typing import Any

import diffusers
import pytest
import tiny

from gerl.engine.kernels import KERNELS, FlowRule, coefficients
from gerl.engine.transitions import Sampler, Transitions
from gerl.model.schedulers import trainable_scheduler

STEPS, NOISE = 7, 0.7
FLOW = sorted(set(KERNELS) - {"ddim"})


def rules(scheduler: Any, kernel: str) -> list[FlowRule]:
    scheduler.set_timesteps(STEPS)
    transitions = Transitions(Sampler(kernel, NOISE))
    found = [transitions.next_rule(scheduler, t, None) for t in scheduler.timesteps]
    assert all(isinstance(rule, FlowRule) for rule in found)
    return found


@pytest.mark.parametrize("kernel", FLOW)
def test_an_inverted_schedule_has_the_rules_of_the_usual_one(kernel: str) -> None:  # Mochi's
    usual, inverted = rules(tiny.euler(), kernel), rules(tiny.euler(invert_sigmas=True), kernel)
    assert [rule.inverted for rule in inverted] == [True] * STEPS and not any(rule.inverted for rule in usual)
    assert inverted[0].sigma == 1  # where Flow-SDE takes the schedule's second sigma, mirrored too
    for a, b in zip(inverted, usual, strict=True):
        numbers = [(r.sigma, r.sigma_next, r.kappa, r.std) for r in (a, b)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)


@pytest.mark.parametrize("sigma", [0.9991, 0.9999, 0.99999, 1.0])
def test_close_to_sigma_one_flow_sde_takes_the_denominator_from_the_second_sigma(sigma: float) -> None:
    kappa, std = coefficients("flow_sde", sigma, 0.96, NOISE, 0.96)
    g = NOISE * math.sqrt(sigma / (1 - 0.96))
    assert (kappa, std) == pytest.approx((0.96 - g * g * (sigma - 0.96) / (2 * sigma), g * math.sqrt(sigma - 0.96)))
    assert std < 0.71  # with a denominator of its own, 7 at sigma 0.9999
    # a little further below 1 it is the step's own
    assert coefficients("flow_sde", 0.9989, 0.96, NOISE, 0.96)[1] == pytest.approx(
        NOISE * math.sqrt(0.9989 / 0.0011 * (0.9989 - 0.96))
    )


def test_a_schedule_that_starts_just_below_one_has_no_burst_of_noise() -> None:
    unipc = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    first = rules(trainable_scheduler(unipc), "flow_sde")[0]
    from_one = rules(tiny.euler(shift=3.0), "flow_sde")[0]
    assert 0.999 < first.sigma < 1 == from_one.sigma
    assert first.std == pytest.approx(NOISE * math.sqrt(first.sigma / (1 - first.sigma_next) * -first.dt))
    assert first.std == pytest.approx(from_one.std, rel=0.1)

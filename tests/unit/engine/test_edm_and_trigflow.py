"""The kernels of EDM schedules and of TrigFlow's consistency models, in closed form."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SCMScheduler

from gerl.engine.transitions import KERNELS, EDMRule, FlowRule, Transitions, check_scheduler, coefficients
from gerl.errors import ModelError

X, OUT, NOISE = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(0)).double().float()


def edm_scheduler() -> FlowMatchEulerDiscreteScheduler:
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    scheduler.sigmas = torch.tensor([80.0, 10.0, 1.0, 0.002, 0.002])
    return scheduler


def edm_rules(
    kernel: str, noise_level: float, scheduler: FlowMatchEulerDiscreteScheduler, solver: str = "euler"
) -> list[EDMRule]:
    transitions = Transitions(kernel, noise_level, solver)
    found = [transitions.next_rule(scheduler, t, None) for t in scheduler.timesteps]
    return [rule for rule in found if isinstance(rule, EDMRule)]


def scm_scheduler() -> SCMScheduler:
    scheduler = SCMScheduler()
    scheduler.set_timesteps(2, max_timesteps=1.57080, intermediate_timesteps=1.3)
    scheduler.set_begin_index(0)
    return scheduler


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("c, c_next", [(80.0, 10.0), (2.0, 0.5), (0.3, 0.002)])
def test_an_edm_step_is_the_flow_matching_step_of_the_scaled_latents(kernel: str, c: float, c_next: float) -> None:
    s, s_next = c / (1 + c), c_next / (1 + c_next)
    kappa, std = coefficients(kernel, s, s_next, 0.3, 0.9)
    edm, flow = EDMRule(c, c_next, kappa, (1 + c_next) * std), FlowRule(s, s_next, kappa, std)
    assert (edm.sigma, edm.sigma_next) == (s, s_next) and edm.dt == flow.dt
    scaled = X / (1 + c)
    velocity = OUT - (X - c * OUT)  # noise less clean latents
    expected = (1 + c_next) * flow.mean(scaled, velocity)
    torch.testing.assert_close(edm.mean(X, OUT), expected, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))
    # d(mean) / d(output): the velocity moves with it by 1 + c
    assert edm.jacobian == pytest.approx(abs((1 + c_next) * flow.jacobian * (1 + c)), rel=1e-6)


def test_without_noise_an_edm_step_is_the_schedulers() -> None:
    scheduler = edm_scheduler()
    rules = edm_rules("ode", 0.0, scheduler)
    scheduler = edm_scheduler()
    for rule, t in zip(rules, scheduler.timesteps, strict=True):
        assert rule.std == 0 and torch.equal(rule.mean(X, OUT), scheduler.step(OUT, t, X).prev_sample)


def test_the_last_edm_step_is_deterministic_also_where_it_has_no_length() -> None:
    rules = edm_rules("flow_sde", 0.7, edm_scheduler())
    assert [rule.std > 0 for rule in rules] == [True, True, True, False]
    scheduler = edm_scheduler()
    scheduler._step_index = 3
    with pytest.raises(ModelError, match="last denoising step is deterministic"):
        Transitions("flow_sde", 0.7).next_rule(scheduler, scheduler.timesteps[3], True)


def test_edm_goes_with_euler_steps_only() -> None:
    with pytest.raises(ModelError, match=r"sampling.solver=dpm2 .* use euler"):
        edm_rules("flow_sde", 0.7, edm_scheduler(), "dpm2")


@pytest.mark.parametrize("kind", ["edm", "trigflow"])
def test_a_perfect_model_leads_back_to_the_data(kind: str) -> None:
    if kind == "edm":
        rule = edm_rules("ode", 0.0, edm_scheduler())[1]
        assert torch.equal(rule.noised(X, NOISE), X + 10.0 * NOISE)
    else:
        scheduler = scm_scheduler()
        rule = Transitions("cps", 1.0).next_rule(scheduler, scheduler.timesteps[0], None)
        rule = Transitions("cps", 1.0).next_rule(scheduler, scheduler.timesteps[1], None)
        torch.testing.assert_close(rule.noised(X, NOISE), math.cos(1.3) * X + math.sin(1.3) * 0.5 * NOISE)
    x = rule.noised(X, NOISE)
    torch.testing.assert_close(rule.clean(x, rule.target(X, NOISE)), X, rtol=1e-5, atol=1e-5)


def test_full_noise_of_cps_is_the_consistency_models_own_sampler() -> None:
    scheduler, own = scm_scheduler(), scm_scheduler()
    rule = Transitions("cps", 1.0).next_rule(scheduler, scheduler.timesteps[0], None)
    stock = own.step(OUT, own.timesteps[0], X, generator=torch.Generator().manual_seed(7)).prev_sample
    noise = torch.randn(X.shape, generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(rule.mean(X, OUT) + rule.std * noise, stock, rtol=0, atol=1e-6)
    last = Transitions("cps", 1.0).next_rule(scheduler, scheduler.timesteps[1], None)
    assert last.std == 0
    clean = math.cos(1.3) * X - math.sin(1.3) * OUT
    torch.testing.assert_close(last.mean(X, OUT), clean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel, solver", [("flow_sde", "euler"), ("cps", "dpm2")])
def test_a_consistency_model_has_one_kernel(kernel: str, solver: str) -> None:
    with pytest.raises(ModelError, match=r"the SCMScheduler of this consistency model .*: use cps"):
        check_scheduler(scm_scheduler(), kernel, 0.7, solver)

"""Schedulers of EDM, latent consistency models and flow maps: their rules are their own steps, in closed form."""

import math
from typing import Any

import diffusers
import pytest
import torch

from gerl.engine.kernels import (
    KERNELS,
    DDIMRule,
    DenoisedRule,
    EDMRule,
    FlowMapRule,
    FlowRule,
    Rule,
    coefficients,
    with_noise,
)
from gerl.engine.scheduler_families import counts_steps, is_consistency, lcm_clean, noises_anew
from gerl.engine.transitions import Sampler, Transitions, check_scheduler
from gerl.errors import ModelError, ReplayError

GENERATOR = torch.Generator().manual_seed(0)
X, OUT, NOISE = torch.randn(3, 2, 4, 5, generator=GENERATOR)
PREDICTIONS = ("epsilon", "v_prediction", "sample")


def edm(prediction_type: str = "epsilon", last: str = "zero", steps: int = 4) -> diffusers.EDMEulerScheduler:
    scheduler = diffusers.EDMEulerScheduler(prediction_type=prediction_type, final_sigmas_type=last)
    scheduler.set_timesteps(steps)
    scheduler.is_scale_input_called = True
    return scheduler


def lcm(prediction_type: str = "epsilon", **config: Any) -> diffusers.LCMScheduler:
    scheduler = diffusers.LCMScheduler(prediction_type=prediction_type, **config)
    scheduler.set_timesteps(4)
    return scheduler


def flow_map() -> diffusers.FlowMapEulerDiscreteScheduler:
    scheduler = diffusers.FlowMapEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(4)
    return scheduler


def flow_lcm() -> diffusers.FlowMatchLCMScheduler:
    scheduler = diffusers.FlowMatchLCMScheduler(shift=3.0)
    scheduler.set_timesteps(4)
    return scheduler


def rules_of(scheduler: Any, kernel: str, noise_level: float) -> list[Any]:
    """The rule of each step of `scheduler`, noise wherever it can be."""
    transitions = Transitions(Sampler(kernel, noise_level))
    return [transitions.next_rule(scheduler, t, None) for t in scheduler.timesteps]


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- EDM


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("c, c_next", [(80.0, 10.0), (2.0, 0.5), (0.3, 0.002)])
def test_a_preconditioned_step_is_that_of_the_noise_it_predicts(kernel: str, c: float, c_next: float) -> None:
    kappa, std = coefficients(kernel, c / (1 + c), c_next / (1 + c_next), 0.3, 0.9)
    skip, out = 0.25 / (c * c + 0.25), 0.5 * c / math.sqrt(c * c + 0.25)
    plain = EDMRule(c, c_next, kappa, (1 + c_next) * std)
    rule = DenoisedRule(c, c_next, kappa, (1 + c_next) * std, skip, out)
    noise = (X - (skip * X + out * OUT)) / c
    torch.testing.assert_close(rule.mean(X, OUT), plain.mean(X, noise), rtol=1e-5, atol=1e-5)
    assert (rule.std, rule.sigma, rule.dt) == (plain.std, plain.sigma, plain.dt)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("last", ["zero", "sigma_min"])
def test_without_noise_a_preconditioned_step_is_bitwise_the_schedulers(prediction_type: str, last: str) -> None:
    own = edm(prediction_type, last)
    for rule, t in zip(rules_of(edm(prediction_type, last), "ode", 0.0), own.timesteps, strict=True):
        stepped = own.step(OUT, t, X)
        assert rule.std == 0 and torch.equal(rule.mean(X, OUT), stepped.prev_sample)
        assert torch.equal(rule.clean(X, OUT), stepped.pred_original_sample)


@pytest.mark.parametrize("c", [80.0, 1.0, 0.01])
@pytest.mark.parametrize("clean_output", [False, True])
def test_clean_inverts_noised_with_the_target_and_the_jacobian_is_the_derivative(c: float, clean_output: bool) -> None:
    scalings = (0.0, 1.0) if clean_output else (0.25 / (c * c + 0.25), 0.5 * c / math.sqrt(c * c + 0.25))
    rule = DenoisedRule(c, c / 2, 0.3 * c / (2 + c), 0.1, *scalings)
    x = rule.noised(X, NOISE)
    assert torch.equal(x, X + c * NOISE)
    torch.testing.assert_close(rule.clean(x, rule.target(X, NOISE)), X, rtol=1e-5, atol=2e-5)
    out = OUT.clone().requires_grad_()
    (slope,) = torch.autograd.grad(rule.mean(x, out).sum(), out)
    torch.testing.assert_close(slope.abs(), torch.full_like(slope, rule.jacobian), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kernel", ["flow_sde", "precise"])
def test_many_steps_of_edm_keep_the_distribution_of_the_data(kernel: str) -> None:
    """Data N(0, 1), whose perfect denoiser predicts x / (1 + c^2): what is left of the initial variance is 1."""
    scheduler = edm(steps=400)
    variance = float(scheduler.sigmas[0]) ** 2 + 1
    for rule in rules_of(scheduler, kernel, 0.5):
        one = torch.ones(1, dtype=torch.float32)
        output = (one / (1 + rule.scale**2) - rule.skip * one) / rule.out
        variance = float(rule.mean(one, output)) ** 2 * variance + rule.std**2
    assert variance == pytest.approx(1.0, abs=0.03)


def test_the_last_step_of_edm_is_deterministic_also_where_it_has_no_length() -> None:
    for last in ("zero", "sigma_min"):
        assert [rule.std > 0 for rule in rules_of(edm(last=last), "flow_sde", 0.7)] == [True, True, True, False]
    scheduler = edm()
    assert Transitions(Sampler("ode", 0.0)).num_steps(scheduler, scheduler.timesteps[0]) == 4


# --- latent consistency models


@pytest.mark.parametrize("prediction_type", PREDICTIONS)
@pytest.mark.parametrize("clip", [False, True])
def test_full_noise_of_cps_is_the_own_sampler_of_a_latent_consistency_model(prediction_type: str, clip: bool) -> None:
    own, config = lcm(prediction_type, clip_sample=clip), {"clip_sample": clip}
    assert own.timesteps.tolist() == [999, 759, 499, 259]  # of which DDIM has none
    rules = rules_of(lcm(prediction_type, **config), "cps", 1.0)
    assert [rule.std > 0 for rule in rules] == [True, True, True, False]
    for k, (rule, t) in enumerate(zip(rules, own.timesteps, strict=True)):
        stepped = own.step(OUT, t, X, generator=drawn(k))
        noise = torch.randn(X.shape, generator=drawn(k))
        torch.testing.assert_close(rule.mean(X, OUT) + rule.std * noise, stepped.prev_sample, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(rule.clean(X, OUT), stepped.denoised, rtol=1e-6, atol=2e-6)
        assert torch.equal(lcm_clean(own, t, OUT, X), stepped.denoised)
        assert rule.sigma_next == pytest.approx(math.sqrt(rule.direction**2 + rule.std**2))


@pytest.mark.parametrize("prediction_type", PREDICTIONS)
def test_the_boundary_condition_is_in_the_jacobian(prediction_type: str) -> None:
    rule = DDIMRule(0.6, 0.28, 0.8, 0.96, 0.2, 0.1, prediction_type, None, boundary=(0.3, 0.7))
    out = OUT.clone().requires_grad_()
    (slope,) = torch.autograd.grad(rule.mean(X, out).sum(), out)
    torch.testing.assert_close(slope.abs(), torch.full_like(slope, rule.jacobian), rtol=1e-5, atol=1e-6)


def test_the_number_of_steps_of_a_latent_consistency_model() -> None:
    scheduler, transitions = lcm(), Transitions(Sampler("cps", 1.0))
    assert transitions.num_steps(scheduler, scheduler.timesteps[0]) == 4
    transitions.next_rule(scheduler, scheduler.timesteps[0], None)
    assert transitions.num_steps(scheduler, scheduler.timesteps[1]) == 3


@pytest.mark.parametrize("prediction_type", PREDICTIONS)
def test_a_trajectory_consistency_model_has_its_own_steps_and_cps_around_them(prediction_type: str) -> None:
    own, plain, noisy = (diffusers.TCDScheduler(prediction_type=prediction_type) for _ in range(3))
    for each in (own, plain, noisy):
        each.set_timesteps(4)
    assert own.timesteps.tolist() == [999, 759, 499, 259]
    rules = zip(rules_of(plain, "cps", 0.0), rules_of(noisy, "cps", 0.7), own.timesteps, strict=True)
    for k, (rule, drawn_around, t) in enumerate(rules):
        stock = own.step(3 * OUT, t, X, eta=0.0)  # so large that clipping would show
        torch.testing.assert_close(rule.mean(X, 3 * OUT), stock.prev_sample, rtol=1e-6, atol=2e-6)
        assert rule.std == 0 and (drawn_around.std > 0) == (k < 3)
        assert math.hypot(drawn_around.direction, drawn_around.std) == pytest.approx(rule.sigma_next)


def test_full_noise_of_cps_is_the_own_sampler_of_a_consistency_model_of_flow_matching() -> None:
    own = flow_lcm()
    rules = rules_of(flow_lcm(), "cps", 1.0)
    assert all(isinstance(rule, FlowRule) for rule in rules) and rules[-1].std == 0
    for k, (rule, t) in enumerate(zip(rules, own.timesteps, strict=True)):
        stock = own.step(OUT, t, X, generator=drawn(k)).prev_sample
        noise = torch.randn(X.shape, generator=drawn(k))
        torch.testing.assert_close(rule.mean(X, OUT) + rule.std * noise, stock, rtol=1e-6, atol=2e-6)


# --- flow maps


def test_a_flow_map_takes_its_own_steps() -> None:
    own = flow_map()
    for rule, t in zip(rules_of(flow_map(), "ode", 0.0), own.timesteps, strict=True):
        assert isinstance(rule, FlowMapRule) and rule.std == 0 and rule.jacobian == -rule.dt > 0
        assert torch.equal(rule.mean(X, OUT), own.step(OUT, t, X).prev_sample)


def test_a_flow_map_has_no_clean_latents_to_train_on() -> None:
    rule = rules_of(flow_map(), "ode", 0.0)[0]
    for asked in (rule.noised, rule.target, rule.clean):
        with pytest.raises(ReplayError, match=r"a flow map is trained at its own latents.*neighbor_grpo"):
            asked(X, OUT)
    scheduler = flow_map()
    with pytest.raises(ModelError, match=r"without noise: use sampling\.kernel=ode and compression=1"):
        Transitions(Sampler("ode", 0.0)).next_rule(scheduler, scheduler.timesteps[0], True)


# --- which kernel goes with which scheduler


@pytest.mark.parametrize(
    ("make", "kernel", "solver", "message"),
    [
        (lcm, "ddim", "euler", r"kernel=ddim with .* the LCMScheduler of this consistency model .*: use cps"),
        (lcm, "cps", "dpm2", r"solver=dpm2 .* LCMScheduler of this consistency model .*use cps .* and euler"),
        (flow_lcm, "flow_sde", "euler", "the FlowMatchLCMScheduler of this consistency model .*use cps"),
        (edm, "flow_sde", "dpm2", r"solver=dpm2 is for sigmas in \[0, 1\].*EDMEulerScheduler.*use euler"),
        (flow_map, "flow_sde", "euler", "FlowMapEulerDiscreteScheduler.* whose model jumps.*use ode and euler"),
        (flow_map, "ode", "dpm2", "FlowMapEulerDiscreteScheduler.*use ode and euler"),
    ],
)
def test_a_kernel_that_the_scheduler_does_not_have_is_refused(
    make: Any, kernel: str, solver: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        check_scheduler(make(), Sampler(kernel, 0.7, solver))


def test_thresholding_of_a_latent_consistency_model_is_refused() -> None:
    with pytest.raises(ModelError, match="LCMScheduler with thresholding has no transition kernel"):
        check_scheduler(lcm(thresholding=True), Sampler("cps", 1.0))


def test_families_are_known_by_their_class() -> None:
    consistency = [lcm(), flow_lcm(), diffusers.SCMScheduler(), diffusers.TCDScheduler()]
    assert [is_consistency(each) for each in consistency] == [True] * 4
    assert [noises_anew(each) for each in consistency] == [True] * 3 + [False]
    assert not any(is_consistency(make()) for make in (edm, flow_map, diffusers.DDIMScheduler))
    assert all(counts_steps(make()) for make in (edm, lcm, flow_lcm, flow_map)) and not counts_steps(
        diffusers.DDIMScheduler()
    )


# --- the noise that a deterministic step would have


@pytest.mark.parametrize("make, kernel", [(edm, "flow_sde"), (lcm, "cps"), (flow_lcm, "cps"), (None, "ddim")])
def test_a_step_without_noise_is_given_that_of_the_kernel(make: Any, kernel: str) -> None:
    def scheduler() -> Any:
        if make is not None:
            return make()
        ddim = diffusers.DDIMScheduler()
        ddim.set_timesteps(4)
        return ddim

    plain, noisy = rules_of(scheduler(), "ode", 0.0), rules_of(scheduler(), kernel, 0.6)
    for rule, expected in zip(plain[:-1], noisy[:-1], strict=True):
        got: Rule = with_noise(rule, kernel, 0.6, plain[0].sigma_next)
        assert expected.std > 0 and got.std == pytest.approx(expected.std, rel=1e-5)
        torch.testing.assert_close(got.mean(X, OUT), expected.mean(X, OUT), rtol=1e-4, atol=1e-4)
    last = with_noise(plain[-1], kernel, 0.6, plain[0].sigma_next)
    assert (last.std > 0) == (kernel == "flow_sde" or plain[-1].sigma_next > 0)  # the others end without


def test_a_step_of_length_zero_is_given_no_noise() -> None:
    rules: list[Rule] = [EDMRule(2.0, 2.0, 0.5, 0.0), DDIMRule(0.0, 0.0, 1.0, 1.0, 0.0, 0.0, "epsilon", None)]
    assert [with_noise(rule, "ddim", 0.7, 0.9) for rule in rules] == rules


def test_no_noise_of_a_flow_map() -> None:
    rule = FlowMapRule(0.7, 0.4)
    assert with_noise(rule, "flow_sde", 0.7, 0.9) is rule


# --- zero terminal SNR


@pytest.mark.parametrize("prediction_type", ["v_prediction", "sample"])
@pytest.mark.parametrize("eta", [0.0, 0.6, 1.0])
def test_ddim_from_pure_noise_is_the_schedulers(prediction_type: str, eta: float) -> None:
    options: dict[str, Any] = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing", "clip_sample": False}
    own, ours = (diffusers.DDIMScheduler(prediction_type=prediction_type, **options) for _ in range(2))
    for scheduler in (own, ours):
        scheduler.set_timesteps(4)
    rules = rules_of(ours, "ddim" if eta else "ode", eta)
    assert rules[0].sigma == 1 and rules[0].sqrt_alpha == 0
    for k, (rule, t) in enumerate(zip(rules, own.timesteps, strict=True)):
        stock = own.step(OUT, t, X, eta=eta if rule.std > 0 else 0.0, generator=drawn(k)).prev_sample
        if rule.std == 0:
            assert torch.equal(rule.mean(X, OUT), stock)
        elif torch.isfinite(stock).all():  # at eta 1 its root of what is 0 but for rounding may be of less
            noise = torch.randn(X.shape, generator=drawn(k))
            torch.testing.assert_close(rule.mean(X, OUT) + rule.std * noise, stock, rtol=1e-6, atol=2e-6)
        assert torch.isfinite(rule.mean(X, OUT)).all() and math.isfinite(rule.jacobian)


def test_ddim_from_pure_noise_needs_another_prediction_than_the_noise() -> None:
    scheduler = diffusers.DDIMScheduler(rescale_betas_zero_snr=True)
    with pytest.raises(ModelError, match="starts at pure noise, where an epsilon prediction carries no information"):
        check_scheduler(scheduler, Sampler("ddim", 0.7))

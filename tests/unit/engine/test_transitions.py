"""From a scheduler to the rule of its next step: schedules that run the other way, and those that start below 1."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from newer import diffusers
from replaying import EACH, GUIDED, Recorded, after_each_step, counted_rows, gradients, own, recorded, replayed
from schedules import sd3_sigmas, velocity

from gerl.engine import ReplayedStep, Tape
from gerl.engine.skipping import compressed_spans
from gerl.engine.transitions import (
    CONSISTENCY,
    COUNTS_STEPS,
    KERNELS,
    RESAMPLES,
    DDIMRule,
    DenoisedRule,
    EDMRule,
    FlowMapRule,
    FlowRule,
    OdeSolver,
    Rule,
    Transitions,
    check_scheduler,
    coefficients,
    family,
    lcm_clean,
    with_noise,
)
from gerl.errors import ModelError, ReplayError
from gerl.model.schedulers import trainable_scheduler

STEPS, NOISE = 7, 0.7
FLOW = sorted(set(KERNELS) - {"ddim"})


def rules(scheduler: Any, kernel: str) -> list[FlowRule]:
    scheduler.set_timesteps(STEPS)
    transitions = Transitions(kernel, NOISE)
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


X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


def path(
    sigmas: list[float], model: Callable[[torch.Tensor, float], torch.Tensor], name: str, start: torch.Tensor = X
) -> list[torch.Tensor]:
    """The latents along `sigmas` from `start`, taken with a solver."""
    solver, x = OdeSolver(name), [start]
    for s, s2 in itertools.pairwise(sigmas):
        x.append(solver.step("the scheduler", FlowRule(s, s2, s2, 0.0), x[-1], model(x[-1], s)))
    return x


def wavy(x: torch.Tensor, s: float) -> torch.Tensor:
    """A velocity that has nothing to do with data."""
    return torch.sin(3 * x) + s * x


def even(n: int) -> list[float]:
    return [1 - i / n for i in range(n + 1)]


# --- DPM-Solver++(2M)


def test_second_order_steps_are_the_published_formula() -> None:
    sigmas, x = [0.9, 0.7, 0.4, 0.35], path([0.9, 0.7, 0.4, 0.35], wavy, "dpm2")
    for k in (1, 2):
        last, s, s2 = sigmas[k - 1 : k + 2]
        lam_last, lam, lam2 = (math.log((1 - t) / t) for t in (last, s, s2))
        h_last, h = lam - lam_last, lam2 - lam
        r = h_last / h
        before, here = x[k - 1].double(), x[k].double()
        x0_last, x0 = before - last * wavy(x[k - 1], last).double(), here - s * wavy(x[k], s).double()
        combined = (1 + 1 / (2 * r)) * x0 - 1 / (2 * r) * x0_last
        expected = s2 / s * here - (1 - s2) * (math.exp(-h) - 1) * combined  # algorithm 2, alpha = 1 - sigma
        torch.testing.assert_close(x[k + 1].double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(expected, (1 - s2) * combined + s2 * (here - (1 - s) * combined) / s)


def test_dpm2_is_that_of_diffusers() -> None:
    sigmas = sd3_sigmas(10)
    scheduler = diffusers.DPMSolverMultistepScheduler(
        solver_order=2,
        algorithm_type="dpmsolver++",
        solver_type="midpoint",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        final_sigmas_type="zero",
    )
    scheduler.set_timesteps(10)
    scheduler.sigmas = torch.tensor(sigmas)
    theirs = X
    for k, (x, t) in enumerate(zip(path(sigmas, wavy, "dpm2"), scheduler.timesteps, strict=False)):
        torch.testing.assert_close(x, theirs, atol=1e-5, rtol=1e-5)
        theirs = scheduler.step(wavy(theirs, sigmas[k]), t, theirs, return_dict=False)[0]
    torch.testing.assert_close(path(sigmas, wavy, "dpm2")[-1], theirs, atol=1e-5, rtol=1e-5)


def test_where_there_is_no_second_order_the_step_is_bitwise_eulers() -> None:  # T31, 13e
    euler, dpm2 = path(sd3_sigmas(3), wavy, "euler"), path(sd3_sigmas(3), wavy, "dpm2")
    assert torch.equal(dpm2[1], euler[1])  # the first
    assert torch.equal(dpm2[2], euler[2])  # after one from sigma 1, where lambda is infinite
    assert torch.equal(dpm2[3], euler[3])  # to sigma 0
    euler, dpm2 = path([0.9, 0.7, 0.5], wavy, "euler"), path([0.9, 0.7, 0.5], wavy, "dpm2")
    assert torch.equal(dpm2[1], euler[1]) and not torch.allclose(dpm2[2], euler[2], atol=1e-3)


def test_noise_restarts_the_solver_and_schedulers_do_not_share_it() -> None:
    first, second, third = (FlowRule(s, s2, s2, 0.0) for s, s2 in ((0.9, 0.8), (0.8, 0.6), (0.6, 0.5)))
    solver, euler = OdeSolver("dpm2"), third.mean(X, wavy(X, 0.6))
    solver.step("one", first, X, X)
    assert torch.equal(solver.step("two", third, X, wavy(X, 0.6)), euler)
    solver.observe("one", FlowRule(0.8, 0.6, 0.5, 0.1), X, X)
    assert torch.equal(solver.step("one", third, X, wavy(X, 0.6)), euler)
    solver.observe("three", second, X, X)  # as good as having taken it
    solver.observe("three", FlowRule(0.6, 0.6, 0.6, 0.0), X, X)  # left out by compression: as if it was not there
    taken = OdeSolver("dpm2")
    taken.step("one", second, X, X)
    both = [s.step(name, third, X, wavy(X, 0.6)) for s, name in ((solver, "three"), (taken, "one"))]
    assert torch.equal(both[0], both[1]) and not torch.allclose(both[0], euler, atol=1e-3)


def test_dpm2_takes_the_velocity_of_an_inverted_schedule() -> None:
    usual, inverted = OdeSolver("dpm2"), OdeSolver("dpm2")
    for s, s2 in ((0.9, 0.7), (0.7, 0.4)):
        a = usual.step("one", FlowRule(s, s2, s2, 0.0), X, wavy(X, s))
        assert torch.equal(a, inverted.step("one", FlowRule(s, s2, s2, 0.0, inverted=True), X, -wavy(X, s)))


M, C = 0.3, 0.25  # data Normal(M, C)


def exact(s: float) -> torch.Tensor:
    """The ODE's solution, `(1 - s) m + sqrt(S) z`."""
    return (1 - s) * M + math.sqrt((1 - s) ** 2 * C + s * s) * X


def error(sigmas: list[float], name: str) -> float:
    end = path(sigmas, partial(velocity, m=M, c=C), name, exact(sigmas[0]).double())[-1]
    return float((end - exact(sigmas[-1])).abs().mean())


def test_order_of_convergence_between_the_ends() -> None:  # T31, 13d
    for name, order in (("euler", 1), ("dpm2", 2)):
        errors = [error([0.9 - 0.8 * i / n for i in range(n + 1)], name) for n in (20, 40, 80)]
        rates = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
        assert rates == pytest.approx([order, order], abs=0.15) and rates[1] == pytest.approx(order, abs=0.08)


def test_dpm2_beats_euler_on_even_steps_and_not_on_a_schedule_with_a_jump_at_its_end() -> None:  # T31, 13d2
    def relative(sigmas: list[float]) -> float:
        return error(sigmas, "dpm2") / error(sigmas, "euler")

    shifted = [3 * u / (1 + 2 * u) for u in even(10)]  # set_timesteps(sigmas=linspace(1, 1 / n, n))
    assert relative(shifted) < 0.8 and relative(even(10)) < 0.8
    assert relative(sd3_sigmas(10)) > 1


# --- dpm2 in a recording


def every_step(r: Recorded, tape: Tape) -> list[ReplayedStep]:
    """All steps of a tape with their model outputs."""
    return list(replayed(r, tape, steps=range(len(tape.steps)))[0].values())


@pytest.mark.parametrize("name", ["sd3", "flux", "wan"])
def test_a_recording_takes_its_deterministic_steps_with_the_solver(name: str) -> None:
    r = recorded(name, True)
    _, tape = r.record(tiny.call_for(tiny.CASES[name], True, steps=6), window=[2], solver="dpm2")
    solver, euler = OdeSolver("dpm2"), []
    for k, step in enumerate(every_step(r, tape)):
        if k == 2:
            solver = OdeSolver("dpm2")
            continue
        assert step.x_next is not None
        assert torch.equal(step.x_next, solver.step("one", step.rule, step.x, step.model_output))
        euler.append(torch.equal(step.x_next, step.mean))
    assert euler == [True, True, True, False, True]  # from sigma 1, after it, after the noise, in between, to sigma 0
    assert gradients(r, tape)[1] == 0.0
    assert gradients(r, tape, index=[2, 1])[1] <= 1e-5


def test_dpm2_is_refused_for_ddim() -> None:
    r = recorded("sd15", False)
    with pytest.raises(ModelError, match=r"sampling\.solver=dpm2 is for flow matching"):
        r.record(solver="dpm2")
    with pytest.raises(ValueError, match="unknown solver 'heun': choose one of euler, dpm2"):
        r.record(solver="heun")


# --- compression


@given(st.integers(0, 20), st.integers(1, 40), st.floats(0.01, 1))
def test_compressed_steps_go_from_one_to_the_next(first: int, m: int, compression: float) -> None:
    total = first + m
    spans = compressed_spans(first, total, compression)
    assert list(spans) == list(range(first, total))
    taken = [k for k, (start, end) in spans.items() if end > start]
    assert len(taken) == math.ceil(compression * m - 1e-9)
    assert taken[0] == first
    assert [k + spans[k][1] for k in taken] == [*taken[1:], total]
    lengths = [spans[k][1] for k in taken]
    assert all(spans[k][0] == 0 for k in taken) and max(lengths) - min(lengths) <= 1
    for k in set(spans) - set(taken):  # nothing happens at the sigma that was reached
        start, end = spans[k]
        assert start == end and k + start in {*taken, total}


def test_compression_counts_as_if_without_rounding_errors() -> None:
    assert sum(a < b for a, b in compressed_spans(0, 100, 0.55).values()) == 55
    assert compressed_spans(2, 5, 1.0) == {2: (0, 1), 3: (0, 1), 4: (0, 1)}
    assert compressed_spans(1, 6, 0.4) == {1: (0, 2), 2: (1, 1), 3: (0, 3), 4: (2, 2), 5: (1, 1)}
    assert compressed_spans(4, 4, 0.5) == {}


SCHEDULERS = {
    "shifted": lambda: tiny.euler(shift=3.0),
    "inverted": lambda: tiny.euler(invert_sigmas=True),
    **{
        spacing: lambda spacing=spacing: diffusers.DDIMScheduler(timestep_spacing=spacing, clip_sample=False)
        for spacing in ("leading", "trailing", "linspace")
    },
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_long_step_ends_where_its_last_part_would_have(name: str) -> None:
    scheduler = SCHEDULERS[name]()

    def rules(spans: dict[int, tuple[int, int]]) -> list[FlowRule | DDIMRule]:
        scheduler.set_timesteps(7)
        transitions = Transitions("ode", 0.0)
        assert transitions.num_steps(scheduler, scheduler.timesteps[0]) == 7
        return [
            transitions.next_rule(scheduler, t, None, spans.get(k, (0, 1))) for k, t in enumerate(scheduler.timesteps)
        ]

    plain, compressed = rules({}), rules(compressed_spans(1, 7, 0.5))
    taken = [1, 3, 5]
    for k, end in zip(taken, [3, 5, 7], strict=True):
        assert (compressed[k].sigma, compressed[k].sigma_next) == (plain[k].sigma, plain[end - 1].sigma_next)
        for left_out in compressed[k + 1 : end]:
            assert left_out.sigma == left_out.sigma_next == plain[end - 1].sigma_next and left_out.std == 0
            torch.testing.assert_close(left_out.mean(X, wavy(X, 0.5)), X)
    assert compressed[0] == plain[0]
    assert all(getattr(rule, "inverted", False) == (name == "inverted") for rule in compressed)


def test_a_schedule_that_is_entered_late_has_fewer_steps() -> None:
    euler, ddim = tiny.euler(), diffusers.DDIMScheduler()
    for scheduler in (euler, ddim):
        scheduler.set_timesteps(7)
    euler.set_begin_index(3)
    transitions = Transitions("ode", 0.0)
    assert transitions.num_steps(euler, euler.timesteps[3]) == transitions.num_steps(ddim, ddim.timesteps[3]) == 4


@EACH
@GUIDED
def test_a_compressed_recording_leaves_steps_out_and_replays_its_window(name: str, guided: bool) -> None:
    r, call = recorded(name, guided), tiny.call_for(tiny.CASES[name], guided, steps=8)
    options: dict[str, Any] = {"window": [1, 2], "compression": 0.4, "probe": False}
    with counted_rows(r.pipe) as rows:
        r.record(call, stop=1, **options)
        a_step = rows.total() // 2
        rows.clear()
        _, tape = r.record(call, **options)
        assert rows.total() == 5 * a_step  # 3 and ceil(0.4 * 5) = 2 of the other 5
    assert len(tape.steps) == 8 and tape.stochastic_steps == [1, 2]
    taken = [step for step in tape.steps if step.rule.dt < 0]
    left_out = [k for k, step in enumerate(tape.steps) if step.rule.dt == 0]
    assert left_out == [4, 6, 7]
    assert all(a.rule.sigma_next == b.rule.sigma for a, b in itertools.pairwise(taken))
    assert all(torch.equal(tape.steps[k].x, tape.steps[k].x_next) for k in left_out)
    end = taken[-1].rule
    final = r.pipe.scheduler.final_alpha_cumprod if isinstance(end, DDIMRule) else 1.0
    assert end.sigma_next == pytest.approx(math.sqrt(1 - final), abs=1e-6)
    assert gradients(r, tape)[1:] == (0.0, [1, 2])
    steps = every_step(r, tape)
    for k in (0, 3, 5):
        assert steps[k].x_next is not None and torch.equal(steps[k].x_next, steps[k].mean)


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_a_compressed_recording_is_one_on_the_schedule_of_the_steps_it_takes(solver: str) -> None:
    r, call = recorded("sd3", True), tiny.call_for(tiny.CASES["sd3"], True, steps=8)
    options: dict[str, Any] = {"window": [0, 1], "probe": False, "solver": solver}
    images, tape = r.record(call, compression=0.5, **options)
    sigmas = [step.rule.sigma for step in tape.steps if step.rule.dt < 0]
    assert len(sigmas) == 5
    unshifted = [s / (3 - 2 * s) for s in sigmas]
    twin, _ = r.record({**call, "sigmas": unshifted, "num_inference_steps": 5}, **options)
    torch.testing.assert_close(images, twin, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(images, r.record(call, **options)[0], atol=1e-3)


@pytest.mark.parametrize("name", ["sd3", "sd15"])
@pytest.mark.parametrize("window", [[], None])
def test_without_a_window_nothing_is_compressed(name: str, window: list[int] | None) -> None:
    r = recorded(name, True)
    whole, _ = r.record(window=window, probe=False)
    images, tape = r.record(window=window, probe=False, compression=0.1)
    assert torch.equal(images, whole) and all(s.rule.dt < 0 for s in tape.steps)


def test_compressions_that_cannot_be() -> None:
    r = own("sd3", guided=False)
    for compression in (0.0, 1.1):
        with pytest.raises(ValueError, match=f"at most 1, got {compression}"):
            r.record(compression=compression)
    with pytest.raises(ModelError, match=r"compression .*step 2.* stop at"):
        r.record(window=[0], compression=0.5, stop=2)
    after_each_step(r, lambda pipe, i, values: setattr(pipe, "_interrupt", i == 2))
    with pytest.raises(ModelError, match=r"4 steps .*took 3.*sampling\.compression=1"):
        r.record(window=[0], compression=0.5)


def test_a_call_that_the_step_before_did_not_make_is_computed() -> None:
    r = own("sd3", guided=False)
    r.call["num_inference_steps"] = 6
    seen: list[dict[str, Any]] = []

    def denoise_again(pipe: Any, i: int, values: dict[str, Any]) -> None:
        if i == 1:  # counts to step 2
            pipe.transformer(**seen[-1])
            assert pipe.text_encoder(torch.ones(1, 4, dtype=torch.long)).last_hidden_state.shape == (1, 4, 16)

    counts = []
    with r.pipe.transformer.register_forward_pre_hook(lambda m, a, kwargs: seen.append(kwargs), with_kwargs=True):
        for edit in (lambda *_: None, denoise_again):
            after_each_step(r, edit)
            with counted_rows(r.pipe) as rows:
                _, tape = r.record(window=[0], compression=0.4, probe=False)
            counts.append(rows.total())
            assert [k for k, step in enumerate(tape.steps) if step.rule.dt == 0] == [2, 4, 5]
            assert gradients(r, tape)[1] == 0.0
    assert counts[1] * 3 == counts[0] * 4  # one of the two calls at step 2 is like that of step 1


GENERATOR = torch.Generator().manual_seed(0)
SCHEDULER_FAMILIES_X, OUT, SCHEDULER_FAMILIES_NOISE = torch.randn(3, 2, 4, 5, generator=GENERATOR)
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
    transitions = Transitions(kernel, noise_level)
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
    noise = (SCHEDULER_FAMILIES_X - (skip * SCHEDULER_FAMILIES_X + out * OUT)) / c
    torch.testing.assert_close(
        rule.mean(SCHEDULER_FAMILIES_X, OUT), plain.mean(SCHEDULER_FAMILIES_X, noise), rtol=1e-5, atol=1e-5
    )
    assert (rule.std, rule.sigma, rule.dt) == (plain.std, plain.sigma, plain.dt)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("last", ["zero", "sigma_min"])
def test_without_noise_a_preconditioned_step_is_bitwise_the_schedulers(prediction_type: str, last: str) -> None:
    own = edm(prediction_type, last)
    for rule, t in zip(rules_of(edm(prediction_type, last), "ode", 0.0), own.timesteps, strict=True):
        stepped = own.step(OUT, t, SCHEDULER_FAMILIES_X)
        assert rule.std == 0 and torch.equal(rule.mean(SCHEDULER_FAMILIES_X, OUT), stepped.prev_sample)
        assert torch.equal(rule.clean(SCHEDULER_FAMILIES_X, OUT), stepped.pred_original_sample)


@pytest.mark.parametrize("c", [80.0, 1.0, 0.01])
@pytest.mark.parametrize("clean_output", [False, True])
def test_clean_inverts_noised_with_the_target_and_the_jacobian_is_the_derivative(c: float, clean_output: bool) -> None:
    scalings = (0.0, 1.0) if clean_output else (0.25 / (c * c + 0.25), 0.5 * c / math.sqrt(c * c + 0.25))
    rule = DenoisedRule(c, c / 2, 0.3 * c / (2 + c), 0.1, *scalings)
    x = rule.noised(SCHEDULER_FAMILIES_X, SCHEDULER_FAMILIES_NOISE)
    assert torch.equal(x, SCHEDULER_FAMILIES_X + c * SCHEDULER_FAMILIES_NOISE)
    torch.testing.assert_close(
        rule.clean(x, rule.target(SCHEDULER_FAMILIES_X, SCHEDULER_FAMILIES_NOISE)),
        SCHEDULER_FAMILIES_X,
        rtol=1e-5,
        atol=2e-5,
    )
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
    assert Transitions("ode", 0.0).num_steps(scheduler, scheduler.timesteps[0]) == 4


# --- latent consistency models


@pytest.mark.parametrize("prediction_type", PREDICTIONS)
@pytest.mark.parametrize("clip", [False, True])
def test_full_noise_of_cps_is_the_own_sampler_of_a_latent_consistency_model(prediction_type: str, clip: bool) -> None:
    own, config = lcm(prediction_type, clip_sample=clip), {"clip_sample": clip}
    assert own.timesteps.tolist() == [999, 759, 499, 259]  # of which DDIM has none
    rules = rules_of(lcm(prediction_type, **config), "cps", 1.0)
    assert [rule.std > 0 for rule in rules] == [True, True, True, False]
    for k, (rule, t) in enumerate(zip(rules, own.timesteps, strict=True)):
        stepped = own.step(OUT, t, SCHEDULER_FAMILIES_X, generator=drawn(k))
        noise = torch.randn(SCHEDULER_FAMILIES_X.shape, generator=drawn(k))
        torch.testing.assert_close(
            rule.mean(SCHEDULER_FAMILIES_X, OUT) + rule.std * noise, stepped.prev_sample, rtol=1e-6, atol=2e-6
        )
        torch.testing.assert_close(rule.clean(SCHEDULER_FAMILIES_X, OUT), stepped.denoised, rtol=1e-6, atol=2e-6)
        assert torch.equal(lcm_clean(own, t, OUT, SCHEDULER_FAMILIES_X), stepped.denoised)
        assert rule.sigma_next == pytest.approx(math.sqrt(rule.direction**2 + rule.std**2))


@pytest.mark.parametrize("prediction_type", PREDICTIONS)
def test_the_boundary_condition_is_in_the_jacobian(prediction_type: str) -> None:
    rule = DDIMRule(0.6, 0.28, 0.8, 0.96, 0.2, 0.1, prediction_type, None, boundary=(0.3, 0.7))
    out = OUT.clone().requires_grad_()
    (slope,) = torch.autograd.grad(rule.mean(SCHEDULER_FAMILIES_X, out).sum(), out)
    torch.testing.assert_close(slope.abs(), torch.full_like(slope, rule.jacobian), rtol=1e-5, atol=1e-6)


def test_the_number_of_steps_of_a_latent_consistency_model() -> None:
    scheduler, transitions = lcm(), Transitions("cps", 1.0)
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
        stock = own.step(3 * OUT, t, SCHEDULER_FAMILIES_X, eta=0.0)  # so large that clipping would show
        torch.testing.assert_close(rule.mean(SCHEDULER_FAMILIES_X, 3 * OUT), stock.prev_sample, rtol=1e-6, atol=2e-6)
        assert rule.std == 0 and (drawn_around.std > 0) == (k < 3)
        assert math.hypot(drawn_around.direction, drawn_around.std) == pytest.approx(rule.sigma_next)


def test_full_noise_of_cps_is_the_own_sampler_of_a_consistency_model_of_flow_matching() -> None:
    own = flow_lcm()
    rules = rules_of(flow_lcm(), "cps", 1.0)
    assert all(isinstance(rule, FlowRule) for rule in rules) and rules[-1].std == 0
    for k, (rule, t) in enumerate(zip(rules, own.timesteps, strict=True)):
        stock = own.step(OUT, t, SCHEDULER_FAMILIES_X, generator=drawn(k)).prev_sample
        noise = torch.randn(SCHEDULER_FAMILIES_X.shape, generator=drawn(k))
        torch.testing.assert_close(rule.mean(SCHEDULER_FAMILIES_X, OUT) + rule.std * noise, stock, rtol=1e-6, atol=2e-6)


# --- flow maps


def test_a_flow_map_takes_its_own_steps() -> None:
    own = flow_map()
    for rule, t in zip(rules_of(flow_map(), "ode", 0.0), own.timesteps, strict=True):
        assert isinstance(rule, FlowMapRule) and rule.std == 0 and rule.jacobian == -rule.dt > 0
        assert torch.equal(rule.mean(SCHEDULER_FAMILIES_X, OUT), own.step(OUT, t, SCHEDULER_FAMILIES_X).prev_sample)


def test_a_flow_map_has_no_clean_latents_to_train_on() -> None:
    rule = rules_of(flow_map(), "ode", 0.0)[0]
    for asked in (rule.noised, rule.target, rule.clean):
        with pytest.raises(ReplayError, match=r"a flow map is trained at its own latents.*neighbor_grpo"):
            asked(SCHEDULER_FAMILIES_X, OUT)
    scheduler = flow_map()
    with pytest.raises(ModelError, match=r"without noise: use sampling\.kernel=ode and compression=1"):
        Transitions("ode", 0.0).next_rule(scheduler, scheduler.timesteps[0], True)


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
        check_scheduler(make(), kernel, 0.7, solver)


def test_thresholding_of_a_latent_consistency_model_is_refused() -> None:
    with pytest.raises(ModelError, match="LCMScheduler with thresholding has no transition kernel"):
        check_scheduler(lcm(thresholding=True), "cps", 1.0)


def test_families_are_known_by_their_class() -> None:
    consistency = [lcm(), flow_lcm(), diffusers.SCMScheduler(), diffusers.TCDScheduler()]
    assert [family(each) in CONSISTENCY for each in consistency] == [True] * 4
    assert [family(each) in RESAMPLES for each in consistency] == [True] * 3 + [False]
    assert not any(family(make()) in CONSISTENCY for make in (edm, flow_map, diffusers.DDIMScheduler))
    assert all(family(make()) in COUNTS_STEPS for make in (edm, lcm, flow_lcm, flow_map)) and family(
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
        torch.testing.assert_close(
            got.mean(SCHEDULER_FAMILIES_X, OUT), expected.mean(SCHEDULER_FAMILIES_X, OUT), rtol=1e-4, atol=1e-4
        )
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
        stock = own.step(OUT, t, SCHEDULER_FAMILIES_X, eta=eta if rule.std > 0 else 0.0, generator=drawn(k)).prev_sample
        if rule.std == 0:
            assert torch.equal(rule.mean(SCHEDULER_FAMILIES_X, OUT), stock)
        elif torch.isfinite(stock).all():  # at eta 1 its root of what is 0 but for rounding may be of less
            noise = torch.randn(SCHEDULER_FAMILIES_X.shape, generator=drawn(k))
            torch.testing.assert_close(
                rule.mean(SCHEDULER_FAMILIES_X, OUT) + rule.std * noise, stock, rtol=1e-6, atol=2e-6
            )
        assert torch.isfinite(rule.mean(SCHEDULER_FAMILIES_X, OUT)).all() and math.isfinite(rule.jacobian)


def test_ddim_from_pure_noise_needs_another_prediction_than_the_noise() -> None:
    scheduler = diffusers.DDIMScheduler(rescale_betas_zero_snr=True)
    with pytest.raises(ModelError, match="starts at pure noise, where an epsilon prediction carries no information"):
        check_scheduler(scheduler, "ddim", 0.7)

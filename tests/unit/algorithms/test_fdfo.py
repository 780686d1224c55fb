"""FDFO: the finite difference by hand, and as the gradient of a reward; pairs; updates on a tiny pipeline."""

import math
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from schedules import along, sd3_sigmas, velocity
from training import Training, chain_credit, config, relative, rewards

from gerl.algorithms import build_algorithm
from gerl.algorithms.contrib.fdfo import directions, fdfo_loss, partners, velocity_change
from gerl.algorithms.planning import plan_samples
from gerl.config import from_mapping
from gerl.engine import replay
from gerl.engine.transitions import DDIMRule, DenoisedRule, EDMRule, FlowRule, Rule, coefficients, transition_mean
from gerl.errors import ConfigError
from gerl.model.lora import lora_disabled
from gerl.protocol import Prompt, Sample

CHURN = {"sampling_kernel": "cps", "sampling_noise_level": 0.045, "sampling_window_range": [0, 3]}
HALF_DIFFERENCES = [0.5, -0.5, -1.0, 1.0, 0.0, 0.0, 2.0, -2.0]
CREDIT = chain_credit(HALF_DIFFERENCES)
PROMPTS = [Prompt(i, f"prompt {i}") for i in range(3)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- the loss


def test_a_direction_is_half_the_difference_over_its_mean_square() -> None:
    x = torch.tensor([[3.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    u = directions(x, torch.tensor([1, 0, 3, 2]))
    assert u.tolist() == [[pytest.approx(2.0, rel=1e-5), 0.0], [pytest.approx(-2.0, rel=1e-5), 0.0], [0, 0], [0, 0]]


def naive(v: torch.Tensor, v_ref: torch.Tensor, u: torch.Tensor, reward: torch.Tensor, c: float) -> list[torch.Tensor]:
    losses = []
    for i in range(len(v)):
        target = v_ref[i] - u[i]
        ratio = math.e ** (((v_ref[i] - target) ** 2).mean() - ((v[i] - target) ** 2).mean())
        losses.append(-reward[i] * ratio + abs(reward[i]) / (2 * c) * (ratio - 1) ** 2)
    return losses


def test_the_loss_is_that_of_the_distances_to_the_target() -> None:
    v_ref, u, reward = normal(4, 3, 2), normal(4, 3, 2, seed=1), normal(4, seed=2)
    v = (v_ref + 0.1 * normal(4, 3, 2, seed=3)).requires_grad_()
    losses, metrics = fdfo_loss(v - v_ref, u, reward, 0.03)
    expected = torch.stack(naive(v, v_ref, u, reward, 0.03))
    assert torch.allclose(losses, expected, rtol=1e-12)
    (found,), (by_hand,) = torch.autograd.grad(losses.sum(), v), torch.autograd.grad(expected.sum(), v)
    assert torch.allclose(found, by_hand, rtol=1e-9)
    log_ratio = -((v - v_ref) ** 2 + 2 * u * (v - v_ref)).flatten(1).mean(1).detach()
    assert metrics == {
        "ratio_deviation": pytest.approx(float((log_ratio.exp() - 1).abs().max())),
        "clip_fraction_low": pytest.approx(float((log_ratio.exp() < 0.97).double().mean())),
        "clip_fraction_high": pytest.approx(float((log_ratio.exp() > 1.03).double().mean())),
        "log_ratio_mean": pytest.approx(float(log_ratio.mean())),
    }


def test_at_the_policy_that_drew_the_ratio_is_one_and_the_gradient_the_finite_difference() -> None:
    u, reward = normal(5, 7), normal(5, seed=1)
    w = torch.zeros(5, 7, dtype=torch.float64, requires_grad=True)
    losses, metrics = fdfo_loss(w, u, reward, 0.03)
    assert torch.equal(losses, -reward) and metrics["ratio_deviation"] == 0
    losses.sum().backward()
    assert w.grad is not None and torch.allclose(w.grad, 2 * reward[:, None] * u / 7)


def test_both_images_of_a_pair_pull_the_velocity_the_same_way() -> None:
    x = normal(1, 6) + 0.1 * normal(2, 6, seed=1)
    u = directions(x, torch.tensor([1, 0])).double()
    w = torch.zeros(2, 6, dtype=torch.float64, requires_grad=True)
    fdfo_loss(w, u, torch.tensor([0.3, -0.3]), 0.03)[0].sum().backward()
    assert w.grad is not None and torch.allclose(w.grad[0], w.grad[1])
    assert (w.grad[0] @ (x[0] - x[1])) > 0  # descending, the velocity moves against the better image, the image to it


@pytest.mark.parametrize("sign", [1, -1])
def test_the_ratio_is_moved_no_further_than_the_width(sign: int) -> None:
    u, c, reward = normal(1, 8), 0.03, torch.tensor([0.7 * sign], dtype=torch.float64)

    def slope_at(ratio: float) -> float:
        share = -1 + math.sqrt(1 - math.log(ratio) / float((u**2).mean()))  # of u, at which the ratio is this
        along = torch.tensor(share, dtype=torch.float64, requires_grad=True)
        losses, metrics = fdfo_loss(along * u, u, reward, c)
        assert metrics["log_ratio_mean"] == pytest.approx(math.log(ratio))
        losses.sum().backward()
        return float(along.grad) * sign  # type: ignore[arg-type]

    assert slope_at(1 + 1e-9) > 0.1 and abs(slope_at(1 + sign * c)) < 1e-9
    assert slope_at(1 + 2 * sign * c) < -0.1  # back


def test_a_ratio_without_bounds_has_a_finite_gradient() -> None:
    w = torch.full((1, 4), 1e3, requires_grad=True)
    losses, _ = fdfo_loss(w, torch.full((1, 4), -1e4), torch.ones(1), 0.03)
    losses.sum().backward()
    assert losses.isfinite().all() and w.grad is not None and w.grad.isfinite().all()


def test_the_finite_difference_is_the_gradient_of_a_linear_reward_on_average() -> None:
    slope, size = normal(6, seed=1), 200_000
    x, partner = 0.1 * normal(2 * size, 6), torch.arange(2 * size) ^ 1
    reward = x @ slope
    estimate = ((reward - reward[partner]) / 2)[:, None] * directions(x, partner).double()
    assert torch.allclose(estimate.mean(0), slope, atol=0.02)


# --- any parametrisation


RULES: dict[str, Rule] = {
    "flow": FlowRule(0.6, 0.4, 0.39, 0.05),
    "inverted": FlowRule(0.6, 0.4, 0.39, 0.05, inverted=True),
    "edm": EDMRule(2.0, 1.0, 0.49, 0.05),
    "edm v": DenoisedRule(2.0, 1.0, 0.49, 0.05, 0.06, -0.49),
    "edm x0": DenoisedRule(2.0, 1.0, 0.49, 0.05, 0.0, 1.0),
    **{kind: DDIMRule(0.6, 0.28, 0.8, 0.96, 0.27, 0.05, kind, None) for kind in ("epsilon", "v_prediction", "sample")},
}


@pytest.mark.parametrize("name", RULES)
def test_a_lower_velocity_moves_the_clean_latents_up(name: str) -> None:
    rule, x, output, change = RULES[name], normal(2, 5), normal(2, 5, seed=1), normal(2, 5, seed=2)
    step: Any = SimpleNamespace(rule=rule, mean=rule.mean(x, output + change))
    w = velocity_change(step, rule.mean(x, output))
    sign = -1 if name in ("inverted", "sample", "edm x0") else 1
    assert torch.allclose(w, sign * change.float(), atol=1e-4)
    up = rule.clean(x, output + change) - rule.clean(x, output)
    assert (w * up).sum() < 0


def test_the_published_churn_is_the_kernel_cps() -> None:
    churn, level = 0.0025, 2 / math.pi * math.acos(1 / 1.0025)
    assert level == pytest.approx(0.045, rel=1e-3)
    for s, s2 in pairwise(sd3_sigmas(10)[:-1]):
        further = s2 / (1 + churn - churn * s2)  # the Euler step overshoots to there, the noise leads back to s2
        kappa, std = coefficients("cps", s, s2, level, 0.9)
        back = 1 / (1 + churn * further)
        assert back * further == pytest.approx(kappa, rel=1e-9) and back * (1 - further) == pytest.approx(1 - s2)
        assert std == pytest.approx(back * further * math.sqrt((1 + churn) ** 2 - 1), rel=1e-9)


# --- a policy learns


def learn(reward: Callable[[torch.Tensor], torch.Tensor], iterations: int = 40) -> list[float]:
    """Mean reward of each iteration: data N(0, 0.25), its exact velocity plus a trained bias per step and dimension."""
    sigmas, size, images = sd3_sigmas(6), 64, 64
    generator = torch.Generator().manual_seed(0)
    bias = torch.zeros(5, size, requires_grad=True)
    optimizer = torch.optim.Adam([bias], lr=0.01)
    partner, curve = torch.arange(images) ^ 1, []
    for _ in range(iterations):
        x = torch.randn(images // 2, size, generator=generator).repeat_interleave(2, dim=0)
        inputs = []
        for k, (kappa, std) in enumerate(along(sigmas, "cps", 0.3)):
            inputs.append(x)
            moved = bias[k].detach() if k < 5 else 0.0
            mean = transition_mean(x, velocity(x, sigmas[k], 0.0, 0.25) + moved, sigmas[k], sigmas[k + 1], kappa)
            x = mean + std * torch.randn(x.shape, generator=generator)
        scores, old = reward(x), bias.detach().clone()
        curve.append(scores.mean().item())
        half, towards = (scores - scores[partner]) / 2, directions(x, partner)
        for _ in range(2):
            optimizer.zero_grad()
            for k in range(5):
                fdfo_loss((bias[k] - old[k]).expand(images, -1), towards, half, 0.03)[0].mean().backward()
            optimizer.step()
    return curve


def test_a_quadratic_reward_rises_and_falls_with_its_sign() -> None:
    def near(x: torch.Tensor) -> torch.Tensor:
        return -((x - 0.6) ** 2).mean(1)

    up, down = learn(near), learn(lambda x: -near(x))
    assert up[0] == -down[0] < 0
    assert up[-1] > up[0] + 0.2 and down[-1] > down[0] + 0.3


# --- pairs


@pytest.mark.parametrize("micro", [2, 3, 5, 12])
def test_the_images_of_a_pair_start_from_one_noise_in_one_micro_batch(micro: int) -> None:
    a = build_algorithm(config("fdfo", n=4, micro=micro, **CHURN))
    tasks = a.plan(plan_samples(a.config, PROMPTS, 1, 0))
    seeds = set()
    for task in tasks:
        partner = partners(task.samples)
        assert partner.tolist() == [i ^ 1 for i in range(len(task.samples))]
        for i, j in enumerate(partner.tolist()):
            one, other = task.samples[i], task.samples[j]
            assert one.init_seed == other.init_seed is not None and one.seed != other.seed
            assert one.prompt == other.prompt
            seeds.add(one.init_seed)
    assert len(seeds) == 6 and sum(len(task.samples) for task in tasks) == 12


def test_with_one_noise_for_the_group_pairs_keep_it() -> None:
    a = build_algorithm(config("fdfo", n=4, sampling_same_init_noise=True, **CHURN))
    samples = plan_samples(a.config, PROMPTS, 1, 0)
    assert [s.init_seed for task in a.plan(samples) for s in task.samples] == [s.init_seed for s in samples]


def test_the_credit_is_half_the_difference_to_the_partner() -> None:
    a = build_algorithm(config("fdfo", n=4, **CHURN))
    samples = plan_samples(a.config, PROMPTS[:2], 1, 0)
    found = a.credit(rewards(samples, [1.0, 0.0, 3.0, 3.0, 100.0, 0.0, -1.0, 0.5]))[:, 0]
    assert found.tolist() == [0.5, -0.5, 0.0, 0.0, 5.0, -5.0, -0.75, 0.75]  # clipped to 5
    order = [3, 7, 1, 2, 0, 6, 5, 4]
    mixed = rewards([samples[i] for i in order], [[1.0, 0.0, 3.0, 3.0, 100.0, 0.0, -1.0, 0.5][i] for i in order])
    assert torch.equal(a.credit(mixed)[:, 0], found[order])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollout": {"n": 5}}, r"rollout\.n=5: fdfo compares images in pairs"),
        ({"rollout": {"n": 4, "micro_batch_size": 1}}, r"rollout\.micro_batch_size=1: fdfo needs the 2 images of a pa"),
        ({"sampling": {"kernel": "ode"}}, r"sampling\.kernel=ode: the two images of a pair .*noise_level=0\.045"),
        ({"sampling": {"noise_level": 0}}, r"sampling\.noise_level=0: the two images of a pair"),
        ({"algorithm": {"cfg": "off"}, "actor": {"updates_per_step": 2}}, r"actor\.updates_per_step=2: .* use 1"),
    ],
)
def test_what_leaves_no_pair_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping({**values, "algorithm": {"name": "fdfo", **values.get("algorithm", {})}})


# --- updates of a tiny pipeline


@pytest.fixture(scope="module")
def training() -> Training:
    return Training(config("fdfo", **CHURN))


def test_the_two_trajectories_part_in_their_steps_only(training: Training) -> None:
    (_, _, (tape,)) = training.tasks[0]
    first, last = tape.steps[0].x, tape.steps[-1].x_next
    assert torch.equal(first[0::2], first[1::2]) and not torch.equal(first[0], first[2])
    apart, far = (last[0::2] - last[1::2]).flatten(1).norm(dim=1), (last[:-2] - last[2:]).flatten(1).norm(dim=1)
    assert apart.min() > 0 and apart.max() < 0.3 * far.min()


def test_the_first_update_is_the_finite_difference_by_hand(training: Training) -> None:
    found, stats = training.gradient(CREDIT)
    (_, _, (tape,)) = training.tasks[0]
    x = tape.steps[-1].x_next
    d = (x - x[[1, 0, 3, 2, 5, 4, 7, 6]]) / 2
    g = torch.tensor(HALF_DIFFERENCES).view(-1, 1, 1, 1) * d / (d**2).mean((1, 2, 3), keepdim=True)
    training.actor.optimizer.zero_grad(set_to_none=True)
    replay(training.policy.pipe, tape, lambda k, s: 2 * (g * s.model_output).flatten(1).mean(1).sum() / 24)
    assert relative(found, training.actor.flat_gradient()) < 1e-4
    assert stats.ratio_deviation is not None and stats.ratio_deviation < 1e-5
    assert stats.pairs == 3 * 6  # one pair is equal
    assert set(stats.sums) == {"loss", "clip_fraction_low", "clip_fraction_high", "log_ratio_mean"}


def test_micro_batches_change_nothing_though_they_part_the_pairs(training: Training) -> None:
    whole, stats = training.gradient(CREDIT)
    for size in (1, 3):
        parts = build_algorithm(config("fdfo", actor_micro=size, **CHURN))
        split, split_stats = training.gradient(CREDIT, algorithm=parts)
        assert relative(split, whole) < 1e-4
        assert split_stats.pairs == stats.pairs
        assert split_stats.sums["loss"] == pytest.approx(stats.sums["loss"], abs=1e-3)


def test_equal_rewards_give_no_gradient(training: Training) -> None:
    found, stats = training.gradient(0 * CREDIT)
    assert not found.any() and stats.pairs == 0


def test_the_distance_to_the_base_model_is_that_of_the_velocities(training: Training) -> None:
    (_, _, (tape,)) = training.tasks[0]
    base: dict[int, torch.Tensor] = {}
    with lora_disabled(list(training.policy.denoisers.values())):
        replay(training.policy.pipe, tape, lambda k, s: base.update({k: s.model_output}), grad=False)
    values: list[torch.Tensor] = []

    def on_step(k: int, s: Any) -> torch.Tensor:
        values.append(((s.model_output - base[k]) ** 2).flatten(1).mean(1))
        return 0.7 * values[-1].sum() / 24

    training.actor.optimizer.zero_grad(set_to_none=True)
    replay(training.policy.pipe, tape, on_step)
    expected = training.actor.flat_gradient()
    a = build_algorithm(config("fdfo", kl_coef=0.7, **CHURN))
    found, stats = training.gradient(0 * CREDIT, algorithm=a)
    assert relative(found, expected) < 1e-3 and stats.pairs == 24
    assert stats.sums["kl"] == pytest.approx(float(torch.cat(values).detach().sum()), rel=1e-3)


def test_guidance_modes_start_at_a_ratio_of_one() -> None:
    deviations = {}
    for cfg in ("joint", "detach_uncond", "off"):
        guided = Training(config("fdfo", guidance=3.0, cfg=cfg, **CHURN))
        found, stats = guided.gradient(CREDIT)
        assert found.norm() > 0
        deviations[cfg] = stats.ratio_deviation
    assert deviations.pop("off") is None and max(deviations.values()) < 1e-3


def test_partners_are_found_in_any_order() -> None:
    samples = [Sample(PROMPTS[p], i, 0, 1) for p, i in ((0, 1), (1, 0), (0, 3), (1, 1), (0, 0), (0, 2))]
    assert partners(samples).tolist() == [4, 3, 5, 1, 0, 2]

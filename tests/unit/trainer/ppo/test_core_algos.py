"""Advantages, clipped loss and KL against naive twins, closed forms and golden numbers; gradients, not only values."""

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gerl.trainer.ppo.core_algos import clipped_policy_loss, gaussian_kl, group_advantages, zero_std_fraction
from gerl.workers.diffusers_model.kernels import coefficients, gaussian_log_prob, transition_mean

REWARDS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, 0.0, 8.0]]).flatten()
GROUPS = torch.arange(3).repeat_interleave(4)
SD3_10 = [1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0]

# --- advantages


def naive_advantages(
    rewards: list[float], groups: list[int], std: str, leave_one_out: bool, eps: float = 1e-4
) -> list[float]:
    def spread(values: list[float]) -> float:
        mean = math.fsum(values) / len(values)
        return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))

    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        baseline = others if leave_one_out else members
        centred = reward - math.fsum(baseline) / len(baseline)
        scale = {"group": spread(members) + eps, "batch": spread(rewards) + eps, "none": 1.0}[std]
        result.append(centred / scale if len(set(members)) > 1 else 0.0)
    return result


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Rewards of groups of 2 to 4, in any order, with equal rewards often enough."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=4))
    groups = draw(st.permutations([7 * g - 3 for g, size in enumerate(sizes) for _ in range(size)]))
    values = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-3, 3, width=16))
    return draw(st.lists(values, min_size=len(groups), max_size=len(groups))), groups


@given(batches(), st.sampled_from(["group", "batch", "none"]), st.booleans())
def test_group_advantages_equal_their_naive_twin(
    batch: tuple[list[float], list[int]], std: str, leave_one_out: bool
) -> None:
    rewards, groups = batch
    got = group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), std, leave_one_out)
    assert got.tolist() == pytest.approx(naive_advantages(rewards, groups, std, leave_one_out), abs=1e-9)


def test_golden_advantages_with_group_std() -> None:  # T24
    got = group_advantages(REWARDS, GROUPS)
    expected = [-1.3415, -0.4472, 0.4472, 1.3415, 0, 0, 0, 0, -0.5773, -0.5773, -0.5773, 1.7320]
    assert got.tolist() == pytest.approx(expected, abs=1e-4)
    assert got.dtype == torch.float32 and got[4:8].tolist() == [0.0] * 4
    assert got.view(3, 4).sum(1).tolist() == pytest.approx([0, 0, 0], abs=1e-6)


def test_golden_advantages_with_batch_std_and_without() -> None:  # T24
    centred = torch.tensor([-1.5, -0.5, 0.5, 1.5, 0, 0, 0, 0, -2, -2, -2, 6])
    torch.testing.assert_close(group_advantages(REWARDS, GROUPS, "none"), centred)
    of_all = REWARDS.std(correction=0)
    torch.testing.assert_close(group_advantages(REWARDS, GROUPS, "batch", eps=0.0), centred / of_all)


def test_leave_one_out_compares_with_the_others_of_the_group() -> None:
    got = group_advantages(REWARDS, GROUPS, "none", leave_one_out=True)
    expected = [1 - 3, 2 - 8 / 3, 3 - 7 / 3, 4 - 2, 0, 0, 0, 0, -8 / 3, -8 / 3, -8 / 3, 8]
    assert got.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("eps", [1e-4, 0.0])
def test_equal_rewards_give_exactly_zero(std: str, leave_one_out: bool, eps: float) -> None:  # T24
    # the fp32 mean of equal rewards is not always that reward: 0.1 and 0.7 are such values
    rewards = torch.tensor([0.1] * 11 + [0.7] * 7 + [0.0, 1.0])
    groups = torch.tensor([0] * 11 + [1] * 7 + [2, 2])
    got = group_advantages(rewards, groups, std, leave_one_out, eps)
    assert got[:18].tolist() == [0.0] * 18
    assert (got[18:] != 0).all()


@given(batches(), st.randoms(use_true_random=False))
def test_shuffling_the_batch_shuffles_the_advantages(
    batch: tuple[list[float], list[int]], random: Random
) -> None:  # T25
    rewards, groups = torch.tensor(batch[0], dtype=torch.float64), torch.tensor(batch[1])
    order = list(range(len(rewards)))
    random.shuffle(order)
    expected = group_advantages(rewards, groups)[order]
    torch.testing.assert_close(group_advantages(rewards[order], groups[order]), expected, atol=1e-12, rtol=1e-9)


def test_the_same_groups_on_several_workers_give_the_same_advantages() -> None:  # T25
    whole = group_advantages(REWARDS, GROUPS)
    by_worker = [group_advantages(r, g) for r, g in zip(REWARDS.view(3, 4), GROUPS.view(3, 4), strict=True)]
    assert torch.equal(torch.cat(by_worker), whole)
    interleaved = torch.arange(12).view(3, 4).T.flatten()  # every worker holds one sample of each group
    assert torch.equal(group_advantages(REWARDS[interleaved], GROUPS[interleaved]), whole[interleaved])


@given(st.floats(-100, 100), st.floats(0.1, 10))
def test_advantages_ignore_an_offset_and_group_std_ignores_a_scale(offset: float, scale: float) -> None:
    rewards = REWARDS.double()
    got = group_advantages(scale * rewards + offset, GROUPS, eps=0.0)
    torch.testing.assert_close(got, group_advantages(rewards, GROUPS, eps=0.0), atol=1e-6, rtol=1e-6)


def test_advantages_write_no_input() -> None:
    rewards, groups = REWARDS.clone(), GROUPS.clone()
    for std in ("group", "batch", "none"):
        group_advantages(rewards, groups, std, leave_one_out=True)
    assert torch.equal(rewards, REWARDS) and torch.equal(groups, GROUPS)


@pytest.mark.parametrize(
    ("rewards", "groups", "options", "message"),
    [
        ([1.0, 2.0], [0], {}, r"\[B\], got \[2\] and \[1\]"),
        ([[1.0, 2.0]], [[0, 0]], {}, r"\[B\], got \[1, 2\]"),
        ([1.0, math.nan], [0, 0], {}, "finite: drop failed groups"),
        ([1.0, math.inf], [0, 0], {}, "finite"),
        ([1.0, 2.0, 3.0], [0, 0, 1], {"leave_one_out": True}, "at least two samples"),
        ([1.0, 2.0], [0, 0], {"std": "global"}, "group, batch or none, got 'global'"),
    ],
)
def test_wrong_rewards_are_refused(rewards: list, groups: list, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.tensor(rewards), torch.tensor(groups), **options)


def test_a_group_of_one_has_no_advantage() -> None:
    assert group_advantages(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 0, 1]))[2] == 0


def test_zero_std_fraction() -> None:
    assert zero_std_fraction(REWARDS, GROUPS) == pytest.approx(1 / 3)
    assert zero_std_fraction(torch.full((12,), 0.1), GROUPS) == 1.0
    assert zero_std_fraction(torch.arange(12.0), GROUPS) == 0.0
    assert zero_std_fraction(torch.tensor([1.0, 2.0, 1.0, 2.0]), torch.tensor([5, 9, 5, 9])) == 1.0
    assert zero_std_fraction(torch.empty(0), torch.empty(0, dtype=torch.long)) == 0.0


# --- clipped loss


def loss_and_gradient(
    ratios: list[float], advantages: list[float], low: float, high: float
) -> tuple[float, list[float], dict[str, float]]:
    old = torch.linspace(-1, 1, len(ratios), dtype=torch.float64)
    log_prob = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    loss, metrics = clipped_policy_loss(log_prob, old, torch.tensor(advantages, dtype=torch.float64), low, high)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.item(), gradient.tolist(), metrics


@pytest.mark.parametrize("clip", [1e-5, 0.2])
def test_on_policy_the_gradient_is_that_of_reinforce(clip: float) -> None:  # T17, with the tie at ratio 1
    log_prob = torch.randn(8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    advantages = torch.linspace(-2, 1, 8)
    loss, metrics = clipped_policy_loss(log_prob, log_prob.detach().clone(), advantages, clip, clip)
    loss.backward()
    assert loss.item() == pytest.approx(-advantages.mean().item())
    assert log_prob.grad is not None
    torch.testing.assert_close(log_prob.grad, -advantages / 8, rtol=0, atol=0)
    assert metrics == {"ratio_deviation": 0, "clip_fraction_low": 0, "clip_fraction_high": 0, "log_ratio_mean": 0}


@given(
    st.lists(st.tuples(st.floats(0.2, 3.0), st.floats(-3, 3)), min_size=1, max_size=6),
    st.floats(0.01, 0.5),
    st.floats(0.01, 0.8),
)
def test_clipped_loss_equals_its_naive_twin(pairs: list[tuple[float, float]], low: float, high: float) -> None:  # T18
    ratios, advantages = [r for r, _ in pairs], [a for _, a in pairs]
    loss, gradient, _ = loss_and_gradient(ratios, advantages, low, high)
    values = [max(-a * r, -a * min(max(r, 1 - low), 1 + high)) for r, a in pairs]
    assert loss == pytest.approx(sum(values) / len(pairs), abs=1e-12)
    for (r, a), got in zip(pairs, gradient, strict=True):
        removed = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
        assert got == pytest.approx(0.0 if removed else -a * r / len(pairs), abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.3, 1.0, 0.0),  # above the upper bound and still pulled up: removed
        (1.3, -1.0, 1.3),  # above it, pushed back down: kept
        (0.8, -1.0, 0.0),
        (0.8, 1.0, -0.8),
        (1.1, 1.0, -1.1),
        (0.95, -1.0, 0.95),
        (1.3, 0.0, 0.0),
    ],
)
def test_which_gradients_the_bounds_remove(ratio: float, advantage: float, gradient: float) -> None:  # T18
    assert loss_and_gradient([ratio], [advantage], 0.1, 0.2)[1] == pytest.approx([gradient])


def test_clip_metrics_of_known_ratios() -> None:
    ratios = [1.0, 1.3, 1.3, 0.7, 0.7, 1.15, 0.95, 2.0]
    advantages = [1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0, 3.0]
    _, _, metrics = loss_and_gradient(ratios, advantages, 0.1, 0.2)
    assert metrics == pytest.approx(
        {
            "ratio_deviation": 1.0,
            "clip_fraction_low": 1 / 8,
            "clip_fraction_high": 2 / 8,
            "log_ratio_mean": sum(math.log(r) for r in ratios) / 8,
        },
        rel=1e-5,
    )


def test_the_bounds_are_asymmetric() -> None:
    assert loss_and_gradient([1.25], [1.0], 0.1, 0.3)[1] == pytest.approx([-1.25])
    assert loss_and_gradient([1.25], [1.0], 0.3, 0.1)[1] == [0.0]


def test_no_gradient_reaches_the_old_policy_and_nothing_is_written() -> None:
    log_prob, old = torch.tensor([0.1, 0.4], requires_grad=True), torch.tensor([0.2, 0.1], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0])
    loss, _ = clipped_policy_loss(log_prob, old, advantages, 0.2, 0.2)
    loss.backward()
    assert old.grad is None and log_prob.grad is not None
    assert advantages.tolist() == [1.0, -1.0] and old.tolist() == pytest.approx([0.2, 0.1])


def test_log_ratio_and_ratio_after_a_shift_of_the_mean() -> None:  # T19
    size, std, delta = 16, 0.5, 0.4
    z = torch.randn(100_000, size, generator=torch.Generator().manual_seed(1))
    old, new = torch.zeros_like(z), torch.full_like(z, delta)
    log_ratio = gaussian_log_prob(std * z, new, std) - gaussian_log_prob(std * z, old, std)
    assert log_ratio.mean().item() == pytest.approx(-(delta**2) / (2 * std**2), rel=0.02)
    assert log_ratio.var().item() == pytest.approx(delta**2 / (std**2 * size), rel=0.03)
    k = size * delta**2 / (2 * std**2)
    assert log_ratio.exp().mean().item() == pytest.approx(math.exp(-k / size * (1 - 1 / size)), rel=0.01)
    near = 0.02  # of the summed log-prob the mean ratio is 1, visible without rare huge ratios only for a small shift
    summed = size * (gaussian_log_prob(std * z, near + old, std) - gaussian_log_prob(std * z, old, std))
    assert summed.exp().mean().item() == pytest.approx(1.0, abs=5e-3)


def test_log_ratio_without_its_kl_is_linear_in_the_shift() -> None:  # T20
    generator, std = torch.Generator().manual_seed(2), 0.3
    old = torch.randn(5, 4, 3, 3, generator=generator)
    shift, z = (0.1 * torch.randn(old.shape, generator=generator) for _ in range(2))
    x_next = old + std * z
    log_ratio = gaussian_log_prob(x_next, old + shift, std) - gaussian_log_prob(x_next, old, std)
    centred = std * (log_ratio + gaussian_kl(old + shift, old, std))
    torch.testing.assert_close(centred, (z * shift).flatten(1).mean(1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("trained", "golden"), [(range(9), -1.1209), ((1, 2, 3), -0.1775), ((4,), -0.1125)])
def test_policy_gradient_of_a_linear_gaussian_chain(trained: range | tuple[int, ...], golden: float) -> None:  # T21
    """Reward x_T, velocity v* + theta with v* exact for data N(0, 1), noise at the trained steps: dE[x_T]/dtheta."""
    theta, samples, generator = torch.zeros((), requires_grad=True), 200_000, torch.Generator().manual_seed(3)
    x, log_probs, slopes = torch.randn(samples, 1, generator=generator), [], []
    for k, (s, s2) in enumerate(pairwise(SD3_10)):
        kappa, std = coefficients("flow_sde", s, s2, 0.7 if k in trained else 0.0, SD3_10[1])
        slope = (2 * s - 1) / ((1 - s) ** 2 + s**2)
        mean = transition_mean(x, slope * x + theta, s, s2, kappa)
        x_next = (mean + std * torch.randn(x.shape, generator=generator)).detach()
        if k in trained:
            log_probs.append(gaussian_log_prob(x_next, mean, std))
        slopes.append((1 + kappa - s2 + slope * ((s2 - s) + (kappa - s2) * (1 - s)), kappa * (1 - s) - (1 - s2) * s))
        x = x_next
    exact = sum(slopes[k][1] * math.prod(rho for rho, _ in slopes[k + 1 :]) for k in trained)
    assert exact == pytest.approx(golden, abs=6e-5)
    losses = [clipped_policy_loss(p, p.detach(), x[:, 0], 1e-4, 1e-4)[0] for p in log_probs]
    torch.stack(losses).sum().backward()
    assert theta.grad is not None
    assert -theta.grad.item() == pytest.approx(golden, abs=0.03)


# --- KL

SHAPES = [(3, 5), (3, 4, 2, 6), (3, 7, 4), (3, 2, 4, 2, 3)]  # flat, (B, C, H, W), (B, L, C), (B, C, F, H, W)


@pytest.mark.parametrize("shape", SHAPES)
def test_kl_equals_that_of_torch_averaged_over_the_sample(shape: tuple[int, ...]) -> None:  # T22
    generator = torch.Generator().manual_seed(4)
    mean, reference = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mean, 0.3), normal(reference, 0.3)).flatten(1).mean(1)
    got = gaussian_kl(mean, reference, 0.3)
    assert got.shape == (3,) and got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gaussian_kl(reference, mean, 0.3), got)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_of_the_kl(shape: tuple[int, ...]) -> None:  # T22
    mean = torch.randn(shape, generator=torch.Generator().manual_seed(5)).requires_grad_()
    reference = torch.zeros(shape, requires_grad=True)
    gaussian_kl(mean, reference, 0.3).sum().backward()
    assert reference.grad is None and mean.grad is not None
    torch.testing.assert_close(mean.grad, mean.detach() / 0.3**2 / mean[0].numel())


def test_kl_at_the_reference_is_zero_and_so_is_its_gradient() -> None:  # T22
    mean = torch.randn(2, 3, 4, requires_grad=True)
    kl = gaussian_kl(mean, mean.detach().clone(), 0.3)
    kl.sum().backward()
    assert mean.grad is not None
    assert kl.tolist() == [0.0, 0.0] and not mean.grad.any()


def test_kl_in_terms_of_the_velocity() -> None:  # T22
    s, s2, generator = 0.7, 0.6, torch.Generator().manual_seed(6)
    kappa, std = coefficients("flow_sde", s, s2, 0.7, 0.97)
    x, v, reference = (torch.randn(2, 9, generator=generator) for _ in range(3))
    v.requires_grad_()
    kl = gaussian_kl(transition_mean(x, v, s, s2, kappa), transition_mean(x, reference, s, s2, kappa), std)
    jacobian = kappa * (1 - s) - (1 - s2) * s
    torch.testing.assert_close(kl, jacobian**2 * ((v - reference) ** 2).mean(1) / (2 * std**2), rtol=1e-4, atol=1e-6)
    (gradient,) = torch.autograd.grad(kl.sum(), v)
    torch.testing.assert_close(gradient, jacobian**2 * (v.detach() - reference) / std**2 / 9, rtol=1e-4, atol=1e-6)
    # the published code divides by g^2 = std^2 / |dt| instead
    published = ((jacobian * (v - reference)) ** 2).mean(1) / (2 * std**2 / (s - s2))
    torch.testing.assert_close(published, (s - s2) * kl, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("function", [gaussian_kl, gaussian_log_prob])
def test_half_precision_inputs_are_computed_in_fp32(function: Callable[..., torch.Tensor]) -> None:
    a, b = torch.randn(2, 4096).bfloat16(), torch.randn(2, 4096).bfloat16()
    assert torch.equal(function(a, b, 0.3), function(a.float(), b.float(), 0.3))

"""Reward gradients: each algorithm against a loop written by hand, whose graph is kept as published code keeps it."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from replaying import counted_rows
from training import PROMPTS, Training, config, new_policy

from gerl.algorithms import build_algorithm, reward_gradient
from gerl.algorithms.contrib.drtune import evenly_spread
from gerl.algorithms.contrib.flowbp import (
    lagrange_weights,
    late_biased,
    parted_steps,
    scale_up,
    split_count,
    spread_supports,
)
from gerl.algorithms.draft import sampled_length
from gerl.algorithms.leapalign import two_steps
from gerl.algorithms.planning import plan_samples
from gerl.algorithms.reward_gradient import RewardGradient, generator
from gerl.config import from_mapping
from gerl.engine.tape import compact
from gerl.errors import ConfigError, ReplayError
from gerl.protocol import Prompt
from gerl.workers import rollout

STEPS = 4
same_policy = functools.cache(new_policy)  # whose weights no test changes
Tensor = torch.Tensor


def reward(images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    """Smooth, another one for every pixel, and for every prompt and its words."""
    weights = torch.randn(images.shape[1:], generator=torch.Generator().manual_seed(5)) / 10
    scales = torch.tensor([1.0 + 0.001 * sum(i * ord(c) for i, c in enumerate(p.text, 1)) % 4 for p in prompts])
    return scales * (weights * images).flatten(1).sum(1)


def training(name: str, guidance: float = 1.0, n: int = 1, **keys: Any) -> Training:
    given = {"n": n, "guidance": guidance, "steps": STEPS, "sampling_kernel": "ode"}
    t = Training(config(name, **given | keys), same_policy())
    assert isinstance(t.algorithm, RewardGradient)
    t.algorithm.reward = reward
    return t


@dataclass
class Naive:
    """SD3 by hand, from a tape's latents."""

    t: Training

    def __post_init__(self) -> None:
        ((self.task, _, (self.tape,)),) = self.t.tasks
        answers: dict[str, Any] = {answer.method: answer.value for answer in self.tape.answers}
        self.prompts, _, self.pooled, _ = answers["encode_prompt"]
        self.pipe = self.t.policy.pipe
        self.T = len(self.tape.steps)
        self.sigmas = [step.rule.sigma for step in self.tape.steps] + [0.0]
        self.xs = [step.x for step in self.tape.steps] + [self.tape.steps[-1].x_next]

    def v(self, x: Tensor, k: int) -> Tensor:
        t = self.pipe.scheduler.timesteps[k].expand(len(x))
        given = {"encoder_hidden_states": self.prompts, "pooled_projections": self.pooled, "return_dict": False}
        out: Tensor = self.pipe.transformer(x, timestep=t, **given)[0]
        return out

    def decode(self, x: Tensor) -> Tensor:
        vae = self.pipe.vae
        pixels = vae.decode(x / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        return (pixels * 0.5 + 0.5).clamp(0, 1)

    def reward(self, x: Tensor, word: str = "") -> Tensor:
        return reward(self.decode(x), [Prompt(0, f"{word}{s.prompt.text}") for s in self.task.samples])

    def go_on(self, x: Tensor, start: int, end: int, outputs: Callable[[Tensor, int], Tensor]) -> Tensor:
        for k in range(start, end):
            x = x + (self.sigmas[k + 1] - self.sigmas[k]) * outputs(x, k)
        return x

    def gradient(self, loss: Tensor) -> Tensor:
        parameters = self.t.actor.parameters
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return torch.cat(
            [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)]
        )


def straight_through(value: Tensor, path: Tensor) -> Tensor:
    return path + (value - path).detach()


def nested(x: Tensor, share: float) -> Tensor:
    return share * x + (1 - share) * x.detach()


def of_draft(h: Naive, last: int) -> Tensor:
    start = h.T - last
    return -h.reward(h.go_on(h.xs[start], start, h.T, h.v)).mean()


def of_refl(h: Naive) -> Tensor:
    (k,) = h.t.algorithm.differentiated_steps(1)  # type: ignore[attr-defined]
    return 0.001 * (2 - h.reward(h.xs[k] - h.sigmas[k] * h.v(h.xs[k], k))).relu().mean()


def of_draft_lv(h: Naive) -> Tensor:
    last, s = h.T - 1, h.sigmas[h.T - 1]
    losses = [-h.reward(h.go_on(h.xs[last], last, h.T, h.v)).mean()]
    hops = h.t.algorithm.evaluations(h.tape, (last,), h.task.samples)[1:]  # type: ignore[attr-defined]
    for look in hops:
        x = look.hops[0].latents
        noise = (x - (1 - s) * h.xs[-1]) / s
        assert abs(float(noise.std()) - 1) < 0.1 and abs(float(noise.mean())) < 0.1
        losses.append(-h.reward(x - s * h.v(x, last)).mean())
    return torch.stack(losses).mean()


def of_drtune(h: Naive, active: int) -> Tensor:
    algorithm: Any = h.t.algorithm
    trained, stop = algorithm.differentiated_steps(1), algorithm._stop(1)
    assert len(trained) == min(active, stop + 1)

    def v(x: Tensor, k: int) -> Tensor:
        found = h.v(x.detach(), k)
        return found if k in trained else found.detach()

    x = h.go_on(h.xs[0], 0, stop, v)
    return -h.reward(x - h.sigmas[stop] * v(x, stop)).mean()


def of_leapalign(h: Naive, share: float, tau: float) -> Tensor:
    k, j = h.t.algorithm.differentiated_steps(1)  # type: ignore[attr-defined]
    leapt = h.xs[k] + (h.sigmas[j] - h.sigmas[k]) * h.v(h.xs[k], k)
    x_j = straight_through(h.xs[j], leapt)
    clean = x_j - h.sigmas[j] * h.v(nested(x_j, share), j)
    far = [(a - b).abs().flatten(1).mean(1).clamp_min(tau).detach() for a, b in ((leapt, h.xs[j]), (clean, h.xs[-1]))]
    return (-h.reward(straight_through(h.xs[-1], clean)) / (far[0] + far[1])).mean()


def of_sparse(h: Naive, rescale: float, share: float | None = None) -> Tensor:
    algorithm: Any = h.t.algorithm
    trained = algorithm.differentiated_steps(1)
    ds = [abs(b - a) for a, b in zip(h.sigmas[:-1], h.sigmas[1:], strict=True)]
    factor = 1 + rescale * (sum(ds) / sum(ds[k] for k in trained) - 1)
    bridge = algorithm._bridge(1) if share is not None else None
    x = h.xs[0]
    for k in range(h.T):
        if k == bridge:
            x = straight_through(h.xs[k], x)
        found = h.v(nested(x, share) if k == bridge and share is not None else h.xs[k], k)
        found = found.detach() + factor * (found - found.detach()) if k in trained else found.detach()
        x = x + (h.sigmas[k + 1] - h.sigmas[k]) * found
    return -h.reward(straight_through(h.xs[-1], x)).mean()


def of_lagrange(h: Naive, share: float, second: float, tau: float) -> Tensor:
    algorithm: Any = h.t.algorithm
    supports = algorithm._supports(1)
    x, far = h.xs[supports[0][0]], []
    for number, (points, end) in enumerate(zip(supports, (supports[1][0], h.T), strict=True)):
        weights = lagrange_weights([h.sigmas[i] for i in points], h.sigmas[points[0]], h.sigmas[end])
        total = x
        for place, (i, w) in enumerate(zip(points, weights, strict=True)):
            found = h.v(nested(x, share) if number and place == 0 else h.xs[i], i)
            scale = (1.0, second, 0.0)[min(place, 2)]
            total = total + w * (found.detach() + scale * (found - found.detach()))
        far.append((h.xs[end] - total).abs().flatten(1).mean(1).clamp_min(tau).detach())
        x = straight_through(h.xs[end], total)
    return (-h.reward(x) / (far[0] + far[1])).mean()


def of_srpo(h: Naive) -> Tensor:
    draw, losses = reward_gradient.generator(0, 1, "words"), []
    word, other = (str(draw.choice(words)) for words in (["Natural-lighting", "Real"], ["Oil"]))
    goal = (h.sigmas[1] + h.sigmas[2]) / 2  # both lead there, from the only two levels within the range
    assert 0.6 < h.sigmas[2] < h.sigmas[1] < 0.9
    for k, at, (low, high), first, then in (
        (1, goal, (0.1, 0.25), word, other),
        (2, h.sigmas[2], (0.3, 0.01), other, word),
    ):
        s, noise = h.sigmas[k], h.xs[0]
        x = s * noise + (1 - s) * h.xs[-1]
        moved = x + (goal - s) * h.v(x, k)
        clean = (moved - goal * noise) / (1 - goal)
        d = low + (high - low) * (at - 0.5) / 0.4
        losses.append(
            (0.7 - ((1 + d) * h.reward(clean, f"{first}. ") - h.reward(clean, f"{then}. "))).relu().mean() / 2
        )
    return torch.stack(losses).sum()


CASES: list[tuple[str, dict[str, Any], Callable[[Naive], Tensor]]] = [
    *(("draft", {"last": last}, partial(of_draft, last=last)) for last in (1, 2, STEPS)),
    ("refl", {"late": 3, "margin": 2.0, "loss_scale": 0.001}, of_refl),
    ("draft_lv", {}, of_draft_lv),
    *(("drtune", {"late": 3, "active": n}, partial(of_drtune, active=n)) for n in (1, 3)),
    *(("leapalign", {"nested": a, "tau": 0.1}, partial(of_leapalign, share=a, tau=0.1)) for a in (0.0, 0.3, 1.0)),
    ("flowbp_sparse", {"active": 3, "rescale": 0.5}, partial(of_sparse, rescale=0.5)),
    ("flowbp_sparse", {"active": STEPS, "rescale": 1.0}, partial(of_sparse, rescale=1.0)),
    ("flowbp_bridge", {"active": 4, "nested": 0.5}, partial(of_sparse, rescale=0.0, share=0.5)),
    ("flowbp_lagrange", {"latest": 3}, partial(of_lagrange, share=0.1, second=0.25, tau=0.2)),
    (
        "srpo",
        {"margin": 0.7, "positive": ["Natural-lighting", "Real"], "negative": ["Oil"], "levels": [0.5, 0.9]},
        of_srpo,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "by_hand"), CASES, ids=[f"{name} {keys}" for name, keys, _ in CASES])
def test_the_gradient_is_that_of_the_loop_written_by_hand(
    name: str, keys: dict[str, Any], by_hand: Callable[[Naive], Tensor]
) -> None:
    t = training(name, **keys)
    h = Naive(t)
    expected = h.gradient(by_hand(h))
    ours, stats = t.gradient(torch.ones(2, STEPS))
    assert (ours - expected).norm() < 2e-4 * expected.norm() and expected.norm() > 0
    assert all(p.grad is None for p in t.policy.pipe.vae.parameters())
    assert stats.pairs == 2 * len(t.algorithm.trained_steps((), 1))
    assert stats.sums["loss"] / stats.pairs == pytest.approx(float(by_hand(h).detach()), rel=1e-3, abs=1e-6)


# --- what a part of an update adds


@pytest.mark.parametrize(("name", "keys"), [("draft", {"last": 3}), ("draft_lv", {}), ("leapalign", {})])
def test_the_parts_of_an_update_add_up(name: str, keys: dict[str, Any]) -> None:
    whole = training(name, guidance=3.0, **keys)
    expected, stats = whole.gradient(torch.ones(2, STEPS))
    given = {"n": 1, "guidance": 3.0, "steps": STEPS, "sampling_kernel": "ode", "actor_micro": 1, "decode_batch": 3}
    together = build_algorithm(config(name, **given | keys))
    assert isinstance(together, RewardGradient)
    together.reward = reward
    ours, parts = whole.gradient(torch.ones(2, STEPS), algorithm=together)
    assert (ours - expected).norm() < 1e-5 * expected.norm()
    assert parts.pairs == stats.pairs and parts.sums == pytest.approx(stats.sums, rel=1e-4)
    half = torch.ones(2, STEPS)
    half[1:] = torch.nan  # images without a score are left out
    some, _ = whole.gradient(half)
    assert (some - expected).norm() / expected.norm() > 0.1


def test_a_part_that_only_keeps_others_company_adds_nothing_and_calls_the_model_as_often() -> None:
    t = training("draft", last=2, margin=-1e9)  # no image falls short of the margin
    with counted_rows(t.policy.pipe) as rows:
        gradient, stats = t.gradient(torch.ones(2, STEPS))
    assert gradient.abs().max() == 0 and rows == {True: 2 * 2}
    assert stats.sums["without_gradient"] / stats.pairs == 1
    with counted_rows(t.policy.pipe) as rows:
        gradient, stats = t.gradient(torch.ones(2, STEPS), pairs=math.inf)  # type: ignore[arg-type]
    assert gradient.abs().max() == 0 and rows == {True: 2 * 2} and stats.sums["loss"] == 0


def test_the_loss_may_be_measured_from_a_target_or_a_margin() -> None:
    def losses(**keys: Any) -> list[float]:
        algorithm = build_algorithm(config("draft", **keys))
        assert isinstance(algorithm, RewardGradient)
        return algorithm.loss(torch.tensor([0.5, 3.0])).tolist()

    assert losses() == [-0.5, -3.0]
    assert losses(margin=2.0, loss_scale=0.1) == pytest.approx([0.15, 0.0])
    assert losses(target=2.0) == [1.5, 1.0]


def test_the_distance_to_the_base_model_is_added() -> None:
    plain, _ = training("draft", last=2, loss_scale=1e-9).gradient(torch.ones(2, STEPS))
    t = training("draft", last=2, loss_scale=1e-9, kl_coef=0.5)
    h = Naive(t)
    terms = []
    for k in (STEPS - 2, STEPS - 1):
        with t.policy.base(), torch.no_grad():
            base = h.v(h.xs[k], k)
        terms.append((h.v(h.xs[k], k) - base).square().mean())
    expected = h.gradient(0.5 * torch.stack(terms).mean())
    ours, stats = t.gradient(torch.ones(2, STEPS))
    assert (ours - plain - expected).norm() < 1e-4 * expected.norm()
    assert stats.sums["kl"] / stats.pairs == pytest.approx(float(torch.stack(terms).mean().detach()), rel=1e-4)


def test_a_mixture_is_the_weighted_sum_of_a_policy_gradient_and_a_reward_gradient() -> None:
    noisy = {"sampling_kernel": "flow_sde", "sampling_window_range": [0, 3], "n": 2}
    mixed = training("mixed_gradient", last=2, policy_weight=3.0, gradient_weight=2.0, **noisy)
    credit = torch.randn(4, 1, generator=torch.Generator().manual_seed(0)).expand(-1, STEPS)
    ours, stats = mixed.gradient(credit)
    alone = training("draft", last=2, **noisy)
    by_reward, of_reward = alone.gradient(torch.ones(4, STEPS))
    grpo = Training(config("flow_grpo", n=2, steps=STEPS, sampling_window_range=[0, 3]), same_policy())
    by_ratio, of_ratio = grpo.gradient(credit)
    expected = 3 * by_ratio + 2 * by_reward
    assert (ours - expected).norm() < 1e-5 * expected.norm() and min(by_ratio.norm(), by_reward.norm()) > 0
    for name, value in of_ratio.sums.items():
        assert stats.sums[name] / stats.pairs == pytest.approx(value / of_ratio.pairs, abs=1e-6)
    assert stats.sums["reward_loss"] / stats.pairs == pytest.approx(of_reward.sums["loss"] / of_reward.pairs, rel=1e-5)


def test_srpo_leaps_between_the_published_noise_levels() -> None:
    algorithm: Any = build_algorithm(config("srpo", n=1, steps=25, sampling_kernel="ode"))
    before_shift = [1 - k / 25 for k in range(25)]
    sigmas = [3 * t / (1 + 2 * t) for t in before_shift]
    pairs = [algorithm.starts(sigmas, step) for step in range(400)]
    assert {sigmas[k] for pair in pairs for k in pair} == {s for s in sigmas if 0.75 < s < 0.9643}
    spans = np.array([(sigmas[a] - sigmas[b]) / 2 for a, b in pairs])
    assert spans.min() > 0.013 and spans.max() < 0.028 and spans.mean() == pytest.approx(0.0214, abs=0.002)
    middles = np.sort([(sigmas[a] + sigmas[b]) / 2 for a, b in pairs])
    assert np.mean(middles) == pytest.approx((0.75 + 0.964) / 2, abs=0.01)  # every level is as likely
    with pytest.raises(ReplayError, match=r"^algorithm\.levels=\[0\.75, 0\.964\]: .*0\.500.*; widen it"):
        algorithm.starts([1.0, 0.9, 0.5, 0.1], 1)


@pytest.mark.parametrize("name", ["leapalign", "flowbp_sparse", "flowbp_lagrange", "srpo"])
def test_leaps_are_for_flow_matching(name: str) -> None:
    given = {"sampling_kernel": "ode", "sampling_call": {}}
    t = Training(config(name, n=1, steps=STEPS, **given), policy=same_policy("sd15"))
    t.algorithm.reward = reward  # type: ignore[attr-defined]
    with pytest.raises(ReplayError, match=rf"algorithm\.name={name}: its leaps .* has a DDIM scheduler; use draft"):
        t.gradient(torch.ones(2, STEPS))


def test_epsilon_models_are_trained_by_what_their_steps_predict() -> None:
    given = {"sampling_kernel": "ddim", "sampling_noise_level": 1.0, "sampling_call": {}}
    for name in ("refl", "drtune", "draft_lv"):
        t = Training(config(name, n=1, steps=STEPS, **given), policy=same_policy("sd15"))
        t.algorithm.reward = reward  # type: ignore[attr-defined]
        gradient, _ = t.gradient(torch.ones(2, STEPS))
        assert torch.isfinite(gradient).all() and gradient.norm() > 0


@pytest.mark.parametrize("name", ["drtune", "leapalign", "flowbp_sparse", "flowbp_bridge", "flowbp_lagrange"])
def test_a_trajectory_keeps_what_is_looked_at_after_the_last_trained_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = config(name, n=1, steps=8, sampling_kernel="ode")
    algorithm: Any = build_algorithm(c)
    step = min(
        range(1, 99), key=lambda step: max(algorithm.differentiated_steps(step))
    )  # whose last trained one comes earliest
    samples = [replace(sample, step=step) for sample in plan_samples(c, PROMPTS, 1, 0)]
    gradients = []
    for keep in (compact, lambda tape, reads: replace(tape, reads=reads)):
        monkeypatch.setattr(rollout, "compact", keep)
        t = Training(c, same_policy(), samples)
        t.algorithm.reward = reward  # type: ignore[attr-defined]
        gradients.append(t.gradient(torch.ones(2, 8))[0])
    assert torch.equal(*gradients) and gradients[0].norm() > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "draft", "cfg": "off"}, r"algorithm\.cfg=off: the scored images were sampled with guidance"),
        ({"name": "draft", "margin": 1, "target": 2}, r"algorithm\.margin=1.*algorithm\.target"),
        ({"name": "draft", "dynamic_sampling": 1}, r"algorithm\.dynamic_sampling=1: there is a gradient"),
        ({"name": "srpo", "positive": []}, r"algorithm\.positive=\[\]: expected at least one word"),
        ({"name": "srpo", "strength": [1]}, r"algorithm\.strength=\[1.*: expected two numbers"),
        ({"name": "srpo", "levels": [0.9, 0.5]}, r"algorithm\.levels=\[0\.9.*: expected the lowest and the highest"),
        ({"name": "flowbp_lagrange", "parts": [1, 2]}, r"algorithm\.parts=\[1.*: expected three positive numbers"),
        ({"name": "leapalign", "sampling": {"kernel": "flow_sde"}}, r"sampling\.kernel=flow_sde: leapalign is defined"),
        ({"name": "draft", "sampling": {"solver": "dpm2"}}, r"sampling\.solver=dpm2: draft differentiates every step"),
        ({"name": "draft", "sampling": {"cache": "taylorseer"}}, r"sampling\.cache=taylorseer: draft differentiates"),
        ({"name": "srpo", "sampling": {"num_inference_steps": 2, "kernel": "ode"}}, r"sampling\.num.*=2: srpo needs"),
        ({"name": "draft", "actor": {"updates_per_step": 2}}, r"actor\.updates_per_step=2: draft backpropagates"),
        ({"name": "draft", "trainer": {"staleness": 1}}, r"trainer\.staleness=1: draft backpropagates through"),
        (
            {"name": "leapalign", "cluster": {"context": 2, "ranks_per_worker": 2}},
            r"cluster\.context=2: leapalign needs the gradient of whole latents",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_differentiated_is_refused(values: dict[str, Any], message: str) -> None:
    blocks = {k: v for k, v in values.items() if isinstance(v, dict)}
    algorithm = {k: v for k, v in values.items() if not isinstance(v, dict)}
    with pytest.raises(ConfigError, match=f"^{message}"):
        from_mapping({"sampling": {"kernel": "ode"}, **blocks, "algorithm": algorithm})


def test_lagrange_weights_integrate_polynomials_exactly() -> None:
    points = [0.9, 0.6, 0.4]
    weights = lagrange_weights(points, 0.9, 0.2)
    for power in range(3):
        exact = (0.2 ** (power + 1) - 0.9 ** (power + 1)) / (power + 1)
        assert sum(w * p**power for w, p in zip(weights, points, strict=True)) == pytest.approx(exact)
    assert lagrange_weights([0.9], 0.9, 0.2) == pytest.approx([-0.7])  # Euler


def test_lengths_are_redrawn_until_they_fit() -> None:
    draws = [sampled_length(8, 5.0, 10, generator(0, k)) for k in range(500)]
    assert min(draws) >= 1 and max(draws) <= 10 and len(set(draws)) == 10
    assert np.mean(draws) == pytest.approx(6.0, abs=0.4)  # of a normal distribution cut at 0.5 and 10.5
    assert sampled_length(8, 0.0, 5, generator(0)) == 5


def test_late_steps_are_likelier_by_a_power() -> None:
    counts = Counter(k for n in range(4000) for k in late_biased(range(2, 5), 1, 2.0, generator(n)))
    assert [counts[k] / 4000 for k in (2, 3, 4)] == pytest.approx([1 / 14, 4 / 14, 9 / 14], abs=0.03)
    assert late_biased(range(4), 9, 1.0, generator(0)) == [0, 1, 2, 3]
    assert len(set(late_biased(range(9), 4, 1.0, generator(0)))) == 4


def test_even_steps_are_equally_far_apart_and_begin_anywhere() -> None:
    found = {tuple(evenly_spread(10, 3, generator(n))) for n in range(200)}
    assert found == {(0, 3, 6), (1, 4, 7), (2, 5, 8), (3, 6, 9)}
    assert evenly_spread(2, 3, generator(0)) == [0, 1]


def test_pairs_are_in_order_and_of_all_steps() -> None:
    pairs = Counter(two_steps(3, generator(n)) for n in range(3000))
    assert set(pairs) == {(0, 1), (0, 2), (1, 2)} and min(pairs.values()) > 900


def test_parted_steps_are_shared_after_between_and_before() -> None:
    sharp = [1e6 * share for share in (0.8, 0.15, 0.05)]
    assert parted_steps(20, sharp, None, generator(0)) == (0, 3)  # 16 steps after the second, 3 from the first to it
    assert parted_steps(20, sharp[::-1], None, generator(0)) == (15, 18)
    assert parted_steps(20, sharp, 10, generator(0)) == (7, 10)  # what is above goes before the first
    assert {parted_steps(3, [1, 1, 1], None, generator(n)) for n in range(50)} == {(0, 1)}
    drawn = np.array([parted_steps(25, [2.5, 6.0, 2.0], 10, generator(n)) for n in range(4000)])
    k, j = drawn.T  # means as of RuoyuWang-2077/FlowBP
    assert k.min() >= 0 and (k < j).all() and j.min() == 15 and j.max() == 23
    assert k.mean() == pytest.approx(4.1, abs=0.15) and j.mean() == pytest.approx(18.4, abs=0.15)


@pytest.mark.parametrize(("count", "before", "after", "expected"), [(5, 10, 15, (2, 3)), (4, 1, 9, (1, 3)),
                                                                    (2, 9, 1, (1, 1)), (9, 2, 2, (2, 2)),
                                                                    (5, 24, 1, (4, 1))])  # fmt: skip
def test_active_steps_are_shared_by_length(count: int, before: int, after: int, expected: tuple[int, int]) -> None:
    assert split_count(count, before, after) == expected


def test_scaling_up_and_supports() -> None:
    lengths = [-0.1, -0.2, -0.3, -0.4]
    assert scale_up(lengths, [1, 2], 1.0) == pytest.approx(2.0) and scale_up(lengths, [1, 2], 0.5) == pytest.approx(1.5)
    assert scale_up(lengths, [0], 0.0) == 1
    assert spread_supports(3, 5, 3) == [3, 4] and spread_supports(2, 11, 3) == [2, 6, 10]

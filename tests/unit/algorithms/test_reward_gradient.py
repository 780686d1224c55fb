"""Reward gradients: each algorithm against a loop written by hand, whose graph is kept as published code keeps it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from training import Training, config

from gerl.algorithms import surrogates
from gerl.algorithms.reward_gradient import RewardGradient
from gerl.protocol import Prompt

STEPS = 5
Tensor = torch.Tensor


def reward(images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    """Smooth, another one for every pixel, and for every prompt."""
    weights = torch.randn(images.shape[1:], generator=torch.Generator().manual_seed(5)) / 10
    scales = torch.tensor([1.0 + 0.1 * len(p.text) for p in prompts])
    return scales * (weights * images).flatten(1).sum(1)


def training(name: str, guidance: float = 1.0, n: int = 2, **keys: Any) -> Training:
    t = Training(config(name, n=n, guidance=guidance, steps=STEPS, **{"sampling_kernel": "ode"} | keys))
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
    (k,) = h.t.algorithm.drawn(1)  # type: ignore[attr-defined]
    return 0.001 * (2 - h.reward(h.xs[k] - h.sigmas[k] * h.v(h.xs[k], k))).relu().mean()


def of_draft_lv(h: Naive) -> Tensor:
    last, s = h.T - 1, h.sigmas[h.T - 1]
    losses = [-h.reward(h.go_on(h.xs[last], last, h.T, h.v)).mean()]
    hops = h.t.algorithm.looks(h.tape, (last,), h.task.samples)[1:]  # type: ignore[attr-defined]
    for look in hops:
        x = look.hops[0].latents
        noise = (x - (1 - s) * h.xs[-1]) / s
        assert abs(float(noise.std()) - 1) < 0.1 and abs(float(noise.mean())) < 0.1
        losses.append(-h.reward(x - s * h.v(x, last)).mean())
    return torch.stack(losses).mean()


def of_drtune(h: Naive, active: int) -> Tensor:
    algorithm: Any = h.t.algorithm
    trained, stop = algorithm.drawn(1), algorithm._stop(1)
    assert len(trained) == min(active, stop + 1)

    def v(x: Tensor, k: int) -> Tensor:
        found = h.v(x.detach(), k)
        return found if k in trained else found.detach()

    x = h.go_on(h.xs[0], 0, stop, v)
    return -h.reward(x - h.sigmas[stop] * v(x, stop)).mean()


def of_leapalign(h: Naive, share: float, tau: float) -> Tensor:
    k, j = h.t.algorithm.drawn(1)  # type: ignore[attr-defined]
    leapt = h.xs[k] + (h.sigmas[j] - h.sigmas[k]) * h.v(h.xs[k], k)
    x_j = straight_through(h.xs[j], leapt)
    clean = x_j - h.sigmas[j] * h.v(nested(x_j, share), j)
    far = [(a - b).abs().flatten(1).mean(1).clamp_min(tau).detach() for a, b in ((leapt, h.xs[j]), (clean, h.xs[-1]))]
    return (-h.reward(straight_through(h.xs[-1], clean)) / (far[0] + far[1])).mean()


def of_sparse(h: Naive, rescale: float, share: float | None = None) -> Tensor:
    algorithm: Any = h.t.algorithm
    trained = algorithm.drawn(1)
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
        weights = surrogates.lagrange_weights([h.sigmas[i] for i in points], h.sigmas[points[0]], h.sigmas[end])
        total = x
        for place, (i, w) in enumerate(zip(points, weights, strict=True)):
            found = h.v(nested(x, share) if number and place == 0 else h.xs[i], i)
            scale = (1.0, second, 0.0)[min(place, 2)]
            total = total + w * (found.detach() + scale * (found - found.detach()))
        far.append((h.xs[end] - total).abs().flatten(1).mean(1).clamp_min(tau).detach())
        x = straight_through(h.xs[end], total)
    return (-h.reward(x) / (far[0] + far[1])).mean()


def of_srpo(h: Naive) -> Tensor:
    algorithm: Any = h.t.algorithm
    (k, m), losses = algorithm.drawn(1), []
    draw = surrogates.generator(0, 1, "words")
    word, other = (str(draw.choice(words)) for words in (["Real", "Sharp"], ["Flat"]))
    for a, b, (low, high), first, then in ((k, m, (0.1, 0.25), word, other), (m, k, (0.3, 0.01), other, word)):
        s, goal, noise = h.sigmas[a], h.sigmas[b], h.xs[0]
        x = s * noise + (1 - s) * h.xs[-1]
        moved = x + (goal - s) * h.v(x, a)
        clean = (moved - goal * noise) / (1 - goal)
        d = low + (high - low) * s
        losses.append(
            (0.7 - ((1 + d) * h.reward(clean, f"{first}. ") - h.reward(clean, f"{then}. "))).relu().mean() / 2
        )
    return torch.stack(losses).sum()


CASES: list[tuple[str, dict[str, Any], Callable[[Naive], Tensor]]] = [
    *(("draft", {"last": last}, partial(of_draft, last=last)) for last in (1, 2, STEPS)),
    ("refl", {"last": 3, "margin": 2.0, "loss_scale": 0.001}, of_refl),
    ("draft_lv", {}, of_draft_lv),
    *(("drtune", {"last": 3, "active": n}, partial(of_drtune, active=n)) for n in (1, 3)),
    *(("leapalign", {"nested": a, "tau": 0.1}, partial(of_leapalign, share=a, tau=0.1)) for a in (0.0, 0.3, 1.0)),
    ("flowbp_sparse", {"active": 3, "rescale": 0.5}, partial(of_sparse, rescale=0.5)),
    ("flowbp_sparse", {"active": STEPS, "rescale": 1.0}, partial(of_sparse, rescale=1.0)),
    ("flowbp_bridge", {"active": 4, "nested": 0.5}, partial(of_sparse, rescale=0.0, share=0.5)),
    ("flowbp_lagrange", {"latest": 3}, partial(of_lagrange, share=0.1, second=0.25, tau=0.2)),
    ("srpo", {"margin": 0.7, "positive": ["Real", "Sharp"], "negative": ["Flat"]}, of_srpo),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "by_hand"), CASES, ids=[f"{name} {keys}" for name, keys, _ in CASES])
def test_the_gradient_is_that_of_the_loop_written_by_hand(
    name: str, keys: dict[str, Any], by_hand: Callable[[Naive], Tensor]
) -> None:
    t = training(name, **keys)
    h = Naive(t)
    expected = h.gradient(by_hand(h))
    ours, stats = t.gradient(torch.ones(4, STEPS))
    assert (ours - expected).norm() < 2e-4 * expected.norm() and expected.norm() > 0
    assert all(p.grad is None for p in t.policy.pipe.vae.parameters())
    assert stats.pairs == 4 * len(t.algorithm.trained_steps((), 1))
    assert stats.sums["loss"] / stats.pairs == pytest.approx(float(by_hand(h).detach()), rel=1e-3, abs=1e-6)

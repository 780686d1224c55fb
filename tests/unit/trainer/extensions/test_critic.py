"""The critic: what it sees, how it learns, and what its values do to the credit of a step."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gerl.algorithms import build_algorithm
from gerl.algorithms.core_algos import generalised_advantages, group_advantages
from gerl.algorithms.planning import plan_samples
from gerl.config import Config, CriticConfig, RolloutConfig, SamplingConfig, TrainerConfig, algorithm_config
from gerl.errors import CheckpointError, ModelError
from gerl.progress import Stopwatch
from gerl.protocol import Prompt, Scores
from gerl.trainer.extensions.critic import (
    Critic,
    Inputs,
    States,
    ValueModel,
    averaged,
    explained,
    value_loss,
)
from gerl.trainer.step import Step, credit_of, usable_rewards

NAN, T = math.nan, 4
SIGMAS = [0.9, 0.7, 0.4, 0.1]


def config(n: int = 4, critic: dict[str, Any] | None = None, **keys: Any) -> Config:
    return Config(
        algorithm=algorithm_config("flow_ppo", **{"adv_estimator": "gae", "advantage_std": "none"} | keys),
        critic=CriticConfig(**critic or {}),
        sampling=SamplingConfig(num_inference_steps=T),
        rollout=RolloutConfig(prompts_per_step=4, n=n),
        trainer=TrainerConfig(seed=3),
    )


def states(features: torch.Tensor, steps: Sequence[int] = (0, 1, 2), prompts: int = 0) -> States:
    """Those of a task; `features` `[B, K, d]`."""
    known = torch.arange(len(features) * prompts).view(len(features), prompts).float()
    return States(torch.tensor(steps), torch.tensor([SIGMAS[k] for k in steps]), features, known, hidden=True)


def inputs(features: torch.Tensor, **more: Any) -> Inputs:
    return Inputs.of([states(features, **more)], range(len(features)))


class Run:
    """Credits steps as a run does, with a critic; the workers are their states."""

    def __init__(self, config: Config) -> None:
        self.config, self.algorithm, self.critic = config, build_algorithm(config), Critic(config)

    def step(self, totals: Sequence[float | None], found: Sequence[States | None]) -> Step:
        prompts = [Prompt(i, f"prompt {i}") for i in range(self.config.rollout.prompts_per_step)]
        samples = plan_samples(self.config, prompts, 1, 0)[: len(totals)]
        failures: list[Any] = [
            [] if total is not None else [SimpleNamespace(scorer="ocr", reason="it broke")] for total in totals
        ]
        scores = Scores(samples, list(totals), {"ocr": list(totals)}, failures)
        step = Step(1, Stopwatch(), scores=scores)
        run: Any = SimpleNamespace(
            algorithm=self.algorithm, fleet=SimpleNamespace(on_trajectories=lambda function: list(found))
        )
        step.rewards, step.metrics = usable_rewards(self.config, scores)
        self.critic.rewarded(run, step)
        step.credit = credit_of(self.config, self.algorithm, scores, step.rewards)
        return step


# --- what it sees


def test_states_of_tasks_are_joined_in_the_order_of_the_scores() -> None:
    features = torch.arange(24).float().view(4, 2, 3)
    found = Inputs.of([states(features[:3], (0, 2), prompts=1), states(features[3:], (1, 3), prompts=1)], [0, 2, 3])
    assert found.row.tolist() == [0, 0, 1, 1, 2, 2] and found.step.tolist() == [0, 2, 0, 2, 1, 3]
    assert found.sigma.tolist() == pytest.approx([0.9, 0.4, 0.9, 0.4, 0.7, 0.1])
    assert torch.equal(found.features, features[[0, 2, 3]].flatten(0, 1))
    assert found.prompts[:, 0].tolist() == [0, 0, 2, 2, 0, 0] and found.samples == 3


def test_features_of_several_sizes_are_refused() -> None:
    with pytest.raises(ModelError, match=r"critic\.features=latents"):
        Inputs.of([states(torch.zeros(1, 3, 2)), states(torch.zeros(1, 3, 5))], [0, 1])


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((2, 3, 16, 24), 3 * 64),  # images
        ((2, 3, 2, 6), 3 * 12),  # smaller ones are kept
        ((2, 3, 9, 16, 16), 3 * 4 * 64),  # a video
        ((2, 100, 5), 64 * 5),  # packed
        ((2, 4, 5), 4 * 5),
    ],
)
def test_latents_are_averaged(shape: tuple[int, ...], size: int) -> None:
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = averaged(latents)
    assert found.shape == (2, size)
    assert torch.equal(found[1:], averaged(latents[1:]))
    if shape == (2, 3, 16, 24):
        torch.testing.assert_close(found.view(2, 3, 8, 8), nn.functional.avg_pool2d(latents, (2, 3)))


def test_features_are_standardised_by_all_that_was_seen_at_their_step() -> None:
    model = ValueModel(CriticConfig(), T, 0)
    parts = [5 * torch.randn(6, 3, 2, generator=torch.Generator().manual_seed(s)) + 40 for s in range(3)]
    parts[1][:, 1] += 100  # only at step 1
    for part in parts:
        model.observe(inputs(part), torch.ones(6))
    whole = torch.cat(parts)
    known = model._inputs(inputs(parts[2]))[:, :2].view(6, 3, 2)
    expected = (parts[2] - whole.mean(0)) / whole.std(0, correction=0)
    torch.testing.assert_close(known, expected.clamp(-5, 5), rtol=1e-2, atol=1e-3)
    assert model.tensors["features/count"].tolist() == [18, 18, 18, 0]


def test_features_that_differ_only_by_rounding_say_nothing() -> None:
    model = ValueModel(CriticConfig(), T, 0)
    seen = inputs(7 + 1e-6 * torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(0)))
    model.observe(seen, torch.ones(8))
    assert model._inputs(seen)[:, :4].abs().max() < 0.01


# --- how it learns


def toy(generator: torch.Generator, count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Averaged latents of three steps, and rewards that depend on the initial ones alone; steps add noise elsewhere."""
    first = torch.randn(count, 4, 2, 2, generator=generator)
    latents = [first]
    for _ in range(2):
        noise = torch.randn(count, 4, 2, 2, generator=generator)
        noise[:, 0] = 0
        latents.append(latents[-1] + noise)
    return torch.stack([averaged(x) for x in latents], 1), first[:, 0].mean((1, 2)) + 0.5 * first[:, 0, 0, 0].tanh()


@pytest.mark.parametrize("lam", [0.95, 1.0])
def test_rewards_of_the_initial_noise_alone_are_no_merit_of_the_steps(lam: float) -> None:
    """Less than a tenth of the variance that the advantages have without a critic."""
    run, generator = (
        Run(config(n=16, lam=lam, critic={"lr": 3e-3, "warmup_steps": 40})),
        torch.Generator().manual_seed(0),
    )
    for _ in range(41):
        features, rewards = toy(generator)
        step = run.step(rewards.tolist(), [states(features[:32]), states(features[32:])])
    assert step.credit is not None and step.credit[:, 3].isnan().all()
    assert step.credit[:, :3].var() < 0.1 * rewards.var()  # which is that of reinforce_pp before it is whitened
    assert step.metrics["critic/explained_variance"] > 0.9


def test_values_are_the_mean_reward_until_the_network_has_learnt() -> None:
    model, generator = ValueModel(CriticConfig(updates=1, lr=1e-9), T, 0), torch.Generator().manual_seed(0)
    seen, rewards = inputs(torch.randn(6, 3, 2, generator=generator)), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 9.0])
    model.observe(seen, rewards)
    assert torch.equal(model.values(seen)[:, :3], torch.full((6, 3), 4.0)) and model.values(seen)[:, 3].isnan().all()
    model.learn(seen, rewards[:, None].expand(-1, T))
    assert model.values(seen)[:, :3].flatten().tolist() == pytest.approx([4.0] * 18, abs=1e-5)
    assert model.scale() == pytest.approx((4.0, math.sqrt(136 / 6 - 16)))


def test_targets_are_normalised_by_those_of_the_latest_steps() -> None:
    model = ValueModel(CriticConfig(updates=1), T, 0)
    seen, means = inputs(torch.zeros(2, 3, 1)), [1.0, 5.0, 2.0]
    model.observe(seen, torch.tensor([0.0, 2.0]))
    for mean in means:
        model.learn(seen, torch.tensor([mean - 1, mean + 1])[:, None].expand(-1, T))
    weights = [0.9**2, 0.1 * 0.9, 0.1]
    expected = sum(w * m for w, m in zip(weights, means, strict=True))
    square = sum(w * (m**2 + 1) for w, m in zip(weights, means, strict=True))
    assert model.scale() == pytest.approx((expected, math.sqrt(square - expected**2)))


@pytest.mark.parametrize("clip", [None, 0.2])
def test_its_optimizer_is_adam(clip: float | None) -> None:
    model, generator = ValueModel(CriticConfig(clip=clip, updates=10, lr=1e-3), T, 0), torch.Generator().manual_seed(0)
    seen = inputs(torch.randn(16, 3, 5, generator=generator), prompts=2)
    targets = 40 * torch.randn(16, T, generator=generator)
    model.observe(seen, targets[:, 0])
    start = nn.utils.parameters_to_vector(model.network.parameters()).detach().clone()
    twin = nn.Sequential(nn.Linear(16, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 1))
    twin.load_state_dict(model.network.state_dict())
    optimizer = torch.optim.Adam(twin.parameters(), 1e-3)
    metrics = model.learn(seen, targets)
    known, (mean, std) = model._inputs(seen), model.scale()
    wanted, before = (targets[seen.row, seen.step] - mean) / std, twin(known).squeeze(1).detach()
    losses, norms = [], []
    for _ in range(10):
        loss = value_loss(twin(known).squeeze(1), wanted, before, clip)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(twin.parameters(), 1.0)))
        optimizer.step()
        losses.append(loss.item())
    found, expected = (nn.utils.parameters_to_vector(n.parameters()).detach() for n in (model.network, twin))
    assert (found - expected).norm() < 1e-2 * (expected - start).norm()  # rounding decides the sign where there is none
    assert metrics["critic/loss"] == pytest.approx(sum(losses) / 10, rel=1e-4)
    assert metrics["critic/grad_norm"] == pytest.approx(sum(norms) / 10, rel=1e-3)


def test_values_have_no_gradient_beyond_the_clip_range() -> None:
    before, wanted = torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, 0.05])
    values = torch.tensor([0.1, 0.3, -0.3, 0.5], requires_grad=True)
    loss = value_loss(values, wanted, before, 0.2)
    errors = [
        max((v - w) ** 2, (min(max(v, -0.2), 0.2) - w) ** 2)
        for v, w in zip(values.tolist(), wanted.tolist(), strict=True)
    ]
    assert loss.item() == pytest.approx(sum(errors) / 8)
    loss.backward()
    assert values.grad is not None
    # inside; beyond, in the right direction, twice; beyond and past what is wanted
    assert values.grad.tolist() == pytest.approx([(0.1 - 1.0) / 4, 0.0, 0.0, (0.5 - 0.05) / 4])
    assert value_loss(values, wanted, before, None).item() == pytest.approx(((values - wanted) ** 2).mean().item() / 2)


def test_equal_rewards_teach_it_nothing_and_do_no_harm() -> None:
    run = Run(config(critic={"warmup_steps": 0}))
    for _ in range(3):
        step = run.step([0.5] * 16, [states(torch.randn(16, 3, 2, generator=torch.Generator().manual_seed(0)))])
        assert math.isnan(step.metrics["critic/explained_variance"])
        assert all(
            math.isfinite(value) for name, value in step.metrics.items() if name in ("critic/loss", "critic/grad_norm")
        )
    assert step.credit is not None and step.credit[:, :3].abs().max() < 1e-5


@pytest.mark.parametrize(("gamma", "expected"), [(1.0, 1 - 0.25), (0.5, None)])
def test_the_explained_variance_is_of_the_discounted_rewards(gamma: float, expected: float | None) -> None:
    rewards = torch.tensor([0.0, 2.0, 4.0, 6.0])
    left = torch.tensor([2, NAN, 1, 0])
    outcomes = rewards[:, None] * gamma**left
    found = explained(outcomes, rewards, gamma)
    assert found["critic/explained_variance"] == pytest.approx(1.0)
    known = outcomes[~outcomes.isnan()]
    assert found["critic/value_mean"] == pytest.approx(float(known.mean()))
    if expected is not None:
        half = rewards.mean() + (outcomes - rewards.mean()) / 2
        assert explained(half, rewards, gamma)["critic/explained_variance"] == pytest.approx(expected)


# --- in a run


FEATURES = torch.randn(16, 3, 2, generator=torch.Generator().manual_seed(1))
TOTALS = FEATURES[:, 0, 0].tolist()


def test_the_baseline_is_the_mean_during_the_warm_up_and_its_value_afterwards() -> None:
    run, plain = Run(config(critic={"warmup_steps": 2})), build_algorithm(config())
    for number in range(4):
        step = run.step(TOTALS, [states(FEATURES)])
        assert step.rewards is not None and step.credit is not None
        assert run.critic.model.trained == number + 1
        if number < 2:
            assert step.rewards.values is None
            assert torch.equal(step.credit, plain.credit(step.rewards))
        else:
            values = step.rewards.values
            assert values is not None and values[:, 3].isnan().all()
            expected = generalised_advantages(step.rewards.totals, values, 1.0, 0.95)
            torch.testing.assert_close(step.credit, expected.clamp(-5, 5), equal_nan=True)
        assert {name for name in step.metrics if name.startswith("critic/")} == {
            "critic/explained_variance", "critic/value_mean", "critic/loss", "critic/grad_norm",
        }  # fmt: skip


def test_images_without_a_score_have_no_state() -> None:
    run = Run(config(critic={"warmup_steps": 0}))
    totals: list[float | None] = list(TOTALS)
    totals[5] = None  # its group of four is left out
    parts: list[States | None] = [states(FEATURES[:8]), None, states(FEATURES[8:])]  # None: images of a data set
    step = run.step(totals, parts)
    assert step.credit is not None and step.credit[4:8].isnan().all()
    assert not step.credit[[0, 8, 15]][:, :3].isnan().any()
    assert run.critic.model.tensors["features/count"].tolist() == [12, 12, 12, 0]


def test_the_residual_critic_predicts_the_reward_above_the_mean_of_the_group() -> None:
    run = Run(config(critic={"residual": True, "warmup_steps": 0, "updates": 1, "lr": 1e-9}))
    run.step(TOTALS, [states(FEATURES)])
    assert run.critic.model.scale()[0] == pytest.approx(0.0, abs=1e-6)
    step = run.step(TOTALS, [states(FEATURES)])
    assert step.rewards is not None and step.credit is not None
    above = group_advantages(step.rewards.totals, step.rewards.group_ids, "none")
    assert step.credit[:, 2].tolist() == pytest.approx(above.tolist(), abs=1e-5)


def test_a_resumed_critic_continues_bitwise() -> None:
    one, generator = Run(config(critic={"warmup_steps": 1})), torch.Generator().manual_seed(0)
    steps = [torch.randn(16, 3, 2, generator=generator) for _ in range(5)]
    assert one.critic.state() is None
    for features in steps[:3]:
        one.step(TOTALS, [states(features, prompts=2)])
    other, saved = Run(config(critic={"warmup_steps": 1})), one.critic.state()
    assert isinstance(saved, bytes)
    other.critic.load_state(saved)
    for features in steps[3:]:
        first, second = (run.step(TOTALS, [states(features, prompts=2)]) for run in (one, other))
        assert first.metrics == second.metrics
        assert first.credit is not None and second.credit is not None
        assert torch.equal(first.credit.nan_to_num(), second.credit.nan_to_num())
    assert one.critic.state() == other.critic.state() != saved
    other.critic.load_state(saved)  # the guard rolls back
    assert other.critic.state() == saved


def test_without_a_state_it_begins_again() -> None:
    run = Run(config())
    first = run.step(TOTALS, [states(FEATURES)])
    saved = run.critic.state()
    run.critic.load_state(None)
    assert run.critic.state() is None
    assert run.step(TOTALS, [states(FEATURES)]).metrics == first.metrics and run.critic.state() == saved


@pytest.mark.parametrize("critic", [{"width": 16}, {}])
def test_a_state_that_does_not_fit_is_refused(critic: dict[str, Any]) -> None:
    run = Run(config())
    run.step(TOTALS, [states(FEATURES)])
    state = run.critic.state()
    assert state is not None
    other = Critic(config(critic=critic))
    with pytest.raises(CheckpointError, match=r"critic\.width|safetensors"):
        other.load_state(state if critic else state[:100])
    assert other.state() is None


def test_the_number_of_threads_does_not_matter_and_is_left_as_it_was() -> None:
    threads, found = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        run = Run(replace(config(), rollout=RolloutConfig(prompts_per_step=64, n=4)))
        features = torch.randn(256, 3, 300, generator=torch.Generator().manual_seed(0))
        run.step(features[:, 0, 0].tolist(), [states(features)])
        assert torch.get_num_threads() == count
        found.append(run.critic.state())
    torch.set_num_threads(threads)
    assert found[0] == found[1]

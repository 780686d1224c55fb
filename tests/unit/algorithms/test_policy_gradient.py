"""The policy gradients on a tiny pipeline: chains and trees, ratios, weights, KLs and guidance."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from training import Training, chain_credit, config, new_policy, relative, rewards

from gerl.algorithms import PolicyGradient, build_algorithm
from gerl.algorithms.core_algos import RELATIVE_WEIGHTS, kl_divergence
from gerl.config import TrainerConfig, algorithm_config
from gerl.engine import replay
from gerl.engine.transitions import FlowRule
from gerl.errors import ConfigError
from gerl.model.lora import lora_disabled
from gerl.model.policy import EMA

ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.1, -0.1]
CREDIT = chain_credit(ADVANTAGES)


@pytest.fixture(scope="module")
def plain() -> Training:
    """Flow-GRPO: tests restore what they change."""
    return Training(config("flow_grpo"))


def log_prob_gradient(training: Training, weights: dict[int, float], scale: float = 1.0) -> torch.Tensor:
    """Gradient of -sum_k w_k mean(A log_prob_k), by hand."""
    (_, _, (tape,)) = training.tasks[0]
    training.actor.optimizer.zero_grad(set_to_none=True)
    advantages = torch.tensor(ADVANTAGES)
    replay(training.policy.pipe, tape, lambda k, s: -weights[k] * (advantages * s.log_prob).sum() * scale)
    return training.actor.flat_gradient()


# --- ratios


@pytest.mark.parametrize("name", ["flow_grpo", "flow_dppo"])
def test_on_policy_the_gradient_is_that_of_reinforce(name: str) -> None:
    training = Training(config(name))
    found, stats = training.gradient(CREDIT)
    assert stats.ratio_deviation == 0 and stats.pairs == 24
    assert relative(found, log_prob_gradient(training, dict.fromkeys(range(3), 1.0), 1 / 24)) < 1e-6


@pytest.mark.parametrize("likelihood", ["gaussian", "squared_error"])
def test_a_decoupled_ratio_is_clipped_to_the_weights_that_the_step_began_with(likelihood: str) -> None:
    c, own = config("flow_grpo"), {"clip_low": 2e-4, "clip_high": 3e-4, "clip_dimensions": None}
    algorithm = algorithm_config("flow_grpo", decoupled=True, likelihood=likelihood, **own)
    training = Training(replace(c, algorithm=algorithm, trainer=TrainerConfig(staleness=1)))
    policy, (_, _, (tape,)) = training.policy, training.tasks[0]
    policy.earlier = [EMA(policy.trained, 0.0)]

    def moved(seed: int) -> None:
        torch.manual_seed(seed)
        for p in policy.trained.values():
            p.data.add_(torch.randn_like(p), alpha=0.02)

    def log_probs() -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        replay(policy.pipe, tape, lambda k, s: found.update({k: s.log_prob}), grad=False)
        return found

    drew = log_probs()
    moved(1)
    policy.earlier[0].load(policy.trained, updates=1)
    policy.version, began = 1, log_probs()
    first, _ = training.gradient(CREDIT)  # the weights are those that the step began with: nothing is clipped
    moved(2)
    policy.version = 2
    found, stats = training.gradient(CREDIT)
    advantages, bound = torch.tensor(ADVANTAGES), list[torch.Tensor]()

    def by_hand(k: int, step: Any) -> torch.Tensor:
        scale = 2 * step.std**2 if likelihood == "squared_error" else 1.0
        ratio = (scale * (step.log_prob - began[k])).exp()
        clipped = ratio.clamp(1 - own["clip_low"], 1 + own["clip_high"])
        bound.append(advantages * clipped.detach() < advantages * ratio.detach())
        surrogate = torch.minimum(advantages * ratio, advantages * clipped)
        return -((scale * (began[k] - drew[k])).exp() * surrogate).sum() / 24

    training.actor.optimizer.zero_grad(set_to_none=True)
    replay(policy.pipe, tape, by_hand)
    assert relative(found, training.actor.flat_gradient()) < 1e-5
    assert 0 < sum(int(b.sum()) for b in bound) < 24
    assert stats.sums["clip_fraction_low"] + stats.sums["clip_fraction_high"] == sum(int(b.sum()) for b in bound)
    assert relative(first, found) > 1e-2


def test_guard_weighs_each_step_by_its_std() -> None:
    training = Training(config("grpo_guard"))
    found, stats = training.gradient(CREDIT)
    (_, _, (tape,)) = training.tasks[0]
    stds = {k: tape.steps[k].rule.std for k in range(3)}
    assert stats.ratio_deviation == 0
    assert relative(found, log_prob_gradient(training, stds, 1 / 24)) < 1e-5  # the bias has no gradient on policy


def test_timestep_weights(plain: Training) -> None:
    (_, _, (tape,)) = plain.tasks[0]
    rules = [tape.steps[k].rule for k in range(3)]
    mean = sum(r.std for r in rules) / 3
    expected = {
        "std": [r.std / mean for r in rules],
        "inverse_dt": [1 / abs(r.dt) for r in rules],
        "inverse_jacobian": [1 / r.jacobian for r in rules],
        "std2_over_jacobian": [r.std**2 / r.jacobian / (sum(s.std**2 / s.jacobian for s in rules) / 3) for r in rules],
    }
    for kind, weights in expected.items():
        a = build_algorithm(config("flow_grpo", timestep_weights=kind))
        found, _ = plain.gradient(CREDIT, algorithm=a)
        assert relative(found, log_prob_gradient(plain, dict(enumerate(weights)), 1 / 24)) < 1e-5


def test_a_step_is_discounted_by_those_that_follow(plain: Training) -> None:
    """Of the four steps of a tape the last has the reward, and is not trained."""
    discounted = build_algorithm(config("flow_grpo", timestep_weights="discount", gamma=0.5))
    found, _ = plain.gradient(CREDIT, algorithm=discounted)
    assert relative(found, log_prob_gradient(plain, {0: 0.125, 1: 0.25, 2: 0.5}, 1 / 24)) < 1e-5
    same, _ = plain.gradient(CREDIT, algorithm=build_algorithm(config("flow_grpo", timestep_weights="discount")))
    assert torch.equal(same, plain.gradient(CREDIT)[0])
    with pytest.raises(ConfigError, match=r"algorithm\.gamma=0\.5: .*timestep_weights=discount"):
        config("flow_grpo", gamma=0.5)


def test_a_discount_does_not_count_steps_that_compression_leaves_out() -> None:
    window = {"num_inference_steps": 8, "window_size": 2, "window_schedule": "progressive"}
    sampling = {f"sampling_{key}": value for key, value in {**window, "solver": "dpm2", "compression": 0.4}.items()}
    training = Training(config("mix_grpo", timestep_weights="discount", gamma=0.5, **sampling))
    (_, _, (tape,)) = training.tasks[0]
    taken = sum(step.rule.dt != 0 for step in tape.steps)
    assert taken < 8
    assert training.algorithm._weights(tape, (0, 1)) == [0.5 ** (taken - 1), 0.5 ** (taken - 2)]  # type: ignore[attr-defined]


def test_weights_by_std_have_the_same_norm_in_any_window() -> None:
    weights = []
    for window in ({}, {"sampling_window_size": 1, "sampling_window_range": [0, 3]}):
        training = Training(config("flow_grpo", timestep_weights="std", **window))
        (task, _, (tape,)) = training.tasks[0]
        assert isinstance(training.algorithm, PolicyGradient)
        trained = task.segments[0].trained
        weights.append(dict(zip(trained, training.algorithm._weights(tape, trained), strict=True)))
    whole, part = weights
    assert part == {k: pytest.approx(whole[k]) for k in part} and len(part) == 1


@pytest.mark.parametrize("kind", RELATIVE_WEIGHTS)
def test_steps_that_compression_leaves_out_have_no_weight(kind: str) -> None:
    window = {"num_inference_steps": 8, "window_size": 2, "window_schedule": "progressive"}
    sampling = {f"sampling_{key}": value for key, value in {**window, "solver": "dpm2", "compression": 0.4}.items()}
    training = Training(config("mix_grpo", timestep_weights=kind, **sampling))
    assert isinstance(training.algorithm, PolicyGradient)
    (_, _, (tape,)) = training.tasks[0]
    taken = tuple(k for k in range(7) if tape.steps[k].rule.dt)
    assert taken[:2] == (0, 1) and len(taken) < 7
    weights = training.algorithm._weights(tape, taken)
    assert sum(weights) / len(taken) == pytest.approx(1) and min(weights) > 0
    assert training.algorithm._weights(tape, (0, 1)) == weights[:2]


# --- KL


@pytest.mark.parametrize("kind", ["gaussian", "flow_grpo", "velocity", "k2", "k3"])
def test_every_kl_is_that_of_the_two_replays(kind: str, plain: Training) -> None:
    (_, _, (tape,)) = plain.tasks[0]
    reference: dict[int, Any] = {}
    with lora_disabled(list(plain.policy.denoisers.values())):
        replay(plain.policy.pipe, tape, lambda k, s: reference.update({k: s}), grad=False)
    values: list[torch.Tensor] = []

    def on_step(k: int, s: Any) -> torch.Tensor:
        r = reference[k]
        kl = kl_divergence(
            kind, mean=s.mean, ref_mean=r.mean, std=s.std, dt=s.rule.dt, output=s.model_output,
            ref_output=r.model_output, log_prob=s.log_prob, ref_log_prob=r.log_prob,
        )  # fmt: skip
        values.append(kl.detach())
        return 0.7 * kl.sum() / 24

    plain.actor.optimizer.zero_grad(set_to_none=True)
    replay(plain.policy.pipe, tape, on_step)
    expected = plain.actor.flat_gradient()
    found, stats = plain.gradient(0 * CREDIT, algorithm=build_algorithm(config("flow_grpo", kl_coef=0.7, kl_type=kind)))
    assert relative(found, expected) < 1e-5 and expected.any()
    assert stats.sums["kl"] == pytest.approx(float(torch.cat(values).sum()), rel=1e-5)


def test_kl_of_the_rollout_from_what_was_recorded() -> None:
    training = Training(config("flow_grpo", kl_coef=0.1, kl_in_reward=True))
    assert isinstance(training.algorithm, PolicyGradient) and not training.algorithm.needs_all_samples
    ((task, _, tapes),) = training.tasks
    (batch,) = training.batches(task, tapes, CREDIT)
    found = training.algorithm.kl_to_base(training.policy, batch)
    _, stats = training.gradient(0 * CREDIT, algorithm=build_algorithm(config("flow_grpo", kl_coef=0.1)))
    assert float(found.mean()) == pytest.approx(stats.sums["kl"] / stats.pairs, rel=1e-4)
    assert found.shape == (8,) and found.std() > 0
    fresh = Training(config("flow_grpo", kl_coef=0.1, kl_in_reward=True), policy=new_policy(perturbed=False))
    ((task, _, tapes),) = fresh.tasks
    assert isinstance(fresh.algorithm, PolicyGradient)
    assert not fresh.algorithm.kl_to_base(fresh.policy, fresh.batches(task, tapes, CREDIT)[0]).any()


# --- guidance


def test_guidance_modes_are_on_policy_and_differ() -> None:
    training = Training(config("flow_grpo", guidance=4.0, cfg="off"))  # whose trajectories serve the other modes too
    found = {}
    for mode in ("joint", "detach_uncond", "off"):
        a = build_algorithm(config("flow_grpo", guidance=4.0, cfg=mode))
        found[mode], stats = training.gradient(CREDIT, algorithm=a)
        if mode == "off":  # the rollout's policy is another one
            assert stats.ratio_deviation is None and set(stats.sums) == {"loss"}
        else:
            assert stats.ratio_deviation is not None and stats.ratio_deviation < 1e-5
    assert relative(found["detach_uncond"], found["joint"]) > 0.01
    assert relative(found["off"], found["detach_uncond"]) > 0.01


@pytest.mark.parametrize("name", ["grpo_guard", "flow_dppo"])
def test_without_guidance_in_the_update_the_other_ratios_start_at_one_too(name: str) -> None:
    training = Training(config(name, guidance=4.0, cfg="off"))
    gradient, stats = training.gradient(CREDIT)
    assert stats.ratio_deviation is None and gradient.any() and abs(stats.sums["loss"]) < 1e-4


# --- trees


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("tempflow_grpo", {"branch_factor": 2}),
        ("branch_grpo", {"split_steps": [0, 1]}),
        ("tree_grpo", {"split_steps": None, "sampling_window_size": 2, "sampling_window_schedule": "geometric"}),
    ],
)
def test_trees_are_on_policy_and_micro_batches_change_nothing(name: str, keys: dict[str, Any]) -> None:
    training = Training(config(name, n=2, **keys))
    samples = [s for task, _, _ in training.tasks for s in task.samples]
    generator = torch.Generator().manual_seed(0)
    credit = training.algorithm.credit(rewards(samples, torch.rand(len(samples), generator=generator).tolist()))
    whole, stats = training.gradient(credit)
    assert whole.norm() > 0 and (stats.ratio_deviation or 0.0) <= 1e-5
    assert all(pixels.shape == (len(task.samples), 16, 16, 3) for task, pixels, _ in training.tasks)
    part, part_stats = training.gradient(credit, algorithm=build_algorithm(config(name, n=2, actor_micro=1, **keys)))
    assert relative(part, whole) < 1e-4
    assert part_stats.pairs == stats.pairs and (part_stats.ratio_deviation or 0.0) <= 1e-5


def test_leaves_of_a_node_share_what_came_before_it() -> None:
    training = Training(config("branch_grpo", n=1, split_steps=[1]))
    for _, pixels, (trunk, leaves) in training.tasks:
        assert len(trunk.steps) == 1 and len(leaves.steps) == 4
        for k in (0, 1):
            x = leaves.steps[k].x.unflatten(0, (-1, 2))
            assert torch.equal(x[:, 0], x[:, 1])
        assert not torch.equal(leaves.steps[1].x_next[0], leaves.steps[1].x_next[1])
        assert torch.equal(leaves.steps[0].x_next[::2], trunk.steps[0].x_next)
        assert len({image.tobytes() for image in pixels}) == len(pixels)


def test_splits_are_noisier_by_their_own_rule() -> None:
    keys = {"n": 1, "split_steps": [0, 2], "steps": 5, "sampling_kernel": "dance_sde", "sampling_noise_level": 0.3}
    keys["sampling_sigmas"] = "linear"
    spread = {}
    for noise in (1.0, 4.0):
        training = Training(config("branch_grpo", split_noise=noise, **keys))  # type: ignore[arg-type]
        for _, _, (_, first, second) in training.tasks:
            for k in range(4):
                rule = (first if k < 2 else second).steps[k].rule
                assert isinstance(rule, FlowRule)
                eta = 0.3 * (noise if k in (0, 2) else 1.0)
                assert rule.std == pytest.approx(eta * (-rule.dt) ** 0.5)
                assert rule.kappa == pytest.approx(rule.sigma_next + eta**2 * rule.dt / (2 * rule.sigma))
            found = second.steps[2]
            children = found.x_next.unflatten(0, (-1, 2))
            assert torch.equal(*found.x.unflatten(0, (-1, 2)).unbind(1))
            spread.setdefault(noise, []).append(float((children[:, 0] - children[:, 1]).std()))
        samples = [s for task, _, _ in training.tasks for s in task.samples]
        credit = training.algorithm.credit(rewards(samples, torch.arange(float(len(samples))).tolist()))
        gradient, stats = training.gradient(credit)
        assert gradient.norm() > 0 and (stats.ratio_deviation or 0.0) <= 1e-5
    assert spread[4.0] == pytest.approx([4 * value for value in spread[1.0]], rel=1e-4)  # the same draws


def test_tempflow_noises_one_step_only() -> None:
    training = Training(config("tempflow_grpo", n=2, branch_factor=2))
    for task, _, _ in training.tasks:
        _, (trunk, *branches), _ = training.rollout.sample(task)
        assert trunk.stochastic_steps == []
        for k, (segment, tape) in enumerate(zip(task.segments[1:], branches, strict=True)):
            assert tape.stochastic_steps == [k] and segment.trained == (k,)
            assert torch.equal(tape.steps[0].x, trunk.steps[0].x[list(segment.rows)])


# --- recorded means


@pytest.mark.parametrize(
    ("name", "keys", "reads"),
    [
        ("flow_grpo", {}, False),
        ("flow_grpo", {"kl_coef": 0.1}, False),
        ("flow_grpo", {"kl_coef": 0.1, "kl_in_reward": True}, True),
        ("grpo_guard", {}, True),
        ("grpo_guard", {"cfg": "off"}, False),
        ("flow_dppo", {}, True),
        ("flow_dppo", {"cfg": "off"}, False),
        ("flow_dppo", {"cfg": "off", "kl_coef": 0.1, "kl_in_reward": True}, True),
        ("tempflow_grpo", {}, False),
        ("branch_grpo", {"split_steps": [0, 1]}, False),
        ("diffusion_nft", {"sampling_kernel": "flow_sde"}, False),
    ],
)
def test_the_recorded_means_are_read_where_an_algorithm_says_so(name: str, keys: dict[str, Any], reads: bool) -> None:
    training = Training(config(name, n=2, **keys))
    count = sum(len(task.samples) for task, _, _ in training.tasks)
    credit = torch.linspace(-1, 1, count)[:, None].expand(-1, 4)
    expected, _ = training.gradient(credit)
    for _, _, tapes in training.tasks:
        for step in (step for tape in tapes for step in tape.steps):
            step.mean = None

    def without() -> torch.Tensor:
        if training.algorithm.settings.subtracts_kl:
            task, _, tapes = training.tasks[0]
            training.algorithm.kl_to_base(training.policy, training.batches(task, tapes, credit)[0])
        return training.gradient(credit)[0]

    assert training.algorithm.needs.recorded_means == reads
    if reads:
        with pytest.raises(AssertionError):
            without()
    else:
        assert torch.equal(without(), expected)

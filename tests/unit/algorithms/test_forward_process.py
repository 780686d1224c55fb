"""The forward-process algorithms on a tiny pipeline: gradients that depend on nothing but the samples."""

import math
from typing import Any

import pytest
import torch
from training import Training, chain_credit, config, new_policy, noised, relative, rewards, samples_of

from gerl.algorithms import ForwardProcess, build_algorithm
from gerl.algorithms.forward_process import BestOfN, Noised, RewardWeightedRegression, norm_excess
from gerl.config import Config, algorithm_config
from gerl.engine import replay
from gerl.engine.transitions import FlowRule
from gerl.errors import ReplayError
from gerl.model.lora import lora_disabled
from gerl.utils.seeding import derive_seed, sample_generators

NAMES = ["diffusion_nft", "awm", "dgpo", "crd", "diffusion_dpo", "rwr", "best_of_n"]
ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.1, -0.1]
CREDIT = chain_credit(ADVANTAGES)
EXTRA: dict[str, dict[str, Any]] = {
    "awm": {"clip_low": 1.0, "clip_high": 1.0},
    "dgpo": {"clip_low": 0.5, "clip_high": 0.5},
}


def settings(name: str, **keys: Any) -> Any:
    return config(name, sampling_kernel="ode", **{**EXTRA.get(name, {}), **keys})


def moved(training: Training) -> None:
    """Take the trained weights away from the old policy."""
    training.policy.old_is_current = False
    generator = torch.Generator().manual_seed(5)
    for p in training.policy.trained.values():
        p.data.add_(0.02 * torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_and_workers_do_not_change_the_gradient(name: str) -> None:
    training = Training(settings(name, kl_coef=0.3, old_kl_coef=0.2))
    moved(training)
    whole, stats = training.gradient(CREDIT)
    assert whole.norm() > 0 and stats.sums["kl"] > 0 and stats.pairs == 8 * 3
    parts = build_algorithm(settings(name, kl_coef=0.3, old_kl_coef=0.2, actor_micro=4))  # one group at a time
    split, split_stats = training.gradient(CREDIT, algorithm=parts)
    assert relative(split, whole) < 1e-4
    assert split_stats.pairs == stats.pairs and split_stats.sums["loss"] == pytest.approx(stats.sums["loss"], rel=1e-4)
    assert set(split_stats.sums) == set(stats.sums)
    # two workers, each with the rollout of one group: their gradients add up
    total = torch.zeros_like(whole)
    samples = [s for task, _, _ in training.tasks for s in task.samples]
    for group in (samples[:4], samples[4:]):
        worker = Training(settings(name, kl_coef=0.3, old_kl_coef=0.2), samples=group)
        moved(worker)
        total += worker.gradient(CREDIT[:4] if group[0].prompt.id == 0 else CREDIT[4:], pairs=24)[0]
    assert relative(total, whole) < 1e-4


def gradient_and_runs(training: Training, **keys: Any) -> tuple[torch.Tensor, int]:
    """The gradient, and how often the denoiser ran for it; `keys`: those of the algorithm that are other ones."""
    runs: list[int] = []
    layer = training.policy.pipe.transformer.transformer_blocks[0].attn.to_q
    handle = layer.register_forward_hook(lambda *_: runs.append(1))
    algorithm = build_algorithm(settings(training.algorithm.settings.name, **keys))
    found, _ = training.gradient(CREDIT, algorithm=algorithm)
    handle.remove()
    return found, len(runs)


@pytest.mark.parametrize("name", ["diffusion_nft", "awm", "crd"])
def test_an_old_policy_that_is_the_current_one_is_not_run(name: str) -> None:
    training = Training(settings(name))
    known, runs = gradient_and_runs(training)
    assert runs == 3  # one noise level each
    training.policy.old_is_current = False  # though it holds the same weights
    run, runs = gradient_and_runs(training)
    assert runs == 6 and relative(run, known) < 1e-5


def test_without_an_old_policy_and_a_reference_neither_is_run() -> None:
    training = Training(settings("rwr"))
    assert gradient_and_runs(training)[1] == 3 and training.policy.old is None
    assert gradient_and_runs(training, kl_coef=0.1)[1] == 6


def test_the_gradient_is_that_of_flow_matching_written_by_hand() -> None:
    training = Training(settings("rwr", timesteps=1))
    (task, _, (tape,)) = training.tasks[0]
    found, stats = training.gradient(CREDIT)
    (k,) = task.segments[0].trained
    x0 = tape.steps[-1].x_next
    seeds = [derive_seed("forward", s.seed, k) for s in task.samples]
    noise = torch.stack([torch.randn(x0.shape[1:], generator=g) for g in sample_generators(seeds)])
    sigma = tape.steps[k].rule.sigma
    losses: list[torch.Tensor] = []

    def on_step(_: int, step: Any) -> torch.Tensor:
        error = ((step.model_output - (noise - x0)) ** 2).flatten(1).mean(1)
        losses.append((torch.tensor(ADVANTAGES) * error).sum().detach())
        return (torch.tensor(ADVANTAGES) * error).sum() / 8

    training.actor.optimizer.zero_grad(set_to_none=True)
    replay(training.policy.pipe, tape, on_step, steps=[k], latents={k: (1 - sigma) * x0 + sigma * noise})
    assert relative(found, training.actor.flat_gradient()) < 1e-6
    assert stats.sums["loss"] == pytest.approx(float(losses[0]), rel=1e-5)


def test_noise_is_per_sample_or_shared_by_the_group() -> None:
    x0 = torch.zeros(8, 4, 2, 2)
    cases: tuple[tuple[str, dict[str, bool], int], ...] = (
        ("diffusion_nft", {}, 8),
        ("dgpo", {}, 2),
        ("awm", {}, 8),
        ("awm", {"shared_noise": True}, 2),
    )
    for name, keys, distinct in cases:
        training = Training(settings(name, **keys))
        assert isinstance(training.algorithm, ForwardProcess)
        samples = [s for task, _, _ in training.tasks for s in task.samples]
        noise = training.algorithm._noise(samples, 1, x0)
        assert len({tuple(row.flatten().tolist()) for row in noise}) == distinct
        assert torch.equal(training.algorithm._noise(samples[3:5], 1, x0[:2]), noise[3:5])
        assert not torch.equal(training.algorithm._noise(samples, 2, x0), noise)


def test_equal_images_with_shared_noise_teach_nothing() -> None:
    """Their advantages sum to 0, and so then do their gradients."""
    norms = []
    for shared in (True, False):
        training = Training(settings("awm", shared_noise=shared))
        for _, _, (tape,) in training.tasks:
            finished = tape.steps[-1].x_next
            finished.copy_(finished[:: len(finished) // 2].repeat_interleave(len(finished) // 2, 0))
        norms.append(float(training.gradient(CREDIT)[0].norm()))
    assert norms[0] < 1e-5 * norms[1]


def test_the_distances_are_those_to_the_base_model_and_to_the_old_policy() -> None:
    training = Training(settings("rwr", kl_coef=2.0, old_kl_coef=3.0))
    moved(training)
    base_only, _ = training.gradient(0 * CREDIT + 1e-9, algorithm=build_algorithm(settings("rwr", kl_coef=2.0)))
    both, stats = training.gradient(0 * CREDIT + 1e-9)
    assert stats.sums["kl"] > 0 and relative(both, base_only) > 1e-2
    assert stats.sums["loss"] > 2 * stats.sums["kl"] * 1.0001  # the old policy adds to it
    fresh = Training(settings("rwr", kl_coef=2.0), policy=new_policy(perturbed=False))
    none, stats = fresh.gradient(0 * CREDIT + 1e-9)
    assert stats.sums["kl"] == 0 and none.norm() < 1e-6


def test_the_excess_of_a_norm_by_hand() -> None:
    reference = torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0], [0.0, 0.0]])  # root mean squares 5 / sqrt 2 and 0
    output = torch.tensor([[6.0, 8.0], [0.3, 0.4], [0.0, 0.0], [1.0, 1.0]], requires_grad=True)
    excess = norm_excess(output, reference)
    assert excess.tolist() == pytest.approx([5 / 2**0.5, 0, 0, 1])
    (gradient,) = torch.autograd.grad((excess**2).sum(), output)
    # 2 excess times the gradient of the root mean square, x / (D rms); none below the reference's norm
    first = [2 * (5 / 2**0.5) * x / (2 * 10 / 2**0.5) for x in (6.0, 8.0)]
    assert gradient.tolist() == [pytest.approx(first), [0, 0], [0, 0], [pytest.approx(1.0)] * 2]


def test_outputs_that_grew_pay_for_it_in_every_algorithm_of_the_family() -> None:
    training = Training(settings("rwr"))
    (_, _, (tape,)), policy = training.tasks[0], training.policy
    assert gradient_and_runs(training)[1] == 3 and gradient_and_runs(training, norm_coef=0.5)[1] == 6  # the base model
    assert isinstance(training.algorithm, ForwardProcess)
    x0, samples = tape.steps[-1].x_next, training.tasks[0][0].samples
    noise = {k: training.algorithm._noise(samples, k, x0) for k in range(3)}
    latents = {k: tape.steps[k].rule.noised(x0, noise[k]) for k in range(3)}
    base: dict[int, torch.Tensor] = {}
    with lora_disabled(list(policy.denoisers.values())):
        replay(policy.pipe, tape, lambda k, s: base.update({k: s.model_output}), range(3), latents=latents, grad=False)
    grown: list[torch.Tensor] = []

    def on_step(k: int, step: Any) -> torch.Tensor:
        norms = [(v**2).flatten(1).mean(1).sqrt() for v in (step.model_output, base[k])]
        grown.append((norms[0] / norms[1] - 1).detach().clamp(min=0))
        return 0.5 * ((norms[0] - norms[1]).clamp(min=0) ** 2).sum() / 24

    training.actor.optimizer.zero_grad(set_to_none=True)
    replay(policy.pipe, tape, on_step, range(3), latents=latents)
    expected = training.actor.flat_gradient()
    for name in ("rwr", "diffusion_nft"):
        plain, _ = training.gradient(1e-9 * CREDIT.abs(), algorithm=build_algorithm(settings(name)))
        guarded = build_algorithm(settings(name, norm_coef=0.5))
        found, stats = training.gradient(1e-9 * CREDIT.abs(), algorithm=guarded)
        assert relative(found - plain, expected) < 1e-4 and expected.any()
        assert stats.sums["norm_excess"] == pytest.approx(float(torch.cat(grown).sum()), rel=1e-4)
    fresh = Training(settings("rwr", norm_coef=2.0), policy=new_policy(perturbed=False))
    none, stats = fresh.gradient(0 * CREDIT + 1e-9)
    assert stats.sums["norm_excess"] == 0 and none.norm() < 1e-6


def test_samples_without_credit_are_left_out_and_zeros_where_nothing_needs_them() -> None:
    credit = chain_credit([1.0, -1.0, 0.0, 0.0, *[float("nan")] * 4])
    for name, pairs in (("diffusion_nft", 12), ("rwr", 6), ("diffusion_dpo", 6)):
        training = Training(settings(name))
        assert training.gradient(credit)[1].pairs == pairs


def test_guidance_off_learns_the_conditional_output() -> None:
    guided = Training(settings("rwr", guidance=4.0, cfg="off"))
    joint = build_algorithm(settings("rwr", guidance=4.0, cfg="joint"))
    off, stats = guided.gradient(CREDIT)
    on, joint_stats = guided.gradient(CREDIT, algorithm=joint)
    assert off.norm() > 0 and relative(off, on) > 0.05 and stats.pairs == joint_stats.pairs


def test_epsilon_prediction_is_trained_as_well() -> None:
    c = config("diffusion_nft", sampling_kernel="ode", steps=4, sampling_call={})
    training = Training(c, policy=new_policy("sd15"))
    moved(training)
    gradient, stats = training.gradient(CREDIT)
    assert gradient.norm() > 0 and stats.pairs == 24


@pytest.mark.parametrize("name", NAMES)
def test_what_the_pipeline_writes_into_the_latents_does_not_count(name: str) -> None:
    """The loss of what is left is that of smaller images; values that are written over may be anything."""
    algorithm, generator = build_algorithm(settings(name)), torch.Generator().manual_seed(3)
    assert isinstance(algorithm, ForwardProcess)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x0, noise, output, old, reference = (draw(4, 2, 3, 6) for _ in range(5))
    rule, advantages, groups = FlowRule(0.6, 0.4, 0.4, 0.0), draw(4), torch.tensor([0, 0, 1, 1])
    written = torch.zeros(4, 2, 3, 6, dtype=torch.bool)
    written[..., 4:] = True

    def noised(*values: torch.Tensor) -> Noised:
        x0, noise, output, old, reference = values
        x = rule.noised(x0, noise)
        return Noised(rule, x0, noise, x, output, old, reference, advantages, groups)

    values = (x0, noise, output, old, reference)
    smaller = algorithm.loss(noised(*(v[..., :4] for v in values)))[0]
    torch.testing.assert_close(algorithm.loss(noised(*values).without(written))[0], smaller)
    other = [torch.where(written, 100.0, v) for v in values]
    torch.testing.assert_close(algorithm.loss(noised(*other).without(written))[0], smaller)


def test_a_sample_of_which_nothing_is_left_is_refused() -> None:
    x = torch.zeros(2, 1, 2, 2)
    s = Noised(FlowRule(0.6, 0.4, 0.4, 0.0), x, x, x, x, None, None, torch.zeros(2), torch.zeros(2))
    written = torch.ones(2, 1, 2, 2, dtype=torch.bool)
    written[0, 0, 0, 0] = False
    with pytest.raises(ReplayError, match="leaves nothing of a sample"):
        s.without(written)


GENERATOR = torch.Generator().manual_seed(5)
OUTPUT, TARGET = (torch.randn(4, 3, 2, generator=GENERATOR) for _ in range(2))
WEIGHTS = torch.tensor([0.0, 1.0, 0.3, 2.7])
RWR = RewardWeightedRegression(Config(algorithm=algorithm_config("rwr", beta=2.0)))
BEST = BestOfN(Config(algorithm=algorithm_config("best_of_n")))


def loss(output: torch.Tensor, target: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return BEST.loss(noised(output, target, weights))[0]


def test_the_loss_is_the_weighted_mean_squared_error_of_each_row() -> None:
    output = torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]])
    target = torch.tensor([[[0.0, 0.0]], [[3.0, 1.0]]])
    assert loss(output, target, torch.tensor([0.5, 2.0])).tolist() == [1.25, 10.0]


def test_the_gradient_in_closed_form() -> None:
    output = OUTPUT.clone().requires_grad_()
    (got,) = torch.autograd.grad(loss(output, TARGET, WEIGHTS).sum(), output)
    torch.testing.assert_close(got, WEIGHTS.view(-1, 1, 1) * 2 / 6 * (OUTPUT - TARGET), rtol=1e-6, atol=1e-7)


def test_the_optimum_is_the_weighted_mean_of_the_targets() -> None:
    optimum = (WEIGHTS.view(-1, 1, 1) * TARGET).sum(0) / WEIGHTS.sum()
    theta = optimum.clone().requires_grad_()
    loss(theta.expand(4, 3, 2), TARGET, WEIGHTS).sum().backward()
    assert theta.grad is not None and theta.grad.abs().max() < 1e-5


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_rewards_weigh_by_the_softmax_of_beta_times_the_advantage(beta: float) -> None:
    algorithm = RewardWeightedRegression(Config(algorithm=algorithm_config("rwr", beta=beta)))
    got = algorithm.advantages(rewards(samples_of([0, 0, 1, 1]), [3.0, 1.0, 7.0, 7.0]))
    high, low = math.exp(beta / 1.0001), math.exp(-beta / 1.0001)  # advantages +-1 / (1 + 1e-4)
    assert got.tolist() == pytest.approx([2 * high / (high + low), 2 * low / (high + low), 0, 0])


def test_best_of_n_keeps_the_best_of_each_group() -> None:
    given = rewards(samples_of([0, 1, 0, 2, 1, 2]), [0.1, 5.0, 0.9, 0.5, 5.0, 0.2])
    assert BEST.advantages(given).tolist() == [0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("algorithm", [RWR, BEST], ids=["rwr", "best_of_n"])
def test_the_classes_regress_to_the_clean_latents(algorithm: RewardWeightedRegression | BestOfN) -> None:
    x0, noise, output = (torch.randn(4, 3, 2, generator=GENERATOR) for _ in range(3))
    rule = FlowRule(0.6, 0.4, 0.4, 0.0)
    s = Noised(rule, x0, noise, rule.noised(x0, noise), output, None, None, WEIGHTS, torch.zeros(4))
    losses, metrics = algorithm.loss(s)
    errors = ((output - (noise - x0)) ** 2).mean((1, 2))
    torch.testing.assert_close(losses, WEIGHTS * errors)
    assert metrics == {"squared_error": pytest.approx(float(errors.mean()))}

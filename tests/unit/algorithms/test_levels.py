"""The noise levels that forward-process algorithms train, and which policies they are compared with."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from training import PROMPTS, Training, chain_credit, config, new_policy, relative, rewards

from gerl.algorithms import build_algorithm, count_pairs
from gerl.algorithms.planning import any_steps, plan_samples
from gerl.config import Config
from gerl.engine import Tape, record, record_structure, replay
from gerl.model.lora import lora_disabled

ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.1, -0.1]
CREDIT = chain_credit(ADVANTAGES)


def settings(name: str, **keys: Any) -> Config:
    return config(name, sampling_kernel="ode", **keys)


def moved(training: Training) -> Training:
    """With trained weights that are not those of the old policy."""
    training.policy.old_is_current = False
    generator = torch.Generator().manual_seed(5)
    for p in training.policy.trained.values():
        p.data.add_(0.02 * torch.randn(p.shape, generator=generator))
    return training


# --- which levels


@pytest.mark.parametrize("name", ["diffusion_nft", "awm", "dgpo", "crd", "diffusion_dpo", "rwr", "best_of_n"])
def test_the_last_noise_level_can_be_trained(name: str) -> None:
    training = Training(settings(name, sampling_window_range=[0, None]))
    assert training.tasks[0][0].segments[0].trained == (0, 1, 2, 3)
    gradient, stats = training.gradient(CREDIT)
    assert gradient.norm() > 0 and stats.pairs == 32


def test_every_subset_is_as_likely() -> None:
    drawn = Counter(any_steps(range(2, 6), 3, "seed", i) for i in range(2000))
    assert len(drawn) == 4 and all(440 < count < 560 for count in drawn.values())
    assert all(steps == tuple(sorted(steps)) for steps in drawn)


def test_any_levels_are_drawn_anew_each_step_and_the_same_for_all_its_images() -> None:
    algorithm = build_algorithm(settings("dgpo", timesteps=2, timestep_sampling="step"))
    plans = [algorithm.plan(plan_samples(algorithm.config, PROMPTS, step, 0)) for step in range(1, 60)]
    trained = [{task.segments[0].trained for task in plan} for plan in plans]
    assert all(len(levels) == 1 for levels in trained)
    assert {next(iter(levels)) for levels in trained} == {(0, 1), (0, 2), (1, 2)}


def test_each_image_leaves_out_levels_of_its_own() -> None:
    c = settings("diffusion_nft", n=16, sampling_window_range=[0, None], timesteps=3, timestep_sampling="sample")
    algorithm = build_algorithm(c)
    samples = plan_samples(c, PROMPTS, 1, 0)
    credit = algorithm.credit(rewards(samples, [float(i % 5) for i in range(len(samples))]))
    assert credit.shape == (32, 4) and (credit.isnan().sum(1) == 1).all()
    assert len({row.isnan().nonzero().item() for row in credit}) == 4
    same = algorithm.credit(rewards(samples[3:6], [0.0, 1.0, 2.0]))
    assert torch.equal(same.isnan(), credit[3:6].isnan())  # whoever is drawn with it
    (task,) = algorithm.plan(samples)
    assert task.segments[0].trained == (0, 1, 2, 3) and count_pairs([(task, credit)]) == 3 * 32


def test_images_that_share_their_noise_share_their_levels() -> None:
    c = settings("diffusion_dpo", n=4, timesteps=1, timestep_sampling="sample")
    credit = build_algorithm(c).credit(rewards(plan_samples(c, PROMPTS, 1, 0), [float(i) for i in range(8)]))
    for group in (credit[:4], credit[4:]):
        assert torch.equal(group.isnan(), group[:1].isnan().expand(4, -1))


@pytest.mark.parametrize("name", ["diffusion_nft", "awm", "rwr"])
def test_a_gradient_with_levels_left_out_is_the_sum_of_those_that_are_not(name: str) -> None:
    training = moved(Training(settings(name, kl_coef=0.3)))
    gaps = CREDIT.clone()
    for row in range(8):
        gaps[row, row % 3] = torch.nan
    found, stats = training.gradient(gaps)
    assert stats.pairs == 8 * 3 - 8
    total = torch.zeros_like(found)
    for row in range(8):
        for k in range(3):
            if k != row % 3:
                alone = torch.full_like(gaps, torch.nan)
                alone[row, k] = gaps[row, k]
                total += training.gradient(alone, pairs=16)[0]
    assert relative(total, found) < 1e-5
    split, _ = training.gradient(gaps, algorithm=build_algorithm(settings(name, kl_coef=0.3, actor_micro=3)))
    assert relative(split, found) < 1e-5


# --- compared with what


def test_the_ratio_of_awm_to_the_trained_weights_is_one_whatever_the_old_policy_is() -> None:
    training = moved(Training(settings("awm", off_policy=False, clip_low=0.01, clip_high=0.01)))
    found, stats = training.gradient(CREDIT)
    assert set(stats.sums) == {"loss"}
    policy = training.policy
    policy.old_is_current = True  # the ratio to it is 1 as well
    on_policy = build_algorithm(settings("awm", clip_low=0.01, clip_high=0.01))
    assert relative(training.gradient(CREDIT, algorithm=on_policy)[0], found) < 1e-6
    policy.old_is_current = False
    off_policy, _ = training.gradient(CREDIT, algorithm=on_policy)
    assert relative(off_policy, found) > 1e-3
    regularised = build_algorithm(settings("awm", off_policy=False, old_kl_coef=2.0))
    assert relative(training.gradient(CREDIT, algorithm=regularised)[0], found) > 0.01


def test_preferences_of_dgpo_may_be_measured_from_the_old_policy() -> None:
    """TDM-R1's reference: at the old policy the weight is 1/2, whatever the base model says."""
    keys = {"clip_low": 0.5, "clip_high": 0.5, "beta": 200.0, "old_every": 2}
    training = Training(settings("dgpo", reference="old", **keys))
    training.policy.old_is_current = False
    _, at_old = training.gradient(CREDIT)
    assert at_old.sums["group_weight"] / at_old.pairs == pytest.approx(0.5, abs=1e-4)
    from_base = build_algorithm(settings("dgpo", **keys))
    base = training.gradient(CREDIT, algorithm=from_base)[1]
    assert abs(base.sums["group_weight"] / base.pairs - 0.5) > 1e-3
    moved(training)
    assert abs(training.gradient(CREDIT)[1].sums["group_weight"] / 24 - 0.5) > 1e-3


def test_the_old_policy_draws_after_the_steps_that_are_asked_for() -> None:
    c = settings("dgpo", rollout_old_after=3)
    training = moved(Training(c))
    drawn = {}
    for step in (3, 4):
        for old in (False, True):
            (task,) = training.algorithm.plan(plan_samples(c, PROMPTS, step, 0))
            if old:
                drawn[step, "old"] = training.rollout.sample(task, old=True)[0]
            else:
                drawn[step, "trained"] = training.rollout.sample(task)[0]
        drawn[step, "found"] = training.rollout.generate(task, training.algorithm)[0]
        assert (drawn[step, "old"] != drawn[step, "trained"]).any()
    assert (drawn[3, "found"] == drawn[3, "trained"]).all() and (drawn[4, "found"] == drawn[4, "old"]).all()


# --- a guided reference of what was drawn without guidance


def test_a_guided_reference_at_the_latents_of_an_unguided_rollout() -> None:
    policy = new_policy()
    unguided, guided = (Training(settings("rwr", guidance=g), policy=policy) for g in (1.0, 4.0))
    (tape,), (other,) = unguided.tasks[0][2], guided.tasks[0][2]
    generator = torch.Generator().manual_seed(3)
    latents = {k: torch.randn(tape.steps[0].x.shape, generator=generator) for k in (0, 2)}

    def outputs(of: Tape, index: Sequence[int] = range(8)) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        given = {k: value[list(index)] for k, value in latents.items()}
        with lora_disabled(list(policy.denoisers.values())):
            replay(policy.pipe, of, lambda k, s: found.update({k: s.model_output}), given, latents=given, grad=False)
        return found

    runs: list[int] = []
    handle = policy.pipe.transformer.transformer_blocks[0].attn.to_q.register_forward_hook(lambda *_: runs.append(1))
    structure = record_structure(policy.pipe, tape, range(8), {"guidance_scale": 4.0})
    handle.remove()
    assert len(runs) == 1  # the denoiser, for the shape of its output
    whole = record(policy.pipe, dict(other.call), kernel="ode", window=(), generators=[torch.Generator()] * 8)[1]
    expected, found = outputs(whole), outputs(structure)
    assert all(torch.equal(found[k], expected[k]) for k in latents)
    plain = outputs(record_structure(policy.pipe, tape, range(8), {}))
    assert all(relative(plain[k], expected[k]) > 0.01 for k in latents)
    some = outputs(record_structure(policy.pipe, tape, [5, 2], {"guidance_scale": 4.0}), [5, 2])
    assert all(relative(some[k], expected[k][[5, 2]]) < 1e-5 for k in latents)


@pytest.mark.parametrize("name", ["crd", "dgpo", "rwr"])
def test_the_kl_to_a_guided_reference_is_that_of_a_guided_rollout(name: str) -> None:
    """The base model at guidance 4 of images drawn without, against images drawn with it and noised alike."""
    keys: dict[str, Any] = {"kl_coef": 0.5, "clip_low": 0.5, "clip_high": 0.5} if name == "dgpo" else {"kl_coef": 0.5}
    training = moved(Training(settings(name, reference_guidance=4.0, **keys)))
    _, stats = training.gradient(CREDIT)
    unguided = build_algorithm(settings(name, **keys))
    other = training.gradient(CREDIT, algorithm=unguided)[1]
    assert stats.sums["kl"] > 1.2 * other.sums["kl"] > 0
    parts = build_algorithm(settings(name, reference_guidance=4.0, actor_micro=4, **keys))
    assert training.gradient(CREDIT, algorithm=parts)[1].sums["kl"] == pytest.approx(stats.sums["kl"], rel=1e-4)
    same = build_algorithm(settings(name, reference_guidance=1.0, **keys))
    assert training.gradient(CREDIT, algorithm=same)[1].sums["kl"] == pytest.approx(other.sums["kl"], rel=1e-4)


def test_the_kl_of_crd_may_count_by_the_reward() -> None:
    keys = {"kl_coef": 0.5, "mix": 1e-6}  # the loss of the images next to nothing
    training = moved(Training(settings("crd", kl_by_reward=True, **keys)))
    good, bad = (chain_credit([value] * 8) for value in (5.0, -5.0))
    at_best, _ = training.gradient(good)
    at_worst, _ = training.gradient(bad)
    every, _ = training.gradient(bad, algorithm=build_algorithm(settings("crd", **keys)))
    assert relative(at_best, every) < 1e-4 and relative(at_worst, 2e-4 * every) < 1e-2

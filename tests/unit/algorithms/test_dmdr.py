"""DMDR: the direction of distribution matching, its gradient, and a LoRA that imitates, apart from the first."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from training import Training, chain_credit, config, relative

from gerl.algorithms import build_algorithm
from gerl.algorithms.dmdr import DMDR, direction
from gerl.engine import replay
from gerl.errors import ConfigError
from gerl.model.fake import fake_active, is_fake

KEYS: dict[str, Any] = {"n": 2, "matching_steps": 5, "sampling_window_range": [0, 2], "sampling_kernel": "cps"}
CREDIT = [1.0, -1.0, 0.5, -0.5]


def trained(**keys: Any) -> Training:
    torch.manual_seed(4)
    training = Training(config("dmdr", **{**KEYS, **keys}))
    for name, p in training.policy.trained.items():  # both LoRAs differ from nothing and from each other
        if is_fake(name):
            p.data.normal_(0, 0.2)
    return training


def parts(training: Training, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the trained LoRA, and of the one that imitates."""
    sizes = [p.numel() for p in training.policy.trained.values()]
    split = list(zip(training.policy.trained, flat.split(sizes), strict=True))
    own, fake = ([values for name, values in split if is_fake(name) == which] for which in (False, True))
    return torch.cat(own), torch.cat(fake)


# --- the direction


def test_the_loss_has_the_gradient_of_the_published_one() -> None:
    torch.manual_seed(0)
    x0, fake, real = (torch.randn(3, 4, 2) for _ in range(3))
    x0.requires_grad_()
    (found,) = torch.autograd.grad((direction(x0, fake, real).detach() * x0).mean(), x0)
    p_real, p_fake = x0 - real, x0 - fake  # train_sitxl_refl_deepspeed.py:531-563
    grad = torch.stack([(p_real[i] - p_fake[i]) / (p_real[i].abs().mean() + 1e-8) for i in range(3)]).detach()
    (published,) = torch.autograd.grad(0.5 * ((x0 - (x0 - grad).detach()) ** 2).mean(), x0)
    torch.testing.assert_close(found, published)
    assert not direction(x0, real, real).any()


def test_of_gaussians_it_points_to_the_real_one() -> None:
    """Images of N(m, 1), real ones of N(0, 1): exact denoisers differ by a part of m, and a step leads towards 0."""
    torch.manual_seed(0)
    tau, mean = 0.6, 1.5
    x0 = mean + torch.randn(4096, 1)
    x = (1 - tau) * x0 + tau * torch.randn(4096, 1)
    gain = (1 - tau) / ((1 - tau) ** 2 + tau**2)  # of the posterior mean of data with variance 1
    fake, real = (m + gain * (x - (1 - tau) * m) for m in (mean, 0.0))
    found = direction(x0, fake, real)
    assert (found > 0).all() and (direction(-x0, -fake, -real) < 0).all()
    assert float(((fake - real) - mean * (1 - gain * (1 - tau))).abs().max()) < 1e-5


# --- the two LoRAs


def test_each_loss_trains_its_own_lora() -> None:
    training = trained(matching_coef=1.0)
    whole, stats = training.gradient(chain_credit(CREDIT))
    own, fake = parts(training, whole)
    assert own.any() and fake.any() and stats.pairs == 8
    without = build_algorithm(config("dmdr", **KEYS, matching_coef=0.0))
    surrogate, imitation = parts(training, training.gradient(chain_credit(CREDIT), algorithm=without)[0])
    assert torch.equal(imitation, fake) and relative(surrogate, own) > 1e-3
    plain, _ = Training(config("flow_grpo", **{k: v for k, v in KEYS.items() if k != "matching_steps"})).gradient(
        chain_credit(CREDIT)
    )
    assert relative(surrogate, plain) < 1e-4
    assert stats.sums["fake_loss"] > 0 and stats.sums["matching_distance"] > 0


def test_the_gradients_are_those_of_the_losses() -> None:
    """A finite difference of both losses, each along its own LoRA, with the direction as it was."""
    training = trained(matching_coef=3.0)
    algorithm = training.algorithm
    assert isinstance(algorithm, DMDR)
    ((task, _, (tape,)),) = training.tasks
    batch = training.batches(task, [tape], chain_credit([0.0] * 4))[0]
    options = {"steps": batch.trained, "index": [0, 1, 2, 3], "cfg": "joint"}
    loss = algorithm.further(training.policy, batch, [0, 1, 2, 3], options)
    flat, stats = training.gradient(chain_credit([0.0] * 4))
    slopes = []
    torch.manual_seed(7)  # directions along which both losses change by more than fp32 rounds
    for fake in (False, True):
        chosen = {name: p for name, p in training.policy.trained.items() if is_fake(name) == fake}
        steps, values = {name: torch.randn_like(p) for name, p in chosen.items()}, []
        for sign in (1, -1):
            for name, p in chosen.items():
                p.data.add_(steps[name], alpha=sign * 1e-3)
            if fake:
                values.append(training.gradient(chain_credit([0.0] * 4))[1].sums["fake_loss"] / 8)
            else:
                found: list[float] = []
                note = lambda k, s: found.append(float(loss(k, s)[0]) / 2)  # noqa: E731, B023
                replay(training.policy.pipe, tape, note, steps=batch.trained, grad=False)
                values.append(sum(found))
            for name, p in chosen.items():
                p.data.sub_(steps[name], alpha=sign * 1e-3)
        slopes.append(((values[0] - values[1]) / 2e-3, torch.cat([v.flatten() for v in steps.values()])))
    for (slope, step), gradient in zip(slopes, parts(training, flat), strict=True):
        assert slope == pytest.approx(float((gradient * step).sum()), rel=1e-2)
    assert stats.sums["loss"] != 0


def test_where_both_models_see_the_same_nothing_is_matched() -> None:
    training = Training(config("dmdr", **KEYS))  # the LoRA that imitates is 0, and the real model is the base
    _, stats = training.gradient(chain_credit([0.0] * 4))
    assert stats.sums["matching_distance"] == 0.0
    own, fake = parts(training, training.gradient(chain_credit([0.0] * 4))[0])
    assert not own.any() and fake.any()


def test_micro_batches_add_up_and_another_guidance_matches_other_images() -> None:
    whole, _ = trained().gradient(chain_credit(CREDIT))
    small, _ = trained(actor_micro=1).gradient(chain_credit(CREDIT))
    assert relative(small, whole) < 1e-4
    guided, _ = trained(teachers=[{"guidance": 4.5}]).gradient(chain_credit(CREDIT))
    assert relative(guided, whole) > 1e-4


def test_it_is_in_no_export_and_takes_part_only_where_it_is_asked_for() -> None:
    training = trained()
    denoiser = training.policy.denoisers["transformer"]
    assert b".fake." not in training.policy.lora_file()
    open_before = {id(p) for p in denoiser.parameters() if p.requires_grad}
    with fake_active(training.policy.denoisers):
        imitating = {id(p) for p in denoiser.parameters() if p.requires_grad}
    assert imitating == {id(p) for name, p in training.policy.trained.items() if is_fake(name)}
    assert {id(p) for p in denoiser.parameters() if p.requires_grad} == open_before
    assert open_before == {id(p) for name, p in training.policy.trained.items() if not is_fake(name)}


def test_what_it_cannot_do_is_refused() -> None:
    c = config("dmdr", **KEYS)
    for change, said in (
        ({"train": "full"}, r"model\.train=full: dmdr"),
        ({"shard": "denoiser"}, "ranks_per_worker=2"),
    ):
        cluster = replace(c.cluster, ranks_per_worker=2 if "shard" in change else 1)
        with pytest.raises(ConfigError, match=said):
            replace(c, model=replace(c.model, **change), cluster=cluster)
    for entries in ([{"lora": "a"}, {"lora": "b", "data_source": "c"}], [{"lora": "a", "data_source": "c"}]):
        with pytest.raises(ConfigError, match=r"algorithm\.teachers=.*one entry without data_source"):
            config("dmdr", teachers=entries)

"""On-policy distillation: distances against closed forms, gradients against finite differences, several teachers."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from training import PROMPTS, Training, chain_credit, config, new_policy, relative, rewards

from gerl.algorithms import build_algorithm
from gerl.algorithms.distillation import DMDR, direction, distance_weight, teacher_of
from gerl.algorithms.planning import plan_samples
from gerl.config import ClusterConfig, Config
from gerl.config.algorithms import Teacher
from gerl.engine import record, replay
from gerl.errors import ConfigError, ModelError
from gerl.model.lora import adapter_active, lora_disabled
from gerl.model.lora_files import Halves, Layers
from gerl.model.policy import Policy
from gerl.model.teachers import attach_teachers, is_fake
from gerl.protocol import Prompt, Sample

OCR, COLOUR = "ocr", "colour"


def layers_for(denoiser: torch.nn.Module, seed: int, rank: int = 2, targets: str = "to_q|to_v") -> Layers:
    """A random LoRA for the layers of `denoiser` whose name has `targets`."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * 0.3

    return {
        name.removesuffix(".base_layer"): Halves(drawn(rank, m.in_features), drawn(m.out_features, rank), 0.5)
        for name, m in denoiser.named_modules()
        if isinstance(m, torch.nn.Linear) and re.search(targets, name) and "lora_" not in name
    }


def taught_policy(*teachers: Teacher, perturbed: bool = True) -> Policy:
    """The tiny policy, whose LoRAs that teach are random ones; the same for the same `lora`."""
    policy = new_policy(perturbed=perturbed)
    denoiser = policy.denoisers["transformer"]
    names = sorted({t.lora for t in teachers if t.lora})
    read = {name: {"transformer": layers_for(denoiser, seed=len(name), rank=len(name))} for name in names}
    policy.teachers = attach_teachers(teachers, read, policy.denoisers, "cpu")
    return policy


def samples_for(sources: Sequence[str | None], c: Config) -> list[Sample]:
    """The samples of the two prompts, a prompt for each of the `sources`."""
    prompts = [
        replace(p, metadata={} if source is None else {"data_source": source})
        for p, source in zip(PROMPTS, sources, strict=True)
    ]
    return plan_samples(c, prompts, 1, 0)


def given(*teachers: Teacher, **keys: Any) -> Config:
    entries = [
        {k: v for k, v in vars(t).items() if v not in (None, {}) and (k, v) != ("weight", 1.0)} for t in teachers
    ]
    return config("opd", teachers=entries, **keys)


def trained_on(*teachers: Teacher, sources: Sequence[str | None] = (None, None), **keys: Any) -> Training:
    c = given(*teachers, **keys)
    return Training(c, taught_policy(*teachers), samples_for(sources, c))


def outputs_of(training: Training, number: int | None, **options: Any) -> dict[int, Any]:
    """The steps of the student (None) or a teacher at the states of the only tape."""
    ((task, _, (tape,)),) = training.tasks
    found: dict[int, Any] = {}

    def replayed() -> None:
        steps = task.segments[0].trained
        replay(training.policy.pipe, tape, lambda k, s: found.update({k: s}), steps=steps, grad=False, **options)

    if number is None:
        replayed()
    else:
        with training.policy.teacher(number):
            replayed()
    return found


ONE = Teacher(lora="one")


# --- the loss


@pytest.mark.parametrize(
    ("distance", "kernel"),
    [("gaussian", "cps"), ("gaussian", "flow_sde"), ("mean", "cps"), ("velocity", "cps"), ("mean", "ode"),
     ("velocity", "ode")],
)  # fmt: skip
def test_the_loss_is_the_closed_form(distance: Any, kernel: str) -> None:
    training = trained_on(ONE, distance=distance, sampling_kernel=kernel, n=1, sampling_window_range=[0, 3])
    ((task, _, (tape,)),) = training.tasks
    _, stats = training.gradient(chain_credit([1.0, 1.0]))
    student, teacher = outputs_of(training, None), outputs_of(training, 0)
    assert task.segments[0].trained == (0, 1, 2) and stats.pairs == 6
    expected, weighted = 0.0, 0.0
    for k, mine in student.items():
        rule, theirs = tape.steps[k].rule, teacher[k]
        means = [s.x + (rule.sigma_next - rule.sigma) * s.model_output for s in (mine, theirs)]  # Euler's
        deviation = (rule.kappa - rule.sigma_next) * ((1 - rule.sigma) * (mine.model_output - theirs.model_output))
        apart = means[0] - means[1] + deviation
        scale = {"gaussian": 2 * rule.std**2, "mean": 2.0, "velocity": 1.0}[distance]
        apart = mine.model_output - theirs.model_output if distance == "velocity" else apart
        expected += float((apart.double() ** 2).mean()) / scale / 3
        squared = float(((mine.model_output - theirs.model_output).double() ** 2).mean())
        weighted += distance_weight(distance, rule) * squared / 3
    assert expected > 0
    assert stats.sums["loss"] / 6 == pytest.approx(expected, rel=1e-4) == stats.sums["teacher_distance"] / 6
    assert weighted == pytest.approx(expected, rel=1e-4)
    facts = training.algorithm.step_facts(tape, task.segments[0].trained)
    assert [f.weight for f in facts] == [distance_weight(distance, tape.steps[k].rule) for k in range(3)]


def test_a_student_that_is_its_teacher_learns_nothing() -> None:
    c = given(Teacher())  # the base model, as it is
    training = Training(c, taught_policy(Teacher(), perturbed=False), samples_for((None, None), c))
    gradient, stats = training.gradient(chain_credit([1.0] * 8))
    assert stats.sums["loss"] == 0.0 and not gradient.any()
    away, _ = Training(c, taught_policy(Teacher()), samples_for((None, None), c)).gradient(chain_credit([1.0] * 8))
    assert float(away.norm()) > 1e-4


@pytest.mark.parametrize("distance", ["gaussian", "mean", "velocity"])
def test_the_gradient_is_that_of_the_loss(distance: Any) -> None:
    training = trained_on(ONE, distance=distance, kl_coef=0.3, n=1)
    gradient, _ = training.gradient(chain_credit([1.0, 1.0]))
    torch.manual_seed(5)
    parameters = list(training.policy.trained.values())
    direction = [torch.randn_like(p) for p in parameters]
    slope = float(sum((g * d.flatten()).sum() for g, d in zip(
        gradient.double().split([p.numel() for p in parameters]), direction, strict=True)))  # fmt: skip
    values, size = [], 1e-3
    for sign in (1, -1):
        for p, d in zip(parameters, direction, strict=True):
            p.data.add_(d, alpha=sign * size)
        _, stats = training.gradient(chain_credit([1.0, 1.0]))
        values.append(stats.sums["loss"] / stats.pairs)
        for p, d in zip(parameters, direction, strict=True):
            p.data.sub_(d, alpha=sign * size)
    assert (values[0] - values[1]) / (2 * size) == pytest.approx(slope, rel=2e-3)


def test_micro_batches_and_stacked_steps_add_up() -> None:
    teachers = [replace(ONE, data_source=OCR), Teacher(guidance=4.5, data_source=COLOUR)]
    sources = (OCR, COLOUR)
    whole, _ = trained_on(*teachers, sources=sources).gradient(chain_credit([1.0] * 8))
    for keys in ({"actor_micro": 1}, {"actor_micro": 3}):
        parts, _ = trained_on(*teachers, sources=sources, **keys).gradient(chain_credit([1.0] * 8))
        assert relative(parts, whole) < 1e-4
    stacked = trained_on(*teachers, sources=sources)
    stacked.algorithm.config = replace(stacked.config, actor=replace(stacked.config.actor, step_batch=3))
    assert relative(stacked.gradient(chain_credit([1.0] * 8))[0], whole) < 1e-4


# --- who teaches whom


def test_each_prompt_learns_from_its_own_teacher() -> None:
    both = [replace(ONE, data_source=OCR), Teacher(lora="other", data_source=COLOUR, weight=0.5)]
    training = trained_on(*both, sources=(OCR, COLOUR))
    credit = training.algorithm.credit(rewards(training.tasks[0][0].samples, [0.0] * 8))
    assert torch.equal(credit, torch.ones(8, 4))
    gradient, stats = training.gradient(credit)
    alone = [trained_on(replace(t, data_source=None), sources=(OCR, COLOUR)) for t in both]
    halves = [torch.tensor([1.0] * 4 + [torch.nan] * 4), torch.tensor([torch.nan] * 4 + [1.0] * 4)]
    parts = [t.gradient(half[:, None].expand(-1, 4), pairs=24) for t, half in zip(alone, halves, strict=True)]
    assert relative(gradient, parts[0][0] + parts[1][0]) < 1e-4 and relative(gradient, parts[0][0]) > 0.1
    for name, (_, single) in zip((OCR, COLOUR), parts, strict=True):
        total, count = stats.parts[f"teacher_distance/{name}"]
        assert count == 12 == single.pairs and total == pytest.approx(single.sums["teacher_distance"], rel=1e-4)
        assert single.parts == {}  # there is only one
    assert stats.sums["loss"] == pytest.approx(sum(single.sums["loss"] for _, single in parts), rel=1e-4)
    assert parts[1][1].sums["loss"] == pytest.approx(0.5 * parts[1][1].sums["teacher_distance"])


def test_prompts_without_a_teacher_are_left_out() -> None:
    only = replace(ONE, data_source=OCR)
    training = trained_on(only, sources=(OCR, None))
    credit = training.algorithm.credit(rewards(training.tasks[0][0].samples, [0.0] * 8))
    assert credit[:4].eq(1).all() and credit[4:].isnan().all()
    gradient, stats = training.gradient(credit)
    everyone, _ = trained_on(ONE).gradient(credit)
    assert stats.pairs == 12 and relative(gradient, everyone) < 1e-4


def test_a_teacher_of_all_prompts_takes_those_that_no_other_does() -> None:
    teachers = [Teacher(lora="a", data_source=OCR), Teacher(lora="b"), Teacher(data_source="7")]

    def number(**metadata: Any) -> int | None:
        return teacher_of(teachers, Sample(Prompt(0, "a", metadata), 0, 0, 1))

    assert [number(data_source=OCR), number(data_source=COLOUR), number(), number(data_source=7)] == [0, 1, 1, 2]
    assert teacher_of(teachers[:1], Sample(Prompt(0, "a"), 0, 0, 1)) is None


def test_ranks_in_lockstep_run_every_teacher_on_all_rows() -> None:
    teachers = [replace(ONE, data_source=OCR), Teacher(lora="other", data_source=COLOUR)]
    training = trained_on(*teachers, sources=(OCR, None))
    credit = training.algorithm.credit(rewards(training.tasks[0][0].samples, [0.0] * 8))
    expected, _ = training.gradient(credit)

    divided = replace(training.config.model, shard="denoiser")
    c = replace(training.config, model=divided, cluster=ClusterConfig(ranks_per_worker=2))
    algorithm = build_algorithm(c)
    assert c.lockstep
    found, _ = training.gradient(credit, algorithm=algorithm)
    assert relative(found, expected) < 1e-4
    blank, stats = training.gradient(torch.ones(8, 4), algorithm=algorithm, pairs=12)  # rows without a teacher add 0
    assert relative(blank, expected) < 1e-4 and stats.pairs == 24


# --- teachers with another guidance, and pipelines of their own


def test_a_teacher_with_guidance_computes_what_a_guided_call_does() -> None:
    training = trained_on(Teacher(guidance=4.5), n=2)
    ((task, _, (tape,)),) = training.tasks
    call = {**tape.call, "guidance_scale": 4.5}
    with training.policy.base():
        _, guided = record(training.policy.pipe, call, kernel="ode", generators=[torch.Generator() for _ in range(4)])
        latents = {k: tape.steps[k].x for k in task.segments[0].trained}
        found: dict[int, Any] = {}
        keep = lambda k, s: found.update({k: s.model_output})  # noqa: E731
        replay(training.policy.pipe, guided, keep, steps=latents, latents=latents, grad=False)
    student, expected = outputs_of(training, None), 0.0
    for k, mine in student.items():
        rule = tape.steps[k].rule
        expected += float(((mine.mean - rule.mean(mine.x, found[k])) ** 2).mean() / (2 * rule.std**2)) / 3
    _, stats = training.gradient(chain_credit([1.0] * 4))
    assert stats.sums["loss"] / stats.pairs == pytest.approx(expected, rel=1e-4)
    plain, _ = trained_on(Teacher(), n=2).gradient(chain_credit([1.0] * 4))
    assert relative(training.gradient(chain_credit([1.0] * 4))[0], plain) > 0.1


def test_without_guidance_in_the_update_the_conditional_output_learns_the_guided_one() -> None:
    teacher = Teacher(guidance=4.5)
    training = trained_on(teacher, cfg="off", guidance=4.5, distance="velocity", n=2)
    _, stats = training.gradient(chain_credit([1.0] * 4))
    conditional, guided = outputs_of(training, None, cfg="off"), outputs_of(training, 0)
    apart = [float(((conditional[k].model_output - guided[k].model_output) ** 2).mean()) for k in guided]
    assert stats.sums["loss"] / stats.pairs == pytest.approx(sum(apart) / 3, rel=1e-4)


def test_another_pipeline_teaches_at_the_students_states() -> None:
    teacher = Teacher(path="other", guidance=3.0)
    training = trained_on(teacher, n=2)
    training.policy.teachers = [replace(training.policy.teachers[0], pipe=tiny.sd3(layers=1))]  # the student's base
    found, stats = training.gradient(chain_credit([1.0] * 4))
    expected, _ = trained_on(Teacher(guidance=3.0), n=2).gradient(chain_credit([1.0] * 4))
    assert relative(found, expected) < 1e-4 and stats.pairs == 12


def test_a_pipeline_with_other_noise_levels_or_latents_is_refused() -> None:
    training = trained_on(Teacher(path="other"), n=2)
    for change, said in (("shift", "noise level"), ("call", "latents of other")):
        pipe, teacher = tiny.sd3(layers=1), Teacher(path="other")
        if change == "shift":
            pipe.scheduler = tiny.euler(shift=5.0)
        else:
            teacher = replace(teacher, call={"height": 32})
        training.policy.teachers = [replace(training.policy.teachers[0], pipe=pipe, teacher=teacher)]
        with pytest.raises(ModelError, match=rf"algorithm\.teachers: .*{said}"):
            training.gradient(chain_credit([1.0] * 4))


# --- LoRAs that teach


def test_a_teacher_beside_the_student_changes_nothing_of_it() -> None:
    plain = new_policy()
    policy = taught_policy(ONE, Teacher(lora="second"), perturbed=True)
    assert policy.lora_file() == plain.lora_file() and list(policy.trained) == list(plain.trained)
    denoiser = policy.denoisers["transformer"]
    open_to_training = {id(p) for p in denoiser.parameters() if p.requires_grad}
    assert open_to_training == {id(p) for p in policy.trained.values()}
    x = {"prompt": ["a"], "height": 16, "width": 16, "num_inference_steps": 2, "max_sequence_length": 8}

    def drawn(of: Policy) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        latents = of.pipe(**x, guidance_scale=1.0, output_type="latent", generator=generator).images
        assert isinstance(latents, torch.Tensor)
        return latents

    own, base = drawn(policy), drawn(plain)
    assert torch.equal(own, base)
    with policy.teacher(0), torch.no_grad():
        taught = drawn(policy)
    with policy.teacher(1):
        assert not torch.equal(drawn(policy), taught)
    assert not torch.equal(taught, own) and torch.equal(drawn(policy), own)
    assert {id(p) for p in denoiser.parameters() if p.requires_grad} == open_to_training
    with policy.base(), lora_disabled(list(plain.denoisers.values())):
        assert torch.equal(drawn(policy), drawn(plain))


def test_a_teacher_of_several_ranks_is_the_sum_of_its_products() -> None:
    policy = new_policy()
    denoiser = policy.denoisers["transformer"]
    small, large = (layers_for(denoiser, 1, rank, name) for rank, name in ((2, "to_q"), (4, "proj_out")))
    weights = {name: denoiser.get_submodule(name).weight.clone() for name in (*small, *large)}
    policy.teachers = attach_teachers([ONE], {"one": {"transformer": small | large}}, policy.denoisers, "cpu")
    with adapter_active(policy.denoisers.values(), "teacher_0"):
        for name, halves in (small | large).items():
            layer = denoiser.get_submodule(name)
            x = torch.randn(3, layer.in_features)
            expected = x @ (weights[name] + halves.scale * halves.b @ halves.a).T + (
                0 if layer.bias is None else layer.bias
            )
            torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-4)


# --- why no policy gradient


def test_the_kl_as_the_advantage_of_a_policy_gradient_is_the_closed_form_and_noise() -> None:
    """Flow-OPD's reward_mode kl_only: -KL of the step, with its gradient, is the advantage, on policy, in one step."""
    torch.manual_seed(0)
    draws, std = 512, 0.3
    mean, target = torch.tensor([0.2, -0.5, 0.1], requires_grad=True), torch.tensor([1.0, 0.0, -1.0])
    x = mean.detach() + std * torch.randn(draws, 3)
    kl = ((mean - target) ** 2).mean() / (2 * std**2)
    log_prob = (-((x - mean) ** 2) / (2 * std**2)).mean(1)
    ratio = (log_prob - log_prob.detach()).exp()
    (exact,) = torch.autograd.grad(kl, mean, retain_graph=True)
    torch.testing.assert_close(exact, (mean - target).detach() / (3 * std**2))

    def gradients(advantage: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.autograd.grad(-advantage * r, mean, retain_graph=True)[0] for r in ratio])

    published, noise = gradients(-kl), gradients(-kl.detach())
    torch.testing.assert_close(published - noise, exact.expand(draws, 3), atol=1e-4, rtol=1e-4)
    error = noise.std(0) / draws**0.5
    assert (noise.mean(0).abs() < 4 * error).all() and float(noise.std()) > 1
    assert (exact.abs() > 4 * error).all()


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
    with training.policy.fake():
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

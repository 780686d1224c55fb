"""The base model as a judge: of held-out images, of sampled ones, and as a differentiable reward."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import training

from gerl.config import ScorerConfig
from gerl.config.blocks import RewardConfig
from gerl.data.sources import contrasted
from gerl.engine import Tape
from gerl.model.lora import lora_disabled
from gerl.model.policy import EMA
from gerl.protocol import Prompt, Sample
from gerl.run.validation import JUDGED
from gerl.workers.base_judge import BaseJudge, LatentReward, geometric_mean
from gerl.workers.rollout import FinishedCall

PROMPTS = contrasted([Prompt(i, text) for i, text in enumerate(["a red fox", "blue", "a sign 482", "x y"])])
SAMPLES = [Sample(prompt, 0, 10 + i, 0) for i, prompt in enumerate(PROMPTS)]


def judged(t: training.Training, samples: list[Sample] = SAMPLES, draws: int = 1) -> dict[str, np.ndarray]:
    return BaseJudge(t.rollout, draws)(t.rollout.validate(samples)[1])


@pytest.fixture(scope="module")
def trained() -> training.Training:
    return training.Training(training.config("awm", steps=6))


def test_noise_levels_count_alike_however_large_their_errors_are() -> None:
    errors = torch.tensor([[1.0, 4.0, 16.0], [2.0, 2.0, 2.0]])
    assert geometric_mean(errors).tolist() == pytest.approx([4.0, 2.0])


def test_the_lora_is_off_while_the_base_model_judges(trained: training.Training) -> None:
    judge = BaseJudge(trained.rollout, 1)
    calls = trained.rollout.validate(SAMPLES)[1]
    before = judge(calls)
    assert list(before) == list(JUDGED) and all(np.isfinite(v).all() and (v > 0).all() for v in before.values())
    kept = {name: p.detach().clone() for name, p in trained.policy.trained.items()}
    for p in trained.policy.trained.values():
        p.data.mul_(3.0)
    after = judge(calls)
    with lora_disabled(trained.policy.denoisers.values()):
        plain = judge(calls)
    for name, p in trained.policy.trained.items():
        p.data.copy_(kept[name])
    assert all(np.array_equal(before[n], after[n]) and np.array_equal(before[n], plain[n]) for n in JUDGED)


def test_an_image_is_judged_alike_in_any_micro_batch(trained: training.Training) -> None:
    whole, parts = judged(trained), [judged(trained, [sample]) for sample in SAMPLES]
    for name in JUDGED:
        assert whole[name] == pytest.approx(np.concatenate([part[name] for part in parts]), rel=1e-4)


def test_without_another_prompt_there_is_only_the_own_error(trained: training.Training) -> None:
    alone = [replace(sample, prompt=replace(sample.prompt, contrast="")) for sample in SAMPLES]
    found = judged(trained, alone)
    assert found["own_error"] == pytest.approx(judged(trained)["own_error"]) and np.isnan(found["other_error"]).all()


def test_other_draws_of_the_noise_differ(trained: training.Training) -> None:
    one, two = judged(trained), judged(trained, draws=2)
    assert not np.allclose(one["own_error"], two["own_error"], rtol=1e-6)


def test_a_pipeline_whose_images_cannot_be_judged_is_named_once(
    trained: training.Training, caplog: pytest.LogCaptureFixture
) -> None:
    calls = [replace(call, latents=None) for call in trained.rollout.validate(SAMPLES)[1]]
    judge = BaseJudge(trained.rollout, 1)
    for _ in range(2):
        assert all(np.isnan(values).all() for values in judge(calls).values())
    assert len([r for r in caplog.records if "cannot judge this pipeline's images" in r.message]) == 1
    with pytest.raises(Exception, match="base_alignment cannot score this pipeline's images: it denoises with copies"):
        judge.scores(judge(calls))


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("no such size"), MemoryError()])
def test_an_error_of_the_pipeline_ends_the_judgement_but_not_the_run(
    error: Exception, trained: training.Training, caplog: pytest.LogCaptureFixture
) -> None:
    def again(run: object, samples: object) -> torch.Tensor:
        raise error

    calls = [replace(call, again=again) for call in trained.rollout.validate(SAMPLES)[1]]
    assert all(np.isnan(values).all() for values in BaseJudge(trained.rollout, 1)(calls).values())
    assert "(guard.judge)" in caplog.text
    trained.rollout.lockstep = True  # other ranks would wait for this one
    with pytest.raises(type(error)):
        BaseJudge(trained.rollout, 1)(calls)
    trained.rollout.lockstep = False


def test_full_weights_are_judged_by_those_before_training() -> None:
    policy = training.new_policy(perturbed=False)
    t = training.Training(training.config("awm", steps=6), policy)
    weights = {name: p for name, p in policy.denoisers["transformer"].named_parameters() if "lora" not in name}
    policy.trained, policy.whole, policy.ema = weights, True, EMA(weights, 0.9)
    policy.reference = EMA(weights, 1.0)
    calls = t.rollout.validate(SAMPLES)[1]
    before = BaseJudge(t.rollout, 1)(calls)
    for p in weights.values():
        p.data.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    after = BaseJudge(t.rollout, 1)(calls)
    assert all(np.array_equal(before[name], after[name]) for name in JUDGED)


def test_the_scores_of_sampled_images_are_those_of_their_latents() -> None:
    config = training.config("flow_grpo", n=2, steps=6)
    scored = replace(config, reward=RewardConfig({"base_alignment": ScorerConfig()}))
    samples = [Sample(prompt, 0, 10 + i, 3) for i, prompt in enumerate(PROMPTS)]
    t = training.Training(scored)
    t.rollout.scores_latents = True
    task = t.algorithm.plan(samples)[0]
    _, trajectory = t.rollout.generate(task, t.algorithm)
    judge = BaseJudge.of(t.rollout, scored)
    calls = t.rollout.finished_calls(trajectory)
    assert torch.equal(calls[0].latents, trajectory.tapes[0].steps[-1].x_next)  # type: ignore[arg-type]
    errors = judge(calls, 3)
    scores = judge.scores(errors)
    expected = np.log((errors["other_error"] + 0.1) / (errors["own_error"] + 0.1))
    assert scores["base_alignment"] == pytest.approx(expected)
    assert scores["base_alignment/surprise"] == pytest.approx(np.log(errors["own_error"]))
    assert not np.allclose(scores["base_alignment"], judge.scores(judge(calls, 4))["base_alignment"], rtol=1e-5)


def test_the_differentiable_score_has_its_own_gradient(trained: training.Training) -> None:
    call: FinishedCall = trained.rollout.validate(SAMPLES)[1][0]
    tapes: list[Tape] = []

    def structure(arguments: dict[str, Any]) -> torch.Tensor:
        from gerl.engine.denoising_error import structure_of

        tapes.append(structure_of(trained.policy.pipe, arguments, call.steps))
        return torch.zeros(())

    call.again(structure, SAMPLES)
    reward = LatentReward(BaseJudge(trained.rollout, 1), ScorerConfig(weight=2.0, clip=[-9.0, 9.0]))
    assert call.latents is not None
    x = call.latents.float().clone().requires_grad_()
    totals = reward(tapes[0], x, PROMPTS)
    (gradient,) = torch.autograd.grad(totals.sum(), x)
    assert totals.shape == (4,) and gradient.abs().sum() > 0
    assert all(p.grad is None for p in trained.policy.trained.values())
    direction = gradient / gradient.norm()
    up, down = (float(reward(tapes[0], (x + h * direction).detach(), PROMPTS).sum()) for h in (0.02, -0.02))
    assert (up - down) / 0.04 == pytest.approx(float(gradient.norm()), rel=0.05)


def test_a_contrast_is_the_text_of_another_prompt() -> None:
    texts = ["a", "b", "a", "c", "a"]
    found = contrasted([Prompt(i, text) for i, text in enumerate(texts)])
    assert all(p.contrast and p.contrast != p.text for p in found) and [p.text for p in found] == texts
    assert [p.contrast for p in contrasted([Prompt(0, "a"), Prompt(1, "a")])] == ["", ""]
    assert contrasted([]) == []

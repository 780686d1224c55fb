"""Training on images of files against naive twins that encode, noise and call the denoiser by themselves."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from training import Training, chain_credit, config, new_policy, relative

from gerl.algorithms import Algorithm, Rewards
from gerl.algorithms.base import pooled_sum
from gerl.algorithms.forward_process import regularising
from gerl.algorithms.planning import plan_samples
from gerl.config import DataConfig
from gerl.model.lora import lora_disabled
from gerl.protocol import DatasetImage, Prompt
from gerl.trainer.update import actor_metrics, dataset_credit
from gerl.utils.seeding import derive_seed, sample_generators

KEYS: dict[str, dict[str, Any]] = {
    "sft": {},
    "diffusion_dpo": {"beta": 40.0, "reference": "base"},
    "kto": {"beta": 30.0, "weight_liked": 0.7, "weight_disliked": 1.6},
}
TEXTS, SCORES = ("a red fox", "blue"), ((1.0, 0.0), (0.0, 1.0))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    folder, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    found = []
    for i, text in enumerate(TEXTS):
        paths = [folder / f"{i}_{k}.png" for k in range(2)]
        for path in paths:
            Image.fromarray(generator.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(path)
        images = tuple(DatasetImage(str(path), score) for path, score in zip(paths, SCORES[i], strict=True))
        found.append(Prompt(i, text, dataset_images=images))
    return found


def trained(name: str, prompts: list[Prompt], **keys: Any) -> Training:
    c = config(name, n=2, sampling_kernel="ode", **KEYS[name], **keys)
    return Training(c, new_policy(), plan_samples(c, prompts, 1, 0))


def credit_of(training: Training) -> torch.Tensor:
    samples = [sample for task, _, _ in training.tasks for sample in task.samples]
    totals = torch.tensor([s.dataset_image.score for s in samples if s.dataset_image is not None])
    return training.algorithm.credit(Rewards(samples, totals, torch.empty(len(samples), 0), torch.empty(0)))


class Twin:
    """Errors `[4, levels]` of the four images by diffusers alone, in the way of a usual training script."""

    def __init__(self, training: Training, prompts: list[Prompt], shared: bool) -> None:
        self.pipe = pipe = training.policy.pipe
        pixels = [np.asarray(Image.open(image.path)) for prompt in prompts for image in prompt.dataset_images]
        x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.no_grad():
            said = pipe.vae.encode(x).latent_dist
            texts = [prompt.text for prompt in prompts for _ in prompt.dataset_images]
            self.text, _, self.pooled, _ = pipe.encode_prompt(texts, texts, texts, max_sequence_length=8,
                                                              do_classifier_free_guidance=False)  # fmt: skip
        # the posterior's sample is the only thing that is taken over: which one is drawn is gerl's choice
        config = pipe.vae.config
        self.x0 = torch.cat([tape.steps[-1].x_next for _, _, tapes in training.tasks for tape in tapes])
        noise = (self.x0 / config.scaling_factor + config.shift_factor - said.mean) / said.std
        assert 0.8 < float(noise.std()) < 1.2
        pipe.scheduler.set_timesteps(4)
        pipe.transformer.eval()
        self.sigmas, self.timesteps = pipe.scheduler.sigmas[:3], pipe.scheduler.timesteps[:3]  # all but the last
        samples = [sample for task, _, _ in training.tasks for sample in task.samples]
        self.seeds = [(0, s.step, repr(s.group)) if shared else (s.seed,) for s in samples]

    def errors(self) -> torch.Tensor:
        columns = []
        for k, (sigma, timestep) in enumerate(zip(self.sigmas, self.timesteps, strict=True)):
            noise = torch.stack([self.drawn(derive_seed("forward", *seed, k)) for seed in self.seeds])
            x = (1 - sigma) * self.x0 + sigma * noise
            v = self.pipe.transformer(x, self.text, self.pooled, timestep.expand(len(x)), return_dict=False)[0]
            columns.append(F.mse_loss(v, noise - self.x0, reduction="none").flatten(1).mean(1))
        return torch.stack(columns, 1)

    def drawn(self, seed: int) -> torch.Tensor:
        return torch.randn(self.x0.shape[1:], generator=sample_generators([seed])[0])


def sft(model: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    del base
    return model[[0, 3]].mean()  # the winners


def dpo(model: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """SalesforceAIResearch/DiffusionDPO train.py:1125-1145."""
    losses = []
    for winner, loser in ((0, 1), (3, 2)):
        model_diff, ref_diff = model[winner] - model[loser], base[winner] - base[loser]
        losses.append(-F.logsigmoid(-0.5 * 40.0 * (model_diff - ref_diff)))
    return torch.stack(losses).mean() / 2  # gerl averages over images, of which a pair has two


def kto(model: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """jacklishufan/diffusion-kto train_kto_sd_v1.5.py:1451-1509."""
    g = base - model
    kl = g.detach().mean().clamp(min=0)
    y = torch.tensor([1.0, -1.0, -1.0, 1.0])[:, None]
    h = torch.sigmoid(y * 30.0 * (g - kl))
    return (torch.where(y > 0, 0.7, 1.6) * (1 - h)).mean()


TWINS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"sft": sft, "diffusion_dpo": dpo, "kto": kto}


@pytest.mark.parametrize("name", TWINS)
def test_losses_and_gradients_are_those_of_a_naive_script(name: str, prompts: list[Prompt]) -> None:
    training = trained(name, prompts)
    gradient, stats = training.gradient(credit_of(training))
    twin = Twin(training, prompts, shared=name == "diffusion_dpo")
    with torch.no_grad(), lora_disabled([training.policy.pipe.transformer]):
        base = twin.errors()
    loss = TWINS[name](twin.errors(), base)
    expected = torch.autograd.grad(loss, list(training.policy.trained.values()))
    assert stats.pairs == (6 if name == "sft" else 12)  # losers are no examples
    assert stats.sums["loss"] / stats.pairs == pytest.approx(float(loss.detach()), rel=1e-4)
    assert relative(gradient, torch.cat([g.flatten() for g in expected])) < 1e-4


@pytest.mark.parametrize("micro", [(4, 1), (2, 2), (1, 1)])
def test_the_gradient_is_the_same_in_any_micro_batches(micro: tuple[int, int], prompts: list[Prompt]) -> None:
    whole = trained("kto", prompts)
    expected, _ = whole.gradient(credit_of(whole))
    parts = trained("kto", prompts, micro=micro[0], actor_micro=micro[1])
    found, _ = parts.gradient(credit_of(parts))
    assert expected.norm() > 0 and relative(found, expected) < 1e-4
    # two workers
    sizes, tasks = [len(task.samples) for task, _, _ in parts.tasks], parts.tasks
    credit, total, pooled = credit_of(parts), torch.zeros_like(found), []
    for training_tasks, part in zip(tasks, credit.split(sizes), strict=True):
        parts.tasks = [training_tasks]
        pooled.append(parts.pooled(part))
    for training_tasks, part in zip(tasks, credit.split(sizes), strict=True):
        parts.tasks = [training_tasks]
        total += parts.gradient(part, 12, pooled=pooled_sum(pooled))[0]
    assert relative(total, expected) < 1e-4


@pytest.mark.parametrize("cfg", ["off", "joint"])
def test_guidance_in_the_update_is_that_of_the_key(cfg: str, prompts: list[Prompt]) -> None:
    guided, plain = (trained("sft", prompts, cfg=cfg, guidance=scale) for scale in (4.0, 1.0))
    found, expected = (training.gradient(credit_of(training))[0] for training in (guided, plain))
    distance = relative(found, expected)
    assert distance < 1e-4 if cfg == "off" else distance > 0.1


def test_images_are_handed_on_as_they_are_encoded(prompts: list[Prompt]) -> None:
    ((task, pixels, _),) = trained("sft", prompts).tasks
    paths = [sample.dataset_image.path for sample in task.samples if sample.dataset_image is not None]
    assert np.array_equal(pixels, np.stack([np.asarray(Image.open(path)) for path in paths]))


def test_images_beside_reinforcement_learning_add_their_own_mean(prompts: list[Prompt]) -> None:
    made = config("flow_grpo", n=2, data_coef=0.4)
    c = replace(made, data=DataConfig(regularise="images.jsonl"))
    images = [Prompt(-1 - i, p.text, dataset_images=p.dataset_images[:1]) for i, p in enumerate(prompts)]
    training, given = Training(c), plan_samples(c, images, 1, 0)
    (task,) = Algorithm.plan(training.algorithm, given, first_id=50)
    _, trajectory = training.rollout.generate(task, training.algorithm)
    credit = chain_credit([1.0, -1.0, 0.5, -0.5])
    alone, stats = training.gradient(credit)
    added = dataset_credit([task], stats.pairs, credit, c)[50]
    training.tasks.append((task, np.zeros(0), trajectory.tapes))
    both, together = training.gradient(torch.cat([credit, added]), stats.pairs)
    imitation = Training(regularising(c), samples=given)
    expected, known = imitation.gradient(torch.ones(2, 4))
    assert expected.norm() > 0 and relative(both, alone + 0.4 * expected) < 1e-5
    assert together.pairs == stats.pairs and together.sums["loss"] == pytest.approx(stats.sums["loss"])
    assert together.sums["data_error"] == pytest.approx(known.sums["squared_error"])
    metrics = actor_metrics(together, None, None)
    assert metrics["actor/data_error"] == pytest.approx(known.sums["loss"] / 6) and "actor/data_pairs" not in metrics

"""Flow-GRPO (arXiv 2505.05470) on one page: a text-to-image pipeline learns to write, judged by an OCR.

    python examples/flow_grpo_in_150_lines.py

The whole algorithm with gerl's engine and plain PyTorch; trainer, Ray and configuration are left out. Each iteration
samples groups of images with an SDE (`gerl.record`), scores them, compares each image with its group, and runs the same
denoising steps again with gradients (`gerl.replay`). Another pipeline of diffusers needs another MODEL and CALL, a
larger one also a GPU; another reward another `score_images`.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig
from PIL import Image

import gerl
from gerl.engine import ReplayedStep, Tape
from reward_models.scorers.ocr import OcrScorer

MODEL = gerl.SIGNS  # the small Stable Diffusion 3 that comes with gerl
PROMPTS = Path(gerl.__file__).parent / "assets" / "prompts"
CALL = {"height": 32, "width": 96, "num_inference_steps": 10, "guidance_scale": 1.0, "max_sequence_length": 1}
NOISE_LEVEL = 0.7  # of the SDE
TRAINED = range(CALL["num_inference_steps"] - 1)  # type: ignore[operator]  # all denoising steps but the last
PROMPTS_PER_STEP, GROUP_SIZE = 8, 12
UPDATES_PER_STEP = 2  # optimizer steps on the images of an iteration; in the second the ratio is no longer 1
CLIP = 1e-4  # of the ratio of probabilities, on either side of 1
LEARNING_RATE, MAX_GRAD_NORM = 1e-3, 1.0
HELD_OUT = 24  # prompts

ocr = OcrScorer()


def score_images(images: Sequence[Image.Image], prompts: Sequence[str]) -> torch.Tensor:
    """Return the reward of each image, `[B]`: the similarity of the text on it to the text asked for, from 0 to 1."""
    return torch.tensor(ocr(list(images), list(prompts), [{} for _ in images])["ocr"])


def read_prompts(name: str) -> list[str]:
    return (PROMPTS / name).read_text(encoding="utf-8").splitlines()


def load_pipeline() -> tuple[DiffusionPipeline, list[torch.nn.Parameter]]:
    """Load the pipeline and add a LoRA to its denoiser; returns it with the parameters of the LoRA."""
    pipe = DiffusionPipeline.from_pretrained(MODEL)
    pipe.set_progress_bar_config(disable=True)
    pipe.transformer.requires_grad_(False)
    pipe.transformer.add_adapter(LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    return pipe, [p for p in pipe.transformer.parameters() if p.requires_grad]


def sample_group(pipe: DiffusionPipeline, prompt: str, seed: int) -> tuple[Tape, torch.Tensor]:
    """Sample the images of a prompt; returns their tape, and their rewards `[B]`.

    They start from the same noise and differ by the noise of the denoising steps, which is what is trained.
    """
    generators = [torch.Generator().manual_seed(seed * GROUP_SIZE + i) for i in range(GROUP_SIZE)]
    initial = [torch.Generator().manual_seed(seed) for _ in range(GROUP_SIZE)]
    call = CALL | {"prompt": [prompt] * GROUP_SIZE}
    output, tape = gerl.record(
        pipe, call, noise_level=NOISE_LEVEL, window=TRAINED, generators=generators, init_generators=initial
    )
    return tape, score_images(output.images, [prompt] * GROUP_SIZE)


def advantages_of(groups: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return by how much each reward is above the mean of its group, in standard deviations of all rewards."""
    deviation = torch.cat(groups).std() + 1e-4
    return [(rewards - rewards.mean()) / deviation for rewards in groups]


def add_gradient(pipe: DiffusionPipeline, tape: Tape, advantages: torch.Tensor) -> None:
    """Add the gradient of a group's clipped objective over all trained denoising steps."""

    def loss_of_step(k: int, step: ReplayedStep) -> torch.Tensor:
        ratio = (step.log_prob - step.recorded_log_prob).exp()  # 1 until the first optimizer step
        objective = torch.min(advantages * ratio, advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
        # a step counts by its noise; without this the steps with the least of it would decide
        weight = step.std**2 / abs(step.sigma_next - step.sigma)
        return -weight * objective.mean()

    if bool(advantages.any()):  # equal rewards teach nothing
        gerl.replay(pipe, tape, loss_of_step)


def train_step(
    pipe: DiffusionPipeline, optimizer: torch.optim.Optimizer, prompts: Sequence[str], first_seed: int
) -> float:
    """Sample a group for each prompt and take the optimizer steps; returns the mean reward."""
    groups = [sample_group(pipe, prompt, first_seed + i) for i, prompt in enumerate(prompts)]
    advantages = advantages_of([rewards for _, rewards in groups])
    size = len(groups) // UPDATES_PER_STEP
    for start in range(0, len(groups), size):
        for (tape, _), of_group in zip(groups[start : start + size], advantages[start : start + size], strict=True):
            add_gradient(pipe, tape, of_group)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return float(torch.cat([rewards for _, rewards in groups]).mean())


def evaluate(pipe: DiffusionPipeline, prompts: Sequence[str]) -> float:
    """Return the mean reward of images sampled without noise in the denoising steps, from fixed initial noise."""
    generators = [torch.Generator().manual_seed(10**9 + i) for i in range(len(prompts))]
    with torch.no_grad():
        images = pipe(prompt=list(prompts), generator=generators, **CALL).images
    return float(score_images(images, prompts).mean())


def train(steps: int, seed: int, out: Path) -> tuple[float, float]:
    """Train for so many steps and write the LoRA; returns the mean held-out reward before and after."""
    torch.manual_seed(seed)
    pipe, parameters = load_pipeline()
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=1e-4)
    chosen, held_out = random.Random(seed), read_prompts("signs_val.txt")[:HELD_OUT]
    training = read_prompts("signs_train.txt")
    before = evaluate(pipe, held_out)
    for step in range(1, steps + 1):
        prompts = chosen.sample(training, PROMPTS_PER_STEP)
        reward = train_step(pipe, optimizer, prompts, first_seed=(seed * 10**4 + step) * PROMPTS_PER_STEP)
        print(f"step {step}: mean reward {reward:.3f}")
    pipe.save_lora_weights(out, transformer_lora_layers=lora_weights(pipe))
    return before, evaluate(pipe, held_out)


def lora_weights(pipe: DiffusionPipeline) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(pipe.transformer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs/flow_grpo_in_150_lines"))
    args = parser.parse_args()
    before, after = train(args.steps, args.seed, args.out)
    print(f"reward on {HELD_OUT} held-out prompts: {before:.3f} before, {after:.3f} after; the LoRA is in {args.out}")

"""Train the shapes pipeline from scratch: a small Stable Diffusion 1.5 that draws coloured shapes in a row.

    python benchmarks/shapes_model.py FOLDER

A second model for benchmarks, unlike the signs pipeline: a U-Net that predicts noise, with the noise schedule of Stable
Diffusion 1.5 and a `DDIMScheduler`. The script renders its own images with Pillow, trains an `AutoencoderKL`, then a
`UNet2DConditionModel` together with a tiny CLIP text encoder, and saves a stock `StableDiffusionPipeline` in FOLDER.
Checkpoints are in FOLDER/work, and an interrupted run continues from them. The prompts of shapes_val.txt are not
trained on. Training stops early, so that reinforcement learning has something to improve.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers as hf
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image, ImageDraw
from shapes_scorer import COLOURS, GROUND, KINDS, NUMBERS, Thing, draw_shape, matches, things_asked
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel

from examples.train_signs import save, to_tensor, training
from gerl.algorithms.planning import VALIDATION_SEED
from gerl.utils.pages import grid
from gerl.utils.seeding import derive_seed, sample_generators

log = logging.getLogger("shapes")

HERE = Path(__file__).resolve().parent
SIZE, SCALE, PROMPT_LENGTH = 48, 4, 14  # pixels, render oversampling, tokens of a prompt
THINGS = [(colour, kind) for colour in COLOURS for kind in KINDS]
SEED, BATCH, VAE_BATCH = 0, 32, 16
SCHEDULE = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")  # of Stable Diffusion 1.5


def render(things: Sequence[Thing], rng: np.random.Generator) -> Image.Image:
    """Draw the things from left to right, each a little off its place, size and colour; [SIZE, SIZE] RGB."""
    image = Image.new("RGB", (SIZE * SCALE, SIZE * SCALE), GROUND)
    draw = ImageDraw.Draw(image)
    for i, (colour, kind) in enumerate(things):
        radius = rng.uniform(5.5, 6.7)
        x = SIZE * (i + 0.5) / len(things) + rng.uniform(-0.8, 0.8) * (1 if len(things) == 3 else 3)
        y = rng.uniform(10, SIZE - 10)
        box = tuple(SCALE * side for side in (x - radius, y - radius, x + radius, y + radius))
        draw_shape(draw, kind, box, tuple(int(c) for c in np.clip(rng.normal(COLOURS[colour], 4), 0, 255)))
    return image.resize((SIZE, SIZE), Image.Resampling.BOX)


def prompt_of(things: Sequence[Thing]) -> str:
    """The caption of things that are drawn in this order; equal ones that stand together are counted."""
    words = {number: word for word, number in NUMBERS.items()}
    counts = [(thing, len(list(equal))) for thing, equal in groupby(things)]
    parts = [f"{words[n]} {colour} {kind}{'s' if n > 1 else ''}" for (colour, kind), n in counts]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def random_things(rng: np.random.Generator) -> list[Thing]:
    """One to three things; equal ones stand together and are more frequent than by chance."""
    count, things = int(rng.choice([1, 2, 3], p=[0.2, 0.4, 0.4])), []
    while len(things) < count:
        thing = THINGS[rng.integers(len(THINGS))]
        things += [thing] * (1 if rng.random() < 0.7 else int(rng.integers(1, count - len(things) + 1)))
    return sorted(things, key=things.index)


def write_prompts(args: argparse.Namespace) -> None:
    """Write shapes_train.txt, 300 prompts, and shapes_val.txt, 96: no two ask for the same things."""
    rng, prompts = np.random.default_rng([SEED, 0]), dict[frozenset, str]()
    while len(prompts) < 396:
        prompt = prompt_of(random_things(rng))
        prompts.setdefault(frozenset(things_asked(prompt).items()), prompt)
    lines = [str(line) for line in rng.permutation(list(prompts.values()))]
    for name, chosen in (("shapes_val.txt", lines[:96]), ("shapes_train.txt", lines[96:])):
        (HERE / name).write_text("\n".join(chosen) + "\n")


def write_examples(args: argparse.Namespace) -> None:
    """Write examples.jsonl and 600 rendered images, as in pretraining, for `algorithm=sft`."""
    rng, rows = np.random.default_rng([SEED, 1]), []
    (args.folder / "examples").mkdir(exist_ok=True)
    for i, things in enumerate(scenes(rng, 600)):
        render(things, rng).save(args.folder / "examples" / f"{i}.png")
        rows.append(json.dumps({"prompt": prompt_of(things), "image": f"examples/{i}.png"}))
    (args.folder / "examples.jsonl").write_text("\n".join(rows) + "\n")


def held_out() -> list[str]:
    """The prompts of shapes_val.txt."""
    return (HERE / "shapes_val.txt").read_text().splitlines()


def scenes(rng: np.random.Generator, count: int) -> list[list[Thing]]:
    """Things for `count` images, without what the validation prompts ask for."""
    unseen, chosen = [things_asked(prompt) for prompt in held_out()], []
    while len(chosen) < count:
        things = random_things(rng)
        if things_asked(prompt_of(things)) not in unseen:
            chosen.append(things)
    return chosen


def build_vae() -> AutoencoderKL:
    """A VAE that shrinks both sides four times to 4 latent channels."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 32), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=SIZE,
        mid_block_add_attention=False,
    )  # fmt: skip


def build_tokenizer() -> hf.PreTrainedTokenizerFast:
    """A tokenizer of the words that prompts are made of, whatever their case."""
    kinds = [kind + end for kind in KINDS for end in ("", "s")]
    vocab = ["<|startoftext|>", "<|endoftext|>", "<|unknown|>", ",", "and", *NUMBERS, *COLOURS, *kinds]
    ids = {word: i for i, word in enumerate(vocab)}
    backend = Tokenizer(WordLevel(ids, unk_token=vocab[2]))
    backend.normalizer = normalizers.Sequence([normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{vocab[0]} $A {vocab[1]}", special_tokens=[(word, ids[word]) for word in vocab[:2]]
    )
    special = dict(bos_token=vocab[0], eos_token=vocab[1], pad_token=vocab[1], unk_token=vocab[2])
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=PROMPT_LENGTH, **special)


class Denoiser(torch.nn.Module):
    """The trained half of the pipeline: text encoder and U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = hf.CLIPTextModel(
            hf.CLIPTextConfig(
                vocab_size=len(build_tokenizer()), hidden_size=48, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=2, max_position_embeddings=PROMPT_LENGTH,
                bos_token_id=0, eos_token_id=1, pad_token_id=1,
            )
        )  # fmt: skip
        self.unet = UNet2DConditionModel(
            sample_size=SIZE // 4, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=48,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), mid_block_type=None,
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=2, norm_num_groups=8,
        )  # fmt: skip

    def forward(self, noisy: torch.Tensor, timestep: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The noise in `noisy` [B, 4, h, w] at `timestep` [B], for the prompts' `ids` [B, PROMPT_LENGTH]."""
        return self.unet(noisy, timestep, self.text_encoder(ids).last_hidden_state, return_dict=False)[0]


def train_vae(args: argparse.Namespace) -> None:
    """Train the autoencoder on freshly rendered images with L1 and L2 losses and a weak KL term."""
    torch.manual_seed(SEED)
    vae, losses = build_vae(), []
    for step in training(vae, args, args.work / "vae.pt", args.vae_steps, args.vae_lr, decay=True):
        rng = np.random.default_rng([SEED, 1, step])
        pixels = to_tensor([render(random_things(rng), rng) for _ in range(VAE_BATCH)])
        latent = vae.encode(pixels).latent_dist
        noise = torch.randn(latent.mean.shape, generator=torch.Generator().manual_seed(SEED + step))
        difference = vae.decode(latent.mean + latent.std * noise).sample - pixels
        error = difference.abs().mean()
        (error + difference.square().mean() + 1e-3 * latent.kl().mean() / latent.mean[0].numel()).backward()
        losses.append(error.item())
        if (step + 1) % 100 == 0:
            log.info("vae: step %d, L1 %.4f", step + 1, np.mean(losses[-100:]))


@torch.no_grad()
def trained_vae(args: argparse.Namespace) -> AutoencoderKL:
    """The trained autoencoder; its scaling makes latents of mean square 1."""
    vae = build_vae()
    vae.load_state_dict(torch.load(args.work / "vae.pt", weights_only=True)["average"])
    vae.eval().requires_grad_(False)
    rng = np.random.default_rng([SEED, 2])
    latent = vae.encode(to_tensor([render(random_things(rng), rng) for _ in range(256)])).latent_dist.mean
    vae.register_to_config(scaling_factor=1 / latent.square().mean().sqrt().item())
    return vae


@torch.no_grad()
def cached_latents(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents [N, 4, h, w] of random images and their prompts' ids [N, PROMPT_LENGTH], kept in the work folder."""
    path = args.work / "latents.pt"
    if not path.exists():
        vae, latents, prompts = trained_vae(args), [], []
        for start in range(0, args.images, 256):
            rng = np.random.default_rng([SEED, 3, start])
            chosen = scenes(rng, min(256, args.images - start))
            latent = vae.encode(to_tensor([render(things, rng) for things in chosen])).latent_dist.mean
            latents.append(latent * vae.config.scaling_factor)
            prompts += [prompt_of(things) for things in chosen]
        ids = build_tokenizer()(prompts, padding="max_length", return_tensors="pt").input_ids
        save(path, {"latents": torch.cat(latents), "ids": ids})
    state = torch.load(path, weights_only=True)
    return state["latents"], state["ids"]


def train_denoiser(args: argparse.Namespace) -> None:
    """Train U-Net and text encoder to predict the noise; 10 % of the prompts are empty."""
    latents, ids = cached_latents(args)
    empty = build_tokenizer()("", padding="max_length", return_tensors="pt").input_ids[0]
    schedule, losses = DDIMScheduler(**SCHEDULE), []
    torch.manual_seed(SEED)
    model = Denoiser()
    for step in training(model, args, args.work / "denoiser.pt", args.steps, args.lr, decay=False):
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
        rows = torch.randint(len(latents), (BATCH,), generator=generator)
        noise = torch.randn(BATCH, *latents.shape[1:], generator=generator)
        timestep = torch.randint(schedule.config.num_train_timesteps, (BATCH,), generator=generator)
        dropped = torch.rand(BATCH, 1, generator=generator) < 0.1
        noisy = schedule.add_noise(latents[rows], noise, timestep)
        loss = F.mse_loss(model(noisy, timestep, torch.where(dropped, empty, ids[rows])), noise)
        loss.backward()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            log.info("denoiser: step %d, loss %.4f", step + 1, np.mean(losses[-100:]))


def export(args: argparse.Namespace) -> None:
    """Save the pipeline with the averaged weights; VAE and U-Net in fp16, which diffusers loads as fp32."""
    model = Denoiser()
    model.load_state_dict(torch.load(args.work / "denoiser.pt", weights_only=True)["average"])
    scheduler = DDIMScheduler(**SCHEDULE, clip_sample=False, timestep_spacing="trailing")
    pipe = StableDiffusionPipeline(
        vae=trained_vae(args), text_encoder=model.text_encoder, tokenizer=build_tokenizer(), unet=model.unet,
        scheduler=scheduler, safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipe.vae.half()
    pipe.unet.half()
    pipe.save_pretrained(args.folder)
    sizes = {n: sum(p.numel() for p in m.parameters()) for n, m in pipe.components.items() if hasattr(m, "parameters")}
    log.info("saved %s, parameters: %s", args.folder, json.dumps(sizes))


@torch.no_grad()
def evaluate(args: argparse.Namespace) -> None:
    """Sample the held-out prompts with the saved pipeline and score them; the images go to the work folder."""
    pipe = StableDiffusionPipeline.from_pretrained(args.folder)
    pipe.set_progress_bar_config(disable=True)
    prompts = held_out()
    # the noise of the trainer's own validation: this score is where reinforcement learning starts
    generators = sample_generators([derive_seed("validation", VALIDATION_SEED, i) for i in range(len(prompts))])
    size = dict(height=SIZE, width=SIZE, num_inference_steps=12, guidance_scale=1.0)
    images = pipe(prompts, **size, generator=generators).images
    means = {name: np.mean(values) for name, values in matches(images, prompts, [{}] * len(prompts)).items()}
    log.info("held-out prompts: %s", ", ".join(f"{name} {mean:.3f}" for name, mean in means.items()))
    grid([np.asarray(image) for image in images], prompts, min_width=144).save(args.work / "held_out.png")


STAGES = dict(
    prompts=write_prompts,
    examples=write_examples,
    vae=train_vae,
    denoiser=train_denoiser,
    export=export,
    evaluate=evaluate,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen stages in the order given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the pipeline is saved")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES)[2:])
    numbers: dict[str, int | float] = {
        "images": 16_384, "vae-steps": 1200, "vae-lr": 2e-3, "steps": 1500, "lr": 2e-3, "save-every": 250, "ema": 0.995,
    }  # fmt: skip
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args(arguments)
    args.work = args.folder / "work"
    args.work.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    for name in args.stages:
        STAGES[name](args)


if __name__ == "__main__":
    main()

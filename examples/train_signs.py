"""Train the signs pipeline from scratch: a small Stable Diffusion 3 that writes short texts on coloured boards.

The script renders its own images with Pillow, trains an ``AutoencoderKL``, then an ``SD3Transformer2DModel`` together
with two tiny character-level CLIP text encoders, saves a stock ``StableDiffusion3Pipeline``, and scores held-out
prompts with gerl's OCR reward. Stages can be run one by one (``--stages evaluate``) and resume from the work folder: a
run interrupted and started again equals one that was not (with as many threads), as a step's data follows from the
seed and the step alone. A whole run: ``python examples/train_signs.py``.
"""

import argparse
import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers as hf
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from PIL import Image, ImageDraw, ImageFont
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, processors
from tokenizers.models import WordLevel
from torch.nn.attention import SDPBackend, sdpa_kernel

from gerl.algorithms.planning import VALIDATION_SEED
from gerl.utils.pages import grid
from gerl.utils.seeding import derive_seed, sample_generators
from reward_models.scorers.ocr import OcrScorer

log = logging.getLogger("train_signs")

ASSETS = Path(__file__).resolve().parent.parent / "gerl" / "assets"
WIDTH, HEIGHT, SCALE, PROMPT_LENGTH = 96, 32, 4, 16  # pixels, pixels, render oversampling, tokens of a prompt
DARK, LIGHT, WALL = (24, 24, 28), (250, 250, 248), (150, 155, 160)
COLOURS = {  # name: (board, lettering)
    "red": ((200, 30, 40), LIGHT), "green": ((20, 130, 60), LIGHT), "blue": ((30, 70, 190), LIGHT),
    "orange": ((225, 105, 20), LIGHT), "purple": ((120, 40, 150), LIGHT), "black": ((28, 28, 34), LIGHT),
    "yellow": ((245, 205, 40), DARK), "white": ((240, 240, 240), DARK),
}  # fmt: skip
LETTERS, DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"


def texts_of(folder: Path, *names: str) -> dict[str, str]:
    """The texts asked for in the prompt files ``names``, and their prompts."""
    lines = [line for name in names for line in (folder / name).read_text().splitlines()]
    return {line.split('"')[1]: line for line in lines}


SHIPPED = texts_of(ASSETS / "prompts", "signs_train.txt", "signs_val.txt")
WORDS = sorted([text for text in SHIPPED if not text.isdigit()], key=lambda word: (len(word), word))


def render_sign(text: str, colour: str, rng: np.random.Generator, worn: float = 0.0) -> Image.Image:
    """Draw ``text`` on a board of the named colour, a little off centre and off colour; [HEIGHT, WIDTH] RGB.

    ``worn``: a character is left out with a chance drawn for each sign, uniform between 0 and twice this.
    """
    board, ink = (tuple(int(c) for c in np.clip(rng.normal(rgb, 4), 0, 255)) for rgb in COLOURS[colour])
    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), WALL)
    draw = ImageDraw.Draw(image)
    corners = (SCALE, SCALE, (WIDTH - 1) * SCALE - 1, (HEIGHT - 1) * SCALE - 1)
    draw.rounded_rectangle(corners, radius=4 * SCALE, fill=board)
    size, advance = 20 * SCALE * rng.uniform(0.97, 1.03), 14.5 * SCALE
    left = WIDTH * SCALE / 2 - advance * (len(text) - 1) / 2 + rng.uniform(-0.7, 0.7) * SCALE
    base = HEIGHT * SCALE / 2 + 0.36 * size + rng.uniform(-0.7, 0.7) * SCALE
    font = ImageFont.load_default(size)
    lost = rng.random(len(text)) < rng.uniform(0, 2 * worn) if worn else np.zeros(len(text), bool)
    for i, character in enumerate(text):
        if not lost[i]:
            place = (left + i * advance, base)
            draw.text(place, character, font=font, fill=ink, anchor="ms", stroke_width=0.5 * SCALE, stroke_fill=ink)
    return image.resize((WIDTH, HEIGHT), Image.Resampling.BOX)


def prompt_of(text: str, colour: str | None) -> str:
    """The caption of a sign; ``None`` leaves the colour of the board open."""
    board = f"{'an' if colour[0] in 'aeiou' else 'a'} {colour}" if colour else "a"
    return f'{board} sign that reads "{text}"'


def write_prompts(args: argparse.Namespace) -> None:
    """Write ``signs_train.txt`` and ``signs_val.txt``: the shipped words and numbers, no text in both files."""
    rng = np.random.default_rng([args.seed, 0])
    words = list(rng.permutation(sorted(WORDS)))
    numbers = sorted({int(n) for digits in (2, 3, 4, 5, 6) for n in rng.integers(10 ** (digits - 1), 10**digits, 100)})
    numbers = [str(n) for n in rng.permutation(numbers)]
    unseen, chosen = numbers[:64] + words[:64], numbers[64:] + words[64:]
    args.prompts.mkdir(parents=True, exist_ok=True)
    for name, texts in (("signs_val.txt", unseen), ("signs_train.txt", list(rng.permutation(chosen)))):
        lines = [prompt_of(text, str(rng.choice(list(COLOURS)))) for text in texts]
        (args.prompts / name).write_text("\n".join(lines) + "\n")


def random_sign(rng: np.random.Generator, unseen: dict[str, str]) -> tuple[str, str]:
    """A random text (number, word or letters) that is not held out, and a colour."""
    while True:
        kind = rng.random()
        length = rng.choice([1, 2, 3, 4, 5, 6], p=[0.05, 0.1, 0.15, 0.2, 0.25, 0.25])
        if kind < 0.25:
            text = str(rng.choice(WORDS))
        else:
            text = "".join(rng.choice(list(DIGITS if kind < 0.6 else LETTERS), length))
        if text not in unseen:
            return text, str(rng.choice(list(COLOURS)))


def to_tensor(images: list[Image.Image]) -> torch.Tensor:
    """Images to [B, 3, HEIGHT, WIDTH] in [-1, 1]."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1


def build_vae() -> AutoencoderKL:
    """A VAE that shrinks both sides four times to 4 latent channels."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64), layers_per_block=1, latent_channels=4, norm_num_groups=8, sample_size=WIDTH,
        use_quant_conv=False, use_post_quant_conv=False, force_upcast=False, shift_factor=0.0,
    )  # fmt: skip


def build_tokenizer() -> hf.PreTrainedTokenizerFast:
    """A CLIP tokenizer without merges: texts are spelt, the lower-case words of the template are one token each.

    Typographic double quotes are straight ones to it, as they were to CLIP itself, whose texts went through ftfy.
    """
    characters = LETTERS.lower() + DIGITS + "\"'.,:;!?-+#&/"
    vocab = ["<|startoftext|>", "<|endoftext|>", *characters, *(c + "</w>" for c in characters)]
    tokenizer = hf.CLIPTokenizer({t: i for i, t in enumerate(vocab)}, [], model_max_length=PROMPT_LENGTH)
    words = ("an", "sign", "that", "reads", *COLOURS)
    tokenizer.add_tokens([AddedToken(word, single_word=True, normalized=False) for word in words])
    clean = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([*clean, normalizers.Replace(Regex("[“”„‟«»＂]"), '"')])
    special = {f"{name}_token": vocab[1] for name in ("eos", "unk", "pad")}
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=vocab[0], model_max_length=PROMPT_LENGTH, **special
    )


def build_text_encoder(vocab_size: int, width: int, layers: int, projection: int) -> hf.CLIPTextModelWithProjection:
    """A CLIP text encoder; the pipeline reads the output of its last layer but one."""
    config = hf.CLIPTextConfig(
        vocab_size=vocab_size, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 32, max_position_embeddings=PROMPT_LENGTH, projection_dim=projection,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return hf.CLIPTextModelWithProjection(config)


def build_placeholder_t5() -> tuple[hf.T5EncoderModel, hf.PreTrainedTokenizerFast]:
    """The third text encoder ``from_pretrained`` asks for: one token whatever the prompt, encoded as zeros."""
    backend = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>"))
    backend.normalizer = normalizers.Replace(Regex(r"[\s\S]+"), "")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    encoder = hf.T5EncoderModel(hf.T5Config(vocab_size=2, d_model=160, d_kv=8, d_ff=8, num_layers=1, num_heads=1))
    encoder.load_state_dict({name: torch.zeros_like(value) for name, value in encoder.state_dict().items()})
    return encoder, hf.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


class Denoiser(torch.nn.Module):
    """The trained half of the pipeline: both text encoders and the transformer."""

    def __init__(self, vocab_size: int, width: int, layers: int) -> None:
        super().__init__()
        self.text_encoder = build_text_encoder(vocab_size, 128, 2, 64)
        self.text_encoder_2 = build_text_encoder(vocab_size, 32, 1, 32)
        self.transformer = SD3Transformer2DModel(
            sample_size=WIDTH // 4, patch_size=2, in_channels=4, out_channels=4, num_layers=layers,
            attention_head_dim=32, num_attention_heads=width // 32, caption_projection_dim=width,
            joint_attention_dim=160, pooled_projection_dim=96, pos_embed_max_size=WIDTH // 8, qk_norm="rms_norm",
        )  # fmt: skip

    def forward(self, noisy: torch.Tensor, sigma: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The velocity at ``noisy`` [B, 4, h, w], noise level ``sigma`` [B], prompt ``ids`` [B, PROMPT_LENGTH]."""
        texts = [encoder(ids, output_hidden_states=True) for encoder in (self.text_encoder, self.text_encoder_2)]
        prompts = torch.cat([text.hidden_states[-2] for text in texts], dim=-1)
        prompts = F.pad(prompts, (0, 0, 0, 1))  # the placeholder's zeros
        pooled = torch.cat([text.text_embeds for text in texts], dim=-1)
        return self.transformer(noisy, prompts, pooled, sigma * 1000, return_dict=False)[0]


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint whole or not at all."""
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def training(
    model: torch.nn.Module, args: argparse.Namespace, path: Path, steps: int, lr: float, decay: bool
) -> Iterator[int]:
    """Yield each step still to do; after the caller's backward pass take it, average the weights, save now and then."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    average, start, seconds = {k: v.clone() for k, v in model.state_dict().items()}, 0, 0.0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        average, start, seconds = state["average"], state["step"], state["seconds"]
    for step in range(start, steps):
        begun = time.monotonic()
        scale = min(1.0, (step + 1) / 200) * (min(1.0, 4 * (1 - step / steps)) if decay else 1.0)
        optimizer.param_groups[0]["lr"] = lr * scale
        yield step
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        keep = min(args.ema, (step + 1) / (step + 10))
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 1 - keep) if value.is_floating_point() else average[name].copy_(value)
        seconds += time.monotonic() - begun
        if (step + 1) % args.save_every == 0 or step + 1 == steps:
            state = {"average": average, "step": step + 1, "seconds": seconds}
            save(path, {**state, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
            save(path.with_name(f"{path.stem}_{step + 1}.pt"), state)
            log.info("%s: step %d, %.0f s of training in all", path.stem, step + 1, seconds)


def train_vae(args: argparse.Namespace) -> None:
    """Train the autoencoder on freshly rendered signs with an L1 loss and a weak KL term."""
    torch.manual_seed(args.seed)
    vae, unseen, losses = build_vae(), held_out(args), []
    for step in training(vae, args, args.work / "vae.pt", args.vae_steps, args.vae_lr, decay=True):
        rng = np.random.default_rng([args.seed, 1, step])
        pixels = to_tensor([render_sign(*random_sign(rng, unseen), rng) for _ in range(args.vae_batch)])
        latent = vae.encode(pixels).latent_dist
        noise = torch.randn(latent.mean.shape, generator=torch.Generator().manual_seed(args.seed + step))
        error = (vae.decode(latent.mean + latent.std * noise).sample - pixels).abs().mean()
        (error + 1e-4 * latent.kl().mean() / latent.mean[0].numel()).backward()
        losses.append(error.item())
        if (step + 1) % 100 == 0:
            log.info("vae: step %d, L1 %.4f", step + 1, np.mean(losses[-100:]))


def held_out(args: argparse.Namespace) -> dict[str, str]:
    """The texts of the validation prompts, never drawn for training, and their prompts."""
    return texts_of(args.prompts, "signs_val.txt")


def trained_vae(args: argparse.Namespace) -> AutoencoderKL:
    """The trained autoencoder; its scaling makes latents of mean 0 and deviation 1."""
    vae = build_vae()
    vae.load_state_dict(torch.load(args.work / "vae.pt", weights_only=True)["average"])
    vae.eval().requires_grad_(False)
    rng = np.random.default_rng([args.seed, 2])
    pixels = to_tensor([render_sign(*random_sign(rng, {}), rng) for _ in range(512)])
    latent = vae.encode(pixels).latent_dist.mean
    vae.register_to_config(shift_factor=latent.mean().item(), scaling_factor=1 / latent.std().item())
    return vae


@torch.no_grad()
def cached_latents(args: argparse.Namespace, worn: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents [N, 4, h, w] of random signs and their prompts' ids [N, PROMPT_LENGTH], kept in the work folder."""
    path = args.work / ("worn_latents.pt" if worn else "latents.pt")
    if not path.exists():
        vae, unseen, latents, prompts = trained_vae(args), held_out(args), [], []
        for start in range(0, args.images, 256):
            rng = np.random.default_rng([args.seed, 3, start])
            signs = [random_sign(rng, unseen) for _ in range(min(256, args.images - start))]
            latent = vae.encode(to_tensor([render_sign(*sign, rng, worn) for sign in signs])).latent_dist.mean
            latents.append((latent - vae.config.shift_factor) * vae.config.scaling_factor)
            prompts += [prompt_of(text, colour if rng.random() < 0.9 else None) for text, colour in signs]
        ids = build_tokenizer()(prompts, padding="max_length", return_tensors="pt").input_ids
        save(path, {"latents": torch.cat(latents), "ids": ids})
    state = torch.load(path, weights_only=True)
    return state["latents"], state["ids"]


def train_transformer(args: argparse.Namespace) -> None:
    """Train transformer and text encoders with the flow-matching loss, on clean signs first, then on worn ones."""
    signs = [cached_latents(args, 0), cached_latents(args, args.worn)]
    tokenizer, losses = build_tokenizer(), []
    empty = tokenizer("", padding="max_length", return_tensors="pt").input_ids[0]
    torch.manual_seed(args.seed)
    model = Denoiser(len(tokenizer), args.width, args.layers)
    for step in training(model, args, args.work / "denoiser.pt", args.steps, args.lr, decay=False):
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        latents, ids = signs[step >= args.clean_steps]
        rows = torch.randint(len(latents), (args.batch,), generator=generator)
        noise = torch.randn(args.batch, *latents.shape[1:], generator=generator)
        sigma = torch.randn(args.batch, generator=generator).sigmoid()
        dropped = torch.rand(args.batch, 1, generator=generator) < 0.1
        mix, clean = sigma.view(-1, 1, 1, 1), latents[rows]
        noisy, prompt = (1 - mix) * clean + mix * noise, torch.where(dropped, empty, ids[rows])
        # not the flash kernel, whose backward pass is slow in bf16 on a CPU
        with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            velocity = model(noisy, sigma, prompt)
        loss = F.mse_loss(velocity.float(), noise - clean)
        loss.backward()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            log.info("denoiser: step %d, loss %.4f", step + 1, np.mean(losses[-100:]))


def build_pipeline(args: argparse.Namespace) -> StableDiffusion3Pipeline:
    """The stock pipeline with the averaged weights of ``--use-step`` (default: the newest)."""
    name = f"denoiser_{args.use_step}.pt" if args.use_step else "denoiser.pt"
    tokenizer = build_tokenizer()
    model = Denoiser(len(tokenizer), args.width, args.layers)
    model.load_state_dict(torch.load(args.work / name, weights_only=True)["average"])
    model.eval().requires_grad_(False)
    t5, t5_tokenizer = build_placeholder_t5()
    return StableDiffusion3Pipeline(
        transformer=model.transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=args.shift),
        vae=trained_vae(args), text_encoder=model.text_encoder, tokenizer=tokenizer,
        text_encoder_2=model.text_encoder_2, tokenizer_2=build_tokenizer(), text_encoder_3=t5, tokenizer_3=t5_tokenizer,
    )  # fmt: skip


@torch.no_grad()
def evaluate(args: argparse.Namespace) -> None:
    """Draw the held-out prompts with the saved pipeline, score them, write picture and scores to the work folder."""
    pipe = StableDiffusion3Pipeline.from_pretrained(args.output)
    pipe.set_progress_bar_config(disable=True)
    targets, prompts = zip(*held_out(args).items(), strict=True)
    # the noise of the trainer's own validation: this score is where reinforcement learning starts
    generators = sample_generators([derive_seed("validation", VALIDATION_SEED, i) for i in range(len(prompts))])
    images = pipe(
        list(prompts), height=HEIGHT, width=WIDTH, num_inference_steps=args.eval_steps, guidance_scale=args.guidance,
        max_sequence_length=1, generator=generators,
    ).images  # fmt: skip
    scores = OcrScorer()(images, list(prompts), [{}] * len(prompts))
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for target, reward, exact in zip(targets, scores["ocr"], scores["exact"], strict=True):
        kind = "numbers" if target.isdigit() else "words"
        for name in ("all", kind, f"{kind} of {len(target)}"):
            groups[name].append((reward, exact))
    report = {name: [*(round(float(mean), 4) for mean in np.mean(g, 0)), len(g)] for name, g in sorted(groups.items())}
    log.info("OCR score on held-out prompts [mean, share that is exact, count]: %s", json.dumps(report))
    grid([np.asarray(image) for image in images], list(targets)).save(args.work / "held_out.png")


def export(args: argparse.Namespace) -> None:
    """Save the pipeline for ``StableDiffusion3Pipeline.from_pretrained``; the VAE in fp16, which loads as fp32."""
    pipe = build_pipeline(args)
    pipe.vae.half()
    pipe.save_pretrained(args.output)
    sizes = {n: sum(p.numel() for p in m.parameters()) for n, m in pipe.components.items() if hasattr(m, "parameters")}
    log.info("saved %s, parameters: %s", args.output, json.dumps(sizes))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; the defaults are those of the shipped weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--work", type=Path, default=Path("outputs/signs"), help="checkpoints and cached latents")
    parser.add_argument("--output", type=Path, default=ASSETS / "signs", help="where export saves the pipeline")
    parser.add_argument("--prompts", type=Path, default=ASSETS / "prompts", help="folder of the prompt files")
    numbers: dict[str, int | float] = {
        "seed": 0, "threads": 2, "images": 50_000, "save-every": 250, "ema": 0.998,
        "vae-steps": 1500, "vae-batch": 16, "vae-lr": 2e-3,
        "steps": 3500, "clean-steps": 2500, "worn": 0.65, "batch": 64, "lr": 1e-3, "width": 128, "layers": 5,
        "use-step": 0, "eval-steps": 10, "shift": 1.0, "guidance": 1.0,
    }  # fmt: skip
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="autocast the denoiser")
    return parser.parse_args(argv)


STAGES = dict(prompts=write_prompts, vae=train_vae, transformer=train_transformer, export=export, evaluate=evaluate)


def main() -> None:
    """Run the chosen stages in the order given."""
    args = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    for name in args.stages:
        STAGES[name](args)


if __name__ == "__main__":
    main()

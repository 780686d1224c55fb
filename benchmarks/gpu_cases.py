"""The cases of benchmarks/gpu.py: recipes at their real size with random weights, and the same made tiny for a dry run.

Nothing is downloaded. Denoiser, VAE and scheduler are those of gerl's record of architectures; text encoders are left
out, and a prompt becomes random embeddings of the shape that they would give it. All else is gerl's own: the pipeline
takes the place of the one that `load_policy` reads, and of the one that the sizing builds.
"""

import math
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import torch
from diffusers import DiffusionPipeline

from gerl.algorithms import build_algorithm
from gerl.commandline.composition import compose_run
from gerl.config import Config
from gerl.engine.hooks import count_evaluations
from gerl.errors import GerlError
from gerl.model import loading
from gerl.model.errors import check_backend
from gerl.model.loading import precision, prepare
from gerl.model.placement import check_attention, check_quantized_rollout
from gerl.preflight.sizing import facts as build
from gerl.preflight.sizing import layouts
from gerl.preflight.sizing.command import configured
from gerl.preflight.sizing.facts import Facts, architectures, build_part, find_facts
from gerl.preflight.sizing.hardware import Name
from gerl.preflight.sizing.layouts import Batch
from gerl.workers.actor import Actor, PartSnapshots, Snapshots
from gerl.workers.rollout import Rollout
from gerl.workers.setup import load_worker_policy
from gerl.workers.worker import PolicyWorker

CLIP_TOKENS = 77  # of Stable Diffusion 3's prompts, before those of T5
DEVIATION = 0.02  # of the random weights
# torch's names of devices whose published peak is the one on record; others of these families (PCIe, NVL, laptops,
# parts of a GPU) have another
DEVICES: dict[str, Name] = {
    "NVIDIA GeForce RTX 3090": "rtx3090-24gb",
    "NVIDIA GeForce RTX 4090": "rtx4090-24gb",
    "NVIDIA GeForce RTX 5090": "rtx5090-32gb",
    "NVIDIA L4": "l4-24gb",
    "NVIDIA A10": "a10-24gb",
    "NVIDIA L40S": "l40s-48gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H200": "h200-141gb",
    "NVIDIA B200": "b200-180gb",
}


@dataclass(frozen=True)
class Case:
    """A recipe at a size in pixels. `changes`: of the configurations of its components, by component."""

    name: str
    recipe: str
    pixels: int
    keys: tuple[str, ...] = ()
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Variant:
    """Keys on top of a case's. `own_batch`: with the micro-batches of the recipe.

    `collective`: an all-reduce alone. `profiled`: launches, waits and operations in place of times.
    """

    name: str
    keys: tuple[str, ...] = ()
    own_batch: bool = False
    collective: bool = False
    profiled: bool = False


CASES = {
    case.name: case
    for case in (
        Case("sd35_medium_512", "sd35_medium_ocr", 512),
        Case("sd35_medium_1024", "sd35_medium_ocr", 1024),
        Case("flux1_dev_512", "flux1_dev_pickscore", 512),
        Case("flux1_dev_1024", "flux1_dev_pickscore", 1024),
        Case("qwen_image_512", "qwen_image_ocr", 512),
    )
}
TINY_KEYS = ("sampling.num_inference_steps=6", "rollout.n=2", "rollout.micro_batch_size=2", "model.lora_rank=4")
TINY_VAE = {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1}
TINY_WIDTH = dict(attention_head_dim=32, num_attention_heads=2, joint_attention_dim=64, pooled_projection_dim=32)
TINY_SD3 = {"num_layers": 3, "caption_projection_dim": 64, "pos_embed_max_size": 16, "dual_attention_layers": [0]}
TINY_FLUX = {"num_layers": 2, "num_single_layers": 2, "axes_dims_rope": [8, 12, 12]}
TINY_QWEN = dict(num_layers=2, attention_head_dim=32, num_attention_heads=2, joint_attention_dim=64)
TINY = {
    "sd35_medium_tiny": ("sd35_medium_ocr", TINY_WIDTH | TINY_SD3, TINY_VAE),
    "flux1_dev_tiny": ("flux1_dev_pickscore", TINY_WIDTH | TINY_FLUX, TINY_VAE),
    "qwen_image_tiny": (
        "qwen_image_ocr", TINY_QWEN | {"axes_dims_rope": [8, 12, 12]}, {"base_dim": 8, "num_res_blocks": 1},
    ),
}  # fmt: skip
TINY_CASES = {
    name: Case(name, recipe, 64, TINY_KEYS, {"transformer": transformer, "vae": vae})
    for name, (recipe, transformer, vae) in TINY.items()
}
IMAGES = (16, 32, 64)  # sizes of growing micro-batches
# of diffusers' attention backends those with a gradient that come with torch or a package, not from the hub
BACKENDS = ("_native_flash", "_native_cudnn", "_native_efficient", "flash", "_flash_3", "xformers", "flex")


def sized(images: int) -> tuple[str, str]:
    """Keys of micro-batches of `images`."""
    return f"rollout.micro_batch_size={images}", f"actor.micro_batch_size={images}"


def variants(dry: bool) -> dict[str, Variant]:
    """By name, those that may leave a GPU in a bad state last; a dry run compiles without making kernels."""
    compiler = "eager" if dry else "inductor"
    attention = [f"model.attention={name}" for name in (("_native_math", "flash") if dry else BACKENDS)]
    single = [
        "model.gradient_checkpointing=true",
        "model.channels_last=true",
        "sampling.cache=first_block",
        f"model.compile={compiler}",
        "rollout.quantize=int8",
        "rollout.quantize=fp8",
        *attention,
    ]
    images = (4,) if dry else IMAGES
    found = [
        Variant("plain"),
        Variant("recipe", ("model.gradient_checkpointing=true",), own_batch=True),
        Variant("all-reduce", collective=True),
        Variant("profile", sized(2), profiled=True),  # of two images: the counter of operations keeps tensors
        *(Variant(key, (key,)) for key in single),
        *(Variant(f"images={n}", sized(n)) for n in images),
    ]
    return {variant.name: variant for variant in found}


def config_of(case: Case, variant: Variant, batch: int | None = None) -> Config:
    """The configuration of a case; `batch`: the images of a micro-batch, None: as the recipe has it."""
    keys = ["model.gradient_checkpointing=false", f"sampling.height={case.pixels}", f"sampling.width={case.pixels}"]
    keys += case.keys
    if batch is not None and not variant.own_batch:
        keys += [f"rollout.micro_batch_size={batch}", f"actor.micro_batch_size={batch}"]
    last = {key.partition("=")[0]: key for key in [*keys, *variant.keys]}
    return compose_run([f"experiment={case.recipe}", *last.values()]).config


def pipeline_of(case: Case, path: str, dtype: torch.dtype, device: str) -> DiffusionPipeline:
    """The pipeline of the model `path` on record, without text encoders, with random weights (on meta: with none).

    Matrices and convolutions are normal, vectors as their classes initialise them.
    """
    record = architectures()
    model = record["models"][path]
    torch.manual_seed(0)
    components: dict[str, Any] = {}
    for name, value in model["components"].items():
        part = record["parts"][value] if isinstance(value, str) else value
        if not isinstance(part, dict) or "tokens" in part or name.startswith("text_encoder"):
            components[name] = None
            continue
        part = part | {"config": part["config"] | case.changes.get(name, {})}
        components[name] = build_part(part, dtype, device)
        if isinstance(components[name], torch.nn.Module) and device != "meta":
            with torch.no_grad():
                for p in components[name].parameters():
                    if p.ndim > 1:
                        p.normal_(0.0, DEVIATION)
    pipe: DiffusionPipeline = getattr(diffusers, model["pipeline"])(**components)
    give_prompts(pipe, dtype)
    return pipe


def give_prompts(pipe: DiffusionPipeline, dtype: torch.dtype) -> None:
    """Let `pipe` encode a prompt as random embeddings, the same for the same text."""
    config, three = pipe.transformer.config, "StableDiffusion3" in type(pipe).__name__
    width, pooled = config.joint_attention_dim, config.get("pooled_projection_dim")

    def embedded(texts: Sequence[str], shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        seeds = [zlib.crc32(f"{len(shape)} {text}".encode()) for text in texts]
        rows = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.stack(rows).to(device, dtype)

    def encode_prompt(
        prompt: str | Sequence[str],
        device: torch.device | None = None,
        max_sequence_length: int = 512,
        do_classifier_free_guidance: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        del kwargs
        place = torch.device(device or pipe._execution_device)
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        tokens = max_sequence_length + (CLIP_TOKENS if three else 0)
        if pooled is None:  # Qwen-Image; the mask is None where no text is padded
            return embedded(texts, (tokens, width), place), None

        def both(of: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
            return embedded(of, (tokens, width), place), embedded(of, (pooled,), place)

        long, short = both(texts)
        if not three:
            return long, short, torch.zeros(tokens, 3, device=place, dtype=dtype)
        other = both([""] * len(texts)) if do_classifier_free_guidance else (None, None)
        return long, other[0], short, other[1]

    pipe.__dict__["encode_prompt"] = encode_prompt


def worker_of(case: Case, config: Config, device: str) -> PolicyWorker:
    """A worker on a case with random weights, made as `PolicyWorker.setup` makes it.

    Raises what a run would raise before it starts, where the keys do not work on `device`.
    """
    dtype = precision(config.model, device)
    check_backend(config.model.compile)
    if config.model.attention is not None:
        check_attention(config.model.attention, device, dtype)
    if config.rollout.quantize != "none":
        check_quantized_rollout(config.rollout.quantize, device, dtype)

    def read(path: str, dtype: torch.dtype, *_: object) -> DiffusionPipeline:
        return pipeline_of(case, path, dtype, device)

    worker = PolicyWorker(config, 0, device, torch.get_num_threads(), 1)
    with patch.object(loading, "read_pipeline", read):
        worker.policy = load_worker_policy(config, device, None)
    worker.evaluations = count_evaluations(worker.policy.denoisers.values())
    worker.rollout = Rollout(worker.policy, config.sampling, config.validation)
    worker.rollout.format.divides = False  # what does not fit is a row that says so
    worker.algorithm = build_algorithm(config)
    worker.actor = Actor(worker.policy, config.actor, worker.algorithm, 1)
    worker.snapshots = PartSnapshots(worker.actor) if worker.policy.whole else Snapshots(worker.actor)
    worker.ended = 0
    return worker


def facts_of(case: Case, device: str) -> Facts:
    """What gerl's sizing counts of a case on shapes, in the recipe's micro-batches."""
    config = config_of(case, Variant("plain"))

    def shapes(path: str, dtype: torch.dtype, device: str = "meta", *_: object) -> DiffusionPipeline:
        pipe = pipeline_of(case, path, dtype, device)
        prepare(pipe, half=dtype != torch.float32)
        return pipe

    with patch.object(build, "build_pipeline", shapes), tempfile.TemporaryDirectory() as folder:
        return find_facts(config, Path(folder), precision(config.model, device))


@dataclass(frozen=True)
class Predicted:
    """By the sizing: operations of an image, None where a cache leaves some out, and the peak in bytes.

    The peak is None where the sizing does not count what a key adds.
    """

    rollout_flops: float | None
    update_flops: float
    rollout_peak: float | None
    update_peak: float | None


def predicted(facts: Facts, config: Config, images: int) -> Predicted:
    """What the sizing says of micro-batches of `images`; their trajectories are the only ones that are kept."""
    layout = configured(config, facts)
    phases = layouts.memory(facts, layout, Batch(images, images, images)).phases
    counted = config.rollout.quantize == "none"  # the copies are not in it
    return Predicted(
        facts.rollout.total / facts.images if config.sampling.cache == "none" else None,
        facts.updates[layout.checkpointing].total / facts.images,
        max(phases["rollout"], phases.get("decode", 0.0)) if counted else None,
        phases["update"] if counted else None,
    )


def fitting_batch(facts: Facts, config: Config, memory: float) -> int:
    """The largest of the recipe's micro-batch, its half and so on that should fit into `memory` bytes; at least 1."""
    size = config.rollout.micro_batch_size
    while size > 1 and _peak(facts, config, size) > (1 - layouts.SPARE) * memory:
        size = math.ceil(size / 2)
    return size


def _peak(facts: Facts, config: Config, images: int) -> float:
    return layouts.memory(facts, configured(config, facts), Batch(images, images, images)).peak


def named(wanted: Sequence[str], known: Mapping[str, Any], what: str) -> list[Any]:
    """Those of `known` that are wanted, or all; raises `GerlError` for another name."""
    for name in wanted:
        if name not in known:
            raise GerlError(f"{name}: there is no such {what}; give some of {', '.join(known)}")
    return [known[name] for name in wanted] or list(known.values())

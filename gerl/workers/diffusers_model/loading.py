"""Loading a pipeline by hub id or folder and preparing it for training."""

import contextlib
import hashlib
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import diffusers
import torch

from gerl.config import ModelConfig, SamplingConfig
from gerl.errors import ModelError
from gerl.utils.ema import EMA
from gerl.utils.lora import add_lora, lora_file
from gerl.utils.seeding import derive_seed
from gerl.workers.diffusers_model.transitions import is_flow_matching

logger = logging.getLogger(__name__)
SHIPPED = ("signs",)
NOISE_SCHEDULE = (
    "num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "prediction_type",
)  # fmt: skip
DENOISERS = ("transformer", "transformer_2", "unet")


@dataclass
class Policy:
    """A pipeline with a LoRA on its denoisers: what rollout and actor share. `lora` names are `denoiser.parameter`.

    `ema` is what validation and export use; `old` an earlier policy that an algorithm compares with; `sampler` draws
    the rollouts, if it is not the trained LoRA that does.
    """

    pipe: Any
    denoisers: dict[str, Any]
    lora: dict[str, torch.nn.Parameter]
    ema: EMA
    version: int = 0  # optimizer steps taken
    old: EMA | None = None
    old_is_current: bool = True  # `old` holds the trained weights: no need to run it
    sampler: EMA | None = None

    def averages(self) -> dict[str, EMA]:
        """All weights besides the trained ones, by name."""
        named = {"ema": self.ema, "old": self.old, "sampler": self.sampler}
        return {name: average for name, average in named.items() if average is not None}

    @contextlib.contextmanager
    def as_sampler(self) -> Iterator[None]:
        """The model computes with the weights that draw rollouts."""
        with contextlib.nullcontext() if self.sampler is None else self.sampler.swapped_in():
            yield

    def lora_file(self) -> bytes:
        """The averaged LoRA as diffusers' safetensors file: the weights that validation draws with."""
        with self.ema.swapped_in():
            return lora_file(self.pipe, self.denoisers)


def resolve(path: str) -> str:
    """The folder of a pipeline, or `path` itself if it is a hub id; raises `ModelError` for a folder that is none."""
    if path in SHIPPED:
        return str(resources.files("gerl") / "assets" / path)
    folder = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or folder.exists()
    if not looks_local:
        if path.count("/") != 1:
            raise ModelError(
                f"model.path={path!r} is no pipeline: give a folder, a hub id such as 'owner/name', or 'signs'"
            )
        return path
    if not (folder / "model_index.json").is_file():
        raise ModelError(f"model.path={path!r} is no pipeline: the folder does not exist or has no model_index.json")
    return str(folder)


def load_pipeline(config: ModelConfig, device: str) -> Any:
    """The pipeline on `device`, frozen and in eval mode, with a scheduler that has a transition kernel.

    Raises `ModelError` if `config.path` cannot be loaded.
    """
    dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if device.startswith("cuda") else "float32")
    folder = resolve(config.path)
    try:
        pipe = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=getattr(torch, dtype))
    except (OSError, ValueError, RuntimeError, AttributeError, ImportError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model.path={config.path!r} cannot be loaded as a diffusers pipeline: {reason}") from error
    pipe.scheduler = trainable_scheduler(pipe.scheduler)
    pipe.set_progress_bar_config(disable=True)
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.requires_grad_(False).eval()
    return pipe.to(device)


def trainable_scheduler(scheduler: Any) -> Any:
    """`scheduler`, or a DDIM one of the same noise schedule where it is neither flow matching nor DDIM."""
    if is_flow_matching(scheduler) or isinstance(scheduler, diffusers.DDIMScheduler):
        return scheduler
    config, alphas = scheduler.config, getattr(scheduler, "alphas_cumprod", None)  # EDM schedulers have no alphas
    if config.get("prediction_type") not in ("epsilon", "v_prediction", "sample") or alphas is None:
        raise ModelError(f"the pipeline's scheduler {type(scheduler).__name__} has no transition kernel")
    # `from_config` drops what the other class had by default; and DDIM by default clips the predicted sample, which
    # would ruin the latents of schedulers that never do
    kept = {name: config[name] for name in NOISE_SCHEDULE if name in config}
    ddim = diffusers.DDIMScheduler.from_config(config, clip_sample=config.get("clip_sample", False), **kept)
    if not torch.equal(ddim.alphas_cumprod, alphas):
        raise ModelError(f"the pipeline's scheduler {type(scheduler).__name__} has another noise schedule than DDIM")
    logger.info("replaced %s by DDIMScheduler, which has a transition kernel", type(scheduler).__name__)
    return ddim


def load_policy(config: ModelConfig, ema_decay: float, device: str, seed: int) -> Policy:
    """Load the pipeline and add a LoRA, the same on every worker with the same `seed`."""
    pipe = load_pipeline(config, device)
    denoisers = {name: getattr(pipe, name) for name in DENOISERS if getattr(pipe, name, None) is not None}
    if not denoisers:
        raise ModelError(f"{type(pipe).__name__} has none of the denoisers {', '.join(DENOISERS)}")
    lora: dict[str, torch.nn.Parameter] = {}
    for name, denoiser in denoisers.items():
        added = add_lora(
            denoiser, config.lora_rank, config.lora_alpha, config.lora_targets, derive_seed("lora", seed, name)
        )
        lora |= {f"{name}.{key}": p for key, p in added.items()}
        if config.gradient_checkpointing:
            denoiser.enable_gradient_checkpointing()
        if config.compile:
            denoiser.compile(backend=config.compile_backend)
    return Policy(pipe, denoisers, lora, EMA(lora, ema_decay))


def pipeline_call(pipe: Any, sampling: SamplingConfig, prompts: list[str], **overrides: Any) -> dict[str, Any]:
    """Keyword arguments of the pipeline for `prompts`; raises `ModelError` for one that it does not take."""
    optional = {"height": sampling.height, "width": sampling.width, "guidance_scale": sampling.guidance_scale}
    optional |= {"num_inference_steps": sampling.num_inference_steps, **sampling.call}
    optional |= {name: value for name, value in overrides.items() if value is not None}
    given = {name: value for name, value in optional.items() if value is not None}
    accepted = inspect.signature(type(pipe).__call__).parameters
    unknown = [name for name in given if name not in accepted]
    if unknown:
        place = (
            "set sampling.sigmas=scheduler" if unknown[0] == "sigmas" else "remove it from sampling or sampling.call"
        )
        raise ModelError(f"{type(pipe).__name__} takes no argument {unknown[0]!r}: {place}")
    return {"prompt": prompts, "output_type": "np", **given}


def training_sigmas(sampling: SamplingConfig) -> list[float] | None:
    """The noise levels `sampling.sigmas` asks the pipeline for, before its scheduler's shift; None: its own."""
    n = sampling.num_inference_steps
    return None if sampling.sigmas == "scheduler" else [1 - i * (1 - 1 / n) / (n - 1) for i in range(n)]


def weights_fingerprint(denoisers: dict[str, Any]) -> str:
    """A digest of names, shapes and some values of the base weights: tells one model from another."""
    digest = hashlib.sha256()
    for denoiser in denoisers.values():
        for name, p in denoiser.named_parameters():
            if "lora_" in name:
                continue
            head = p.detach().flatten()[:256].float().cpu()
            digest.update(f"{name}{tuple(p.shape)}".encode() + head.numpy().tobytes())
    return digest.hexdigest()

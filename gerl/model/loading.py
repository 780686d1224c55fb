"""Loading a pipeline by hub id or folder and preparing it for training."""

import contextlib
import hashlib
import inspect
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.loaders import PeftAdapterMixin

from gerl.config import ModelConfig, SamplingConfig
from gerl.errors import ModelError
from gerl.model.ema import EMA
from gerl.model.lora import add_lora, lora_file
from gerl.model.placement import decode_in_fp32, place
from gerl.model.schedulers import trainable_scheduler
from gerl.utils.seeding import derive_seed

logger = logging.getLogger(__name__)
SHIPPED = ("signs",)
DENOISERS = ("transformer", "transformer_2", "unet")  # usual names, for those that do not show what they are
TIMESTEP = re.compile(r"(^|_)(t|time|timesteps?|sigmas?|noise_level)(_|$)")  # an argument of a denoiser


@dataclass
class Policy:
    """A pipeline with a LoRA on its denoisers: what rollout and actor share. `lora` names are `denoiser.parameter`.

    `ema` is what validation and export use; `old` an earlier policy that an algorithm compares with; `sampler` draws
    the rollouts, if it is not the trained LoRA that does.
    """

    pipe: DiffusionPipeline
    denoisers: dict[str, ModelMixin]
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
            return lora_file(self.denoisers)


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


def read_pipeline(path: str, dtype: torch.dtype) -> DiffusionPipeline:
    """The pipeline of a hub id or folder, on the CPU, as diffusers loads it.

    Python code that a folder's model_index.json refers to is run. Raises `ModelError` if there is no such pipeline, or
    if a hub id would run code.
    """
    folder = resolve(path)
    refused = (
        f"model.path={path!r} comes with code of its own, and gerl runs none from the hub: download it with "
        f"'hf download {path} --local-dir FOLDER', read the code, and set model.path=FOLDER"
    )
    try:
        index = DiffusionPipeline.load_config(folder)
        code = own_code(Path(folder), index) if Path(folder).is_dir() else []
        if code:
            logger.info("model.path=%r: running the code in %s", path, ", ".join(code))
        elif isinstance(index["_class_name"], list):
            raise ModelError(refused)
        return DiffusionPipeline.from_pretrained(folder, dtype=dtype, trust_remote_code=bool(code))
    except (OSError, ValueError, RuntimeError, AttributeError, ImportError, KeyError, TypeError) as error:
        if "trust_remote_code" in str(error):
            raise ModelError(refused) from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model.path={path!r} cannot be loaded as a diffusers pipeline: {reason}") from error


def own_code(folder: Path, index: dict[str, object]) -> list[str]:
    """The Python files in a pipeline's folder that `index`, its model_index.json, refers to, relative to the folder.

    That is `MODULE.py` for a pipeline whose `_class_name` is `[MODULE, CLASS]`, and `COMPONENT/MODULE.py` for a
    component that is `[MODULE, CLASS]`. Raises `ModelError` if the pipeline's is missing.
    """
    modules = {name: value[0] for name, value in index.items() if isinstance(value, list) and value}
    pipeline = modules.pop("_class_name", None)
    files = [f"{name}/{module}.py" for name, module in modules.items()]
    found = [file for file in files if (folder / file).is_file()]
    if pipeline is None:
        return found
    if not (folder / f"{pipeline}.py").is_file():
        raise ModelError(
            f"{folder}/model_index.json: the pipeline's class should be in {pipeline}.py, which is missing"
        )
    return [f"{pipeline}.py", *found]


def load_pipeline(config: ModelConfig, device: str) -> DiffusionPipeline:
    """The pipeline on `device`, frozen and in eval mode, with a scheduler that has a transition kernel.

    Weights are in `config.dtype`, but for layers that a model's class keeps in fp32 (diffusers' `from_pretrained` does)
    and VAE decoders, see `decode_in_fp32`. Raises `ModelError` if `config.path` cannot be loaded or has no denoiser.
    """
    dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if device.startswith("cuda") else "float32")
    pipe = read_pipeline(config.path, getattr(torch, dtype))
    if getattr(pipe, "scheduler", None) is None:
        raise ModelError(f"{type(pipe).__name__} has no component 'scheduler': there are no denoising steps to train")
    pipe.scheduler = trainable_scheduler(pipe.scheduler)
    pipe.set_progress_bar_config(disable=True)
    if getattr(pipe, "safety_checker", None) is not None:  # the images it blackens would be scored all the same
        pipe.safety_checker = None
        logger.info("left out the safety checker: it would hand black images to the scorers")
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.requires_grad_(False).eval()
    if dtype != "float32":
        decode_in_fp32(pipe)
    place(pipe, find_denoisers(pipe), device, config.offload)
    return pipe


def find_denoisers(pipe: DiffusionPipeline) -> dict[str, ModelMixin]:
    """The components that get a LoRA, by name: diffusers models with repeated blocks that are called with a timestep.

    Autoencoders and ControlNets are none. A pipeline may have several: Wan 2.2 has one for high and one for low noise
    levels, Ideogram 4 one for the conditional and one for the unconditional prediction. Raises `ModelError` if there is
    none.
    """
    models = {
        name: component
        for name, component in pipe.components.items()
        if isinstance(component, ModelMixin) and not hasattr(component, "decode") and "controlnet" not in name
    }
    found = {name: model for name, model in models.items() if _is_denoiser(model)}
    found = found or {name: models[name] for name in DENOISERS if name in models}
    if not found:
        raise ModelError(
            f"{type(pipe).__name__} has no denoiser: none of its components {', '.join(pipe.components)} is a model "
            "of diffusers with repeated blocks that is called with a timestep"
        )
    return found


def _is_denoiser(model: torch.nn.Module) -> bool:
    timed = any(TIMESTEP.search(name) for name in inspect.signature(model.forward).parameters)
    return timed and any(isinstance(module, torch.nn.ModuleList) for module in model.modules())


def load_policy(config: ModelConfig, ema_decay: float, device: str, seed: int) -> Policy:
    """Load the pipeline and add a LoRA, the same on every worker with the same `seed`.

    Raises `ModelError`, as `load_pipeline` does, and if a denoiser cannot do what `config` asks for.
    """
    pipe = load_pipeline(config, device)
    denoisers = find_denoisers(pipe)
    lora: dict[str, torch.nn.Parameter] = {}
    for name, denoiser in denoisers.items():
        added = add_lora(
            denoiser, config.lora_rank, config.lora_alpha, config.lora_targets, derive_seed("lora", seed, name)
        )
        lora |= {f"{name}.{key}": p for key, p in added.items()}
        if config.gradient_checkpointing:
            _checkpoint_gradients(denoiser)
        if config.compile is not None:
            denoiser.compile(backend=config.compile)
    for name in sorted(denoisers.keys() - loadable_loras(pipe)):
        way = "gerl.utils.lora.load_lora(pipe, FOLDER)"
        if isinstance(denoisers[name], PeftAdapterMixin):
            way = f"pipe.{name}.load_lora_adapter(FOLDER, prefix={name!r}, use_safetensors=True)"
        logger.info("%s.load_lora_weights reads no LoRA of %s: use %s", type(pipe).__name__, name, way)
    return Policy(pipe, denoisers, lora, EMA(lora, ema_decay))


def loadable_loras(pipe: DiffusionPipeline) -> set[str]:
    """The components of which plain diffusers writes, and hence loads, a LoRA for this class of pipeline."""
    save = getattr(type(pipe), "save_lora_weights", None)
    parameters = inspect.signature(save).parameters if save else {}
    return {name.removesuffix("_lora_layers") for name in parameters if name.endswith("_lora_layers")}


def _checkpoint_gradients(denoiser: ModelMixin) -> None:
    try:
        denoiser.enable_gradient_checkpointing()
    except ValueError as error:
        raise ModelError(f"model.gradient_checkpointing=true: {error}") from None


def pipeline_call(
    pipe: DiffusionPipeline, sampling: SamplingConfig, prompts: list[str], **overrides: object
) -> dict[str, object]:
    """Keyword arguments of the pipeline for `prompts`; raises `ModelError` for one that it does not take."""
    optional: dict[str, object] = {
        "height": sampling.height,
        "width": sampling.width,
        "guidance_scale": sampling.guidance_scale,
        "num_inference_steps": sampling.num_inference_steps,
        **sampling.call,
    }
    optional |= {name: value for name, value in overrides.items() if value is not None}
    given = {name: value for name, value in optional.items() if value is not None}
    accepted = inspect.signature(type(pipe).__call__).parameters
    unknown = [name for name in given if name not in accepted]
    if unknown:
        place = (
            "set sampling.sigmas=scheduler" if unknown[0] == "sigmas" else "remove it from sampling or sampling.call"
        )
        raise ModelError(f"{type(pipe).__name__} takes no argument {unknown[0]!r}: {place}")
    for name in given:  # not every pipeline repeats a text for the prompts
        if "prompt" in name and isinstance(given[name], str):
            given[name] = [given[name]] * len(prompts)
    return {"prompt": prompts, "output_type": "np", **given}


def training_sigmas(sampling: SamplingConfig) -> list[float] | None:
    """The noise levels `sampling.sigmas` asks the pipeline for, before its scheduler's shift; None: its own."""
    n = sampling.num_inference_steps
    return None if sampling.sigmas == "scheduler" else [1 - i * (1 - 1 / n) / (n - 1) for i in range(n)]


def weights_fingerprint(denoisers: dict[str, ModelMixin]) -> str:
    """A digest of names, shapes and some values of the base weights: tells one model from another."""
    digest = hashlib.sha256()
    for denoiser in denoisers.values():
        for name, p in denoiser.named_parameters():
            if "lora_" in name:
                continue
            head = p.detach().flatten()[:256].float().cpu()
            digest.update(f"{name}{tuple(p.shape)}".encode() + head.numpy().tobytes())
    return digest.hexdigest()

"""Loading of a pipeline from a Hub id or folder, its preparation for training, and its teachers."""

import contextlib
import copy
import hashlib
import inspect
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.loaders import PeftAdapterMixin
from diffusers.pipelines.pipeline_loading_utils import LOADABLE_CLASSES
from torch.distributed.device_mesh import DeviceMesh

from gerl.config import ModelConfig, SamplingConfig
from gerl.config.algorithms import NAME, Teacher
from gerl.config.user_files import check_trusted
from gerl.errors import ModelError
from gerl.model.components import check_files, weights_checked
from gerl.model.denoisers import DENOISERS, check_offered, denoisers_among, find_denoisers, relay_warnings, skeletons
from gerl.model.errors import check_backend, is_full
from gerl.model.hub import code_refused, model_folder, part_folder, refusal_of_code
from gerl.model.lora import add_lora, targets_of, with_lora
from gerl.model.lora_files import TEXT_ENCODER, check_loads, lora_file, merge
from gerl.model.parts import NO_PARTS, Parts, left_out, with_tokenizers
from gerl.model.paths import resolve
from gerl.model.placement import (
    LazyTextEncoder,
    channels_last,
    compile_blocks,
    decode_in_fp32,
    encoder_skeletons,
    lazy_text_encoders,
    place,
    set_attention,
)
from gerl.model.policy import EMA, Gathered, Policy, alone, chosen, divide, parameters_of
from gerl.model.prompts import check_arguments
from gerl.model.quantization import check_quantisation, leading_values, quantisation_config, text_encoders
from gerl.model.schedulers import trainable_scheduler
from gerl.model.sharding import Unread, check_context, divide_context, fill, shard, sharded_components, unread_models
from gerl.model.shards import TORCH
from gerl.model.start_lora import begin_with, read_start
from gerl.model.teachers import attach_teachers, in_teachers, read_teachers, teachers_parameters
from gerl.objects import pipeline
from gerl.utils.files import first_line
from gerl.utils.seeding import derive_seed
from gerl.utils.versions import DTYPE, has, require

# --- Load a pipeline by Hub id or folder and prepare it for training

logger = logging.getLogger(__name__)


def read_pipeline(
    path: str,
    dtype: torch.dtype,
    config: ModelConfig | None = None,
    masters: bool = False,
    unread: Unread | None = None,
    late: bool = False,
) -> DiffusionPipeline:
    """Load the pipeline of a Hub id or folder on the CPU with diffusers, quantised according to `config`.

    `masters`: load its denoisers in fp32. `unread`: receives the weights of components in `config.shard` that stay in
    their files for now. `late`: load text encoders on first use. Python code listed in a local model_index.json is run.
    Raises `ModelError` for a pipeline that does not exist or cannot be quantised, and for code from the Hub.
    """
    if isinstance(offered := pipeline(path), DiffusionPipeline):
        return offered
    parts = NO_PARTS if config is None else config.parts
    with _loading(path):
        folder = str(model_folder(path, parts))
        check_files(Path(folder))
        index = DiffusionPipeline.load_config(folder)
        code = own_code(path, Path(folder), index)
        if code:
            logger.info("model.path=%r: running the code in %s", path, ", ".join(code))
        quantised = quantisation_config(config, folder, dtype, denoisers_among) if config is not None else None
        models: dict[str, torch.nn.Module] = {}
        if config is not None and unread is not None and quantised is None and not code:
            models, unread_parts = unread_models(Path(folder), _to_divide(config, folder), dtype)
            unread |= unread_parts
        encoders = lazy_text_encoders(config, folder, dtype) if config is not None and late and not code else {}
        # only the class itself accepts its optional components, such as Wan's two denoisers
        kind = getattr(diffusers, index["_class_name"]) if models or encoders else DiffusionPipeline
        dtypes: torch.dtype | dict[str, torch.dtype] = dtype
        if masters:
            models_of = skeletons(folder)
            names = DENOISERS if models_of is None else denoisers_among(models_of)
            dtypes = {"default": dtype} | {name: torch.float32 for name in names if name in index}
        arguments = {**left_out(index), **models, **dict.fromkeys(encoders), "quantization_config": quantised}
        trust = {"trust_remote_code": True} if code and has("diffusers", "0.38") else {}
        with weights_checked(), contextlib.nullcontext() if code else code_refused():
            pipe = kind.from_pretrained(folder, **trust, **{DTYPE: dtypes}, **arguments)
    for name, encoder in encoders.items():
        setattr(pipe, name, encoder)
    return pipe


def _to_divide(config: ModelConfig, folder: str) -> list[str]:
    """Return the components whose weights may stay in their files: those of `config.shard`, unless a LoRA is merged."""
    encoders = text_encoders(folder) if config.shard == "all" else []
    return encoders if config.merge_lora else [*denoisers_among(skeletons(folder) or {}), *encoders]


@contextlib.contextmanager
def _loading(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, AttributeError, ImportError, KeyError, TypeError) as error:
        if is_full(error):
            raise
        if "trust_remote_code" in str(error):
            raise ModelError(refusal_of_code(path)) from None
        problem = f"model.path={path!r} cannot be loaded as a diffusers pipeline"
        if lacking := re.fullmatch(r"module (diffusers|transformers) has no attribute (\w+)", str(error)):
            package, name = lacking.groups()
            raise ModelError(
                f"{problem}: {package} {version(package)} has no {name}, newer versions may: pip install -U {package}"
            ) from error
        raise ModelError(f"{problem}: {first_line(error)}") from error


def check_model(config: ModelConfig, sampling: SamplingConfig, context: int = 1) -> None:
    """Check the configuration before weights are loaded; a Hub pipeline is fetched into the cache.

    `context`: number of context-parallel ranks. Raises `ModelError` if pipeline, `sampling`, `config.lora`,
    `config.train` or `context` do not fit each other; `ConfigError` for an unknown compiler backend.
    """
    check_backend(config.compile)
    relay_warnings()
    if (offered := pipeline(config.path)) is not None:
        check_offered(offered, config)
        check_arguments(type(offered), sampling)
        return
    with _loading(config.path):
        folder = str(model_folder(config.path, config.parts))
        check_files(Path(folder))
        name = DiffusionPipeline.load_config(folder)["_class_name"]
    if isinstance(name, str) and isinstance(kind := getattr(diffusers, name, None), type):
        check_arguments(kind, sampling)
    if config.lora is not None or config.train != "lora" or config.lora_targets is not None or context > 1:
        with _loading(config.path):
            models = skeletons(folder)
        if models is None:  # only its custom code can build them
            return
        if context > 1:
            check_context(models, denoisers_among(models), context)
        if config.lora is not None:
            read_start(config, denoisers_among(models) | (encoder_skeletons(folder) if config.merge_lora else {}))
        if config.train != "lora":
            chosen(config.train, denoisers_among(models))
        elif config.lora_targets is not None and (denoisers := denoisers_among(models)):
            targets_of(denoisers, config.lora_targets)


def check_code(path: str, parts: dict[str, Any]) -> None:
    """Raise `TrustError` if the folder `path` has code that the user does not trust; another process may load it."""
    if not isinstance(pipeline(path), DiffusionPipeline) and Path(resolve(path)).is_dir():
        with _loading(path):
            folder = model_folder(path, parts)
            own_code(path, folder, DiffusionPipeline.load_config(str(folder)))


def own_code(path: str, folder: Path, index: dict[str, object]) -> list[str]:
    """Return a pipeline's Python files, `MODULE.py` and `COMPONENT/MODULE.py`, that its model_index.json names.

    Raises `ModelError` for those from the Hub and for other modules, `TrustError` if the user does not trust `path`.
    """
    modules = {name: value[0] for name, value in index.items() if isinstance(value, list) and value}
    main = [f"{modules.pop('_class_name')}.py"] if "_class_name" in modules else []
    files = {name: f"{name}/{module}.py" for name, module in modules.items() if isinstance(module, str)}
    code = main + [file for file in files.values() if (folder / file).is_file()]
    if code and not Path(resolve(path)).is_dir():
        raise ModelError(refusal_of_code(path))
    if main and not (folder / main[0]).is_file():
        raise ModelError(f"{folder}/model_index.json: the pipeline's class must be in {main[0]}, which is missing")
    for name in (name for name, file in files.items() if file not in code and not _is_library(modules[name])):
        raise ModelError(
            f"{folder}/model_index.json: {name} is of the module {modules[name]}, which is not one of diffusers or "
            f"transformers, and {files[name]} is missing"
        )
    if code:
        check_trusted("model.path", path, *(folder / file for file in code))
    return code


def _is_library(module: str) -> bool:
    """Whether a component may be of this module: diffusers before 0.42.1 would import any, and so run it."""
    return module in LOADABLE_CLASSES or hasattr(diffusers.pipelines, module) or module in sys.modules


def precision(config: ModelConfig, device: str) -> torch.dtype:
    """Return the dtype of `config.dtype` on `device`."""
    auto = "bfloat16" if device.startswith("cuda") else "float32"
    return getattr(torch, auto if config.dtype == "auto" else config.dtype)


def load_pipeline(
    config: ModelConfig,
    device: str,
    to_shard: bool = False,
    masters: bool = False,
    unread: Unread | None = None,
    late: bool = False,
) -> DiffusionPipeline:
    """Load the pipeline on `device`, frozen, in eval mode and with a scheduler that has a transition kernel.

    Weights are in `config.dtype` or quantised, except layers kept in fp32 and VAE decoders (`decode_in_fp32`).
    `to_shard`: components in `config.shard` stay on the CPU. `masters`: denoisers stay there in fp32. `unread`, `late`:
    see `read_pipeline`. Raises `ModelError` if there is no denoiser, `ConfigError` for a missing package.
    """
    dtype = precision(config, device)
    check_quantisation(config, device)
    pipe = read_pipeline(config.path, dtype, config, masters, unread, late)
    if getattr(pipe, "scheduler", None) is None:
        raise ModelError(f"{type(pipe).__name__} has no component 'scheduler': there are no denoising steps to train")
    prepare(pipe, half=dtype != torch.float32)
    denoisers = find_denoisers(pipe)
    if config.lora is not None and config.merge_lora:
        merge_start(config, pipe, denoisers, unread)
    sharded = sharded_components(pipe, denoisers, config.shard) if to_shard else {}
    if masters:
        for denoiser in denoisers.values():
            denoiser.float()  # of a pipeline with custom code, whose denoisers were not known before
        sharded = {**sharded, **denoisers}
    if config.attention is not None:
        set_attention(denoisers, config.attention)
    if config.channels_last:
        channels_last(pipe)
    place(pipe, denoisers, device, config.offload, sharded)
    return pipe


def merge_start(
    config: ModelConfig, pipe: DiffusionPipeline, denoisers: dict[str, ModelMixin], unread: Unread | None = None
) -> None:
    """Add `model.lora` to the weights of denoisers and text encoders, in fp32 and rounded once to their precision."""
    encoders = {n: c for n, c in pipe.components.items() if n.startswith(TEXT_ENCODER) and c is not None}
    models = {n: c.skeleton if isinstance(c, LazyTextEncoder) else c for n, c in encoders.items()}
    for name, layers in read_start(config, {**models, **denoisers}).items():
        model = pipe.components[name]
        if name in encoders and config.quantize_encoders != "none":
            raise ModelError(
                f"model.lora={config.lora!r} has a LoRA of {name}, which is merged into its weights: use "
                "model.quantize_encoders=none"
            )
        model = model.loaded() if isinstance(model, LazyTextEncoder) else model
        fill(model, {} if unread is None else unread)
        merge(layers, model)
    logger.info("%s is merged into the base model", config.lora)


def prepare(pipe: DiffusionPipeline, half: bool) -> None:
    """Freeze `pipe` and give it a scheduler with a transition kernel; `half`: its weights are in half precision."""
    name = type(pipe).__name__
    if name.startswith("QwenImage"):  # older ones cannot compute some rows of a batch
        require("diffusers", "0.37", name)
    if name.startswith(("SkyReels", "Wan")) and find_spec("ftfy") is None:
        require("diffusers", "0.37", f"{name} without the package ftfy")
    pipe.scheduler = trainable_scheduler(pipe.scheduler)
    pipe.set_progress_bar_config(disable=True)
    leave_out_safety_checker(pipe)
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            component.requires_grad_(False).eval()
    if half:
        decode_in_fp32(pipe)


def leave_out_safety_checker(pipe: DiffusionPipeline) -> None:
    """Remove the safety checker of `pipe`, whose black images would be scored; Cosmos requires its checker."""
    if getattr(pipe, "safety_checker", None) is None:
        return
    if hasattr(pipe, "run_safety_checker"):
        pipe.safety_checker = None
        logger.info("removed the safety checker: it would pass black images to the scorers")
    else:
        logger.info("kept the safety checker, which %s requires", type(pipe).__name__)


def load_policy(
    config: ModelConfig,
    ema_decay: float,
    device: str,
    seed: int,
    mesh: DeviceMesh | None = None,
    context: DeviceMesh | None = None,
    late: bool = False,
    teachers: Sequence[Teacher] = (),
) -> Policy:
    """Load the pipeline and its trained parameters: a LoRA, identical on all workers with equal `seed`, or weights.

    `mesh`: the ranks that share the frozen weights of `config.shard`. `context`: those that split the tokens of a call.
    `late`: see `read_pipeline`. `teachers`: the caller loads those with a pipeline of their own. Raises `ModelError` as
    `load_pipeline` does, and if a denoiser does not support the LoRA.
    """
    if config.train != "lora":
        policy = _load_whole(config, ema_decay, device, mesh, late)
        policy.teachers = attach_teachers(teachers, {}, {}, device)
        return policy
    unread: Unread = {}
    pipe = load_pipeline(config, device, mesh is not None, unread=None if mesh is None else unread, late=late)
    denoisers = find_denoisers(pipe)
    start = read_start(config, denoisers) if config.lora is not None and not config.merge_lora else {}
    read = read_teachers(teachers, denoisers)
    targets, lora = targets_of(denoisers, config.lora_targets), dict[str, torch.nn.Parameter]()
    for name, denoiser in denoisers.items():
        if name not in targets:
            logger.info("%s gets no LoRA: model.lora_targets=%s matches none of its layers", name, config.lora_targets)
            continue
        part_seed = derive_seed("lora", seed, name)
        added = add_lora(denoiser, config.lora_rank, config.lora_alpha, targets[name], part_seed)
        for p in added.values():  # of a block that is on the CPU until it runs
            p.data = p.data.to(device)
        lora |= {f"{name}.{key}": p for key, p in added.items()}
    for denoiser in denoisers.values():
        _checkpoint_and_compile(denoiser, config)
    begin_with(start, denoisers)
    check_loads(lora_file(denoisers), with_lora(denoisers))
    if start:
        logger.info("the LoRA is initialised from %s", config.lora)
    if missing := sorted(targets.keys() - loadable_loras(pipe)):
        names, lines = " and ".join(missing), " and ".join(lora_lines(pipe, denoisers))
        logger.info("%s.load_lora_weights cannot read a LoRA of %s: use %s", type(pipe).__name__, names, lines)
    fingerprint = weights_fingerprint(denoisers, unread)
    taught_by = attach_teachers(teachers, read, denoisers, device)
    if context is not None:
        check_context(pipe.components, denoisers, context.size())
        divide_context(denoisers, context)
    if mesh is not None:
        whole = {*lora.values(), *teachers_parameters(denoisers).values()}
        parts, on_cpu = sharded_components(pipe, denoisers, config.shard), config.offload == "blocks"
        shard(parts, whole, mesh, unread, on_cpu, config.reshard)
    assert not unread, "weights were left in their files"
    return Policy(pipe, denoisers, lora, EMA(lora, ema_decay), fingerprint, teachers=taught_by)


def _load_whole(config: ModelConfig, ema_decay: float, device: str, mesh: DeviceMesh | None, late: bool) -> Policy:
    """Load the pipeline for training of its weights (full fine-tuning)."""
    require("torch", TORCH, f"model.train={config.train}")
    dtype = precision(config, device)
    divided = mesh is not None or dtype != torch.float32
    pipe = load_pipeline(config, device, to_shard=mesh is not None, masters=divided, late=late)
    denoisers = find_denoisers(pipe)
    names = chosen(config.train, denoisers)
    for p in parameters_of(denoisers, names).values():
        p.requires_grad_()
    for denoiser in denoisers.values():
        _checkpoint_and_compile(denoiser, config)
    fingerprint = weights_fingerprint(denoisers)
    if mesh is not None:
        others = sharded_components(pipe, denoisers, config.shard)
        shard({name: part for name, part in others.items() if name not in denoisers}, set(), mesh)
    gathered: list[Gathered] = []
    if divided:
        reduced = getattr(torch, config.reduce_dtype) if mesh is not None else torch.float32
        gathered = divide(denoisers, mesh or alone(device), dtype, reduced, config.reshard)
    trained = parameters_of(denoisers, names)
    average = EMA(trained, ema_decay)
    return Policy(pipe, denoisers, trained, average, fingerprint, whole=True, gathered=gathered)


def loadable_loras(pipe: DiffusionPipeline) -> set[str]:
    """Return the components whose LoRA plain diffusers can write and load for this pipeline class."""
    save = getattr(type(pipe), "save_lora_weights", None)
    parameters = inspect.signature(save).parameters if save else {}
    return {name.removesuffix("_lora_layers") for name in parameters if name.endswith("_lora_layers")}


def lora_lines(pipe: DiffusionPipeline, denoisers: dict[str, ModelMixin]) -> list[str]:
    """Return Python code that loads the LoRAs of all `denoisers` from FOLDER into `pipe` with plain diffusers."""
    loadable, denoisers = loadable_loras(pipe), with_lora(denoisers)
    others = sorted(denoisers.keys() - loadable)
    if any(not isinstance(denoisers[name], PeftAdapterMixin) for name in others):
        return ["load_lora(pipe, Path(FOLDER))"]  # `load_lora` of gerl.model.lora_files, which handles all denoisers
    lines = ["pipe.load_lora_weights(FOLDER)"] if loadable & denoisers.keys() else []
    return lines + [f"pipe.{name}.load_lora_adapter(FOLDER, prefix={name!r}, use_safetensors=True)" for name in others]


def required_and_absent(pipe: DiffusionPipeline) -> list[str]:
    """Return the components that `pipe` lacks although its class requires them: `from_pretrained` must be told."""
    signature = inspect.signature(type(pipe).__init__).parameters.values()
    required = [p.name for p in signature if p.default is inspect.Parameter.empty]
    return [name for name, component in pipe.components.items() if component is None and name in required]


def component_arguments(pipe: DiffusionPipeline, config: ModelConfig) -> list[str]:
    """Return Python arguments of `from_pretrained` for components that are left out or replaced; DTYPE: a precision."""
    absent, parts, arguments = required_and_absent(pipe), with_tokenizers(config.parts), []
    for name, component in pipe.components.items():
        if component is None and (name in parts or name in absent):
            arguments.append(f"{name}=None")
        elif (source := parts.get(name)) is not None:
            folder, kind = part_folder(name, source), type(component)
            place = repr(str(folder)) if Path(source).expanduser().exists() else repr(source)
            inside = f", subfolder={name!r}" if folder.name == name and not Path(source).expanduser().exists() else ""
            dtype = f", {DTYPE}=torch.DTYPE" if isinstance(component, torch.nn.Module) else ""
            library = kind.__module__.partition(".")[0]
            arguments.append(f"{name}={library}.{kind.__name__}.from_pretrained({place}{inside}{dtype})")
    return arguments


def replaced_scheduler(pipe: DiffusionPipeline, config: ModelConfig) -> str | None:
    """Return the class of the original scheduler of the pipeline if `pipe` has another one, else None."""
    folder = str(model_folder(config.path, config.parts)) if config.parts else resolve(config.path)
    stored = DiffusionPipeline.load_config(folder).get("scheduler", [None, None])[1]
    return None if stored in (None, type(pipe.scheduler).__name__) else str(stored)


def _checkpoint_and_compile(denoiser: ModelMixin, config: ModelConfig) -> None:
    if config.gradient_checkpointing:
        try:
            denoiser.enable_gradient_checkpointing()
        except ValueError as error:
            raise ModelError(f"model.gradient_checkpointing=true: {error}") from None
    if config.compile is not None:
        compile_blocks(denoiser, config.compile)


def weights_fingerprint(denoisers: dict[str, ModelMixin], unread: Unread | None = None) -> str:
    """Return a digest of names, shapes and some values of the base weights, which identifies the model."""
    files = unread or {}
    digest = hashlib.sha256()
    for name, p in (named for denoiser in denoisers.values() for named in denoiser.named_parameters()):
        if "lora_" not in name:
            head = files[p].leading(256) if p in files else leading_values(p, 256)
            digest.update(f"{name}{tuple(p.shape)}".encode() + head.numpy().tobytes())
    return digest.hexdigest()


# --- Teachers with a pipeline of their own: loaded beside the student's, with its noise levels


def check_teachers(teachers: Sequence[Teacher], config: ModelConfig, sampling: SamplingConfig) -> None:
    """Check the teachers before weights are loaded; those on the Hub are fetched. Raises `ModelError`."""
    folder, expected = _found(config.path, config.parts)
    kind = getattr(diffusers, expected, None) if expected is not None else None
    for teacher in teachers:
        if isinstance(kind, type) and teacher.changed:
            try:
                check_arguments(kind, sampling, **teacher.changed)
            except ModelError as error:
                raise ModelError(f"{NAME}: {error}") from None
        if teacher.path is not None:
            try:
                class_name = _found(teacher.path)[1]
            except ModelError as error:
                raise ModelError(in_teachers(str(error), f"path={teacher.path!r}")) from None
            _check_class(teacher.path, class_name, expected)
    if any(teacher.lora is not None for teacher in teachers) and folder is not None:
        models = skeletons(folder)
        if models is not None:  # otherwise only its custom code can build them
            read_teachers(teachers, denoisers_among(models))


def _found(path: str, parts: Parts = NO_PARTS) -> tuple[str | None, str | None]:
    """Return the folder of a pipeline and its class name, as far as known."""
    if isinstance(offered := pipeline(path), DiffusionPipeline):
        return None, type(offered).__name__
    folder = str(model_folder(path, parts))
    name = DiffusionPipeline.load_config(folder)["_class_name"]
    return folder, name if isinstance(name, str) else None


def _check_class(path: str, class_name: str | None, expected: str | None) -> None:
    if class_name != expected and None not in (class_name, expected):
        raise ModelError(
            f"{NAME}: path={path!r} is a {class_name}, and the student a {expected}: a teacher takes the student's "
            "steps, so use one of the same class with the same latents"
        )


def load_teachers(policy: Policy, config: ModelConfig, device: str, mesh: DeviceMesh | None) -> None:
    """Load and log the pipelines of `policy`'s teachers, each once; `mesh`: as for `load_policy`."""
    paths = dict.fromkeys(t.teacher.path for t in policy.teachers if t.teacher.path is not None)
    pipes = {path: load_teacher(path, config, policy.pipe, device, mesh) for path in paths}
    policy.teachers = [t if t.teacher.path is None else replace(t, pipe=pipes[t.teacher.path]) for t in policy.teachers]
    for t in policy.teachers:
        logger.info("teacher: %s", t.teacher)
    if config.merge_lora and any(t.adapter for t in policy.teachers):
        logger.info("teacher LoRAs are applied on top of the base model, into which %s is merged", config.lora)


def load_teacher(
    path: str, config: ModelConfig, student: DiffusionPipeline, device: str, mesh: DeviceMesh | None
) -> DiffusionPipeline:
    """Load a teacher with the student's `config` and noise levels. Raises `ModelError` if it differs in kind."""
    try:
        settings = replace(config, path=path, parts={}, lora=None, merge_lora=False, train="lora", compile=None)
        pipe = load_pipeline(settings, device, to_shard=mesh is not None)
    except ModelError as error:
        raise ModelError(in_teachers(str(error), f"path={path!r}")) from None
    _check_class(path, type(pipe).__name__, type(student).__name__)
    scheduler, expected = pipe.scheduler, student.scheduler
    for name in ("prediction_type", "sigma_data"):
        values = scheduler.config.get(name), expected.config.get(name)
        if values[0] != values[1]:
            raise ModelError(
                f"{NAME}: path={path!r} has a scheduler with {name}={values[0]}, and the student's has "
                f"{values[1]}: their predictions differ in kind, use another teacher"
            )
    # the student's scheduler: the latents have the student's noise levels
    pipe.scheduler = copy.deepcopy(expected)
    if mesh is not None:
        parts = sharded_components(pipe, find_denoisers(pipe), config.shard)
        shard(parts, set(), mesh, on_cpu=config.offload == "blocks")
    return pipe

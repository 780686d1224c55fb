"""Components, memory and work of a run, independent of the hardware: traced on shapes without values, or recorded."""

import importlib
import inspect
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
import yaml
from diffusers import DiffusionPipeline, ModelMixin
from huggingface_hub import try_to_load_from_cache
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from gerl.algorithms import batches_of, build_algorithm, count_pairs
from gerl.commandline.composition import compose_run, shipped
from gerl.config import Config
from gerl.config.algorithms import Teacher
from gerl.config.bounded_text import read_json
from gerl.data.sources import may_have_pictures
from gerl.engine.hooks import count_evaluations
from gerl.errors import GerlError, ModelError, causes
from gerl.model.denoisers import default_dtype, find_denoisers
from gerl.model.hub import model_folder
from gerl.model.loading import prepare
from gerl.model.lora import ADAPTER, add_lora, targets_of
from gerl.model.parts import NO_PARTS, Parts, with_tokenizers
from gerl.model.paths import INDEX, resolve
from gerl.model.policy import EMA, Policy, chosen, parameters_of
from gerl.model.quantization import stored_bytes
from gerl.model.sharding import layers, repeated_blocks
from gerl.model.teachers import TeacherModel, add_fake, fake_parameters, in_teachers
from gerl.preflight.bench import TEXT, Bench, picture_names, with_pictures
from gerl.preflight.findings import rows_of
from gerl.preflight.sizing.shape_simulator import Picture, Stage, Tally, Tokens
from gerl.protocol import Prompt, RolloutTask
from gerl.trainer.extensions.kl_in_reward import kl_to_base
from gerl.workers.actor import Actor
from gerl.workers.rollout import Rollout
from gerl.workers.setup import without_decoder
from gerl.workers.worker import PolicyWorker

logger = logging.getLogger("gerl")
FP32 = 4  # bytes
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)  # torch: an operation needs values


@dataclass(frozen=True)
class Weights:
    """Size of frozen weights: total bytes, and the elements, rows and bytes of linear layers."""

    total: int = 0
    elements: int = 0
    rows: int = 0
    linear: int = 0

    def __sub__(self, other: "Weights") -> "Weights":
        return Weights(*(mine - its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Part:
    """A component of the pipeline. `block`: the largest of its repeated blocks; `root`: weights outside of blocks."""

    name: str
    kind: str  # denoiser, encoder or decoder
    weights: Weights
    block: Weights
    root: Weights
    largest: int  # elements of the largest linear layer
    whole: int  # bytes that every rank holds even if the component is sharded
    masters: int = 0  # bytes of its fp32 weights under full fine-tuning; otherwise 0


@dataclass
class Facts:
    """Bytes and floating-point operations of a configuration; activations are of its micro-batches."""

    model: str
    pipeline: str
    algorithm: str
    dtype: str
    unit: str  # image or video
    images: int  # in the micro-batch
    sampled: int  # rows denoised together
    trained: int  # rows of a forward and backward pass
    parts: list[Part]
    lora: int  # trained parameters, of a LoRA or of the denoisers
    averages: int  # copies of them: EMA, old and sampling policies, teacher LoRAs, the base model if stored separately
    swapped: bool  # whether the rollout uses a copy of the weights while the trained ones are kept
    tape: float  # bytes per image
    rollout: Tally = field(default_factory=Tally)
    updates: dict[bool, Tally] = field(default_factory=dict)  # key: gradient checkpointing

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Facts":
        """Restore facts from the JSON of `dataclasses.asdict`."""
        parts = [Part(**p | {k: Weights(**p[k]) for k in ("weights", "block", "root")}) for p in values["parts"]]
        updates = {on == "true": Tally(**tally) for on, tally in values["updates"].items()}
        return cls(**values | {"parts": parts, "rollout": Tally(**values["rollout"]), "updates": updates})

    @property
    def whole(self) -> bool:
        """Whether the denoisers' weights are trained (full fine-tuning)."""
        return any(part.masters for part in self.parts)

    def flops(self, checkpointing: bool) -> float:
        """Return the operations per image: sampling, decoding and training."""
        return (self.rollout.total + self.updates[checkpointing].total) / self.images


def find_facts(config: Config, folder: Path, dtype: torch.dtype = torch.bfloat16, both: bool = True) -> Facts:
    """Sample and train a micro-batch of `config` on shapes, with synthetic images in `folder`.

    `both`: with and without gradient checkpointing. Raises `ModelError` for a model that does not run on shapes.
    """
    stage, start = Stage(), time.perf_counter()
    worker = PolicyWorker(config, 0, "cpu", torch.get_num_threads(), 1)
    policy = worker.policy = build_policy(config, dtype, stage)
    worker.evaluations, pipe = count_evaluations(policy.denoisers.values()), policy.pipe
    with _on_shapes(pipe):
        worker.algorithm = build_algorithm(config)
        worker.rollout = Rollout(policy, config.sampling, config.validation)
        without_decoder(worker.algorithm)
        worker.actor = Actor(worker.policy, config.actor, worker.algorithm, 1)
        pictures = picture_names(pipe, may_have_pictures(config.data))
        prompt = with_pictures(Prompt(0, TEXT), pictures, folder, config)
        task = Bench(worker, prompt).task(worker.algorithm)
        stage.phase = "rollout"
        able = all(getattr(d, "_supports_gradient_checkpointing", False) for d in policy.denoisers.values())
        checkpointing = [False, True][: 1 + able] if both else [config.model.gradient_checkpointing]

        def begin(number: int, what: str) -> None:  # each pass takes seconds to minutes
            logger.info(
                "%d of %d: %s (%.0f s so far)", number, 2 + len(checkpointing), what, time.perf_counter() - start
            )

        begin(1, "rollout, to find the structure of the pipeline")
        worker.sample(task)
        stage.tallies["rollout"].restart()  # the first call also explores the structure of the pipeline
        begin(2, "rollout, measured")
        images = worker.sample(task)
        for p in policy.trained.values():
            p.grad = torch.zeros_like(p)
            stage.ledger.leave_out(p.grad)
        updates = {}
        for number, on in enumerate(checkpointing, 3):
            begin(number, f"update, {'with' if on else 'without'} gradient checkpointing")
            updates[on] = _update(worker, task, stage, on)
    trained = [segment for segment in task.segments if segment.trained]
    sampled, count = worker.trajectories[task.id], len(task.samples)
    base = policy.reference
    stored_base = base is not None and base.on_device and not policy.reference_moves
    loras = {teacher.lora for teacher in config.algorithm.needs.teachers}  # assumed to be as large as the trained one
    return Facts(
        config.model.path,
        type(pipe).__name__,
        config.algorithm.name,
        str(dtype).removeprefix("torch."),
        "image" if images.pixels.ndim == 4 else "video",
        count,
        rows_of(task.segments),
        min(config.actor.micro_batch_size or config.rollout.micro_batch_size, rows_of(trained)),
        parts_of(policy),
        sum(p.numel() for p in policy.trained.values()),
        len(policy.averages()) + stored_base + len(loras - {None}),
        policy.sampler is not None or policy.old is not None,
        sampled.nbytes / count,
        stage.tallies["rollout"],
        updates,
    )


def parts_of(policy: Policy) -> list[Part]:
    """Return the components of the pipeline, and of teachers with a separate pipeline, each pipeline once."""
    teachers = {f" of {t.teacher.path}": t.pipe for t in policy.teachers if t.pipe is not None}
    return [
        part_of(f"{name}{teacher}", c, name in policy.denoisers, policy.whole and not teacher)
        for teacher, pipe in {"": policy.pipe, **teachers}.items()
        for name, c in pipe.components.items()
        if isinstance(c, torch.nn.Module)
    ]


def _update(worker: PolicyWorker, task: RolloutTask, stage: Stage, checkpointing: bool) -> Tally:
    config = worker.config
    for denoiser in worker.policy.denoisers.values():
        if checkpointing:
            denoiser.enable_gradient_checkpointing()
    stage.phase = f"update, gradient_checkpointing={checkpointing}"
    credit = torch.ones(len(task.samples), config.sampling.num_inference_steps)
    credit[1::2] = -1.0
    worker.policy.old_is_current = False
    if config.algorithm.subtracts_kl and config.has_kl:
        kl_to_base(worker, task.id)
    pooled = worker.pool({task.id: credit}) if worker.algorithm.pools else None
    batches = batches_of(worker.trajectories[task.id], credit, pooled)
    worker.actor.accumulate(batches, count_pairs([(task, credit)]))
    return stage.tallies[stage.phase]


@contextmanager
def _on_shapes(pipe: DiffusionPipeline) -> Iterator[None]:
    kind = type(pipe).__name__
    try:
        yield
    except (GerlError, AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if dependent := next((e for e in causes(error) if isinstance(e, NEEDS_VALUES)), None):
            raise ModelError(
                f"{kind} cannot be sized: its computation depends on the values of its activations "
                f"({dependent.func}), which do not exist without weights; use a preflight without hardware, which "
                "loads them"
            ) from error
        if isinstance(error, GerlError):
            raise
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(f"{kind} cannot be sized, since it does not run without weights: {first}") from error


def part_of(name: str, component: torch.nn.Module, denoises: bool, trained: bool = False) -> Part:
    """Return the weights of a component without its LoRA; `trained`: whether denoisers are trained fully."""
    blocks = repeated_blocks(component)
    root = _weights(component, {id(p) for block in blocks for p in block.parameters()})
    apart = 0 if denoises else sum(_weights(layer).total for layer in layers(component, blocks))
    return Part(
        name,
        "denoiser" if denoises else "decoder" if hasattr(component, "decode") else "encoder",
        _weights(component),
        max(map(_weights, blocks), key=lambda w: w.total, default=Weights()),
        root,
        max((p.numel() for _, p in _linear(component)), default=0),
        0 if denoises else root.total - apart,
        sum(p.numel() for p in component.parameters()) * FP32 if denoises and trained else 0,
    )


def _linear(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and ".lora_" not in f".{name}":
            yield name, layer.weight


def _weights(module: torch.nn.Module, leave_out: frozenset[int] | set[int] = frozenset()) -> Weights:
    frozen = {id(p): p for name, p in module.named_parameters() if f".{ADAPTER}." not in name}
    counted = {key: p for key, p in frozen.items() if key not in leave_out}
    linear = {id(p): p for _, p in _linear(module) if id(p) in counted}
    buffers = sum(map(stored_bytes, module.buffers())) if not leave_out else 0
    return Weights(
        sum(map(stored_bytes, counted.values())) + buffers,
        sum(p.numel() for p in linear.values()),
        sum(p.shape[0] for p in linear.values()),
        sum(map(stored_bytes, linear.values())),
    )


# --- A pipeline of real size without weights, from configurations in a folder, the Hub cache, or gerl's record

RECORD = "architectures.yaml"  # in gerl/assets


@cache
def architectures() -> dict[str, Any]:
    """Return the recorded architectures: `models` of the Hub, and `parts` that several of them share."""
    values = yaml.safe_load((resources.files("gerl") / "assets" / RECORD).read_text(encoding="utf-8"))
    assert isinstance(values, dict)
    return values


def named_on_record(path: str) -> str:
    """Return the Hub id under which the model of `path` is recorded; `path` itself if a folder or unknown."""
    also = {model["also"]: name for name, model in architectures()["models"].items() if "also" in model}
    return path if Path(path).is_dir() else also.get(path, path)


def build_pipeline(path: str, dtype: torch.dtype, device: str = "meta", parts: Parts = NO_PARTS) -> DiffusionPipeline:
    """Build the pipeline of `path`, on `meta` without weights, else with random ones; raises `ModelError`."""
    path = named_on_record(path)
    source = resolve(path)
    folder = Path(source) if Path(source).is_dir() else _cached(source)
    if folder is None and path not in (models := architectures()["models"]):
        raise ModelError(
            f"model.path={path!r} is not in the Hub cache, and its architecture is not known "
            f"({', '.join(models)}): set model.path to a folder with its model_index.json and the "
            "config.json of every component"
        )
    try:
        if folder is None:
            pipe = _from_record(
                path, dtype, device, [name for name, part in with_tokenizers(parts).items() if part is None]
            )
        else:
            pipe = _from_folder(model_folder(str(folder), parts), dtype, device)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(
            f"model.path={path!r} cannot be sized, since it cannot be built without weights: {first}"
        ) from error
    prepare(pipe, half=dtype != torch.float32)
    return pipe


def build_policy(config: Config, dtype: torch.dtype, stage: Stage | None) -> Policy:
    """Build the policy like `load_policy`, but of shapes that run on `stage`; if None, of random weights."""
    model, device = config.model, "meta" if stage is not None else "cpu"
    pipe = build_pipeline(model.path, dtype, device, model.parts)
    denoisers, whole = find_denoisers(pipe), model.train != "lora"
    targets = {} if whole else targets_of(denoisers, model.lora_targets)
    with torch.device(device):
        for name, denoiser in denoisers.items():
            denoiser.requires_grad_(False)
            if name in targets:
                add_lora(denoiser, model.lora_rank, model.lora_alpha, targets[name], 0)
        if config.algorithm.needs.imitation:
            add_fake(denoisers, 1.0, device, 0)
    if whole:
        for p in parameters_of(denoisers, chosen(model.train, denoisers)).values():
            p.requires_grad_()
    if stage is not None:
        stage.put_on(pipe)
    trained = {
        f"{name}.{key}": p
        for name, denoiser in denoisers.items()
        for key, p in denoiser.named_parameters()
        if p.requires_grad
    }
    trained |= fake_parameters(denoisers)
    policy = Policy(pipe, denoisers, trained, EMA(trained, config.actor.ema_decay), whole=whole)
    policy.teachers = [_teacher(teacher, dtype, device, stage) for teacher in config.algorithm.needs.teachers]
    return policy


def _teacher(teacher: Teacher, dtype: torch.dtype, device: str, stage: Stage | None) -> TeacherModel:
    """Build a teacher of shapes; the trained LoRA stands in for the teacher's LoRA."""
    if teacher.path is None:
        return TeacherModel(teacher, None if teacher.is_base else ADAPTER)
    try:
        pipe = build_pipeline(teacher.path, dtype, device)
    except ModelError as error:
        raise ModelError(in_teachers(str(error), f"path={teacher.path!r}")) from None
    if stage is not None:
        stage.put_on(pipe)
    return TeacherModel(teacher, pipe=pipe)


def _cached(path: str) -> Path | None:
    index = try_to_load_from_cache(path, INDEX)
    if not isinstance(index, str):
        return None
    folder = Path(index).parent
    parts = [name for name, value in read_json(Path(index)).items() if _is_component(value)]
    return folder if all((folder / name).is_dir() for name in parts) else None


def _is_component(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _from_folder(folder: Path, dtype: torch.dtype, device: str) -> DiffusionPipeline:
    index = read_json(folder / INDEX)
    if not isinstance(index["_class_name"], str):
        raise ValueError("its pipeline is custom code")
    components: dict[str, Any] = {}
    for name, value in index.items():
        if _is_component(value):
            kind = _class(".".join(value))
            if issubclass(kind, torch.nn.Module):
                config = read_json(folder / name / "config.json")
                components[name] = _module(kind, config, dtype, device)
            else:
                components[name] = kind.from_pretrained(folder / name)  # type: ignore[attr-defined]
        elif not name.startswith("_"):
            components[name] = None if value == [None, None] else value
    return _assembled(getattr(diffusers, index["_class_name"]), components)


def _from_record(path: str, dtype: torch.dtype, device: str, absent: Sequence[str] = ()) -> DiffusionPipeline:
    record = architectures()
    model = record["models"][path]
    components: dict[str, Any] = {}
    for name, value in model["components"].items():
        part = record["parts"][value] if isinstance(value, str) else value
        if isinstance(part, dict) and "tokens" in part:
            picture = Picture(**part["picture"]) if "picture" in part else None
            components[name] = Tokens(part["tokens"], part.get("end", 2), picture)
        elif isinstance(part, dict):
            components[name] = build_part(part, dtype, device)
        else:
            components[name] = part
    components |= {name: None for name in absent if name in components}
    return _assembled(getattr(diffusers, model["pipeline"]), components)


def build_part(part: Mapping[str, Any], dtype: torch.dtype, device: str) -> Any:
    """Build a recorded component from its class and configuration."""
    kind, config = _class(part["class"]), part["config"]
    return _module(kind, config, dtype, device) if issubclass(kind, torch.nn.Module) else kind(**config)


def _assembled(kind: type[DiffusionPipeline], components: Mapping[str, Any]) -> DiffusionPipeline:
    accepted = inspect.signature(kind.__init__).parameters
    return kind(**{name: value for name, value in components.items() if name in accepted})


def _class(name: str) -> type:
    library, _, kind = name.rpartition(".")
    module = importlib.import_module(library) if library in ("diffusers", "transformers") else None
    cls = getattr(module or diffusers, kind, None) or getattr(transformers, kind, None)
    if cls is None:
        cls = getattr(importlib.import_module(f"diffusers.pipelines.{library}"), kind)
    assert isinstance(cls, type)
    return cls


def _module(kind: Any, config: dict[str, Any], dtype: torch.dtype, device: str) -> torch.nn.Module:
    with torch.device(device), default_dtype(dtype):
        if issubclass(kind, ModelMixin):
            module: torch.nn.Module = kind.from_config({k: v for k, v in config.items() if not k.startswith("_")})
            in_fp32 = kind._keep_in_fp32_modules or []
        else:
            settings = kind.config_class(**{k: v for k, v in config.items() if k not in ("torch_dtype", "dtype")})
            module = kind(settings)
            in_fp32 = getattr(module, "_keep_in_fp32_modules_strict", None) or []
            if dtype == torch.float16:
                in_fp32 = [*in_fp32, *(getattr(module, "_keep_in_fp32_modules", None) or [])]
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():  # also tables of positions, which are computed in fp32
            tensor.data = tensor.data.to(torch.float32 if any(part in name.split(".") for part in in_fp32) else dtype)
    return module


# --- Recorded facts of the shipped recipes, so that sizing them needs no tracing

FOLDER = "sizing"  # in gerl/assets; written by benchmarks/sizing.py
# keys that do not affect the facts: they set the layout, or are not used in a rollout or an update
LAYOUT = ("quantize", "quantize_encoders", "shard", "offload")
OTHERS = ("cluster", "data", "trainer", "validation", "logger", "checkpoint", "reward")


def recorded(config: Config) -> tuple[str, Facts] | None:
    """Return the recipe with the same facts as `config`, and these facts; None if no recipe matches."""
    wanted = _relevant(config)
    for name in shipped("experiment"):
        file = resources.files("gerl") / "assets" / FOLDER / f"{name}.json"
        if file.is_file() and (recipe := compose_run([f"experiment={name}"]).config).model.path == config.model.path:
            values = json.loads(file.read_text(encoding="utf-8"))
            if "refused" not in values and _relevant(recipe) == wanted:
                return name, Facts.from_json(values)
    return None


def _relevant(config: Config) -> dict[str, Any]:
    """Return the values that the facts depend on; of the data, whether prompts may have condition images."""
    values = {block: keys for block, keys in asdict(config).items() if block not in OTHERS}
    values["model"] = {key: value for key, value in values["model"].items() if key not in LAYOUT}
    values["rollout"] = {k: v for k, v in values["rollout"].items() if k not in ("n", "prompts_per_step")}
    return values | {"pictures": may_have_pictures(config.data)}

"""Parts, memory and work of a run, whatever it runs on: found by drawing and training a micro-batch on shapes."""

import inspect
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from gerl.algorithms import batches_of, build_algorithm, count_pairs
from gerl.config import Config
from gerl.config.algorithms import Teacher
from gerl.data.sources import may_have_pictures
from gerl.errors import GerlError, ModelError
from gerl.model.lora import ADAPTER
from gerl.model.policy import Policy
from gerl.model.quantization import stored_bytes
from gerl.model.sharding import layers, repeated_blocks
from gerl.preflight.bench import TEXT, Bench, with_pictures
from gerl.preflight.forecast import rows_of
from gerl.preflight.sizing.build import build_policy
from gerl.preflight.sizing.stage import Stage, Tally
from gerl.protocol import Prompt, RolloutTask
from gerl.trainer.extensions.kl_in_reward import kl_to_base
from gerl.utils.condition_images import COLUMNS
from gerl.workers.actor import Actor
from gerl.workers.rollout import Rollout
from gerl.workers.setup import without_decoder
from gerl.workers.worker import PolicyWorker

logger = logging.getLogger("gerl")
FP32 = 4  # bytes
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)  # of torch: what a shape cannot tell


@dataclass(frozen=True)
class Weights:
    """Frozen weights of a part of a model: all bytes, and of its linear layers elements, rows and bytes."""

    total: int = 0
    elements: int = 0
    rows: int = 0
    linear: int = 0


@dataclass(frozen=True)
class Part:
    """A component of the pipeline. `block`: the largest of its repeated blocks; `root`: what is outside of these."""

    name: str
    kind: str  # denoiser, encoder or decoder
    weights: Weights
    block: Weights
    root: Weights
    largest: int  # elements of the largest linear layer
    whole: int  # bytes that every rank has, even if it is sharded
    masters: int = 0  # bytes of all its weights in fp32, if it is trained itself; 0: a LoRA is, or nothing


@dataclass
class Facts:
    """Bytes and floating-point operations of a configuration; those of activations are of its micro-batches."""

    model: str
    pipeline: str
    algorithm: str
    dtype: str
    unit: str  # image or video
    images: int  # of the micro-batch
    drawn: int  # rows that are denoised together
    trained: int  # rows of a forward and backward
    parts: list[Part]
    lora: int  # parameters that are trained, of a LoRA or of the denoisers themselves
    averages: (
        int  # copies of them: EMA, old and sampling policies, LoRAs that teach, the base model if it has no other place
    )
    swapped: bool  # the rollout puts others in the place of the trained ones, which are kept meanwhile
    tape: float  # bytes an image
    rollout: Tally = field(default_factory=Tally)
    updates: dict[bool, Tally] = field(default_factory=dict)  # by gradient checkpointing

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Facts":
        """As `dataclasses.asdict` has written it."""
        parts = [
            Part(**p | {name: Weights(**p[name]) for name in ("weights", "block", "root")}) for p in values["parts"]
        ]
        updates = {on == "true": Tally(**tally) for on, tally in values["updates"].items()}
        return cls(**values | {"parts": parts, "rollout": Tally(**values["rollout"]), "updates": updates})

    @property
    def whole(self) -> bool:
        """Whether weights of the denoisers themselves are trained."""
        return any(part.masters for part in self.parts)

    def trained_bytes(self) -> int:
        """Of the trained weights, their gradient, two moments and the averages, all fp32.

        The weights themselves are those of the denoiser where there is no LoRA, and counted with it.
        """
        return self.lora * FP32 * (4 - self.whole + self.averages)

    def flops(self, checkpointing: bool) -> float:
        """Of an image: drawn, decoded and trained on."""
        return (self.rollout.total + self.updates[checkpointing].total) / self.images


def find_facts(config: Config, folder: Path, dtype: torch.dtype = torch.bfloat16, both: bool = True) -> Facts:
    """Draw and train a micro-batch of `config` on shapes, with gradient checkpointing and without, or as configured.

    Made-up pictures lie in `folder`. Raises `ModelError` for a model that is not known, or does not run on shapes.
    """
    stage, steps = Stage(), _Steps()
    worker = PolicyWorker(config, 0, "cpu", torch.get_num_threads(), 1)
    worker.policy = build_policy(config, dtype, stage)
    pipe = worker.policy.pipe
    with _on_shapes(pipe):
        worker.rollout = Rollout(worker.policy, config.sampling, config.validation)
        worker.algorithm = build_algorithm(config)
        without_decoder(worker.algorithm)
        worker.actor = Actor(worker.policy, config.actor, worker.algorithm, 1)
        task = Bench(worker, _prompt(pipe, config, folder)).task(worker.algorithm)
        stage.phase = "rollout"
        ways = _ways(worker, both)
        steps.begin("rollout, to find the structure of the pipeline", 2 + len(ways))
        worker.sample(task)
        stage.tallies["rollout"].restart()  # the first one looked at the pipeline's structure as well
        steps.begin("rollout, measured")
        images = worker.sample(task)
        for p in worker.policy.trained.values():
            p.grad = torch.zeros_like(p)
            stage.ledger.leave_out(p.grad)
        updates = {}
        for on in ways:
            steps.begin(f"update, {'with' if on else 'without'} gradient checkpointing")
            updates[on] = _update(worker, task, stage, on)
    trained = [segment for segment in task.segments if segment.trained]
    drawn, count = worker.trajectories[task.id], len(task.samples)
    return Facts(
        config.model.path,
        type(pipe).__name__,
        config.algorithm.name,
        str(dtype).removeprefix("torch."),
        "image" if images.pixels.ndim == 4 else "video",
        count,
        rows_of(task.segments),
        min(config.actor.micro_batch_size or config.rollout.micro_batch_size, rows_of(trained)),
        [
            part_of(name, c, name in worker.policy.denoisers, worker.policy.whole)
            for name, c in pipe.components.items()
            if _is_module(c)
        ]
        + teachers_parts(worker.policy),
        sum(p.numel() for p in worker.policy.trained.values()),
        len(worker.policy.averages())
        + (worker.policy.reference is not None and not worker.policy.reference_moves)
        + count_loras(config.algorithm.taught_by),
        worker.policy.sampler is not None or worker.policy.old is not None,
        drawn.nbytes / count,
        stage.tallies["rollout"],
        updates,
    )


class _Steps:
    """Log each pass on fake tensors, which takes seconds to minutes."""

    def __init__(self) -> None:
        self.done, self.total, self.start = 0, 0, time.perf_counter()

    def begin(self, what: str, total: int = 0) -> None:
        self.done, self.total = self.done + 1, total or self.total
        logger.info("%d of %d: %s (%.0f s so far)", self.done, self.total, what, time.perf_counter() - self.start)


def teachers_parts(policy: Policy) -> list[Part]:
    """The weights of the teachers that are pipelines of their own, each once."""
    pipes = {t.teacher.path: t.pipe for t in policy.teachers if t.pipe is not None}
    return [
        part_of(f"{name} of {path}", c, name in policy.denoisers)
        for path, pipe in pipes.items()
        for name, c in pipe.components.items()
        if _is_module(c)
    ]


def count_loras(teachers: Sequence[Teacher]) -> int:
    """How many LoRAs teach, which are taken to be as large as the trained one."""
    return len({teacher.lora for teacher in teachers if teacher.lora is not None})


def _prompt(pipe: DiffusionPipeline, config: Config, folder: Path) -> Prompt:
    """A prompt, with the pictures that the pipeline needs, or that the file of prompts has room for."""
    accepted = inspect.signature(type(pipe).__call__).parameters
    pictured = may_have_pictures(config.data)
    needed = inspect.Parameter.empty
    names = [name for name in COLUMNS if name in accepted and (pictured or accepted[name].default is needed)]
    return with_pictures(Prompt(0, TEXT), names, folder, config)


def _ways(worker: PolicyWorker, both: bool) -> list[bool]:
    """Without gradient checkpointing, and with it where the denoisers can."""
    if not both:
        return [worker.config.model.gradient_checkpointing]
    able = all(getattr(d, "_supports_gradient_checkpointing", False) for d in worker.policy.denoisers.values())
    return [False, True] if able else [False]


def _update(worker: PolicyWorker, task: RolloutTask, stage: Stage, checkpointing: bool) -> Tally:
    """The gradient of a micro-batch, with the passes before it that the algorithm makes."""
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
        if dependent := next((e for e in _causes(error) if isinstance(e, NEEDS_VALUES)), None):
            raise ModelError(
                f"{kind} cannot be sized: its computation depends on the values of its activations "
                f"({dependent.func}), which do not exist without weights; use a preflight without hardware, which "
                "loads them"
            ) from error
        if isinstance(error, GerlError):
            raise
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(f"{kind} cannot be sized, since it does not run without weights: {first}") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_module(component: object) -> bool:
    return isinstance(component, torch.nn.Module)


def part_of(name: str, component: torch.nn.Module, denoises: bool, trained: bool = False) -> Part:
    """The weights of the component `name` of a pipeline, its LoRA aside; `trained`: those of denoisers are."""
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
    """The weights of `module`, its LoRA aside."""
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

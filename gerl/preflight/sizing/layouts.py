"""Layouts of a model on GPUs: memory of a rank, time, and the cheapest layout that fits.

Predicted weights on a GPU:

* sharded over G ranks: 1/G of a component; while it runs, also its weights outside of blocks and two whole blocks, one
  of them prefetched; reshard=false: the whole denoiser. Encoder weights that cannot be sharded are on every rank;
* quantised: the linear layers of the repeated blocks, sized by `quantised_bytes`, the largest one also in bf16 while
  it runs;
* offload=encoders: text encoders and VAE only while they run, one at a time. offload=blocks: also one denoiser block
  at a time; of a sharded component only the running blocks, of which each rank uploads its part.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from gerl.config.blocks import Quantisation
from gerl.model.quantization import quantised_bytes
from gerl.preflight.findings import SPARE
from gerl.preflight.sizing.facts import FP32, Facts, Part, Weights
from gerl.preflight.sizing.hardware import Gpu
from gerl.workers.recovery import BYTES, LARGEST

SHARDS = ("none", "denoiser", "all")
# (denoiser, encoders), in order of preference
QUANTIZED: tuple[tuple[Quantisation, Quantisation], ...] = (
    ("none", "none"), ("none", "int8"), ("int8", "int8"), ("fp8", "fp8"), ("nf4", "nf4"),
)  # fmt: skip
OFFLOADS = ("none", "encoders", "blocks")
GROUPS = (1, 2, 4, 8)  # ranks per worker
HALF = 2  # bytes of a weight in computation


@dataclass(frozen=True)
class Layout:
    """Placement and precision of weights, by configuration key; `ranks` is cluster.ranks_per_worker."""

    ranks: int = 1
    shard: str = "none"
    quantize: Quantisation = "none"
    quantize_encoders: Quantisation = "none"
    checkpointing: bool = True
    offload: str = "none"
    reshard: bool = True

    def keys(self) -> str:
        """Return the command-line keys: gradient checkpointing, and all that differ from the default."""
        values = {
            "cluster.ranks_per_worker": (self.ranks, 1),
            "model.shard": (self.shard, "none"),
            "model.quantize": (self.quantize, "none"),
            "model.quantize_encoders": (self.quantize_encoders, "none"),
            "model.offload": (self.offload, "none"),
        }
        words = [f"{key}={value}" for key, (value, default) in values.items() if value != default]
        words += [] if self.reshard else ["model.reshard=false"]
        return " ".join([*words, f"model.gradient_checkpointing={str(self.checkpointing).lower()}"])

    def is_sharded(self, part: Part) -> bool:
        """Whether a rank holds only its shard of `part`."""
        return part.kind in {"none": (), "denoiser": ("denoiser",), "all": ("denoiser", "encoder")}[self.shard]

    def is_gathered(self, part: Part) -> bool:
        """Whether block weights of `part` are materialised while they run, from shards or fp32 masters."""
        return self.is_sharded(part) or part.masters > part.weights.total

    def reduced(self, part: Part) -> float:
        """Return the bytes of a block's gradients during the reduction: in the computing dtype, and in fp32."""
        if not part.masters or not self.is_gathered(part):
            return 0.0
        return part.block.total * (1 + part.masters / part.weights.total)

    def is_away(self, part: Part) -> bool:
        """Whether `part` is on the GPU only while it runs."""
        return self.offload != "none" and part.kind != "denoiser" and not self.is_sharded(part)

    def kind(self, part: Part) -> Quantisation:
        """Return the quantisation of the linear layers of the blocks of `part`."""
        return {"denoiser": self.quantize, "encoder": self.quantize_encoders}.get(part.kind, "none")

    def size(self, part: Part) -> float:
        """Return the bytes of the whole `part`."""
        return part.root.total + self._stored(part, part.weights - part.root)

    def computing(self, part: Part, blocks: int) -> float:
        """Return the bytes of the weights of `part` outside of its blocks plus `blocks` blocks."""
        return part.root.total + blocks * self._stored(part, part.block)

    def _stored(self, part: Part, w: Weights) -> float:
        kind = self.kind(part)
        return w.total if kind == "none" else w.total - w.linear + quantised_bytes(kind, w.elements, w.rows)

    def held(self, part: Part) -> float:
        """Return the bytes of `part` that stay on a rank."""
        if self.is_away(part):
            return 0.0
        size, on_cpu = self.size(part), self.offload == "blocks"
        if part.masters:
            return part.masters / (self.ranks if self.is_sharded(part) else 1)
        if self.is_sharded(part):
            return part.whole + (0.0 if on_cpu else (size - part.whole) / self.ranks)
        return self.computing(part, 1) if on_cpu else size

    def kept(self, part: Part) -> float:
        """Return the bytes of gathered weights of `part` that stay after its forward pass."""
        if self.reshard or part.kind != "denoiser" or not self.is_gathered(part):
            return 0.0
        return self.size(part) - part.whole

    def fetched(self, part: Part) -> float:
        """Return the additional bytes of weights while `part` runs."""
        came = self.size(part) if self.is_away(part) else 0.0
        if self.is_gathered(part) and not self.kept(part):
            gathered = self.computing(part, 2) - part.whole
            came += gathered + (gathered / self.ranks if self.offload == "blocks" else 0.0)
        return came + (part.largest * HALF if self.kind(part) != "none" else 0)


@dataclass(frozen=True)
class Batch:
    """Images on a rank: per micro-batch of the rollout and of the update, and per trainer step."""

    rollout: int
    actor: int
    step: float


@dataclass(frozen=True)
class Memory:
    """Memory of a rank in bytes. `phases`: the peak of each phase, including resident memory."""

    weights: float
    lora: float
    tape: float
    phases: dict[str, float]
    activations: dict[str, float]

    @property
    def peak(self) -> float:
        """Peak over all phases."""
        return max(self.phases.values())


def memory(facts: Facts, layout: Layout, batch: Batch) -> Memory:
    """Return the memory of a rank."""
    weights, tape = sum(layout.held(p) for p in facts.parts), facts.tape * batch.step
    trained = facts.lora / (layout.ranks if facts.whole and layout.shard != "none" else 1)  # on a rank
    # trained weights (if not the denoiser's own), gradient, moments and averages
    lora, swapped = trained * FP32 * (4 - facts.whole + facts.averages), trained * FP32 * facts.swapped
    weights_held = sum(layout.kept(part) for part in facts.parts)
    phases: dict[str, float] = {}
    activations: dict[str, float] = {}
    for part in facts.parts:
        name = {"encoder": "encode", "denoiser": "rollout", "decoder": "decode"}[part.kind]
        alive = facts.rollout.peaks.get(part.name, 0) * batch.rollout / facts.sampled
        there = weights_held + layout.fetched(part) + alive + swapped
        if there > phases.get(name, 0.0):
            phases[name], activations[name] = there, alive
        alive = facts.updates[layout.checkpointing].peaks.get(part.name, 0) * batch.actor / facts.trained
        there = weights_held + layout.fetched(part) + alive + swapped + layout.reduced(part)
        if part.kind == "denoiser" and there > phases.get("update", 0.0):
            phases["update"], activations["update"] = there, alive
    phases["optimizer"] = trained * FP32  # flat gradient for the all-reduce
    resident = weights + lora + tape
    return Memory(weights, lora, tape, {name: resident + value for name, value in phases.items()}, activations)


# Main memory of processes without model, optimizer or images (RAY: all services), from benchmarks/real_size.py
DRIVER, WORKER, SCORER, RAY = 0.3e9, 0.45e9, 0.3e9, 0.2e9


@dataclass(frozen=True)
class MainMemory:
    """Main memory of a machine in bytes, without the models of scorers.

    `first`: the worker that sends its state to the driver; `worker`, `scorer`: each of the others. `mapped`: pages of
    the weights' files, which all workers share and the system can drop once they are on a GPU. `checkpoint`: on disk.
    """

    driver: float
    workers: int
    first: float
    worker: float
    scorers: int
    scorer: float
    ray: float  # its services
    store: float
    mapped: float
    checkpoint: float
    total: float


def main_memory(
    facts: Facts, layout: Layout, batch: Batch, workers: int, scorers: int, on_cpu: bool = False
) -> MainMemory:
    """Return the main memory of a machine with so many processes; `on_cpu`: they compute in it."""
    ranks = layout.ranks if facts.whole and layout.shard != "none" else 1
    state = facts.lora * FP32 * (3 + facts.averages) / ranks  # weights, two moments and averages
    sent = 0.0 if facts.whole else state + facts.lora * FP32  # and a file of the LoRA
    weights = sum(layout.size(part) for part in facts.parts)
    held, working, taken = state, 0.0, memory(facts, layout, batch)  # a copy of the state after the last step
    if on_cpu:
        held, working = held + taken.lora + taken.tape, taken.peak - taken.weights - taken.lora - taken.tape
    elif layout.offload == "blocks":
        held += sum(layout.size(part) for part in facts.parts if part.kind == "denoiser")  # pinned
    loading = sum(part.masters for part in facts.parts)  # in fp32, before they are divided
    worker, first = (WORKER + max(held + max(working, more), loading) for more in (0.0, sent))
    # a state that arrives, to be written, or kept in place of the one before
    driver = DRIVER + sent * (1 + (facts.lora * BYTES <= LARGEST))
    processes = driver + first + (workers - 1) * worker + scorers * SCORER + RAY
    total = processes + sent + (weights if on_cpu else 0.0)
    return MainMemory(
        driver, workers, first, worker, scorers, SCORER, RAY, sent, weights, sent or state * ranks, total
    )  # fmt: skip


def seconds(facts: Facts, layout: Layout, batch: Batch, gpu: Gpu, share: float) -> float:
    """Return the seconds per image at `share` of the peak; moves of blocks overlap with work, others do not."""
    computing = facts.flops(layout.checkpointing) / (share * gpu.peak)
    travelling = waiting = 0.0
    for part in facts.parts:
        tallies = (facts.rollout, facts.updates[layout.checkpointing])
        calls = sum(t.calls.get(part.name, 0) for t in tallies)
        if layout.is_sharded(part):
            gathered = layout.size(part) * (layout.ranks - 1) / layout.ranks
            # kept ones are gathered once for all calls of rollouts
            times = tallies[1].calls.get(part.name, 0) if layout.kept(part) else calls
            travelling += times * gathered / gpu.link
        if layout.offload == "blocks" and (part.kind == "denoiser" or layout.is_sharded(part)):
            travelling += calls * layout.size(part) / (layout.ranks if layout.is_sharded(part) else 1) / gpu.bus
        if layout.is_away(part):  # uploaded once per micro-batch, and downloaded if it is quantised
            waiting += (1 + (layout.kind(part) != "none")) * layout.size(part) / gpu.bus
    images = facts.images * batch.rollout / facts.sampled  # images covered by the counted calls
    return max(computing, travelling / images) + waiting / images


def layouts(gpus: int, together: int, whole: bool = False) -> Iterator[Layout]:
    """Yield all layouts that `ModelConfig` accepts; `whole`: whether the denoisers' weights are trained."""
    for ranks, shard, kinds, on, offload in itertools.product(GROUPS, SHARDS, QUANTIZED, (False, True), OFFLOADS):
        if gpus % ranks or ranks > together or (ranks == 1) != (shard == "none"):
            continue
        if shard != "none" and "nf4" in kinds:
            continue
        if (offload == "blocks" and (whole or kinds[0] != "none")) or (whole and kinds[0] != "none"):
            continue
        yield Layout(ranks, shard, *kinds, on, offload)


def room(gpu: Gpu) -> float:
    """Return the bytes that a rank may use."""
    return (1 - SPARE) * gpu.memory


@dataclass(frozen=True)
class Choice:
    """A layout that fits, with its micro-batches."""

    layout: Layout
    batch: Batch
    memory: Memory
    seconds: float


def cheapest(facts: Facts, batch: Batch, smallest: int, gpu: Gpu, gpus: int, share: float) -> Choice | None:
    """Return the fitting layout with the least time per image; None if none fits.

    Unquantised weights are preferred, then configured micro-batches to smaller ones, of at least `smallest` images.
    """
    candidates = [way for way in layouts(gpus, gpu.together, facts.whole) if way.checkpointing in facts.updates]
    for kinds in QUANTIZED:
        for part in halves(batch, smallest):
            fitting = [
                Choice(layout, part, taken, seconds(facts, layout, part, gpu, share))
                for layout in candidates
                if (layout.quantize, layout.quantize_encoders) == kinds
                and (taken := memory(facts, layout, part)).peak <= room(gpu)
            ]
            if fitting:
                return min(fitting, key=lambda c: (c.seconds, c.layout.ranks, OFFLOADS.index(c.layout.offload)))
    return None


def halves(batch: Batch, smallest: int) -> Iterator[Batch]:
    """Yield `batch`, then batches of half the size each time."""
    yield batch
    while batch.rollout > smallest or batch.actor > 1:
        rollout = max(smallest, batch.rollout // 2)
        batch = Batch(rollout, max(1, min(batch.actor // 2, rollout)), batch.step)
        yield batch


def largest(facts: Facts, layout: Layout, batch: Batch, gpu: Gpu) -> tuple[int, int]:
    """Return the largest rollout and update micro-batches that fit, each with the other unchanged; 0 if none fits."""

    def most(fits: Iterator[bool]) -> int:
        return sum(1 for _ in itertools.takewhile(bool, fits))

    sizes = range(1, max(batch.rollout, math.ceil(batch.step)) + 1)
    rollout = most(memory(facts, layout, Batch(n, batch.actor, batch.step)).peak <= room(gpu) for n in sizes)
    actor = most(memory(facts, layout, Batch(batch.rollout, n, batch.step)).peak <= room(gpu) for n in sizes)
    return rollout, actor

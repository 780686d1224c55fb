"""Layouts of a model on GPUs: the memory of a rank and the time that each takes, and the cheapest that fits.

Predictions, of weights that are sharded, quantised or kept elsewhere:

* sharded over G ranks: a G-th of a component, and while it runs what is outside of its blocks and two blocks whole,
  the second one fetched ahead;
* int8, fp8: a byte a weight of the linear layers and a scale of 4 bytes a row; nf4: half a byte, and 4 bytes for every
  64; while they run, the largest one in bf16;
* offload=encoders: text encoders and VAE one at a time, while they run; offload=blocks: of the denoiser two blocks.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from gerl.preflight.forecast import SPARE
from gerl.preflight.sizing.facts import FP32, Facts, Part, Weights
from gerl.preflight.sizing.hardware import Gpu

SHARDS = ("none", "denoiser", "all")
QUANTIZED = ("none", "int8", "fp8", "nf4")  # the first that fits is taken
OFFLOADS = ("none", "encoders", "blocks")
GROUPS = (1, 2, 4, 8)  # ranks of a worker
HALF = 2  # bytes of a weight that computes


@dataclass(frozen=True)
class Layout:
    """Values of the keys that say where weights are; `ranks` is cluster.ranks_per_worker."""

    ranks: int = 1
    shard: str = "none"
    quantize: str = "none"
    checkpointing: bool = True
    offload: str = "none"

    def keys(self) -> str:
        """As the command line has it, defaults left out but for gradient checkpointing."""
        given = {
            "cluster.ranks_per_worker": (self.ranks, 1),
            "model.shard": (self.shard, "none"),
            "model.quantize": (self.quantize, "none"),
            "model.offload": (self.offload, "none"),
        }
        words = [f"{key}={value}" for key, (value, default) in given.items() if value != default]
        return " ".join([*words, f"model.gradient_checkpointing={str(self.checkpointing).lower()}"])

    def is_sharded(self, part: Part) -> bool:
        """Whether a rank holds but a part of the weights of `part`."""
        return part.kind in {"none": (), "denoiser": ("denoiser",), "all": ("denoiser", "encoder")}[self.shard]

    def is_away(self, part: Part) -> bool:
        """Whether `part` is on the GPU only while it runs."""
        return self.offload != "none" and part.kind != "denoiser"

    def is_quantized(self, part: Part) -> bool:
        """Whether the linear layers of `part` are quantised."""
        return self.quantize != "none" and part.kind != "decoder"

    def size(self, part: Part, weights: Weights) -> float:
        """Bytes of `weights`, which are those of `part` or of a block of it."""
        if not self.is_quantized(part):
            return weights.total
        stored = weights.elements * (1 / 2 + 4 / 64) if self.quantize == "nf4" else weights.elements + 4 * weights.rows
        return weights.total - weights.linear + stored

    def held(self, part: Part) -> float:
        """Bytes of `part` on a rank all the time."""
        if self.is_away(part):
            return 0.0
        if self.offload == "blocks":
            return self.size(part, part.root) + 2 * self.size(part, part.block)
        return self.size(part, part.weights) / (self.ranks if self.is_sharded(part) else 1)

    def fetched(self, part: Part) -> float:
        """Bytes of weights that come besides while `part` runs."""
        came = self.largest_away(part)
        if self.is_sharded(part):
            came += self.size(part, part.root) + 2 * self.size(part, part.block)
        return came + (part.largest * HALF if self.is_quantized(part) else 0)

    def largest_away(self, part: Part) -> float:
        """Bytes of a component that comes to the GPU to run, its shard where it is sharded."""
        if not self.is_away(part):
            return 0.0
        return self.size(part, part.weights) / (self.ranks if self.is_sharded(part) else 1)


@dataclass(frozen=True)
class Batch:
    """Images of a micro-batch of a worker in the rollout and in the update, and of a trainer step on a rank."""

    rollout: int
    actor: int
    step: float

    def rows(self, ranks: int) -> tuple[int, int]:
        """A rank's part of the two micro-batches."""
        return math.ceil(self.rollout / ranks), math.ceil(self.actor / ranks)


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank; `phases`: the peak of each, with what is there all the time."""

    weights: float
    lora: float
    tape: float
    phases: dict[str, float]
    activations: dict[str, float]

    @property
    def peak(self) -> float:
        """The most at a time."""
        return max(self.phases.values())


def memory(facts: Facts, layout: Layout, batch: Batch) -> Memory:
    """The memory of a rank."""
    rows, trained = batch.rows(layout.ranks)
    weights, lora, tape = sum(layout.held(p) for p in facts.parts), facts.lora_bytes(), facts.tape * batch.step
    swapped = facts.lora * FP32 * facts.swapped
    phases: dict[str, float] = {}
    activations: dict[str, float] = {}
    for part in facts.parts:
        name = {"encoder": "encode", "denoiser": "rollout", "decoder": "decode"}[part.kind]
        alive = facts.rollout.peaks.get(part.name, 0) * rows / facts.drawn
        there = layout.fetched(part) + alive + swapped
        if there > phases.get(name, 0.0):
            phases[name], activations[name] = there, alive
        alive = facts.updates[layout.checkpointing].peaks.get(part.name, 0) * trained / facts.trained
        if part.kind == "denoiser" and (there := layout.fetched(part) + alive + swapped) > phases.get("update", 0.0):
            phases["update"], activations["update"] = there, alive
    phases["optimizer"] = facts.lora * FP32  # the gradients in one vector, for the all-reduce
    resident = weights + lora + tape
    return Memory(weights, lora, tape, {name: resident + value for name, value in phases.items()}, activations)


def seconds(facts: Facts, layout: Layout, batch: Batch, gpu: Gpu, share: float) -> float:
    """Seconds a GPU needs for an image, at `share` of its published peak; weights that travel do so meanwhile."""
    rows, _ = batch.rows(layout.ranks)
    computing = facts.flops(layout.checkpointing) / (share * gpu.peak)
    travelling = waiting = 0.0
    for part in facts.parts:
        calls = sum(t.calls.get(part.name, 0) for t in (facts.rollout, facts.updates[layout.checkpointing]))
        if layout.is_sharded(part) and not layout.is_away(part):
            gathered = layout.size(part, part.weights) * (layout.ranks - 1) / layout.ranks
            travelling += calls * gathered / gpu.link
        if layout.offload == "blocks" and part.kind == "denoiser":
            travelling += calls * layout.size(part, part.weights) / gpu.bus
        if layout.is_away(part):  # there and back, once a micro-batch
            waiting += 2 * layout.largest_away(part) / gpu.bus
    # `facts` are of a micro-batch of `images`, whose calls a rank makes for its rows alone
    images = facts.images * rows / facts.drawn
    return max(computing, travelling / images) + waiting / images


def layouts(gpus: int, together: int) -> Iterator[Layout]:
    """All that are looked at; quantised or offloaded denoisers are not sharded."""
    for ranks, shard, quantize, on, offload in itertools.product(GROUPS, SHARDS, QUANTIZED, (False, True), OFFLOADS):
        if gpus % ranks or ranks > together or (ranks == 1) != (shard == "none"):
            continue
        if shard != "none" and (quantize != "none" or offload == "blocks"):
            continue
        yield Layout(ranks, shard, quantize, on, offload)


def room(gpu: Gpu) -> float:
    """Bytes that a rank may use."""
    return (1 - SPARE) * gpu.memory


@dataclass(frozen=True)
class Choice:
    """A layout that fits, with its micro-batches."""

    layout: Layout
    batch: Batch
    memory: Memory
    seconds: float


def cheapest(facts: Facts, batch: Batch, smallest: int, gpu: Gpu, gpus: int, share: float) -> Choice | None:
    """The layout with the fewest seconds an image that fits; None where none does.

    Weights as they are go before quantised ones, then micro-batches as configured before halves of them: these are
    halved until something fits, down to `smallest` images in the rollout and one in the update.
    """
    candidates = [layout for layout in layouts(gpus, gpu.together) if layout.checkpointing in facts.updates]
    for quantize in QUANTIZED:
        for part in halves(batch, smallest):
            found = [
                Choice(layout, part, taken, seconds(facts, layout, part, gpu, share))
                for layout in candidates
                if layout.quantize == quantize and (taken := memory(facts, layout, part)).peak <= room(gpu)
            ]
            if found:
                return min(found, key=lambda c: (c.seconds, c.layout.ranks, OFFLOADS.index(c.layout.offload)))
    return None


def halves(batch: Batch, smallest: int) -> Iterator[Batch]:
    """`batch`, and smaller ones."""
    yield batch
    while batch.rollout > smallest or batch.actor > 1:
        rollout = max(smallest, batch.rollout // 2)
        batch = Batch(rollout, max(1, min(batch.actor // 2, rollout)), batch.step)
        yield batch


def largest(facts: Facts, layout: Layout, batch: Batch, gpu: Gpu) -> tuple[int, int]:
    """The largest micro-batches of rollout and update that fit with the other one as it is; 0 where none does."""

    def most(fits: Iterator[bool]) -> int:
        return sum(1 for _ in itertools.takewhile(bool, fits))

    sizes = range(1, max(batch.rollout, math.ceil(batch.step * layout.ranks)) + 1)
    rollout = most(memory(facts, layout, Batch(n, batch.actor, batch.step)).peak <= room(gpu) for n in sizes)
    actor = most(memory(facts, layout, Batch(batch.rollout, n, batch.step)).peak <= room(gpu) for n in sizes)
    return rollout, actor

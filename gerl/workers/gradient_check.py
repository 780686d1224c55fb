"""Comparison of the gradient of a micro-batch, as the run computes it, with the plain gradient.

The ratio on policy reveals errors of the forward pass only. The backward pass has switches of its own, which must not
change the gradient: recomputation, compiled code, weights moved to the device, merged rows, joined steps, loss scaling.
"""

from __future__ import annotations  # annotations name classes that the driver does not import

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gerl.algorithms import Batch, KLWeight
from gerl.algorithms.base import Pooled
from gerl.algorithms.signal_checks import NOT_FINITE
from gerl.engine.hooks import uncounted
from gerl.engine.replay import StepGradients, first_of_duplicates, without_deduplication
from gerl.errors import TrainingError
from gerl.model.errors import is_full, model_errors, release
from gerl.utils.seeding import forked_generators, seed_everything
from gerl.workers.rollout import half

if TYPE_CHECKING:
    from gerl.workers.worker import Credit, Groups, PolicyWorker

CHECKPOINTING, COMPILE, OFFLOAD = "model.gradient_checkpointing", "model.compile", "model.offload=blocks"
STEP_BATCH, DUPLICATES, SCALING = "actor.step_batch", "merging of equal rows", "loss scaling of fp16"
LESS_MEMORY = (CHECKPOINTING, OFFLOAD)  # the plain gradient needs more memory than the run
SMALLER = 16.0  # factor of the loss, whose scale cancels it if the gradient is divided by the scale
# distance of the gradients, relative to the plain one; key: whether the base weights are in half precision
LARGEST = {False: 1e-2, True: 0.2}
ROUNDING = 3.0  # a distance up to so many times that of another order of the images is rounding error


@dataclass(frozen=True)
class GradientComparison:
    """The gradient of a micro-batch as the run computes it, relative to the plain one without `switches`."""

    switches: tuple[str, ...]  # that differ between the two
    cosine: float
    norm: float  # ratio of the norms; NaN if one is not finite, or both are 0
    rows: int  # images, or nodes of a tree
    finite: tuple[bool, bool] = (True, True)  # of the run, and plain
    omitted: tuple[str, ...] = ()  # switches that both have

    @property
    def distance(self) -> float:
        """Norm of the difference, relative to the norm of the plain gradient."""
        return math.sqrt(max(0.0, 1 + self.norm**2 - 2 * self.norm * self.cosine))

    @property
    def text(self) -> str:
        """One sentence for the log."""
        if not self.switches:
            without = ", ".join(self.omitted)
            return f"the gradient is not compared with the plain one, which is without {without} and takes more memory"
        omitted = f"; not compared: {', '.join(self.omitted)}" if self.omitted else ""
        return (
            f"the gradient of {self.rows} images has cosine {self.cosine:.6f} with the plain one, and {self.norm:.5f} "
            f"times its norm; the plain one is without {', '.join(self.switches)}{omitted}"
        )

    @property
    def is_zero(self) -> bool:
        """Whether both gradients are 0, or none was computed."""
        return all(self.finite) and math.isnan(self.norm)


# takes the switches that both gradients have; or compares the plain gradient with that of the images in another order
Compare = Callable[[Sequence[str], bool], "GradientComparison | None"]


def check_gradient(compare: Compare, largest: float) -> GradientComparison | None:
    """Return the comparison of all switches, None without any.

    Raises `TrainingError` if a gradient is not finite, or if the distance exceeds `largest` by more than rounding; the
    message names the switch that causes it, located by bisection.
    """
    first = compare((), False)
    if first is None or first.is_zero:
        return first
    if not all(first.finite):
        raise TrainingError(_not_finite(first))
    if first.distance <= largest:
        return first
    # images that hardly differ leave differences of large terms
    reordered = compare((), True)
    if reordered is not None and first.distance <= ROUNDING * reordered.distance:
        return first
    switches, wrong, right = list(first.switches), 0, len(first.switches)
    while right - wrong > 1:  # with the first `wrong` switches in both gradients they differ, with `right` they do not
        middle = (wrong + right) // 2
        comparison = compare(switches[:middle], False)
        if comparison is not None and not comparison.distance <= largest:
            wrong = middle
        else:
            right = middle
    raise TrainingError(
        f"{switches[wrong]} changes the gradient: for {first.rows} images it differs by {first.distance:.1%} from the "
        f"plain one (cosine {first.cosine:.4f}, norm {first.norm:.3f} times), more than {largest:.0%}; switch it off "
        f"({REMEDIES[switches[wrong]]}), or skip this check with actor.check_gradient=false"
    )


def _not_finite(comparison: GradientComparison) -> str:
    if comparison.finite[1]:
        without = " and ".join(comparison.switches)
        return f"the gradient of the first micro-batch is finite only without {without}: switch them off"
    return f"the gradient of the first micro-batch is {NOT_FINITE}"


def worst(comparisons: Sequence[GradientComparison | None]) -> GradientComparison | None:
    """Return the comparison with the largest distance among those of several workers, one that is not finite first."""
    measured = [each for each in comparisons if each is not None]

    def badness(each: GradientComparison) -> tuple[bool, float]:
        return not all(each.finite), -1.0 if each.is_zero else each.distance

    return max(measured, key=badness, default=None)


def compare_gradient(
    worker: PolicyWorker,
    credit: Credit,
    num_pairs: float,
    pooled: Pooled | None = None,
    groups: Groups = None,
    kl: KLWeight | None = None,
    kept: Collection[str] = (),
    reorder: bool = False,
) -> GradientComparison | None:
    """Compare the gradient of a worker's first micro-batch in `credit` with the plain one, which has the `kept` ones.

    `reorder`: compare the plain gradient with that of the images in reverse order instead.

    Returns None without a micro-batch or without a switch. Memory that does not suffice for the plain gradient halves
    the micro-batch; a single row that is still too large keeps the switches that save memory. Gradients accumulated so
    far, random numbers and counts stay as they are. In lockstep all ranks make the same calls.
    """
    worker.algorithm.set_kl_weight(kl)
    chosen = _first_micro_batch(worker, worker.batches(credit, groups, pooled, kl))
    if chosen is None:
        return None
    batch, rows, idle = chosen
    pairs = math.inf if idle else num_pairs  # a rank without a micro-batch adds a gradient of 0
    used = _switches(worker, batch, rows)
    omitted: list[str] = []
    if worker.ranks is not None:  # a rank whose memory is full would leave the others waiting
        omitted = [name for name in LESS_MEMORY if name in used] + _parts_of_ranks(worker)
    parameters = worker.actor.parameters
    held = [p.grad for p in parameters]
    try:
        with uncounted(worker.policy.pipe), model_errors("update"):
            while True:
                off = [name for name in used if name not in omitted and name not in kept]
                if not off:
                    return GradientComparison((), 0.0, math.nan, 0, omitted=tuple(omitted)) if omitted else None
                try:
                    sums = _compare(worker, batch, rows, pairs, off, reorder)
                    break
                except (MemoryError, RuntimeError) as error:
                    whole = worker.algorithm.whole_groups or len(rows) == 1
                    more = [name for name in LESS_MEMORY if name in off]
                    if worker.ranks is not None or not is_full(error) or (whole and not more):
                        raise
                    release(error)
                omitted, rows = (omitted + more, rows) if whole else (omitted, rows[: half(len(rows))])
    finally:
        for p, gradient in zip(parameters, held, strict=True):
            p.grad = gradient
    product, square, plain = sums
    finite = math.isfinite(square), math.isfinite(plain)
    norms = math.sqrt(square) if finite[0] else math.nan, math.sqrt(plain) if finite[1] else math.nan
    ratio = norms[0] / norms[1] if norms[1] > 0 else math.nan if norms[0] == 0 else math.inf
    cosine = product / (norms[0] * norms[1]) if norms[0] * norms[1] > 0 else 0.0
    if idle and worker.actor.group is None:  # else it has its part of the sum
        return None
    return GradientComparison(tuple(off), min(1.0, cosine), ratio, len(rows), finite, tuple(omitted))


def _first_micro_batch(worker: PolicyWorker, batches: dict[int, list[Batch]]) -> tuple[Batch, list[int], bool] | None:
    """Return the first micro-batch and its rows; and whether it is padding, while other ranks have one."""
    for batch in chain(*batches.values()):
        if worker.algorithm.of(batch.samples) is worker.algorithm:
            parts, idle = worker.actor.parts(batch)
            if parts:
                return batch, parts[0], False
            if idle:
                return *idle[0], True
    return None


def _compare(
    worker: PolicyWorker, batch: Batch, rows: list[int], pairs: float, off: Collection[str], reorder: bool
) -> tuple[float, float, float]:
    """Return the product of the gradients with and without the switches in `off`, and their squared norms."""
    from gerl.model.policy import local  # imported lazily: the driver does not need diffusers
    from gerl.workers.actor import gradient_of

    parameters, device = worker.actor.parameters, local(worker.actor.parameters[0]).device
    _compute(worker, batch, rows, pairs, off)
    plain = [local(gradient_of(p)).detach().double().cpu() for p in parameters]
    _compute(worker, batch, rows[::-1] if reorder else rows, pairs, off if reorder else ())
    sums = torch.zeros(3, dtype=torch.float64)
    for p, other in zip(parameters, plain, strict=True):
        gradient = local(gradient_of(p)).detach().double().cpu()
        sums += torch.stack([(gradient * other).sum(), gradient.square().sum(), other.square().sum()])
    if worker.actor.group is not None:
        sums = sums.to(device)
        dist.all_reduce(sums, group=worker.actor.group)
    product, square, reference = sums.tolist()
    return product, square, reference


def _compute(worker: PolicyWorker, batch: Batch, rows: list[int], pairs: float, off: Collection[str]) -> None:
    """Compute the gradient of `rows` without the switches in `off`."""
    actor = worker.actor
    actor.optimizer.zero_grad(set_to_none=True)
    factor = SMALLER if SCALING in off else 1.0
    # a measure of single steps makes them run one by one
    meter = StepGradients(actor.parameters, lambda _: None) if STEP_BATCH in off else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(forked_generators())
        seed_everything("gradient", worker.config.trainer.seed)
        for name, without in WITHOUT.items():
            if name in off:
                stack.enter_context(without(worker))
        worker.algorithm.train(worker.policy, batch, rows, pairs * factor, meter)
    for p in actor.parameters:
        if p.grad is not None and factor != 1:
            p.grad *= factor


# --- The switches: whether a run uses them, and how they are switched off


def _checkpointing(worker: PolicyWorker) -> list[torch.nn.Module]:
    modules = chain(*(denoiser.modules() for denoiser in worker.policy.denoisers.values()))
    return [module for module in modules if getattr(module, "gradient_checkpointing", False)]


def _merges(worker: PolicyWorker, batch: Batch, rows: list[int]) -> bool:
    """Whether a trained step has equal rows; in lockstep, whether it may have some, as all ranks decide alike."""
    if batch.tape.probe is None or worker.config.actor.step_batch > 1:
        return False
    if worker.ranks is not None:
        return True
    latents = {k: batch.tape.steps[k].x for k in batch.trained}
    # latents that are not on the tape are noised images, which may be equal where no image is left
    return len(rows) > 1 and any(
        k == 0 if x.is_meta else len(set(first_of_duplicates(x[rows]))) < len(rows) for k, x in latents.items()
    )


def _parts_of_ranks(worker: PolicyWorker) -> list[str]:
    """Return the settings by which a rank has only part of the weights or of the tokens."""
    shard, context = worker.config.model.shard, worker.config.cluster.context
    return [f"model.shard={shard}"] * (shard != "none") + [f"cluster.context={context}"] * (context > 1)


def _switches(worker: PolicyWorker, batch: Batch, rows: list[int]) -> list[str]:
    """Return the switches that the gradient of `rows` depends on."""
    config, denoisers = worker.config, worker.policy.denoisers.values()
    used = {
        SCALING: any(d.dtype == torch.float16 for d in denoisers),
        STEP_BATCH: config.actor.step_batch > 1 and len(batch.trained) > 1,
        DUPLICATES: _merges(worker, batch, rows),
        COMPILE: config.model.compile is not None,
        CHECKPOINTING: bool(_checkpointing(worker)),
        OFFLOAD: config.model.offload == "blocks",
    }
    return [name for name, uses in used.items() if uses]


REMEDIES = {
    SCALING: "model.dtype=bfloat16",
    STEP_BATCH: "actor.step_batch=1",
    DUPLICATES: "sampling.same_init_noise=false",
    COMPILE: "model.compile=null",
    CHECKPOINTING: "model.gradient_checkpointing=false",
    OFFLOAD: "model.offload=none",
}


@contextlib.contextmanager
def _without_checkpointing(worker: PolicyWorker) -> Iterator[None]:
    switched = _checkpointing(worker)
    for module in switched:
        module.__dict__["gradient_checkpointing"] = False
    try:
        yield
    finally:
        for module in switched:
            module.__dict__["gradient_checkpointing"] = True


def _with_resident_blocks(worker: PolicyWorker) -> AbstractContextManager[None]:
    from gerl.model.placement import resident_blocks  # imported lazily: the driver does not need diffusers

    return resident_blocks(worker.policy.denoisers.values())


WITHOUT: dict[str, Callable[[PolicyWorker], AbstractContextManager[object]]] = {
    DUPLICATES: lambda worker: without_deduplication(),
    COMPILE: lambda worker: torch.compiler.set_stance("force_eager"),
    CHECKPOINTING: _without_checkpointing,
    OFFLOAD: _with_resident_blocks,
}

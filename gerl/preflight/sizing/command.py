"""Size a run on GPUs that need not be present: `python -m gerl.preflight hardware=NAME gpus=N`."""

import logging
import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gerl.config import Config
from gerl.errors import TrainingError
from gerl.model.denoisers import quiet_libraries
from gerl.preflight.findings import size, wrapped, write_json
from gerl.preflight.sizing import layouts
from gerl.preflight.sizing.facts import Facts, find_facts, recorded
from gerl.preflight.sizing.hardware import GPUS, Name
from gerl.preflight.sizing.layouts import Batch, Choice, Layout, Memory
from gerl.preflight.sizing.shape_simulator import Tally
from gerl.utils.files import finite

logger = logging.getLogger("gerl")
DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Sizing:
    """A configuration on a kind of GPU, as configured and in the cheapest layout that fits (None if none does)."""

    hardware: Name
    gpus: int
    share: float
    facts: Facts
    layout: Layout
    batch: Batch
    memory: Memory
    seconds: float
    largest: tuple[int, int]
    images: int  # per trainer step
    choice: Choice | None

    @property
    def fits(self) -> bool:
        """Whether the configured layout fits."""
        return self.memory.peak <= layouts.room(GPUS[self.hardware])

    def as_json(self) -> dict[str, object]:
        """Return the fields, and whether any layout fits, for JSON."""
        return {"fits": self.fits, "can_fit": self.choice is not None, **finite(asdict(self))}


def run(config: Config, hardware: Name, gpus: int, share: int, out: Path | None = None, anew: bool = False) -> Sizing:
    """Size a run, log the report and write it to `out`. Raises `TrainingError` if no layout fits.

    anew: compute the facts of a recipe even if they are recorded.
    """
    quiet_libraries()
    known = None if anew else recorded(config)
    if known is not None:
        name, facts = known
        logger.info(
            "using the recorded facts of %s, with its own gradient checkpointing; anew=true recomputes them", name
        )
    else:
        logger.info("building %s without weights, and tracing it with shapes", config.model.path)
        with tempfile.TemporaryDirectory() as folder:
            facts = find_facts(config, Path(folder), DTYPES[config.model.dtype])
    found = sized(config, facts, hardware, gpus, share)
    logger.info("%s", text(found))
    if out is not None:
        write_json(out, found.as_json())
    if found.choice is None:
        raise TrainingError(
            f"{config.model.path} does not fit on {gpus} x {hardware} in any layout: use GPUs with more memory, or "
            "lower sampling.height and width, or model.lora_rank"
        )
    return found


def sized(config: Config, facts: Facts, hardware: Name, gpus: int, share: int) -> Sizing:
    """Size `config`, with its `facts`, on `gpus` GPUs; `share`: percent of the published peak reached."""
    gpu, images = GPUS[hardware], config.rollout.prompts_per_step * config.rollout.n
    layout = configured(config, facts)
    batch = Batch(facts.drawn, facts.trained, math.ceil(images / gpus))
    taken = layouts.memory(facts, layout, batch)
    smallest = config.algorithm.needs.sampled_images(config.rollout.n)
    return Sizing(
        hardware,
        gpus,
        share / 100,
        facts,
        layout,
        batch,
        taken,
        layouts.seconds(facts, layout, batch, gpu, share / 100),
        layouts.largest(facts, layout, batch, gpu),
        images,
        layouts.cheapest(facts, batch, smallest, gpu, gpus, share / 100),
    )


def configured(config: Config, facts: Facts) -> Layout:
    """Return the layout that `config` sets."""
    model = config.model
    checkpointing = model.gradient_checkpointing and True in facts.updates
    ranks, kinds = config.cluster.ranks_per_worker, (model.quantize, model.quantize_encoders)
    return Layout(ranks, model.shard, *kinds, checkpointing, model.offload)


def text(found: Sizing) -> str:
    """Return the report for the terminal."""
    facts, gpu = found.facts, GPUS[found.hardware]
    lines = ["", f"{facts.model}: {facts.pipeline}, {facts.algorithm}, {facts.dtype}; {found.gpus} x {found.hardware}"]
    parts = [f"{p.name} {size(p.weights.total)}" for p in facts.parts]
    lines += wrapped("weights" if facts.whole else "frozen", ", ".join(parts))
    averages = f"{facts.averages} average{'s' if facts.averages > 1 else ''}"
    copies = f"weight, gradient, two moments and {averages}, {4 * (4 + facts.averages)} bytes each"
    what = f"{facts.lora:,} weights of the denoiser" if facts.whole else f"LoRA of {facts.lora:,} parameters"
    lines += wrapped("trained", f"{what}: {copies}")
    work = {name: tally.total / facts.images for name, tally in _work(found)}
    lines += wrapped(
        "work",
        f"{', '.join(f'{name} {value / 1e12:.3g}' for name, value in work.items())} TFLOP per {facts.unit}, "
        f"{sum(work.values()) / 1e12:.3g} in total; at {found.share:.0%} of {gpu.peak / 1e12:.0f} TFLOP/s",
    )
    lines += ["", *_column("as configured", found.layout, found.batch, found.memory, found)]
    fits = "it fits" if found.fits else "it does not fit"
    rollout, actor = found.largest
    lines += wrapped(
        "fits",
        f"{fits} into {size(layouts.room(gpu))}, {gpu.memory / 1e9:.0f} GB less a tenth; largest that do: "
        f"rollout.micro_batch_size {rollout or 'none'} and actor.micro_batch_size {actor or 'none'}",
    )
    lines += wrapped("time", _time(found, found.seconds))
    if found.choice is not None and (found.choice.layout, found.choice.batch) != (found.layout, found.batch):
        choice = found.choice
        lines += ["", *_column("cheapest that fits", choice.layout, choice.batch, choice.memory, found)]
        lines += wrapped("time", _time(found, choice.seconds))
    return "\n".join(lines)


def _work(found: Sizing) -> list[tuple[str, Tally]]:
    return [("rollout", found.facts.rollout), ("update", found.facts.updates[found.layout.checkpointing])]


def _time(found: Sizing, seconds: float) -> str:
    step = found.images * seconds / found.gpus
    return (
        f"{seconds:.3g} s per GPU and {found.facts.unit}, {step:.3g} s per step of {found.images}; rewards, "
        "validation and the network between machines not included"
    )


def _column(title: str, layout: Layout, batch: Batch, taken: Memory, found: Sizing) -> list[str]:
    """Return the lines about the memory of a rank in a layout."""
    lines = wrapped(
        title.split()[0],
        f"{title}: {layout.keys()} rollout.micro_batch_size={batch.rollout} actor.micro_batch_size={batch.actor}",
    )
    own = {
        "weights": taken.weights,
        "optimizer and averages" if found.facts.whole else "LoRA": taken.lora,
        f"trajectories of {batch.step:.0f} {found.facts.unit}s": taken.tape,
    }
    lines = list(lines) + list(wrapped("", ", ".join(f"{name} {size(value)}" for name, value in own.items())))
    lines += wrapped("", "activations: " + ", ".join(f"{n} {size(v)}" for n, v in taken.activations.items()))
    lines += wrapped("", f"peak {size(taken.peak)}: " + ", ".join(f"{n} {size(v)}" for n, v in taken.phases.items()))
    return lines

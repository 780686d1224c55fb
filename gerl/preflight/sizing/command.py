"""Size a run on GPUs that need not be present: `python -m gerl.preflight hardware=NAME gpus=N`."""

import logging
import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gerl.config import Config
from gerl.config.reading import flow
from gerl.errors import TrainingError
from gerl.model.denoisers import quiet_libraries
from gerl.preflight.findings import rendered, write_json
from gerl.preflight.sizing import layouts
from gerl.preflight.sizing.facts import Facts, find_facts, recorded
from gerl.preflight.sizing.hardware import GPUS, Name
from gerl.preflight.sizing.layouts import Batch, Choice, Layout, MainMemory, Memory
from gerl.utils.files import finite

CPU_WORKERS = 2  # by default
logger = logging.getLogger("gerl")
KEYS = {  # of a layout
    "ranks": "cluster.ranks_per_worker",
    "shard": "model.shard",
    "quantize": "model.quantize",
    "quantize_encoders": "model.quantize_encoders",
    "offload": "model.offload",
    "reshard": "model.reshard",
    "checkpointing": "model.gradient_checkpointing",
}
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
    main: MainMemory
    seconds: float
    largest: tuple[int, int]
    images: int  # per trainer step
    choice: Choice | None
    keys: tuple[str, ...]  # that turn the configured layout and micro-batches into those of `choice`

    @property
    def fits(self) -> bool:
        """Whether the configured layout fits."""
        return self.gpus % self.layout.ranks == 0 and self.memory.peak <= layouts.room(GPUS[self.hardware])

    def as_json(self) -> dict[str, object]:
        """Return the fields, and whether any layout fits, for JSON."""
        return {"fits": self.fits, "can_fit": self.choice is not None, **finite(asdict(self))}


def run(config: Config, hardware: Name, gpus: int, share: int, out: Path | None = None, anew: bool = False) -> Sizing:
    """Size a run (`anew`: without recorded facts), log and write the report. Raises `TrainingError` if nothing fits."""
    quiet_libraries()
    stored = None if anew else recorded(config)
    if stored is not None:
        name, facts = stored
        logger.info("using the recorded facts of %s, with its gradient checkpointing; anew=true recomputes them", name)
    else:
        logger.info("building %s without weights, and tracing it with shapes", config.model.path)
        with tempfile.TemporaryDirectory() as folder:
            facts = find_facts(config, Path(folder), DTYPES[config.model.dtype])
    sizing = sized(config, facts, hardware, gpus, share)
    logger.info("%s", text(sizing))
    if out is not None:
        write_json(out, sizing.as_json())
    if sizing.choice is None:
        raise TrainingError(
            f"{config.model.path} does not fit on {gpus} x {hardware} in any layout: use GPUs with more memory, or "
            "lower sampling.height and width, or model.lora_rank"
        )
    return sizing


def sized(config: Config, facts: Facts, hardware: Name, gpus: int, share: int) -> Sizing:
    """Size `config`, with its `facts`, on `gpus` GPUs; `share`: percent of the published peak reached."""
    gpu, images = GPUS[hardware], config.rollout.prompts_per_step * config.rollout.n
    layout = configured(config, facts)
    batch = Batch(facts.sampled, facts.trained, math.ceil(images / gpus))
    smallest = config.algorithm.needs.sampled_images(config.rollout.n)
    choice = layouts.cheapest(facts, batch, smallest, gpu, gpus, share / 100)
    return Sizing(
        hardware,
        gpus,
        share / 100,
        facts,
        layout,
        batch,
        layouts.memory(facts, layout, batch),
        main_memory(config, facts, layout, batch, min(gpus, gpu.together)),
        layouts.seconds(facts, layout, batch, gpu, share / 100),
        layouts.largest(facts, layout, batch, gpu),
        images,
        choice,
        () if choice is None else changed_keys(config, layout, batch, choice),
    )


def changed_keys(config: Config, layout: Layout, batch: Batch, choice: Choice) -> tuple[str, ...]:
    """Return the keys to add for the layout and the micro-batches of `choice`."""
    pairs = ((key, getattr(layout, name), getattr(choice.layout, name)) for name, key in KEYS.items())
    keys = [f"{key}={flow(new)}" for key, old, new in pairs if old != new]
    if choice.batch != batch:
        sampled, trained = choice.batch.rollout, choice.batch.actor
        keys += [f"rollout.micro_batch_size={sampled}", f"actor.micro_batch_size={trained}"]
        keys += [f"validation.micro_batch_size={sampled}"] if sampled < config.validation.micro_batch_size else []
    return tuple(keys)


def main_memory(config: Config, facts: Facts, layout: Layout, batch: Batch, gpus: int) -> MainMemory:
    """Return the main memory of a machine with so many GPUs; with cluster.device=cpu, where all is in it."""
    cpu = config.cluster.device == "cpu"
    workers = (config.cluster.workers or CPU_WORKERS) if cpu else gpus
    return layouts.main_memory(facts, layout, batch, workers, len(config.reward.gpu_shares), cpu)


def configured(config: Config, facts: Facts) -> Layout:
    """Return the layout that `config` sets."""
    model = config.model
    checkpointing = model.gradient_checkpointing and True in facts.updates
    ranks, kinds = config.cluster.ranks_per_worker, (model.quantize, model.quantize_encoders)
    return Layout(ranks, model.shard, *kinds, checkpointing, model.offload, model.reshard)


def text(sizing: Sizing) -> str:
    """Return the report for the terminal."""
    facts, gpu = sizing.facts, GPUS[sizing.hardware]
    tallies = {"rollout": facts.rollout, "update": facts.updates[sizing.layout.checkpointing]}
    work = {name: tally.total / facts.images for name, tally in tallies.items()}  # per image
    return rendered("sizing", **vars(sizing), fits=sizing.fits, gpu=gpu, room=layouts.room(gpu), work=work)

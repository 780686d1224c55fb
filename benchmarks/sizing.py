"""What the recipes take, on shapes, and how near such predictions come to real runs.

python benchmarks/sizing.py facts [RECIPE ...]   # of the recipes, into gerl/assets/sizing; minutes each
python benchmarks/sizing.py pages                # from those: tables in docs, heads of recipes, the studio's cards
python benchmarks/sizing.py check [WIDTH ...]    # real runs on a CPU beside the predictions; 100 M and 340 M weights
"""

import functools
import json
import logging
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
import yaml
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from gerl.algorithms import build_algorithm, count_pairs
from gerl.commandline.composition import compose_run
from gerl.config import Config, sources
from gerl.engine.hooks import count_evaluations
from gerl.errors import GerlError
from gerl.model.denoisers import quiet_libraries
from gerl.model.paths import resolve
from gerl.preflight.bench import TEXT, Bench
from gerl.preflight.sizing.command import Sizing, sized
from gerl.preflight.sizing.facts import Facts, build_pipeline, build_policy, find_facts
from gerl.preflight.sizing.hardware import Name
from gerl.protocol import Prompt
from gerl.workers.actor import Actor
from gerl.workers.rollout import Rollout
from gerl.workers.worker import PolicyWorker, batches_of

RESULTS = Path(__file__).parent.parent / "gerl" / "assets" / "sizing"
RECIPES = Path(__file__).parent.parent / "configs" / "experiment"
ONE: dict[str, tuple[Name, int]] = {"one 24 GB GPU": ("rtx4090-24gb", 1), "one 80 GB GPU": ("h100-80gb", 1)}
CONFIGURED: tuple[Name, int] = ("h100-80gb", 8)  # what a recipe is for
# data.train -> its name in docs/recipes.md
PROMPTS = {
    "hf:CarperAI/pickapic_v1_no_images_training_sfw[train]": "Pick-a-Pic",
    "signs_train": "signs",
    "my_prompts.jsonl": "your edits",
}
CARDS = Path(__file__).parent.parent / "gerl" / "assets" / "pages" / "cards.yaml"
SHARE = 40  # percent of the published peak
DOCS = Path(__file__).parent.parent / "docs"
logger = logging.getLogger("sizing")


def recipes() -> list[str]:
    """The recipes of the hub's models."""
    return [file.stem for file in sorted(RECIPES.glob("*.yaml")) if file.stem not in ("plain", "signs")]


@functools.cache
def config_of(recipe: str) -> Config:
    """The configuration of a recipe."""
    return compose_run([f"experiment={recipe}"]).config


def one_gpu_images(recipe: str) -> list[str]:
    """The images of a step for one GPU that the head of a recipe names."""
    head = (RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8").replace("\n# ", " ")
    (keys,) = re.findall(r" 1 GPU: ([^(]*) \(", head)
    return [key for key in keys.split() if key.startswith("rollout.")]


def on_one_gpu(recipe: str) -> Config:
    """The configuration of a recipe with these images."""
    pairs = (key.removeprefix("rollout.").split("=") for key in one_gpu_images(recipe))
    images = {name: int(number) for name, number in pairs}
    config = config_of(recipe)
    return replace(config, rollout=replace(config.rollout, **images))


def write_facts(names: Sequence[str]) -> None:
    """Size recipes, and write what was found, or why nothing was."""
    quiet_libraries()
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in names or recipes():
        logger.info(name)
        with tempfile.TemporaryDirectory() as folder:
            try:
                found: dict[str, object] = asdict(find_facts(config_of(name), Path(folder), both=False))
            except GerlError as error:
                found = {"refused": str(error)}
        (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def facts_of(recipe: str) -> Facts | str | None:
    """What was found of a recipe, why nothing was, or None where nobody has looked."""
    file = RESULTS / f"{recipe}.json"
    if not file.is_file():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    return found["refused"] if "refused" in found else Facts.from_json(found)


def recorded() -> dict[str, Facts]:
    """What was found of the recipes."""
    found = {recipe: facts_of(recipe) for recipe in recipes()}
    return {recipe: facts for recipe, facts in found.items() if isinstance(facts, Facts)}


def table() -> str:
    """The table of docs/memory.md: what a rank holds, and the cheapest layout on one GPU."""
    lines = header("recipe", "weights, GB", "LoRA, GB", "peak on 8 GPUs, GB", *ONE)
    for recipe in recipes():
        facts = facts_of(recipe)
        if not isinstance(facts, Facts):
            reason = "not computed yet" if facts is None else facts
            lines.append(f"| `{recipe}` | {reason} |" + " |" * (2 + len(ONE)))
            continue
        memory = on(recipe, facts, CONFIGURED).memory
        numbers = f"{memory.weights / 1e9:.1f} | {memory.lora / 1e9:.2f} | {memory.peak / 1e9:.0f}"
        cells = " | ".join(short_cell(on(recipe, facts, machine)) for machine in ONE.values())
        lines.append(f"| `{recipe}` | {numbers} | {cells} |")
    return "\n".join(lines)


def recipe_table() -> str:
    """The first table of docs/recipes.md: what each recipe trains, and on which prompts."""
    lines = header("recipe", "model", "algorithm", "reward", "prompts")
    for recipe in recipes():
        composed = compose_run([f"experiment={recipe}"])
        scorers = [name for name, scorer in composed.config.reward.scorers.items() if scorer.weight]
        (prompts,) = (PROMPTS[source.path] for source in sources(composed.config.data.train, "data.train"))
        path = composed.config.model.path
        model = f"`{path}`" if path.startswith("./") else f"[`{path}`](https://huggingface.co/{path})"
        name = f"[`{recipe}`](../examples/recipes/{recipe}.sh)"
        lines.append(f"| {name} | {model} | `{composed.preset}` | {', '.join(scorers)} | {prompts} |")
    return "\n".join(lines)


def header(*names: str) -> list[str]:
    """The first lines of a table."""
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]


def on(recipe: str, facts: Facts, machine: tuple[Name, int]) -> Sizing:
    """A recipe on GPUs of a kind."""
    kind, gpus = machine
    return sized(on_one_gpu(recipe) if gpus == 1 else config_of(recipe), facts, kind, gpus, SHARE)


def one_gpu_keys(recipe: str, machine: str) -> list[str] | None:
    """The keys that fit a recipe on a GPU of `ONE`, with the images of a step; None: nothing fits."""
    return keys_on(recipe, ONE[machine])


def keys_on(recipe: str, machine: tuple[Name, int]) -> list[str] | None:
    """The keys that fit a recipe on GPUs of a kind, on one with the images of a step for it; None: nothing fits."""
    facts = facts_of(recipe)
    assert isinstance(facts, Facts)
    found = on(recipe, facts, machine)
    images = one_gpu_images(recipe) if machine[1] == 1 else []
    return None if found.choice is None else images if found.fits else [*images, *found.keys]


def card_keys() -> dict[str, dict[str, str | None]]:
    """The keys of each recipe for the cards that the studio offers, for `CARDS`; null: nothing fits."""
    cards = yaml.safe_load(CARDS.read_text(encoding="utf-8"))["cards"]
    machines = {name: (card["hardware"], card["gpus"]) for name, card in cards.items()}
    made: dict[str, dict[str, str | None]] = {}
    for recipe in recorded():
        found = {name: keys_on(recipe, machine) for name, machine in machines.items()}
        made[recipe] = {name: None if keys is None else " ".join(keys) for name, keys in found.items()}
    return made


def cell(keys: Sequence[str], found: Sizing) -> str:
    """A machine's column: the keys to add, the peak, and seconds per image."""
    if found.choice is None:
        return "does not fit"
    layout = f"`{' '.join(keys)}` " if keys else ""
    return f"{layout}{found.choice.memory.peak / 1e9:.0f} GB, {found.choice.seconds:.2g} s"


def short_cell(found: Sizing) -> str:
    """The same of one GPU, on which nothing is sharded: keys without their block, smaller micro-batches in words."""
    keys = [key.removeprefix("model.") for key in found.keys if "micro_batch" not in key]
    keys = [key for key in keys if not key.startswith(("cluster.", "shard="))]
    smaller = found.choice is not None and found.choice.batch != found.batch
    return cell(keys, found) + (", smaller micro-batches" if smaller else "")


def comment(recipe: str, facts: Facts) -> str:
    """What a recipe's head says of memory."""
    found = on(recipe, facts, CONFIGURED)
    layout, memory = found.layout, found.memory
    whole = sum(part.weights.total for part in facts.parts)
    share = f" of {whole / 1e9:.1f} GB" if memory.weights < 0.99 * whole else ""
    phase = {"decode": "while images are decoded", "encode": "while prompts are encoded", "update": "in the update"}
    peak = max(memory.phases, key=lambda name: memory.phases[name])
    ranks = f", of which {layout.ranks} share the weights," if layout.ranks > 1 else ""
    return (
        f"Memory of a GPU, computed, not measured: with 8 GPUs (docs/memory.md){ranks} weights "
        f"{memory.weights / 1e9:.1f} GB{share}, LoRA of {facts.lora / 1e6:.1f} M parameters with its optimizer "
        f"{memory.lora / 1e9:.2f} GB, trajectories {memory.tape / 1e9:.1f} GB, about {memory.peak / 1e9:.0f} GB at the "
        f"peak, {phase.get(peak, 'in the rollout')}; scorers on the same GPU come on top."
    )


TABLES: dict[str, tuple[Callable[[], str], ...]] = {
    "memory.md": (table,),
    "recipes.md": (recipe_table,),
}


def write_pages() -> None:
    """Put what was found into docs/memory.md, docs/recipes.md and the heads of the recipes."""
    for name, makers in TABLES.items():
        page = DOCS / name
        text = page.read_text(encoding="utf-8")
        for make in makers:
            made = make()
            start = text.index(made.partition("\n")[0])
            end = text.find("\n\n", start)
            text = text[:start] + made + (text[end:] if end >= 0 else "\n")
        page.write_text(text, encoding="utf-8")
    above, mark, _ = CARDS.read_text(encoding="utf-8").partition("recipes:\n")
    made = yaml.safe_dump(card_keys(), sort_keys=False, width=1000)
    CARDS.write_text(above + mark + textwrap.indent(made, "  "), encoding="utf-8")
    for recipe, facts in recorded().items():
        file = RECIPES / f"{recipe}.yaml"
        lines = textwrap.fill(
            comment(recipe, facts), 118, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
        )
        text = file.read_text(encoding="utf-8")
        file.write_text(re.sub(r"# Memory of a GPU(.|\n)*?(?=\n\n)", lines, text, count=1), encoding="utf-8")


def wide(folder: Path, width: int, layers: int = 2) -> Path:
    """The signs pipeline with a denoiser of other size, as configurations without weights."""
    source = Path(resolve("signs"))
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = folder / "transformer" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    heads = width // config["attention_head_dim"]
    config |= {"num_attention_heads": heads, "num_layers": layers, "caption_projection_dim": width}
    config["pos_embed_max_size"] = 48
    file.write_text(json.dumps(config), encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Taken:
    """The most bytes that are alive at a time besides the weights, and floating-point operations."""

    peak: int
    flops: int


@dataclass(frozen=True)
class Real:
    """Of a micro-batch that was drawn, and trained on without gradient checkpointing and with it."""

    rollout: Taken
    updates: dict[bool, Taken]


def real_run(config: Config) -> Real:
    """Draw and train a micro-batch on the CPU, with weights as their classes initialise them.

    Bytes are those of torch's allocator, as its profiler records them; operations those of torch's FlopCounterMode.
    """
    worker = PolicyWorker(config, 0, "cpu", torch.get_num_threads(), 1)
    worker.policy = build_policy(config, torch.float32, None)
    worker.evaluations = count_evaluations(worker.policy.denoisers.values())
    worker.rollout = Rollout(worker.policy, config.sampling, config.validation)
    worker.algorithm = build_algorithm(config)
    worker.actor = Actor(worker.policy, config.actor, worker.algorithm, 1)
    task = Bench(worker, Prompt(0, TEXT)).task(worker.algorithm)
    worker.sample(task)  # the first one looks at the pipeline's structure as well
    rollout = _measured(lambda: worker.sample(task))
    for p in worker.policy.trained.values():
        p.grad = torch.zeros_like(p)
    credit = torch.ones(len(task.samples), config.sampling.num_inference_steps)
    batches, updates = batches_of(worker.trajectories[task.id], credit), {}
    for checkpointing in (False, True):
        for denoiser in worker.policy.denoisers.values():
            if checkpointing:
                denoiser.enable_gradient_checkpointing()
        updates[checkpointing] = _measured(lambda: worker.actor.accumulate(batches, count_pairs([(task, credit)])))
    return Real(rollout, updates)


def _measured(work: Callable[[], object]) -> Taken:
    with profile(profile_memory=True) as found:
        work()
    with FlopCounterMode(display=False) as counter:  # not at once: it keeps tensors
        work()
    return Taken(most_alive(found), counter.get_total_flops())


def most_alive(found: profile) -> int:
    """The most bytes that the profiler saw torch's allocator hold at a time."""
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(accumulate(sizes, initial=0))


def predicted(config: Config, folder: Path) -> Real:
    """The same on shapes."""
    facts = find_facts(config, folder, torch.float32)
    rollout, *updates = (Taken(max(t.peaks.values()), t.total) for t in (facts.rollout, *facts.updates.values()))
    return Real(rollout, dict(zip(facts.updates, updates, strict=True)))


def check(widths: Sequence[str]) -> None:
    """Print predictions beside real runs."""
    logger.info("| denoiser | | predicted | real | |")
    for width in widths or ("1280", "2304"):
        with tempfile.TemporaryDirectory() as name:
            compare(config_of_check(wide(Path(name) / "wide", int(width))), Path(name))


def config_of_check(folder: Path) -> Config:
    """A micro-batch that a CPU draws and trains in seconds."""
    keys = (
        "model.lora_rank=16 sampling.height=32 sampling.width=96 sampling.num_inference_steps=2 "
        "sampling.window_range=[0,1] rollout.n=2 rollout.micro_batch_size=2"
    )
    return compose_run(["experiment=signs", "algorithm=flow_grpo", *keys.split(), f"model.path={folder}"]).config


def compare(config: Config, folder: Path) -> None:
    """A row for each number."""
    pipe = build_pipeline(config.model.path, torch.float32)
    size = sum(p.numel() for p in pipe.components["transformer"].parameters()) / 1e6
    forecast, real = predicted(config, folder), real_run(config)
    rows = {"rollout": (forecast.rollout, real.rollout)}
    for checkpointing, found in real.updates.items():
        rows[f"update, gradient_checkpointing={checkpointing}"] = (forecast.updates[checkpointing], found)
    for what, (before, after) in rows.items():
        pairs = {"bytes": (before.peak, after.peak), "operations": (before.flops, after.flops)}
        for unit, (x, y) in pairs.items():
            logger.info("| %.0f M | %s, %s | %.4g | %.4g | %+.1f%% |", size, what, unit, x, y, 100 * (x / y - 1))


def main(arguments: Sequence[str]) -> None:
    """Run a command line."""
    command, *names = arguments
    if command == "facts":
        write_facts(names)
    elif command == "pages":
        write_pages()
    elif command == "check":
        check(names)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    main(sys.argv[1:])

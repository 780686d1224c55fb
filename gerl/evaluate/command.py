"""The base model against LoRAs on the same noise: `python -m gerl.evaluate lora=FOLDER out=FOLDER [key=value ...]`."""

import contextlib
import difflib
import logging
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from gerl.algorithms.planning import plan_validation
from gerl.cluster import Cluster, Pending
from gerl.commandline.command import run_command
from gerl.commandline.composition import compose_run
from gerl.config import Config, keys
from gerl.errors import ConfigError, DataError, RewardError
from gerl.evaluate.comparison import BASE, Drawn, Results, compare, config_of, drawn, name_loras, plan, stop_at_failure
from gerl.evaluate.files import COLUMNS, table, write_files
from gerl.export.command import Request as ExportRequest
from gerl.export.command import find_checkpoint
from gerl.model.ema import EMA
from gerl.model.loading import SHIPPED, Policy, find_denoisers, load_pipeline, resolve
from gerl.model.lora import WEIGHTS
from gerl.model.lora_variants import attach, switch
from gerl.protocol import Images, Prompt, Sample
from gerl.rewards.checks import check_reward
from gerl.rewards.manager import RewardManager
from gerl.run.checkpoint import MANIFEST
from gerl.run.signals import Signals
from gerl.score.command import make_folder
from gerl.score.gallery import TOTAL
from gerl.trainer.rollouts import Rollouts
from gerl.utils.dataset import load_prompts
from gerl.utils.logs import capture_logs
from gerl.workers.rollout import Rollout

logger = logging.getLogger("gerl")

OWN = {
    "model": "the pipeline: hub id, folder, or signs; default: that of the configuration",
    "lora": "a LoRA: file or folder in diffusers' format, a checkpoint, or a run, of which the best checkpoint counts; "
    "several: lora=A,B, or lora.NAME=A lora.OTHER=B, where the names are what they are called in the results",
    "prompts": ".txt, .jsonl or .parquet file, or the name of a list of gerl's; default: validation.data",
    "out": "folder for scores.csv, summary.json and gallery.html",
    "images": "images of each prompt (default: 1): the first from the noise of the trainer's validation, the others "
    "from other noise",
}
BLOCKS = ("sampling", "validation", "reward", "model", "cluster")  # of the configuration
READ = ("experiment", "data.prompt_key", "logger.progress")  # besides these blocks
WIDTH = 110  # characters of a line of the help


@dataclass(frozen=True)
class Request:
    """What is asked for; `loras`: their files by name, `source`: what the configuration is of."""

    config: Config
    source: str
    loras: dict[str, Path]
    out: Path | None
    images: int

    @property
    def variants(self) -> list[str]:
        """The base and the LoRAs, in order."""
        return [BASE, *self.loras]


@dataclass(frozen=True)
class Evaluation:
    """What was drawn: a row for each image, and from them the results, column -> variant -> `Result`.

    complete: whether all prompts are in it; otherwise those that were finished, with every variant.
    """

    rows: list[Drawn]
    results: Results
    complete: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, see `run_command`."""
    return run_command(argv, help_text, lambda arguments: run(parse(arguments)))


def evaluate(
    model: str | None = None,
    lora: str | Path | Sequence[str | Path] | Mapping[str, str | Path] = (),
    prompts: str | None = None,
    out: str | Path | None = None,
    *,
    images: int = 1,
    experiment: str | None = None,
    overrides: Sequence[str] = (),
) -> Evaluation:
    """Draw the same prompts from the same noise with the base model and with each LoRA, score and compare them.

    The arguments are those of the command line, see docs/evaluate.md. lora: one, several, or by name. out: nothing is
    written without it. overrides: further keys, such as `["cluster.launcher=local"]`.

    Raises:
        GerlError: something is wrong with model, LoRAs, prompts or scorers, no image has a total, or a signal arrived;
            what was finished before is written to `out`.
    """
    if isinstance(lora, Mapping):
        given: list[tuple[str | None, str]] = [(name, str(path)) for name, path in lora.items()]
    else:
        given = [(None, str(path)) for path in ([lora] if isinstance(lora, str | Path) else lora)]
    chosen = [*([f"experiment={experiment}"] if experiment else []), *overrides]
    return run(prepare(model, given, prompts, None if out is None else str(out), images, chosen))


def run(request: Request) -> Evaluation:
    """Check everything that can be checked, draw and score, write; see `evaluate`."""
    config, out = request.config, request.out
    resolve(config.model.path)
    prompts = read_prompts(config)
    if out is not None:
        make_folder(out)
    machines = Cluster(config.cluster, config.reward.gpu_shares)
    total = len(prompts) * request.images * len(request.variants)
    logger.info(
        "%s; configuration: %s; %d prompts of %s; scorers: %s",
        *(config.model.path, request.source, len(prompts), config.validation.data, ", ".join(config.reward.scorers)),
    )
    for name, file in request.loras.items():
        logger.info("%s: %s", name, file)
    rows: list[Drawn] = []
    shown = config.logger.progress
    progress = tqdm(total=total, unit="image", disable=not shown)
    try:
        # Ray sets a SIGTERM handler of its own when it starts: ours come after it
        with machines as cluster, Signals(), logging_redirect_tqdm() if shown else contextlib.nullcontext(), progress:
            for part in draw(request, prompts, cluster):
                rows += part
                progress.update(len(part))
                if config.reward.on_error == "stop":
                    stop_at_failure(part)
    finally:
        found = Evaluation(rows, compare(rows), complete=len(rows) == total) if rows else None
        if found is not None:
            report(request, found)
    assert found is not None  # there is at least one prompt
    if all(row.values[TOTAL] is None for row in rows):
        raise RewardError(f"no image has all its scores; the first failure: {rows[0].failure}; repair the scorer")
    return found


def parse(arguments: Sequence[str]) -> Request:
    """The command line as a request; raises `GerlError` for what is missing, unknown or contradicts itself."""
    own: dict[str, str] = {}
    loras: list[tuple[str | None, str]] = []
    overrides: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        key = name.lstrip("+~")
        if name == "lora" and equals:
            loras += [(None, path) for path in value.split(",")]
        elif name.startswith("lora.") and equals:
            loras.append((name.removeprefix("lora."), value))
        elif name in OWN and equals:
            own[name] = value
        elif key in READ or ("." in key and key.split(".")[0] in BLOCKS):
            overrides.append(argument)
        elif not equals:
            raise ConfigError(f"{argument}: expected key=value; --help lists the keys")
        else:
            near = difflib.get_close_matches(key, [*OWN, *READ], n=1)
            has = f"it has {', '.join([*OWN, *READ])} and the blocks {', '.join(BLOCKS)}"
            raise ConfigError(f"{key}: evaluation has no such key; {f'did you mean {near[0]!r}?' if near else has}")
    empty = [name for name, value in own.items() if not value.strip()]
    if empty or "out" not in own:
        name = empty[0] if empty else "out"
        raise ConfigError(f"{name} is {'empty' if empty else 'missing'}: give {name}={OWN[name].split(';')[0]}")
    images = own.get("images", "1")
    if not images.isdecimal():
        raise ConfigError(f"images={images}: it must be a number of images, at least 1")
    return prepare(own.get("model"), loras, own.get("prompts"), own["out"], int(images), overrides)


def prepare(
    model: str | None,
    loras: Sequence[tuple[str | None, str]],
    prompts: str | None,
    out: str | None,
    images: int,
    overrides: Sequence[str],
) -> Request:
    """The request of what was given, LoRAs as (name or None, path); raises `GerlError` where it does not go together.

    Without an `experiment` among the overrides, the configuration is that of the run which a LoRA lies in; else that of
    the signs demo for its model, and the defaults for another.
    """
    if images < 1:
        raise ConfigError(f"images={images}: it must be a number of images, at least 1")
    files = name_loras([(name, path, find_lora(path)) for name, path in loras])
    chosen = [override.removeprefix("experiment=") for override in overrides if override.startswith("experiment=")]
    if not chosen:
        default = "signs" if model in (None, *SHIPPED) else "plain"
        chosen = [next(filter(None, map(config_of, files.values())), default)]
        overrides = [f"experiment={chosen[0]}", *overrides]
    config = compose_run(overrides).config
    if model is not None:
        config = replace(config, model=replace(config.model, path=model))
    if prompts is not None:
        config = replace(config, validation=replace(config.validation, data=prompts))
    if config.validation.data is None:
        raise ConfigError(f"prompts is missing, and {chosen[-1]} has no validation.data: give prompts=FILE")
    if taken := [name for name in config.reward.scorers if name in COLUMNS]:
        raise ConfigError(f"reward.scorers.{taken[0]}: this name is a column of scores.csv, choose another")
    return Request(config, chosen[-1], files, None if out is None else Path(out).expanduser(), images)


def find_lora(source: str) -> Path:
    """The safetensors file of a LoRA: itself, that in a LoRA's folder or a checkpoint, or in the best one of a run.

    Raises:
        ConfigError: there is none, or there are several.
        CheckpointError: the checkpoints of a run are damaged.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"lora={source}: there is no such file or folder; give {OWN['lora'].split(';')[0]}")
    if (path / "checkpoints").is_dir():
        _, checkpoint, why = find_checkpoint(ExportRequest(run=path, out=path))
        logger.info("lora=%s: the checkpoint of %s", source, why)
        path = checkpoint.path
    if (path / MANIFEST).is_file():
        path = path / "lora"
    files = sorted(path.glob("*.safetensors"))
    if path / WEIGHTS in files:
        return path / WEIGHTS
    if len(files) != 1:
        what = f"{len(files)} .safetensors files, give one of them" if files else f"no {WEIGHTS}"
        raise ConfigError(f"lora={source}: {path} has {what}")
    return files[0]


def help_text() -> str:
    """The keys that evaluation reads, with explanations."""
    without = (
        "Without experiment=NAME|FILE.yaml the configuration is the config.yaml of the run that a LoRA lies in; else "
        "that of the signs demo for its model, and the defaults for another."
    )
    lines = [
        "usage: python -m gerl.evaluate [model=PIPELINE] [lora=FOLDER] [prompts=FILE] out=FOLDER [key=value ...]",
        "",
        "Draw prompts from the same noise with the base model and with LoRAs, score and compare the images.",
        *(textwrap.fill(f"  {name:<9}{text}", WIDTH, subsequent_indent=" " * 11) for name, text in OWN.items()),
        "",
        textwrap.fill(without, WIDTH),
    ]
    for name, f in keys():
        if name.split(".")[0] in BLOCKS or name in READ:
            lines.append(f"  {name}\n      {f.metadata['help']}")
    return "\n".join(lines) + "\n"


def read_prompts(config: Config) -> list[Prompt]:
    """The prompts to draw, all of them fit for the scorers; raises `GerlError` otherwise."""
    assert config.validation.data is not None
    try:
        prompts = load_prompts(config.validation.data, config.data.prompt_key)[: config.validation.max_prompts]
        check_reward(config.reward, prompts)
    except DataError as error:
        raise DataError(f"prompts={config.validation.data}: {error}") from None
    return prompts


class Painter:
    """A worker that draws with the base model or one of the LoRAs as the trainer's validation does."""

    def __init__(self, config: Config, loras: Mapping[str, Path], device: str, threads: int) -> None:
        self.config, self.loras, self.device, self.threads = config, dict(loras), device, threads
        self.rollout: Rollout

    def setup(self) -> list[str]:
        """Load the pipeline and the LoRAs; returns what there is to say of it."""
        torch.set_num_threads(self.threads)
        for library in (diffusers.logging, transformers.logging):
            library.set_verbosity_error()
            library.disable_progress_bar()
        config, model = self.config, self.config.model
        with capture_logs("gerl.model", logging.INFO) as notes:
            pipe = load_pipeline(model, self.device)
        denoisers = find_denoisers(pipe)
        attach(pipe, self.loras)
        for denoiser in denoisers.values() if model.compile else ():
            denoiser.compile(backend=model.compile)
        # no step is stochastic here: whether the kernel of the configuration fits the scheduler does not matter
        sampling = replace(config.sampling, kernel="ode", solver="euler", compression=1.0)
        # the averaged weights of a run are those in its file: there is nothing to swap in
        self.rollout = Rollout(Policy(pipe, denoisers, {}, EMA({}, 0.0)), sampling, config.validation)
        return notes

    def draw(self, task_id: int, variant: str, samples: Sequence[Sample]) -> Images:
        """Draw a micro-batch with `variant`."""
        start = time.perf_counter()
        switch(self.rollout.policy.pipe, None if variant == BASE else variant)
        return Images(task_id, self.rollout.validate(samples), time.perf_counter() - start)


def draw(request: Request, prompts: Sequence[Prompt], cluster: Cluster) -> Iterator[list[Drawn]]:
    """Draw and score; yields the rows of a few prompts at a time, with all their images and variants."""
    config = request.config
    manager = RewardManager(config.reward, cluster)
    batches = plan_validation(config, prompts, 0)
    count = min(cluster.num_workers, len(batches) * request.images * len(request.variants))
    workers = cluster.workers(
        "worker",
        Painter,
        count,
        lambda rank: (config, request.loras, cluster.worker_device(rank), cluster.threads),
        gpus=cluster.gpus,
        threads=cluster.threads,
    )
    for sentence in workers.run(Painter.setup)[0]:
        logger.info("%s", sentence)
    for start in range(0, len(batches), count):
        tasks = [
            task for batch in batches[start : start + count] for task in plan(batch, request.variants, request.images)
        ]

        def submit(i: int, tasks: Sequence[tuple[str, list[Sample]]] = tasks) -> Pending[Images]:
            return workers.submit(i % count, Painter.draw, i, *tasks[i])

        rollouts = Rollouts(manager, [samples for _, samples in tasks], submit, count)
        scored = rollouts.finish()
        yield [
            row
            for (variant, samples), scores, images in zip(tasks, scored, rollouts.images, strict=True)
            for row in drawn(variant, samples, scores, images.result())
        ]


def report(request: Request, found: Evaluation) -> None:
    """Write the files, if there is a folder for them, and log the table; raises `GerlError` if that is not possible."""
    prompts = len({row.prompt_id for row in found.rows})
    lines = [
        "",
        table(found.results),
        "",
        f"{len(found.rows)} images of {prompts} prompts; the same noise for all variants",
    ]
    if failed := [row for row in found.rows if row.failure]:
        first = f"the first, of {failed[0].variant} for {failed[0].prompt!r}: {failed[0].failure}"
        lines.append(f"failures: {len(failed)} of {len(found.rows)} images; {first}")
    if request.out is not None:
        facts: dict[str, Any] = {
            "model": request.config.model.path,
            "configuration": request.source,
            "prompts": request.config.validation.data,
            "images": request.images,
            "complete": found.complete,
            "variants": {BASE: None, **{name: str(file) for name, file in request.loras.items()}},
        }
        title = " and ".join([Path(request.config.model.path).name, *request.loras])
        lines += map(str, write_files(request.out, title, found.rows, found.results, facts))
    logger.info("%s", "\n".join(lines))

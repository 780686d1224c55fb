"""Compare a base model with LoRAs: `python -m gerl.evaluate lora=FOLDER out=FOLDER [key=value ...]`."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import logged_at, make_folder, run_command
from gerl.commandline.composition import compose_run, default_experiment, is_of_run, typed_texts
from gerl.config import Config, sources
from gerl.config.user_files import only_typed
from gerl.data.sources import check_images, count_trained, load, source_names
from gerl.errors import ConfigError, DataError
from gerl.evaluate.loras import (
    BASE,
    COLUMNS,
    LORA,
    Variant,
    check_episodes,
    config_of,
    find_lora,
    has_episodes,
    name_loras,
    roles_alone,
    variants_of,
)
from gerl.evaluate.selection import Selection, select
from gerl.evaluate.suites import PinnedSuite, deviations, listing, names, pin
from gerl.model.paths import resolve
from gerl.progress import Progress
from gerl.protocol import Prompt
from gerl.rewards.checks import check_named, read_prompts, without_people
from gerl.rewards.total import check_any_scored, check_columns, stop_at_failure, thresholds, with_all_active
from gerl.trainer.turns import Turns
from gerl.utils.imports import importing

if TYPE_CHECKING:
    from gerl.evaluate.comparison import Results, ScoredRow, SuiteResults

logger = logging.getLogger("gerl")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Keys of the command line."""

    model: str | None = key("the pipeline: Hub id, folder, or signs; default: that of the configuration")
    lora: list[tuple[str | None, str]] = key(
        f"{LORA}; several: lora=A,B, or lora.NAME=A lora.OTHER=B, where NAME and OTHER label the results", []
    )
    roles: str = key(
        "all, none, or names of roles, such as roles=draw,edit; for a run with episodes: whose LoRA is also evaluated "
        "alone, without those of the others; all: of those that were trained, if there are several",
        "all",
    )
    prompts: str | None = key(
        ".txt, .jsonl, .csv or .parquet file, the name of a built-in list, or hf:owner/name[split]; default: "
        "validation.data"
    )
    out: Path | None = key("folder for scores.csv, summary.json and gallery.html", required=True)
    images: int | None = key(
        "images per prompt: the first from the noise of the trainer's validation, the others from other noise; "
        "default: 1, or as many as the suite's protocol specifies",
        unit="a number of images, at least 1",
        low=1,
    )
    suite: str | None = key(
        f"a published benchmark: {', '.join(names())}, or your own .yaml file; 'suite=?' describes them"
    )
    suite_prompts: str | None = key("the suite's prompt file, verified by its SHA-256")
    suite_protocol: str | None = key("the suite's protocol; default: that of the model, by its name")
    split: bool = key(
        "true or false; whether a run's checkpoint is chosen on other prompts than those reported. false reports all, "
        "with a gain that is too large on average",
        True,
    )
    trust: bool = key(
        "true: run the code that the run's settings name (algorithm, scorers, prompts, pipeline); false: refuse it, "
        "with the files and their SHA-256",
        False,
    )


PARSER = Parser(
    "evaluation",
    "python -m gerl.evaluate",
    "[model=PIPELINE] [lora=FOLDER] [prompts=FILE] out=FOLDER [key=value ...]",
    "Sample prompts from the same noise with the base model and with LoRAs, score and compare the images.",
    Options,
    passed=("experiment", "data.prompt_key", "data.columns", "data.template", "logger.progress", "logger.level"),
    blocks=("sampling", "validation", "reward", "model", "cluster"),
    notes="Without experiment=NAME|FILE.yaml the configuration is the config.yaml of the run that contains a LoRA; "
    "otherwise that of the signs demo for its model, and the defaults for any other.",
)


@dataclass(frozen=True)
class Request:
    """A resolved request."""

    config: Config
    source: str  # of the configuration
    loras: dict[str, Path]  # files by name
    out: Path | None
    images: int  # per prompt
    suite: PinnedSuite | None = None
    deviations: tuple[str, ...] = ()  # from the suite
    runs: dict[str, tuple[Path, str]] = field(default_factory=dict)  # LoRA -> its run, and which checkpoint it is
    split: bool = True
    roles: tuple[str, ...] | None = None  # of episodes, those whose LoRA is also evaluated alone; None: no episodes
    typed: frozenset[str] | None = None  # paths of code that may run, see `only_typed`

    @property
    def variants(self) -> dict[str, Variant]:
        """Return what is compared, by name."""
        if self.roles is None:
            return {BASE: Variant(), **{name: Variant(path) for name, path in self.loras.items()}}
        return variants_of(self.config, self.loras, self.roles)


@dataclass(frozen=True)
class Evaluation:
    """Rows of all sampled images, and their results."""

    rows: "list[ScoredRow]"
    results: "Results"  # column -> variant -> `Result`
    complete: bool  # whether all prompts were sampled; else only the finished ones are included, with all variants
    suite: "SuiteResults | None" = None
    remarks: tuple[str, ...] = ()  # how the checkpoints of runs were chosen, and what several intervals hold for


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line and return the exit code, see `run_command`."""
    return run_command(argv, lambda: PARSER.help(program), _work)


def _work(arguments: list[str]) -> None:
    if "suite=?" in arguments:
        logger.info("%s", listing())
    else:
        run(parse(arguments))


def run(request: Request) -> Evaluation:
    """Validate the request, then sample, score and write; see `gerl.evaluate`."""
    with only_typed(request.typed):
        return _run(request)


def _run(request: Request) -> Evaluation:
    config, out = request.config, request.out
    resolve(config.model.path)
    prescribed = None if request.suite is None else f"suite={request.suite.name} prescribes all its prompts"
    whole = prescribed if request.split else "split=false"
    selection = select(request.loras, {n: run for n, (run, _) in request.runs.items()}, _prompts(request), whole)
    request, prompts = replace(request, loras=selection.loras), selection.prompts
    if request.roles is not None:
        Turns(config).check(prompts)
    check_images(prompts)
    if out is not None:
        make_folder(out)
    # imported late, since torch takes seconds, and keys and files are checked first
    with importing():
        from gerl.cluster import Cluster
        from gerl.evaluate.comparison import compare, tasks_of
        from gerl.evaluate.episodes import sample_episodes
        from gerl.evaluate.worker import sample

    _check_code(request)
    tasks = {} if request.suite is None else tasks_of(request.suite.suite, prompts)
    machines = Cluster(config.cluster, config.reward.gpu_shares)
    variants = request.variants
    total = len(prompts) * request.images * len(variants)
    logger.info(
        "%s; configuration: %s; %d prompts of %s; scorers: %s",
        *(
            config.model.path,
            request.source,
            len(prompts),
            source_names(config.validation.data),
            ", ".join(config.reward.scorers),
        ),
    )
    words = {name: text for name, (_, text) in request.runs.items()} | selection.words
    for name, file in request.loras.items():
        logger.info("%s: %s%s", name, file, f" ({words[name]})" if name in words else "")
    for text in request.deviations:
        logger.warning("suite=%s, not the published protocol: %s", request.suite and request.suite.name, text)
    rows: list[ScoredRow] = []
    try:
        shown = Progress(total, disable=not config.logger.progress, unit="image")
        with logged_at(config.logger.level), machines as cluster, shown as progress:
            if request.roles is None:
                parts = sample(config, request.loras, request.images, prompts, cluster)
            else:
                parts = sample_episodes(config, variants, prompts, cluster)
            for part in parts:
                rows += part
                progress.update(len(part))
                if config.reward.on_error == "stop":
                    stop_at_failure(part)
    finally:
        if rows:
            results = compare(rows, thresholds(config.reward))
            evaluation = Evaluation(rows, results, len(rows) == total, _measured(request, tasks, rows))
            evaluation = replace(evaluation, remarks=_remarks(request, prompts, selection, results))
            report(request, evaluation, selection)
    check_any_scored(rows)
    return evaluation


def _check_code(request: Request) -> None:
    """Raise `TrustError` for code of the model's folder that is not trusted: other processes would load it."""
    if request.typed is not None:
        from gerl.model.loading import check_code  # imports diffusers

        check_code(request.config.model.path, request.config.model.parts)


def _episodes(request: Request) -> list[str]:
    """Say what is reported of episodes."""
    if request.roles is None:
        return []
    turns = Turns(request.config)
    first, last = turns.of_images.start, turns.of_images.stop - 1
    sentence = f"Episodes of {len(turns)} turns ({', '.join(turn.role for turn in turns.parsed)})"
    if len(turns.of_images) > 1:
        sentence += f": total and scorers are of the last turn, turn_{first}/total of turn {first}"
        sentence += ", and so on" if last - first > 1 else ""
    alone = f" CHECKPOINT/{request.roles[0]} has the LoRA of {request.roles[0]} only." if request.roles else ""
    return [f"{sentence}.{alone}"]


def _remarks(request: Request, prompts: Sequence[Prompt], selection: Selection, results: "Results") -> tuple[str, ...]:
    from gerl.evaluate.comparison import joint

    together = filter(None, [joint(results)])
    return (*selection.remarks, *_overlap(request, prompts), *_episodes(request), *together)


def _overlap(request: Request, prompts: Sequence[Prompt]) -> list[str]:
    """Say how many of the `prompts` a run was trained on, if the files of its configuration are still there."""
    data = request.config.data
    if not any(map(config_of, request.loras.values())) or any(s.on_hub or s.is_code for s in sources(data.train, "")):
        return []
    try:
        count = count_trained(load(data.train, data, "data.train"), prompts)
    except DataError:
        return []
    return [f"{count} of the {len(prompts)} prompts are in data.train."] if count else []


def _prompts(request: Request) -> list[Prompt]:
    check_named(request.config.reward)
    validation, pinned = request.config.validation, request.suite
    assert validation.data is not None
    if pinned is None or pinned.suite.prompts is None:
        return read_prompts(request.config, "prompts", validation.data, validation.max_prompts)
    arrange = pinned.suite.prompts.arrange
    return read_prompts(request.config, "suite_prompts", validation.data, validation.max_prompts, arrange)


def _measured(request: Request, tasks: dict[int, str], rows: "list[ScoredRow]") -> "SuiteResults | None":
    from gerl.evaluate.comparison import SuiteResults, measure, missing_parts

    if request.suite is None:
        return None
    left = (*request.deviations, *missing_parts(request.suite, tasks, rows))
    return SuiteResults(request.suite, tuple(measure(request.suite.suite, tasks, rows)), left)


def parse(arguments: Sequence[str]) -> Request:
    """Parse the command line. Raises `GerlError` for missing, unknown or contradictory keys."""
    options, overrides = PARSER.parse(arguments)
    loras = [(name, path) for name, text in options.lora for path in ([text] if name else text.split(","))]
    return prepare(replace(options, lora=loras), overrides)


def prepare(options: Options, overrides: Sequence[str]) -> Request:
    """Resolve options and overrides into a request. Raises `GerlError` if they contradict each other."""
    model = options.model
    if options.images is not None and options.images < 1:
        raise ConfigError(f"images={options.images}: it must be a number of images, at least 1")
    _check_suite(options)
    loras = [(path, *find_lora(path)) for _, path in options.lora]
    files = name_loras([(name, path, file) for (name, _), (path, file, _) in zip(options.lora, loras, strict=True)])
    runs = {name: (Path(path).expanduser(), w) for name, (path, _, w) in zip(files, loras, strict=True) if w}
    chosen = [override.removeprefix("experiment=") for override in overrides if override.startswith("experiment=")]
    if not chosen:
        path = next((o.removeprefix("model.path=") for o in overrides if o.startswith("model.path=")), model)
        chosen = [next(filter(None, map(config_of, files.values())), default_experiment(model or path))]
        overrides = [f"experiment={chosen[0]}", *overrides]
    typed = None
    if not options.trust and is_of_run(chosen[-1]):
        typed = typed_texts(overrides) | {text for text in (options.model, options.prompts) if text is not None}
    with only_typed(typed):
        return replace(_request(options, overrides, files, runs), typed=typed)


def _request(
    options: Options, overrides: Sequence[str], files: dict[str, Path], runs: dict[str, tuple[Path, str]]
) -> Request:
    chosen = next(o.removeprefix("experiment=") for o in reversed(overrides) if o.startswith("experiment="))
    config, pinned, differing = _compose(options, overrides)
    if options.prompts is not None:
        config = replace(config, validation=replace(config.validation, data=options.prompts))
    roles = _roles(options, config, files)
    changed = config.model.quantize != "none" or config.model.offload == "blocks"
    if changed and roles is None and any(path.is_dir() for path in files.values()):
        raise ConfigError(
            f"model.quantize={config.model.quantize} and model.offload={config.model.offload}: fully fine-tuned "
            "weights replace those of the model, which must be whole; use model.quantize=none and encoders"
        )
    if config.validation.data is None:
        raise ConfigError(f"prompts is missing, and {chosen} has no validation.data: give prompts=FILE")
    config = replace(config, reward=with_all_active(without_people(config.reward)))
    check_columns(config.reward, COLUMNS)
    images = options.images or (config.validation.images_per_prompt if pinned is None else pinned.images)
    if roles is not None:
        config = replace(config, validation=replace(config.validation, images_per_prompt=images))
        differing = () if pinned is None else (*differing, f"episodes of {len(config.episode.turns)} turns")
    return Request(config, chosen, files, options.out, images, pinned, differing, runs, options.split, roles)


def _roles(options: Options, config: Config, files: dict[str, Path]) -> tuple[str, ...] | None:
    """Return the roles whose LoRAs are also evaluated alone; None: no episodes are evaluated."""
    check_episodes(config, files)
    if config.episode.turns and all(map(has_episodes, files.values())):
        alone = roles_alone(config, options.roles)
        return alone if files else ()
    if options.roles != "all":
        lora = next(iter(files.values()), None)
        what = "there are no episode.turns" if lora is None else f"{lora} has no episodes"
        raise ConfigError(f"roles={options.roles}: {what}; remove it, or give a checkpoint of a run with episode.turns")
    return None


def _check_suite(options: Options) -> None:
    if options.suite is not None and options.prompts is not None:
        raise ConfigError(
            f"prompts={options.prompts}: suite={options.suite} has its own prompts; pass your copy of them as "
            "suite_prompts=FILE"
        )
    for name in ("suite_prompts", "suite_protocol"):
        if options.suite is None and (value := getattr(options, name)) is not None:
            raise ConfigError(
                f"{name}={value}: it belongs to a suite; give suite=NAME too, one of {', '.join(names())}"
            )


def _compose(options: Options, overrides: Sequence[str]) -> tuple[Config, PinnedSuite | None, tuple[str, ...]]:
    """Return the configuration, where given keys override the suite's, the pinned suite, and deviations from it."""

    def composed(arguments: Sequence[str], below: Sequence[str] = ()) -> Config:
        config = compose_run(arguments, below=below).config
        path = options.model or config.model.path
        return replace(config, model=replace(config.model, path=path))

    if options.suite is None:
        return composed(overrides), None, ()
    first = [o for o in overrides if o.startswith(("experiment=", "model.path="))]
    others = [o for o in overrides if o not in first]
    path = composed(first).model.path
    pinned = pin(options.suite, path, options.suite_prompts, options.suite_protocol, others)
    plain, config = composed([*first, *pinned.overrides]), composed([*first, *others], pinned.overrides)
    return config, pinned, tuple(deviations(pinned, plain, config, options.images or pinned.images))


def report(request: Request, evaluation: Evaluation, selection: Selection) -> None:
    """Write the files to `out`, if given, and log the table. Raises `GerlError` if they cannot be written."""
    from gerl.evaluate.comparison import facts as suite_facts
    from gerl.evaluate.comparison import sheets, table, text, write_files  # imports torch

    prompts = len({row.prompt_id for row in evaluation.rows})
    what = "images" if request.roles is None else "episodes"
    counts = f"{len(evaluation.rows)} {what} of {prompts} prompts; the same noise for all variants"
    lines = ["", table(evaluation.results), "", counts, *evaluation.remarks]
    if failed := [row for row in evaluation.rows if row.failure]:
        first = f"the first, of {failed[0].variant} for {failed[0].prompt!r}: {failed[0].failure}"
        lines.append(f"failures: {len(failed)} of {len(evaluation.rows)} images; {first}")
    if evaluation.suite is not None:
        lines += ["", text(evaluation.suite), ""]
    if request.out is not None:
        facts: dict[str, object] = {
            "model": request.config.model.path,
            "configuration": request.source,
            "prompts": request.config.validation.data,
            "images": request.images,
            "prompts_reported": len(selection.prompts),
            "prompts_of_the_choice": selection.aside,
            "complete": evaluation.complete,
            "variants": {n: None if v.path is None else str(v.path) for n, v in request.variants.items()},
        }
        if request.roles is not None:
            facts["turns"] = request.config.episode.turns
            facts["roles"] = {name: list(variant.roles) for name, variant in request.variants.items()}
        if evaluation.suite is not None:
            facts["suite"] = suite_facts(evaluation.suite)
        above = () if evaluation.suite is None else sheets(evaluation.suite)
        title = " and ".join([Path(request.config.model.path).name, *request.loras])
        lines += map(
            str, write_files(request.out, title, evaluation.rows, evaluation.results, facts, above, evaluation.remarks)
        )
    logger.info("%s", "\n".join(lines))

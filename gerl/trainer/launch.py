"""Launch a run: check the configuration, start the cluster, train, write the report."""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gerl.algorithms.planning import plan_images, planned_steps, prompt_schedule
from gerl.commandline.command import PAGE, logged_at, watching
from gerl.commandline.composition import Composed
from gerl.config import ClusterConfig, Config
from gerl.config.blocks import HELD_OUT
from gerl.config.configuration import described
from gerl.config.reading import typed
from gerl.data.sources import check_images, count_trained, log_prompts
from gerl.errors import GerlError
from gerl.model.paths import check_size, local_lora
from gerl.progress import waiting
from gerl.protocol import Prompt
from gerl.rewards.checks import check_held_out_metrics, check_named, read_prompts, read_regularising
from gerl.rewards.gradients import scorers_with_gradient
from gerl.rewards.replaced import keep_watched
from gerl.rewards.total import thresholds
from gerl.run.attempts import SUCCESS
from gerl.run.card import TRAINED, changed_software, secrets
from gerl.run.choice import choice_of
from gerl.run.session import RunLog, session
from gerl.run.trackers import check_trackers
from gerl.run.usage import usage
from gerl.run.validation import held_out_words, load_validations, mean
from gerl.trainer.run_folder import RunFolder, identity
from gerl.trainer.turns import Turns
from gerl.utils.imports import imported_meanwhile, importing

if TYPE_CHECKING:
    from gerl.cluster import Cluster
    from gerl.cluster.ray_session import RaySession
    from gerl.trainer.run import Run
    from gerl.trainer.step import Step

logger = logging.getLogger("gerl")
LENGTH = ("trainer.steps", "trainer.epochs")  # keys by which a schedule of the learning rate counts


def launch(folder: RunFolder, arguments: Sequence[str] = ()) -> Path:
    """Check everything, train and write the report; returns the run folder. `arguments`: for the run card."""
    with launched(folder, arguments) as (_, steps):
        for _ in steps:
            pass
    return folder.path


@dataclass(frozen=True)
class Inputs:
    """Configuration and prompts of a run.

    `kept`: a sentence about scorers of the experiment that stay watched. `split`: the end of the first log line, about
    prompts held out of `data.train`.
    """

    config: Config
    prompts: list[Prompt]
    held_out: list[Prompt]
    regularising: list[Prompt]
    kept: str
    split: str = ""


def read_inputs(composed: Composed, resumed: bool = False) -> Inputs:
    """Read the prompts and check what can be checked before libraries are imported that take seconds.

    Raises `GerlError` for what a run would be refused for.
    """
    config = composed.config
    check_trackers(config.logger)
    check_size(config.model.path, config.sampling.height, config.sampling.width)
    model = config.model.for_resume() if resumed else config.model
    if model.lora is not None:
        local_lora(model.lora)
    if config.data.train_on == "rollouts":
        check_named(config.reward, "" if config.data.train else "; and prompts, such as data.train=my_prompts.txt")
    with waiting("reading the prompts"):
        with explained(composed.kept):
            prompts = read_prompts(config, "data.train", config.data.train)
        regularising = read_regularising(config)
    if config.algorithm.needs.reward_gradient:
        scorers_with_gradient(config)
    held, split = config.validation, ""
    held_out = read_prompts(config, "validation.data", held.data, held.max_prompts) if held.data else []
    if held.data == HELD_OUT:
        config, split = _with_held_out(config, len(prompts), len(held_out))
    config, kept = keep_watched(config, composed.replaced, prompts, held_out)
    check_held_out_metrics(config, held_out)
    if config.episode.turns:
        Turns(config).check([*prompts, *held_out])
    return Inputs(config, prompts, held_out, regularising, kept, split)


def _with_held_out(config: Config, trained: int, held_out: int) -> tuple[Config, str]:
    """Return the configuration, without validation if no prompt of `data.train` is held out, and the words for it."""
    share = f"validation.share={config.validation.share:g}"
    if held_out:
        return config, f", {trained} prompts to train on and {held_out} held out ({share})"
    alone = replace(config, validation=replace(config.validation, data=None))
    return alone, f", no held-out prompts ({trained} are too few for {share}; validation.data=FILE sets others)"


@contextlib.contextmanager
def launched(folder: RunFolder, arguments: Sequence[str] = ()) -> Iterator[tuple["Run", Iterator["Step"]]]:
    """Check everything and start a run; yields it and its steps, to be trained in the block, which ends the run."""
    config, run_dir, start = folder.composed.config, folder.path, time.perf_counter()
    with logged_at(config.logger.level), RunLog() as log, contextlib.ExitStack() as ends:
        inputs = read_inputs(folder.composed, folder.checkpoint is not None)
        config, prompts, held_out = inputs.config, inputs.prompts, inputs.held_out
        folder.composed = replace(folder.composed, config=config)
        # Here and not above: these import torch, which takes seconds, and the keys and files come first.
        with importing():
            from gerl.cluster import Cluster

            ray = begin_ray(config.cluster, ends) if config.cluster.launcher == "ray" else None
            from gerl.trainer.loop import train
            from gerl.trainer.plan import Plan
            from gerl.trainer.recovery import interruption_logged, rescued
            from gerl.trainer.start import begin_run, load_run

            machines = Cluster(config.cluster, config.reward.gpu_shares, ray)
            if not machines.remote:  # otherwise the workers do it first: this process needs no model libraries
                from gerl.workers.setup import check_start  # which imports them

                model = config.model if folder.checkpoint is None else config.model.for_resume()
                check_start(replace(config, model=model), machines.device)
        planned = planned_steps(config, prompts)
        facts = {} if config.trainer.epochs is None else {"steps": planned}
        facts |= {TRAINED: count} if (count := count_trained(prompts, held_out)) else {}
        with session(run_dir, log, arguments, machines.words(), facts) as begin:
            folder.open(begin)
            logger.info("%s%s", described(config, folder.composed.preset), inputs.split)
            if config.trainer.epochs is not None:
                logger.info("%s", epochs_words(config, prompts))
            if folder.checkpoint is not None:
                warn_resumed(config, folder, prompts)
            log_prompts(prompts, held_out)
            done = folder.checkpoint.step if folder.checkpoint else 0
            check_images([*used_first(config, inputs, done), *held_out])
            for sentence in filter(None, [folder.composed.sampler, folder.composed.kept, inputs.kept]):
                logger.info("%s", sentence)
            if secret_keys := secrets(asdict(config)):
                logger.warning(
                    "the secret in %s is stored in config.yaml and in the checkpoints' state.json, and nowhere "
                    "else: share only the lora folders of %s; ${oc.env:NAME} keeps it out of command lines",
                    *(" and ".join(secret_keys), run_dir),
                )
            logger.info("run folder: %s", run_dir)
            logger.info("to watch it at http://localhost:%d: %s", PAGE, watching(run_dir))
            with interruption_logged(run_dir, planned):
                plan = Plan(config, prompts, held_out, inputs.regularising)
                with start_cluster(machines) as cluster:
                    run = load_run(config, run_dir, cluster, plan, identity(config), folder.checkpoint, start)
                    begin_run(run, folder)
                    with rescued(run):
                        yield run, train(run)
                logger.info("%s", closing_screen(config, run_dir, run.state.step, time.perf_counter() - start))


def warn_resumed(config: Config, folder: RunFolder, prompts: Sequence[Prompt]) -> None:
    """Warn of a resumed run whose numbers are not those of an undisturbed one: other software, another schedule."""
    if packages := changed_software(folder.path):
        logger.warning("resumed with %s: later steps are not bitwise those of an undisturbed run", ", ".join(packages))
    before = {change.key.partition(".")[2]: change.old for change in folder.changes if change.key in LENGTH}
    earlier = replace(config, trainer=replace(config.trainer, **before))
    total, planned = planned_steps(earlier, prompts), planned_steps(config, prompts)
    if config.actor.lr_schedule != "constant" and planned > total:
        logger.warning(
            "actor.lr_schedule=%s now ends after %d steps, not %d: the learning rate rises again where the run is "
            "resumed; with a lower actor.lr it rises less",
            *(config.actor.lr_schedule, planned, total),
        )


def used_first(config: Config, inputs: Inputs, start: int) -> list[Prompt]:
    """Return the prompts, and rows of `data.regularise`, of the first epoch after step `start`."""
    schedule = prompt_schedule(config, inputs.prompts)
    steps = range(start, min(planned_steps(config, inputs.prompts), start + schedule.steps_per_epoch))
    chosen = sorted({i for step in steps for i in schedule.batch(step)})
    used = [inputs.prompts[i] for i in chosen]
    if inputs.regularising:
        images = {p.id: p for step in steps for p in plan_images(config, inputs.regularising, step + 1)}
        used += images.values()
    return used


def epochs_words(config: Config, prompts: Sequence[Prompt]) -> str:
    """Say how many steps a run with `trainer.epochs` has."""
    trainer, each = config.trainer, prompt_schedule(config, prompts).steps_per_epoch
    steps = planned_steps(config, prompts)
    first = f"; trainer.steps={trainer.steps} is reached first" if steps == trainer.steps else ""
    return f"trainer.epochs={trainer.epochs}: {steps} steps, {each} per epoch of {len(prompts)} prompts{first}"


@contextlib.contextmanager
def explained(why: str) -> Iterator[None]:
    """Add to an error of the block the sentence that says where the refused value comes from."""
    try:
        yield
    except GerlError as error:
        if why:
            error.add_note(why)
        raise


def begin_ray(config: ClusterConfig, ends: contextlib.ExitStack) -> "RaySession":
    """Start or join Ray while the training loop and torch are imported; `ends` ends it if the run does not begin."""
    from gerl.cluster import open_ray

    ray = open_ray(config)
    ends.callback(ray.__exit__, None, None, None)  # without the error, which is not Ray's
    with waiting("starting Ray"), imported_meanwhile("gerl.trainer.loop"):
        return ray.__enter__()


@contextlib.contextmanager
def start_cluster(machines: "Cluster") -> Iterator["Cluster"]:
    """Start the cluster, and log a line if that takes a while."""
    with contextlib.ExitStack() as stack:
        with waiting("starting Ray" if machines.remote else "preparing the devices"):
            stack.enter_context(machines)
        yield machines


def closing_screen(config: Config, run_dir: Path, step: int, seconds: float) -> str:
    """Return the closing summary: reward before and after, duration, paths, code that samples a held-out image.

    `step`: the last one.
    """
    validations = load_validations(run_dir)
    lines = ["", f"finished in {seconds / 60:.1f} min; run folder: {run_dir}"]
    if len(validations) > 1:
        first, last = validations[0], validations[-1]
        success = thresholds(config.reward)
        for name in first.by_scorer:
            scored = zip(first.by_scorer[name], last.by_scorer.get(name, ()), strict=False)
            pairs = [(a, b) for a, b in scored if a is not None and b is not None]  # no other reward is comparable
            columns = {name: pairs}
            if name in success:
                columns[f"{name}/{SUCCESS}"] = [
                    (float(a >= success[name]), float(b >= success[name])) for a, b in pairs
                ]
            some = f"{len(pairs)} of " if len(pairs) < len(first.prompts) else ""
            for column, values in columns.items():
                before, after = (mean([pair[i] for pair in values]) for i in (0, 1))
                shown = "not scored" if before is None or after is None else f"{before:.3f} before, {after:.3f} after"
                lines.append(f"{column} on {some}{held_out_words(len(first.prompts), first.each)}: {shown}")
    choice = choice_of(run_dir)
    offered = step if choice is None else choice.offered
    folder = run_dir / "checkpoints" / f"step_{offered}"
    trained = f"LoRA:   {folder / 'lora'}" if config.model.train == "lora" else f"model:  {folder}"
    written = (
        run_dir / "report.html" if config.logger.report else f"python -m gerl.run.report {typed({'run': str(run_dir)})}"
    )
    lines += [f"report: {written}"] + ([] if offered is None else [trained])
    if choice is not None and offered != step:
        note = "" if offered is None else "the last step has signals; use "
        lines.append(f"guard:  {note}{choice.why}")
    lines.append("")
    if code := usage(run_dir, asdict(config), validations):
        sampled = any(v.drawing is not None and f"step_{v.step}" == folder.name for v in validations)
        lines += [f"sample {'the first held-out image of the report' if sampled else 'with it'} in plain diffusers:"]
        lines += [f"    {line}".rstrip() for line in code.splitlines()]
    return "\n".join([*lines, ""])

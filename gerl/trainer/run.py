"""A run from its configuration to the report: check, start the cluster, train."""

import contextlib
import logging
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gerl.commandline import signals
from gerl.commandline.command import PAGE, watching
from gerl.commandline.imports import importing
from gerl.commandline.waiting import waiting
from gerl.config.summary import described
from gerl.errors import GerlError
from gerl.model.paths import local_lora, resolve
from gerl.rewards.checks import read_prompts, read_regularising
from gerl.rewards.gradients import differentiated
from gerl.run.log import RunLog
from gerl.run.redaction import secrets
from gerl.run.report import write_report
from gerl.run.session import has_results, session
from gerl.run.trackers import check_trackers
from gerl.trainer.closing import closing_screen
from gerl.trainer.folder import RunFolder, identity

if TYPE_CHECKING:
    from gerl.cluster import Cluster
    from gerl.trainer.ray_diffusion_trainer import RayDiffusionTrainer

logger = logging.getLogger("gerl")


def run(folder: RunFolder, arguments: Sequence[str] = ()) -> Path:
    """Check everything that can be checked, train, write the report; returns the run folder.

    `arguments`: those of the command line, for the run card.
    """
    for _ in each_step(folder, arguments):
        pass
    return folder.path


def each_step(folder: RunFolder, arguments: Sequence[str] = ()) -> Generator["RayDiffusionTrainer"]:
    """As `run`, but yields the trainer after each step; it ends, and saves, where nobody asks for the next one."""
    config, run_dir, start = folder.composed.config, folder.path, time.perf_counter()
    with RunLog() as log:
        check_trackers(config.logger)
        resolve(config.model.path)
        model = config.model if folder.checkpoint is None else config.model.carried_on()
        if model.lora is not None:
            local_lora(model.lora)
        with waiting("reading the prompts"):
            with explained(folder.composed.kept):
                prompts = read_prompts(config, "data.train", config.data.train)
            regularising = read_regularising(config)
        if config.algorithm.differentiates:
            differentiated(config)
        held = config.validation
        held_out = read_prompts(config, "validation.data", held.data, held.max_prompts) if held.data else []
        # Here and not above: these import torch, which takes seconds, and the keys and files come first.
        with importing():
            from gerl.cluster import Cluster
            from gerl.trainer.ray_diffusion_trainer import RayDiffusionTrainer
            from gerl.trainer.rescue import interruption_said

            machines = Cluster(config.cluster, config.reward.gpu_shares)
            if not machines.remote:  # else the first thing the workers do: this process needs no libraries of models
                from gerl.workers.checks import check_start  # which imports them

                check_start(replace(config, model=model), machines.device)
        with session(run_dir, log, arguments, machines.words()) as begin:
            folder.open(begin)
            logger.info("%s", described(config, folder.composed.preset))
            if folder.composed.kept:
                logger.info("%s", folder.composed.kept)
            if found := secrets(asdict(config)):
                logger.warning(
                    "the secret in %s is stored in config.yaml and in the checkpoints' state.json, and nowhere "
                    "else: share only the lora folders of %s",
                    *(" and ".join(found), run_dir),
                )
            logger.info("run folder: %s", run_dir)
            logger.info("to watch it at http://localhost:%d: %s", PAGE, watching(run_dir))
            with interruption_said(run_dir, config.trainer.steps):
                with entered(machines) as cluster, _reported(folder):
                    trainer = RayDiffusionTrainer(config, run_dir, cluster, prompts, held_out, identity(config))
                    trainer.regularising = regularising
                    with contextlib.closing(trainer.each_step(folder)) as steps:
                        for _ in steps:
                            yield trainer
                logger.info("%s", closing_screen(config, run_dir, held_out, time.perf_counter() - start))


@contextlib.contextmanager
def explained(why: str) -> Iterator[None]:
    """Add a sentence to an error, if there is one: where what it complains of comes from."""
    try:
        yield
    except GerlError as error:
        if why:
            error.add_note(why)
        raise


@contextlib.contextmanager
def entered(machines: "Cluster") -> Iterator["Cluster"]:
    """The cluster, started; what that waits for is said."""
    with contextlib.ExitStack() as stack:
        with waiting("starting Ray" if machines.remote else "preparing the devices"):
            stack.enter_context(machines)
        yield machines


@contextlib.contextmanager
def _reported(folder: RunFolder) -> Iterator[None]:
    """The report is written at the end, also of a run that stops early, whose error stays the one that is raised."""
    if not folder.composed.config.logger.report:
        yield
        return
    try:
        yield
    except BaseException:
        signals.answered()  # the run ends: a signal from here on must not hide why
        if folder.accepted and has_results(folder.path):
            try:
                write_report(folder.path)
            except GerlError as second:
                logger.warning("the report was not written: %s", second)
        raise
    with waiting("writing the report"), signals.deferred():
        write_report(folder.path)

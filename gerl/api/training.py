"""Training from Python: `gerl.train(pipe, reward=function, prompts=[...])`, or step by step with `gerl.Trainer`."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gerl.api.notebook import Board, in_notebook
from gerl.api.pipelines import path_of
from gerl.api.runs import Run
from gerl.api.settings import (
    Prompts,
    Reward,
    Scorers,
    nested,
    overrides_of,
    scorers_of,
    write_experiment,
    write_prompts,
)
from gerl.commandline.command import with_notes
from gerl.commandline.hydra_options import quoted
from gerl.errors import ConfigError, GerlError, Stopped
from gerl.objects import offered
from gerl.trainer.launch import launch_steps
from gerl.trainer.run_folder import open_run
from gerl.utils.files import writing

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from gerl.model.policy import Policy

logger = logging.getLogger("gerl")
DEFAULT = "awm_fast"  # algorithm
MARK = "_gerl_trained"  # of a pipeline in memory: the folder of the run that trained it, one of its parameters
# the arguments that stand for keys
ARGUMENTS = {
    "model.path": "pipe", "reward.scorers": "reward", "data.train": "prompts", "validation.data": "held_out",
    "algorithm": "algorithm", "trainer.steps": "steps", "experiment": "experiment", "cluster.num_workers": "workers",
    "trainer.seed": "seed", "hydra.run.dir": "out", "checkpoint.resume": "resume",
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A finished trainer step, or the validation before the first one (0): its number and the row of its metrics."""

    number: int
    metrics: Mapping[str, float]

    @property
    def reward(self) -> float | None:
        """Mean reward of the images that were trained on; None at step 0."""
        return self.metrics.get("reward/mean")

    @property
    def held_out(self) -> float | None:
        """Mean reward of the held-out prompts; None where they were not drawn after this step."""
        return self.metrics.get("val/reward/mean")


class Trainer:
    """A run that is about to start, an iterator over its steps: `for step in gerl.Trainer(...): ...`.

    `pipe`: a pipeline of diffusers in memory, trained in place if the run is in this process, or a hub id or folder.
    `reward`: a function `(images, prompts, metadata) -> list of float` (or of images alone), the name of one of gerl's
    scorers, a Python file, or several by name, each of these or a dictionary of a scorer's keys (`weight`,
    `function`, ...). `prompts` and `held_out`: texts, dictionaries with the key `prompt` and further columns, or a
    file. `experiment`: a recipe or yaml file that the other arguments change. `algorithm`: a preset, by default that of
    the experiment, or `awm_fast` without one.
    `workers`: None trains in this process; a number of workers over Ray. `name` and `out`: of the run folder, by
    default `outputs/NAME/TIME`. `resume`: the folder of a run to carry on, with its own prompts; `keys` change it.
    Further `keys` are those of the command line: `**{"sampling.height": 512}` or `sampling={"height": 512}`.

    A loop that is left early ends the run with a checkpoint of its last step. Raises `GerlError`, as the command does.
    """

    def __init__(
        self,
        pipe: str | Path | DiffusionPipeline | None = None,
        reward: Reward | None = None,
        prompts: Prompts | None = None,
        *,
        held_out: Prompts | None = None,
        algorithm: str | None = None,
        steps: int | None = None,
        experiment: str | Path | None = None,
        workers: int | None = None,
        seed: int | None = None,
        name: str = "python",
        out: str | Path | None = None,
        resume: str | Path | None = None,
        **keys: Any,
    ) -> None:
        time = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")[:-3]
        self.folder = Path(resume or out or Path("outputs") / name / time).expanduser().absolute()
        self.resumes, self.name, self.base = resume is not None, name, experiment
        self.pipe = None if isinstance(pipe, str | Path) else pipe
        self.scorers = Scorers() if reward is None else scorers_of(reward)
        self.algorithm = algorithm or (DEFAULT if experiment is None else None)
        self.prompts, self.held_out = prompts, held_out
        given = {"model.path": str(pipe) if isinstance(pipe, str | Path) else None, "cluster.num_workers": workers}
        given |= {"trainer.steps": steps, "trainer.seed": seed}
        self.keys = nested(keys, {key: value for key, value in given.items() if value is not None}, ARGUMENTS)
        self.keys.setdefault("logger", {}).setdefault("progress", not in_notebook())
        if workers is None:
            self.keys.setdefault("cluster", {}).setdefault("launcher", "local")
        self.begun = False
        self.policy: Policy | None = None  # of the pipeline in memory, once it is trained
        if not self.resumes and (reward is None or prompts is None or pipe is None) and experiment is None:
            missing = [n for n, v in (("pipe", pipe), ("reward", reward), ("prompts", prompts)) if v is None]
            raise ConfigError(
                f"{' and '.join(missing)} missing: set them, or use an experiment that sets them, or resume"
            )

    @property
    def run(self) -> Run:
        """The run as far as it is; raises `GerlError` before its first step."""
        return Run(self.folder)

    def __iter__(self) -> Generator[Step]:
        """The run, as a generator of its steps, which is all that holds it: where it is dropped the run ends."""
        if self.begun:
            raise GerlError("a Trainer can run once, and this one has already started: create another")
        self.begun = True
        return self._steps()

    def _steps(self) -> Generator[Step]:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        logger.setLevel(logging.INFO)
        made = not self.folder.exists()
        try:
            arguments, path = self.arguments()
            with offered(self.scorers.functions, {} if self.pipe is None else {path: self.pipe}), self._in_place():
                folder = open_run(arguments)
                if folder is None:  # it is finished
                    return
                board = Board(folder.composed.config.trainer.steps, self.folder) if in_notebook() else None
                with folder, contextlib.closing(launch_steps(folder, arguments)) as trainers:
                    for trainer in trainers:
                        step = Step(trainer.state.step, dict(trainer.latest))
                        if board is not None:
                            board.update(step.number, step.metrics)
                        if self.pipe is not None and step.number and not trainer.fleet.workers.remote:
                            self.policy = trainer.fleet.workers.workers[0].policy
                        yield step
        except Stopped as stopped:  # somebody pressed a button: the run is what it has become
            logger.info("%s", with_notes(str(stopped), stopped))
        finally:
            if made and self.folder.exists() and not (self.folder / "metrics.jsonl").exists():
                shutil.rmtree(self.folder, ignore_errors=True)  # a start that failed leaves nothing

    def arguments(self) -> tuple[list[str], str]:
        """The command line of the run, whose files are written, and the value of model.path."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        path = ""
        if self.pipe is not None:
            from gerl.model.denoisers import check_offered  # in here: with a path nothing of diffusers is needed

            self._remove_trained()
            check_offered(self.pipe)
            path = path_of(self.pipe, self.folder / "base")
            self.pipe.register_to_config(_name_or_path=path)  # from where what follows the run can read it
        values = dict(self.keys)
        if path:
            dtype = str(self.pipe.dtype).removeprefix("torch.")  # type: ignore[union-attr]
            values["model"] = {"path": path, "dtype": dtype, **values.get("model", {})}
        if self.scorers.keys:
            values["reward"] = {**values.get("reward", {}), "scorers": self.scorers.keys}
        if self.resumes:
            folder = [f"checkpoint.resume={quoted(str(self.folder))}", f"hydra.run.dir={quoted(str(self.folder))}"]
            return [*folder, *overrides_of(self.keys)], path
        data: dict[str, Any] = dict(values.get("data", {}))
        if self.prompts is not None:
            data["train"] = write_prompts(self.prompts, self.folder / "prompts.jsonl")
        validation: dict[str, Any] = dict(values.get("validation", {}))
        if self.held_out is not None or self.base is None:
            held_out = None if self.held_out is None else write_prompts(self.held_out, self.folder / "held_out.jsonl")
            validation.setdefault("data", held_out)
        values |= {"data": data, "validation": validation}
        file = write_experiment(self.folder, self.name, self.base, self.algorithm, values)
        return [f"experiment={file}", f"hydra.run.dir={quoted(str(self.folder))}"], path

    def _remove_trained(self) -> None:
        """Remove the LoRA of an earlier `gerl.train` from the pipeline, so that a notebook cell can be run twice."""
        from gerl.model.denoisers import find_denoisers, has_adapter
        from gerl.model.lora import ADAPTER, remove_lora

        folder, trained = getattr(self.pipe, MARK, (None, None))
        denoisers = [d for d in find_denoisers(self.pipe).values() if has_adapter(d)] if folder else []
        there = any(p is trained for denoiser in denoisers for p in denoiser.parameters())
        if there and all(set(getattr(d, "peft_config", {})) == {ADAPTER} for d in denoisers):
            for denoiser in denoisers:
                remove_lora(denoiser)
            logger.info(
                "the LoRA of %s is removed from the pipeline; model.lora=%s would train it further", folder, folder
            )

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """The pipeline in memory gets back what training sets aside, and keeps the LoRA, its average.

        Where no step was finished it keeps none: another attempt would be refused for it.
        """
        if self.pipe is None:
            yield
            return
        from gerl.model.denoisers import find_denoisers, has_adapter
        from gerl.model.lora import remove_lora
        from gerl.model.prompts import detach

        components, bar = dict(self.pipe.components), getattr(self.pipe, "_progress_bar_config", {})
        modules = [component for component in components.values() if hasattr(component, "parameters")]
        open_to_training = [p for module in modules for p in module.parameters() if p.requires_grad]
        try:
            yield
        finally:
            detach(self.pipe)
            for name in ("scheduler", "safety_checker"):
                if name in components and getattr(self.pipe, name, None) is not components[name]:
                    setattr(self.pipe, name, components[name])
            self.pipe.set_progress_bar_config(**bar)
            for p in open_to_training:
                p.requires_grad_()
            if self.policy is not None:
                self.policy.keep_average()
                if self.policy.trained and has_adapter(next(iter(self.policy.denoisers.values()))):
                    setattr(self.pipe, MARK, (self.folder, next(iter(self.policy.trained.values()))))
            else:
                for denoiser in filter(has_adapter, find_denoisers(self.pipe).values()):
                    remove_lora(denoiser)


def train(
    pipe: str | Path | DiffusionPipeline | None = None,
    reward: Reward | None = None,
    prompts: Prompts | None = None,
    *,
    on_step: Callable[[Step], object] | None = None,
    on_validation: Callable[[Step], object] | None = None,
    **arguments: Any,
) -> Run:
    """Train, and return the run: `run.lora`, `run.metrics`, `run.images()`, `run.show()`.

    `on_step` is called with each finished step, `on_validation` with those after which held-out prompts were drawn. The
    other arguments are those of `Trainer`. Raises `GerlError`, as the command does, with what was finished saved.
    """
    trainer = Trainer(pipe, reward, prompts, **arguments)
    with contextlib.closing(iter(trainer)) as steps:
        for step in steps:
            if on_step is not None and step.number:
                on_step(step)
            if on_validation is not None and step.held_out is not None:
                on_validation(step)
    return trainer.run

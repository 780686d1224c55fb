"""Sweeps (`-m`): one run per combination of values, and the table of results."""

import ctypes
import json
import logging
import math
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import IO, Any, NotRequired

from hydra import version
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.types import RunMode
from omegaconf import DictConfig
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from gerl.commandline import composition, signals
from gerl.config.bounded_text import read_json
from gerl.config.reading import typed
from gerl.errors import ConfigError, GerlError, TrainingError
from gerl.progress import duration
from gerl.run.card import CARD, read_sessions
from gerl.run.session import METRICS
from gerl.run.tracking import read_metrics
from gerl.utils.files import csv_text, reason, write_file

# Hydra's own (basic) sweeper trains with all combinations, one after the other; its plugins, where they are installed,
# choose them (`hydra/sweeper=optuna`) or start them elsewhere (`hydra/launcher=submitit_slurm`).

logger = logging.getLogger("gerl")
PROGRAM = "gerl.trainer.main_flowgrpo"
PR_SET_PDEATHSIG = 1  # of prctl(2)
PLAIN = re.compile(r"[\w.+-]+")  # values that can be part of a folder's name
MOST_NAMED = 6  # keys in the name of a folder
MOST_TRIED = 32  # values of a key, and combinations of the other keys' values with one of them
# Hydra's settings of a sweep, where the command line has no others: gerl's log stays, and a run that fails is no end
SETTINGS = {"hydra/hydra_logging": "none", "hydra/job_logging": "none", "hydra.output_subdir": "null"}
OPTUNA = {"hydra.sweeper.direction": "maximize", "hydra.sweeper.max_failure_rate": "1.0"}


@dataclass(frozen=True)
class Plan:
    """The overrides that Hydra sweeps over, the registered names of the user's files, and the overrides of the runs.

    `fixed`: keys equal in all runs. `batch`: the overrides of each run, if known beforehand; otherwise
    `choices`: the values of each key, for many values the first and last, for an interval both ends.
    """

    overrides: list[str]
    files: Mapping[str, str]
    fixed: list[str]
    batch: list[list[str]] | None
    choices: list[list[str]] = field(default_factory=list)


def sweep(arguments: Sequence[str]) -> Path:
    """Train once for each combination; returns the folder of the sweep, with `sweep.csv` and `sweep.json`.

    Raises `ConfigError` before the first run if a combination cannot be composed, or if a plugin could choose a value
    that no run can have. Raises `TrainingError` at the end if a run failed; the other runs are finished first.
    """
    plan = _plan(arguments)
    for run in plan.batch or ():
        composition.compose_run(_arguments(run, plan))
    _check_choices(plan)
    composition.register()
    before = time.time()
    hydra = _hydra()
    folder = Path()
    try:
        with composition.sentences():
            groups = [o for o in plan.overrides if composition.key_of(o).startswith("hydra/")]
            settings = hydra.compose_config("config", groups, RunMode.MULTIRUN)
        for override in (o for o in plan.overrides if composition.key_of(o).startswith("hydra.")):
            composition.set_hydra(settings, composition.read(override))  # raises what is wrong with it
        with composition.sentences():
            config = hydra.compose_config("config", plan.overrides, RunMode.MULTIRUN)
            HydraConfig.instance().set_config(config)
            folder = Path(str(config.hydra.sweep.dir))
            _make(folder)
            if plan.batch is not None:
                logger.info("a sweep of %d runs in %s", len(plan.batch), folder)
            task = partial(train_once, plan, folder.absolute())
            hydra.multirun("config", task, [*plan.overrides, f"hydra.sweep.dir={composition.quoted(str(folder))}"])
    except KeyboardInterrupt as error:
        signals.answered()
        if read_jobs(folder):
            write_table(folder)
            error.add_note(f"the table of the sweep is {folder / 'sweep.csv'}; {_how_to_resume(folder)}")
        raise
    except GerlError:
        if not any(job["code"] for job in read_jobs(folder)):
            raise
    finally:
        GlobalHydra.instance().clear()
    _end(folder, before)
    return folder


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"hydra.sweep.dir={folder}: the folder cannot be created ({reason(error)}); choose another"
        ) from None


def _hydra() -> Hydra:
    version.setbase("1.3")
    GlobalHydra.instance().clear()
    return Hydra.create_main_hydra2("gerl", create_config_search_path(str(composition.config_folder())))


def _end(folder: Path, before: float) -> None:
    write_table(folder)
    jobs = read_jobs(folder)
    logger.info("\n%s\n%s", table(jobs), folder / "sweep.csv")
    if failed := [job for job in jobs if job["code"] and job["at"] >= before]:
        names = ", ".join(Path(job["folder"]).name for job in failed)
        raise TrainingError(f"{len(failed)} of {len(jobs)} runs of the sweep failed: {names}; {_how_to_resume(folder)}")


def _how_to_resume(folder: Path) -> str:
    again = typed({"checkpoint.resume": "auto", "hydra.sweep.dir": str(folder)})
    return f"the same command with {again} resumes it"


def _plan(arguments: Sequence[str]) -> Plan:
    arguments = composition.normal(arguments, "hydra.sweep.dir")
    composition.check_arguments(arguments)
    values = {composition.key_of(argument): argument.partition("=")[2] for argument in arguments}
    _check(values)
    overrides, files = list[str](), dict[str, str]()
    with composition.sentences():
        for argument in arguments:
            if argument.startswith(tuple(f"{group}=" for group in composition.CHOICES)):
                argument = _by_name(argument, files)
            overrides += composition.hydra_overrides(argument)
        loader = _hydra().config_loader if any("glob(" in override for override in overrides) else None
        parsed = OverridesParser.create(loader).parse_overrides(overrides)
    swept = [override for override in parsed if override.is_sweep_override()]
    sweeper = values.get("hydra/sweeper", "basic")
    if not swept:
        raise ConfigError(
            "-m: there is nothing to sweep over; give a key several values, such as trainer.seed=1,2, or remove -m"
        )
    if sweeper == "basic" and (interval := next((o for o in swept if not o.is_discrete_sweep()), None)):
        raise ConfigError(
            f"{interval.input_line}: Hydra's own sweeper takes values, such as {interval.key_or_group}=1e-3,1e-4; "
            "an interval needs a sweeper plugin, hydra/sweeper=optuna"
        )
    settings = SETTINGS | (OPTUNA if sweeper == "optuna" else {}) | _names(swept)
    settings = {key: value for key, value in settings.items() if key not in values}
    batch = None if sweeper != "basic" or any(key.startswith("hydra.sweeper.") for key in values) else _batch(parsed)
    same = [o.input_line or "" for o in parsed if o not in swept and not o.is_hydra_override()]
    return Plan(
        overrides=[*overrides, *(f"{key}={value}" for key, value in settings.items()), "hydra.mode=MULTIRUN"],
        files=files,
        fixed=[composition.key_of(override.input_line or "") for override in parsed if override not in swept],
        batch=batch,
        choices=[] if batch is not None else [[values] for values in same] + [_choices(override) for override in swept],
    )


def _choices(override: Override) -> list[str]:
    """Expand an argument with several values into one argument each; of more than `MOST_TRIED` the first and last."""
    value = override.value()
    if isinstance(value, IntervalSweep):
        values = [str(value.start), str(value.end)]
    else:
        values = list(override.sweep_string_iterator())
    if len(values) > MOST_TRIED:
        values = [values[0], values[-1]]
    return [f"{override.get_key_element()}={each}" for each in values]


def _check_choices(plan: Plan) -> None:
    """Raise `ConfigError` for a value that is invalid with every combination of the other keys."""
    swept = [i for i, values in enumerate(plan.choices) if len(values) > 1]
    for i in swept:
        for value in plan.choices[i]:
            runs = product(*plan.choices[:i], [value], *plan.choices[i + 1 :])
            if (refusal := _refusal(list(islice(runs, MOST_TRIED + 1)), plan)) is not None:
                raise refusal


def _refusal(runs: Sequence[Sequence[str]], plan: Plan) -> ConfigError | None:
    """Return why none of `runs` can be composed; None if one can, or if there are more than `MOST_TRIED`."""
    first = None
    for run in runs[:MOST_TRIED]:
        try:
            composition.compose_run(_arguments(run, plan))
        except ConfigError as error:
            first = first or error
        else:
            return None
    return first if len(runs) <= MOST_TRIED else None


def _batch(parsed: Sequence[Override]) -> list[list[str]]:
    """Return the overrides of each run of Hydra's basic sweeper."""
    with composition.sentences():
        (batch,) = BasicSweeper.split_arguments([o for o in parsed if not o.is_hydra_override()], None)
    return batch


def _check(values: Mapping[str, str]) -> None:
    """Raise `ConfigError` for keys that cannot be swept over."""
    if "hydra.run.dir" in values:
        raise ConfigError(
            f"hydra.run.dir={values['hydra.run.dir']}: with -m each run has its own folder; set "
            "hydra.sweep.dir=FOLDER for all of them"
        )
    if params := next((key for key in values if key.startswith("hydra.sweeper.params")), None):
        raise ConfigError(f"{params}: set the values on the key itself, such as actor.lr=interval(1e-5,1e-3)")
    if (resume := values.get("checkpoint.resume", "never")) not in ("auto", "never"):
        raise ConfigError(
            f"checkpoint.resume={resume}: with -m use checkpoint.resume=auto and set the sweep with "
            "hydra.sweep.dir=FOLDER"
        )


def _by_name(argument: str, known: dict[str, str]) -> str:
    """Replace the files in `experiment=A[,B ...]` or `algorithm=` by their registered names, noted in `known`."""
    group, _, values = argument.partition("=")
    if "(" in values:  # choice(...) or glob(...), of gerl's own
        return argument
    names = []
    for value in values.split(","):
        override = composition.own_file(f"{group}={value}")
        if override != f"{group}={value}":
            known[override] = f"{group}={Path(value).expanduser().absolute()}"
        names.append(override.removeprefix(f"{group}="))
    return f"{group}={','.join(names)}"


def _names(swept: Sequence[Override]) -> dict[str, str]:
    """Return the setting that names a run's folder by number and swept values, without signs that a shell quotes."""

    def is_plain(override: Override) -> bool:
        if not override.is_discrete_sweep():
            return True  # an interval
        return all(PLAIN.fullmatch(value) for value in override.sweep_string_iterator())

    parts = list[str]()
    for key in (override.key_or_group for override in swept if is_plain(override)):
        value = f"hydra.runtime.choices.{key}" if key in composition.CHOICES else key
        parts.append(f"{key.rpartition('.')[2]}_${{{value}}}")
    name = "+".join(parts[:MOST_NAMED])
    return {"hydra.sweep.subdir": f"${{hydra.job.num}}_{name}" if name else "${hydra.job.num}"}


def _arguments(overrides: Sequence[str], plan: Plan) -> list[str]:
    """Return the command line of a run from Hydra's overrides."""
    return [plan.files.get(override, override) for override in overrides]


def train_once(plan: Plan, folder: Path, config: DictConfig) -> float:
    """Run one training in a subprocess (Hydra's task function); returns the final held-out reward for the sweeper.

    `folder`: of the sweep. Without held-out prompts the reward of the last step is returned. A failed run returns NaN,
    or raises `TrainingError` for the sweepers of plugins, which count failures.
    """
    del config  # the run composes its configuration again, with all checks
    hydra = HydraConfig.get()
    overrides, place = [str(override) for override in hydra.overrides.task], Path(hydra.runtime.output_dir)
    swept = [override for override in overrides if composition.key_of(override) not in plan.fixed]
    run_dir, started = _shown(place), time.time()
    logger.info("\nrun %d of the sweep: %s", hydra.job.num, " ".join(swept))
    job = {"number": int(hydra.job.num), "overrides": overrides, "swept": swept, "code": None, "at": started}
    write_file(place / JOB, json.dumps(job) + "\n")
    code: int | None = None
    try:
        code = run_training([*_arguments(overrides, plan), f"hydra.run.dir={composition.quoted(str(run_dir))}"])
    finally:
        write_file(place / JOB, json.dumps(job | {"code": code, "seconds": round(time.time() - started, 1)}) + "\n")
        write_table(folder)
    if code and plan.batch is None:
        raise TrainingError(f"the run {run_dir} failed with exit code {code}")
    final = result(place)["final"]
    return float("nan") if code or final is None else float(final)


def _shown(path: Path) -> Path:
    """Return the path relative to the current folder, if inside it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def end_with_parent() -> None:
    """Ask Linux to send SIGTERM to this process, a child, when its parent dies, by SIGKILL too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signals.SIGTERM)


def run_training(arguments: Sequence[str], log: IO[bytes] | None = None) -> int:
    """Train in a subprocess and return its exit code; a signal ends the training, with its checkpoint, first.

    `log`: a file for what it prints.
    """
    process: subprocess.Popen[bytes] | None = None

    def end() -> None:
        if process is not None:
            process.send_signal(signals.received() or signals.SIGTERM)

    with signals.handled(), signals.before_leaving(end):
        try:
            with signals.deferred():
                process = subprocess.Popen(
                    [sys.executable, "-m", PROGRAM, *arguments], stdout=log, stderr=log, preexec_fn=end_with_parent
                )
            return process.wait()
        except KeyboardInterrupt:
            signals.answered()
            end()  # a terminal sends Ctrl-C to both: repeats within a second count once
            if process is not None:
                process.wait()
            raise


# --- The table of a sweep, from the metrics of its runs: `sweep.csv`, `sweep.json`, and on the terminal

JOB = "job.json"  # in the folder of a run: number in the sweep, overrides, exit
HELD_OUT, TRAINED = "val/reward/mean", "reward/mean"


class Job(TypedDict):
    """A started run of a sweep; `code`: None while it runs."""

    number: int
    code: int | None
    overrides: list[str]
    swept: list[str]
    folder: str
    at: float  # seconds since 1970 of its start
    seconds: NotRequired[float]


def read_jobs(folder: Path) -> list[Job]:
    """Return the started runs of a sweep by number."""
    paths = folder.glob(f"*/{JOB}")
    return sorted(map(_read_job, paths), key=lambda job: job["number"])


def _read_job(path: Path) -> Job:
    try:
        return TypeAdapter(Job).validate_python({**read_json(path), "folder": str(path.parent)})
    except (OSError, TypeError, ValueError) as error:
        raise GerlError(f"{path} cannot be read ({reason(error)}): repair it, or move its folder away") from None


def result(run_dir: Path) -> dict[str, Any]:
    """Return `final`, `best` and `best_step` of `reward`, the held-out or else the training one; None: not measured."""
    try:
        rows = read_metrics(run_dir / METRICS)
    except GerlError:  # a damaged file must not hide the other runs
        rows = []
    points: dict[str, list[tuple[float, int]]] = {HELD_OUT: [], TRAINED: []}
    for name, values in points.items():
        pairs = ((row.get(name), row["step"]) for row in rows)
        values += [(float(v), step) for v, step in pairs if isinstance(v, int | float) and math.isfinite(v)]
    reward = next((name for name, values in points.items() if values), None)
    measured = points[reward] if reward else []
    best, step = max(measured, default=(None, None))
    return {"final": measured[-1][0] if measured else None, "best": best, "best_step": step, "reward": reward}


def write_table(folder: Path) -> None:
    """Write `sweep.csv` and `sweep.json` into the folder of a sweep."""
    jobs = read_jobs(folder)
    rows = [_row(job) for job in jobs]
    columns = ["number", *_varied(jobs), "reward", "final", "best", "best_step", "end", "seconds", "folder"]
    csv = csv_text(columns, [{column: row.get(column) for column in columns} for row in rows])
    write_file(folder / "sweep.csv", csv)
    shown = [{k: v for k, v in row.items() if k in columns} for row in rows]
    whole = [row | {"overrides": job["overrides"]} for row, job in zip(shown, jobs, strict=True)]
    write_file(folder / "sweep.json", json.dumps({"runs": whole}, indent=2) + "\n")


def table(jobs: Sequence[Job]) -> str:
    """Format the runs of a sweep as aligned columns for a terminal."""
    varied = _varied(jobs)
    lines = [["", *varied, "final", "best", "at step", "time", "end"]]
    for row in map(_row, jobs):
        numbers = ["" if row[name] is None else f"{row[name]:.3f}" for name in ("final", "best")]
        step = "" if row["best_step"] is None else str(row["best_step"])
        took = duration(row["seconds"]) if row["seconds"] is not None else ""
        end = textwrap.shorten(row["end"], 60, placeholder=" ...")
        lines.append([str(row["number"]), *(str(row.get(key, "")) for key in varied), *numbers, step, took, end])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    if any(result(Path(job["folder"]))["reward"] == TRAINED for job in jobs):
        shown.append("final and best are of the training reward where a run has no held-out prompts (validation.data)")
    return "\n".join(shown)


def _varied(jobs: Sequence[Job]) -> list[str]:
    """Return the keys that were swept over."""
    return list(dict.fromkeys(key for job in jobs for key in _given(job)))


def _given(job: Job) -> dict[str, str]:
    pairs = (override.partition("=") for override in job["swept"])
    return {name.lstrip("+"): value for name, _, value in pairs}


def _row(job: Job) -> dict[str, Any]:
    """Return the columns of a run, one for each swept key included."""
    folder, code = Path(job["folder"]), job["code"]
    sessions = read_sessions(folder / CARD)
    error = sessions[-1].get("error") if sessions and code else None
    end = "unfinished" if code is None else "finished" if code == 0 else error or f"exit code {code}"
    values = {"number": job["number"], "end": end, "seconds": job.get("seconds"), "folder": job["folder"]}
    return {**_given(job), **result(folder), **values}

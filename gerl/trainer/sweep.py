"""A sweep, `-m`: one run for each combination of values, and the table of their results."""

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
from typing import Any

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

from gerl.commandline import signals
from gerl.commandline.command import duration
from gerl.commandline.composition import (
    CHOICES,
    check_arguments,
    compose_run,
    config_folder,
    hydra_overrides,
    key_of,
    normal,
    own_file,
    quoted,
    read,
    register,
    sentences,
    set_hydra,
)
from gerl.config.reading import typed
from gerl.errors import ConfigError, GerlError, TrainingError
from gerl.run.card import CARD, read_sessions
from gerl.run.session import METRICS
from gerl.run.tracking import read_metrics
from gerl.utils.files import csv_text, reason, write_file

# --- A sweep, `-m`: one run for each combination of values, started by Hydra's sweeper and launcher, each in a process.
#
# Hydra's own (basic) sweeper trains with all combinations, one after the other; its plugins, where they are installed,
# choose them (`hydra/sweeper=optuna`) or start them elsewhere (`hydra/launcher=submitit_slurm`).

logger = logging.getLogger("gerl")
PROGRAM = "gerl.trainer.main_flowgrpo"
PLAIN = re.compile(r"[\w.+-]+")  # values that can be a part of a folder's name
MOST_NAMED = 6  # keys in the name of a folder
MOST_TRIED = 32  # values of a key, and combinations of the other keys' values with one of them
# Hydra's settings of a sweep, where the command line has no others: gerl's log stays, and a run that fails is no end
SETTINGS = {"hydra/hydra_logging": "none", "hydra/job_logging": "none", "hydra.output_subdir": "null"}
OPTUNA = {"hydra.sweeper.direction": "maximize", "hydra.sweeper.max_failure_rate": "1.0"}


@dataclass(frozen=True)
class Plan:
    """The overrides that Hydra sweeps over, the user's files by what it knows them by, and what runs get.

    fixed: keys that are the same in all. batch: the overrides of each run, if they can be told beforehand. Otherwise
    choices: for each key, what it may be; of many values the first and last, of an interval both ends.
    """

    overrides: list[str]
    files: Mapping[str, str]
    fixed: list[str]
    batch: list[list[str]] | None
    choices: list[list[str]] = field(default_factory=list)


def sweep(arguments: Sequence[str]) -> Path:
    """Train once for each combination; returns the folder of the sweep, with `sweep.csv` and `sweep.json`.

    Raises `ConfigError` before the first run if a combination cannot be composed, or if a plugin that chooses from
    values might choose one that cannot, whatever the other keys are, and `TrainingError` at the end if a
    run has failed, which ends no other.
    """
    plan = _plan(arguments)
    for run in plan.batch or ():
        compose_run(_arguments(run, plan))
    _check_choices(plan)
    register()
    before = time.time()
    hydra = _hydra()
    folder = Path()
    try:
        with sentences():
            groups = [o for o in plan.overrides if key_of(o).startswith("hydra/")]
            settings = hydra.compose_config("config", groups, RunMode.MULTIRUN)
        for override in (o for o in plan.overrides if key_of(o).startswith("hydra.")):
            set_hydra(settings, read(override))  # says what is wrong with it
        with sentences():
            config = hydra.compose_config("config", plan.overrides, RunMode.MULTIRUN)
            HydraConfig.instance().set_config(config)
            folder = Path(str(config.hydra.sweep.dir))
            _make(folder)
            if plan.batch is not None:
                logger.info("a sweep of %d runs in %s", len(plan.batch), folder)
            task = partial(train_once, plan, folder.absolute())
            hydra.multirun("config", task, [*plan.overrides, f"hydra.sweep.dir={quoted(str(folder))}"])
    except KeyboardInterrupt as error:
        signals.answered()
        if read_jobs(folder):
            write_table(folder)
            error.add_note(f"the table of the sweep is {folder / 'sweep.csv'}; {_carry_on(folder)}")
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
    return Hydra.create_main_hydra2("gerl", create_config_search_path(str(config_folder())))


def _end(folder: Path, before: float) -> None:
    write_table(folder)
    jobs = read_jobs(folder)
    logger.info("\n%s\n%s", table(jobs), folder / "sweep.csv")
    if failed := [job for job in jobs if job["code"] and job["at"] >= before]:
        names = ", ".join(Path(job["folder"]).name for job in failed)
        raise TrainingError(f"{len(failed)} of {len(jobs)} runs of the sweep failed: {names}; {_carry_on(folder)}")


def _carry_on(folder: Path) -> str:
    again = typed({"checkpoint.resume": "auto", "hydra.sweep.dir": str(folder)})
    return f"the same command with {again} resumes it"


def _plan(arguments: Sequence[str]) -> Plan:
    arguments = normal(arguments, "hydra.sweep.dir")
    check_arguments(arguments)
    given = {key_of(argument): argument.partition("=")[2] for argument in arguments}
    _check(given)
    overrides, files = list[str](), dict[str, str]()
    with sentences():
        for argument in arguments:
            if argument.startswith(tuple(f"{group}=" for group in CHOICES)):
                argument = _by_name(argument, files)
            overrides += hydra_overrides(argument)
        loader = _hydra().config_loader if any("glob(" in override for override in overrides) else None
        parsed = OverridesParser.create(loader).parse_overrides(overrides)
    swept = [override for override in parsed if override.is_sweep_override()]
    sweeper = given.get("hydra/sweeper", "basic")
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
    settings = {key: value for key, value in settings.items() if key not in given}
    batch = None if sweeper != "basic" or any(key.startswith("hydra.sweeper.") for key in given) else _batch(parsed)
    same = [o.input_line or "" for o in parsed if o not in swept and not o.is_hydra_override()]
    return Plan(
        overrides=[*overrides, *(f"{key}={value}" for key, value in settings.items()), "hydra.mode=MULTIRUN"],
        files=files,
        fixed=[key_of(override.input_line or "") for override in parsed if override not in swept],
        batch=batch,
        choices=[] if batch is not None else [[given] for given in same] + [_choices(override) for override in swept],
    )


def _choices(override: Override) -> list[str]:
    """The arguments that one with several values stands for; of more than `MOST_TRIED` the first and the last."""
    value = override.value()
    if isinstance(value, IntervalSweep):
        found = [str(value.start), str(value.end)]
    else:
        found = list(override.sweep_string_iterator())
    if len(found) > MOST_TRIED:
        found = [found[0], found[-1]]
    return [f"{override.get_key_element()}={each}" for each in found]


def _check_choices(plan: Plan) -> None:
    """Raise `ConfigError` for a value that cannot be trained with, whatever the other keys are."""
    swept = [i for i, values in enumerate(plan.choices) if len(values) > 1]
    for i in swept:
        for value in plan.choices[i]:
            runs = product(*plan.choices[:i], [value], *plan.choices[i + 1 :])
            if (refusal := _refusal(list(islice(runs, MOST_TRIED + 1)), plan)) is not None:
                raise refusal


def _refusal(runs: Sequence[Sequence[str]], plan: Plan) -> ConfigError | None:
    """Why none of `runs` can be composed; None where one can, or where they are more than `MOST_TRIED`."""
    first = None
    for run in runs[:MOST_TRIED]:
        try:
            compose_run(_arguments(run, plan))
        except ConfigError as error:
            first = first or error
        else:
            return None
    return first if len(runs) <= MOST_TRIED else None


def _batch(parsed: Sequence[Override]) -> list[list[str]]:
    """The overrides of each run of Hydra's own sweeper."""
    with sentences():
        (batch,) = BasicSweeper.split_arguments([o for o in parsed if not o.is_hydra_override()], None)
    return batch


def _check(given: Mapping[str, str]) -> None:
    """Raise `ConfigError` for keys that a sweep cannot have."""
    if "hydra.run.dir" in given:
        raise ConfigError(
            f"hydra.run.dir={given['hydra.run.dir']}: with -m each run has its own folder; set "
            "hydra.sweep.dir=FOLDER for all of them"
        )
    if params := next((key for key in given if key.startswith("hydra.sweeper.params")), None):
        raise ConfigError(f"{params}: set the values on the key itself, such as actor.lr=interval(1e-5,1e-3)")
    if (resume := given.get("checkpoint.resume", "never")) not in ("auto", "never"):
        raise ConfigError(
            f"checkpoint.resume={resume}: with -m use checkpoint.resume=auto and set the sweep with "
            "hydra.sweep.dir=FOLDER"
        )


def _by_name(argument: str, known: dict[str, str]) -> str:
    """`experiment=A[,B ...]`, or `algorithm=`, by the names that Hydra has for files; these are noted in `known`."""
    group, _, values = argument.partition("=")
    if "(" in values:  # choice(...) or glob(...), of gerl's own
        return argument
    names = []
    for value in values.split(","):
        override = own_file(f"{group}={value}")
        if override != f"{group}={value}":
            known[override] = f"{group}={Path(value).expanduser().absolute()}"
        names.append(override.removeprefix(f"{group}="))
    return f"{group}={','.join(names)}"


def _names(swept: Sequence[Override]) -> dict[str, str]:
    """Hydra's setting by which a run's folder has its number and the values of what is swept over for a name.

    Without commas and equals signs, which a command line would have to quote.
    """

    def is_plain(override: Override) -> bool:
        if not override.is_discrete_sweep():
            return True  # an interval
        return all(PLAIN.fullmatch(value) for value in override.sweep_string_iterator())

    parts = list[str]()
    for key in (override.key_or_group for override in swept if is_plain(override)):
        value = f"hydra.runtime.choices.{key}" if key in CHOICES else key
        parts.append(f"{key.rpartition('.')[2]}_${{{value}}}")
    name = "+".join(parts[:MOST_NAMED])
    return {"hydra.sweep.subdir": f"${{hydra.job.num}}_{name}" if name else "${hydra.job.num}"}


def _arguments(overrides: Sequence[str], plan: Plan) -> list[str]:
    """The command line of a run from Hydra's overrides."""
    return [plan.files.get(override, override) for override in overrides]


def train_once(plan: Plan, folder: Path, config: DictConfig) -> float:
    """Hydra's task function: one run in a process of its own; returns its held-out reward at the end, for a sweeper.

    `folder` is that of the sweep. Without held-out prompts it is the reward of the last step. A run that fails returns
    NaN, or raises `TrainingError` for the sweepers of plugins, which count failures.
    """
    del config  # the run composes it anew, with all of gerl's checks
    hydra = HydraConfig.get()
    overrides, place = [str(override) for override in hydra.overrides.task], Path(hydra.runtime.output_dir)
    own = [override for override in overrides if key_of(override) not in plan.fixed]
    run_dir, started = _shown(place), time.time()
    logger.info("\nrun %d of the sweep: %s", hydra.job.num, " ".join(own))
    job = {"number": int(hydra.job.num), "overrides": overrides, "swept": own, "code": None, "at": started}
    write_file(place / JOB, json.dumps(job) + "\n")
    code: int | None = None
    try:
        code = _run([*_arguments(overrides, plan), f"hydra.run.dir={quoted(str(run_dir))}"])
    finally:
        write_file(place / JOB, json.dumps(job | {"code": code, "seconds": round(time.time() - started, 1)}) + "\n")
        write_table(folder)
    if code and plan.batch is None:
        raise TrainingError(f"the run {run_dir} failed with exit code {code}")
    final = result(place)["final"]
    return float("nan") if code or final is None else float(final)


def _shown(path: Path) -> Path:
    """Relative to the current folder where it lies in it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _run(arguments: Sequence[str]) -> int:
    """The exit code of a training; a signal that ends this process ends that one first, with its checkpoint."""
    process: subprocess.Popen[bytes] | None = None

    def end() -> None:
        if process is not None:
            process.send_signal(signals.received() or signals.SIGTERM)

    with signals.handled(), signals.before_leaving(end):
        try:
            with signals.deferred():
                process = subprocess.Popen([sys.executable, "-m", PROGRAM, *arguments])
            return process.wait()
        except KeyboardInterrupt:
            signals.answered()
            end()  # a terminal sends Ctrl-C to both: a second one within a second is the same
            if process is not None:
                process.wait()
            raise


# --- The table of a sweep, from what its runs have written so far: `sweep.csv`, `sweep.json`, and on the screen

JOB = "job.json"  # in the folder of a run: its number in the sweep, its overrides, how it ended
HELD_OUT, TRAINED = "val/reward/mean", "reward/mean"
Job = dict[str, Any]


def read_jobs(folder: Path) -> list[Job]:
    """The runs of a sweep that were begun, by their numbers."""
    paths = folder.glob(f"*/{JOB}")
    jobs = [{**json.loads(path.read_text(encoding="utf-8")), "folder": str(path.parent)} for path in paths]
    return sorted(jobs, key=lambda job: int(job["number"]))


def result(run_dir: Path) -> dict[str, Any]:
    """final, best and best_step of the held-out reward of a run, or of the reward where nothing is held out.

    None where nothing was measured.
    """
    try:
        rows = read_metrics(run_dir / METRICS)
    except GerlError:  # a damaged file must not hide the other runs
        rows = []
    found: dict[str, list[tuple[float, int]]] = {HELD_OUT: [], TRAINED: []}
    for name, values in found.items():
        known = ((row.get(name), row["step"]) for row in rows)
        values += [(float(v), step) for v, step in known if isinstance(v, int | float) and math.isfinite(v)]
    measured = found[HELD_OUT] or found[TRAINED]
    best, step = max(measured, default=(None, None))
    return {"final": measured[-1][0] if measured else None, "best": best, "best_step": step}


def write_table(folder: Path) -> None:
    """Write `sweep.csv` and `sweep.json` into the folder of a sweep."""
    jobs = read_jobs(folder)
    rows = [_row(job) for job in jobs]
    columns = ["number", *_varied(jobs), "final", "best", "best_step", "end", "seconds", "folder"]
    csv = csv_text(columns, [{column: row.get(column) for column in columns} for row in rows])
    write_file(folder / "sweep.csv", csv)
    whole = [
        {**{k: v for k, v in row.items() if k in columns}, "overrides": job["overrides"]}
        for row, job in zip(rows, jobs, strict=True)
    ]
    write_file(folder / "sweep.json", json.dumps({"runs": whole}, indent=2) + "\n")


def table(jobs: Sequence[Job]) -> str:
    """The runs of a sweep in lines of equal columns, for a terminal."""
    varied = _varied(jobs)
    lines = [["", *varied, "final", "best", "at step", "time", "end"]]
    for row in map(_row, jobs):
        numbers = ["" if row[name] is None else f"{row[name]:.3f}" for name in ("final", "best")]
        step = "" if row["best_step"] is None else str(row["best_step"])
        took = duration(row["seconds"]) if row["seconds"] is not None else ""
        lines.append(
            [
                str(row["number"]),
                *(str(row.get(key, "")) for key in varied),
                *numbers,
                step,
                took,
                textwrap.shorten(row["end"], 60, placeholder=" ..."),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _varied(jobs: Sequence[Job]) -> list[str]:
    """The keys that were swept over."""
    return list(dict.fromkeys(key for job in jobs for key in _given(job)))


def _given(job: Job) -> dict[str, str]:
    pairs = (override.partition("=") for override in job["swept"])
    return {name.lstrip("+"): value for name, _, value in pairs}


def _row(job: Job) -> dict[str, Any]:
    """The columns of a run, with a column for each key that was swept over."""
    folder, code = Path(job["folder"]), job["code"]
    sessions = read_sessions(folder / CARD)
    error = sessions[-1].get("error") if sessions and code else None
    end = "unfinished" if code is None else "finished" if code == 0 else error or f"exit code {code}"
    own = {"number": job["number"], "end": end, "seconds": job.get("seconds"), "folder": job["folder"]}
    return {**_given(job), **result(folder), **own}

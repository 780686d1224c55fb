"""Create the run folder, or open the one to resume and check that its configuration and data agree."""

import contextlib
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from types import TracebackType

import yaml

from gerl.commandline.composition import (
    Composed,
    ParsedCommand,
    asked_for,
    compose_changes,
    compose_run,
    path_or_copy,
    path_to_run,
    replaced_scorers,
    stays_watched,
)
from gerl.config import Config
from gerl.config.blocks import HELD_OUT
from gerl.config.bounded_text import read_values
from gerl.config.changes import (
    CONTENT,
    FIXED,
    HARMLESS,
    Change,
    Settings,
    changes,
    settings_of,
    shown,
    unknown_keys,
    without,
)
from gerl.config.held_out import Goal
from gerl.config.reading import typed
from gerl.config.registry import ALGORITHMS
from gerl.config.samplers import AUTO
from gerl.data.sources import digest, load_split
from gerl.errors import CheckpointError, ConfigError
from gerl.run.card import secrets
from gerl.run.checkpoint import (
    MANIFEST,
    STATE,
    Checkpoint,
    RunLock,
    RunState,
    alive_since,
    checkpoint_paths,
    find_run_to_resume,
    load_checkpoint,
    newest_checkpoint,
)
from gerl.run.choice import good_checkpoint, shortened, signals_of
from gerl.run.session import clear
from gerl.run.settings import get
from gerl.utils.files import reason, write_file

logger = logging.getLogger("gerl")
CURRENT = "config.yaml"
STEPWISE = ("validation", "samples", "dumps")  # folders whose files have the number of a step in their names
ENDS = ("trainer.steps", "trainer.epochs", "trainer.hours", "trainer.stop_at")  # keys that end a run


def identity(config: Config) -> dict[str, str]:
    """Return the digests of prompts and algorithm file by key; a resumed run must have those of its checkpoint."""
    prompts = (config.data.train, config.validation.data, config.data.regularise)
    named = {key: value for key, value in zip(CONTENT, prompts, strict=False) if value and value != HELD_OUT}
    digests = {key: digest(value, config.data, key) for key, value in named.items()}
    if config.validation.data == HELD_OUT and config.data.train:  # it decides which of its prompts are trained on
        digests["data.train"] += f" without {config.validation.share:g}"
    if (path := config.algorithm.path) is not None and (text := ALGORITHMS.text(path)):
        digests["algorithm.path"] = hashlib.sha256(text).hexdigest()
    return digests


def check_identity(checkpoint: Checkpoint, digests: dict[str, str]) -> None:
    """Raise `CheckpointError` if a digest differs from the checkpoint's; digests it lacks are not compared."""
    saved = checkpoint.state.get("identity")
    recorded = saved if isinstance(saved, dict) else {}
    changed = [key for key, value in digests.items() if recorded.get(key, value) != value]
    if changed:
        raise CheckpointError(
            f"{checkpoint.path} cannot be resumed: the content of {' and '.join(changed)} has changed since then; "
            "restore it, or start a new run with checkpoint.resume=never"
        )


@dataclass
class RunFolder:
    """The folder of a run about to start, its configuration, and the checkpoint to resume, if any.

    `restarts`: whether a run is resumed from its first step, since all its checkpoints have signals of the guard.
    As a context manager it releases the lock of the folder, taken at once by a resumed run and in `open` by a new one.
    """

    composed: Composed
    lock: RunLock
    checkpoint: Checkpoint | None = None
    changes: Sequence[Change] = ()
    before: str = ""  # the configuration up to the checkpoint, from `config.yaml`
    restarts: bool = False
    begin: Callable[[], None] = field(default=lambda: None, repr=False)  # called once the run is accepted

    @property
    def path(self) -> Path:
        return self.composed.run_dir

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lock.release()

    def open(self, begin: Callable[[], None] = lambda: None) -> None:
        """Create a new run's folder (else `ConfigError`); `begin`: called once writing is allowed."""
        if self.checkpoint is None and not self.restarts:
            prepare_folder(self.path, self.composed, self.lock)
            begin()
        else:
            self.begin = begin

    def resume_run(self) -> None:
        """Write the configuration of a resumed run after its state is loaded, and keep the earlier one.

        `config.step_N.yaml` is the configuration up to step N, `config.yaml` the one from then on. Steps after the
        checkpoint are repeated: their checkpoints, configurations and validations move to `abandoned/`.
        """
        if self.checkpoint is None and not self.restarts:
            return
        step = -1 if self.checkpoint is None else self.checkpoint.step
        self.begin()
        set_aside(self.path, step)
        earlier, text = self.path / f"config.step_{step}.yaml", self.composed.yaml()
        private = holds_secrets(self.composed.config)
        if self.changes and self.checkpoint is not None and not earlier.exists():
            write_file(earlier, self.before, private)
        if text != (self.path / CURRENT).read_text(encoding="utf-8"):
            write_file(self.path / CURRENT, text, private)
        logger.info("resumed from %s", self.checkpoint.path if self.checkpoint is not None else "the beginning")
        if self.changes:
            logger.info("resumed with changes: %s", ", ".join(map(str, self.changes)))


def holds_secrets(config: Config) -> bool:
    """Whether a value of `config` looks like a secret; files with it are readable for their user only."""
    return bool(secrets(asdict(config)))


def prepare_folder(run_dir: Path, composed: Composed, lock: RunLock) -> None:
    """Create the run folder, lock it and write `config.yaml`; raises `ConfigError` if that is not possible."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        clear(run_dir)
        if checkpoint_paths(run_dir / "checkpoints"):
            raise ConfigError(
                f"hydra.run.dir={run_dir}: it contains a run with checkpoints; choose another folder, or resume "
                f"that run with {typed({'checkpoint.resume': str(run_dir)})}"
            )
        (run_dir / CURRENT).touch(0o600 if holds_secrets(composed.config) else 0o666)
        (run_dir / CURRENT).write_text(composed.yaml(), encoding="utf-8")
        if (path := composed.config.algorithm.path) is not None:  # a copy, see `path_or_copy`
            name = Path(path).name if path.endswith(".py") else f"{composed.config.algorithm.name}.py"
            (run_dir / name).write_bytes(ALGORITHMS.text(path))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(
            f"hydra.run.dir={run_dir}: the run folder cannot be written ({reason}); choose another folder"
        ) from None


def configuration_at(run_dir: Path, step: int) -> Path:
    """Return the path of the configuration with which the run was resumed at `step`."""
    later = [number for number in _replaced(run_dir) if number > step]
    return run_dir / (f"config.step_{min(later)}.yaml" if later else CURRENT)


def set_aside(run_dir: Path, step: int, with_images: bool = False) -> None:
    """Move files of steps after `step` to `abandoned/after_step_N`; if there are `STEPWISE` only, remove them.

    `with_images`: move those too. `step`: -1 moves those of step 0 too.
    """
    checkpoints = {int(p.name.rpartition("_")[2]): p for p in checkpoint_paths(run_dir / "checkpoints")}
    moved = {f"checkpoints/step_{number}": path for number, path in checkpoints.items() if number > step}
    configurations = (f"config.step_{number}.yaml" for number in _replaced(run_dir) if number > step)
    moved |= {name: run_dir / name for name in configurations}
    images = [path for name in STEPWISE for path in (run_dir / name).glob("*") if _step(path) > step]
    if not moved and not (with_images and images):
        for path in images:
            path.unlink()
        return
    returned = max(step, 0)
    place, number = run_dir / "abandoned" / f"after_step_{returned}", 1
    while place.exists():
        number += 1
        place = place.with_name(f"after_step_{returned}_{number}")
    for name, path in {**moved, **{str(path.relative_to(run_dir)): path for path in images}}.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        path.rename(place / name)
    for name in (CURRENT, "metrics.jsonl", "guard.jsonl"):
        if (run_dir / name).exists():
            shutil.copyfile(run_dir / name, place / name)
    logger.info("the run returns to step %d: its later data is in %s", returned, place)


def _step(picture: Path) -> int:
    """Return the step in the name of a file of a validation; -1 if it has none."""
    match = re.search(r"_(\d+)\.\w+$", picture.name)
    return int(match[1]) if match else -1


def _replaced(run_dir: Path) -> list[int]:
    """Return the steps up to which an earlier configuration was used."""
    matches = (re.fullmatch(r"config\.step_(\d+)\.yaml", path.name) for path in run_dir.glob("config.step_*.yaml"))
    return [int(match[1]) for match in matches if match]


# --- from a command line to the run that it starts or resumes


def open_run(arguments: Sequence[str]) -> RunFolder | None:
    """Open the run that a command line asks for; None, after logging it, if that run is finished.

    A resumed run uses its own `config.yaml`, changed by the keys of the command line, and its folder is locked. The
    folder of a new run does not exist yet.

    Raises:
        ConfigError: a key is wrong or cannot change, or the run is still alive.
        CheckpointError: no usable checkpoint.
        DataError: a prompt file is missing.
    """
    asked = asked_for(arguments)
    run_dir, named = _place(asked)
    if run_dir is None:
        return _new_run(arguments, asked)
    with contextlib.ExitStack() as stack:
        lock = RunLock(run_dir)
        try:
            lock.acquire()
        except OSError as error:
            raise ConfigError(
                f"checkpoint.resume={asked.resume}: the run folder {run_dir} cannot be written ({reason(error)}); "
                "choose another"
            ) from None
        stack.callback(lock.release)
        clear(run_dir)  # keys given for the finished run
        checkpoint = load_checkpoint(named) if named else newest_checkpoint(run_dir / "checkpoints")
        if checkpoint is None and asked.resume != "auto":
            raise _nothing_there(asked)
        if checkpoint is None or (asked.resume == "auto" and not asked.one_folder and _is_over(checkpoint, asked)):
            stack.close()
            logger.info("nothing to resume in %s: starting a new run", run_dir if asked.one_folder else run_dir.parent)
            return _new_run(arguments, asked)
        folder = _resumed(arguments, asked, run_dir, checkpoint, lock, named is not None)
        if folder is not None:
            stack.pop_all()
        return folder


def _new_run(arguments: Sequence[str], asked: ParsedCommand) -> RunFolder:
    composed = replace(compose_run(arguments, asked), replaced=replaced_scorers(arguments, asked))
    return RunFolder(composed, RunLock(composed.run_dir))


def folder_to_resume(asked: ParsedCommand) -> Path | None:
    """Return the folder of the run to resume; None: a new run. Raises `CheckpointError`."""
    return _place(asked)[0]


def _place(asked: ParsedCommand) -> tuple[Path | None, Path | None]:
    """Return the folder of the run to resume and the named checkpoint, each None if not given."""
    if asked.resume == "never":
        return None, None
    if asked.resume == "auto":
        run_dir, looked = asked.run_dir, asked.run_dir if asked.one_folder else asked.run_dir.parent
        exists = bool(checkpoint_paths(run_dir / "checkpoints")) or alive_since(run_dir) is not None
        folder = (run_dir if exists else None) if asked.one_folder else find_run_to_resume(looked)
        if folder is None:
            logger.info("nothing to resume in %s: starting a new run", looked)
        return folder, None
    path = Path(asked.resume).expanduser()
    if any((path / name).exists() for name in (MANIFEST, STATE)):
        return path.resolve().parents[1], path
    if not checkpoint_paths(path / "checkpoints") and alive_since(path) is None:
        raise _nothing_there(asked)
    return path, None


def _nothing_there(asked: ParsedCommand) -> CheckpointError:
    return CheckpointError(
        f"checkpoint.resume={asked.resume}: this is neither a run with a checkpoint nor a checkpoint; give the "
        "folder of one, auto or never"
    )


def _is_over(checkpoint: Checkpoint, asked: ParsedCommand) -> bool:
    """Whether a run is finished and the command line does not extend it."""
    trainer, metrics = get(checkpoint.state, "settings", "trainer") or {}, checkpoint.state.get("val_metrics") or {}
    values, before = asked.values["trainer"], trainer.get("epochs")
    ends = {key.split(".")[1] for key in asked.given if key.startswith(ENDS)}
    longer = "steps" in ends and isinstance(values["steps"], int) and values["steps"] > checkpoint.step
    if "epochs" in ends and before is not None:
        longer = longer or values["epochs"] is None or values["epochs"] > before
    if "stop_at" in ends and trainer.get("stop_at"):
        goal = Goal.parse(values["stop_at"])
        longer = longer or goal is None or not goal.reached(metrics)
    return bool(checkpoint.state.get("finished")) and not longer


def _resumed(
    arguments: Sequence[str], asked: ParsedCommand, run_dir: Path, newest: Checkpoint, lock: RunLock, named: bool
) -> RunFolder | None:
    """Resume the run from its `newest` checkpoint, or as `_start` says unless it is `named`.

    Returns None, after logging it, if nothing is left to do.
    """
    file = configuration_at(run_dir, newest.step)
    settings, experiment, preset = read_configuration(file, asked)
    _check_choices(asked, file, experiment, preset, str(settings["algorithm"]["name"]))
    config = compose_changes(settings, arguments)
    start = newest if named else _start(run_dir, newest, config)
    checkpoint = start or newest
    state = RunState.of(checkpoint)
    before = state.settings or settings
    changed = changes(before, settings_of(config))
    steps = _planned_steps(config)
    if start is not None and steps < state.step:
        key = "steps" if steps == config.trainer.steps else "epochs"
        raise ConfigError(
            f"trainer.{key}={getattr(config.trainer, key)}: {checkpoint.path} is of step {state.step}; set more {key}, "
            f"or an earlier checkpoint with checkpoint.resume={run_dir}/checkpoints/step_N"
        )
    goal = Goal.parse(config.trainer.stop_at)
    reached = start is not None and state.step > 0 and goal is not None and goal.reached(state.val_metrics)
    if start is not None and (steps == state.step or reached) and not state.unlogged:
        words = goal.words(state.val_metrics) if goal is not None and reached else ""
        _say_finished(run_dir, state.step, changed, config.trainer.epochs, words)
        return None
    digests = identity(config)
    _refuse(changed, checkpoint.path, state.identity, digests)
    check_identity(checkpoint, digests)
    if asked.given & {"experiment", "algorithm"}:
        _log_kept_values(config, asked)
    old = yaml.safe_dump({"experiment": experiment, "preset": preset, **before}, sort_keys=False, allow_unicode=True)
    return RunFolder(Composed(config, experiment, run_dir, preset), lock, start, changed, old, start is None)


def _start(run_dir: Path, newest: Checkpoint, config: Config) -> Checkpoint | None:
    """Return the checkpoint from which a run is resumed; None: from the beginning.

    This is the `newest` one, unless it has signals for which `guard.action` ends or returns the run: those are not
    trained on, and the run begins at the last one without.
    """
    guard = config.guard
    signals = signals_of(newest, guard.ignored) if guard.action in ("stop", "rollback") else []
    if not signals:
        return newest
    good = good_checkpoint(run_dir / "checkpoints", guard.ignored)
    logger.warning(
        "step %d has signals of the guard (%s): guard.action=%s begins at %s; guard.action=warn would go on from "
        "step %d",
        *(newest.step, shortened(signals), guard.action),
        "the beginning, since no checkpoint is without" if good is None else f"step {good.step}, the last without",
        newest.step,
    )
    return good


def _planned_steps(config: Config) -> int:
    if config.trainer.epochs is None:
        return config.trainer.steps
    from gerl.algorithms.planning import planned_steps  # imported here: other runs are answered without the algorithms

    return planned_steps(config, load_split(config, "data.train", config.data.train))


def read_configuration(file: Path, asked: ParsedCommand | None = None) -> tuple[Settings, str, str]:
    """Read the settings of a run's `config.yaml`, its experiment and its preset (empty if unknown).

    Removed keys are ignored if they had their default. Raises `ConfigError` for others, or if the file cannot be read.
    """
    try:
        values = read_values(file)
        if not isinstance(values, dict) or not isinstance(values.get("algorithm"), dict):
            raise ValueError("there is no block 'algorithm'")
        experiment, preset = str(values.pop("experiment", "")), str(values.pop("preset", ""))
        settings: Settings = {str(block): entries for block, entries in values.items()}
        _ = settings["algorithm"]["name"]
        if asked is not None and "algorithm.path" in asked.given:  # it has moved
            settings["algorithm"]["path"] = asked.values["algorithm"].get("path")
        elif isinstance(path := settings["algorithm"].get("path"), str):
            settings["algorithm"]["path"] = (path_or_copy if asked is None else path_to_run)(path, file.parent)
    except (OSError, yaml.YAMLError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{file} is not the configuration of a run ({reason(error)}): restore it, or start a new run with "
            "checkpoint.resume=never"
        ) from None
    gone = unknown_keys(settings)
    idle = [key for key in gone if key.split(".")[0] in HARMLESS or _is_null(settings, key)]
    if refused := [key for key in gone if key not in idle]:
        raise ConfigError(
            f"{file}: {' and '.join(refused)}: this version of gerl has no such key; remove it from the file to "
            "resume the run without it, or use the version that wrote it"
        )
    if idle:
        logger.warning("%s: ignored %s, which no longer exists and has no effect", file, " and ".join(idle))
    return without(settings, idle), experiment, preset


def _is_null(settings: Settings, key: str) -> bool:
    block, _, name = key.partition(".")
    entries = settings[block]
    return isinstance(entries, Mapping) and name in entries and entries[name] is None


def _check_choices(asked: ParsedCommand, file: Path, experiment: str, preset: str, algorithm: str) -> None:
    """Raise `ConfigError` if `experiment=` or `algorithm=` differs from the run's."""
    chosen = asked.preset if preset else str(asked.values["algorithm"]["name"])
    for key, requested, original in (
        ("experiment", asked.experiment, experiment),
        ("algorithm", chosen, preset or algorithm),
    ):
        if key in asked.given and original and requested != original:
            raise ConfigError(
                f"{key}={requested}: the run was started with {key}={original} ({file}), which cannot change; remove "
                "it and give only the keys to change, or start a new run with checkpoint.resume=never"
            )


def _refuse(changed: Sequence[Change], path: Path, saved: Mapping[str, str], digests: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a changed key is fixed for the lifetime of a run."""
    reasons = []
    for change in changed:
        if change.key in CONTENT:
            digest, before = digests.get(change.key), saved.get(change.key)
            if None not in (digest, before) and digest != before:  # held-out prompts may be added and removed
                reasons.append(f"{change} (other content)")
        elif change.key in FIXED and not _is_moved_model(change):
            reasons.append(f"{change} ({FIXED[change.key]})")
    if reasons:
        raise ConfigError(
            f"{path} cannot be resumed with {' and '.join(reasons)}: restore the original value, or start a new "
            "run with checkpoint.resume=never"
        )


def _is_moved_model(change: Change) -> bool:
    """Whether the path of the model, or of a merged LoRA, may have changed; the weights are compared after loading."""
    if change.key not in ("model.path", "model.lora") or not str(change.old).startswith(("/", "~", ".")):
        return False
    return not Path(change.old).expanduser().exists() and Path(str(change.new)).expanduser().exists()


def _say_finished(run_dir: Path, step: int, changed: Sequence[Change], epochs: int | None, goal: str) -> None:
    """Log that a run is finished; raises `ConfigError` if a requested change can no longer take effect.

    `epochs`: `trainer.epochs`. `goal`: why it is finished, if not by its last step.
    """
    more = f"to train further set trainer.steps=M with M above {step}"
    if epochs is not None:
        more += f", and trainer.epochs above {epochs}"
    if goal:
        more = f"{goal}; to train further set another limit, or trainer.stop_at={{}}"
    late = [str(c) for c in changed if c.key not in ENDS and c.key.split(".")[0] not in HARMLESS]
    if late:
        raise ConfigError(f"{run_dir} is finished at step {step}, too late for {', '.join(late)}; {more}")
    logger.info("%s is finished at step %d: there is nothing left to do; %s", run_dir, step, more)


def _log_kept_values(config: Config, asked: ParsedCommand) -> None:
    """Log the values of the run that differ from its experiment or preset given again."""
    settings, values = settings_of(config), asked.values
    named, scorers = values["reward"]["scorers"], settings["reward"]["scorers"]
    if not named:
        settings = without(settings, ["reward.scorers"])
    else:
        settings["reward"]["scorers"] = {n: s for n, s in scorers.items() if n in named or not stays_watched(s)}
    # `auto` has no other value: the run's is what it stands for
    if ignored := [
        change
        for change in changes(settings, values)
        if AUTO not in (change.new if isinstance(change.new, list) else [change.new])
    ]:
        names = {"experiment": asked.experiment, "algorithm": asked.preset}
        requested = " ".join(f"{key}={value}" for key, value in names.items() if key in asked.given)
        words = ", ".join(f"{key} {shown(old)} (not {shown(new)})" for key, old, new in map(astuple, ignored))
        logger.info("kept from the run, although %s has other values: %s", requested, words)

"""The files of a run, read for its checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gerl.algorithms.planning import planned_steps
from gerl.commandline.composition import compose_changes
from gerl.config import Config
from gerl.config.blocks import HELD_OUT
from gerl.config.changes import Settings
from gerl.data.sources import TABLES, contrasted, limit_prompts, load_split
from gerl.errors import CheckpointError, DataError
from gerl.model.paths import INDEX
from gerl.protocol import Prompt
from gerl.rewards.checks import read_regularising
from gerl.run.card import CARD, read_sessions
from gerl.run.checkpoint import Checkpoint, checkpoint_paths, load_checkpoint
from gerl.run.dump import Dump, dumped_steps, read_dump
from gerl.run.tracking import METRICS, Rows, read_metrics
from gerl.run.validation import Validation, load_validation, validation_steps
from gerl.trainer.run_folder import configuration_at, read_configuration
from gerl.verify.findings import NotCheckedError


def located(value: Any, places: Sequence[Path]) -> Any:
    """Return a value of `data.train` whose relative files that do not exist are those of the first place with them."""
    if isinstance(value, list):
        return [located(part, places) for part in value]
    if isinstance(value, dict):
        return value | {"path": located(value.get("path"), places)}
    if not isinstance(value, str) or Path(value).suffix not in (".txt", *TABLES) or Path(value).exists():
        return value
    return next((str(place / value) for place in places if (place / value).is_file()), value)


@dataclass
class RunRecord:
    """A run's files; `overrides`: keys that replace its own, where files have moved."""

    folder: Path
    overrides: Sequence[str] = ()
    damaged: dict[Path, CheckpointError] = field(default_factory=dict)  # checkpoints

    @cached_property
    def rows(self) -> Rows:
        """The rows of metrics."""
        return read_metrics(self.folder / METRICS)

    @cached_property
    def row_of(self) -> dict[int, dict[str, Any]]:
        """The rows of metrics by step."""
        return {row["step"]: row for row in self.rows}

    @cached_property
    def checkpoints(self) -> dict[int, Checkpoint]:
        """The intact checkpoints by step; the others are in `damaged`."""
        by_step: dict[int, Checkpoint] = {}
        for path in checkpoint_paths(self.folder / "checkpoints"):
            try:
                checkpoint = load_checkpoint(path)
                by_step[checkpoint.step] = checkpoint
            except CheckpointError as error:
                self.damaged[path] = error
        return by_step

    @cached_property
    def dumps(self) -> dict[int, Dump]:
        """The dumps by step."""
        return {step: read_dump(path) for step, path in dumped_steps(self.folder).items()}

    @cached_property
    def sessions(self) -> list[dict[str, Any]]:
        """The sessions of the run card."""
        return read_sessions(self.folder / CARD)

    @cached_property
    def validations(self) -> dict[int, Validation]:
        """The validations by step, without images."""
        return {step: load_validation(self.folder, step, pictures=False) for step in validation_steps(self.folder)}

    @property
    def last(self) -> int:
        """The last step of which there is a row or a checkpoint."""
        return max([0, *self.row_of, *self.checkpoints])

    # --- configuration and prompts

    def file_of(self, step: int) -> Path:
        """Return the configuration with which `step` was trained."""
        return configuration_at(self.folder, step - 1)

    def settings(self, step: int) -> Settings:
        """Return the settings with which `step` was trained."""
        file = self.file_of(step)
        if file not in self._settings:
            self._settings[file] = read_configuration(file)[0]
        return self._settings[file]

    def config(self, step: int) -> Config:
        """Return the configuration with which `step` was trained."""
        file = self.file_of(step)
        if file not in self._configs:
            self._configs[file] = self._located(compose_changes(self.settings(step), self.overrides))
        return self._configs[file]

    def _located(self, config: Config) -> Config:
        """Return `config` with a model and prompts that are not here taken from where the run was, or beside it."""
        started = [Path(str(session["folder"])) for session in self.sessions[-1:] if session.get("folder")]
        places = [*started, self.folder.absolute(), *self.folder.absolute().parents]
        data = replace(
            config.data, train=located(config.data.train, places), regularise=located(config.data.regularise, places)
        )
        validation = replace(config.validation, data=located(config.validation.data, places))
        path = Path(config.model.path)
        beside = [str(place / path) for place in places if not path.exists() and (place / path / INDEX).is_file()]
        model = replace(config.model, path=next(iter(beside), config.model.path))
        return replace(config, model=model, data=data, validation=validation)

    @cached_property
    def _settings(self) -> dict[Path, Settings]:
        return {}

    @cached_property
    def _configs(self) -> dict[Path, Config]:
        return {}

    @cached_property
    def planned(self) -> int:
        """Trainer steps of the run as it was configured last."""
        return planned_steps(self.newest, self.prompts if self.newest.trainer.epochs is not None else ())

    @property
    def newest(self) -> Config:
        """The configuration of the last step."""
        return self.config(self.last)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The training prompts; raises `NotCheckedError` if their file is missing."""
        return self._read("data.train")

    @cached_property
    def held_out(self) -> list[Prompt]:
        """The held-out prompts; empty if there are none."""
        return self._read("validation.data") if self.newest.validation.data else []

    @cached_property
    def imitated(self) -> list[Prompt]:
        """The prompts of `data.regularise`."""
        try:
            return read_regularising(self.newest)
        except DataError as error:
            raise NotCheckedError(str(error)) from None

    def _read(self, key: str) -> list[Prompt]:
        """Read the prompts as a run does, without its scorers, which may not be here."""
        config = self.newest
        train = key == "data.train"
        entries, most = (config.data.train, None) if train else (config.validation.data, config.validation.max_prompts)
        try:
            prompts = load_split(config, key, entries)
            prompts = limit_prompts(prompts, most, config.data.train if entries == HELD_OUT else entries)
        except DataError as error:
            raise NotCheckedError(str(error)) from None
        return contrasted(prompts) if config.needs_base else prompts

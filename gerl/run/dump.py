"""Dumps of trainer steps: all that is needed to train on a step again, in `dumps/` of a run folder (`trainer.dump`).

`step_K.json` says what was sampled, scored and measured, with which settings and where; `step_K.safetensors` has the
trajectories, the credit, and the state of the workers before the update.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import torch
from pydantic import TypeAdapter, ValidationError

from gerl.config.bounded_text import LARGEST_JSON, MALFORMED, load_json, regular
from gerl.engine import Trajectory
from gerl.engine.storage import restore
from gerl.errors import GerlError
from gerl.protocol import RolloutTask, Sample, ScorerFailure, Scores
from gerl.run.checkpoint import WorkerState
from gerl.utils.files import finite, reason, write_file, writing
from gerl.utils.tensors import TensorFile

FOLDER = "dumps"
FORMAT = 1
NAME = re.compile(r"step_(\d+)\.json")
MEASURED = ("actor/", "reward/", "group/", "critic/")  # metrics that follow from a dump
STATE, TRAJECTORY, EXTENSION = "state/", "trajectory/", "extension/"  # prefixes of names of tensors
CREDIT, KL_WEIGHT, GRADIENT, FORM = "credit", "kl_weight", "gradient", "form"


class DumpError(GerlError):
    """A dump cannot be written or read."""


@dataclass(frozen=True)
class Environment:
    """What the last bits of a result may depend on."""

    software: dict[str, Any]  # see `gerl.run.card.software`
    device: str  # of the workers: its kind
    processor: str  # name of the GPU, or of the CPU with its instruction set
    dtype: str  # of the frozen weights
    threads: int  # of a worker, on a CPU

    def differences(self, other: Environment) -> list[str]:
        """Return what differs, as "NAME own, other"."""
        ours, theirs = (_flat(asdict(e)) for e in (self, other))
        pairs = {name: (ours.get(name), theirs.get(name)) for name in {**ours, **theirs}}
        # a digest is shortened
        return [f"{name}: {a!s:.40}, {b!s:.40}" for name, (a, b) in pairs.items() if a != b]


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= {k if name in ("software", "packages") else f"{name} {k}": v for k, v in _flat(value).items()}
        elif name != "repository":  # of the folder that a command was started in
            flat[name] = value
    return flat


@dataclass(frozen=True)
class StepRecord:
    """The JSON of a dump: step, samples and scores, the state before it, and what the run measured.

    `holders[i]`: the training process that held the trajectory of task `i`. `limits`: by process the most images of a
    micro-batch that fit into its memory, if it ran out of it. `weights`: SHA-256 of the trained weights after the step.
    `totals`, `by_scorer`, `failures`: the table of scores, whose rows are the samples of `tasks` in order.
    """

    format: int
    step: int
    planned: int  # trainer steps of the run
    lag: int
    file: str
    sha256: str  # of the file
    settings: dict[str, Any]  # of the run, without secrets
    identity: dict[str, str]  # digests of prompts and base weights
    environment: Environment
    processes: int  # that trained
    holders: list[int]
    limits: list[int | None]
    policy_version: int
    nonfinite: int
    kl_coef: float | None
    algorithm: dict[str, Any]  # state of the algorithm before the step
    extensions: dict[str, Any]  # and of the extensions, as far as it is JSON
    worker: WorkerState
    tasks: list[RolloutTask]
    totals: list[float | None]
    by_scorer: dict[str, list[float | None]]
    failures: list[list[ScorerFailure]]
    given: bool
    weights: str | None
    metrics: dict[str, float | None] = field(default_factory=dict)

    @property
    def samples(self) -> list[Sample]:
        """The sampled images, in the order of the table of scores."""
        every = [sample for task in self.tasks for sample in task.samples]
        return every if self.given else [sample for sample in every if sample.dataset_image is None]

    @property
    def scores(self) -> Scores:
        """The table of scores."""
        return Scores(self.samples, list(self.totals), dict(self.by_scorer), list(self.failures), self.given)


RECORD = TypeAdapter(StepRecord)


@dataclass(frozen=True)
class Dump:
    """A dump on disk; `path` is its JSON."""

    path: Path
    record: StepRecord

    @property
    def tensors(self) -> Path:
        """The file of the tensors, beside the JSON."""
        return self.path.with_name(self.record.file)

    @cached_property
    def names(self) -> list[str]:
        """Names of the stored tensors."""
        with self._open() as file:
            return list(file.keys())

    @property
    def extensions(self) -> dict[str, Any]:
        """State of the extensions before the step, by name."""
        files = {name: values.numpy().tobytes() for name, values in self.group(EXTENSION).items()}
        return self.record.extensions | files

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU."""
        return self.group(name, [name])[""]

    def group(self, prefix: str, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Return the tensors whose names begin with `prefix`, without it."""
        chosen = [name for name in self.names if name.startswith(prefix)] if names is None else names
        with self._open() as file:
            return {name.removeprefix(prefix): file.get_tensor(name) for name in chosen}

    def trajectories(self, device: str, whole: bool = False) -> Iterator[Trajectory]:
        """Yield the trajectories of the tasks in order, on `device`; `whole`: with fp32 for half precision."""
        for i in range(len(self.record.tasks)):
            tensors = self.group(f"{TRAJECTORY}{i}/")
            if FORM not in tensors:
                raise DumpError(f"{self.tensors} is damaged: it has no trajectory {i}")
            try:
                form = load_json(tensors.pop(FORM).numpy().tobytes())
            except ValueError as error:
                raise DumpError(f"{self.tensors} is damaged: trajectory {i} has no form ({reason(error)})") from None
            yield restore(form, tensors, device, self.record.environment.device, whole)

    @contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            with safetensors.safe_open(regular(self.tensors), "pt") as file:
                yield file
        except (OSError, safetensors.SafetensorError, ValueError, RuntimeError, MemoryError) as error:
            raise DumpError(f"{self.tensors} cannot be read: {reason(error)}; it belongs beside {self.path}") from None


def read_dump(path: Path) -> Dump:
    """Read the JSON of a dump, given by either of its files. Raises `DumpError` if it cannot be read."""
    path = path.with_suffix(".json") if path.suffix == ".safetensors" else path
    try:
        text = regular(path, LARGEST_JSON).read_bytes()
        if (number := load_json(text)["format"]) > FORMAT:
            raise DumpError(f"{path} was written by a newer gerl (format {number}): update gerl")
        record = RECORD.validate_json(text)
        path.with_name(record.file)  # raises `ValueError` for what is no name
        columns: dict[str, Sequence[object]] = {"totals": record.totals, "failures": record.failures}
        columns |= record.by_scorer
        if wrong := [name for name, column in columns.items() if len(column) != len(record.samples)]:
            raise DumpError(f"{path} is damaged: {wrong[0]} does not have a value per image")
        return Dump(path, record)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise DumpError(f"{path} is damaged: it has no usable {where}") from None
    except (OSError, *MALFORMED) as error:
        raise DumpError(f"{path} cannot be read: {reason(error)}; give dumps/step_K.json of a run") from None


def write_record(path: Path, record: StepRecord) -> None:
    """Write the JSON of a dump; with it the dump is complete. Raises `GerlError`."""
    values = asdict(record) | {"metrics": finite(record.metrics)}
    write_file(path, "{\n" + ",\n".join(f"{_json(k)}: {_entry(v)}" for k, v in values.items()) + "\n}\n")


def _entry(value: Any) -> str:
    """Return a value as JSON: an entry of a dictionary per line, and of a list of dictionaries."""
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f" {_json(k)}: {_json(v)}" for k, v in value.items()) + "\n}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f" {_json(v)}" for v in value) + "\n]"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def dumped_steps(run_dir: Path) -> dict[int, Path]:
    """Return the JSON files of complete dumps by step, in order."""
    names = ((NAME.fullmatch(path.name), path) for path in (run_dir / FOLDER).glob("step_*.json"))
    return dict(sorted((int(match[1]), path) for match, path in names if match))


def tensor_file(run_dir: Path, step: int) -> TensorFile:
    """Begin the tensors of a dump; an earlier one of this step is removed. Raises `GerlError`."""
    path = run_dir / FOLDER / f"step_{step}.safetensors"
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)
        return TensorFile(path)

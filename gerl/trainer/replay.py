"""Train on a dumped step again, and compare with what the run measured: `python -m gerl.trainer.replay FILE`."""

if __name__ == "__main__":
    # the imports below take most of a second: handle signals before
    from gerl.commandline import signals
    from gerl.commandline.command import start

    signals.exit_with(start("gerl.trainer.replay"))

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gerl.commandline.arguments import Parser, key
from gerl.commandline.command import run_command
from gerl.config.user_files import only_typed
from gerl.errors import ConfigError, TrainingError
from gerl.utils.files import finite, write_file
from gerl.utils.imports import importing

if TYPE_CHECKING:
    import torch

    from gerl.run.dump import Dump, StepRecord
    from gerl.trainer.dumped_step import DumpedStep, Replayed

logger = logging.getLogger("gerl")
TOLERANCE = {"float32": 1e-3, "other": 5e-2}  # relative, of numbers of another machine
FLOOR = 0.01  # differences of smaller numbers count as if they were this large, but for norms and rates
RELATIVE = ("grad", "lr", "lora_max")  # metrics of any size
FIRST = ("actor/ratio_deviation", "actor/step_grad_norm/", "actor/grad_norm", "actor/loss", "actor/")
BITWISE = "bitwise equal"


@dataclass(frozen=True, kw_only=True)
class Request:
    """Command-line options."""

    dump: Path = key("dumps/step_K.json of a run with trainer.dump", required=True)
    tolerance: str | None = key(
        "1e-3; relative difference up to which a number counts as that of the run; 0: every bit; default: 1e-3 in "
        "float32, 0.05 in half precision"
    )
    trust: bool = key(
        "true: run the code that the run's settings name (algorithm, scorers, prompts, pipeline); false: refuse it, "
        "with the files and their SHA-256",
        False,
    )
    out: Path | None = key("the comparison for machines, a .json file, in addition to the one on the terminal")


PARSER = Parser(
    "the replay",
    "python -m gerl.trainer.replay",
    "[dump=]FILE [tolerance=NUMBER] [out=FILE.json] [key=value ...]",
    "Train on a dumped step of a run again and compare ratio, gradient, loss and weights with those of the run.",
    Request,
    passed=(
        *("model.path", "model.dtype", "model.attention", "model.compile", "model.gradient_checkpointing"),
        *("algorithm.path", "algorithm.teachers", "algorithm.cfg", "actor.micro_batch_size", "actor.step_batch"),
        *("cluster.device", "cluster.threads_per_worker"),
    ),
    blocks=("reward",),
    bare="dump",
    notes="The configuration is that of the dump; pass model.path=FOLDER if the model has moved. "
    "Exit code 1: a number differs by more than the tolerance.",
)


def main(argv: Sequence[str] | None = None, program: str = PARSER.program) -> int:
    """Run the command line; returns the exit code, see `run_command`: 0 if no number differs beyond the tolerance."""
    return run_command(argv, lambda: PARSER.help(program), lambda given: run(*PARSER.parse(given)))


def run(request: Request, overrides: Sequence[str] = ()) -> "Comparison":
    """Replay, log the comparison and write it to `out`; raises `TrainingError` if a number differs too much."""
    tolerance, out = read_tolerance(request.tolerance), checked_out(request.out)
    check_file(request.dump)
    with importing():  # these import torch, which takes seconds, and keys come first
        from gerl.commandline.composition import typed_texts
        from gerl.run.dump import read_dump
        from gerl.trainer.dumped_step import loaded

    dump = read_dump(request.dump)
    with only_typed(None if request.trust else typed_texts(overrides)), loaded(dump, overrides) as step:
        comparison = compare(step, step.train(), tolerance)
    logger.info("%s", comparison.text(dump))
    if out is not None:
        write_file(out, json.dumps(finite(asdict(comparison)), indent=1) + "\n")
    if wrong := comparison.beyond:
        names = ", ".join(number.name for number in wrong[:3]) + (f" and {len(wrong) - 3} more" if wrong[3:] else "")
        raise TrainingError(
            f"the replay of step {dump.record.step} differs from the run by more than "
            f"tolerance={comparison.tolerance:g}: {names}"
        )
    return comparison


def check_file(dump: Path) -> None:
    """Raise `ConfigError` if `dump` is not a file of a dump, with those that are there."""
    if dump.is_file() and dump.suffix in (".json", ".safetensors"):
        return
    folders = [dump / "dumps", dump, dump.parent] if dump.is_dir() else [dump.parent]
    dumps = sorted((path for folder in folders for path in folder.glob("step_*.json")), key=lambda path: len(path.name))
    there = f"such as {dumps[0]}" if dumps else "RUN/dumps/step_K.json of a run with trainer.dump"
    what = "is a folder" if dump.is_dir() else "is not a dump" if dump.is_file() else "does not exist"
    raise ConfigError(f"dump={dump} {what}: give a file of a dumped step, {there}")


def checked_out(out: Path | None) -> Path | None:
    """Return the key `out`; raises `ConfigError` if a .json file cannot be there."""
    if out is not None and (out.suffix != ".json" or out.is_dir() or not out.absolute().parent.is_dir()):
        raise ConfigError(f"out={out}: expected the path of a .json file in an existing folder")
    return out


def read_tolerance(text: str | None) -> float | None:
    """Parse the key `tolerance`; raises `ConfigError`."""
    try:
        value = None if text is None else float(text)
    except ValueError:
        value = math.nan
    if value is not None and not 0 <= value < math.inf:
        raise ConfigError(f"tolerance={text}: it must be a number of at least 0, such as 1e-3")
    return value


def default_tolerance(dtype: str) -> float:
    """Return the tolerance for weights of this precision."""
    return TOLERANCE.get(dtype, TOLERANCE["other"])


# --- Comparison


@dataclass(frozen=True)
class Number:
    """A number of the run and of its replay; `difference` is relative, NaN if only one of them is a number."""

    name: str
    run: float | None
    replay: float | None
    difference: float

    def within(self, tolerance: float) -> bool:
        """Whether it counts as equal."""
        return self.difference <= tolerance


@dataclass(frozen=True)
class Comparison:
    """A replay beside its run.

    `weights`: whether the trained weights after the step are bitwise equal; None: only one of them is known.
    `environment`: what differs between the machines and versions. `processes`: more than two may add up in any order.
    """

    step: int
    numbers: list[Number]
    weights: bool | None
    environment: list[str]
    processes: int
    tolerance: float

    @property
    def beyond(self) -> list[Number]:
        """The numbers that differ by more than the tolerance; the weights if they alone are not bitwise equal."""
        alone = self.weights is False and all(number.difference == 0 for number in self.numbers)
        of_weights = [Number("weights", None, None, math.nan)] if alone else []
        return [number for number in self.numbers if not number.within(self.tolerance)] + of_weights

    @property
    def exact(self) -> bool:
        """Whether every number and the weights are bitwise equal."""
        return all(number.difference == 0 for number in self.numbers) and self.weights is not False

    def text(self, dump: "Dump") -> str:
        """Return the comparison as text."""
        width = max(len(number.name) for number in self.numbers) + 2
        lines = ["", title(dump.record), "", f"{'':<{width}}{'run':>14}{'replay':>14}"]
        for n in self.numbers:
            apart = "" if math.isnan(n.difference) else f" by {n.difference:.1e}"
            verdict = f"{'differs' if n.within(self.tolerance) else 'DIFFERS'}{apart}" if n.difference else BITWISE
            lines.append(f"{n.name:<{width}}{shown(n.run)}{shown(n.replay)}  {verdict}")
        if self.weights is not None:
            lines.append(f"{'weights after it':<{width}}{'':>28}  {BITWISE if self.weights else 'not bitwise equal'}")
        lines.append("")
        if self.environment:
            lines += ["this machine differs from that of the run (here, there):", *(f"  {e}" for e in self.environment)]
        if self.exact:
            lines.append(f"{BITWISE}: all {len(self.numbers)} numbers")
        elif self.processes > 2:
            lines.append(f"the gradients of {self.processes} processes were added up in another order than in the run")
        return "\n".join(lines)


def title(record: "StepRecord") -> str:
    """Describe a dumped step in a line."""
    lag = f", sampled {record.lag} step(s) earlier" if record.lag else ""
    return (
        f"step {record.step}: {record.settings['algorithm']['name']} on {record.settings['model']['path']}, "
        f"{len(record.totals)} images in {len(record.tasks)} micro-batches of {record.processes} process(es){lag}"
    )


def shown(value: float | None) -> str:
    """Format a number for the table."""
    return f"{'-' if value is None else f'{value:.7g}':>14}"


def difference(name: str, run: float | None, replay: float | None) -> float:
    """Return the difference relative to the larger number; NaN if only one of them is a number."""
    comparable = [value is not None and math.isfinite(value) for value in (run, replay)]
    if not all(comparable):
        return 0.0 if not any(comparable) else math.nan
    assert run is not None and replay is not None
    floor = 0.0 if any(part in name for part in RELATIVE) else 1.0 if "ratio" in name else FLOOR
    return 0.0 if run == replay else abs(run - replay) / max(abs(run), abs(replay), floor)


def compare(step: "DumpedStep", replayed: "Replayed", tolerance: float | None = None) -> Comparison:
    """Compare a replay with what the run measured."""
    from gerl.run.dump import CREDIT  # imports torch

    record = step.dump.record
    measured = sorted(record.metrics.items(), key=lambda item: place(item[0]))
    numbers = [
        Number(name, value, replayed.metrics.get(name), difference(name, value, replayed.metrics.get(name)))
        for name, value in measured
        if name in replayed.metrics
    ]
    numbers.append(distance(CREDIT, step.dump.tensor(CREDIT), replayed.credit))
    if (recorded := step.recorded_gradient()) is not None and replayed.gradient is not None:
        numbers.append(distance("gradient", recorded, replayed.gradient))
    weights = None if None in (record.weights, replayed.weights) else record.weights == replayed.weights
    limit = default_tolerance(replayed.environment.dtype) if tolerance is None else tolerance
    differing = replayed.environment.differences(record.environment)
    return Comparison(record.step, numbers, weights, differing, replayed.processes, limit)


def place(name: str) -> int:
    """Return the place of a metric in the table: what a bug shows in comes first."""
    return next((i for i, first in enumerate(FIRST) if name.startswith(first)), len(FIRST))


def distance(name: str, run: "torch.Tensor", replay: "torch.Tensor") -> Number:
    """Compare two tensors of one shape by their norms and the norm of their difference; NaN equals NaN."""
    import torch

    if run.shape != replay.shape or not torch.equal(run.isnan(), replay.isnan()):
        return Number(name, _norm(run), _norm(replay), math.nan)
    if torch.equal(run.nan_to_num(), replay.nan_to_num()):
        return Number(name, _norm(run), _norm(replay), 0.0)
    apart = _norm(run.nan_to_num().double() - replay.nan_to_num().double())
    return Number(name, _norm(run), _norm(replay), apart / max(_norm(run), _norm(replay)))


def _norm(tensor: "torch.Tensor") -> float:
    return float(tensor.nan_to_num().double().norm())

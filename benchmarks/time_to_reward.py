"""The cost of a reward: of runs given by hand, or of all algorithms by the same procedure.

    python benchmarks/time_to_reward.py [ALGORITHM ...] [key=value ...] [--target R]
    python benchmarks/time_to_reward.py --suite [--jobs N] [--hours H] [ALGORITHM ...]
    python benchmarks/time_to_reward.py --table --plot

Trains the signs pipeline in this process, with one model and prompts for all, and validates on the held-out prompts as
it goes, by the OCR (a run without it: by its own rewards). Counted are the evaluations of the denoiser on an image:
forward (rollout, update, old policy, base model) and backward, and the images scored, without those of validation. The
CPU seconds are those of the process in the training steps, the OCR included; those of a validation, which is the same
work in every run, say how fast the machine was. `--suite` is described in suite.py, `--table` and `--plot` in
suite_report.py.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import suite
import torch
from sections import write_section
from torch.utils._pytree import tree_leaves

from gerl.cluster import Cluster
from gerl.commandline.composition import compose_run, shipped
from gerl.errors import TrainingError
from gerl.run.card import hardware, now, software
from gerl.trainer.run import Run, take, take_ahead
from gerl.trainer.step import Step
from gerl.trainer.validation import validate
from gerl.utils.dataset import load_prompts
from gerl.utils.files import finite

REWARD, EXACT = "val/ocr/mean", "val/ocr/exact/mean"


@dataclass
class Calls:
    """Image evaluations of the denoiser, counted where it computes: in its first block.

    The denoiser as a whole is also called where it only hands out what was recorded.
    """

    forward: int = 0
    backward: int = 0
    counting: bool = True

    def attach(self, denoiser: torch.nn.Module) -> None:
        blocks = next(m for m in denoiser.children() if isinstance(m, torch.nn.ModuleList))
        blocks[0].register_forward_hook(self)

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        if self.counting:
            rows = len(next(v for v in tree_leaves(output) if torch.is_tensor(v)))
            self.forward += rows
            self.backward += rows if torch.is_grad_enabled() else 0


@dataclass(frozen=True)
class Point:
    """A validation: what had been paid, and what it had brought."""

    step: int
    forward: int
    backward: int
    cpu_seconds: float
    images: int
    reward: float
    exact: float


@dataclass
class Measured:
    """A run: its validations, the optimizer steps that it took, and the error that ended it early, or nothing."""

    points: list[Point] = field(default_factory=list)
    optimizer_steps: int = 0
    validation_seconds: float = 0.0  # CPU seconds of a validation, on average
    error: str = ""
    fingerprint: str = ""


class Reached(Exception):
    """The target reward, or the step until which the run is wanted, is reached."""


class CountingRun(Run):
    """A run with counters on its denoiser; stops at the target reward."""

    calls: Calls
    measured: Measured
    target: float
    until: int | None
    images: int = 0
    cpu_seconds: float = 0.0

    def setup(self, resume: Any) -> None:
        super().setup(resume)
        self.calls = Calls()
        for worker in self.fleet.workers.workers:
            for denoiser in worker.policy.denoisers.values():
                self.calls.attach(denoiser)

    def survives(self, part: Callable[[Run, Step], None], step: Step) -> bool:
        self.calls.counting, before = part is not validate, time.process_time()
        done = super().survives(part, step)
        seconds = time.process_time() - before
        if part is validate:
            self.validated(step, seconds)
        elif part in (take, take_ahead):
            self.cpu_seconds += seconds
            if self.config.data.train_on != "files":  # those are counted where they were scored
                self.images += sum(len(task.samples) for task in step.tasks)
        return done

    def validated(self, step: Step, seconds: float) -> None:
        """Keep the point of a validation that took so long; raises `Reached` where it is the last one wanted."""
        known, metrics = self.measured, step.metrics
        rewards = metrics.get(REWARD, metrics["val/reward/mean"]), metrics.get(EXACT, float("nan"))
        point = Point(step.number, self.calls.forward, self.calls.backward, self.cpu_seconds, self.images, *rewards)
        known.validation_seconds += (seconds - known.validation_seconds) / (len(known.points) + 1)
        known.points.append(point)
        known.optimizer_steps = self.state.policy_version
        print(f"  {self.config.algorithm.name:16s} seed {self.config.trainer.seed} {point}", flush=True)
        if point.reward >= self.target or step.number == self.until:
            raise Reached

    def save(self, process: int = 0, held: Any = None) -> None:
        """No checkpoints."""


def measure(
    name: str,
    seed: int,
    target: float,
    overrides: Sequence[str],
    until: int | None = None,
    images_before: int = 0,
) -> Measured:
    """Train with algorithm `name` to `target`, step `until`, the last step, or an update that makes no sense.

    `images_before` were drawn and scored before, as a validation does it, and are counted as if by this run.
    """
    config = compose_run([f"algorithm={name}", f"trainer.seed={seed}", *suite.FIXED, *overrides]).config
    measured = Measured(fingerprint=suite.fingerprint(config))
    with tempfile.TemporaryDirectory() as folder, Cluster(config.cluster, config.reward.gpu_shares) as cluster:
        prompts = load_prompts(config.data.train)
        held_out = load_prompts(config.validation.data) if config.validation.data else []
        run = CountingRun(config, Path(folder), cluster, prompts, held_out, {})
        run.target, run.until, run.measured = target, until, measured
        try:
            with contextlib.suppress(Reached):
                run.fit()
        except TrainingError as error:  # a result as well: with these settings it diverges
            measured.error = str(error)
    if images_before:
        forward = images_before * config.sampling.num_inference_steps
        seconds = measured.validation_seconds * images_before / len(held_out[: config.validation.max_prompts])
        measured.points = [
            replace(
                point,
                forward=point.forward + forward,
                images=point.images + images_before,
                cpu_seconds=point.cpu_seconds + seconds,
            )
            for point in measured.points
        ]
    return measured


def record(name: str, seed: int, overrides: Sequence[str], measured: Measured) -> suite.Run:
    """A run as the file of results has it."""
    code = software()
    return {
        "algorithm": name,
        "overrides": list(overrides),
        "seed": seed,
        **asdict(measured),
        "date": now(),
        "gerl": code["gerl"],
        "torch": code["packages"].get("torch"),
        "hardware": hardware(),
        "command": " ".join(sys.argv),
    }


def row(name: str, seed: int, measured: Measured, target: float) -> str:
    """A run as a line of the table."""
    last = measured.points[-1]
    calls = next((f"{p.forward + p.backward:,}" for p in measured.points if p.reward >= target), "-")
    costs = f"{last.step} | {measured.optimizer_steps} | {last.forward:,} | {last.backward:,} | {last.cpu_seconds:.0f}"
    return f"| {name} | {seed} | {costs} | {last.reward:.3f} | {last.exact:.3f} | {calls} |\n"


def by_hand(names: Sequence[str], overrides: Sequence[str], args: argparse.Namespace) -> None:
    """Make the runs of the command line and print them as a table, unless they are for the suite."""
    columns = ("algorithm", "seed", "steps", "optimizer steps", "forward", "backward", "CPU seconds", "held-out reward")
    table = f"\n| {' | '.join(columns)} | exactly as asked | calls to {args.target:g} |\n|{'---|' * 10}\n"
    for name, seed in product(names or ["flow_grpo", "flow_grpo_fast", "diffusion_nft"], args.seeds):
        measured = measure(name, seed, args.target, overrides, args.until, args.images_before)
        table += row(name, seed, measured, args.target)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(finite(record(name, seed, overrides, measured))) + "\n")
    if not args.end_with_stdin:
        print(table, end="")


def whole_suite(names: Sequence[str], overrides: Sequence[str], args: argparse.Namespace) -> int:
    """Make the runs of the suite that are missing; returns the exit code."""
    plan = suite.read_suite(algorithms=names, overrides=overrides)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        suite.prepare(plan)
        failed = suite.carry_out(plan, args.results, args.jobs, args.hours)
    except KeyboardInterrupt:
        print("stopped: the same command carries on; the runs that were going on start anew")
        return 130
    return 1 if failed else 0


def end_with_stdin() -> None:
    """End this process when stdin ends, which is a pipe from the process that started it."""

    def wait() -> None:
        os.read(0, 1)  # not by Python's buffer, whose lock this thread would hold when the process ends by itself
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", help=f"some of {', '.join(shipped('algorithm'))}; key=value overrides")
    parser.add_argument("--target", type=float, default=2.0, help="end a run at this held-out reward")
    parser.add_argument("--until", type=int, help="end a run at the validation of this step")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--images-before", type=int, default=0, help="drawn and scored before, and counted as well")
    parser.add_argument("--out", type=Path, help="append each run as a line of JSON")
    parser.add_argument("--suite", action="store_true", help="make the runs of suite.yaml that --results lacks")
    parser.add_argument("--jobs", type=int, default=1, help="processes of the suite at a time, each with one thread")
    parser.add_argument("--hours", type=float, default=inf, help="after so many the suite starts no further run")
    parser.add_argument("--results", type=Path, default=suite.RESULTS, help="the results of the suite")
    parser.add_argument("--table", action="store_true", help="write the results into docs/algorithm_benchmark.md")
    parser.add_argument("--plot", action="store_true", help="draw the results as docs/pictures/time_to_reward.svg")
    parser.add_argument("--end-with-stdin", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    parser = arguments()
    args = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.WARNING)
    overrides = [a for a in args.algorithms if "=" in a]
    names = [a for a in args.algorithms if "=" not in a]
    if unknown := sorted(set(names) - set(shipped("algorithm"))):
        parser.error(f"there is no algorithm {', '.join(unknown)}")
    if args.end_with_stdin:
        end_with_stdin()
    if args.suite:
        if overrides and args.results == suite.RESULTS:
            parser.error("runs with other settings than the suite's are not for its results: give --results FILE")
        if code := whole_suite(names, overrides, args):
            return code
    if args.table or args.plot:
        import suite_report  # it needs scipy

        if args.table:
            table = suite_report.table(suite.load_runs(args.results))
            write_section(suite_report.PAGE, suite_report.BEGIN, suite_report.END, table)
        if args.plot:
            suite_report.plot(suite.load_runs(args.results))
    if not (args.suite or args.table or args.plot):
        by_hand(names, overrides, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The ladder: every algorithm under one protocol, and the rows of others beside them.

    python benchmarks/ladder.py FOLDER [ROW ...] [--tasks signs shapes] [--jobs 2] [--hours 1] [--flow-factory FOLDER]
    python benchmarks/ladder.py FOLDER [ROW ...] --repeat SEED
    python benchmarks/ladder.py --table

A row is a file in benchmarks/ladder: an algorithm, the tasks it is measured on, and at most one change of its preset
where the model forces it. protocol.yaml has what all rows share. A probe of two steps counts a row's evaluations of the
denoiser per step on a task, from which follow the steps of its next runs; each learning rate is trained to the end
with the tuning seeds; the best mean decides, and other seeds make the table, in as many steps as the tuning runs with
that rate would have needed for the budget. Runs are made in FOLDER and their numbers
kept in benchmarks/results/ladder, a file per row and task, from which the same command continues after an interruption.
`--repeat` trains known runs of the table again and compares their rewards. `--table` writes
docs/algorithm_benchmark.md; ladder_table.py computes it. A row that names a `trainer` is trained by that program
instead of gerl, through its module in `TRAINERS`.
"""

import argparse
import importlib
import json
import logging
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from forked import run_jobs, train_by_gerl

from gerl.algorithms.common import replayed
from gerl.algorithms.core_algos import gaussian_kl
from gerl.algorithms.planning import validation_seed
from gerl.commandline.composition import compose_run
from gerl.config import Config
from gerl.data.sources import load
from gerl.engine import Tape, record
from gerl.model.loading import load_policy
from gerl.model.policy import Policy
from gerl.model.prompts import pipeline_call
from gerl.run.card import hardware, software
from gerl.run.tracking import METRICS, read_metrics
from gerl.run.validation import load_validation, mean, validation_steps
from gerl.utils.files import write_file
from gerl.utils.seeding import sample_generators

HERE = Path(__file__).resolve().parent
ROWS, PROTOCOL, RESULTS = HERE / "ladder", HERE / "ladder" / "protocol.yaml", HERE / "results" / "ladder"
STAGES = ("probe", "tune", "final")
# files that rows ask for by name in braces, made once in the folder of the runs: the command, and the file
PREPARED = {
    "{ranked_signs}": (["examples/ranked_signs.py", "ranked_signs", "--prompts=120", "--images=12"], "ranked.jsonl"),
}
TRAINERS = {"flow_factory": "flow_factory_adapter"}  # modules whose `row` makes the rows of other trainers
KL, KL_PROMPTS = "kl.json", 16  # file in a run's folder; held-out prompts of which it is the mean
PROBE_STEPS, CURVE = 2, 3  # steps of a probe; validations of a run that counts, after the first
logger = logging.getLogger("ladder")


@dataclass(frozen=True)
class Row:
    """A row on a task: the keys of its runs without seed, rate and steps, and its runs so far."""

    name: str
    task: str
    keys: tuple[str, ...]
    change: tuple[str, ...] = ()
    why: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list, compare=False)
    trainer: str = ""  # one of `TRAINERS`; empty: gerl

    def job(self, stage: str, rate: float, seed: int, steps: int) -> "Job":
        return Job(self, stage, rate, seed, steps)

    @property
    def file(self) -> Path:
        return RESULTS / self.task / f"{self.name}.json"

    def of(self, stage: str) -> list[dict[str, Any]]:
        """The runs of a stage: probe, tune or final."""
        return [run for run in self.runs if run["stage"] == stage]

    def write(self) -> None:
        """Write the file of the row on its task."""
        content = {"row": self.name, "task": self.task, "change": self.change, "why": self.why, "keys": self.keys}
        text = json.dumps(content | {"runs": self.runs}).replace('{"stage"', '\n{"stage"')
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_file(self.file, text + "\n")


@dataclass(frozen=True)
class Job:
    """A run of a row."""

    row: Row
    stage: str
    rate: float
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.row.task}-{self.row.name}-{self.stage}-{self.rate:g}-{self.seed}"

    @property
    def key(self) -> tuple[str, float, int]:
        return self.stage, self.rate, self.seed

    def own(self) -> list[str]:
        """The keys that tell this run from the others of its row."""
        every = max(1, self.steps // CURVE) if self.stage == "final" else self.steps
        fixed = [f"trainer.seed={self.seed}", f"actor.lr={self.rate:g}", f"trainer.steps={self.steps}"]
        few = ["validation.max_prompts=2"] if self.stage == "probe" else []
        return [*fixed, f"validation.every={every}", "guard.judge=off", *few]

    def arguments(self, folder: Path) -> list[str]:
        own = self.own()
        common = [key for key in self.row.keys if key.partition("=")[0] not in {o.partition("=")[0] for o in own}]
        return [*(with_files(key, folder) for key in common), *own, f"hydra.run.dir={folder / self.name}"]

    def train(self, arguments: list[str]) -> int:
        """Make the run, measure its KL if the table has it, and return the exit code."""
        ended = train_by_gerl(self, arguments)
        folder = Path(arguments[-1].partition("=")[2])
        self.measure(folder, folder / "checkpoints" / f"step_{self.steps}" / "lora")
        return ended

    def measure(self, folder: Path, lora: Path) -> None:
        """Write the KL of the policy that a final run ended with; a run that failed has none."""
        if self.stage == "final" and lora.exists():
            write_file(folder / KL, json.dumps(kl_to_base(lora, protocol()["tasks"][self.row.task])))


def protocol() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(PROTOCOL.read_text())
    return found


def rows(names: Sequence[str] = (), tasks: Sequence[str] = ()) -> list[Row]:
    """The rows on their tasks with the runs that are known of them; names, tasks: those wanted, none: all."""
    rules, found = protocol(), []
    for file in sorted(ROWS.glob("*.yaml")):
        if file == PROTOCOL or (names and file.stem not in names):
            continue
        content = yaml.safe_load(file.read_text())
        for task in content["tasks"]:
            if not tasks or task in tasks:
                found.append(read_row(file.stem, task, content, rules))
    return sorted(found, key=lambda row: list(rules["tasks"]).index(row.task))


def read_row(name: str, task: str, content: dict[str, Any], rules: dict[str, Any]) -> Row:
    """A row on a task; results of other keys are left out."""
    trainer = content.get("trainer")
    make = importlib.import_module(TRAINERS[trainer]).row if trainer else make_row
    row: Row = make(name, task, content, rules)
    if row.file.exists():
        known = json.loads(row.file.read_text())
        if tuple(known["keys"]) == row.keys:
            row.runs.extend(known["runs"])
        else:
            logger.warning("%s: its results have other keys, and are measured again", row.file.name)
    return row


def make_row(name: str, task: str, content: dict[str, Any], rules: dict[str, Any]) -> Row:
    """A row on a task, without its runs."""
    own = content.get(task, content)
    change, why = tuple(own.get("change", ())), own.get("why", "")
    shared = rules["tasks"][task]
    given = {key.partition("=")[0] for key in (*change, *shared["keys"])}
    common = [key for key in rules["common"] if key.partition("=")[0] not in given]
    keys = [f"algorithm={content['algorithm']}", *shared["keys"], *common, *change]
    most, noisy = rules["denoising_steps"], shared.get("noisy", [])
    # with the model of `signs`: for another kind of scheduler a preset may have chosen another kernel already
    left_out = (*PREPARED, "model.path=")
    config = compose_run([key for key in keys if not any(name in key for name in left_out)]).config
    sampling = config.sampling
    if sampling.num_inference_steps > most:
        keys.append(f"sampling.num_inference_steps={most}")
    if sampling.kernel not in ("ode", "ddim"):
        keys.extend(noisy)
    if config.algorithm.needs.reward_gradient:
        keys.extend(shared["differentiable"])
    return Row(name, task, tuple(keys), change, why)


def runnable(found: Sequence[Row], folders: dict[str, Path | None]) -> list[Row]:
    """The rows whose trainer is there, with its folder; folders: those of `TRAINERS`."""
    kept = [row for row in found if not row.trainer]
    for trainer, folder in folders.items():
        others = [row for row in found if row.trainer == trainer]
        if folder is not None:
            kept += [replace(row, folder=folder.resolve()) for row in others]
        elif others:
            names = ", ".join(dict.fromkeys(row.name for row in others))
            logger.info("skipped without --%s FOLDER: %s", trainer.replace("_", "-"), names)
    return kept


# --- Which run is next


def steps_of(row: Row, rules: dict[str, Any], rate: float | None = None) -> int:
    """Trainer steps in which a run spends the budget, by the probe, or by the tuning runs with `rate`."""
    known = row.of("probe") if rate is None else [run for run in row.of("tune") if run["rate"] == rate]
    ends = [run["points"][-1] for run in known]  # equal images give no gradient, so that later steps cost less
    budget = rules["tasks"][row.task].get("evaluations", rules["evaluations"])
    return max(2, round(budget / statistics.fmean(end[1] / end[0] for end in ends if end[0])))


def best_rate(row: Row) -> float:
    """The learning rate with the best mean reward at the end over the tuning seeds."""
    ends: dict[float, list[float]] = {}
    for run in row.of("tune"):
        ends.setdefault(run["rate"], []).append(run["points"][-1][-1])
    return max(ends, key=lambda rate: statistics.fmean(ends[rate]))


def waiting(row: Row, rules: dict[str, Any]) -> list[Job]:
    """The runs of the row's current stage that are not known."""
    known = {(run["stage"], run["rate"], run["seed"]) for run in row.runs}
    rates, seeds = rules["rates"], rules["tuning_seeds"]
    planned = [row.job("probe", rates[1], seeds[0], PROBE_STEPS)]
    if row.of("probe"):
        planned = [row.job("tune", rate, seed, steps_of(row, rules)) for seed in seeds for rate in rates]
        if len(row.of("tune")) == len(planned):
            rate = best_rate(row)
            planned = [row.job("final", rate, seed, steps_of(row, rules, rate)) for seed in rules["seeds"]]
    return [job for job in planned if job.key not in known]


def next_jobs(found: Sequence[Row], rules: dict[str, Any], until: float, last: str) -> Iterator[Job | None]:
    """Yield the runs up to the stage `last`, of the first stage, task and seed first; None: another has to end before.

    `until`: when to stop, on the monotonic clock.
    """
    taken: set[str] = set()
    stages, tasks = STAGES[: STAGES.index(last) + 1], list(rules["tasks"])
    while time.monotonic() < until:
        left = [
            ((tasks.index(row.task), stages.index(job.stage), i), job)
            for row in found
            for i, job in enumerate(waiting(row, rules))
            if job.stage in stages and job.name not in taken
        ]
        job = min(left, key=lambda entry: entry[0])[1] if left else None
        taken |= {job.name} if job else set()
        yield job


def with_files(key: str, folder: Path) -> str:
    """A key with the path of the prepared file that it names, which is made if it is not there."""
    for name, ((script, target, *options), file) in PREPARED.items():
        if name in key:
            path = folder / target / file
            if not path.exists():
                subprocess.run([sys.executable, script, str(folder / target), *options], cwd=HERE.parent, check=True)
            return key.replace(name, str(path))
    return key


# --- What a run leaves


def result(job: Job, folder: Path, error: str, rules: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a run: step, evaluations, images and held-out reward of each validation; measures of both ends."""
    task, run = rules["tasks"][job.row.task], folder / job.name
    evaluations = images = 0
    points, updates = [], 0
    for line in read_metrics(run / METRICS):
        evaluations += int(line.get("evaluations/forward", 0) + line.get("evaluations/backward", 0))
        images += int(line.get("evaluations/images", 0))
        updates = int(line.get("actor/policy_version", updates))
        if f"val/{task['reward']}/mean" in line:
            points.append([line["step"], evaluations, images, round(line[f"val/{task['reward']}/mean"], 5)])
    ends = {}
    for name, step in zip(("first", "last"), (validation_steps(run)[0], validation_steps(run)[-1]), strict=True):
        found = load_validation(run, step, pictures=False)
        known = {measure: found.by_scorer.get(measure) for measure in task["others"]} | found.looks
        wanted = (*task["others"], "unlike_others")
        ends[name] = {key: round(mean(known[key]), 5) for key in wanted if known.get(key) is not None}
    if (run / KL).exists():
        ends["last"]["kl"] = json.loads((run / KL).read_text())
    return {
        "stage": job.stage, "rate": job.rate, "seed": job.seed, "steps": job.steps, "points": points,
        "updates": updates, **ends, "error": error, "code": code(), "machine": machine(), "own": job.own(),
    }  # fmt: skip


def kl_to_base(lora: Path, task: dict[str, Any]) -> float:
    """KL of a LoRA's policy to the base model in nats per image, over all stochastic steps of Flow-GRPO's sampler."""
    config = compose_run(["algorithm=flow_grpo", *task["keys"], *task.get("noisy", []), f"model.lora={lora}"]).config
    policy = load_policy(config.model, 0.0, "cpu", seed=0)
    tape = noisy_tape(policy, config)
    with policy.base():
        found = replayed(policy.pipe, tape, lambda step: gaussian_kl(step.recorded_mean, step.mean, step.std))
    return sum(float(kl.mean()) for kl in found.values()) * tape.steps[-1].x[0].numel()


def noisy_tape(policy: Policy, config: Config) -> Tape:
    """Record held-out prompts with noise at all steps that can have some."""
    sampling, prompts = config.sampling, load(config.validation.data, config.data, "validation.data")[:KL_PROMPTS]
    call = pipeline_call(policy.pipe, sampling, [prompt.text for prompt in prompts]) | {"output_type": "latent"}
    generators = sample_generators([validation_seed(prompt, 0) for prompt in prompts])
    steps = tuple(range(*sampling.steps_range))
    return record(policy.pipe, call, sampling.kernel, sampling.noise_level, steps, generators)[1]


def code() -> str:
    """The tree of gerl/ in git, with a star if it has changes."""
    ask = {"cwd": HERE.parent, "capture_output": True, "text": True, "check": True}
    tree = subprocess.run(["git", "rev-parse", "HEAD:gerl"], **ask).stdout.strip()[:12]
    return tree + "*" * bool(subprocess.run(["git", "status", "--porcelain", "gerl", "configs"], **ask).stdout)


def machine() -> str:
    found = hardware()
    return f"{found['cpu']}, torch {software()['packages']['torch']}"


def repeat(found: Sequence[Row], seed: int, folder: Path, count: int, rules: dict[str, Any]) -> int:
    """Train known final runs with `seed` again and log the differences; returns 1 if a run failed."""
    known = {row.job("final", run["rate"], seed, run["steps"]): run for row in found for run in row.of("final")
             if run["seed"] == seed}  # fmt: skip
    if not known:
        seeds = sorted({run["seed"] for row in found for run in row.of("final")})
        logger.error(
            "no final run of these rows has seed %d; known seeds: %s", seed, ", ".join(map(str, seeds)) or "none"
        )
        return 1
    jobs, failed = iter(known), 0
    for job, succeeded, said in run_jobs(lambda: next(jobs, None), count, folder, lambda job, keys: job.train(keys)):
        if not succeeded:
            logger.error("%s: %s", job.name, said[-600:])
            failed = 1
            continue
        new, old = result(job, folder, "", rules)["points"], known[job]["points"]
        apart = max(abs(one[-1] - other[-1]) for one, other in zip(new, old, strict=True))
        logger.info(
            "%s: rewards differ by at most %.5f; %d evaluations, %d before", job.name, apart, new[-1][1], old[-1][1]
        )
    return failed


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of the runs")
    parser.add_argument("rows", nargs="*", help="names of rows; none: all")
    parser.add_argument("--tasks", nargs="*", default=[], help="none: all")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage to run")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--hours", type=float, default=1000.0, help="after these no run is started")
    parser.add_argument("--flow-factory", type=Path, metavar="FOLDER", help="its clone, for the rows that it trains")
    parser.add_argument("--repeat", type=int, metavar="SEED", help="train known final runs again and compare them")
    parser.add_argument("--table", action="store_true", help="write the table into the documentation")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    known = sorted(file.stem for file in ROWS.glob("*.yaml") if file != PROTOCOL)
    if unknown := [name for name in args.rows if name not in known]:
        parser.error(f"{unknown[0]}: no such row; there are {', '.join(known)}")
    if args.flow_factory is not None and not (args.flow_factory / ".venv" / "bin" / "python").exists():
        parser.error(f"--flow-factory {args.flow_factory} has no .venv/bin/python: see benchmarks/README.md")
    rules, failed = protocol(), 0
    if args.folder is not None:
        found = runnable(rows(args.rows, args.tasks), {"flow_factory": args.flow_factory})
        if args.repeat is not None:
            return repeat(found, args.repeat, args.folder.resolve(), args.jobs, rules)
        jobs = next_jobs(found, rules, time.monotonic() + args.hours * 3600, args.until)
        runs = run_jobs(lambda: next(jobs, None), args.jobs, args.folder.resolve(), lambda job, keys: job.train(keys))
        for job, succeeded, said in runs:
            error = "" if succeeded else said.strip().splitlines()[-1]
            if not succeeded and job.stage == "probe":
                logger.error("%s: %s", job.name, said[-600:])
                failed += 1
                continue
            job.row.runs.append(kept := result(job, args.folder, error, rules))
            job.row.write()
            shutil.rmtree(args.folder / job.name)
            logger.info("%s: %s %s", job.name, kept["points"][-1], error)
    if args.table:
        from ladder_table import write

        write()
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

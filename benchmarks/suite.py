"""The suite of `time_to_reward.py`: what is run in which order, and the results that there are.

Every algorithm has the same number of candidate settings (suite.yaml). Each runs once with the tuning seed for its
first steps; the one with the best held-out reward after them then runs to the end with further seeds. Each run is a
process of its own, and its result is written as soon as it is there, so that the suite can be stopped at any moment and
carried on.
"""

import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import yaml

from gerl.commandline.composition import compose_run
from gerl.config import Config
from gerl.config.changes import HARMLESS, settings_of
from gerl.utils.files import finite, write_file

# Keys that fingerprints do not have where they are as before there were such keys.
NEUTRAL = {
    ("data", "columns"): {},
    ("data", "stream"): None,
    ("data", "train_on"): "drawn",
    ("data", "regularise"): None,
    ("data", "regularise_images"): None,
    ("algorithm", "data_coef"): 0.0,
    ("data", "cache"): None,
    ("data", "cache_gb"): 2.0,
    ("algorithm", "regression"): "squared",
    ("actor", "step_batch"): 1,
    ("actor", "epochs"): 1,
    ("validation", "keep"): None,
    ("sampling", "cache"): "none",
    ("sampling", "cache_threshold"): 0.05,
    ("sampling", "cache_interval"): 2,
    ("rollout", "quantize"): "none",
    ("model", "attention"): None,
    ("model", "channels_last"): False,
    ("algorithm", "train_share"): 1.0,
    ("algorithm", "shared_noise"): False,
    ("algorithm", "kl_share"): 1.0,
    ("algorithm", "kl_doubters"): [],
    ("algorithm", "kl_reset_every"): 0,
    ("algorithm", "kl_reset_above"): None,
    ("algorithm", "diversity"): "none",
    ("algorithm", "diversity_scorer"): "diversity",
    ("algorithm", "diversity_coef"): 0.1,
    ("algorithm", "reference"): "old",
    ("validation", "images_per_prompt"): 1,
    ("validation", "height"): None,
    ("validation", "width"): None,
}
NEUTRAL_OF_SCORER = {"env": {}}  # the same for keys of reward.scorers.NAME
HERE = Path(__file__).resolve().parent
SUITE = HERE / "suite.yaml"
RESULTS = HERE / "results" / "time_to_reward.json"
PROGRAM = "benchmarks/time_to_reward.py"
POLL = 0.2  # seconds between looks at the processes
FIXED = ["checkpoint.every=0", "logger.progress=false", "logger.tensorboard=false", "cluster.launcher=local"]
ONE_THREAD = "cluster.threads_per_worker=1"
TUNE, FINAL = "tune", "final"
Run = dict[str, Any]  # a result as the file has it


@dataclass(frozen=True)
class Candidate:
    """Settings of an algorithm: `keys` are those that the suite chooses, `arguments` all of the command line.

    `images_before` were drawn and scored before a run, which learns from them.
    """

    algorithm: str
    keys: tuple[str, ...]
    arguments: tuple[str, ...]
    fingerprint: str
    images_before: int = 0
    config: Config = field(default_factory=Config, compare=False)


@dataclass(frozen=True)
class Job:
    """A run to be made."""

    candidate: Candidate
    seed: int
    stage: str
    until: int | None = None  # trainer steps after which the run ends; None: all

    @property
    def key(self) -> tuple[Any, ...]:
        """The entries of a result that say which run it is of."""
        chosen = self.candidate
        return chosen.algorithm, chosen.keys, self.seed, self.stage, self.until, chosen.fingerprint

    def command(self) -> list[str]:
        """The command that makes this run, and no other."""
        chosen = self.candidate
        end = [] if self.until is None else ["--until", str(self.until)]
        before = ["--images-before", str(chosen.images_before)] if chosen.images_before else []
        return [PROGRAM, chosen.algorithm, *chosen.arguments, "--seeds", str(self.seed), *end, *before]


@dataclass(frozen=True)
class Suite:
    """The plan: candidates and images of a trainer step by algorithm, seeds, and files that have to be made before.

    `prepared` are those files and the arguments of Python that make them.
    """

    candidates: Mapping[str, Sequence[Candidate]]
    tuning_seed: int
    tuning_steps: int | None
    seeds: Sequence[int]
    images: Mapping[str, int] = field(default_factory=dict)
    prepared: Mapping[str, str] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Runs in all."""
        return sum(len(found) + len(self.seeds) for found in self.candidates.values())

    def next_job(self, runs: Iterable[Run], taken: Collection[Job] = ()) -> Job | None:
        """The first job that has no result and is not `taken`; None if there is none, or none can start yet.

        Breadth first: the first candidate of every algorithm, the second ..., then one seed of all, the next ... An
        algorithm whose tuning is not complete is passed over.
        """
        done = list(runs)
        known = {key_of(run) for run in done}
        most = max((len(found) for found in self.candidates.values()), default=0)
        tuning = [self.tuning(found[i]) for i in range(most) for found in self.candidates.values() if i < len(found)]
        best = {name: self.best(found, done) for name, found in self.candidates.items()}
        final = [Job(chosen, seed, FINAL) for seed in self.seeds for chosen in best.values() if chosen is not None]
        return next((job for job in (*tuning, *final) if job.key not in known and job not in taken), None)

    def plans(self, run: Run) -> bool:
        """Whether `run` is of one of the candidates as they are, or of an algorithm that is left out."""
        found = self.candidates.get(run["algorithm"])
        if found is None:
            return True
        planned = [self.tuning(c) for c in found] + [Job(c, seed, FINAL) for c in found for seed in self.seeds]
        return key_of(run) in (job.key for job in planned)

    def tuning(self, candidate: Candidate) -> Job:
        """The run by which a candidate is judged."""
        return Job(candidate, self.tuning_seed, TUNE, self.tuning_steps)

    def best(self, candidates: Sequence[Candidate], runs: Iterable[Run]) -> Candidate | None:
        """The candidate with the best tuning run; None as long as one of them has no run."""
        by_key = {key_of(run): run for run in runs}
        found = [by_key.get(self.tuning(c).key) for c in candidates]
        known = [run for run in found if run is not None]
        return candidates[found.index(best_run(known))] if known and len(known) == len(found) else None


def read_suite(path: Path = SUITE, algorithms: Sequence[str] = (), overrides: Sequence[str] = ()) -> Suite:
    """The plan of `algorithms` (none: all), every run changed by `overrides`; raises `ConfigError` and `KeyError`."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    groups = [{"algorithms": content["algorithms"]}, *content["others"].values()]
    group_of = {name: group for group in groups for name in group["algorithms"]}
    names = list(algorithms) or sorted(group_of)
    candidates, prepared = {}, {}
    for name in names:
        group = group_of[name]
        common, before = [*content["common"], *group.get("common", ())], group.get("images_before", 0)
        candidates[name] = [
            candidate(name, entry["keys"], [*common, *entry["keys"], *overrides], before)
            for entry in group["algorithms"][name]
        ]
        prepared |= group.get("prepared", {})
    images = {name: group_of[name].get("images", content["images"]) for name in names}
    return Suite(candidates, content["tuning_seed"], content["tuning_steps"], content["seeds"], images, prepared)


def other_groups(path: Path = SUITE) -> dict[str, Any]:
    """The groups of presets that learn from something else than the OCR's rewards, by what that is in words."""
    groups: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["others"]
    return groups


def prepare(suite: Suite) -> None:
    """Make the files of images that runs learn from, unless they are there."""
    for path, arguments in suite.prepared.items():
        if not Path(path).exists():
            print(f"making {path}", flush=True)
            subprocess.run([sys.executable, *shlex.split(arguments)], check=True)


def candidate(algorithm: str, keys: Sequence[str], arguments: Sequence[str], images_before: int = 0) -> Candidate:
    """A candidate of the suite; of two `arguments` with the same key the later one counts."""
    merged = {argument.partition("=")[0]: argument for argument in [*arguments, ONE_THREAD]}
    config = compose_run([f"algorithm={algorithm}", *FIXED, *merged.values()]).config
    return Candidate(algorithm, tuple(keys), tuple(merged.values()), fingerprint(config), images_before, config)


def fingerprint(config: Config) -> str:
    """A hash of the settings that decide what a run computes, without its seed and what is only watched."""
    settings = {block: values for block, values in settings_of(config).items() if block not in HARMLESS}
    neutral = {**NEUTRAL, ("trainer", "seed"): config.trainer.seed}
    settings["reward"]["scorers"] = {n: s for n, s in settings["reward"]["scorers"].items() if s["weight"] != 0}
    for scorer in settings["reward"]["scorers"].values():
        for name, value in NEUTRAL_OF_SCORER.items():
            if scorer.get(name) == value:
                del scorer[name]
    for block, values in settings.items():
        settings[block] = {k: v for k, v in values.items() if (block, k) not in neutral or neutral[block, k] != v}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def best_run(runs: Sequence[Run]) -> Run:
    """The run with the best held-out reward at its end; of equal ones the one with fewer evaluations, then the first.

    A run that an error ended is the last choice.
    """
    return max(runs, key=lambda run: (not run["error"], last_reward(run), -evaluations(run["points"][-1])))


def last_reward(run: Run) -> float:
    """The held-out reward at the last validation; one that an error ended may have had it early."""
    return float(run["points"][-1]["reward"])


def evaluations(point: Mapping[str, Any]) -> int:
    """Evaluations of the denoiser on an image, forward and backward, before a validation."""
    return int(point["forward"] + point["backward"])


def key_of(run: Run) -> tuple[Any, ...]:
    """The entries that say which run it is, as `Job.key`."""
    return run["algorithm"], tuple(run["overrides"]), run["seed"], run["stage"], run["until"], run["fingerprint"]


# --- the file of results


def load_runs(path: Path) -> list[Run]:
    """The results in a file, none if there is no file."""
    runs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    assert isinstance(runs, list)
    return runs


def save_runs(path: Path, runs: Sequence[Run]) -> None:
    """Write the results complete or not at all, a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(finite(run)) for run in runs)
    write_file(path, f"[\n{lines}\n]\n" if lines else "[]\n")


def with_run(runs: Sequence[Run], new: Run, suite: Suite) -> list[Run]:
    """`runs` with a new one, in place of those of its algorithm whose settings the suite no longer has."""
    kept = [r for r in runs if r["algorithm"] != new["algorithm"] or (suite.plans(r) and key_of(r) != key_of(new))]
    return sorted([*kept, new], key=lambda r: (r["algorithm"], r["stage"] == FINAL, r["seed"]))


# --- running


@dataclass
class Process:
    """A job that is going on, and the file that its result will be in."""

    job: Job
    popen: subprocess.Popen[bytes]
    out: Path

    def result(self) -> Run | None:
        """What the process has measured; None if it ended without a result."""
        if self.popen.wait() != 0 or not self.out.exists():
            return None
        run: Run = json.loads(self.out.read_text(encoding="utf-8"))
        if run["fingerprint"] != self.job.candidate.fingerprint:  # a preset was edited meanwhile
            return None
        asked = {"overrides": list(self.job.candidate.keys), "stage": self.job.stage, "until": self.job.until}
        return {**run, **asked, "command": shlex.join(["python", *self.job.command()])}


def start_process(job: Job, out: Path) -> subprocess.Popen[bytes]:
    """Start a job with one thread; it ends when this process does, however that ends, for its stdin is a pipe."""
    program, *arguments = job.command()
    command = [sys.executable, str(HERE.parent / program), *arguments, "--out", str(out), "--end-with-stdin"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # a session of its own: Ctrl-C is for this process, which then ends the others
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=environment)


def carry_out(
    suite: Suite,
    path: Path,
    jobs: int = 1,
    hours: float = inf,
    start: Callable[[Job, Path], subprocess.Popen[bytes]] = start_process,
) -> list[Job]:
    """Make the runs that `path` lacks, `jobs` at a time, starting none after `hours`; returns those that failed."""
    deadline = time.monotonic() + 3600 * hours
    running: list[Process] = []
    failed: list[Job] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number in count():
                taken = [*(process.job for process in running), *failed]
                job = suite.next_job(load_runs(path), taken) if time.monotonic() < deadline else None
                if job is not None and len(running) < jobs:
                    out = Path(folder) / f"{number}.json"
                    running.append(Process(job, start(job, out), out))
                    continue
                if not running:
                    break
                failed += collect(suite, path, running)
        finally:
            for process in running:
                process.popen.kill()
                process.popen.wait()
    return failed


def collect(suite: Suite, path: Path, running: list[Process]) -> list[Job]:
    """Wait for one of the processes, write its result and take it off the list; returns its job if it failed."""
    while not (ended := [process for process in running if process.popen.poll() is not None]):
        time.sleep(POLL)
    process = ended[0]
    running.remove(process)
    run = process.result()
    words = " ".join([process.job.candidate.algorithm, process.job.stage, *process.job.candidate.keys])
    if run is None:
        print(f"{words} seed {process.job.seed}: failed, it is tried again when the suite is carried on", flush=True)
        return [process.job]
    runs = with_run(load_runs(path), run, suite)
    save_runs(path, runs)
    done = sum(r["algorithm"] in suite.candidates and suite.plans(r) for r in runs)
    print(f"{words} seed {process.job.seed}: {last_reward(run):.3f} ({done} of {suite.length} runs)", flush=True)
    return []

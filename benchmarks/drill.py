"""Kills processes of a run over Ray, one after the other, and says what it cost and what the run left behind.

    python benchmarks/drill.py [--kills 100] [--seed 0] [key=value ...]
    python benchmarks/drill.py --table

The run is one of the signs pipeline with two workers, eight images a step and a scorer that reads no text, so that a
step takes a second. A worker, both of them or the scorer gets SIGKILL, or a worker SIGSTOP, while it draws, accumulates
gradients, takes a step and so on: as Ray has it in the title of its process. The next one is not sent before a step was
finished. At the end the run is stopped, its weights are compared with those of a run that nothing disturbed, and
processes and files that it left are counted. Results: benchmarks/results/drill.json.
"""

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sections import write_section

from gerl.run.card import hardware, now, software
from gerl.utils.files import write_file

HERE = Path(__file__).resolve().parent
RESULTS, README = HERE / "results" / "drill.json", HERE / "README.md"
BEGIN, END = "<!-- drill: begin, written by python benchmarks/drill.py --table -->", "<!-- drill: end -->"
MARK = "GERL_DRILL"
# what a worker does, by the method in the title of its process
PHASES = {
    "setup": "loading",
    "join": "meeting",
    "sample": "drawing",
    "validate": "validating",
    "accumulate": "accumulating",
    "step": "all-reduce, optimizer step, end of a step",
    "checkpoint": "saving",
    "load": "taking over the state",
    "call": "another request",
}
WANTED = ("sample", "accumulate", "step", "checkpoint", "validate", "setup")
VICTIMS = ("worker",) * 6 + ("both workers", "scorer", "hanging worker")
PATIENCE = 10.0  # seconds that a phase is waited for
SCORER = """
import numpy as np


def compute_score(images, prompts, metadata):
    return [float(np.asarray(image).mean()) / 255 for image in images]
"""
SETTINGS = """
experiment=signs algorithm=flow_grpo rollout.prompts_per_step=2 rollout.n=4 rollout.micro_batch_size=2
trainer.steps=100000 sampling.num_inference_steps=4 sampling.window_range=[0,2] validation.every=5
validation.max_prompts=4 checkpoint.every=3 checkpoint.keep=2 cluster.num_workers=2 cluster.threads_per_worker=1
cluster.max_restarts=100000 cluster.hang_after=30 cluster.patience=600 logger.progress=false logger.tensorboard=false
logger.report=false
""".split()
logger = logging.getLogger("drill")


@dataclass(frozen=True)
class Kill:
    """What was killed at what, and the seconds until the next step was finished, less those that a step takes."""

    process: str
    phase: str
    step: int  # the last finished one
    lost_s: float


def processes() -> dict[int, str]:
    """The command lines of what the run started, by process."""
    found, mark = {}, f"{MARK}={os.getpid()}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes():
                found[int(folder.name)] = title(int(folder.name))
    return found


def title(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def method(process: int) -> str:
    """The method that a worker runs, empty if it waits."""
    return title(process).removeprefix("ray::PolicyWorker").removeprefix(".")


def left_files() -> set[str]:
    """Names where the run could leave something: shared memory, and the folder for temporary files."""
    return {str(path) for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).iterdir()}


def memory(process: int) -> dict[str, float]:
    """What would grow if something leaked: of the driver its memory, open files and threads; of Ray its store."""
    status = Path(f"/proc/{process}/status").read_text()
    numbers = {line.split()[0][:-1]: float(line.split()[1]) for line in status.splitlines() if line.endswith("kB")}
    threads = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads:"))
    store = sum(path.stat().st_blocks * 512 for path in Path("/dev/shm").glob("plasma*"))
    files = len(list(Path(f"/proc/{process}/fd").iterdir()))
    return {
        "driver_mib": numbers["VmRSS"] / 1024,
        "open_files": files,
        "threads": threads,
        "store_mib": store / 2**20,
        "processes": len(processes()),
    }


class Drill:
    """A run that is being disturbed."""

    def __init__(self, folder: Path, arguments: Sequence[str], seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        command = [sys.executable, "-m", "gerl.trainer.main_flowgrpo", *arguments, "cluster.launcher=ray"]
        environment = {**os.environ, MARK: str(os.getpid())}
        self.log = (folder.parent / "log.txt").open("w")
        self.driver = subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log)

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of the finished steps."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text().split("\n")[:-1]  # the last may be half written
        except OSError:
            return []
        return [row for row in map(json.loads, lines) if "timing/step_s" in row]

    def finished(self) -> int:
        return max((row["step"] for row in self.rows()), default=0)

    def replaced(self) -> int:
        return int(sum(row.get("cluster/restarts", 0) for row in self.rows()))

    def wait_for(self, step: int, replaced: int = 0, seconds: float = 900.0) -> None:
        """Until `step` is finished, and so many workers are replaced.

        Raises `RuntimeError` where the run ends before, or that takes too long.
        """
        deadline = time.monotonic() + seconds
        while self.finished() < step or self.replaced() < replaced:
            if self.driver.poll() is not None or time.monotonic() > deadline:
                said = (self.folder.parent / "log.txt").read_text()[-3000:]
                raise RuntimeError(f"the run did not come to step {step} (exit code {self.driver.poll()}):\n{said}")
            time.sleep(0.05)

    def wait_until_gone(self, killed: Sequence[int], seconds: float = 60.0) -> None:
        """Wait until these processes are gone: Ray ends one that is stopped only after a while.

        Raises `RuntimeError` where that takes longer than `seconds`.
        """
        deadline = time.monotonic() + seconds
        while left := [process for process in killed if process in processes()]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{seconds:g} s after they were replaced there are still the processes {left}")
            time.sleep(0.05)

    def kill(self, usual: float) -> Kill:
        """Send one signal, or one to both workers, and wait for the next step."""
        victim, wanted = self.random.choice(VICTIMS), self.random.choice(WANTED)
        if victim == "hanging worker":  # one that loads gets ten minutes
            wanted = self.random.choice([name for name in WANTED if name != "setup"])
        if wanted == "setup" and victim != "scorer":
            os.kill(self.random.choice(self.workers()), signal.SIGKILL)  # so that another one loads
            time.sleep(1)
        process, running = self.caught(wanted)
        step, replaced = self.finished(), self.replaced()
        if victim == "scorer":
            scorers = [p for p, line in processes().items() if line.startswith("ray::RewardWorker")]
            targets, running = scorers[:1], "-"
        else:
            targets = self.workers() if victim == "both workers" else [process]
            replaced += len(targets)
        start = time.monotonic()
        for target in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGSTOP if victim == "hanging worker" else signal.SIGKILL)
        self.wait_for(step + 1, replaced)
        lost = time.monotonic() - start - usual * (self.finished() - step)
        self.wait_until_gone(targets)
        found = Kill(victim, PHASES.get(running, running or "waiting"), step, lost)
        logger.info("%s", found)
        return found

    def caught(self, wanted: str) -> tuple[int, str]:
        """A worker that runs the method `wanted`, or after a while any of them."""
        deadline = time.monotonic() + PATIENCE
        while True:
            workers = self.workers()
            for _ in range(200):
                for process in workers:
                    running = method(process)
                    if running == wanted or (running in WANTED[:-1] and time.monotonic() > deadline):
                        return process, running
                time.sleep(0.001)

    def workers(self) -> list[int]:
        return [p for p, line in processes().items() if line.startswith("ray::PolicyWorker")]

    def end(self) -> int:
        """Stop the run; returns the step that it saved."""
        self.driver.send_signal(signal.SIGTERM)
        code = self.driver.wait(300)
        self.log.close()
        assert code == 128 + signal.SIGTERM, (self.folder.parent / "log.txt").read_text()[-3000:]
        return max(int(path.name[5:]) for path in (self.folder / "checkpoints").glob("step_*"))


@contextlib.contextmanager
def workplace(overrides: Sequence[str]) -> Iterator[tuple[Path, list[str]]]:
    """A folder for the runs, and their keys."""
    with tempfile.TemporaryDirectory(prefix="gerl_drill_") as name:
        place = Path(name)
        (place / "bright.py").write_text(SCORER)
        yield place, [*SETTINGS, f"reward.scorers={{bright: {{path: {place / 'bright.py'}}}}}", *overrides]


def drill(kills: int, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Disturb a run `kills` times; returns what is written to the results."""
    before, found, seen = left_files(), list[Kill](), list[dict[str, float]]()
    with workplace(overrides) as (place, keys):
        run = Drill(place / "run", [*keys, f"hydra.run.dir={place / 'run'}"], seed)
        try:
            run.wait_for(5)
            usual = statistics.median(row["timing/step_s"] for row in run.rows())
            for _ in range(kills):
                found.append(run.kill(usual))
                seen.append(memory(run.driver.pid))
            step = run.end()
        finally:
            run.driver.kill()
            run.driver.wait()
        time.sleep(5)
        left = list(processes().values())
        same = compared(place, keys, step)
    litter = sorted(left_files() - before)
    tenth = seen[max(0, len(seen) // 10 - 1)]
    return {
        "kills": [asdict(kill) for kill in found],
        "steps": step,
        "step_s": usual,
        "bitwise_equal": same,
        "processes_left": left,
        "files_left": litter,
        "after_a_tenth": tenth,
        "at_the_end": seen[-1],
        "hardware": hardware(),
        "gerl": software(),
        "date": now(),
        "command": f"python benchmarks/drill.py --kills {kills} --seed {seed} {' '.join(overrides)}".strip(),
    }


def compared(place: Path, keys: Sequence[str], step: int) -> bool:
    """Whether the weights, averages and moments are those of a run that nothing disturbed, in this many steps."""
    own = ["cluster.launcher=local", "cluster.num_workers=2", f"trainer.steps={step}"]
    merged = {key.partition("=")[0]: key for key in [*keys, *own, f"hydra.run.dir={place / 'alone'}"]}
    subprocess.run([sys.executable, "-m", "gerl.trainer.main_flowgrpo", *merged.values()], check=True)
    files = [place / name / "checkpoints" / f"step_{step}" / "state.safetensors" for name in ("run", "alone")]
    return files[0].read_bytes() == files[1].read_bytes()


def table(results: dict[str, Any]) -> str:
    """Markdown: by process and phase how many, and the seconds that were lost; below it what was left."""
    rows = defaultdict(list)
    for kill in results["kills"]:
        rows[kill["process"], kill["phase"]].append(kill["lost_s"])
    lines = ["| killed | while | times | seconds lost, median | at most |", "|---|---|---|---|---|"]
    for (process, phase), lost in sorted(rows.items()):
        lines.append(f"| {process} | {phase} | {len(lost)} | {statistics.median(lost):.0f} | {max(lost):.0f} |")
    first, last = results["after_a_tenth"], results["at_the_end"]
    grown = ", ".join(f"{name.replace('_', ' ')} {first[name]:.0f} -> {last[name]:.0f}" for name in first)
    weights = "bitwise those" if results["bitwise_equal"] else "NOT those"
    lines += [
        "",
        f"{len(results['kills'])} kills in {results['steps']} steps of {results['step_s']:.1f} s; the weights at the "
        f"end are {weights} of a run that nothing disturbed; {len(results['processes_left'])} processes and "
        f"{len(results['files_left'])} files were left.",
        f"After a tenth of the kills, and after all: {grown}.",
        "",
        f"Made by `{results['command']}`.",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="write the table of the results into README.md")
    args, overrides = parser.parse_known_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not args.table:
        write_file(RESULTS, json.dumps(drill(args.kills, args.seed, overrides), indent=1) + "\n")
    write_section(README, BEGIN, END, table(json.loads(RESULTS.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

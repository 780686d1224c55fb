"""Where the CPU time of a run goes: `python benchmarks/profiling.py [key=value ...]`; by default `experiment=signs`.

py-spy samples the Python stacks of the run's processes (driver, workers, scorers) while they compute. Each sample
counts for the first line of `PARTS` that one of its frames fits, with its share of the CPU time that its process took.
What comes before the first step and after the last one is a part of its own, and so are Ray's own processes.
"""

import argparse
import contextlib
import logging
import re
import sys
import sysconfig
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import psutil

RATE = 20  # samples a second; looking at a process takes time where system calls are slow
POLL = 0.5  # seconds between looks at CPU times
OUTSIDE = "start and end"
OTHERS = "Ray's own processes"
REST = "the rest of a step"
Seconds = dict[tuple[str, bool], float]  # CPU seconds by part, in training (False) and in validation
# the outermost frames of a step; other stacks are of the start or the end
STEP = re.compile(
    r"^PolicyWorker\.(?!__init__|setup|join|load)\w+ \(|^RewardWorker\.score \("
    r"|^(take|take_ahead|conclude) \(gerl/trainer/run\.py"
)
START = re.compile(r"^(check|open_address) \(gerl/workers/fleet\.py")  # called of a worker before there is a step
VALIDATION = re.compile(r"^(\w+\.)?validate \(")
# part -> a frame of it, "Class.function (file:line)"; the first that fits any frame
PARTS = {
    "scoring": re.compile(r"^RewardWorker\."),
    "denoiser, backward": re.compile(r"^_engine_run_backward \("),
    "denoiser, forward": re.compile(r"\(diffusers/models/(transformers|unets)/"),
    "VAE": re.compile(r"\(diffusers/models/autoencoders/"),
    "text encoders": re.compile(r"\.(_?encode_prompt|_get_\w+_embeds) \(|\(transformers/models/"),
    "optimizer": re.compile(r"\(torch/optim/|^clip_gradients \(|\(gerl/model/ema\.py"),
    "communication": re.compile(r"\(torch/distributed/|\(gerl/cluster/"),
    "checkpoints, metrics and pictures": re.compile(r"\(gerl/run/"),
}


def part_of(stack: str) -> tuple[str, bool]:
    """The part of a run that a stack of py-spy's, `frame;...` from the outside in, belongs to; if in validation."""
    frames = [shortened(frame) for frame in stack.split(";")]
    if not any(STEP.search(frame) for frame in frames) or any(START.search(frame) for frame in frames):
        return OUTSIDE, False
    found = (name for name, frame in PARTS.items() if any(frame.search(f) for f in frames))
    return next(found, REST), any(VALIDATION.search(frame) for frame in frames)


def shortened(frame: str) -> str:
    """`frame` with its file as seen from the package's parent folder."""
    return re.sub(r"\((?:.*/site-packages/|.*?/(?=gerl/))", "(", frame)


def seconds_by_part(lines: Iterable[str], cpu: dict[int, float]) -> Seconds:
    """CPU seconds by part, in training and in validation, of the lines `stack count` of py-spy.

    `cpu`: CPU seconds of each process by its number; its samples share them.
    """
    samples: dict[int, Counter[tuple[str, bool]]] = {}
    for line in lines:
        stack, count = line.rsplit(" ", 1)
        number = int(re.findall(r"(?:^|;)process (\d+):", stack)[-1])
        samples.setdefault(number, Counter())[part_of(stack)] += int(count)
    found: Seconds = defaultdict(float)
    for number, taken in cpu.items():
        own = samples.get(number)
        if own is None or own.keys() == {(OUTSIDE, False)}:
            found[OTHERS, False] += taken
            continue
        for part, count in own.items():
            found[part] += taken * count / own.total()
    return found


def sampled(arguments: list[str]) -> Seconds:
    """CPU seconds by part of a run with `arguments`; ends this process where the run or the sampling fails."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "gerl.trainer.main_flowgrpo", f"hydra.run.dir={folder}/run", *arguments]
        stacks = Path(folder) / "stacks"
        spy = [
            sysconfig.get_path("scripts") + "/py-spy",
            "record",
            "--subprocesses",
            "--full-filenames",
            "--nonblocking",
            "--format",
            "raw",
        ]
        try:
            started = psutil.Popen([*spy, "--rate", str(RATE), "--output", str(stacks), "--", *run])
        except FileNotFoundError:
            sys.exit("py-spy is not installed here: pip install py-spy")
        cpu: dict[int, float] = {}
        while started.poll() is None:
            for process in started.children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it is gone
                    times = process.cpu_times()
                    cpu[process.pid] = times.user + times.system
            time.sleep(POLL)
        if started.returncode or not stacks.exists():
            sys.exit("the run failed, or py-spy may not look at its processes: see above")
        return seconds_by_part(stacks.read_text().splitlines(), cpu)


def table(found: Seconds) -> list[str]:
    """Lines of a table: CPU seconds of each part and its share of all steps, the largest first."""
    parts = {part for part, _ in found}
    totals = {part: found.get((part, False), 0.0) + found.get((part, True), 0.0) for part in parts}
    steps = sum(seconds for part, seconds in totals.items() if part not in (OUTSIDE, OTHERS))
    lines = ["| part | CPU seconds | of these in validation | share of the steps |", "|---|---|---|---|"]
    for part, seconds in sorted(totals.items(), key=lambda row: -row[1]):
        share = "" if part in (OUTSIDE, OTHERS) else f"{100 * seconds / steps:.1f} %"
        lines.append(f"| {part} | {seconds:.1f} | {found.get((part, True), 0.0):.1f} | {share} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", metavar="key=value", help="of the run")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for line in table(sampled([*parser.parse_args().keys, "logger.progress=false"])):
        logging.info("%s", line)


if __name__ == "__main__":
    main()

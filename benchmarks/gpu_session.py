"""Time-limited benchmark session on a GPU: most valuable steps first, results written at once. Standard library only.

    python benchmarks/gpu.py --bundle FOLDER [--python 3.12] [--ocr]        # where there is a network
    python benchmarks/gpu.py --minutes 8 [--bundle FOLDER] [--out FOLDER]   # on the machine with the GPU
    python benchmarks/gpu.py --minutes 2 --dry-run                          # the same on a CPU: no measurement
    python benchmarks/gpu.py --table --out FOLDER                           # into the pages of the documentation

Every step is a process with a time limit. `results.jsonl` gets a line as each ends; the same `--out` again skips those
that are done. `report.md` has the tables, and every prediction beside what was measured.
"""

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import gpu_bundle
import gpu_report
from gpu_table import UNUSABLE, Row, read_rows

HERE = Path(__file__).resolve().parent
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
FLAGS = ("--minutes", "--bundle")
RESERVE = 8.0  # seconds at the end for the tables
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
DONE, FAILED, TIME_OUT, STOPPED = "done", "failed", "out of time", "stopped"
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Step:
    """A step, run as a process. `least`, `limit`: minimum and maximum seconds; `needs`: a step that comes before.

    `case`: the rows that it writes are those of a case, `variants` those it has to have.
    """

    name: str
    command: tuple[str, ...]
    least: float
    limit: float
    needs: str | None = None
    case: str | None = None
    variants: tuple[str, ...] = ()


class Stop(BaseException):
    """Raised in the main thread by a signal, so that results are written before the process ends."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


# --- what is done


MAIN, LARGE = ("plain", "recipe", "profile"), ("plain", "recipe")
COMPILE, SIZES = "model.compile=inductor", ("images=16", "images=32", "images=64")


def steps_of(out: Path, dry: bool) -> list[Step]:
    """Return the steps, most valuable first: correctness, training, speed, size."""

    def run(name: str, least: float, limit: float, needs: str | None = None) -> Step:
        return Step(name, (str(HERE / "gpu_steps.py"), name, str(out), *(["--dry-run"] * dry)), least, limit, needs)

    def case(name: str, least: float, limit: float, *variants: str, of: str | None = None) -> Step:
        chosen = tuple(TINY.get(v, v) for v in variants) if dry else variants
        on = TINY.get(of or name, of or name) if dry else of or name
        command = [str(HERE / "gpu.py"), on, "--out", "cases.json", "--repetitions", "3"]
        command += [*(["--dry-run"] * dry), "--variants"]
        return Step(name, tuple(command), least, limit, None, on, chosen)

    found = [
        run("tests", 20, 120),
        run("signs", 20, 120),
        run("ratio", 20, 100),
        case("sd35_medium_512", 30, 120, *MAIN, COMPILE, *SIZES[:2]),
        run("model", 20, 60),
        run("train", 40, 160, "model"),
        run("export", 15, 40, "train"),
        case("sd35_medium_1024", 30, 100, *LARGE, COMPILE),
        case("flux1_dev_512", 40, 120, *MAIN),
        case("qwen_image_512", 40, 120, *LARGE),
        case("sd35_medium_512, larger", 30, 120, SIZES[2], of="sd35_medium_512"),
        case("flux1_dev_512, compiled", 40, 120, COMPILE, of="flux1_dev_512"),
    ]
    return [step for step in found if not dry or step.name not in WITHOUT_TINY]


WITHOUT_TINY = ("sd35_medium_1024", "sd35_medium_512, larger")
TINY = {  # variants and cases of a dry run
    COMPILE: "model.compile=eager", SIZES[0]: "images=4", SIZES[1]: "images=4",
    "sd35_medium_512": "sd35_medium_tiny", "flux1_dev_512": "flux1_dev_tiny", "qwen_image_512": "qwen_image_tiny",
}  # fmt: skip


# --- the session


class Session:
    """Runs steps within a time limit and records them in a folder."""

    def __init__(self, out: Path, steps: Sequence[Step], seconds: float, environment: Mapping[str, str]) -> None:
        self.out, self.steps, self.environment = out, steps, environment
        self.deadline = time.monotonic() + seconds - min(RESERVE, seconds / 4)
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Run the steps that are not done; log and skip those without enough time left."""
        for step in self.steps:
            command = self.left_of(step)
            remaining = self.deadline - time.monotonic()
            if command is None:
                say(f"{step.name}: was done before")
            elif step.needs is not None and self.states().get(step.needs) != DONE:
                say(f"{step.name}: left out, since {step.needs} is not done")
            elif remaining < step.least:
                say(f"{step.name}: no time left, {max(0.0, remaining):.0f} s of the {step.least:.0f} s that it needs")
            else:
                self.take(step, command, min(step.limit, remaining))

    def states(self) -> dict[str, str]:
        """Return the latest status of each step."""
        return {row["step"]: row["state"] for row in results(self.out)}

    def left_of(self, step: Step) -> list[str] | None:
        """Return the command for the rest of a step; None if all of it is measured."""
        if step.case is None:
            return None if self.states().get(step.name) == DONE else list(step.command)
        rows = [row for row in read_rows(self.out / "cases.json") if row["case"] == step.case]
        known = {row["variant"] for row in rows if row["refused"] != UNUSABLE}
        wanted = [name for name in dict.fromkeys(step.variants) if name not in known]
        return [*step.command, *wanted] if wanted else None

    def take(self, step: Step, command: Sequence[str], limit: float) -> None:
        """Run a step for at most `limit` seconds and record how it ended."""
        say(f"{step.name}: at most {limit:.0f} s")
        start, log = time.monotonic(), self.out / "logs" / f"{step.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self.figures_of(step).unlink(missing_ok=True)  # of an earlier attempt
        state, code = STOPPED, None
        try:
            with log.open("ab") as file:
                self.process = started([sys.executable, *command], self.out, file, self.environment)
                try:
                    code = self.process.wait(limit)
                    state = DONE if code == 0 else FAILED
                except subprocess.TimeoutExpired:
                    state = TIME_OUT
        finally:
            if self.process is not None:
                end(self.process)
                self.process = None
            seconds = time.monotonic() - start
            self.write({"step": step.name, "state": state, "code": code, "seconds": round(seconds, 1)}, step)
            say(f"{step.name}: {state} after {seconds:.0f} s{'' if state == DONE else f', see {log}'}")

    def figures_of(self, step: Step) -> Path:
        return self.out / "steps" / f"{step.name}.json"

    def write(self, row: Row, step: Step) -> None:
        """Append a line and flush it to disk."""
        found = self.figures_of(step)
        figures = json.loads(found.read_text(encoding="utf-8")) if step.case is None and found.exists() else None
        words = last_line(self.out / "logs" / f"{step.name}.log") if row["state"] == FAILED else None
        line = json.dumps({**row, "date": now(), "why": words, "figures": figures})
        with (self.out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def end_with_parent() -> None:
    """Let the kernel send SIGTERM to this new process when its parent ends, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def started(command: Sequence[str], folder: Path, log: Any, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in `folder`, in its own group, that ends with this one, even after SIGKILL."""
    return subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=dict(environment), cwd=folder,
        start_new_session=True, preexec_fn=end_with_parent,
    )  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process group by SIGTERM, then by SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def results(out: Path) -> list[Row]:
    """Return the lines of a session; truncated lines are skipped."""
    path, found = out / "results.jsonl", list[Row]()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else ""


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def say(words: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {words}", flush=True)


# --- the command


def environment_of(site: Path | None, out: Path) -> dict[str, str]:
    """Return the environment of the steps: gerl of this checkout, packages of the bundle, no network."""
    folders = [HERE.parent, HERE.parent / "tests", HERE, *([site] if site else [])]
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "GERL_DRILLS": "all"}
    return {**os.environ, **given, "XDG_STATE_HOME": str(out / "state")}


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Let the first SIGINT, SIGTERM or SIGHUP raise `Stop`."""

    def raised(number: int, frame: FrameType | None) -> None:
        for again in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(again, signal.SIG_IGN)
        raise Stop(number)

    old = {number: signal.signal(number, raised) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="run the steps that fit into this time")
    parser.add_argument("--bundle", type=Path, metavar="FOLDER", help="wheels; collect them if there is no --minutes")
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="of the bundle")
    parser.add_argument("--ocr", action="store_true", help="with the packages of OCR, 31 MB more")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of results; a new one if not given")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU: no measurement")
    parser.add_argument("--table", action="store_true", help="also write the tables into the pages")
    args = parser.parse_args(arguments)
    if args.minutes is not None and args.minutes <= 0:
        parser.error("--minutes has to be above 0")
    return args


def enter(arguments: Sequence[str]) -> None:
    """Run a command line with one of `FLAGS` as a session, and exit."""
    names = {argument.partition("=")[0] for argument in arguments}
    folders = [Path(b) for a, b in pairwise(arguments) if a == "--out"]
    pages = "--table" in names and any(folder.is_dir() for folder in folders)
    if names & set(FLAGS) or pages:
        sys.exit(main(arguments))


def main(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code: 128 + N after signal N, 2 if the bundle cannot be made."""
    args = parsed(arguments)
    try:
        if args.minutes is not None:
            return session(args)
        if args.table:
            gpu_report.write_pages(args.out)
            return 0
        size = gpu_bundle.collect(args.bundle, args.python, args.ocr)
    except (gpu_bundle.BundleError, gpu_report.ReportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*gpu_bundle.described(args.bundle), sep="\n")
    without = "" if args.ocr else "; without OCR, which --ocr adds"
    print(f"{size / 1e6:.1f} MB in {args.bundle}, for Python {args.python}{without}")
    return 0


def session(args: argparse.Namespace) -> int:
    """Run the steps and write the report, also after a signal."""
    start = time.monotonic()
    out: Path = (args.out or Path(tempfile.mkdtemp(prefix="gerl-gpu-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not args.dry_run and not any(Path(device).exists() for device in GPU_FILES):
        raise gpu_bundle.BundleError("there is no GPU here: add --dry-run to see that the command works")
    site = None
    if args.bundle is not None:
        missing = gpu_bundle.install(args.bundle, out / "site")
        site = out / "site" if missing else None
        say(f"from the bundle: {', '.join(missing) or 'nothing, all of it is here'}")
    if args.dry_run:
        say("dry run: tiny models on the CPU. No number below is a measurement.")
    say(f"results in {out}")
    running = Session(
        out, steps_of(out, args.dry_run), 60 * args.minutes - (time.monotonic() - start), environment_of(site, out)
    )
    code = 0
    with signals():
        try:
            running.run()
        except Stop as stop:
            say(f"stopped by {stop}: what was measured is kept, the same --out goes on")
            code = 128 + stop.number
    (out / "report.md").write_text(gpu_report.report(out, args.dry_run), encoding="utf-8")
    say(f"{out / 'report.md'} has the tables")
    if running.states().get("export") == DONE:
        shutil.rmtree(out / "model", ignore_errors=True)
    if args.table and code == 0:
        gpu_report.write_pages(out)
    return code

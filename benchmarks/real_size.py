"""A recipe at its real size on a CPU, over Ray: what each process takes, beside what gerl preflight predicts.

    python benchmarks/real_size.py RECIPE [--folder FOLDER] [--pages] [KEY=VALUE ...]

Weights are random (real_model.py); images, prompts, groups and steps are few, everything else is the recipe's. Nothing
starts if the prediction exceeds this machine's memory or disk. `--pages` writes benchmarks/README.md. Linux.
"""

import argparse
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sections import write_section

HERE = Path(__file__).resolve().parent
PAGE = HERE / "README.md"
MARKS = ("<!-- real size: begin, written by python benchmarks/real_size.py -->", "<!-- real size: end -->")
LEFT_OUT = ("text_encoder_3",)  # as real_model.py: T5 is larger than the denoiser
SCORER = """import numpy as np


def compute_score(images, prompts, metadata):
    return [float(np.asarray(image, np.float64).mean()) / 255 for image in images]
"""
SMALL = """model.dtype=bfloat16 cluster.device=cpu cluster.launcher=ray sampling.height=64 sampling.width=64
sampling.num_inference_steps=3 sampling.window_size=1 sampling.window_range=[0,2]
rollout.prompts_per_step=2 rollout.n=2 rollout.micro_batch_size=2 trainer.steps=2 validation.max_prompts=2
validation.num_inference_steps=2 validation.every=2 checkpoint.every=2 logger.progress=false""".split()
HARDWARE = "h100-80gb"  # of the prediction: main memory does not depend on it
EVERY, EVERY_MAPS = 0.1, 2.0  # seconds between two looks at a process, and at its mappings
PHASES = {"load": "loading", "sample": "rollout", "score": "rollout", "validate": "validation", "save": "saving"}
GB = 1e9
ROLES = ("driver", "worker", "rollout worker", "actor worker", "reward worker", "Ray")
Row = dict[str, Any]
logger = logging.getLogger("real_size")


# --- memory of processes, from /proc


@dataclass
class Look:
    """Bytes of a process at a time: `own` memory, pages of `files` and memory `shared` with other processes."""

    time: float
    own: int
    files: int
    shared: int


@dataclass
class Process:
    """`weights`: (time, resident, proportional) bytes of safetensors files; `calls`: methods that a worker ran."""

    pid: int
    looks: list[Look] = field(default_factory=list)
    weights: list[tuple[float, int, int]] = field(default_factory=list)
    calls: set[str] = field(default_factory=set)
    kind: str = ""

    @property
    def role(self) -> str:
        """What the process is in the run."""
        both = {"sample", "accumulate"} & self.calls
        if not self.kind:
            return "driver"
        if self.kind.endswith("RewardWorker"):
            return "reward worker"
        if self.kind.endswith("Worker"):
            return {("sample",): "rollout worker", ("accumulate",): "actor worker"}.get(tuple(both), "worker")
        return "Ray"


class Watch(threading.Thread):
    """Looks at a process and all below it until `end`."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.root, self.processes, self._over = root, dict[int, Process](), threading.Event()

    def run(self) -> None:
        mapped = 0.0
        while not self._over.wait(EVERY):
            now = time.time()
            below = descendants(self.root)
            for pid in below:
                process = self.processes.setdefault(pid, Process(pid))
                try:
                    self.look(process, now)
                    if now - mapped > EVERY_MAPS and process.kind.endswith("Worker"):
                        process.weights.append((now, *mapped_weights(pid)))
                except (OSError, ValueError, KeyError):  # it has ended
                    continue
            mapped = now if now - mapped > EVERY_MAPS else mapped

    def look(self, process: Process, now: float) -> None:
        """Add a look."""
        place = Path("/proc") / str(process.pid)
        title = (place / "cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace").strip()
        if title.startswith("ray::"):
            kind, _, call = title.removeprefix("ray::").partition(".")
            process.kind = kind if kind.endswith("Worker") or not process.kind else process.kind
            process.calls |= {call} if call else set()
        elif process.pid != self.root and title:  # without one it is ending
            process.kind = Path(title).name
        sizes = dict(re.findall(r"^(RssAnon|RssFile|RssShmem):\s+(\d+) kB", (place / "status").read_text(), re.M))
        process.looks.append(Look(now, *(1024 * int(sizes[f"Rss{kind}"]) for kind in ("Anon", "File", "Shmem"))))

    def end(self) -> list[Process]:
        """Stop, and return all processes there were."""
        self._over.set()
        self.join()
        return [process for process in self.processes.values() if process.looks]


def descendants(root: int) -> list[int]:
    """Return `root` and the processes below it."""
    children = defaultdict(list)
    for place in Path("/proc").glob("[0-9]*"):
        try:
            children[int((place / "stat").read_text().rpartition(")")[2].split()[1])].append(int(place.name))
        except OSError:
            continue
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def mapped_weights(pid: int) -> tuple[int, int]:
    """Return the resident bytes of mapped safetensors files, and the process's part of them if others map them too."""
    resident = part = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            inside = line.rstrip().endswith((".safetensors", ".safetensors (deleted)"))
        elif inside and name == "Rss:":
            resident += 1024 * int(rest.split()[0])
        elif inside and name == "Pss:":
            part += 1024 * int(rest.split()[0])
    return resident, part


# --- phases, from the run's own timeline


def phases_of(run: Path) -> list[tuple[float, float, str]]:
    """Return start, end and name of the run's phases; everything until the model is loaded is `loading`."""
    lines = (run / "timeline.jsonl").read_text(encoding="utf-8").splitlines()
    spans = [json.loads(line) for line in lines]
    found = [(s["start"], s["end"], PHASES.get(s["what"], s["what"])) for s in spans]
    loaded = max((end for _, end, name in found if name == "loading"), default=0.0)
    return [(0.0, loaded, "loading"), *(span for span in found if span[2] != "loading")]


def peaks(process: Process, phases: Sequence[tuple[float, float, str]]) -> dict[str, int]:
    """Return the largest own memory of a process in each phase."""
    found: dict[str, int] = {}
    for look in process.looks:
        for start, end, name in phases:
            if start <= look.time <= end:
                found[name] = max(found.get(name, 0), look.own)
    return found


# --- steps of the measurement


def keys_of(args: argparse.Namespace) -> list[str]:
    """Return the keys of the run and of its prediction; later ones win."""
    keys = [f"experiment={args.recipe}", *SMALL, *(f"model.parts.{name}=null" for name in args.leave_out)]
    return list({key.partition("=")[0]: key for key in [*keys, *args.keys]}.values())


def predicted(keys: Sequence[str], folder: Path) -> Row:
    """Return the report of gerl preflight; raises `SystemExit` with its last line if there is none."""
    out = folder / "preflight.json"
    unused = ("logger.", "cluster.launcher")
    command = [sys.executable, "-m", "gerl", "preflight", *(k for k in keys if not k.startswith(unused))]
    done = subprocess.run([*command, f"hardware={HARDWARE}", f"out={out}"], capture_output=True, text=True, check=False)
    if not out.exists():
        raise SystemExit(f"preflight: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    report: Row = json.loads(out.read_text(encoding="utf-8"))
    return report


def check_room(report: Row, folder: Path, model: Path) -> None:
    """Raise `SystemExit` if this machine has too little memory, or `folder` too little disk, for the run."""
    needed, has = report["main"]["total"], memory_total()
    if needed > has:
        raise SystemExit(
            f"{report['facts']['model']} needs {needed / GB:.1f} GB of main memory with these keys, and this machine "
            f"has {has / GB:.1f} GB: leave out components with --leave-out, or use a larger machine"
        )
    weights = sum(part["weights"]["total"] for part in report["facts"]["parts"]) * (not model.is_dir())
    needed, has = weights + report["main"]["checkpoint"] * 3, shutil.disk_usage(folder).free
    if needed > has:
        raise SystemExit(f"{folder} needs {needed / GB:.1f} GB and has {has / GB:.1f} GB free: name another --folder")


def memory_total() -> int:
    (found,) = re.findall(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    return 1024 * int(found)


def write_model(args: argparse.Namespace, model: Path) -> None:
    """Write the model in a process of its own, so that this one stays small."""
    if not model.is_dir():
        command = [sys.executable, str(HERE / "real_model.py"), str(model), "--recipe", args.recipe]
        subprocess.run([*command, "--leave-out", *args.leave_out], check=True)


def measured(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> tuple[float, list[Process]]:
    """Run a command, its output in `log`; return its seconds and processes. Raises `SystemExit` if it fails."""
    start = time.time()
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        watch = Watch(process.pid)
        watch.start()
        code = process.wait()
    found = watch.end()
    if code:
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise SystemExit(f"{log}: {said[-1] if said else 'no reason given'}")
    return time.time() - start, found


def measure(args: argparse.Namespace, folder: Path) -> Row:
    """Predict, check, write the model, run, export."""
    keys, model, run = keys_of(args), args.model or folder / "model", folder / "run"
    report = predicted(keys, folder)
    check_room(report, folder, model)
    write_model(args, model)
    shutil.rmtree(run, ignore_errors=True)
    scorer, facts = folder / "brightness.py", folder / "facts.json"
    scorer.write_text(SCORER, encoding="utf-8")
    # OCR scores random images 0, which gives no gradient
    own = [f"model.path={model}", f"hydra.run.dir={run}", f"+reward.scorers.brightness={{path: {scorer}}}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(HERE / "real_size_run.py"), str(facts), *keys, *own]
    seconds, processes = measured(command, folder / "run.log", environment)
    out = folder / "exported"
    shutil.rmtree(out, ignore_errors=True)
    export = [sys.executable, "-m", "gerl", "export", f"run={run}", f"out={out}"]
    export_seconds, exporting = measured(export, folder / "export.log", environment)
    phases = phases_of(run)
    loaded = phases[0][1]
    return {
        "recipe": args.recipe,
        "keys": args.keys,
        "left_out": args.leave_out,
        "predicted": report["main"],
        "weights": sum(part["weights"]["total"] for part in report["facts"]["parts"]),
        "seconds": seconds,
        "loaded": loaded - min(look.time for process in processes for look in process.looks),
        "processes": [described(process, phases) for process in processes],
        "mapped": mapped_together(processes),
        "facts": json.loads(facts.read_text(encoding="utf-8")),
        "checkpoint": size_of(sorted((run / "checkpoints").iterdir())[-1]),
        "export": {"seconds": export_seconds, "bytes": size_of(out), "peak": max(map(top, exporting))},
        "hardware": f"{os.cpu_count()} cores, {memory_total() / GB:.0f} GB, {platform.machine()}",
    }


def top(process: Process) -> int:
    return max(look.own for look in process.looks)


def described(process: Process, phases: Sequence[tuple[float, float, str]]) -> Row:
    """Return the role, the peak of each phase, and the most bytes of the weights' files that are mapped."""
    return {
        "role": process.role,
        "kind": process.kind,
        "peaks": peaks(process, phases),
        "peak": top(process),
        "shared": max(look.shared for look in process.looks),
        "mapped": max((resident for _, resident, _ in process.weights), default=0),
    }


def mapped_together(processes: Sequence[Process]) -> int:
    """Return the largest number of bytes of the weights' files that all processes map at a time, shared ones once."""
    parts: dict[float, int] = defaultdict(int)
    for process in processes:
        for moment, _, part in process.weights:
            parts[moment] += part
    return max(parts.values(), default=0)


def size_of(folder: Path) -> Row:
    """Return the bytes of a folder's files by name."""
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


# --- the table


def table(found: Row) -> str:
    """Return the measurement as Markdown, beside what was predicted."""
    predicted, phases = found["predicted"], ("loading", "rollout", "update", "validation", "saving")
    lines = [f"| own memory, GB | {' | '.join(phases)} | predicted |", "|---" * (len(phases) + 2) + "|"]
    for role in ROLES:
        alike = [process for process in found["processes"] if process["role"] == role]
        if not alike:
            continue
        largest = sum if role == "Ray" else max  # of all services, or of the largest process
        cells = [gigabytes(largest(process["peaks"].get(phase, 0) for process in alike)) for phase in phases]
        expected = predicted[{"driver": "driver", "reward worker": "scorer", "Ray": "ray"}.get(role, "first")]
        lines.append(f"| {role} | {' | '.join(cells)} | {gigabytes(expected)} |")
    return "\n".join([*lines, "", *notes(found)])


def notes(found: Row) -> list[str]:
    """Return what was measured besides the memory of processes."""
    predicted, facts, exported = found["predicted"], found["facts"], found["export"]
    weights, steps = facts["weights"][0], [step for step in facts["steps"] if step["step"] not in ("start", 0)]
    mapped = [process for process in found["processes"] if process["mapped"]]
    kinds: dict[str, int] = defaultdict(int)
    for name, sizes in weights["components"].items():
        for kind, size in sizes.items():
            kinds[kind if kind == weights["dtype"] else f"{kind} of {name}"] += size
    last, stored = steps[-1], [step["store"]["bytes"] for step in facts["steps"][-2:]]
    command = " ".join(["python benchmarks/real_size.py", found["recipe"], *found["keys"]])
    left_out = f", without {' and '.join(found['left_out'])}" if found["left_out"] else ""
    return [
        f"* Weights in GB: {', '.join(f'{kind} {gigabytes(size)}' for kind, size in kinds.items() if size > 1e6)}. Of "
        f"their files at most {gigabytes(max(process['mapped'] for process in mapped))} are mapped in a worker, and "
        f"{gigabytes(found['mapped'])} in all {len(mapped)} together (predicted "
        f"{gigabytes(predicted['mapped'])}). They are loaded after {found['loaded']:.0f} s.",
        f"* A step sends workers {megabytes(sum(last['sent'].values()))} MB over Ray and returns "
        f"{megabytes(sum(last['received'].values()))} MB, {megabytes(stored[1] - stored[0])} MB of it through Ray's "
        f"store (predicted {megabytes(predicted['store'])}); the state after the step is "
        f"{last['received']['checkpoint'] / sum(last['received'].values()):.1%} of it.",
        f"* A checkpoint has {megabytes(sum(found['checkpoint'].values()))} MB (predicted "
        f"{megabytes(predicted['checkpoint'])}); `gerl export` writes {megabytes(sum(exported['bytes'].values()))} MB "
        f"and takes {gigabytes(exported['peak'])} GB.",
        f"* Outside of the denoiser: {outside(steps)}.",
        "",
        f"`{command}`{left_out}; {found['hardware']}.",
    ]


def outside(steps: Sequence[Row]) -> str:
    """Return the share of each call of a worker that is not the denoiser's."""
    found = []
    for name, call in (("rollout", "generate"), ("update", "accumulate_tasks")):
        whole = [sum(s.get(key, 0.0) for step in steps for s in step["seconds"]) for key in (call, f"{call}/denoiser")]
        found.append(f"{1 - whole[1] / whole[0]:.1%} of {whole[0]:.0f} s of the {name}")
    return ", ".join(found)


def gigabytes(size: float) -> str:
    return f"{size / GB:.2f}"


def megabytes(size: float) -> str:
    return f"{size / 1e6:.3g}"


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--folder", type=Path, help="for the model and the run; by default a temporary one")
    parser.add_argument("--model", type=Path, help="a folder that real_model.py wrote")
    parser.add_argument("--leave-out", nargs="*", default=list(LEFT_OUT), metavar="COMPONENT")
    parser.add_argument("--pages", action="store_true")
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str]) -> int:
    args = parsed(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(args, folder)
        (folder / "real_size.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    logger.info("%s", table(found))
    if args.pages:
        write_section(PAGE, *MARKS, table(found))
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(main(sys.argv[1:]))

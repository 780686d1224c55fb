"""Which packages and files of gerl one plain Flow-GRPO step enters, and how often a call leads from one to another.

`python tests/tracing.py` prints it by file, in the order of first entry. A step is what happens between two calls of
the reward. What counts are packages: a file that is split into rooms is no longer to follow.
"""

import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import gerl

ROOT = Path(gerl.__file__).parent
SIZE = {"height": 32, "width": 96, "guidance_scale": 1.0, "num_inference_steps": 4, "call": {"max_sequence_length": 1}}
KEYS: dict[str, Any] = {
    "rollout.prompts_per_step": 2,
    "rollout.n": 2,
    "rollout.micro_batch_size": 4,
    "actor.updates_per_step": 1,
    "cluster.threads_per_worker": 1,
}
PROMPTS = ['a red sign that reads "A"', 'a blue sign that reads "B"']


@dataclass(frozen=True)
class Trace:
    """The calls of a step in order, those of each thread together: (file, function)."""

    calls: list[tuple[str, str]]

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.calls))

    @property
    def changes(self) -> int:
        """Calls that lead to another file than the call before them."""
        return sum(a != b for (a, _), (b, _) in pairwise(self.calls))

    @property
    def packages(self) -> list[str]:
        return list(dict.fromkeys(map(package, self.files)))

    @property
    def package_changes(self) -> int:
        """Calls that lead to another package than the call before them."""
        return sum(package(a) != package(b) for (a, _), (b, _) in pairwise(self.calls))

    @property
    def functions(self) -> int:
        return len(set(self.calls))

    @property
    def lines(self) -> int:
        return sum(len((ROOT / file).read_text().splitlines()) for file in self.files)


def package(file: str) -> str:
    """The folder of gerl that a file is in, or its own name."""
    return file.partition("/")[0]


def trace_step(run_dir: Path) -> Trace:
    """Train four steps in this process, and trace the last two; returns the one that waits less often for a thread."""
    from diffusers import DiffusionPipeline

    calls, marks, prefix = list[tuple[int, str, str]](), list[int](), f"{ROOT}/"

    def traced(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if prefix and code.co_filename.startswith(prefix) and code.co_name != "<module>":
            calls.append((threading.get_ident(), code.co_filename[len(prefix) :], code.co_qualname))

    def bright(images: Sequence[Any], prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> list[float]:
        marks.append(len(calls))
        return [sum(image.convert("L").tobytes()) / image.width / image.height / 255 for image in images]

    pipe = DiffusionPipeline.from_pretrained(ROOT / "assets" / "signs")
    threading.settrace(traced)
    sys.settrace(traced)
    try:
        gerl.train(pipe, bright, PROMPTS, steps=4, sampling=SIZE, algorithm="flow_grpo", out=run_dir, **KEYS)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    steps = [by_thread(calls[start:end]) for start, end in pairwise(marks[-3:])]
    return min(steps, key=lambda trace: trace.package_changes)


def by_thread(calls: Sequence[tuple[int, str, str]]) -> Trace:
    """Return the calls (thread, file, function) of each thread together."""
    threads = list(dict.fromkeys(thread for thread, _, _ in calls))
    return Trace([(file, name) for _, file, name in sorted(calls, key=lambda call: threads.index(call[0]))])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trace = trace_step(Path(folder) / "run")
    found = Counter(file for file, _ in trace.calls)
    entered = Counter(b for (a, _), (b, _) in pairwise(trace.calls) if a != b)
    for file in trace.files:
        sys.stdout.write(f"{file}: {found[file]} calls, entered {entered[file]} times\n")
    sizes = {name: getattr(trace, name) for name in ("lines", "functions", "changes", "package_changes")}
    counts = {"packages": len(trace.packages), "files": len(trace.files)}
    sys.stdout.write(json.dumps(counts | sizes) + "\n")

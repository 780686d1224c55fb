"""Findings of a preflight: measured time and memory, the forecast of a step, problems and warnings."""

import contextlib
import gc
import json
import platform
import re
import resource
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import jinja2
import torch

from gerl.algorithms.signal_checks import probe_warnings, ratio_problem
from gerl.config import Config
from gerl.errors import ConfigError
from gerl.protocol import RolloutTask, SamplingProbe, Segment
from gerl.trainer.update import update_parts
from gerl.utils.files import finite, reason
from gerl.workers.gradient_check import GradientComparison

T = TypeVar("T")
PROC = Path("/proc")
RESIDENT = ("self/status", "VmRSS")
# memory limit of a container (cgroup 2 and 1): a number of bytes, or `max`
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class Usage:
    """Time and peak bytes of work: of tensors on a GPU, of the process on a CPU; None if not reported."""

    seconds: float
    peak: int | None


def measured(device: str, work: Callable[[], T]) -> tuple[T, Usage]:
    """Return the result of `work`, and its time and memory on `device` (`cpu`, `cuda`, `cuda:0`)."""
    gpu = device.startswith("cuda")
    if gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # then the peak stays that of the whole process
            (PROC / "self/clear_refs").write_text("5", encoding="ascii")
    start = time.perf_counter()
    result = work()
    if gpu:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    return result, Usage(seconds, torch.cuda.max_memory_allocated(device) if gpu else _peak())


def release(device: str) -> None:
    """Return freed memory to the device after an out-of-memory error."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def capacity(device: str) -> int | None:
    """Return the bytes that this process can use, on a CPU at most the container's limit; None if unknown."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    available, resident = (_kilobytes(PROC / name, key) for name, key in (("meminfo", "MemAvailable"), RESIDENT))
    if available is None or resident is None:
        return None
    limits = [int(text) for path in LIMITS if (text := _read(path).strip()).isdecimal()]
    return min([available + resident, *limits])


def _kilobytes(path: Path, key: str) -> int | None:
    match = re.search(rf"^{key}:\s*(\d+)", _read(path), re.MULTILINE)
    return 1024 * int(match[1]) if match else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def _peak() -> int:
    peak = _kilobytes(PROC / "self/status", "VmHWM")
    unit = 1 if platform.system() == "Darwin" else 1024  # macOS reports bytes
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if peak is None else peak


Line = Callable[[float], float]  # bytes as a linear function of the batch size


def through(points: Mapping[int, float]) -> Line | None:
    """Return the line through the smallest and largest size of `points`; None for one size, or if bytes do not grow."""
    low, high = min(points, default=0), max(points, default=0)
    if low == high or points[high] <= points[low]:
        return None
    slope = (points[high] - points[low]) / (high - low)
    return lambda size: points[low] + slope * (size - low)


# --- Forecast of a trainer step from measured micro-batches: time, memory, and the sizes that fit

SPARE = 0.1  # share of the memory left free, since allocators cannot use all of it


@dataclass(frozen=True)
class Run:
    """Measurements of a micro-batch that was sampled and trained on."""

    images: int
    sampled: int  # rows denoised together
    trained: int  # rows of a forward and backward pass
    rollout: Usage
    update: Usage
    step_seconds: float  # optimizer step
    trajectories: int  # bytes of the tapes, kept until the end of a trainer step
    deviation: float | None  # max |ratio - 1|; None if the algorithm has no such ratio
    finite: bool  # whether the gradient is finite
    gradients: dict[str, int]  # denoiser -> number of LoRA modules with a gradient
    unit: str  # image or video


@dataclass(frozen=True)
class Seconds:
    """Time of a trainer step, without rewards, validation and checkpoints."""

    images: int
    images_per_worker: int  # of the busiest worker
    rollout: float
    update: float

    @property
    def step(self) -> float:
        """Time of rollout and update."""
        return self.rollout + self.update


@dataclass(frozen=True)
class Memory:
    """Memory of a worker in a trainer step, in bytes; None if unknown. Sizes are in images, at most those of a step."""

    capacity: int | None
    trajectories: float
    rollout: float | None
    update: float | None
    largest_rollout: int | None  # micro-batch that fits; 0 if none does
    largest_update: int | None
    validation: float | None  # sampling a validation micro-batch


def sized(config: Config, rollout: int, actor: int) -> Config:
    """Return `config` with other micro-batch sizes."""
    return replace(
        config,
        rollout=replace(config.rollout, micro_batch_size=rollout),
        actor=replace(config.actor, micro_batch_size=actor),
    )


def rows_of(segments: Sequence[Segment]) -> int:
    """Return the largest number of rows denoised (or trained) together."""
    return max(len(segment.seeds) for segment in segments)


def busiest(tasks: Sequence[RolloutTask], workers: int) -> int:
    """Return the images of the busiest worker if micro-batches are assigned round-robin by their ids."""
    return max(sum(len(task.samples) for task in tasks if task.id % workers == rank) for rank in range(workers))


def forecast_seconds(config: Config, tasks: Sequence[RolloutTask], workers: int, run: Run, share: float) -> Seconds:
    """Forecast the time of a step of `tasks` on `workers` at the speed of `run`; `share`: of the images trained on."""
    actor, whole_groups = config.actor, config.algorithm.needs.whole_groups
    parts = update_parts(tasks, actor.updates_per_step, whole_groups) * actor.epochs
    sampled, trained = busiest(tasks, workers), sum(busiest(part, workers) for part in parts)
    rollout = sampled * run.rollout.seconds / run.images
    update = trained * share * run.update.seconds / run.images + len(parts) * run.step_seconds
    return Seconds(sum(len(task.samples) for task in tasks), sampled, rollout, update)


def forecast_memory(
    config: Config, runs: Sequence[Run], configured: Run, images: int, sizes: range, capacity: int | None
) -> Memory:
    """Forecast the memory of a worker that samples `images` per step, in micro-batches of one of `sizes`.

    Peaks are linear in the micro-batch size, fitted to `runs`. All trajectories of a step are held until its end.
    """
    held = configured.trajectories / configured.images
    # without the trajectories of the measured micro-batch, which are added for a whole step below
    sampling = {r.sampled: r.rollout.peak - r.trajectories for r in runs if r.rollout.peak is not None}
    training = {r.trained: r.update.peak - r.trajectories for r in runs if r.update.peak is not None}
    lines = through(sampling), through(training)
    limit = None if capacity is None else (1 - SPARE) * capacity - held * images

    def largest(line: Line | None) -> int | None:
        if line is None or limit is None:
            return None
        return max((n for n in sizes if line(n) <= limit), default=0)

    def needed(peaks: dict[int, int], size: int) -> float | None:
        return peaks[size] + held * images if size in peaks else None

    validation = None
    if lines[0] is not None and config.validation.data is not None:
        validation = lines[0](config.validation.micro_batch_size)
    rollout, update = needed(sampling, configured.sampled), needed(training, configured.trained)
    return Memory(capacity, held * images, rollout, update, largest(lines[0]), largest(lines[1]), validation)


# --- The components of a pipeline, and its LoRA


@dataclass(frozen=True)
class Component:
    """A neural network of a pipeline. `targets`: names of the layers with a LoRA, with `*` for layer numbers."""

    name: str
    kind: str
    parameters: int  # without the LoRA
    dtype: str  # of most parameters
    lora_parameters: int = 0
    lora_modules: int = 0
    linear_layers: int = 0  # `lora_modules` of them have a LoRA
    targets: tuple[str, ...] = ()


def components(parts: Mapping[str, object], lora: Mapping[str, torch.nn.Parameter]) -> list[Component]:
    """Return the networks among `parts` of a pipeline, largest first; keys of `lora` are `component.parameter`."""
    listed = [_component(n, part, _of(n, lora)) for n, part in parts.items() if isinstance(part, torch.nn.Module)]
    return sorted(listed, key=lambda component: -component.parameters)


def _component(name: str, network: torch.nn.Module, lora: Mapping[str, torch.nn.Parameter]) -> Component:
    sizes: Counter[torch.dtype] = Counter()
    for key, p in network.named_parameters():
        if "lora_" not in key:
            sizes[p.dtype] += p.numel()
    layers = [key.partition(".lora_A.")[0] for key in lora if ".lora_A." in key]
    linear = [key for key, m in network.named_modules() if isinstance(m, torch.nn.Linear) and "lora_" not in key]
    return Component(
        name=name,
        kind=type(network).__name__,
        parameters=sizes.total(),
        dtype=str(max(sizes, key=lambda dtype: sizes[dtype], default="")).removeprefix("torch."),
        lora_parameters=sum(p.numel() for p in lora.values()),
        lora_modules=len(layers),
        linear_layers=len(linear),
        targets=tuple(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", layer) for layer in layers)),
    )


def count_gradients(lora: Mapping[str, torch.nn.Parameter], component: str) -> int:
    """Count the LoRA modules of `component` with a gradient of B (A has none while B is zero)."""
    gradients = [p.grad for key, p in _of(component, lora).items() if ".lora_B." in key]
    return sum(grad is not None and bool(grad.any()) for grad in gradients)


def _of(component: str, lora: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    return {key.removeprefix(f"{component}."): p for key, p in lora.items() if key.startswith(f"{component}.")}


# --- The report of a preflight: measurements, problems, warnings, and the terminal text

NOT_KNOWN = "not known"
WIDTH = 118  # characters per line of the terminal text
INDENT = 10


@dataclass
class Report:
    """Report of a preflight, filled step by step, in seconds and bytes; None: unknown or not applicable."""

    model: str
    algorithm: str
    device: str | None = None
    workers: int | None = None
    pipeline: str | None = None
    scheduler: str | None = None
    own_scheduler: str | None = None  # the pipeline's scheduler, if it was replaced
    components: list[Component] = field(default_factory=list)
    load_seconds: float | None = None
    load_peak: int | None = None
    run: Run | None = None  # the configured micro-batch, or the largest that fits
    probe: SamplingProbe | None = None
    stock_difference: float | None = None  # relative, between images sampled without noise and the pipeline's
    parts_difference: float | None = None  # relative, between summed gradients of single samples and the batch's
    gradient: GradientComparison | None = None  # of a micro-batch, with the plain one
    clip: float | None = None  # nearer clipping bound of the ratio
    max_ratio_deviation: float | None = None
    seconds: Seconds | None = None
    memory: Memory | None = None
    prompts: int | None = None  # in data.train
    steps_per_epoch: int | None = None
    problems: list[str] = field(default_factory=list)  # each prevents training
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """Return the fields, and whether the run can train, for JSON."""
        return {"can_train": not self.problems, **finite(asdict(self))}

    def text(self, config: Config) -> str:
        """Return the report for the terminal."""
        return rendered("preflight", **vars(self), config=config)


def judge_run(report: Report, trained: Sequence[int]) -> None:
    """Add problems and warnings from the measured micro-batch, trained at the steps `trained`."""
    run = report.run
    assert run is not None
    if not run.finite:
        report.problems.append(
            "the gradient is not finite: use model.dtype=float32 (or bfloat16 instead of float16), and check the "
            "settings in sampling"
        )
    for c in report.components:
        if c.lora_modules and not run.gradients[c.name]:
            report.warnings.append(
                f"no gradient reached the LoRA of {c.name} at the trained steps {list(trained)}: it would not "
                "learn; extend sampling.window_range to steps at which it runs, with algorithm.cfg=joint"
            )
    if report.probe is None:
        return
    assert report.max_ratio_deviation is not None and run.deviation is not None
    if not run.deviation <= report.max_ratio_deviation:  # also true for NaN
        report.problems.append(ratio_problem(run.deviation, report.max_ratio_deviation))
    report.warnings += probe_warnings(report.probe, report.clip)


def judge_batches(config: Config, tasks: Sequence[RolloutTask], workers: int, whole: int) -> Iterator[str]:
    """Yield warnings if the micro-batches of a step are uneven; `whole`: number of images that they divide."""
    sizes = Counter(len(task.samples) for task in tasks)
    key = f"rollout.micro_batch_size={config.rollout.micro_batch_size}"
    if len(sizes) > 1:
        made = " and ".join(f"{count} of {n}" for n, count in sorted(sizes.items(), reverse=True))
        divisors = [n for n in range(1, whole + 1) if whole % n == 0]
        below = max(n for n in divisors if n <= config.rollout.micro_batch_size)
        above = min((n for n in divisors if n >= config.rollout.micro_batch_size), default=whole)
        way = "" if config.algorithm.needs.tree else f"; {below} or {above} would divide {whole}"
        yield f"{key}: the micro-batches of a step differ, {made} images{way}"
    updates = config.actor.updates_per_step
    if len(tasks) < updates:
        yield (
            f"actor.updates_per_step={updates}: a step has only {len(tasks)} micro-batches, and therefore as many "
            "updates; lower rollout.micro_batch_size"
        )
    if len(tasks) % workers:
        yield (
            f"{key}: a step has {len(tasks)} micro-batches for {workers} workers, some of which wait for others; a "
            "multiple would use them all: change it or rollout.prompts_per_step"
        )


def judge_memory(report: Report, config: Config) -> None:
    """Add a problem for each phase that needs more memory than available; for validation, a warning."""
    memory = report.memory
    if memory is None or memory.capacity is None:
        return
    remedies = {
        "rollout": "lower rollout.micro_batch_size or rollout.prompts_per_step, or use model.offload=encoders",
        "update": "lower actor.micro_batch_size or rollout.prompts_per_step, or use model.gradient_checkpointing=true",
    }
    for phase, needed in (("rollout", memory.rollout), ("update", memory.update)):
        if needed is not None and needed > memory.capacity:
            report.problems.append(
                f"the {phase} of a step needs about {size(needed)} with its trajectories, but a worker has "
                f"{size(memory.capacity)}: {remedies[phase]}"
            )
    if memory.validation is not None and memory.validation > memory.capacity:
        report.warnings.append(
            f"validation.micro_batch_size={config.validation.micro_batch_size} would need about "
            f"{size(memory.validation)} of {size(memory.capacity)}: lower it"
        )


def size(count: float | None) -> str:
    """Format a number of bytes."""
    return NOT_KNOWN if count is None else f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Format a duration."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 20 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def write_json(out: Path, values: dict[str, object]) -> None:
    """Write a report as JSON. Raises `ConfigError` if the file cannot be written."""
    try:
        out.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out={out}: it cannot be written ({reason(error)}); choose another file") from None


def rendered(template: str, **values: object) -> str:
    """Render a report of the folder `reports` for the terminal."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "reports"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {"wrapped": _wrapped, "size": size, "sizes": _sizes, "duration": duration, "count": _count}
    environment.filters |= {**filters, "layers": _layers, "figures": _figures, "fmt": format}
    return environment.get_template(f"{template}.txt.j2").render(**values).removesuffix("\n")


def _wrapped(text: str, label: str) -> str:
    paragraph = f"{label:<{INDENT}}{' '.join(text.split())}"
    return textwrap.fill(paragraph, WIDTH, subsequent_indent=" " * INDENT, break_on_hyphens=False) + "\n"


def _figures(value: float) -> str:
    """Format a number with three figures, or more before the point."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _sizes(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size(count)}" for name, count in counts.items())


def _layers(targets: Sequence[str]) -> str:
    """Format layer names with common prefixes factored out: `blocks.*.(attn.q, attn.k)`."""
    groups: dict[str, list[str]] = {}
    for target in targets:
        block, number, rest = target.partition(".*.")
        groups.setdefault(block + number, []).append(rest)
    return "; ".join(f"{block}({', '.join(names)})" if names[0] else block for block, names in groups.items())


def _count(parameters: int) -> str:
    n = parameters
    return f"{n / 1e9:.1f} B" if n >= 1e9 else f"{n / 1e6:.1f} M" if n >= 1e6 else f"{n / 1e3:.0f} k"

"""The findings of a preflight: its numbers, sentences on what is wrong with them, and the text on the terminal."""

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gerl.algorithms.signal_checks import probe_warnings, ratio_problem
from gerl.config import Config
from gerl.errors import ConfigError
from gerl.preflight.forecast import Memory, Run, Seconds
from gerl.preflight.inventory import Component
from gerl.protocol import RolloutTask, SamplingProbe
from gerl.utils.files import finite, reason

NOT_KNOWN = "not known"
WIDTH = 118  # characters of a line of the text
INDENT = 10


@dataclass
class Report:
    """Filled as far as the preflight comes. Seconds and bytes; None: not known or not applicable."""

    model: str
    algorithm: str
    device: str | None = None
    workers: int | None = None
    prompt: str | None = None
    pipeline: str | None = None
    scheduler: str | None = None
    own_scheduler: str | None = None  # of the pipeline, where another one replaces it
    components: list[Component] = field(default_factory=list)
    load_seconds: float | None = None
    load_peak: int | None = None
    run: Run | None = None  # of the configured micro-batch, or of the largest that fitted
    probe: SamplingProbe | None = None
    stock_difference: float | None = None  # of images drawn without noise to the pipeline's own, relative
    parts_difference: float | None = None  # of the gradients of parts of a micro-batch to that of all, relative
    clip: float | None = None  # of the ratio, the nearer bound
    max_ratio_deviation: float | None = None
    seconds: Seconds | None = None
    memory: Memory | None = None
    prompts: int | None = None  # in data.train
    steps_per_epoch: int | None = None
    problems: list[str] = field(default_factory=list)  # what keeps it from training
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """For machines: the fields, and whether it can train."""
        return {"can_train": not self.problems, **finite(asdict(self))}

    def text(self, config: Config) -> str:
        """For the terminal."""
        lines = ["", *self._model(), *self._ratio()]
        if self.run is not None:
            lines += ["", *self._table(self.run), ""]
            if self.seconds is not None and self.memory is not None:
                lines += self._memory(self.memory, self.seconds.images_per_worker, self.run.unit)
                lines += self._projection(self.seconds, self.run.unit, config)
        kinds = {"problem": self.problems, "warning": self.warnings, "note": self.notes}
        said = [f"{kind}: {sentence}" for kind, sentences in kinds.items() for sentence in sentences]
        lines += ["", *said] if said else []
        return "\n".join([*lines, *([] if self.problems else ["", "it can train"])])

    def _model(self) -> Iterator[str]:
        if self.pipeline is None:
            return
        instead = f" instead of {self.own_scheduler}" if self.own_scheduler else ""
        where = f"{self.workers} worker(s) on {self.device}"
        yield f"{self.model}: {self.pipeline}, {self.scheduler}{instead}; {self.algorithm}; {where}"
        yield from wrapped("frozen", ", ".join(f"{c.name} {_count(c.parameters)} {c.dtype}" for c in self.components))
        for c in self.components:
            if c.lora_modules:
                got = "" if self.run is None else f", of which {self.run.gradients[c.name]} got a gradient"
                yield from wrapped(
                    "trained",
                    f"LoRA of {c.lora_parameters:,} parameters on {c.lora_modules} of {c.linear_layers} linear layers "
                    f"of {c.name}{got}: {_layers(c.targets)}",
                )
            elif c.lora_parameters:
                yield from wrapped(
                    "trained", f"{c.lora_parameters:,} weights of {c.name} (full fine-tuning), in float32"
                )

    def _ratio(self) -> Iterator[str]:
        if self.run is None:
            return
        if self.probe is None and self.max_ratio_deviation is not None:
            text = "not measured; with algorithm.cfg=off the trained policy is not the one that sampled"
        elif self.probe is None:
            text = f"none: {self.algorithm} does not compare probabilities with those of the rollout"
        else:
            assert self.run.deviation is not None  # there is a ratio
            clip = "no clip range" if self.clip is None else f"clip range {self.clip:g}"
            text = (
                f"max |ratio - 1| on policy {self.run.deviation:.1e} (a run stops above "
                f"{self.max_ratio_deviation:g}), |log ratio| in half a micro-batch "
                f"{self.probe.log_ratio_noise:.1e} (99th percentile); {clip}"
            )
        yield from wrapped("ratio", text)
        if self.stock_difference is not None:
            parts = f"; gradients of single samples add up within {self.parts_difference:.1e}"
            text = f"images sampled without noise differ from its own by {self.stock_difference:.1e}"
            yield from wrapped("pipeline", text + (parts if self.parts_difference is not None else ""))

    def _table(self, run: Run) -> Iterator[str]:
        yield f"{'':<10}{'micro-batch':>12}{f's/{run.unit}':>12}{'seconds':>12}{'peak memory':>14}"
        yield f"{'load':<10}{'':>12}{'':>12}{self.load_seconds:>12.2f}{size(self.load_peak):>14}"
        for name, batch, usage in (("rollout", run.drawn, run.rollout), ("update", run.trained, run.update)):
            each = usage.seconds / run.images
            yield f"{name:<10}{batch:>12}{each:>12.3g}{usage.seconds:>12.2f}{size(usage.peak):>14}"

    def _memory(self, memory: Memory, images: int, unit: str) -> Iterator[str]:
        yield from wrapped(
            "memory",
            f"in a step {size(memory.rollout)} in the rollout, {size(memory.update)} in the update, of "
            f"{size(memory.capacity)} available per worker; {size(memory.trajectories)} are the trajectories of "
            f"{images} {unit}s",
        )
        words = {None: NOT_KNOWN, 0: "none"}
        largest = {"rollout": memory.largest_rollout, "actor": memory.largest_update}
        fits = " and ".join(f"{key}.micro_batch_size {words.get(n, n)}" for key, n in largest.items())
        yield from wrapped(
            "largest",
            f"{fits}, by a line through two measured sizes; the {unit}s of a step need no more",
        )

    def _projection(self, seconds: Seconds, unit: str, config: Config) -> Iterator[str]:
        per_step, steps = config.rollout.prompts_per_step, config.trainer.steps
        epoch = "100 prompts" if self.prompts is None else f"an epoch of {self.prompts} prompts"
        in_epoch = duration((self.steps_per_epoch or 100 / per_step) * seconds.step)
        yield from wrapped(
            "time",
            f"a step of {seconds.images} {unit}s: {duration(seconds.step)} ({duration(seconds.rollout)} rollout, "
            f"{duration(seconds.update)} update); {epoch}: {in_epoch}; trainer.steps={steps}: "
            f"{duration(steps * seconds.step)}; rewards, validation and checkpoints not included",
        )


def judge_run(report: Report, trained: Sequence[int]) -> None:
    """Problems and warnings of the micro-batch that was trained on, at the steps `trained`."""
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
    if not run.deviation <= report.max_ratio_deviation:  # a NaN as well
        report.problems.append(ratio_problem(run.deviation, report.max_ratio_deviation))
    report.warnings += probe_warnings(report.probe, report.clip)


def judge_batches(config: Config, tasks: Sequence[RolloutTask], workers: int, whole: int) -> Iterator[str]:
    """Warnings where the micro-batches of a step do not come out even; `whole`: images they are cut out of."""
    sizes = Counter(len(task.samples) for task in tasks)
    key = f"rollout.micro_batch_size={config.rollout.micro_batch_size}"
    if len(sizes) > 1:
        made = " and ".join(f"{count} of {n}" for n, count in sorted(sizes.items(), reverse=True))
        divisors = [n for n in range(1, whole + 1) if whole % n == 0]
        below = max(n for n in divisors if n <= config.rollout.micro_batch_size)
        above = min((n for n in divisors if n >= config.rollout.micro_batch_size), default=whole)
        way = "" if config.algorithm.branches else f"; {below} or {above} would divide {whole}"
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
    """A problem for a phase that needs more than there is, a warning for a validation that does."""
    memory = report.memory
    if memory is None or memory.capacity is None:
        return
    ways = {
        "rollout": "lower rollout.micro_batch_size or rollout.prompts_per_step, or use model.offload=encoders",
        "update": "lower actor.micro_batch_size or rollout.prompts_per_step, or use model.gradient_checkpointing=true",
    }
    for phase, needed in (("rollout", memory.rollout), ("update", memory.update)):
        if needed is not None and needed > memory.capacity:
            report.problems.append(
                f"the {phase} of a step needs about {size(needed)} with its trajectories, but a worker has "
                f"{size(memory.capacity)}: {ways[phase]}"
            )
    if memory.validation is not None and memory.validation > memory.capacity:
        report.warnings.append(
            f"validation.micro_batch_size={config.validation.micro_batch_size} would need about "
            f"{size(memory.validation)} of {size(memory.capacity)}: lower it"
        )


def size(count: float | None) -> str:
    """Bytes to read."""
    return NOT_KNOWN if count is None else f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Seconds to read."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 20 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def write_json(out: Path, values: dict[str, object]) -> None:
    """Write a report for machines; raises `ConfigError` if the file cannot be written."""
    try:
        out.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out={out}: it cannot be written ({reason(error)}); choose another file") from None


def wrapped(label: str, text: str) -> list[str]:
    """A paragraph of the text on the terminal behind its label."""
    return textwrap.wrap(f"{label:<{INDENT}}{text}", WIDTH, subsequent_indent=" " * INDENT, break_on_hyphens=False)


def _layers(targets: Sequence[str]) -> str:
    """`blocks.*.(attn.q, attn.k)`: what the names have in common only once."""
    groups: dict[str, list[str]] = {}
    for target in targets:
        block, number, rest = target.partition(".*.")
        groups.setdefault(block + number, []).append(rest)
    return "; ".join(f"{block}({', '.join(names)})" if names[0] else block for block, names in groups.items())


def _count(parameters: int) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:.1f} B"
    return f"{parameters / 1e6:.1f} M" if parameters >= 1e6 else f"{parameters / 1e3:.0f} k"

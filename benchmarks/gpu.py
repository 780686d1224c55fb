"""Rollout and update on a GPU, beside what gerl's sizing says of them.

python benchmarks/gpu.py [CASE ...] [--variants NAME ...] [--out FILE]   # needs a CUDA device; downloads nothing
python benchmarks/gpu.py --dry-run                                       # the same code on tiny models on a CPU
python benchmarks/gpu.py --table                                         # the results, into benchmarks/README.md
python benchmarks/gpu.py --minutes 8 [--bundle FOLDER] [--out FOLDER]    # most valuable first (gpu_session.py)
python benchmarks/gpu.py --bundle FOLDER [--python 3.12] [--ocr]         # before: what a machine without network lacks

Models have random weights and are built in this process (gpu_cases.py). Without a CUDA device it is a dry run. Of every
case all variants are measured; one that fails is a row with its reason. A line is written as each ends, and takes the
place of an earlier one of the same case and variant.
"""

import argparse
import gc
import json
import logging
import shlex
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    import gpu_session

    gpu_session.enter(sys.argv[1:])  # before the imports of torch and of packages that may be missing

import checkout  # noqa: F401 - which finds gerl
import torch
import torch.distributed as dist
from gpu_cases import (
    CASES,
    DEVICES,
    TINY_CASES,
    Case,
    Variant,
    config_of,
    facts_of,
    fitting_batch,
    named,
    predicted,
    variants,
    worker_of,
)
from gpu_profile import profiled
from gpu_table import UNUSABLE, Row, read_rows, table
from sections import write_section

from gerl.algorithms import batches_of, count_pairs
from gerl.errors import GerlError
from gerl.model.denoisers import quiet_libraries
from gerl.model.errors import PIPELINE_ERRORS
from gerl.preflight.bench import TEXT, Bench, attempt
from gerl.preflight.findings import Usage, measured, rows_of
from gerl.preflight.sizing.facts import Facts
from gerl.preflight.sizing.hardware import GPUS
from gerl.protocol import Prompt
from gerl.run.card import hardware, now, software
from gerl.utils.files import capture_logs, finite, reason, write_file
from gerl.workers.worker import PolicyWorker

HERE = Path(__file__).parent
RESULTS, README = HERE / "results" / "gpu.json", HERE / "README.md"
BEGIN, END = "<!-- gpu: begin, written by python benchmarks/gpu.py --table -->", "<!-- gpu: end -->"
WARMUPS = 2  # kernels are chosen and compiled; the second one finds the moments of the optimizer as they stay
FAILURES = (GerlError, MemoryError, ImportError, OSError, *PIPELINE_ERRORS)
LONGEST = 300  # characters of a reason
NOT_COMPILED = "torch.compile reached its recompile_limit, so some calls of blocks ran uncompiled"
logger = logging.getLogger("gpu")


@dataclass(frozen=True)
class Setting:
    """Where and how often is measured. `peak`: operations a second that the GPU's maker publishes for bf16, if known.

    `batch`: images of a micro-batch, None: the largest that the sizing expects to fit. `about`: what stands in every
    row.
    """

    device: str
    dry: bool
    repetitions: int
    warmups: int
    peak: float | None
    batch: int | None
    about: Row


@dataclass(frozen=True)
class Work:
    """Of a phase. `share`: of the peak, by the operations that the sizing counts. Bytes are those of GPU tensors."""

    images_s: float
    seconds: list[float]
    flops: float | None  # of an image
    share: float | None
    peak: int | None
    predicted_peak: float | None


def work_of(used: Sequence[Usage], images: int, flops: float | None, peak: float | None, setting: Setting) -> Work:
    """What the repetitions of a phase took."""
    seconds = [usage.seconds for usage in used]
    median, most = statistics.median(seconds), max(usage.peak or 0 for usage in used)
    share = None if setting.peak is None or flops is None else flops * images / median / setting.peak
    on_gpu = setting.device.startswith("cuda")  # on a CPU it is the memory of the whole process
    return Work(images / median, seconds, flops, share, most if on_gpu else None, peak)


def measure(worker: PolicyWorker, facts: Facts, setting: Setting) -> Row:
    """Figures of rollout and update: the same micro-batch again and again, each time with an optimizer step."""
    config = worker.config
    task = Bench(worker, Prompt(0, TEXT)).task(worker.algorithm)
    images, drawn = len(task.samples), rows_of(task.segments)
    credit = torch.ones(images, config.sampling.num_inference_steps)
    credit[1::2] = -1.0
    rollouts, updates, deviations = list[Usage](), list[Usage](), list[float]()
    for turn in range(setting.warmups + setting.repetitions):
        _, rolled = attempt("rollout", drawn, setting.device, lambda: worker.sample(task))
        batches, pairs = batches_of(worker.trajectories[task.id], credit), count_pairs([(task, credit)])
        update = partial(worker.actor.accumulate, batches, pairs)
        stats, updated = attempt("update", drawn, setting.device, update)
        del batches, update
        result = worker.step(0)
        worker.clear()
        if not result.applied:
            raise GerlError("the gradient is not finite, so these are no figures of a training step")
        if turn >= setting.warmups:
            rollouts.append(rolled)
            updates.append(updated)
            deviations += [] if stats.ratio_deviation is None else [stats.ratio_deviation]
    told = predicted(facts, config, drawn)
    return {
        "images": images,
        "rollout": asdict(work_of(rollouts, images, told.rollout_flops, told.rollout_peak, setting)),
        "update": asdict(work_of(updates, images, told.update_flops, told.update_peak, setting)),
        "ratio_deviation": max(deviations) if deviations else None,
    }


def reduce(worker: PolicyWorker, setting: Setting) -> Row:
    """An all-reduce of the LoRA's flat gradient by a group of one process, alone and with the copies around it."""
    flat = worker.actor.flat_gradient()
    backend = "nccl" if setting.device.startswith("cuda") else "gloo"
    alone_here = not dist.is_initialized()  # training all weights has made such a group, and left it
    if alone_here:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    def median(work: Callable[[], object]) -> float:
        used = [measured(setting.device, work)[1] for _ in range(setting.warmups + setting.repetitions)]
        return statistics.median(usage.seconds for usage in used[setting.warmups :])

    try:
        alone, whole = median(lambda: dist.all_reduce(flat)), median(worker.reduce_gradient)
    finally:
        if alone_here:
            dist.destroy_process_group()
    size = flat.numel() * flat.element_size()
    return {"backend": backend, "bytes": size, "seconds": alone, "with_copies": whole, "bytes_s": size / alone}


def row_of(case: Case, variant: Variant, facts: Facts | None, why: str | None, setting: Setting) -> Row:
    """The line of a variant: its figures, or the reason why there are none. `why`: the one of the whole case."""
    row = {"case": case.name, "recipe": case.recipe, "variant": variant.name, "keys": list(variant.keys)}
    figures: Row | None = None
    refused = why
    if facts is not None:
        batch = setting.batch or size_for(case, facts, setting)
        try:
            figures = figures_of(case, variant, batch, facts, setting)
        except FAILURES as error:
            refused = sentence(error)
            traceback.clear_frames(error.__traceback__)  # they keep the tensors
    gc.collect()
    torch.compiler.reset()
    if setting.device.startswith("cuda") and works(setting.device):
        torch.cuda.empty_cache()
    return {**row, "refused": refused, "figures": figures, "date": now(), **setting.about}


def figures_of(case: Case, variant: Variant, batch: int, facts: Facts, setting: Setting) -> Row:
    """What is measured of a variant, on a worker of its own."""
    with capture_logs("torch._dynamo", logging.WARNING) as said:
        worker = worker_of(case, config_of(case, variant, batch), setting.device)
        if variant.collective:
            found = reduce(worker, setting)
        elif variant.profiled:
            found = profiled(worker, setting.device) | {"predicted": counted_flops(facts, worker)}
        else:
            found = measure(worker, facts, setting)
    given_up = any("recompile_limit" in message for message in said)
    return found | {"notes": [NOT_COMPILED] if given_up else []}


def counted_flops(facts: Facts, worker: PolicyWorker) -> Row:
    """Operations of an image that the sizing counts of rollout and update."""
    told = predicted(facts, worker.config, worker.config.rollout.micro_batch_size)
    return {"rollout": told.rollout_flops, "update": told.update_flops}


def size_for(case: Case, facts: Facts, setting: Setting) -> int:
    """The micro-batch of a case, the same for all variants but the recipe's."""
    config = config_of(case, Variant("plain"))
    if not setting.device.startswith("cuda"):
        return config.rollout.micro_batch_size
    return fitting_batch(facts, config, torch.cuda.get_device_properties(setting.device).total_memory)


def sentence(error: BaseException) -> str:
    """What an error says, on one line."""
    said = " ".join(reason(error).split()) if isinstance(error, Exception) else type(error).__name__
    said = said if isinstance(error, GerlError) else f"{type(error).__name__}: {said}"
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}..."


def works(device: str) -> bool:
    """Whether `device` still computes: after some errors no call of CUDA in this process does."""
    try:
        return torch.ones(2, device=device).sum().item() == 2.0
    except RuntimeError:
        return False


def run(cases: Sequence[Case], wanted: Sequence[Variant], setting: Setting, keep: Callable[[Row], None]) -> list[Row]:
    """All variants of all cases; `keep` gets each row as it ends."""
    rows: list[Row] = []
    for case in cases:
        facts, why = None, None
        logger.info("%s: sizing on shapes", case.name)
        try:
            facts = facts_of(case, setting.device)
        except FAILURES as error:
            why = f"it cannot be sized: {sentence(error)}"
        for variant in wanted:
            usable = works(setting.device)
            row = row_of(case, variant, facts if usable else None, why if usable else UNUSABLE, setting)
            rows.append(row)
            keep(row)
            logger.info("%s, %s: %s", case.name, variant.name, row["refused"] or "measured")
    return rows


# --- what is written


def keep_row(path: Path, row: Row) -> None:
    """Write `row` into the file, in the place of an earlier one of the same case, variant and device."""

    def key(of: Row) -> tuple[object, ...]:
        return of["case"], of["variant"], of["device"]

    rows = [old for old in read_rows(path) if key(old) != key(row)] + [row]
    lines = ",\n".join(json.dumps(finite(r)) for r in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, f"[\n{lines}\n]\n")


def write_table(results: Path, page: Path) -> None:
    """Put the table of `results` between the markers of `page`; raises `GerlError` for those of a dry run."""
    rows = read_rows(results)
    if any(row["dry_run"] for row in rows):
        raise GerlError(f"{results} has rows of a dry run, which are no measurements: remove them")
    write_section(page, BEGIN, END, table(rows))


# --- the command


def setting_of(args: argparse.Namespace, arguments: Sequence[str]) -> Setting:
    """Where is measured, by the command line and by what is here."""
    dry = args.dry_run or not torch.cuda.is_available()
    device = "cpu" if dry else "cuda"
    name = "a CPU" if dry else torch.cuda.get_device_name(0)
    peak = None if args.peak is None else args.peak * 1e12
    if peak is None and name in DEVICES:
        peak = GPUS[DEVICES[name]].peak
    if not dry and peak is None:
        print(f"No published peak of {name!r} is on record: shares are left out; give it with --peak TFLOPS.")
    about = {
        "dry_run": dry,
        "device": name,
        "peak_flops": None if dry else peak,
        "cuda": torch.version.cuda,
        "command": f"python benchmarks/gpu.py {shlex.join(arguments)}".strip(),
        "hardware": hardware(),
        "software": software(),
    }
    repetitions, warmups = (1, 1) if dry else (args.repetitions, WARMUPS)
    return Setting(device, dry, repetitions, warmups, None if dry else peak, args.batch, about)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"all of {', '.join(CASES)} if none is given")
    parser.add_argument("--variants", nargs="+", default=[], metavar="NAME", help="all if none is given")
    parser.add_argument("--out", type=Path, help="results/gpu.json if not given; a dry run then writes none")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU, to see that the command works")
    parser.add_argument("--peak", type=float, metavar="TFLOPS", help="of the GPU in bf16, where it is not on record")
    parser.add_argument("--batch", type=int, help="images of a micro-batch; the largest that should fit if not given")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--table", action="store_true", help="write the table of the results into README.md")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run a command line; 1 if nothing could be measured, 2 for a wrong argument."""
    args = parsed(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    quiet_libraries()
    try:
        if args.table:
            write_table(args.out or RESULTS, README)
            return 0
        setting = setting_of(args, arguments)
        if setting.dry:
            torch.set_num_threads(1)  # the tensors are tiny
            why = "Dry run" if args.dry_run else "There is no CUDA device, so this is a dry run"
            print(f"{why}: tiny models on the CPU. The numbers below are no measurements.")
        cases = named(args.cases, TINY_CASES if setting.dry else CASES, "case")
        wanted = named(args.variants, variants(setting.dry), "variant")
    except GerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out = args.out or (None if setting.dry else RESULTS)
    rows = run(cases, wanted, setting, lambda row: None if out is None else keep_row(out, row))
    print(f"\n{table(rows)}")
    return 0 if any(row["figures"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

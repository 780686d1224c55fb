"""How far the training loop scales: measured with real workers, fitted, and simulated up to 256 of them.

python benchmarks/scale.py measure [real|echo|slow0|slow1|snapshots ...] [WORKERS ...]   # half an hour on two cores
python benchmarks/scale.py fit        # prints the driver's costs, and how far they are from what was measured
python benchmarks/scale.py simulate   # minutes; into benchmarks/results/scale/simulated.json
python benchmarks/scale.py table      # from that file, into benchmarks/README.md

`real` are gerl's workers with a denoiser of a known duration, `echo` workers that compute nothing, `slow0` and `slow1`
such ones with a slow scorer, without staleness and with a staleness of 1.
"""

import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import ray
import torch
from scale_echo import Echo, Pace
from scale_report import MEASURED, SIMULATED, Record, fitted, load, simulated, write, write_table
from scale_standin import PHASES, Ledger, SlowWorker, StandIns, importable, reshape

from gerl.commandline.composition import compose_run
from gerl.config import Config
from gerl.model.denoisers import quiet_libraries
from gerl.rewards.checks import read_prompts
from gerl.trainer import start
from gerl.trainer.loop import conclude, remaining_steps, survive, take, take_ahead
from gerl.trainer.plan import Plan
from gerl.trainer.run import Run
from gerl.trainer.run_folder import identity
from gerl.workers.worker import PolicyWorker

KEYS = (
    "experiment=signs algorithm=flow_grpo sampling.num_inference_steps=3 actor.updates_per_step=2 rollout.n=8 "
    "validation.data=null validation.every=0 checkpoint.every=0 logger.progress=false logger.tensorboard=false "
    "cluster.device=cpu cluster.threads_per_worker=1 cluster.launcher=ray trainer.steps=1000 model.lora_rank=16 "
    "actor.check_gradient=false"
)
SCORER = """import time

def compute_score(images, prompts, metadata, seconds=0.0):
    time.sleep(seconds * len(images))
    return [float(hash(image.tobytes()) % 1000) for image in images]
"""
PACE = 0.02  # seconds of the denoiser an image and call
ECHO = 0.02  # seconds an echo draws an image
SLOW = 0.012  # seconds an image of the slow scorer
SIZES = {"real": (1, 2, 4, 8), "echo": (2, 8, 32), "slow0": (8,), "slow1": (8,), "snapshots": ()}
SHAPES = ((4, 4), (8, 2), (4, 8))  # (micro-batches of a worker, images in each); the first one is the table's
REPETITIONS = 2
ALL_REDUCED = (10_000, 100_000, 1_000_000, 8_000_000)  # fp32 numbers
RANKS = (4, 32, 128, 512)  # of the LoRA whose snapshot is timed
logger = logging.getLogger("scale")


def config_of(folder: Path, workers: int, shape: tuple[int, int], *more: str) -> Config:
    """The run that is measured: `workers` of them draw so many micro-batches each, of so many images."""
    batches, images = shape
    scorer = folder / "scorer.py"
    scorer.write_text(SCORER, encoding="utf-8")
    prompts = workers * batches * images // 8
    given = {key.partition("=")[0] for key in more}
    usual = [key for key in KEYS.split() if key.partition("=")[0] not in given]
    keys = (*usual, f"rollout.prompts_per_step={prompts}", f"rollout.micro_batch_size={images}")
    scorers = ("~reward.scorers.ocr", "~reward.scorers.colour", f"+reward.scorers.known.path={scorer}")
    return compose_run([*keys, f"cluster.num_workers={workers}", *scorers, *more]).config


def measure_steps(run: Run, configs: Sequence[tuple[tuple[int, int], Config]]) -> list[Record]:
    """Steps of each shape: the driver's CPU seconds, messages and bytes, and what the workers' calls took."""
    found = []
    for shape, config in configs:
        reshape(run, config)
        rows = [one_step(run, Ledger()) for _ in range(REPETITIONS)]
        weighed = one_step(run, Ledger(weigh=True))
        best = min(rows, key=lambda row: row["cpu_s"])  # the least disturbed
        keys = ("sent", "received", "sent_by", "received_by")
        workers = len(run.fleet.workers)
        found.append(
            {"workers": workers, "micro_batches": workers * shape[0], "images": workers * shape[0] * shape[1]}
            | best
            | {key: weighed[key] for key in keys}
            | {"all_cpu_s": [row["cpu_s"] for row in rows], "all_step_s": [row["step_s"] for row in rows]}
        )
        logger.info(
            "%d workers, %d micro-batches, %d images: %.3f CPU s of the driver, step of %.2f s, %d bytes sent",
            *(workers, workers * shape[0], workers * shape[0] * shape[1], best["cpu_s"], best["step_s"]),
            weighed["sent"],
        )
    return found


def one_step(run: Run, ledger: Ledger) -> Record:
    """A step of the loop."""
    with ledger.watching(run):
        cpu, thread, start = time.process_time(), time.thread_time(), time.perf_counter()
        step = next(remaining_steps(run))
        survive(take_ahead if run.config.trainer.staleness else take, run, step)
        seconds = time.perf_counter() - start
        conclude(run, step)
        cpu, thread = time.process_time() - cpu, time.thread_time() - thread
    reports = run.fleet.workers.run(SlowWorker.report)  # type: ignore[arg-type]
    return {
        "step_s": seconds,
        "cpu_s": cpu,
        "thread_s": thread,
        "cpu": {name: ledger.cpu[name] for name in PHASES},
        "thread": {name: ledger.thread[name] for name in PHASES},
        "messages": dict(ledger.messages),
        "waits": ledger.waits,
        "awaited": ledger.awaited,
        "timing": {k.removeprefix("timing/").removesuffix("_s"): v for k, v in step.watch.metrics.items()},
        "calls": merged(reports),
        "sent": sum(ledger.sent.values()),
        "received": sum(ledger.received.values()),
        "sent_by": dict(ledger.sent),
        "received_by": dict(ledger.received),
    }


def merged(reports: Sequence[dict[str, list[tuple[float, float]]]]) -> Record:
    """Of each method over all workers: calls, seconds of the median and the longest one, and mean CPU seconds."""
    found: Record = {}
    for name in sorted({name for report in reports for name in report}):
        calls = [call for report in reports for call in report.get(name, [])]
        seconds = [call[0] for call in calls]
        found[name] = {
            "calls": len(calls),
            "median_s": statistics.median(seconds),
            "max_s": max(seconds),
            "mean_s": statistics.fmean(seconds),
            "cpu_s": statistics.fmean(call[1] for call in calls),
        }
    return found


def measure(kind: str, workers: int) -> Record:
    """A Ray session with so many workers."""
    echo, slow = kind != "real", kind.startswith("slow")
    staleness, score, pace = int(kind[-1]) if slow else 0, SLOW if slow else 0.0, ECHO if echo else PACE
    more = [f"trainer.staleness={staleness}", f"+reward.scorers.known.kwargs={{seconds: {score}}}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        configs = [(shape, config_of(folder, workers, shape, *more)) for shape in (SHAPES[:1] if slow else SHAPES)]
        config = configs[0][1]
        prompts = read_prompts(config, "data.train", config.data.train)
        with StandIns(config, Pace(pace), Echo if echo else SlowWorker) as cluster:
            with patch.object(start, "calibrate", bool) if echo else nullcontext():  # without a model
                run = start.load_run(config, folder, cluster, Plan(config, prompts), identity(config))
                start.begin_run(run)
            for _ in range(2 if slow else 1):
                one_step(run, Ledger())  # everything is loaded and connected after it
            found: Record = {"kind": kind, "workers": workers, "pace": pace, "score": score, "staleness": staleness}
            found["steps"] = measure_steps(run, configs)
            begun = time.process_time()
            time.sleep(3)
            found["idle_cpu"] = (time.process_time() - begun) / 3
            if not echo:
                found |= extras(run)
            if run.fleet.recovery is not None:
                run.fleet.recovery.close()
            run.history.log.close()
    return found


def extras(run: Run) -> Record:
    """What a session measures besides its steps: collectives, and the checkpoint."""
    start = time.perf_counter()
    cpu = time.process_time()
    run.save()
    saved = {"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
    folders = sorted((run.run_dir / "checkpoints").iterdir())
    saved["bytes"] = sum(f.stat().st_size for f in folders[-1].rglob("*") if f.is_file())
    found: Record = {"saving": saved, "lora": run.fleet.model.trained_parameters, "collective": []}
    if len(run.fleet.workers) > 1:
        for numbers in ALL_REDUCED:
            times = run.fleet.workers.run(SlowWorker.all_reduce, numbers, 5)  # type: ignore[arg-type]
            slowest = [max(one) for one in zip(*times, strict=True)]
            seconds = {"seconds": statistics.median(slowest), "min": min(slowest)}
            found["collective"].append({"bytes": 4 * numbers, **seconds})
    return found


def snapshots() -> list[Record]:
    """CPU seconds and bytes of what a worker keeps of every step, by the size of its LoRA; in this process."""
    torch.set_num_threads(1)
    return [snapshot(rank) for rank in RANKS]


def snapshot(rank: int) -> Record:
    """Of a LoRA of this rank."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(Path(folder), 1, SHAPES[0], f"model.lora_rank={rank}", "cluster.launcher=local")
        worker = PolicyWorker(config, 0, "cpu", 1, 1)
        facts = worker.setup()
        for p in worker.policy.trained.values():
            p.grad = torch.ones_like(p)
        worker.actor.step()
        kept = [timed(partial(worker.snapshots.take, step)) for step in range(5)]
        packed = [timed(partial(worker.checkpoint, 4)) for _ in range(3)]
        size = sum(map(len, worker.checkpoint(4)[0].values()))
    parameters = facts.trained_parameters
    return {"parameters": parameters, "bytes": size, "keep_s": min(kept), "finished_s": min(packed)}


def timed(call: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def hardware() -> Record:
    """The machine, in words."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").is_file() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = {"python": platform.python_version(), "torch": torch.__version__, "ray": ray.__version__}
    return {"cpu": cpu, "cores": os.cpu_count(), **versions}


def run_measure(arguments: Sequence[str]) -> None:
    """Measure, and put what was found beside what is there of other sizes."""
    kinds, sizes = [a for a in arguments if not a.isdigit()] or list(SIZES), [int(a) for a in arguments if a.isdigit()]
    os.environ["PYTHONPATH"] = importable()
    quiet_libraries()
    known = load(MEASURED) if MEASURED.is_file() else {"sessions": []}
    known |= {"hardware": hardware(), "command": "python benchmarks/scale.py measure"}
    for kind in kinds:
        if kind == "snapshots":
            known["snapshots"] = snapshots()
        for workers in (sizes or SIZES[kind]) if kind != "snapshots" else ():
            new = measure(kind, workers)
            others = [s for s in known["sessions"] if (s["kind"], s["workers"]) != (kind, workers)]
            known["sessions"] = sorted([*others, new], key=lambda s: (s["kind"], s["workers"]))
            write(MEASURED, known)
        write(MEASURED, known)


def main(arguments: Sequence[str]) -> None:
    """Run a command line."""
    command, *more = arguments
    if command == "measure":
        run_measure(more)
    elif command == "fit":
        logger.info("%s", json.dumps(fitted(load(MEASURED)), indent=1))
    elif command == "simulate":
        write(SIMULATED, simulated(load(MEASURED)))
    elif command == "table":
        write_table()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    main(sys.argv[1:])

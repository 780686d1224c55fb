"""A run with several seeds: `python benchmarks/seeds.py NAME [key=value ...] --seeds 1 2 3 4 5 [--jobs 2]`.

Trains with one thread per run and writes benchmarks/results/NAME.json: the held-out reward of each validation, with the
evaluations of the denoiser on an image, forward and backward, and the images until then. Prints the mean of each
validation with its 95 % t interval over the seeds.
"""

import argparse
import json
import logging
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from forked import run_jobs

from gerl.run.card import hardware, now, software
from gerl.run.tracking import METRICS, read_metrics
from gerl.run.validation import CONFIDENCE, t_quantile
from gerl.utils.files import write_file

RESULTS = Path(__file__).resolve().parent / "results"
COMMON = (
    *("cluster.launcher=local", "cluster.threads_per_worker=1", "checkpoint.every=0", "guard.judge=off"),
    *("validation.images=null", "logger.progress=false", "logger.tensorboard=false", "logger.report=false"),
)
logger = logging.getLogger("seeds")


@dataclass(frozen=True)
class Job:
    """The run of a seed."""

    keys: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        return f"seed_{self.seed}"

    def arguments(self, folder: Path) -> list[str]:
        given = {key.partition("=")[0] for key in self.keys}
        common = [key for key in COMMON if key.partition("=")[0] not in given]
        return [*common, *self.keys, f"trainer.seed={self.seed}", f"hydra.run.dir={folder / self.name}"]


def points(metrics: Sequence[dict[str, Any]], reward: str, others: Sequence[str]) -> list[dict[str, float]]:
    """The validations of a run: step, evaluations, images, the held-out reward and other columns."""
    evaluations = accumulate(row.get("evaluations/forward", 0) + row.get("evaluations/backward", 0) for row in metrics)
    images = accumulate(row.get("evaluations/images", 0) for row in metrics)
    found = []
    for row, spent, seen in zip(metrics, evaluations, images, strict=True):
        if f"val/{reward}/mean" in row:
            values = {
                name: round(row[f"val/{name}/mean"], 5) for name in (reward, *others) if f"val/{name}/mean" in row
            }
            found.append({"step": row["step"], "evaluations": int(spent), "images": int(seen), **values})
    return found


def mean_and_interval(values: Sequence[float]) -> str:
    """Format the mean of `values` with the half-width of its 95 % t interval, which a single value does not have."""
    mean = f"{statistics.fmean(values):.3f}"
    if len(values) < 2:
        return mean
    half = t_quantile(CONFIDENCE, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean} ± {half:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the file of results")
    parser.add_argument("keys", nargs="*", help="keys of the run, such as experiment=signs")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--reward", default="ocr", help="the scorer that counts")
    parser.add_argument("--others", nargs="*", default=["ocr/exact", "colour"], help="other columns to keep")
    args = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    jobs = iter([Job(tuple(args.keys), seed) for seed in args.seeds])
    found: dict[int, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for job, succeeded, said in run_jobs(lambda: next(jobs, None), args.jobs, Path(folder)):
            if not succeeded:
                logger.error("seed %d: %s", job.seed, said[-600:])
                return 1
            found[job.seed] = points(list(read_metrics(Path(folder) / job.name / METRICS)), args.reward, args.others)
            logger.info("seed %d: %s", job.seed, found[job.seed][-1])
    runs = [{"seed": seed, "points": found[seed]} for seed in args.seeds]
    about = {"keys": args.keys, "date": now(), "hardware": hardware(), "software": software()}
    write_file(RESULTS / f"{args.name}.json", json.dumps(about | {"runs": runs}, indent=1) + "\n")
    for same in zip(*found.values(), strict=True):
        spent = statistics.fmean(point["evaluations"] for point in same)
        shown = mean_and_interval([point[args.reward] for point in same])
        logger.info("step %3d: %s after %s evaluations", same[0]["step"], shown, f"{spent:,.0f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

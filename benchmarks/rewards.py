"""The cost of scoring: `python benchmarks/rewards.py [SCORER[=KWARGS] ...] [key=value ...]`.

First, images per second of each scorer on the images of one rollout of the experiment, in one process of its own, once
its model is loaded. Scorers with weights of millions of parameters need them: name those you have. Then, a short run of
the experiment over Ray: the share of the scoring time that is hidden behind denoising, which is what the run does not
wait for.
"""

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

import yaml

from gerl.algorithms import build_algorithm
from gerl.algorithms.planning import plan_prompts, plan_samples, prompt_schedule
from gerl.cluster import Cluster
from gerl.commandline.composition import compose_run
from gerl.config import Config, ScorerConfig
from gerl.rewards.worker import RewardWorker
from gerl.trainer.main_flowgrpo import main as train
from gerl.utils.dataset import load_prompts
from gerl.workers.worker import PolicyWorker

CHEAP = ["ocr", "sharpness", "colourfulness", "jpeg_compressibility", "jpeg_incompressibility"]


def images_per_second(config: Config, scorers: dict[str, ScorerConfig], repetitions: int) -> dict[str, float]:
    """The best of `repetitions` calls with a micro-batch of the experiment."""
    with Cluster(config.cluster) as cluster:
        worker = PolicyWorker(config, 0, cluster.worker_device(0), cluster.threads, 1)
        worker.setup()
        pool = load_prompts(config.data.train)
        samples = plan_samples(config, plan_prompts(prompt_schedule(config, pool), pool, 1), 1, 0)
        task = build_algorithm(config).plan(samples)[0]
        images = worker.sample(task)
    places = [(0, row) for row in range(len(task.samples))]
    prompts, metadata = [s.prompt.text for s in task.samples], [s.prompt.metadata for s in task.samples]
    found = {}
    for name, scorer in scorers.items():
        process = RewardWorker({name: scorer}, 0, str(Path.cwd()))
        process.build()
        seconds = [process.score(name, places, prompts, metadata, images).seconds for _ in range(repetitions + 1)]
        found[name] = len(places) / min(seconds[1:])
    return found


def per_step(arguments: list[str]) -> tuple[float, float, float]:
    """Mean seconds per step of a run spent scoring, spent waiting for scores, and in all, without the first step."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"hydra.run.dir={folder}/run", "validation.data=null", "logger.progress=false", *arguments]
        if train(options) != 0:
            sys.exit("the run failed")
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    config = compose_run(arguments).config
    images = config.rollout.prompts_per_step * config.rollout.n
    rates = [(name, row[f"scorer/{name}/images_per_s"]) for row in rows[1:] for name in config.reward.scorers]
    scoring = sum(images / rate for _, rate in rates if rate)
    waiting = sum(row["timing/reward_wait_s"] for row in rows[1:])
    total = sum(row["timing/step_s"] for row in rows[1:])
    scoring, waiting, total = (seconds / (len(rows) - 1) for seconds in (scoring, waiting, total))
    return scoring, waiting, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", help="scorers, with kwargs as YAML after '=', and keys of the run")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    keys = [a for a in options.arguments if "." in a.partition("=")[0] or a.startswith("experiment=")]
    named = [a.partition("=") for a in options.arguments if a not in keys] or [(name, "", "") for name in CHEAP]
    scorers = {name: ScorerConfig(kwargs=yaml.safe_load(kwargs) if kwargs else {}) for name, _, kwargs in named}
    logging.disable(logging.WARNING)
    config = compose_run([*keys, "cluster.launcher=local", "cluster.num_workers=1"]).config
    print("| scorer | images per second |\n|---|---|")
    for name, rate in images_per_second(config, scorers, options.repetitions).items():
        print(f"| {name} | {rate:,.0f} |")
    scoring, waiting, total = per_step(["trainer.steps=10", *keys])
    print(
        f"\na step takes {total:.2f} s; scoring takes {scoring:.2f} s, for which the step waits {waiting:.2f} s: "
        f"{1 - waiting / scoring:.0%} hidden"
    )


if __name__ == "__main__":
    main()

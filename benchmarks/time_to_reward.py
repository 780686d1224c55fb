"""The cost of a reward: `python benchmarks/time_to_reward.py [ALGORITHM ...] [key=value ...] [--target R]`.

Trains the signs pipeline with each algorithm, in this process, with the same model, prompts, group size, learning rate
and OCR reward, and validates on the held-out prompts as it goes. Counted are the evaluations of the denoiser on an
image: forward (rollout, update, old policy, base model) and backward, without those of validation. The seconds are
those of the steps without validation.
"""

import argparse
import contextlib
import json
import logging
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from gerl.cluster import Cluster
from gerl.commandline.composition import compose_run, shipped
from gerl.run.timing import Stopwatch
from gerl.trainer.ray_diffusion_trainer import Metrics, RayDiffusionTrainer
from gerl.utils.dataset import load_prompts


@dataclass
class Calls:
    """Image evaluations of the denoiser, counted where it computes: in its first block.

    The denoiser as a whole is also called where it only hands out what was recorded.
    """

    forward: int = 0
    backward: int = 0
    counting: bool = True

    def attach(self, denoiser: torch.nn.Module) -> None:
        blocks = next(m for m in denoiser.children() if isinstance(m, torch.nn.ModuleList))
        blocks[0].register_forward_hook(self)

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        if self.counting:
            rows = len(next(v for v in tree_leaves(output) if torch.is_tensor(v)))
            self.forward += rows
            self.backward += rows if torch.is_grad_enabled() else 0


class Point(NamedTuple):
    """A validation: what had been paid, and what it had brought."""

    step: int
    forward: int
    backward: int
    seconds: float
    reward: float


class Reached(Exception):
    """The target reward is reached."""


class CountingTrainer(RayDiffusionTrainer):
    """The trainer, with counters on its denoiser; stops at the target reward."""

    calls: Calls
    points: list[Point]
    seconds: float = 0.0
    target: float = 2.0

    def setup(self, resume: Any) -> None:
        super().setup(resume)
        self.calls, self.points = Calls(), []
        for worker in self.workers.workers:
            for denoiser in worker.policy.denoisers.values():
                self.calls.attach(denoiser)

    def validate(self, step: int, watch: Stopwatch | None = None) -> Metrics:
        self.calls.counting = False
        metrics = super().validate(step, watch)
        self.calls.counting = True
        point = Point(step, self.calls.forward, self.calls.backward, self.seconds, metrics["val/reward/mean"])
        self.points.append(point)
        print(f"  {self.config.algorithm.name:16s} seed {self.config.trainer.seed} {point}", flush=True)
        if point.reward >= self.target:
            raise Reached
        return metrics

    def conclude(self, watch: Stopwatch) -> None:
        self.seconds += watch.seconds["step"]
        super().conclude(watch)

    def save(self) -> None:
        """No checkpoints."""


def run(name: str, seed: int, target: float, overrides: list[str]) -> list[Point]:
    """Train with algorithm `name` until `target` or the last step."""
    fixed = ["checkpoint.every=0", "logger.progress=false", "logger.tensorboard=false", "cluster.launcher=local"]
    config = compose_run([f"algorithm={name}", f"trainer.seed={seed}", *fixed, *overrides]).config
    with tempfile.TemporaryDirectory() as folder, Cluster(config.cluster, config.reward.gpu_shares) as cluster:
        prompts = load_prompts(config.data.train)
        held_out = load_prompts(config.validation.data) if config.validation.data else []
        trainer = CountingTrainer(config, Path(folder), cluster, prompts, held_out, {})
        trainer.target = target
        with contextlib.suppress(Reached):
            trainer.fit()
    return trainer.points


def row(name: str, seed: int, points: list[Point], target: float) -> str:
    """A run as a line of the table."""
    last = points[-1]
    calls = next((f"{p.forward + p.backward:,}" for p in points if p.reward >= target), "-")
    costs = f"{last.step} | {last.forward:,} | {last.backward:,} | {last.seconds:.0f}"
    return f"| {name} | {seed} | {costs} | {last.reward:.3f} | {calls} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", help=f"some of {', '.join(shipped('algorithm'))}; key=value overrides")
    parser.add_argument("--target", type=float, default=2.0, help="end a run at this held-out reward")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, help="append each run as a line of JSON")
    args = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.WARNING)
    overrides = [a for a in args.algorithms if "=" in a]
    names = [a for a in args.algorithms if "=" not in a] or ["flow_grpo", "flow_grpo_fast", "diffusion_nft"]
    columns = ("algorithm", "seed", "steps", "forward", "backward", "seconds", "held-out reward")
    table = f"\n| {' | '.join(columns)} | calls to {args.target:g} |\n|{'---|' * 8}\n"
    for name, seed in product(names, args.seeds):
        points = run(name, seed, args.target, overrides)
        table += row(name, seed, points, args.target)
        if args.out:
            line = {"algorithm": name, "seed": seed, "overrides": overrides, "points": [p._asdict() for p in points]}
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    print(table, end="")


if __name__ == "__main__":
    main()

"""What gerl's savings spare: `python benchmarks/savings.py [--repetitions N]`.

One process draws and trains on the signs pipeline with each saving and without it, in turn, on one thread, and prints
calls, rows (images in all calls), the median CPU seconds, and how far the results are apart.
"""

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from gerl.algorithms import build_algorithm, count_pairs
from gerl.algorithms.base import batches_of
from gerl.algorithms.planning import plan_samples
from gerl.commandline.composition import compose_run
from gerl.engine import Trajectory
from gerl.protocol import Prompt
from gerl.workers.actor import Actor
from gerl.workers.loading import loaded_policy
from gerl.workers.rollout import Rollout

COMMON = ["experiment=signs", "rollout.prompts_per_step=1", "rollout.n=24", "rollout.micro_batch_size=24"]
FAST = ["algorithm=flow_grpo_fast", "sampling.same_init_noise=true"]
POLICY = ["algorithm=flow_grpo", "rollout.n=12", "rollout.micro_batch_size=12"]
GUIDED = [*POLICY, "sampling.guidance_scale=4.5"]
PROMPTS = ["algorithm=flow_grpo", "rollout.prompts_per_step=8", "rollout.n=3"]


@dataclass
class Side:
    """One of the two sides of a comparison: settings, and what they cost."""

    overrides: list[str]
    shares: bool = True  # the beginnings
    calls: int = 0
    rows: int = 0
    seconds: list[float] = field(default_factory=list)
    result: torch.Tensor = field(default_factory=lambda: torch.zeros(0))


@dataclass(frozen=True)
class Saving:
    """A comparison: `part` of the work is measured, `counted` modules are watched."""

    name: str
    part: str  # rollout or update
    counted: str  # denoiser or text encoders
    without: Side
    with_it: Side


def savings() -> list[Saving]:
    """All comparisons."""
    windows = [[*FAST, f"sampling.window_range=[{first},{first + 3}]"] for first in (0, 1, 2)]
    beginnings = [
        Saving(f"shared beginning, window from step {k}", "rollout", "denoiser", Side(keys, False), Side(keys))
        for k, keys in enumerate(windows)
    ]
    return [
        *beginnings,
        Saving(
            "prompts encoded once, two steps with the same 8 prompts", "rollout", "text encoders",
            Side([*PROMPTS, "data.cache_gb=0"]), Side(PROMPTS),
        ),
        Saving(
            "nine trained steps, three in a pass", "update", "denoiser",
            Side(POLICY), Side([*POLICY, "actor.step_batch=3"]),
        ),
        Saving(
            "nine trained steps, all in a pass", "update", "denoiser",
            Side(POLICY), Side([*POLICY, "actor.step_batch=9"]),
        ),
        Saving(
            "guidance, `algorithm.cfg=detach_uncond`", "update", "denoiser",
            Side(GUIDED), Side([*GUIDED, "algorithm.cfg=detach_uncond"]),
        ),
    ]  # fmt: skip


class Worker:
    """A policy with what draws and trains it."""

    def __init__(self, side: Side) -> None:
        self.config = config = compose_run([*COMMON, *side.overrides]).config
        self.policy = loaded_policy(config, "cpu", None)
        torch.manual_seed(0)
        for p in self.policy.trained.values():
            p.data.normal_(0, 0.05)
        self.algorithm = build_algorithm(config)
        self.rollout = Rollout(self.policy, config.sampling, config.validation, side.shares)
        self.actor = Actor(self.policy, config.actor, self.algorithm, total_updates=1)
        prompts = [Prompt(i, f'a red sign that reads "{100 + i}"') for i in range(config.rollout.prompts_per_step)]
        self.tasks = self.algorithm.plan(plan_samples(config, prompts, 1, 0))
        self.drawn: list[Trajectory] = []

    def draw(self) -> torch.Tensor:
        """The final latents of all samples."""
        self.drawn = [self.rollout.generate(task, self.algorithm)[1] for task in self.tasks]
        return torch.cat([trajectory.tapes[-1].steps[max(self.kept(trajectory))].x_next for trajectory in self.drawn])

    @staticmethod
    def kept(trajectory: Trajectory) -> Sequence[int]:
        """The steps of which a lean tape has latents."""
        return trajectory.task.segments[-1].trained

    def train(self) -> torch.Tensor:
        """The gradient of a step."""
        self.actor.optimizer.zero_grad(set_to_none=True)
        steps = self.config.sampling.num_inference_steps
        for trajectory in self.drawn:
            credit = torch.linspace(-1, 1, len(trajectory.task.samples))[:, None].expand(-1, steps)
            self.actor.accumulate(batches_of(trajectory, credit), count_pairs([(trajectory.task, credit)]))
        return self.actor.flat_gradient()

    @contextmanager
    def counted(self, side: Side, what: str) -> Iterator[None]:
        """Count the calls of the denoiser, in its first block, or of the text encoders, and their rows."""

        def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [v for v in (*args, *kwargs.values()) if torch.is_tensor(v)]
            side.calls, side.rows = side.calls + 1, side.rows + len(tensors[0])

        (denoiser,) = self.policy.denoisers.values()
        encoders = [m for name, m in self.policy.pipe.components.items() if name.startswith("text_encoder") and m]
        watched = [denoiser.transformer_blocks[0]] if what == "denoiser" else encoders
        hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in watched]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def measure(saving: Saving, repetitions: int) -> None:
    """Fill in both sides; they take turns, and the first turn, which is not timed, counts."""
    sides = [(side, Worker(side)) for side in (saving.without, saving.with_it)]
    for side, worker in sides:
        if saving.counted == "denoiser":
            worker.draw()  # looks at the structure of a call, too
        work = works(worker, saving.part)
        with worker.counted(side, saving.counted):
            for _ in range(2 if saving.counted == "text encoders" else 1):
                side.result = work()
    for _ in range(repetitions):
        for side, worker in sides:
            start = time.process_time()
            works(worker, saving.part)()
            side.seconds.append(time.process_time() - start)


def works(worker: Worker, part: str) -> Callable[[], torch.Tensor]:
    return worker.draw if part == "rollout" else worker.train


def row(saving: Saving) -> str:
    """The line of the table."""
    a, b = saving.without, saving.with_it
    ratio = statistics.median(y / x for x, y in zip(a.seconds, b.seconds, strict=True))
    apart = float((a.result - b.result).norm() / a.result.norm())
    medians = " | ".join(f"{statistics.median(side.seconds):.2f}" for side in (a, b))
    counts = f"{a.calls} ({a.rows}) | {b.calls} ({b.rows})"
    return f"| {saving.name} | {saving.part} | {saving.counted} | {counts} | {medians} | {ratio:.2f} | {apart:.0e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    print("| saving | part | counted | calls (rows) without | with | CPU s without | with | ratio | apart |")
    print("|---|---|---|---|---|---|---|---|---|")
    for saving in savings():
        measure(saving, args.repetitions)
        print(row(saving), flush=True)


if __name__ == "__main__":
    main()

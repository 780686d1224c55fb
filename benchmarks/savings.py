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
from importlib import import_module
from typing import Any

import torch

from gerl.algorithms import build_algorithm, count_pairs
from gerl.algorithms.base import Rewards, batches_of
from gerl.algorithms.planning import plan_samples
from gerl.commandline.composition import compose_run
from gerl.engine import Trajectory
from gerl.model.denoisers import quiet_libraries
from gerl.protocol import Prompt
from gerl.workers.actor import Actor
from gerl.workers.rollout import Rollout
from gerl.workers.setup import load_worker_policy

COMMON = ["experiment=signs", "rollout.prompts_per_step=1", "rollout.n=24", "rollout.micro_batch_size=24"]
FAST = ["algorithm=flow_grpo_fast", "sampling.same_init_noise=true"]
POLICY = ["algorithm=flow_grpo", "rollout.n=12", "rollout.micro_batch_size=12"]
GUIDED = [*POLICY, "sampling.guidance_scale=4.5"]
PROMPTS = ["algorithm=flow_grpo", "rollout.prompts_per_step=8", "rollout.n=3"]
EARLY = [*POLICY, "sampling.window_range=[0,2]"]  # its images start from one noise
BRANCHES = ["algorithm=tempflow_grpo", "rollout.n=2", "algorithm.branch_factor=6", "sampling.window_range=[0,2]"]
LATE = ["algorithm=flow_grpo_fast", "sampling.window_range=[2,5]"]


@dataclass
class Side:
    """One of the two sides of a comparison: settings, and what they cost."""

    overrides: list[str]
    shares: bool = True  # the beginnings in the rollout, and samples at the same latents in the update
    calls: int = 0
    rows: int = 0
    seconds: list[float] = field(default_factory=list)
    result: torch.Tensor = field(default_factory=lambda: torch.zeros(0))


@dataclass(frozen=True)
class Saving:
    """A comparison: `part` of the work is measured, `counted` modules are watched."""

    name: str
    part: str  # rollout or update
    counted: str  # denoiser, blocks, attention or text encoders
    without: Side
    with_it: Side
    images: bool = False  # are compared, rather than latents or gradients: what differs comes after these


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
        Saving("two trained steps, the first from one noise", "update", "denoiser", Side(EARLY, False), Side(EARLY)),
        Saving("branches trained where they part", "update", "denoiser", Side(BRANCHES, False), Side(BRANCHES)),
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
        Saving(
            "half of the images, `algorithm.train_share=0.5`", "update", "denoiser",
            Side(POLICY), Side([*POLICY, "algorithm.train_share=0.5"]),
        ),
        *(
            Saving(
                f"`sampling.cache=first_block`, threshold {threshold}", "rollout", "blocks",
                Side(LATE), Side([*LATE, "sampling.cache=first_block", f"sampling.cache_threshold={threshold}"]), True,
            )
            for threshold in (0.1, 0.2)
        ),
        Saving(
            "`sampling.cache=taylorseer`", "rollout", "attention",
            Side(LATE), Side([*LATE, "sampling.cache=taylorseer"]), True,
        ),
        Saving("`model.compile=inductor`", "rollout", "", Side(POLICY), Side([*POLICY, "model.compile=inductor"])),
        Saving("`model.compile=inductor`", "update", "", Side(POLICY), Side([*POLICY, "model.compile=inductor"])),
        Saving("`model.channels_last=true`", "rollout", "", Side(POLICY), Side([*POLICY, "model.channels_last=true"])),
        Saving("`rollout.quantize=int8`", "rollout", "", Side(POLICY), Side([*POLICY, "rollout.quantize=int8"])),
    ]  # fmt: skip


class Worker:
    """A policy with what draws and trains it."""

    def __init__(self, side: Side) -> None:
        self.config = config = compose_run([*COMMON, *side.overrides]).config
        self.policy = load_worker_policy(config, "cpu", None)
        torch.manual_seed(0)
        for p in self.policy.trained.values():
            p.data.normal_(0, 0.05)
        self.algorithm = build_algorithm(config)
        self.rollout = Rollout(self.policy, config.sampling, config.validation, side.shares)
        self.actor = Actor(self.policy, config.actor, self.algorithm, total_updates=1)
        prompts = [Prompt(i, f'a red sign that reads "{100 + i}"') for i in range(config.rollout.prompts_per_step)]
        self.tasks = self.algorithm.plan(plan_samples(config, prompts, 1, 0))
        self.drawn: list[Trajectory] = []
        self.pixels = torch.zeros(0)

    def draw(self) -> torch.Tensor:
        """The final latents of all samples."""
        found = [self.rollout.generate(task, self.algorithm) for task in self.tasks]
        self.drawn = [trajectory for _, trajectory in found]
        self.pixels = torch.cat([torch.from_numpy(pixels) for pixels, _ in found]).float()
        return torch.cat([trajectory.tapes[-1].steps[max(self.kept(trajectory))].x_next for trajectory in self.drawn])

    @staticmethod
    def kept(trajectory: Trajectory) -> Sequence[int]:
        """The steps of which a lean tape has latents."""
        return trajectory.task.segments[-1].trained

    def train(self) -> torch.Tensor:
        """The gradient of a step."""
        self.actor.optimizer.zero_grad(set_to_none=True)
        steps = self.config.sampling.num_inference_steps
        replay = import_module("gerl.engine.replay")  # the package has a function of that name
        common = replay.first_of_duplicates
        if not self.rollout.shares:
            replay.first_of_duplicates = lambda x: list(range(len(x)))
        for trajectory in self.drawn:
            samples = trajectory.task.samples
            rewards = torch.linspace(-1, 1, len(samples))
            credit = self.algorithm.credit(Rewards(samples, rewards, rewards[:, None], torch.ones(1)))
            assert credit.shape[1] == steps
            self.actor.accumulate(batches_of(trajectory, credit), count_pairs([(trajectory.task, credit)]))
        replay.first_of_duplicates = common
        return self.actor.flat_gradient()

    @contextmanager
    def counted(self, side: Side, what: str) -> Iterator[None]:
        """Count the calls of the denoiser, in its first block, or of the text encoders, and their rows."""

        def note(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [v for v in (*args, *kwargs.values()) if torch.is_tensor(v)]
            side.calls, side.rows = side.calls + 1, side.rows + len(tensors[0])

        (denoiser,) = self.policy.denoisers.values()
        blocks = denoiser.transformer_blocks
        watched = {
            "denoiser": [blocks[0]],
            "blocks": [block.ff for block in blocks],
            "attention": [block.attn.to_out[0] for block in blocks],
            "text encoders": [m for name, m in self.policy.pipe.components.items() if name.startswith("text_encoder")],
        }
        hooks = [
            module.register_forward_pre_hook(note, with_kwargs=True)
            for module in watched.get(what, [])
            if module is not None
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def measure(saving: Saving, repetitions: int) -> None:
    """Fill in both sides; they take turns, and the first turn, which is not timed, counts."""
    sides = [(side, Worker(side)) for side in (saving.without, saving.with_it)]
    for side, worker in sides:
        if saving.counted != "text encoders":
            worker.draw()  # looks at the structure of a call, too
        work = works(worker, saving.part)
        with worker.counted(side, saving.counted):
            for _ in range(2 if saving.counted == "text encoders" else 1):
                side.result = work()
            if saving.images:
                side.result = worker.pixels
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
    counts = f"{a.calls} ({a.rows}) | {b.calls} ({b.rows})" if saving.counted else " | "
    return f"| {saving.name} | {saving.part} | {saving.counted} | {counts} | {medians} | {ratio:.2f} | {apart:.0e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    quiet_libraries()
    torch.set_num_threads(1)
    print("| saving | part | counted | calls (rows) without | with | CPU s without | with | ratio | apart |")
    print("|---|---|---|---|---|---|---|---|---|")
    for saving in savings():
        measure(saving, args.repetitions)
        print(row(saving), flush=True)


if __name__ == "__main__":
    main()

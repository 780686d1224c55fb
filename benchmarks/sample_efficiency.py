"""Ablations of the default experiment: is there more reward for the same number of denoiser evaluations?

    python benchmarks/sample_efficiency.py [VARIANT ...] [--jobs 2] [--folder FOLDER] [--table]

Each variant changes one thing and has the same budget of evaluations, forward and backward. A pilot run measures the
cost of a step, from which the number of steps follows. The learning rate is tuned for the default and for variants that
change the optimizer or the size of a step; the others use the default's. The results come from seeds that were not
used for tuning. They are stored in benchmarks/results/sample_efficiency.json, and the same command resumes from there.
`--table` prints paired differences from the default, and permutation tests on the logit scale with Holm's correction.
"""

import argparse
import json
import logging
import math
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forked import run_jobs, train_by_gerl
from ladder_table import holm, logit, paired_test
from seeds import RESULTS, mean_and_interval, points

from gerl.algorithms.planning import plan_samples
from gerl.config import Config
from gerl.engine.record import Recorder
from gerl.protocol import Group, Prompt, RolloutTask
from gerl.rewards.rollouts import PendingRollout
from gerl.run.card import hardware, now, software
from gerl.run.tracking import METRICS, read_metrics
from gerl.trainer import start as training
from gerl.trainer.extensions import Extension
from gerl.trainer.run import Run
from gerl.trainer.step import Step
from gerl.utils.files import write_file
from gerl.utils.seeding import derive_seed
from gerl.workers import actor

FILE = RESULTS / "sample_efficiency.json"
BUDGET = 3_000  # evaluations of the denoiser on an image
RATES, TUNING_SEEDS, SEEDS, PILOT_STEPS = (5e-4, 1e-3, 2e-3), (1, 2, 3), tuple(range(601, 611)), 22
COMMON = (
    "experiment=signs", "reward.scorers.ocr.replicas=1", "reward.trial=false",
    "cluster.launcher=local", "cluster.threads_per_worker=1", "checkpoint.every=0", "guard.judge=off",
    "validation.images=null", "logger.progress=false", "logger.tensorboard=false", "logger.report=false",
    "logger.live=false",
)  # fmt: skip
PROBES, SOLVED, FILLED = 2, 0.999, 0.25  # images of a probe; reward of a solved prompt; share of solved ones filled
CANDIDATES, RIDGE, MEMORY = 4, 1.0, 0.95  # prompts per chosen one; penalty; weight of a step in the next
logger = logging.getLogger("sample_efficiency")


# --- Variants of sampling


class ProbeThenFill(Extension):
    """Sample `PROBES` images per prompt, and complete the group only where these differ or fail.

    A group whose probes all succeed is completed with probability `FILLED` and then weighted by 1 / `FILLED`, which
    keeps the gradient unbiased.
    """

    weights: Mapping[Group, float] = {}

    def starting(self, run: Run) -> None:
        whole = run.plan.tasks

        def probes(*arguments: Any) -> list[RolloutTask]:
            samples = [s for task in whole(*arguments) for s in task.samples if s.index < PROBES]
            return run.algorithm.plan(samples, arguments[-1])

        run.plan.tasks = probes  # type: ignore[method-assign]

    def scored(self, run: Run, step: Step) -> PendingRollout | None:
        if step.rounds > 1:
            return None
        chance = random.Random(derive_seed("fill", self.config.trainer.seed, step.number))
        self.weights = {
            group: 1 / FILLED * (chance.random() < FILLED) if min(v or 0.0 for v in values) >= SOLVED else 1.0
            for group, values in step.scores.by_group().items()
        }
        prompts = {s.group: s.prompt for s in step.scores.samples if self.weights[s.group] > 0}
        planned = plan_samples(self.config, prompts.values(), step.number, run.state.policy_version)
        rest = [sample for sample in planned if sample.index >= PROBES]
        return run.rollouts.start(run.algorithm.plan(rest, len(step.tasks))) if rest else None

    def credited(self, run: Run, step: Step) -> None:
        assert step.credit is not None
        step.credit *= torch.tensor([[self.weights[sample.group]] for sample in step.scores.samples])


class ExpectedVariance(Extension):
    """Choose the prompts with the largest expected spread of rewards, by ridge regression on letters and length."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.seen: list[tuple[int, np.ndarray, float]] = []  # step, features, standard deviation of the rewards

    @staticmethod
    def features(prompt: Prompt) -> np.ndarray:
        text = re.findall(r'"(.*)"', prompt.text)[0]
        letters = [text.count(c) for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
        return np.array([1.0, len(text), *letters])

    def prompted(self, run: Run, number: int, prompts: Sequence[Prompt], held_out: bool) -> Sequence[Prompt]:
        if held_out or len(self.seen) < CANDIDATES * len(prompts):
            return prompts
        chance = random.Random(derive_seed("candidates", self.config.trainer.seed, number))
        pool = chance.sample(list(run.plan.prompts), CANDIDATES * len(prompts))
        x = np.stack([features for _, features, _ in self.seen])
        y = np.array([spread for _, _, spread in self.seen])
        w = np.array([MEMORY ** (number - step) for step, _, _ in self.seen])[:, None]
        centre = np.average(y, weights=w[:, 0])
        fit = np.linalg.solve(x.T @ (w * x) + RIDGE * np.eye(x.shape[1]), x.T @ (w[:, 0] * (y - centre)))
        return sorted(pool, key=lambda prompt: -float(self.features(prompt) @ fit))[: len(prompts)]

    def rewarded(self, run: Run, step: Step) -> None:
        prompts = {sample.group: sample.prompt for sample in step.scores.samples}
        for group, values in step.scores.by_group().items():
            spread = statistics.pstdev([v for v in values if v is not None])
            self.seen.append((step.number, self.features(prompts[group]), spread))


def with_extension(kind: type[Extension]) -> Callable[[], None]:
    """Return a change that adds an extension to the run."""

    def change() -> None:
        plain = training.build_extensions
        training.build_extensions = lambda config: {**plain(config), kind.__name__: kind(config)}  # type: ignore

    return change


def antithetic() -> None:
    """Negate the initial noise of every second image of a group, before the noise that the group shares is added."""
    plain = Recorder._spread

    def mirrored(self: Recorder, common: object, sampler: Callable[..., object], *args: Any, **kwargs: Any) -> object:
        mixed, share = plain(self, common, sampler, *args, **kwargs), math.sqrt(1 - self.init_spread**2)
        assert torch.is_tensor(mixed) and torch.is_tensor(common)
        if len(mixed) % 2 == 0:
            mixed[1::2] = share * common[1::2] - (mixed[::2] - share * common[::2])
        return mixed

    Recorder._spread = mirrored  # type: ignore[method-assign]


# --- Variants of the optimizer


class Muon(torch.optim.AdamW):
    """Orthogonalised momentum (Jordan et al. 2024) with AdamW's step size (Liu et al. 2025, arXiv 2502.16982)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        before = {p: p.clone() for group in self.param_groups for p in group["params"] if p.grad is not None}
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p in before and p.ndim == 2:
                    momentum = 0.05 * p.grad + 0.95 * self.momentum(p)
                    self.state[p]["exp_avg"].copy_(momentum)
                    u, s, v = torch.linalg.svd(momentum, full_matrices=False)
                    kept = (s > 1e-7 * s[0]).to(s.dtype) if float(s[0]) > 0 else torch.zeros_like(s)
                    p.copy_(before[p]).sub_((u * kept) @ v, alpha=0.2 * math.sqrt(max(p.shape)) * group["lr"])

    def momentum(self, p: torch.Tensor) -> torch.Tensor:
        """Return the momentum before AdamW's own update of it, with its betas."""
        beta = self.param_groups[0]["betas"][0]
        return (self.state[p]["exp_avg"] - (1 - beta) * p.grad) / beta


class LoRAPlus(torch.optim.AdamW):
    """Twice the learning rate for the second matrix of a LoRA, half for the first (arXiv 2402.12354)."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        every = list(parameters)
        self.faster = {p for p in every if not p.any()}  # those that start at zero
        super().__init__(every, **settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        before = {p: p.clone() for group in self.param_groups for p in group["params"]}
        super().step(closure)
        for p, old in before.items():
            p.copy_(torch.lerp(old, p, 2.0 if p in self.faster else 0.5))


class Consistency(torch.optim.AdamW):
    """Lower the learning rate as gradients become less consistent.

    Multiplies it by the moving average of the cosine between gradient and momentum, relative to its maximum so far.
    """

    average, largest, decay, first = 0.0, 0.0, 0.8, 3
    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        known = [p for group in self.param_groups for p in group["params"] if p.grad is not None and p in self.state]
        factor = 1.0
        if known:
            pairs = [(p.grad.flatten(), self.state[p]["exp_avg"].flatten()) for p in known]
            dot, one, other = (sum(float(torch.dot(*pair)) for pair in found) for found in (
                pairs, [(g, g) for g, _ in pairs], [(m, m) for _, m in pairs]))  # fmt: skip
            self.steps += 1
            self.average = self.decay * self.average + (1 - self.decay) * dot / math.sqrt(one * other + 1e-30)
            cosine = self.average / (1 - self.decay**self.steps)
            if self.steps >= self.first:
                self.largest = max(self.largest, cosine)
                factor = min(1.0, max(0.05, cosine / self.largest)) if self.largest > 0 else 0.05
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] *= factor
        super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


def with_optimizer(kind: type[torch.optim.AdamW]) -> Callable[[], None]:
    """Return a change that replaces AdamW."""

    def change() -> None:
        actor.build_optimizer = lambda config, parameters: kind(  # type: ignore
            parameters, lr=config.lr, betas=tuple(config.betas), eps=config.eps, weight_decay=config.weight_decay
        )

    return change


@dataclass(frozen=True)
class Variant:
    """A change of the default by keys, or by patches in the process of the run; `tuned`: has its own learning rate."""

    what: str
    keys: tuple[str, ...] = ()
    change: Callable[[], None] | None = None
    tuned: bool = False


DEFAULT = "default"
VARIANTS = {
    DEFAULT: Variant("unchanged", tuned=True),
    "first_level": Variant("train the highest noise level only", ("sampling.window_range=[0,1]",)),
    "probe_then_fill": Variant(
        "six prompts per step; four of six images only if the first two differ or fail",
        ("rollout.prompts_per_step=6",),
        with_extension(ProbeThenFill),
    ),
    "expected_variance": Variant(
        "prompts with the largest expected reward variance", change=with_extension(ExpectedVariance)
    ),
    "antithetic": Variant("antithetic initial noise within a group", change=antithetic),
    "two_epochs": Variant(
        "two epochs per rollout, the second off-policy", ("algorithm.off_policy=true", "actor.epochs=2")
    ),
    "two_levels": Variant("train each image at two noise levels", ("algorithm.timesteps=2",)),
    "muon": Variant("Muon", change=with_optimizer(Muon), tuned=True),
    "lora_plus": Variant("LoRA+, ratio 4", change=with_optimizer(LoRAPlus), tuned=True),
    "consistency": Variant(
        "learning rate proportional to the consistency of gradients",
        ("actor.lr_schedule=constant",),
        with_optimizer(Consistency),
        tuned=True,
    ),
    "two_prompts": Variant("12 images per step", ("rollout.prompts_per_step=2",), tuned=True),
    "small_groups": Variant("six prompts per step, four images each", ("rollout.prompts_per_step=6", "rollout.n=4")),
    "three_steps": Variant("three denoising steps instead of four", ("sampling.num_inference_steps=3",)),
    "combined": Variant(
        "`three_steps` and `two_levels`", ("sampling.num_inference_steps=3", "algorithm.timesteps=2")
    ),
    "separate_noise": Variant(
        "no shared noise within a group",
        ("algorithm.shared_noise=false", "sampling.same_init_noise=false", "sampling.init_noise_spread=0"),
    ),
}  # fmt: skip


# --- Runs


@dataclass(frozen=True)
class Job:
    """A run of a variant; stage: pilot, tune or final."""

    variant: str
    stage: str
    rate: float
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.stage}-{self.rate:g}-{self.seed}"

    @property
    def key(self) -> tuple[str, str, float, int]:
        return self.variant, self.stage, self.rate, self.seed

    def arguments(self, folder: Path) -> list[str]:
        keys = VARIANTS[self.variant].keys
        if not any(key.startswith("actor.lr_schedule=") for key in keys):
            keys = (*keys, "actor.lr_schedule=linear")
        prompts = 2 if self.stage == "pilot" else 64  # the reward of a pilot does not count
        return [
            *COMMON, *keys, f"trainer.seed={self.seed}", f"actor.lr={self.rate:g}", f"trainer.steps={self.steps}",
            f"validation.every={self.steps}", f"validation.max_prompts={prompts}",
            f"hydra.run.dir={folder / self.name}",
        ]  # fmt: skip

    def train(self, arguments: list[str]) -> int:
        """Apply the change of the variant to this process, and train."""
        if change := VARIANTS[self.variant].change:
            change()
        return train_by_gerl(self, arguments)


def next_jobs(names: Sequence[str], runs: Sequence[dict[str, Any]]) -> Iterator[Job | None]:
    """Yield the missing runs of variants; None if the next one depends on a run in progress."""
    taken: set[tuple[str, str, float, int]] = set()
    while True:
        known = {(run["variant"], run["stage"], run["rate"], run["seed"]) for run in runs} | taken
        planned = [job for name in names for job in waiting(name, runs)]
        job = next((job for job in planned if job.key not in known), None)
        taken |= {job.key} if job else set()
        yield job


def waiting(name: str, runs: Sequence[dict[str, Any]]) -> list[Job]:
    """Return the runs of the current stage of a variant."""
    own = [run for run in runs if run["variant"] == name]
    pilots = [run for run in own if run["stage"] == "pilot"]
    if not pilots:
        return [Job(name, "pilot", RATES[1], TUNING_SEEDS[0], PILOT_STEPS)]
    steps = round(BUDGET * pilots[0]["steps"] / pilots[0]["evaluations"])
    if (rate := best_rate(name, runs)) is not None:
        return [Job(name, "final", rate, seed, steps) for seed in SEEDS]
    if not VARIANTS[name].tuned:
        return []  # until the default is tuned
    return [Job(name, "tune", rate, seed, steps) for seed in TUNING_SEEDS for rate in RATES]


def best_rate(name: str, runs: Sequence[dict[str, Any]]) -> float | None:
    """Return the learning rate with the best mean reward over the tuning seeds, None before they are complete."""
    tuned = name if VARIANTS[name].tuned else DEFAULT
    found = [run for run in runs if run["variant"] == tuned and run["stage"] == "tune"]
    if len(found) < len(RATES) * len(TUNING_SEEDS):
        return None
    return max(RATES, key=lambda rate: statistics.fmean(run["reward"] for run in found if run["rate"] == rate))


def result(job: Job, folder: Path) -> dict[str, Any]:
    found = points(list(read_metrics(folder / job.name / METRICS)), "ocr", ["ocr/exact", "colour"])
    last = found[-1]
    return {
        "variant": job.variant, "stage": job.stage, "rate": job.rate, "seed": job.seed, "steps": job.steps,
        "evaluations": last["evaluations"], "images": last["images"], "reward": last["ocr"],
        "exact": last["ocr/exact"], "colour": last["colour"],
    }  # fmt: skip


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the variants that are complete."""
    finals = {
        name: [run for run in runs if run["variant"] == name and run["stage"] == "final"] for name in VARIANTS
    }  # fmt: skip
    complete = [name for name, found in finals.items() if len(found) == len(SEEDS)]
    rewards = {n: [r["reward"] for r in sorted(finals[n], key=lambda run: run["seed"])] for n in complete}
    others = [name for name in complete if name != DEFAULT]
    logits = {name: logit(rewards[name]) for name in complete}
    corrected = holm([paired_test(logits[name] - logits[DEFAULT]) for name in others])
    p_values = dict(zip(others, corrected, strict=True))
    lines = [
        "| variant | change | reward at the end | difference | p | exact | colour | rate | steps | images "
        "| evaluations |",
        "|---" * 11 + "|",
    ]
    for name in sorted(complete, key=lambda name: -statistics.fmean(rewards[name])):
        mean = {key: statistics.fmean(run[key] for run in finals[name]) for key in finals[name][0] if key not in (
            "variant", "stage", "seed")}  # fmt: skip
        gains = [a - b for a, b in zip(rewards[name], rewards[DEFAULT], strict=True)]
        compared = (mean_and_interval(gains), f"{p_values[name]:.3f}") if name in p_values else ("", "")
        lines.append(
            f"| `{name}` | {VARIANTS[name].what} | {mean_and_interval(rewards[name])} | {' | '.join(compared)} "
            f"| {mean['exact']:.2f} | {mean['colour']:.2f} | {mean['rate']:g} | {mean['steps']:.0f} "
            f"| {mean['images']:.0f} | {mean['evaluations']:,.0f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", help="none: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="of the runs; none: a temporary one")
    parser.add_argument("--table", action="store_true", help="only print the table")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.variants if name not in VARIANTS]:
        parser.error(f"{unknown[0]}: no such variant; there are {', '.join(VARIANTS)}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    runs: list[dict[str, Any]] = json.loads(FILE.read_text())["runs"] if FILE.exists() else []
    if not args.table:
        about = {"date": now(), "budget": BUDGET, "hardware": hardware(), "software": software()}
        jobs = next_jobs(args.variants or list(VARIANTS), runs)
        with tempfile.TemporaryDirectory() as temporary:
            folder = (args.folder or Path(temporary)).resolve()
            made = run_jobs(lambda: next(jobs, None), args.jobs, folder, lambda job, keys: job.train(keys))
            for job, succeeded, said in made:
                if not succeeded:
                    logger.error("%s: %s", job.name, said[-1500:])
                    return 1
                runs.append(result(job, folder))
                logger.info("%s", runs[-1])
                write_file(FILE, json.dumps(about | {"runs": runs}, indent=None).replace('{"variant"', '\n{"variant"'))
    logger.info("%s", table(runs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""The way from scores to credit, with the extensions that take part in it and no workers."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from gerl.algorithms import build_algorithm
from gerl.algorithms.planning import plan_samples
from gerl.config import Config, RewardConfig, RolloutConfig, SamplingConfig, ScorerConfig, algorithm_config
from gerl.progress import Stopwatch
from gerl.protocol import Prompt, ScorerFailure, Scores
from gerl.trainer.extensions import build_extensions
from gerl.trainer.run import Extension
from gerl.trainer.step import Step, credit_of, usable_rewards

PROMPTS = [Prompt(i, f"prompt {i}") for i in range(4)]
TAKING_PART = ("gardo:KLGate", "kl_in_reward:KLInReward", "dynamic_sampling:DynamicSampling")


def config(**algorithm: object) -> Config:
    scorers = {"a": ScorerConfig(weight=2.0, success=1.5), "b": ScorerConfig(weight=0.0), "c": ScorerConfig(weight=1.0)}
    return Config(
        algorithm=algorithm_config(**{"advantage_std": "none"} | algorithm),
        sampling=SamplingConfig(num_inference_steps=3),
        rollout=RolloutConfig(prompts_per_step=2, n=2),
        reward=RewardConfig(scorers),
    )


def scored(c: Config, totals: list[float | None]) -> Scores:
    found = Scores()
    samples = plan_samples(c, PROMPTS, 1, 0)[: len(totals)]
    failures = [[] if t is not None else [ScorerFailure("a", "it broke")] for t in totals]
    columns = {"a": [None if t is None else t / 2 for t in totals], "b": [7.0] * len(totals), "c": [0.0] * len(totals)}
    half = len(totals) // 2
    for part in (slice(0, half), slice(half, None)):
        by_scorer = {name: values[part] for name, values in columns.items()}
        found.add(Scores(samples[part], totals[part], by_scorer, failures[part]))  # type: ignore[arg-type]
    return found


class Crediting:
    """Credits one step after the other, as a run with `config` does."""

    def __init__(self, config: Config) -> None:
        self.config, self.algorithm = config, build_algorithm(config)
        self.extensions: list[Extension] = list(build_extensions(config, TAKING_PART).values())

    def step(self, scores: Scores, kl: Sequence[float] = ()) -> Step:
        """The step of `scores` when it is credited; `kl` `[B]` to the base model, as the workers would measure it."""
        step = Step(1, Stopwatch(), scores=scores)
        fleet = SimpleNamespace(on_trajectories=lambda _: [[value] for value in kl])
        run: Any = SimpleNamespace(config=self.config, algorithm=self.algorithm, fleet=fleet)
        step.rewards, step.metrics = usable_rewards(self.config, scores)
        for extension in self.extensions:
            extension.rewarded(run, step)
        step.credit = credit_of(self.config, self.algorithm, scores, step.rewards)
        for extension in self.extensions:
            extension.credited(run, step)
        return step

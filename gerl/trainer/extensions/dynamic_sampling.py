"""Sample further prompts in place of groups whose images all have the same reward (algorithm.dynamic_sampling)."""

import torch

from gerl.config import Config
from gerl.rewards.rollouts import PendingRollout
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Step


class DynamicSampling(Extension):
    """Request further rounds until enough groups have a signal, and train on as many (DAPO, arXiv 2503.14476)."""

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return config.algorithm.dynamic_sampling > 0

    further = 0  # prompts of this step sampled after its first round

    def scored(self, run: Run, step: Step) -> PendingRollout | None:
        further = {sample.prompt.id for task in step.round for sample in task.samples}
        self.further = 0 if step.rounds == 1 else self.further + len(further)
        enough = len(step.scores.groups_with_signal()) >= self.config.rollout.prompts_per_step
        if enough or step.rounds > self.config.algorithm.dynamic_sampling:
            return None
        return run.sample(step.number, step.rounds, len(step.tasks))

    def credited(self, run: Run, step: Step) -> None:
        assert step.credit is not None
        chosen = set(step.scores.groups_with_signal()[: self.config.rollout.prompts_per_step])
        step.credit[[sample.group not in chosen for sample in step.scores.samples]] = torch.nan
        step.metrics["group/further_prompts"] = float(self.further)

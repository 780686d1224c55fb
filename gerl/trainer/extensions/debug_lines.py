"""Log what each step does (logger.level=debug); calls of workers log themselves."""

import logging
from collections.abc import Sequence

from gerl.config import Config
from gerl.protocol import Prompt, Scores
from gerl.rewards.rollouts import PendingRollout
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Step

logger = logging.getLogger(__name__)


class DebugLines(Extension):
    """Prompts, scores, credit, update and durations of each step."""

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return config.logger.level == "debug"

    def prompted(self, run: Run, number: int, prompts: Sequence[Prompt], held_out: bool) -> Sequence[Prompt]:
        kind = "held-out prompts" if held_out else "prompts"
        logger.debug("step %d: %s %s", number, kind, ", ".join([str(prompt.id) for prompt in prompts]))
        return prompts

    def scored(self, run: Run, step: Step) -> PendingRollout | None:
        logger.debug("step %d: %s", step.number, scores_in_words(step.scores))
        return None

    def credited(self, run: Run, step: Step) -> None:
        if step.credit is not None:
            some = (step.credit.nan_to_num() != 0).any(-1) if step.credit.ndim > 1 else step.credit != 0
            logger.debug("step %d: %d of %d images have credit", step.number, int(some.sum()), len(some))

    def updated(self, run: Run, step: Step) -> None:
        words = ", ".join([f"{name} {value:.4g}" for name, value in step.metrics.items() if name.startswith("actor/")])
        logger.debug("step %d: %s", step.number, words)

    def logged(self, run: Run, step: Step) -> None:
        seconds = {k: v for k, v in step.watch.metrics.items() if k.startswith("timing/")}
        words = [f"{k.removeprefix('timing/').removesuffix('_s')} {v:.2f} s" for k, v in seconds.items()]
        logger.debug("step %d: %s", step.number, ", ".join(words))


def scores_in_words(scores: Scores) -> str:
    """Return the number of images, and of each column how many have a value and between which they lie."""
    parts = [f"{len(scores.samples)} images"]
    for name, column in {"reward": scores.totals, **scores.by_scorer}.items():
        values = [value for value in column if value is not None]
        parts.append(f"{name} {min(values):.4g} to {max(values):.4g}" if values else f"{name} has no value")
        if len(values) < len(column):
            parts[-1] += f" ({len(values)} values)"
    return ", ".join(parts)

"""Reset the reference of the KL to the trained weights (algorithm.kl_reset_every, kl_reset_above)."""

from gerl.config import Config
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Step


class MovingReference(Extension):
    """Decide before the last optimizer step of a trainer step whether the weights after it become the reference."""

    moves = False

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return config.algorithm.moves_reference

    def updating(self, run: Run, step: Step) -> bool:
        stats = step.stats
        kl = stats.sums["kl"] / stats.pairs if stats.pairs and "kl" in stats.sums else None
        self.moves = run.algorithm.due_reset(step.number, kl)
        return self.moves

    def updated(self, run: Run, step: Step) -> None:
        if self.moves:
            run.algorithm.move_reference(step.number)
        step.metrics["actor/reference_step"] = float(run.algorithm.reference_step)

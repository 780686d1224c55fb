"""Optional parts of a run, one per file, called by the training loop at fixed points.

An extension sees the public attributes of `Run` and nothing else. Without its file and its line in `EXTENSIONS` the
trainer still trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from PIL import Image

    from gerl.cluster import Pending
    from gerl.config import Config
    from gerl.protocol import Images, Prompt, Sample, Scores
    from gerl.rewards.rollouts import PendingRollout
    from gerl.run.checkpoint import Checkpoint
    from gerl.run.guard import Signal
    from gerl.trainer.run import Run
    from gerl.trainer.step import Step
    from gerl.workers.fleet import LocalFleet

    HeldOut = tuple[LocalFleet, list[list[Sample]]]  # micro-batches, and the fleet that samples them

# in the order in which they are called
EXTENSIONS = (
    "control:ControlFiles",
    "debug_lines:DebugLines",
    "deadline:Deadline",
    "trackers:Trackers",
    "gardo:KLGate",
    "kl_in_reward:KLInReward",
    "critic:Critic",
    "dynamic_sampling:DynamicSampling",
    "episodes:Episodes",
    "episode_images:EpisodeImages",
    "training_images:TrainingImages",
    "moving_reference:MovingReference",
    "chosen_metrics:ChosenMetrics",
    "stop_at:StopAt",
    "guard:HackingGuard",
    "health:HealthChecks",
    "dump:StepDump",
    "timeline:TimelineFile",
    "progress:ProgressBar",
    "report:Report",
)


@dataclass(frozen=True)
class Save:
    """Request a checkpoint of the step."""


@dataclass(frozen=True)
class Stop:
    """End the run with `error`, after a checkpoint if one is due."""

    error: Exception


@dataclass(frozen=True)
class RollBack:
    """Return to `checkpoint` because of `signals`, and continue with `kl_coef` as the weight of the KL.

    `kl_coef`: None keeps that of the checkpoint. `error`: ends the run there.
    """

    checkpoint: Checkpoint
    kl_coef: float | None
    signals: tuple[Signal, ...]
    error: Exception | None = None


Directive = Save | Stop | RollBack


class Extension:
    """An optional part of a run: override the events it needs.

    A step calls the methods in the order of this class; `alerted`, `pictured` and `saved` are called at any time. To
    save a checkpoint, stop or roll back after a step, add a `Directive` to `step.directives` until its row is logged.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    def wanted(cls, config: Config) -> bool:
        """Whether a run with `config` needs it."""
        return True

    def starting(self, run: Run) -> None:
        """The run starts or has returned to an earlier step; its metrics end at `run.state.step`."""

    def stepping(self, run: Run) -> None:
        """The next step is about to begin."""

    def prompted(self, run: Run, number: int, prompts: Sequence[Prompt], held_out: bool) -> Sequence[Prompt]:
        """The prompts of step `number` are chosen; return those to sample."""
        return prompts

    def scored(self, run: Run, step: Step) -> PendingRollout | None:
        """A round of images is scored; return the next one, if the step has another."""
        return None

    def rewarded(self, run: Run, step: Step) -> None:
        """`step.rewards` is known; the credit follows from it."""

    def credited(self, run: Run, step: Step) -> None:
        """`step.credit` is known; the update follows from it."""

    def updating(self, run: Run, step: Step) -> bool:
        """The last optimizer step is about to be taken; True moves the reference of the KL to the weights after it."""
        return False

    def updated(self, run: Run, step: Step) -> None:
        """The update is finished; metrics added to `step.metrics` are logged with the step."""

    def due(self, run: Run, step: Step) -> bool:
        """Whether to validate after `step`, besides every `validation.every` steps."""
        return False

    def continued(self, run: Run, step: Step, scores: Scores, images: Sequence[Pending[Images]]) -> HeldOut | None:
        """Held-out images are scored; return what is sampled from them before the validation ends, if anything is."""
        return None

    def validated(self, run: Run, step: Step) -> None:
        """The held-out prompts are sampled and scored: `step.validation`."""

    def looked(self, run: Run, step: Step) -> bool:
        """Some held-out images are sampled and judged by the base model: `step.look`; True asks for more of them."""
        return False

    def logged(self, run: Run, step: Step) -> None:
        """The row of metrics is written: `run.latest`."""

    def concluded(self, run: Run, step: Step) -> None:
        """The step is over; its checkpoint is saved if it was due."""

    def returning(self, run: Run) -> None:
        """The run is about to return to an earlier step; `starting` follows."""

    def rolled_back(self, run: Run, directive: RollBack) -> None:
        """The run has returned to an earlier step because of a `RollBack`."""

    def ended(self, run: Run, error: BaseException | None) -> None:
        """The run is over; `error`: why, if it did not finish."""

    def alerted(self, run: Run, step: int, sentence: str) -> None:
        """A warning about the run was logged."""

    def pictured(self, run: Run, step: int, name: str, path: Path, image: Image.Image) -> None:
        """A sheet of images was saved."""

    def saved(self, run: Run, step: int, folder: Path) -> None:
        """The checkpoint of `step` was written into `folder`."""

    def state(self) -> Any:
        """Return the state a resumed run needs, as JSON, or as bytes of a safetensors file; None: no state."""

    def load_state(self, state: Any) -> None:
        """Restore what `state` returned."""


def build_extensions(config: Config, names: tuple[str, ...] = EXTENSIONS) -> Mapping[str, Extension]:
    """Build the extensions that `config` needs, by the name of their module, in order."""
    found: dict[str, Extension] = {}
    for name in names:
        module, _, kind = name.partition(":")
        cls: type[Extension] = getattr(import_module(f"{__name__}.{module}"), kind)
        if cls.wanted(config):
            found[module] = cls(config)
    return found

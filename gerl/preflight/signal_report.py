"""The report of a measurement of the signal: its numbers, and the text on the terminal."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from gerl.preflight.agreement import Cosine, larger_batch
from gerl.preflight.findings import wrapped
from gerl.protocol import StepFacts
from gerl.utils.files import finite

WANTED = 0.5  # cosine of two batches of which one half is signal


@dataclass(frozen=True)
class StepSignal:
    """A trained step (or noise level). `norm`: of its gradient, mean over batches; `share`: of the squared norms."""

    facts: StepFacts
    norm: float
    share: float
    cosine: Cosine | None


@dataclass(frozen=True)
class Choice:
    """A way to weigh the steps, `setting` the key that sets it; `cosine`: of the updates of independent batches."""

    name: str
    setting: str | None
    cosine: Cosine | None

    @property
    def times_images(self) -> str:
        """In words, how many times as many images a batch needs for a cosine of `WANTED`."""
        found = self.cosine
        if found is None:
            return "-"
        if found.error is not None and found.mean > 2 * found.error:
            times = larger_batch(found.mean, WANTED)
            return "-" if times is None else f"{times:.1f}" if times < 9.95 else f"{times:.0f}"
        least = larger_batch(found.highest, WANTED)
        return "-" if least is None or least < 1 or found.error is None else f"more than {least:.0f}"


@dataclass
class Signal:
    """The gradient of a step, as independent batches of it have measured it."""

    model: str
    algorithm: str
    kernel: str
    weighting: str | None  # timestep_weights, None where the algorithm has no such key
    batches: int
    images: int  # of a batch
    parameters: int  # of the LoRA
    steps: list[StepSignal]
    update: Choice  # as configured
    choices: list[Choice]  # other weights, and windows that end earlier
    recommended: Choice | None = None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """For machines: the fields."""
        return finite(asdict(self))

    def text(self) -> str:
        """For the terminal."""
        weights = "" if self.weighting is None else f", timestep_weights {self.weighting}"
        lines = ["", *wrapped(
            "signal",
            f"{self.model}, {self.algorithm}, kernel {self.kernel}{weights}: {self.batches} independent batches of "
            f"{self.images} images, LoRA of {self.parameters:,} parameters, no optimizer step",
        )]  # fmt: skip
        lines += ["", *self._steps(), "", *self._choices(), "", *self._conclusion()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _steps(self) -> Iterator[str]:
        scored = any(step.facts.std is not None for step in self.steps)
        own = f"{'std':>9}{'|J|':>9}{'weight':>9}" if scored else ""
        yield f"{'step':>6}{'sigma':>8}{own}{'norm':>10}{'share':>8}   cosine between batches"
        for step in self.steps:
            facts, own = step.facts, ""
            if scored:
                own = "".join(f"{value:>9.3g}" for value in (facts.std, facts.jacobian, facts.weight))
            yield (
                f"{facts.step:>6}{facts.sigma:>8.3f}{own}{step.norm:>10.3g}{step.share:>8.1%}   {shown(step.cosine)}"
            )

    def _choices(self) -> Iterator[str]:
        yield f"{'the whole update':<38}{'cosine between batches':<26}times the images for {WANTED}"
        for choice in (self.update, *self.choices):
            yield f"{choice.name:<38}{shown(choice.cosine):<26}{choice.times_images}"

    def _conclusion(self) -> Iterator[str]:
        if self.recommended is not None:
            assert self.recommended.cosine is not None and self.update.cosine is not None
            text = (
                f"{self.recommended.setting}: batches agree by {shown(self.recommended.cosine)} instead of "
                f"{shown(self.update.cosine)}, a difference beyond the standard errors"
            )
        elif self.batches == 2:
            text = "nothing: two batches have no standard error; use signal=4"
        elif self.choices:
            text = "nothing: no other weights or window are better by more than the standard errors"
        else:
            text = "nothing: the algorithm has no weights or windows to choose from"
        yield from wrapped("recommend", text)


def shown(cosine: Cosine | None) -> str:
    """A cosine with its standard error."""
    if cosine is None:
        return "-"
    return f"{cosine.mean:.3f}" + (f" +- {cosine.error:.3f}" if cosine.error is not None else "")

"""The base model of a run's LoRA."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Base:
    """The base of a LoRA: pipeline path, the LoRA's alpha, a LoRA merged before training, and the quantisation.

    role: of an episode, if it is not the run's own. is_text: whether it is a language model.
    """

    path: str
    alpha: float
    merged: str | None = None
    quantised: str = "none"
    role: str | None = None
    is_text: bool = False

    def __str__(self) -> str:
        merged = "" if self.merged is None else f" with the LoRA {self.merged} merged into it"
        return f"{self.path}{merged}{'' if self.quantised == 'none' else f', quantised to {self.quantised}'}"

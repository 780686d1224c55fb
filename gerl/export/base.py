"""The model below a run's LoRA."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Base:
    """The pipeline that a LoRA was trained on, the LoRA that was merged into it, if any, and its own alpha."""

    path: str
    alpha: float
    merged: str | None = None

    def __str__(self) -> str:
        return self.path if self.merged is None else f"{self.path} with the LoRA {self.merged} merged into it"

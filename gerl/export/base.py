"""The model below a run's LoRA."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Base:
    """The pipeline that a LoRA was trained on, its own alpha, the LoRA that was merged below it, if any, and in which
    precision the denoisers were."""

    path: str
    alpha: float
    merged: str | None = None
    quantised: str = "none"

    def __str__(self) -> str:
        merged = "" if self.merged is None else f" with the LoRA {self.merged} merged into it"
        return f"{self.path}{merged}{'' if self.quantised == 'none' else f', quantised to {self.quantised}'}"

"""The base model of a run's LoRA."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Base:
    """The base of a LoRA: pipeline path, the LoRA's alpha, a LoRA merged before training, quantisation, `model.parts`.

    role: of an episode, if it is not the run's own. is_text: whether it is a language model.
    """

    path: str
    alpha: float
    merged: str | None = None
    quantised: str = "none"
    role: str | None = None
    is_text: bool = False
    parts: Mapping[str, str | None] = field(default_factory=dict)

    def __str__(self) -> str:
        merged = "" if self.merged is None else f" with the LoRA {self.merged} merged into it"
        parts = ", ".join(f"{name} {'left out' if part is None else part}" for name, part in self.parts.items())
        merged = f"{f' ({parts})' if parts else ''}{merged}"
        return f"{self.path}{merged}{'' if self.quantised == 'none' else f', quantised to {self.quantised}'}"


def file_stem(name: str) -> str:
    """Return `name` with letters of any alphabet, digits and _ . - only, for the name of a file."""
    return re.sub(r"[^\w.-]+", "_", name)

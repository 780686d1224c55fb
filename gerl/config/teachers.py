"""The teachers of a distillation, `algorithm.teachers`: LoRAs, other pipelines, or the base model."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gerl.config.schema import shown
from gerl.errors import ConfigError

NAME = "algorithm.teachers"
ENTRY = ("lora", "path", "data_source", "guidance", "call", "weight")


@dataclass(frozen=True)
class Teacher:
    """A model whose denoising steps a student learns: a LoRA, another pipeline, or with neither the base model.

    `data_source`: the prompts it teaches, by their column of that name; None: all that no other teacher does.
    `guidance` and `call`: guidance scale and further arguments of the pipeline that it computes with, where they are
    not the rollout's. `weight`: factor of its loss.
    """

    lora: str | None = None
    path: str | None = None
    data_source: str | None = None
    guidance: float | None = None
    call: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0

    @property
    def changed(self) -> dict[str, Any]:
        """The arguments of the pipeline that are not the rollout's."""
        guidance = {} if self.guidance is None else {"guidance_scale": self.guidance}
        return {**guidance, **self.call}

    @property
    def is_base(self) -> bool:
        """Whether it is the base model."""
        return self.lora is None and self.path is None

    @property
    def name(self) -> str:
        """The name of its metrics: that of its prompts, as trackers take it."""
        return re.sub(r"[^\w .:-]", "_", self.data_source or "others")

    def __str__(self) -> str:
        model = self.lora or self.path or "the base model"
        given = "".join(f", {name}={shown(value)}" for name, value in self.changed.items())
        prompts = "" if self.data_source is None else f" for prompts of {self.data_source}"
        return f"{model}{given}{prompts}"


def teachers(given: Sequence[Mapping[str, Any]]) -> list[Teacher]:
    """The teachers that the value of `algorithm.teachers` stands for; raises `ConfigError` for anything else."""
    found = [_teacher(entry) for entry in given]
    sources = [teacher.data_source for teacher in found]
    if twice := next((teacher for teacher in found if sources.count(teacher.data_source) > 1), None):
        prompts = f"data_source={twice.data_source}" if twice.data_source else "no data_source, which means all"
        raise ConfigError(f"{NAME} has two entries with {prompts}: use one for each kind of prompt")
    return found


def _teacher(entry: Mapping[str, Any]) -> Teacher:
    where = f"{NAME} has an entry with"
    for k, value in entry.items():
        if k not in ENTRY:
            raise ConfigError(f"{where} {k}; allowed are {', '.join(ENTRY)}")
        if k in ("lora", "path", "data_source") and value is not None and not _is_text(value):
            raise ConfigError(f"{where} {k}={shown(value)}: it must be a non-empty string")
    call = entry.get("call") or {}
    if not isinstance(call, Mapping) or not all(map(_is_text, call)):
        raise ConfigError(
            f"{where} call={shown(call)}: expected arguments of the pipeline, such as {{true_cfg_scale: 4}}"
        )
    if entry.get("lora") is not None and entry.get("path") is not None:
        raise ConfigError(f"{where} lora and path: a teacher has only one of them; merge the LoRA into that pipeline")
    guidance, weight = entry.get("guidance"), entry.get("weight", 1.0)
    if guidance is not None and not _is_number(guidance, low=0.0):
        raise ConfigError(f"{where} guidance={shown(guidance)}: it must be a number of at least 0")
    if not (_is_number(weight, low=0.0) and weight > 0):
        raise ConfigError(f"{where} weight={shown(weight)}: it must be a number above 0")
    return Teacher(
        entry.get("lora"),
        entry.get("path"),
        entry.get("data_source"),
        None if guidance is None else float(guidance),
        dict(call),
        float(weight),
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_number(value: object, low: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value < 1e9

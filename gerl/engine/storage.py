"""Recorded trajectories as JSON and named tensors: on disk without pickle, and bitwise the same when read again.

The JSON has plain values as they are, and everything else as an object with one key that names its kind. Reading runs
no code of the file: records are those of `RECORDS`, outputs of models the classes of diffusers and transformers.
"""

from __future__ import annotations

import io
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from PIL import Image

from gerl.engine.tape import Answer, ComponentCall, Features, RequiredTensors, SecondaryStep, Tape, TapeStep, Trajectory
from gerl.engine.transitions import DDIMRule, DenoisedRule, EDMRule, FlowMapRule, FlowRule
from gerl.errors import ReplayError
from gerl.protocol import DatasetImage, Prompt, References, RolloutTask, Sample, Segment
from gerl.utils.tensors import KINDS

RECORDS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        *(Trajectory, Tape, TapeStep, SecondaryStep, Answer, ComponentCall, RequiredTensors, Features),
        *(FlowRule, EDMRule, DenoisedRule, DDIMRule, FlowMapRule),
        *(RolloutTask, Sample, Prompt, DatasetImage, Segment),
    )
}
LIBRARIES = ("diffusers.", "transformers.")  # whose classes of outputs are read
PNG = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")  # modes of an image that this format has
ANYWHERE = "inputs"  # the field whose values no replay computes with
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Omitted:
    """Stands for an argument of a model whose class has no stored form; a replay computes it again."""

    kind: str


class Storing:
    """The tensors of a value that is being stored, by name; one that occurs several times is stored once."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._known: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}  # the tensor, so that its id stays its own

    def value(self, value: Any, place: str, lenient: bool = False) -> Any:
        """Return `value`, found at `place`, as JSON; raises `ReplayError` for a class that has no form.

        `lenient`: store the name of such a class instead.
        """
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        if torch.is_tensor(value) and (value.dtype in KINDS or value.is_meta):
            return self.tensor(value)
        if type(value) in RECORDS.values():
            parts = {f.name: (getattr(value, f.name), lenient or f.name == ANYWHERE) for f in fields(value)}
            stored = {name: self.value(part, f"{place}.{name}", loose) for name, (part, loose) in parts.items()}
            return {"record": type(value).__name__, "fields": stored}
        if isinstance(value, Image.Image):
            return {"image": self.plain(np.frombuffer(_image_bytes(value), np.uint8))}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return {"array": self.plain(value)}
        if (form := _form(value)) is not None:
            name, parts_of = form
            return {name: [self.value(part, f"{place}[{i}]", lenient) for i, part in enumerate(parts_of)]}
        if (kind := _class_of_output(value)) is not None:
            pairs = [[self.value(k, place), self.value(v, f"{place}.{k}", lenient)] for k, v in value.items()]
            return {"dict": pairs} if kind == "" else {"output": kind, "items": pairs}
        if lenient:
            return {"omitted": _name(type(value))}
        what = f"tensor of {value.dtype}" if torch.is_tensor(value) else _name(type(value))
        raise ReplayError(
            f"{place} is a {what}, which has no stored form: this pipeline's trajectories cannot be written to a file"
        )

    def tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Store a tensor, or the shape of one without values."""
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_meta:
            record: dict[str, Any] = {"shape": list(tensor.shape), "dtype": dtype}
        else:
            record = self.plain(tensor.detach())
        if not tensor.is_contiguous() and torch.empty_like(tensor).stride() == tensor.stride():
            record["strides"] = list(tensor.stride())  # the last bits of a product may depend on them
        self._known[id(tensor)] = tensor, record
        return record

    def plain(self, values: torch.Tensor | np.ndarray) -> dict[str, Any]:
        """Store values under the next name."""
        tensor = torch.from_numpy(values.copy()) if isinstance(values, np.ndarray) else values
        name = str(len(self.tensors))
        self.tensors[name] = tensor
        return {"tensor": name} if tensor.device.type == "cpu" else {"tensor": name, "device": tensor.device.type}


def store(trajectory: Trajectory) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a trajectory as JSON and tensors; raises `ReplayError` if it holds a value that has no form."""
    storing = Storing()
    return storing.value(trajectory, "the trajectory"), storing.tensors


def restore(
    stored: Any, tensors: Tensors, device: str | torch.device, recorded_on: str = "cpu", whole: bool = False
) -> Trajectory:
    """Return the trajectory that `store` took apart, on `device`.

    Tensors that were in main memory beside a device, `recorded_on`, stay there. `whole`: convert half precision to
    fp32. Raises `ReplayError` if it is damaged.
    """
    try:
        trajectory = _Restoring(tensors, torch.device(device), torch.device(recorded_on), whole).value(stored)
    except (KeyError, TypeError, ValueError, AttributeError, ImportError, RuntimeError, OSError) as error:
        raise ReplayError(f"a stored trajectory is damaged: {type(error).__name__}: {error}") from None
    if not isinstance(trajectory, Trajectory):
        raise ReplayError(f"a stored trajectory is damaged: it is a {type(trajectory).__name__}")
    return trajectory


class _Restoring:
    def __init__(self, tensors: Tensors, device: torch.device, recorded_on: torch.device, whole: bool) -> None:
        self.tensors, self.device, self.recorded_on, self.whole = tensors, device, recorded_on, whole
        self._known: dict[str, torch.Tensor] = {}

    def value(self, stored: Any) -> Any:
        if not isinstance(stored, dict):
            return stored
        if "tensor" in stored or "shape" in stored:
            return self.tensor(stored)
        kind, *_ = stored
        match kind:
            case "float":
                return float(stored[kind])
            case "record":
                return RECORDS[stored[kind]](**{name: self.value(part) for name, part in stored["fields"].items()})
            case "output":
                return _output_class(stored[kind])(**dict(self.pairs(stored["items"])))
            case "dict":
                return dict(self.pairs(stored[kind]))
            case "image":
                with Image.open(io.BytesIO(self.numbers(stored[kind]).tobytes())) as image:
                    image.load()
                    return image.copy()
            case "array":
                return self.numbers(stored[kind])
            case "omitted":
                return Omitted(stored[kind])
            case _:
                build, _ = FORMS[kind]
                return build([self.value(part) for part in stored[kind]])

    def pairs(self, stored: list[list[Any]]) -> list[tuple[Any, Any]]:
        return [(self.value(k), self.value(v)) for k, v in stored]

    def numbers(self, stored: dict[str, Any]) -> np.ndarray:
        array: np.ndarray = self.tensors[stored["tensor"]].numpy().copy()
        return array

    def tensor(self, stored: dict[str, Any]) -> torch.Tensor:
        strides = stored.get("strides")
        if "shape" in stored:
            empty = self.precise(torch.empty(stored["shape"], dtype=_dtype(stored["dtype"]), device="meta"))
            return empty if strides is None else _with_strides(empty, strides)
        name = stored["tensor"]
        if name not in self._known:
            values = self.precise(self.tensors[name])
            if strides is not None:
                values = _with_strides(values, strides)
            beside = self.recorded_on.type != "cpu" and "device" not in stored
            self._known[name] = values if beside else values.to(self.device)
        return self._known[name]

    def precise(self, values: torch.Tensor) -> torch.Tensor:
        return values.float() if self.whole and values.dtype in (torch.bfloat16, torch.float16) else values


def _with_strides(values: torch.Tensor, strides: list[int]) -> torch.Tensor:
    return torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device).copy_(values)


# --- Forms of values with parts: how they are built again, and the class

FORMS: dict[str, tuple[Callable[[list[Any]], Any], type[Any]]] = {
    "list": (list, list),
    "tuple": (tuple, tuple),
    "set": (set, set),
    "frozenset": (frozenset, frozenset),
    "references": (References, References),
    "size": (torch.Size, torch.Size),
    "slice": (lambda parts: slice(*parts), slice),
    "dtype": (lambda parts: _dtype(parts[0]), torch.dtype),
    "integer": (lambda parts: int(parts[0]), int),
}


def _form(value: Any) -> tuple[str, list[Any]] | None:
    """Return the name of the form of a value and its parts."""
    name = next((name for name, (_, kind) in FORMS.items() if type(value) is kind), None)
    if isinstance(value, np.integer):
        return "integer", [int(value)]
    if name is None:
        return None
    if isinstance(value, set | frozenset):
        return name, sorted(value, key=repr)
    if isinstance(value, slice):
        return name, [value.start, value.stop, value.step]
    if isinstance(value, torch.dtype):
        return name, [str(value).removeprefix("torch.")]
    return name, list(value)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_of_output(value: Any) -> str | None:
    """Return the name of the class of a model's output, "" for a dictionary, None for anything else."""
    if type(value) is dict:
        return ""
    kind = type(value)
    return _name(kind) if _is_output(kind) and _name(kind).startswith(LIBRARIES) else None


def _is_output(kind: type[Any]) -> bool:
    return issubclass(kind, OrderedDict) and is_dataclass(kind)


def _output_class(name: str) -> type[Any]:
    module, _, kind = name.rpartition(".")
    cls: type[Any] = getattr(import_module(module), kind) if name.startswith(LIBRARIES) else object
    if not _is_output(cls):
        raise ValueError(f"{name} is no output of a model")
    return cls


def _image_bytes(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, "png" if image.mode in PNG else "tiff")
    return content.getvalue()

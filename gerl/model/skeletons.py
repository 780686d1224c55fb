"""The denoisers of a pipeline without their weights: what can be known about layers before anything is loaded."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import accelerate
import diffusers
import torch
from diffusers import DiffusionPipeline, ModelMixin

from gerl.errors import ModelError


def skeleton(folder: str, name: str, index: Mapping[str, object] | None = None) -> ModelMixin:
    """The component `name` of the pipeline in `folder`: layers on the meta device, from its configuration.

    `index`: its model_index.json, read if not given. Raises `ModelError` if the pipeline has no such model of
    diffusers.
    """
    entries = DiffusionPipeline.load_config(folder) if index is None else index
    kind = model_class(entries.get(name))
    if kind is None:
        raise ModelError(f"the pipeline in {folder} has no {name} that is a diffusers model")
    with accelerate.init_empty_weights():
        return kind.from_config(kind.load_config(folder, subfolder=name))


def skeletons(folder: str) -> dict[str, ModelMixin] | None:
    """The models of diffusers among the components of a pipeline; None if it comes with code of its own.

    Autoencoders are left out, for which building takes time and which are no denoisers.
    """
    index = DiffusionPipeline.load_config(folder)
    if isinstance(index["_class_name"], list) or any(list((Path(folder) / n).glob("*.py")) for n in _folders(index)):
        return None
    kinds = {name: model_class(entry) for name, entry in index.items()}
    return {
        name: skeleton(folder, name, index)
        for name, kind in kinds.items()
        if kind is not None and not hasattr(kind, "decode")
    }


def model_class(entry: object) -> type[ModelMixin] | None:
    """The class that an entry `[library, class]` of a model_index.json names, if it is a model of diffusers."""
    if not isinstance(entry, list) or len(entry) != 2 or entry[0] != "diffusers":
        return None
    kind = getattr(diffusers, str(entry[1]), None)
    return kind if isinstance(kind, type) and issubclass(kind, ModelMixin) else None


def _folders(index: Mapping[str, object]) -> list[str]:
    return [name for name, entry in index.items() if isinstance(entry, list)]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A block in which modules are made in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

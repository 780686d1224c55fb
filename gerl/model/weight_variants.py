"""Several sets of weights for the denoisers of one pipeline, of which one at a time takes the place of its own."""

from collections.abc import Mapping
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, ModelMixin

from gerl.errors import ModelError
from gerl.utils.files import reason

Values = list[tuple[torch.Tensor, torch.Tensor]]  # a weight of the pipeline, and what it shall be


class WeightVariants:
    """Trained denoisers, a folder of each, by the name they are to have together; the pipeline computes as it is.

    Only what differs from the pipeline's own weights is kept, in main memory. Raises `ModelError` for denoisers that
    cannot be read or are not those of the pipeline.
    """

    def __init__(self, pipe: DiffusionPipeline, folders: Mapping[str, Mapping[str, Path]]) -> None:
        self._values = {name: _differing(pipe, models) for name, models in folders.items()}
        changed = {id(own): own for values in self._values.values() for own, _ in values}
        self._base: Values = [(own, own.detach().to("cpu", copy=True)) for own in changed.values()]
        self._present: str | None = None

    @torch.no_grad()
    def switch(self, name: str | None) -> None:
        """Let the pipeline compute with the weights `name`; None, or another name: with its own."""
        wanted = name if name in self._values else None
        if wanted == self._present:
            return
        for own, value in (*self._base, *(self._values[wanted] if wanted is not None else ())):
            own.copy_(value)
        self._present = wanted


def _differing(pipe: DiffusionPipeline, models: Mapping[str, Path]) -> Values:
    found: Values = []
    for name, folder in models.items():
        model = pipe.components.get(name)
        if not isinstance(model, ModelMixin):
            raise ModelError(f"{folder} is a {name}, which {type(pipe).__name__} does not have")
        try:
            given = type(model).from_pretrained(folder, dtype=model.dtype).state_dict()
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder} cannot be loaded as {type(model).__name__}: {reason(error)}") from None
        own = model.state_dict()
        fits = own.keys() == given.keys() and all(own[key].shape == value.shape for key, value in given.items())
        if not fits:
            raise ModelError(f"{folder} has weights of another model than {name} of the pipeline: use matching ones")
        found += [(own[key], value) for key, value in given.items() if not torch.equal(own[key].cpu(), value)]
    return found

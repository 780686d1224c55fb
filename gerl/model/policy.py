"""The policy: a pipeline, the weights of it that are trained, and copies of these at other times."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from diffusers import DiffusionPipeline, ModelMixin

from gerl.model.ema import EMA
from gerl.model.lora import lora_disabled, lora_file


@dataclass
class Policy:
    """A pipeline and what of it is trained, for rollout and actor: a LoRA on its denoisers, or weights of these.

    `trained`: the parameters that are trained, in fp32, named `denoiser.parameter`; those that are not a LoRA's may be
    divided among ranks, and so are then the averages. `ema` is what validation and export
    use; `old` an earlier policy that an algorithm compares with; `sampler` draws the rollouts, if it is not the trained
    weights that do.
    """

    pipe: DiffusionPipeline
    denoisers: dict[str, ModelMixin]
    trained: dict[str, torch.nn.Parameter]
    ema: EMA
    fingerprint: str = ""  # of the base weights
    version: int = 0  # optimizer steps taken
    old: EMA | None = None
    old_is_current: bool = True  # `old` holds the trained weights: no need to run it
    sampler: EMA | None = None
    whole: bool = False  # `trained` are weights of the denoisers themselves, not of a LoRA
    reference: EMA | None = None  # then their first values, if an algorithm asks for `base`

    def averages(self) -> dict[str, EMA]:
        """All weights besides the trained ones, by name."""
        named = {"ema": self.ema, "old": self.old, "sampler": self.sampler}
        return {name: average for name, average in named.items() if average is not None}

    @contextlib.contextmanager
    def as_sampler(self, old: bool = False) -> Iterator[None]:
        """The model computes with the weights that draw rollouts; `old`: with those of the old policy."""
        drawing = self.old if old else self.sampler
        with contextlib.nullcontext() if drawing is None else drawing.swapped_in():
            yield

    @contextlib.contextmanager
    def base(self) -> Iterator[None]:
        """The model computes as the base model that training started from, the reference of `algorithm.kl_coef`."""
        if self.whole:
            assert self.reference is not None, "an algorithm says by compares_with_base that it asks for it"
            with self.reference.swapped_in():
                yield
        else:
            with lora_disabled(list(self.denoisers.values())):
                yield

    def lora_file(self) -> bytes:
        """The averaged LoRA as diffusers' safetensors file: the weights that validation draws with."""
        with self.ema.swapped_in():
            return lora_file(self.denoisers)

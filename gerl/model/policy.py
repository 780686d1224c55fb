"""The policy: a pipeline, the weights of it that are trained, and copies of these at other times."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from diffusers import DiffusionPipeline, ModelMixin

from gerl.model.drawing_weights import DrawingWeights
from gerl.model.ema import EMA
from gerl.model.fake import fake_active
from gerl.model.latents import ImageLatents
from gerl.model.lora import lora_disabled, lora_file
from gerl.model.teachers import TeacherModel, adapter_active


@dataclass
class Policy:
    """A pipeline and what of it is trained, for rollout and actor: a LoRA on its denoisers, or weights of these.

    `trained`: the parameters that are trained, in fp32, named `denoiser.parameter`; those that are not a LoRA's may be
    divided among ranks, and so are then the averages. `ema` is what validation and export
    use; `old` an earlier policy that an algorithm compares with; `sampler` draws the rollouts, if it is not the trained
    weights that do. `earlier[i]`: the weights that drew after the last finished step but `i`, as many as
    `trainer.staleness` asks for, and of each the `version` as its number of updates. `drawing`: 8-bit copies of frozen
    weights that draw in their place. `teachers`: in the order of `algorithm.teachers`. `images`: the latents of image
    files.
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
    # those `base` has: of whole weights the first ones, if an algorithm asks for it; of any the later ones that it sets
    reference: EMA | None = None
    reference_moves: bool = False
    earlier: list[EMA] = field(default_factory=list)
    drawing: DrawingWeights | None = None
    teachers: list[TeacherModel] = field(default_factory=list)
    images: ImageLatents = field(default_factory=lambda: ImageLatents(0.0))

    def averages(self) -> dict[str, EMA]:
        """All weights besides the trained ones, by name."""
        named = {"ema": self.ema, "old": self.old, "sampler": self.sampler}
        named["reference"] = self.reference if self.reference_moves else None
        named |= {f"earlier_{i}": average for i, average in enumerate(self.earlier)}
        return {name: average for name, average in named.items() if average is not None}

    @torch.no_grad()
    def keep_average(self) -> None:
        """Give the trained parameters the averaged values, for whoever uses the pipeline after the run."""
        for name, p in self.trained.items():
            p.copy_(self.ema.average[name])

    @torch.no_grad()
    def remember(self) -> None:
        """Take the weights that draw among the `earlier` ones, at the end of a step, and let the oldest go."""
        if not self.earlier:
            return
        newest = self.earlier.pop()
        drawing: Mapping[str, torch.Tensor] = self.trained if self.sampler is None else self.sampler.average
        newest.load(drawing, self.version)
        self.earlier.insert(0, newest)

    @torch.no_grad()
    def move_reference(self) -> None:
        """Let the trained weights of now be those that `base` has."""
        assert self.reference is not None and self.reference_moves
        self.reference.load(self.trained, self.version)

    @contextlib.contextmanager
    def as_sampler(self, old: bool = False, lag: int = 0) -> Iterator[None]:
        """The model computes with the weights that draw rollouts, or that did so `lag` finished steps ago.

        `old`: with those of the old policy.
        """
        average = self.old if old else self.earlier[lag] if lag else self.sampler
        with contextlib.ExitStack() as stack:
            for weights in (average, self.drawing):
                if weights is not None:
                    stack.enter_context(weights.swapped_in())
            yield

    @contextlib.contextmanager
    def base(self) -> Iterator[None]:
        """The model computes as the reference of `algorithm.kl_coef`: the base model that training started from.

        Or as the trained weights that have taken its place (`move_reference`).
        """
        if self.whole or self.reference is not None:
            assert self.reference is not None, "an algorithm that uses it must declare compares_with_base"
            with self.reference.swapped_in():
                yield
        else:
            with lora_disabled(list(self.denoisers.values())):
                yield

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """The model computes as the one that training started from, also where the reference has moved."""
        with self.base() if self.whole else lora_disabled(list(self.denoisers.values())):
            yield

    @contextlib.contextmanager
    def teacher(self, number: int) -> Iterator[DiffusionPipeline]:
        """The pipeline of a teacher, which computes as this one while the block lasts."""
        model = self.teachers[number]
        if model.pipe is not None:
            yield model.pipe
        elif model.adapter is not None:
            with adapter_active(self.denoisers, model.adapter):
                yield self.pipe
        else:
            with self.first():
                yield self.pipe

    @contextlib.contextmanager
    def fake(self) -> Iterator[None]:
        """The model computes, and is trained, with the LoRA that imitates its images (`algorithm=dmdr`)."""
        with fake_active(self.denoisers):
            yield

    def lora_file(self, average: Mapping[str, torch.Tensor] | None = None) -> bytes:
        """The averaged LoRA as diffusers' safetensors file: the weights that validation draws with.

        `average`: those of an earlier moment, in place of the present ones.
        """
        with self.ema.swapped_in(average):
            return lora_file(self.denoisers)

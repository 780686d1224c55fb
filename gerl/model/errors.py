"""The errors of the libraries that hold and run a model, as sentences with the keys to change."""

from __future__ import annotations  # of diffusers, which the driver of a run does without

import contextlib
import gc
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

import torch

from gerl.errors import ConfigError, GerlError, ModelError
from gerl.utils.files import reason

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


Phase = Literal["loading", "rollout", "validation", "update"]
# what pipelines raise for arguments that they do not take, or do not take together
PIPELINE_ERRORS = (ValueError, TypeError, AttributeError, RuntimeError, LookupError, AssertionError)
LIBRARIES = ("diffusers", "transformers", "peft", "diffusers_modules")
COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch")
FULL = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
LONGEST = 400  # characters of a library's own words
SMALLER = "sampling.height and sampling.width, or use model.offload=encoders (or blocks)"
LESS_MEMORY: dict[Phase, str] = {
    "loading": "use model.offload=encoders (or blocks), model.quantize=int8 or model.dtype=bfloat16",
    "rollout": f"lower rollout.micro_batch_size, or {SMALLER}",
    "validation": f"lower validation.micro_batch_size, or {SMALLER}",
    "update": "lower actor.micro_batch_size, or use model.gradient_checkpointing=true, or model.offload=blocks",
}


class CallRefused(ModelError):
    """The pipeline raised an error of its own while sampling."""


class MemoryFull(ModelError):
    """Out of memory on a device."""


def raise_refusal(error: Exception, pipe: DiffusionPipeline, given: Mapping[str, object]) -> None:
    """Raise `CallRefused` if `error` is one of `pipe` about its call; `given`: its arguments by configuration key.

    Does nothing for errors of gerl's own code that runs within the call, of the compiler, and full memory.
    """
    if isinstance(error, GerlError) or is_full(error) or _is_of_compiler(error) or not _is_of_pipeline(error, pipe):
        return
    arguments = ", ".join(f"{name}={_short(value)}" for name, value in given.items())
    raise CallRefused(
        f"{type(pipe).__name__} fails with these arguments ({type(error).__name__}: {_words(error)}): correct the one "
        f"it names among {arguments}"
    ) from error


def raise_known(error: Exception, phase: Phase, images: int | None = None) -> None:
    """Raise full memory as `MemoryFull`, and an error of the compiler as `ModelError`; does nothing for others.

    `images`: number in the micro-batch.
    """
    if is_full(error):
        traceback.clear_frames(error.__traceback__)  # they keep the tensors, and what follows needs the memory
        what = {"loading": "the model", "update": "the update"}.get(phase, f"the {phase} of {images} images")
        on_gpu = isinstance(error, torch.OutOfMemoryError) or "CUDA" in str(error)
        place = "the GPU's memory" if on_gpu else "the main memory"
        raise MemoryFull(f"{place} is too small for {what} ({_words(error)}): {LESS_MEMORY[phase]}") from error
    if _is_of_compiler(error):
        others = ", ".join(torch.compiler.list_backends())
        raise ModelError(
            f"model.compile: torch.compile cannot compile this model ({type(error).__name__}: {_words(error)}): use "
            f"another backend ({others}), or model.compile=null"
        ) from error


@contextlib.contextmanager
def model_errors(phase: Phase, images: int | None = None) -> Iterator[None]:
    """Raise errors of a block as `raise_known` does."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise_known(error, phase, images)
        raise


def check_backend(name: str | None) -> None:
    """Raise `ConfigError` if torch.compile has no backend `name`."""
    if name is not None and name not in torch.compiler.list_backends(exclude_tags=()):
        raise ConfigError(
            f"model.compile={name!r}: torch.compile has no such backend, only "
            f"{', '.join(torch.compiler.list_backends())}; choose one, or null"
        )


def release(error: BaseException) -> None:
    """Give up the memory that a call held when `error` ended it: the traceback's frames keep its tensors."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_full(error: BaseException) -> bool:
    """Whether an error says that the memory of a GPU, or the main memory, is full."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and FULL.search(str(error)) is not None


def _is_of_compiler(error: BaseException | None) -> bool:
    return any(kind.__module__.startswith(COMPILER) for kind in type(error).__mro__)


def _is_of_pipeline(error: BaseException, pipe: DiffusionPipeline) -> bool:
    """Whether the innermost function that is either gerl's or the pipeline's, and not torch's, is the pipeline's."""
    if isinstance(error, TypeError) and "__call__()" in str(error):  # raised by whoever calls the pipeline
        return True
    pipelines = {*LIBRARIES, *(kind.__module__.split(".")[0] for kind in type(pipe).__mro__)} - {"builtins", "gerl"}
    modules = [
        str(frame.f_globals.get("__name__")).split(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    return next((module in pipelines for module in reversed(modules) if module in {"gerl", *pipelines}), False)


def _words(error: BaseException) -> str:
    """The first two sentences of a library's message, on one line."""
    text = reason(error) if isinstance(error, Exception) else type(error).__name__
    text = " ".join(re.split(r"(?<=[a-z\d)])\. +(?=[A-Z])", text.split(" Exception raised from ")[0])[:2])
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

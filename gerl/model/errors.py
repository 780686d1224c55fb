"""Errors of the model libraries, reworded as sentences that name the configuration keys to change."""

from __future__ import annotations  # annotations name diffusers classes, which the driver of a run does not import

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
# what pipelines raise for unsupported arguments or combinations of arguments
PIPELINE_ERRORS = (ValueError, TypeError, AttributeError, RuntimeError, LookupError, AssertionError)
LIBRARIES = ("diffusers", "transformers", "peft", "diffusers_modules")
COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch")
FULL = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
LONGEST = 400  # maximum number of characters quoted from a library's message
SMALLER = "sampling.height and sampling.width, or use model.offload=encoders (or blocks)"
LESS_MEMORY: dict[Phase, str] = {
    "loading": "use model.offload=encoders (or blocks), model.quantize=int8 or model.dtype=bfloat16",
    "rollout": f"lower rollout.micro_batch_size, or {SMALLER}",
    "validation": f"lower validation.micro_batch_size, or {SMALLER}",
    "update": "use model.gradient_checkpointing=true, or lower actor.micro_batch_size, or use model.offload=blocks",
}


class CallRefused(ModelError):
    """Error raised by the pipeline itself while sampling."""


class MemoryFull(ModelError):
    """Device out of memory."""


def raise_refusal(error: Exception, pipe: DiffusionPipeline, values: Mapping[str, object]) -> None:
    """Raise `CallRefused` if `pipe` itself raised `error`; `values`: the call's arguments by configuration key."""
    if isinstance(error, GerlError) or is_full(error) or _is_of_compiler(error) or not _is_of_pipeline(error, pipe):
        return
    texts = {name: repr(value) for name, value in values.items()}
    arguments = ", ".join(f"{name}={t if len(t) <= 60 else t[:57] + '...'}" for name, t in texts.items())
    raise CallRefused(
        f"{type(pipe).__name__} fails with these arguments ({type(error).__name__}: {_words(error)}): correct the one "
        f"it names among {arguments}"
    ) from error


def raise_known(error: Exception, phase: Phase, images: int | None = None) -> None:
    """Raise `MemoryFull` for full memory and `ModelError` for a compiler error; `images`: of the micro-batch."""
    if is_full(error):
        traceback.clear_frames(error.__traceback__)  # frames hold tensors, and the next call needs the memory
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
    """Convert errors raised in the block as `raise_known` does."""
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
    """Free the memory of a call that `error` ended, by clearing the tensors in the traceback's frames."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_full(error: BaseException) -> bool:
    """Whether an error means that GPU memory or main memory is full."""
    by_text = isinstance(error, RuntimeError) and FULL.search(str(error)) is not None
    return by_text or isinstance(error, torch.OutOfMemoryError | MemoryError)


def _is_of_compiler(error: BaseException | None) -> bool:
    return any(kind.__module__.startswith(COMPILER) for kind in type(error).__mro__)


def _is_of_pipeline(error: BaseException, pipe: DiffusionPipeline) -> bool:
    """Whether the innermost frame in gerl or the pipeline, ignoring torch, belongs to the pipeline."""
    if isinstance(error, TypeError) and "__call__()" in str(error):  # an error of the caller of the pipeline
        return True
    pipelines = {*LIBRARIES, *(kind.__module__.split(".")[0] for kind in type(pipe).__mro__)} - {"builtins", "gerl"}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__")).split(".")[0] for frame in frames]
    return next((module in pipelines for module in reversed(modules) if module in {"gerl", *pipelines}), False)


def _words(error: BaseException) -> str:
    """Return the first two sentences of a library's message on one line."""
    text = reason(error) if isinstance(error, Exception) else type(error).__name__
    text = " ".join(re.split(r"(?<=[a-z\d)])\. +(?=[A-Z])", text.split(" Exception raised from ")[0])[:2])
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."

"""Seeds derived from their purpose: no generator state to save, and equal samples on any number of workers.

Code of others that runs in the same process, such as a scorer, leaves generators and settings as they were.
"""

from __future__ import annotations  # annotations name torch classes, see `lazy`

import contextlib
import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gerl.utils.lazy import lazy
from gerl.utils.versions import has

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


def derive_seed(*parts: int | str) -> int:
    """Derive a 63-bit seed from `parts` and their order."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_everything(*parts: int | str) -> None:
    """Seed the global generators of Python, NumPy and torch, for code that uses them (such as a user's scorer)."""
    seed = derive_seed(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


WORDS = 624  # of the state of a Mersenne Twister


def sample_generators(seeds: list[int]) -> list[torch.Generator]:
    """Return a CPU generator per sample, with the same noise on any device and different noise for every seed.

    `manual_seed` uses the lower 32 bits of a seed, so two of a hundred thousand samples could have the same noise. Here
    all words of the Mersenne Twister derive from the whole seed.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for generator, seed in zip(generators, seeds, strict=True):
        words = np.random.SeedSequence(seed).generate_state(WORDS).astype(np.uint64)
        words[0] = 1 << 31  # as in NumPy's MT19937, which takes twice as long: the state must not be zero
        state = generator.get_state()
        state[_first_word() : _first_word() + words.nbytes] = torch.from_numpy(words.view(np.uint8))
        generator.set_state(state)
    return generators


@cache
def _first_word() -> int:
    """Return the offset of the words in the state of torch's generator, found by NumPy's MT19937 with the same seed."""
    words = np.random.RandomState(0).get_state(legacy=False)["state"]["key"].astype(np.uint64)
    place = torch.Generator().manual_seed(0).get_state().numpy().tobytes().find(words.tobytes())
    if place < 0:
        raise RuntimeError(f"torch {torch.__version__} stores the state of its CPU generator in an unknown format")
    return place


# --- Global state


@contextlib.contextmanager
def forked_generators() -> Iterator[None]:
    """Restore the states of the global random generators after the block."""
    states = random.getstate(), np.random.get_state(), [read() for read, _ in _generators()]
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for state, (_, write) in zip(states[2], _generators(), strict=False):
            write(state)


_foreign: dict[int, Any] = {}  # values of `_settings` that code of others chose, by place


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Run the block, code of others, as in a process of its own: the settings it chooses hold in such blocks only.

    Restores the random generators after the block.
    """
    imported = "torch" in sys.modules
    settings = _settings() if imported else []
    before = [_value(read) for read, _, _ in settings]
    for i, value in _foreign.items() if imported else ():
        settings[i][1](value)
    try:
        with forked_generators():
            yield
    finally:
        if "torch" in sys.modules:
            settings = settings or _settings()
            before = before or [default for _, _, default in settings]  # of a process that imports torch
            after = [_value(read) for read, _, _ in settings]
            _foreign.clear()
            for i, value in enumerate(before):
                if value is not None and after[i] not in (None, value):
                    _foreign[i] = after[i]
                if value is not None and _value(settings[i][0]) != value:
                    settings[i][1](value)


def _generators() -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Return how torch's generators are read and written, those of GPUs if they are in use."""
    if "torch" not in sys.modules:
        return []
    generators: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [(torch.get_rng_state, torch.set_rng_state)]
    if torch.cuda.is_initialized():
        generators.append((torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))
    return generators


def _value(read: Callable[[], Any]) -> Any:
    """Return a setting; None if it was set through torch's newer names, so that the older one has no value."""
    try:
        return read()
    except RuntimeError:
        return None


def _set_default_device(device: torch.device) -> None:
    # before torch 2.10 the default could not be read after it had been set to None
    torch.set_default_device(None if device.type == "cpu" and has("torch", "2.10") else device)


def _settings() -> list[tuple[Callable[[], Any], Callable[[Any], object], Any]]:
    """Return how torch's global settings are read and written, and their defaults (None: left as it is)."""

    def of(owner: Any, **defaults: Any) -> list[tuple[Callable[[], Any], Callable[[Any], object], Any]]:
        return [(partial(getattr, owner, name), partial(setattr, owner, name), defaults[name]) for name in defaults]

    cpu, b = torch.device("cpu"), cast(Any, torch.backends)  # whose stubs lack some names
    precisions: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = []
    if hasattr(b.cudnn, "conv"):  # since torch 2.9
        for owner in (b, b.cudnn, b.cuda.matmul, b.mkldnn.matmul, b.mkldnn.conv):
            precisions += of(owner, fp32_precision="none")
        precisions += [*of(b.cudnn.conv, fp32_precision="tf32"), *of(b.cudnn.rnn, fp32_precision="tf32")]
    else:
        precisions += of(b.cudnn, allow_tf32=True)
    return [
        (torch.is_grad_enabled, torch.set_grad_enabled, True),
        (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        (torch.get_default_device, _set_default_device, cpu),
        (torch.get_num_threads, torch.set_num_threads, None),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),  # before its newer names
        *precisions,
        *of(b.cudnn, enabled=True, benchmark=False, deterministic=False),
        *of(b.cuda.matmul, allow_fp16_reduced_precision_reduction=True, allow_bf16_reduced_precision_reduction=True),
        (b.cuda.flash_sdp_enabled, b.cuda.enable_flash_sdp, True),
        (b.cuda.mem_efficient_sdp_enabled, b.cuda.enable_mem_efficient_sdp, True),
        (b.cuda.math_sdp_enabled, b.cuda.enable_math_sdp, True),
        (b.cuda.cudnn_sdp_enabled, b.cuda.enable_cudnn_sdp, True),
    ]

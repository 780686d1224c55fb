"""Seeds derived from their purpose: no generator state to save, and equal samples on any number of workers."""

from __future__ import annotations  # annotations name torch classes, see `lazy`

import hashlib
import random
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from gerl.utils.lazy import lazy

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

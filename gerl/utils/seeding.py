"""Seeds from what they are for: no generator state to save, and the same draws on one worker or eight."""

import hashlib
import random
from functools import cache

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on all `parts`, their order and nothing else."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_everything(*parts: int | str) -> None:
    """Seed the global generators of Python, NumPy and torch, for code that draws from them (a user's scorer, say)."""
    seed = derive_seed(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def sample_generators(seeds: list[int]) -> list[torch.Generator]:
    """One CPU generator per sample: the same noise on any device, and other noise for every seed.

    `manual_seed` reads the lower 32 bits of a seed, so that of a hundred thousand samples two may draw the same noise.
    Here all words of the generator's Mersenne Twister come from the whole seed.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for generator, seed in zip(generators, seeds, strict=True):
        words = np.random.MT19937(seed).state["state"]["key"].astype(np.uint64)
        state = generator.get_state()
        state[_first_word() : _first_word() + words.nbytes] = torch.from_numpy(words.view(np.uint8))
        generator.set_state(state)
    return generators


@cache
def _first_word() -> int:
    """Where in the state of torch's generator the words begin: those of NumPy's old one, which is seeded alike."""
    words = np.random.RandomState(0).get_state(legacy=False)["state"]["key"].astype(np.uint64)
    place = torch.Generator().manual_seed(0).get_state().numpy().tobytes().find(words.tobytes())
    if place < 0:
        raise RuntimeError(f"torch {torch.__version__} stores the state of its CPU generator in an unknown format")
    return place

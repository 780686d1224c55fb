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

    `torch.Generator().manual_seed` reads the lower 32 bits of a seed, so that of a hundred thousand samples two may
    draw the same noise. Here all 624 words of the generator's Mersenne Twister come from the whole seed.
    """
    return [_seeded(seed) for seed in seeds]


def plain_generators(seeds: list[int]) -> list[torch.Generator]:
    """`torch.Generator().manual_seed(seed)` of each: noise that anybody draws again in plain diffusers."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def _seeded(seed: int) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    words = np.random.MT19937(seed).state["state"]["key"].astype(np.uint64)
    state, place = generator.get_state(), _words_place()
    state[place : place + words.nbytes] = torch.from_numpy(words.view(np.uint8))
    generator.set_state(state)
    return generator


@cache
def _words_place() -> int:
    """Where in the state of a CPU generator that has drawn nothing the words of its Mersenne Twister begin.

    NumPy's old generator is seeded as torch's is: its words are looked for.
    """
    seed = 5489  # of the published algorithm
    words = np.random.RandomState(seed).get_state(legacy=False)["state"]["key"].astype(np.uint64)
    place = torch.Generator().manual_seed(seed).get_state().numpy().tobytes().find(words.tobytes())
    if place < 0:
        raise RuntimeError(f"torch {torch.__version__} keeps the state of its CPU generator in a form not known here")
    return place

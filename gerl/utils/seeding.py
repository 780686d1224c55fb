"""Seeds from what they are for: no generator state to save, and the same draws on one worker or eight."""

import hashlib
import random

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
    """One CPU generator per sample: the same noise on any device."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]

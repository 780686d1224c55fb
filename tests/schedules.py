"""Schedules and steps on which the kernels are tested."""

from itertools import pairwise

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import assume
from hypothesis import strategies as st

from gerl.engine.transitions import coefficients


def sd3_sigmas(steps: int) -> list[float]:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas.double().tolist()


def along(sigmas: list[float], name: str, noise_level: float) -> list[tuple[float, float]]:
    return [coefficients(name, s, s2, noise_level, sigmas[1]) for s, s2 in pairwise(sigmas)]


def velocity(x: torch.Tensor, s: float, m: float, c: float) -> torch.Tensor:
    """What a perfect model of data Normal(m, c) predicts."""
    return -m + (s - (1 - s) * c) / ((1 - s) ** 2 * c + s**2) * (x - (1 - s) * m)


@st.composite
def steps(draw: st.DrawFn) -> tuple[float, float]:
    """A step `(s, s2)` away from the ends, where closed forms lose digits."""
    s = draw(st.floats(0.02, 0.998))
    s2 = draw(st.floats(0.01, 0.997))
    assume(s2 < s - 1e-3)
    return s, s2


levels = st.floats(0.05, 1.0)

"""Which samplers keep the data's distribution: `python benchmarks/samplers.py` writes docs/pictures/samplers.png.

For Gaussian data N(0, c) in each dimension the exact velocity is linear, so every kernel is a linear recursion of the
variance and no image has to be drawn. Left: the variance of what a sampler ends with, over its number of steps, for
data of variance 1; a sampler that preserves the marginal tends to 1. Right: for data that is a single point, the noise
in the latents after each of 10 steps, divided by the sigma the model is told; above 1 the model sees noisier latents
than it was trained on.
"""

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler
from matplotlib.figure import Figure

from gerl.engine.transitions import coefficients

# kernel -> noise level of its paper (ddim: ancestral sampling)
KERNELS = {"ode": 0.0, "flow_sde": 0.7, "dance_sde": 0.3, "cps": 0.8, "precise": 0.7, "dance_precise": 0.3, "ddim": 1.0}


def sigmas_of(steps: int) -> list[float]:
    """The schedule of Stable Diffusion 3: shift 3."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    return [float(s) for s in scheduler.sigmas]


def variances(kernel: str, noise_level: float, sigmas: list[float], c: float) -> list[float]:
    """Variance per dimension after each step of drawing from N(0, c), all steps but the last stochastic."""
    variance, found = 1.0, []
    for s, s_next in pairwise(sigmas):
        kappa, std = coefficients(kernel, s, s_next, noise_level if s_next > 0 else 0.0, sigmas[1])
        exact = (1 - s) ** 2 * c + s**2
        clean = (1 - s) * c / exact  # E[x0 | x] = clean * x
        noise = s / exact  # E[eps | x] = noise * x
        variance = ((1 - s_next) * clean + kappa * noise) ** 2 * variance + std**2
        found.append(variance)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path(__file__).resolve().parents[1] / "docs" / "pictures"
    parser.add_argument("--out", type=Path, default=folder / "samplers.png")
    args = parser.parse_args()
    steps = [5, 7, 10, 14, 20, 28, 40, 60, 100, 200, 500, 1000]
    print(f"{'kernel':14s} {'noise':>5s} {'10':>7s} {'40':>7s} {'1000 steps':>11s} {'most noise':>10s}")
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    ten = sigmas_of(10)
    for kernel, noise_level in KERNELS.items():
        curve = [variances(kernel, noise_level, sigmas_of(n), 1.0)[-1] for n in steps]
        left.plot(steps, curve, marker=".", label=f"{kernel} {noise_level:g}")
        ratio = np.sqrt(variances(kernel, noise_level, ten, 0.0)[:-1]) / ten[1:-1]
        right.plot(range(9), ratio, marker=".", label=kernel)
        final = dict(zip(steps, curve, strict=True))
        numbers = f"{final[10]:7.4f} {final[40]:7.4f} {final[1000]:11.4f} {max(ratio):10.2f}"
        print(f"{kernel:14s} {noise_level:5g} {numbers}")
    left.axhline(1.0, color="black", linewidth=0.8)
    left.set(xscale="log", xlabel="denoising steps", ylabel="variance of the samples", title="data of variance 1")
    right.set(xlabel="step", ylabel="noise / sigma", yscale="log", title="data that is one point, 10 steps")
    left.legend(fontsize=8)
    figure.savefig(args.out, dpi=110)
    print(args.out)


if __name__ == "__main__":
    main()

"""Coverage of the 95 % intervals of means, simulated: `python benchmarks/intervals.py` (about a minute).

Each line has the share of 2,000 samples of N prompts whose interval contains the true mean, for the intervals of
`gerl.run.validation.mean_interval` and for the percentile bootstrap, and the ratio of the mean widths.
"""

import logging
from collections.abc import Iterator

import numpy as np

from gerl.run.validation import mean_interval

SAMPLES, RESAMPLES = 2000, 2000
PROMPTS = (8, 12, 24, 48, 128)
Ends = tuple[float, float] | None
logger = logging.getLogger("intervals")


def cases(rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray, float, Ends]]:
    """Name, samples `[SAMPLES, N]`, true mean, and the range of a value where it is known."""
    for n in PROMPTS:
        size = (SAMPLES, n)
        yield f"normal gains, {n} prompts", rng.normal(0.3, 1, size), 0.3, None
        for ties, up, down in ((85, 0.12, 0.03), (95, 0.04, 0.01)):
            gains = rng.choice([-1.0, 0.0, 1.0], size=size, p=[down, 1 - up - down, up])
            yield f"exact matches, {ties} % ties, {n} prompts", gains, up - down, (-1.0, 1.0)
        yield f"wins, {n} prompts", rng.choice([1.0, 0.5, 0.0], size=size, p=[0.8, 0.1, 0.1]), 0.85, (0.0, 1.0)
        yield f"shares, {n} prompts", (rng.random(size) < 0.15).astype(float), 0.15, (0.0, 1.0)
        for sigma in (0.5, 1.0):
            gains = rng.lognormal(0, sigma, size)
            yield f"lognormal gains, sigma {sigma:g}, {n} prompts", gains, float(np.exp(sigma**2 / 2)), None
        images = rng.normal(0.2, 1, (*size, 1)) + rng.normal(0, 1, (*size, 4))
        yield f"four images per prompt, {n} prompts", images.mean(2), 0.2, None


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name, samples, truth, ends in cases(np.random.default_rng(7)):
        n = samples.shape[1]
        # the range tells something only where no value differs from 0
        own = np.array([mean_interval([x], ends if ends != (-1.0, 1.0) or not x.any() else None) for x in samples])
        weights = np.random.default_rng(1).multinomial(n, [1 / n] * n, size=RESAMPLES) / n
        percentile = np.quantile(weights @ samples.T, [0.025, 0.975], axis=0).T
        covered = [((i[:, 0] <= truth + 1e-9) & (truth - 1e-9 <= i[:, 1])).mean() for i in (own, percentile)]
        ratio = np.diff(own).mean() / np.diff(percentile).mean()
        logger.info("%-44s %.1f %%, percentile %.1f %%, width %.2f", name, *(100 * c for c in covered), ratio)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

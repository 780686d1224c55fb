"""Warnings about settings that cannot work."""

from gerl.config import ActorConfig, AlgorithmConfig
from gerl.protocol import SamplingProbe


def ratio_limit(config: ActorConfig, half_precision: bool) -> float:
    """The largest |ratio - 1| on policy that is no error; `half_precision`: of the base weights."""
    return config.max_ratio_deviation or (2e-2 if half_precision else 1e-3)


def ratio_problem(deviation: float, limit: float) -> str:
    """The sentence for a ratio that is further from 1 on policy than `limit`."""
    return (
        f"max |ratio - 1| is {deviation:.2e} before the first optimizer step, above actor.max_ratio_deviation="
        f"{limit:g}: the replay does not compute what the rollout did; try model.dtype=float32, the same micro-"
        "batch size for rollout and actor, or model.compile=null"
    )


def nearer_bound(algorithm: AlgorithmConfig, probe: SamplingProbe) -> float | None:
    """How far the ratio may go from 1 for the latents of `probe` before it is clipped; None where it is not."""
    bounds = algorithm.clip_range_at(probe.dimensions)
    return min(bounds) if bounds else None


def probe_warnings(probe: SamplingProbe, clip: float | None) -> list[str]:
    """Sentences for what a probe found; `clip`: how far the ratio may go from 1 before it is clipped."""
    found = []
    if clip is not None and probe.log_ratio_noise > clip / 2:
        found.append(
            f"the clip range {clip:g} is below twice the numerical noise of the log-ratio, {probe.log_ratio_noise:.1e}"
            ": samples are clipped at random; widen algorithm.clip_low and clip_high, or use model.dtype=float32"
        )
    for k, sigma, sigma_next, kappa in probe.reversed_noise:
        found.append(
            f"step {k} of the window, from sigma {sigma:.3f} to {sigma_next:.3f}, flips the sign of the predicted "
            f"noise (kappa {kappa:.2f} < 0), which leaves noise in the images: end sampling.window_range before "
            "it, or use sampling.kernel=precise"
        )
    return found

"""Checks of settings that impair the training signal."""

from gerl.config import ActorConfig, AlgorithmConfig
from gerl.protocol import SamplingProbe

# ratio of the noise factors of two steps; beyond it one step has the squared gradient of a hundred others, more than a
# schedule has, and dominates all of them
LARGEST_SPREAD = 10.0


NOT_FINITE = (
    "not finite (NaN or infinite): use model.dtype=float32, or bfloat16 rather than float16, and check the weights of "
    "the model and of model.lora"
)


def ratio_limit(config: ActorConfig, half_precision: bool) -> float:
    """Return the largest acceptable |ratio - 1| on policy; `half_precision`: whether the base weights are."""
    return config.max_ratio_deviation or (2e-2 if half_precision else 1e-3)


def ratio_problem(deviation: float, limit: float) -> str:
    """Return the message for a ratio that differs from 1 on policy by more than `limit`."""
    return (
        f"max |ratio - 1| is {deviation:.2e} before the first optimizer step, above "
        f"actor.max_ratio_deviation={limit:g}: the replay does not reproduce the rollout; try model.dtype=float32, "
        "the same micro-batch size for rollout and actor, or model.compile=null"
    )


def nearer_bound(algorithm: AlgorithmConfig, probe: SamplingProbe) -> float | None:
    """Return the distance from 1 at which the ratio is clipped for latents of `probe`; None if it is not clipped."""
    bounds = algorithm.clip_range(probe.dimensions)
    return min(bounds) if bounds else None


def probe_warnings(probe: SamplingProbe, clip: float | None) -> list[str]:
    """Return warnings from a probe; `clip`: the distance from 1 at which the ratio is clipped."""
    sentences = []
    if clip is not None and probe.log_ratio_noise > clip / 2:
        sentences.append(
            f"the clip range {clip:g} is below twice the numerical noise of the log-ratio, {probe.log_ratio_noise:.1e}"
            ": samples are clipped at random; widen algorithm.clip_low and clip_high, or use model.dtype=float32"
        )
    for k, sigma, sigma_next, kappa in probe.reversed_noise:
        sentences.append(
            f"step {k} of the window, from sigma {sigma:.3f} to {sigma_next:.3f}, flips the sign of the predicted "
            f"noise (kappa {kappa:.2f} < 0), which leaves noise in the images: end sampling.window_range before it"
        )
    if probe.kl_resolution is not None:
        sentences.append(
            f"a KL to the base model below about {probe.kl_resolution:.1e} is the rounding error of the model's "
            "output in this precision, and has no direction: algorithm.kl_coef is effective only above it; use "
            "model.dtype=float32 for smaller values"
        )
    return sentences + spread_warnings(probe)


def spread_warnings(probe: SamplingProbe) -> list[str]:
    """Warn if the noise of a trained step counts much more than the larger noise of another step."""
    measured = [(s.gain, s.std, s) for s in probe.steps if s.gain and s.std]
    if not measured:
        return []
    gains = [gain for gain, *_ in measured]
    (least, noise, low), (most, less_noise, high) = (measured[gains.index(bound)] for bound in (min(gains), max(gains)))
    if most <= LARGEST_SPREAD * least or less_noise >= noise:
        return []
    spreads = [max(gains[: i + 1]) / min(gains[: i + 1]) for i in range(len(gains))]
    end = next(measured[i][2].step for i, spread in enumerate(spreads) if spread > LARGEST_SPREAD)
    remedy = f"end sampling.window_range before step {end} at the latest"
    if probe.weighting not in (None, "std2_over_jacobian"):
        remedy = f"set algorithm.timestep_weights=std2_over_jacobian, or {remedy}"
    return [
        f"the noise of step {high.step} (std {less_noise:.2g}) counts {most / least:.0f} times as much in the "
        f"gradient as that of step {low.step} (std {noise:.2g}), and drowns out other steps: {remedy}; python -m "
        "gerl.preflight signal=4 measures which steps carry the reward"
    ]

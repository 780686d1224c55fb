import pytest

from gerl.algorithms.signal_checks import probe_warnings, ratio_limit, ratio_problem
from gerl.config import ActorConfig
from gerl.protocol import SamplingProbe


@pytest.mark.parametrize(
    ("noise", "clip", "warned"), [(1.1e-7, 1e-9, True), (1.1e-7, 1e-4, False), (1e-4, 1e-4, True), (1.0, None, False)]
)
def test_a_clip_range_below_the_noise_of_the_log_ratio_is_warned_of(
    noise: float, clip: float | None, warned: bool
) -> None:
    said = probe_warnings(SamplingProbe(noise, []), clip)
    assert len(said) == warned
    if warned:
        assert said[0].startswith(
            f"the clip range {clip:g} is below twice the numerical noise of the log-ratio, {noise:.1e}"
        )


def test_steps_that_flip_the_noise_are_named() -> None:
    (said,) = probe_warnings(SamplingProbe(0.0, [(4, 0.432, 0.009, -0.17)]), 1e-4)
    assert said.startswith(
        "step 4 of the window, from sigma 0.432 to 0.009, flips the sign of the predicted noise (kappa -0.17 < 0)"
    )


def test_the_ratio_on_policy_has_a_limit() -> None:
    assert ratio_limit(ActorConfig(), False) == 1e-3 and ratio_limit(ActorConfig(), True) == 2e-2
    assert ratio_limit(ActorConfig(max_ratio_deviation=0.5), True) == 0.5
    assert ratio_problem(0.25, 1e-3).startswith("max |ratio - 1| is 2.50e-01 before the first optimizer step, above ")

"""Launches, copies and synchronisations that recording and replaying add to a denoising step; the limits only fall."""

import pytest
import step_costs
from drills import more

RECORD, REPLAY = 12, 40  # launches per step: the sampler's formula, its log-probability, guidance and their gradient


@pytest.mark.parametrize("name", list(step_costs.DEPTHS))
def test_a_step_waits_for_nothing_and_copies_its_noise_at_once(name: str) -> None:
    costs = step_costs.costs(name, deep=False)
    for kind, than, limit in (("record", "stock", RECORD), ("replay", "bare", REPLAY)):
        assert costs[kind].own_waits == 0
        assert costs[kind].own_copies == (kind == "record")
        assert costs[kind].launches - costs[than].launches <= limit


@more
def test_of_a_whole_denoiser_that_is_less_than_a_hundredth() -> None:
    costs = step_costs.costs("StableDiffusion3Pipeline", deep=True)
    assert costs["record"].launches <= 1.01 * costs["stock"].launches
    assert costs["replay"].launches <= 1.01 * costs["bare"].launches


@pytest.mark.parametrize(
    ("name", "prevents"), [("StableDiffusion3Pipeline", set()), ("Lumina2Pipeline", {"sync", "to device"})]
)
def test_what_prevents_capturing_a_denoiser_is_found(name: str, prevents: set[str]) -> None:
    entry = next(e for e in step_costs.ENTRIES if e.name == name)
    assert set(step_costs.inside_the_denoiser(entry)[1]) == prevents

"""GARDO's gate: against a twin in plain Python, its share from step to step, and what it does in a run."""

import json
import math

import numpy as np
import pytest
import torch
from crediting import Crediting, config, scored

from gerl.errors import CheckpointError
from gerl.trainer.extensions.gardo import LEAST, MOST, Gate, KLGate, doubts, held

REWARDS = torch.tensor([0.1, 0.9, 0.5, 0.7, 0.3])
AGREES, OPPOSES = REWARDS**3, -REWARDS


def win_rate(values: list[float], i: int) -> float:
    others = [v for k, v in enumerate(values) if k != i]
    return sum((values[i] > v) + (values[i] == v) / 2 for v in others) / len(others)


def test_the_doubt_is_the_win_rate_above_the_mean_of_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randint(0, 6, (40,), generator=generator).double()
    others = torch.randint(0, 6, (40, 3), generator=generator).double()
    columns = [rewards.tolist(), *(others[:, k].tolist() for k in range(3))]
    expected = [win_rate(columns[0], i) - sum(win_rate(c, i) for c in columns[1:]) / 3 for i in range(40)]
    assert doubts(rewards, others).tolist() == pytest.approx(expected)
    chosen = held(doubts(rewards, others), 0.3)
    positive = [d for d in expected if d >= 0]
    assert chosen.tolist() == [d >= 0 and d > np.percentile(positive, 70) for d in expected]  # as the authors' code


def test_a_scorer_that_agrees_leaves_no_doubt_and_one_that_opposes_doubts_the_best() -> None:
    assert not doubts(REWARDS, AGREES[:, None]).any()
    found = doubts(REWARDS, OPPOSES[:, None])
    assert found.tolist() == pytest.approx([-1.0, 1.0, 0.0, 0.5, -0.5])
    assert held(found, 0.5).tolist() == [False, True, False, False, False]
    assert held(found - 2, 0.5).sum() == 0  # nothing is ranked too high


def test_images_that_a_scorer_has_no_score_for_are_judged_by_the_others_or_not_at_all() -> None:
    some = OPPOSES.clone()
    some[[0, 3]] = torch.nan
    both = torch.stack([some, torch.full_like(some, torch.nan)], 1)
    found = doubts(REWARDS, both)
    assert found[[0, 3]].isnan().all() and not held(found, 1.0)[[0, 3]].any()
    assert found[1] == pytest.approx(1.0 - 0.0) and found[2] == pytest.approx(0.5 - 0.5)


def test_the_share_follows_the_mean_doubt_within_its_bounds() -> None:
    gate, shares = Gate(0.1), list[float]()
    for mean in (0.2, 0.3, 0.25, 0.1):
        gate._follow(mean)
        shares.append(gate.share)
    assert shares == pytest.approx([0.1, 0.11, 0.11, 0.099])
    for k in range(60):
        gate._follow(1.0 + k)
    assert gate.share == pytest.approx(MOST * 0.1) and len(gate.past) == 20
    for k in range(60):
        gate._follow(-1.0 - k)
    assert gate.share == pytest.approx(LEAST * 0.1)


def test_the_share_follows_the_latest_steps_only() -> None:
    gate = Gate(0.1)
    for mean in (0.9, *[0.1] * 20):  # the first one is forgotten
        gate._follow(mean)
    before = gate.share
    gate._follow(0.5)
    assert gate.past == [0.1] * 19 + [0.5] and gate.share == pytest.approx(1.1 * before)


def test_a_gate_continues_where_it_was() -> None:
    one, generator = Gate(0.2), torch.Generator().manual_seed(1)
    steps = [(torch.rand(24, generator=generator), torch.rand(24, 2, generator=generator)) for _ in range(6)]
    for step in steps[:3]:
        one.choose(*step)
    two = Gate(0.2)
    two.load_state(one.state())
    for step in steps[3:]:
        first, second = one.choose(*step), two.choose(*step)
        assert torch.equal(first, second) and 0 < first.sum() < 12 and set(first.tolist()) == {0.0, 1.0}
    assert one.state() == two.state()
    two.load_state(None)
    assert two.state() == {"share": 0.2, "past": []}
    with pytest.raises(CheckpointError, match=r"extensions\.gardo"):
        two.load_state({"share": "much", "past": [math.pi]})


def test_the_kl_counts_for_the_images_that_watched_scorers_doubt() -> None:
    crediting = Crediting(config(kl_coef=0.5, kl_share=0.5))
    step = crediting.step(scored(crediting.config, [1.0, 3.0, None, 6.0, 5.0, 5.0, 7.0, 8.0]))
    assert step.kl_weight is not None and len(step.kl_weight) == 8
    assert not step.kl_weight[[2, 3]].any()  # a failed group has none
    assert set(step.kl_weight.tolist()) == {0.0, 1.0}
    assert step.metrics["group/kl_share"] == pytest.approx(float(step.kl_weight.sum()) / 6)
    assert step.metrics["group/kl_share_of_doubted"] == 0.5
    without = Crediting(config(kl_coef=0.5))
    assert without.step(scored(without.config, [1.0, 3.0, 5.0, 6.0])).kl_weight is None


def test_a_resumed_run_continues_with_the_share() -> None:
    one, other = (KLGate(config(kl_coef=0.1, kl_share=0.5)) for _ in range(2))
    one.gate.choose(REWARDS, OPPOSES[:, None])
    one.gate.choose(REWARDS, torch.stack([OPPOSES, AGREES], 1))
    assert one.gate.share != 0.5
    other.load_state(json.loads(json.dumps(one.state())))
    assert (other.gate.share, other.gate.past) == (one.gate.share, one.gate.past)

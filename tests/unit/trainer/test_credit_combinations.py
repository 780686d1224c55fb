"""Options of the credit in combination, against a naive twin: what each does by itself holds with the others too."""

from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest
from crediting import Crediting
from hypothesis import given
from hypothesis import strategies as st

from gerl.algorithms.planning import plan_samples
from gerl.config import Config, RewardConfig, RolloutConfig, SamplingConfig, ScorerConfig, algorithm_config
from gerl.protocol import Prompt, ScorerFailure, Scores

PROMPTS, N = 3, 3
WEIGHTS = {"a": 2.0, "c": -1.0}
KL_COEF, SHARE, EPS = 0.5, 0.5, 1e-4

options = st.fixed_dictionaries(
    {
        "normalise": st.sampled_from(["none", "group", "batch", "rank"]),
        "clip": st.sampled_from([None, [-0.5, 1.0]]),
        "adv_estimator": st.sampled_from(["grpo", "rloo", "reinforce_pp", "gdpo"]),
        "advantage_std": st.sampled_from(["group", "batch", "none"]),
        "advantage_clip": st.sampled_from([0.8, 5.0]),
        "dropped": st.sampled_from([None, 0, 1, 2]),
        "gate": st.booleans(),
        "paid": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)


def shaped(o: dict[str, Any], score: float) -> float:
    """3 score - 0.5 within the limits."""
    low, high = o["clip"] or (-1e9, 1e9)
    return min(max(3 * score - 0.5, low), high)


def groups_of(rows: list[int]) -> list[list[int]]:
    return [members for p in range(PROMPTS) if (members := [i for i in rows if i // N == p])]


def centred(values: dict[int, float], groups: list[list[int]], std: str, loo: bool = False) -> dict[int, float]:
    found = {}
    for members in groups:
        own = [values[i] for i in members]
        scale = {"group": pstdev(own) + EPS, "batch": pstdev(values.values()) + EPS, "none": 1.0}[std]
        for i in members:
            others = [values[k] for k in members if k != i] if loo else own
            found[i] = 0.0 if len(set(own)) == 1 else (values[i] - fmean(others)) / scale
    return found


def win_rates(values: dict[int, float]) -> dict[int, float]:
    return {i: sum((v > u) + (v == u) / 2 for k, u in values.items() if k != i) / (len(values) - 1) for i, v in values.items()}  # noqa: E501  # fmt: skip


def twin(
    o: dict[str, Any], scores: dict[str, list[float]], kl: list[float]
) -> tuple[dict[int, float], dict[int, float]]:
    """The advantage and the gate of each sample that is trained on."""
    rows = [i for i in range(PROMPTS * N) if i // N != o["dropped"]]
    groups = groups_of(rows)
    counted = {i: shaped(o, scores["a"][i]) for i in rows}
    match o["normalise"]:
        case "group":
            counted = centred(counted, groups, "group")
        case "batch":
            counted = centred(counted, [rows], "group")
        case "rank":
            counted = {i: rate for members in groups for i, rate in win_rates({k: counted[k] for k in members}).items()}
    other = {i: scores["c"][i] for i in rows}
    totals = {i: WEIGHTS["a"] * counted[i] + WEIGHTS["c"] * other[i] for i in rows}
    gate = dict.fromkeys(rows, 1.0)
    if o["gate"]:
        won, watched = win_rates(totals), win_rates({i: scores["w"][i] for i in rows})
        doubt = {i: won[i] - watched[i] for i in rows}
        edge = np.quantile([d for d in doubt.values() if d >= 0], 1 - SHARE)
        gate = {i: float(d >= 0 and d > edge) for i, d in doubt.items()}
    if o["paid"]:
        totals = {i: total - KL_COEF * gate[i] * kl[i] for i, total in totals.items()}
    match o["adv_estimator"]:
        case "reinforce_pp":
            found = centred(totals, [rows], "group")
        case "gdpo":
            parts = [centred(column, groups, o["advantage_std"]) for column in (counted, other)]
            sums = {i: sum(w * part[i] for w, part in zip(WEIGHTS.values(), parts, strict=True)) for i in rows}
            found = {i: value / (pstdev(sums.values()) + EPS) for i, value in sums.items()}
        case estimator:
            found = centred(totals, groups, o["advantage_std"], estimator == "rloo")
    return {i: min(max(a, -o["advantage_clip"]), o["advantage_clip"]) for i, a in found.items()}, gate


def step_of(o: dict[str, Any], scores: dict[str, list[float]]) -> tuple[Config, Scores]:
    keys = {name: o[name] for name in ("adv_estimator", "advantage_std", "advantage_clip")}
    scorers = {
        "a": ScorerConfig(weight=WEIGHTS["a"], scale=3.0, offset=-0.5, clip=o["clip"], normalise=o["normalise"]),
        "w": ScorerConfig(weight=0.0),
        "c": ScorerConfig(weight=WEIGHTS["c"]),
    }
    config = Config(
        algorithm=algorithm_config(
            kl_coef=KL_COEF, kl_in_reward=o["paid"], kl_share=SHARE if o["gate"] else 1.0, **keys
        ),
        sampling=SamplingConfig(num_inference_steps=2),
        rollout=RolloutConfig(prompts_per_step=PROMPTS, n=N),
        reward=RewardConfig(scorers),
    )
    failed = [i // N == o["dropped"] and i % N == 1 for i in range(PROMPTS * N)]  # one image takes its group with it
    totals = [WEIGHTS["a"] * shaped(o, a) + WEIGHTS["c"] * c for a, c in zip(scores["a"], scores["c"], strict=True)]
    found = Scores()
    found.add(
        Scores(
            plan_samples(config, [Prompt(i, f"prompt {i}") for i in range(PROMPTS)], 1, 0),
            [None if no else total for no, total in zip(failed, totals, strict=True)],
            {
                name: [None if no and name == "a" else v for no, v in zip(failed, column, strict=True)]
                for name, column in scores.items()
            },
            [[ScorerFailure("a", "it broke")] if no else [] for no in failed],
        ),
    )
    return config, found


@given(options)
def test_the_credit_equals_its_naive_twin(o: dict[str, Any]) -> None:
    draw = np.random.default_rng(o["seed"])
    scores = {name: draw.normal(size=PROMPTS * N).astype(np.float32).astype(float).tolist() for name in "awc"}
    kl = draw.uniform(size=PROMPTS * N).tolist()
    config, scored = step_of(o, scores)
    step = Crediting(config).step(scored, kl)
    credit, gate = step.credit, step.kl_weight
    assert credit is not None
    advantages, held = twin(o, scores, kl)
    for i, row in enumerate(credit.tolist()):
        if i in advantages:
            assert row == pytest.approx([advantages[i]] * 2, abs=2e-3), i
        else:
            assert np.isnan(row).all(), i
    assert (gate is not None) == o["gate"]
    if gate is not None:
        assert {i: value for i, value in enumerate(gate.tolist()) if value} == {i: v for i, v in held.items() if v}

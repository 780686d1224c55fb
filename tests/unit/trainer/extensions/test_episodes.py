"""Turns: which images go on, what they are asked, and the reward that their ancestors get."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gerl.algorithms import build_algorithm
from gerl.algorithms.planning import plan_samples
from gerl.config import from_mapping
from gerl.errors import ClusterError
from gerl.progress import Stopwatch
from gerl.protocol import Prompt, Sample, Scores, Turn
from gerl.run.checkpoint import RunState
from gerl.trainer.extensions.episodes import Episodes, returns, text_returns
from gerl.trainer.roles import Role, merged, update_roles
from gerl.trainer.step import Metrics, Step
from gerl.trainer.update import Update

PIXELS = np.zeros((4, 6, 3), np.uint8)


def episodes(**keys: Any) -> Episodes:
    turns = [{"role": "draw"}, {"role": "edit", "images": 2}]
    return Episodes(from_mapping({"episode": {"turns": turns, "roles": {"edit": {}}, **keys}, "rollout": {"n": 3}}))


def image(prompt: int, turn: int, index: int, state: int | None = None) -> Sample:
    where = Turn(turn, "draw" if turn == 0 else "edit", "", None if state is None else PIXELS, state)
    return Sample(Prompt(prompt, f"p{prompt}", turn=where), index, 0, 1, turn=turn, role=where.role, branch=state)


def table(samples: list[Sample], totals: list[float | None]) -> Scores:
    return Scores(samples, totals, {"a": list(totals)}, [[] for _ in samples])


class Counting(Update):
    """Updates that are only counted."""

    def _run(self, step: Step) -> Metrics:
        self.state.policy_version += 1
        return {}


class Failing(Update):
    def _run(self, step: Step) -> Metrics:
        self.state.policy_version += 1
        self.state.nonfinite += 1
        raise ClusterError("the worker died")


def test_a_role_whose_update_fails_takes_back_the_count_of_those_before_it() -> None:
    config = from_mapping({"episode": {"turns": [{"role": "draw"}, {"role": "edit"}, {"role": "last"}],
                                       "roles": {"edit": {}, "last": {}}}})  # fmt: skip
    fleet: Any = SimpleNamespace()
    algorithm, states = build_algorithm(config), [RunState(policy_version=n) for n in range(3)]
    kinds = {"draw": Counting, "edit": Counting, "last": Failing}
    roles = {
        name: Role(name, config, fleet, kind(config, algorithm, fleet, state, False))
        for (name, kind), state in zip(kinds.items(), states, strict=True)
    }
    with pytest.raises(ClusterError):
        update_roles(roles, Step(1, Stopwatch(), credit=torch.zeros(0, 10)))
    assert [(state.policy_version, state.nonfinite) for state in states] == [(0, 0), (1, 0), (2, 0)]


def test_the_best_images_of_each_group_go_on() -> None:
    scores = table([image(p, 0, k) for p in (0, 1) for k in range(3)], [0.1, 0.9, 0.9, None, 0.2, 0.3])
    assert episodes().chosen(scores, 1) == [1, 5]
    assert episodes(next="each").chosen(scores, 1) == list(range(6))
    drawn = [episodes(next="sample").chosen(scores, step) for step in range(1, 40)]
    assert {row for rows in drawn for row in rows} == set(range(6))  # every image at some step
    assert drawn[4] == episodes(next="sample").chosen(scores, 5) and all(len(rows) == 2 for rows in drawn)


def test_groups_of_a_turn_start_from_one_image_and_have_noise_of_their_own() -> None:
    found = episodes(next="each")
    scores = table([image(0, 0, k) for k in range(3)], [0.0, 1.0, 2.0])
    pictures = [PIXELS + k for k in range(3)]
    prompts = found.turns.following(1, scores, pictures, found.chosen(scores, 1))
    samples = plan_samples(from_mapping({"rollout": {"n": 2}}), prompts, 1, 0)
    groups = {sample.group for sample in samples}
    assert len(groups) == 3 and {group.turn for group in groups} == {1} and {g.role for g in groups} == {"edit"}
    for sample in samples:
        assert sample.branch is not None and sample.prompt.turn is not None
        assert sample.prompt.turn.image is pictures[sample.branch]
    assert len({sample.seed for sample in samples}) == 6


def naive_returns(kind: str, scores: Scores, row: int) -> float:
    sample, total = scores.samples[row], scores.totals[row]
    assert total is not None
    siblings = [r for r, s in enumerate(scores.samples) if (s.prompt.id, s.turn) == (sample.prompt.id, sample.turn)]
    state = siblings.index(row)
    later = [
        r for r, s in enumerate(scores.samples)
        if (s.prompt.id, s.turn, s.branch) == (sample.prompt.id, (sample.turn or 0) + 1, state)
    ]  # fmt: skip
    if kind == "turn" or not later:
        return total
    rest = sum(naive_returns(kind, scores, r) for r in later) / len(later)
    return rest + (total if kind == "sum" else 0.0)


@given(st.sampled_from(["turn", "last", "sum"]), st.lists(st.floats(-1, 1), min_size=26, max_size=26))
def test_returns_equal_a_naive_recursion(kind: str, values: list[float]) -> None:
    first = [image(p, 0, k) for p in (0, 1) for k in range(2)]
    second = [image(p, 1, k, state) for p in (0, 1) for state in range(2) for k in range(2)]
    third = [image(p, 2, 0, state) for p in (0, 1) for state in range(4)]
    scores = table([*first, *second, *third], [*values[: len(first) + len(second) + len(third)]])
    expected = [naive_returns(kind, scores, row) for row in range(len(scores.samples))]
    assert returns(kind, scores) == pytest.approx(expected)


def test_a_missing_reward_is_missing_in_what_it_follows_from() -> None:
    scores = table([image(0, 0, 0), image(0, 0, 1), image(0, 1, 0, 0), image(0, 1, 0, 1)], [1.0, 2.0, None, 5.0])
    assert returns("last", scores) == [None, 5.0, None, 5.0]


def test_a_text_has_the_mean_reward_of_its_images() -> None:
    images = [image(0, 1, k, state) for state in range(2) for k in range(2)]
    texts = [Sample(Prompt(0, "p0"), k, 0, 1, turn=0, role="rewrite") for k in range(2)]
    assert text_returns(texts, table(images, [1.0, 2.0, 5.0, None])) == [1.5, None]


def test_metrics_of_another_role_are_named_by_it() -> None:
    own = {"actor/loss": 1.0, "evaluations/forward": 4.0, "gpu/memory_gb": 2.0}
    found = merged(own, {"actor/loss": 5.0, "evaluations/forward": 3.0, "gpu/memory_gb": 1.0}, "edit")
    assert found == {"actor/loss": 1.0, "actor/edit/loss": 5.0, "evaluations/forward": 7.0, "gpu/memory_gb": 2.0}

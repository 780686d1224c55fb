"""Which process draws which micro-batch: in turn, or in sets of which every rank of a worker has one."""

from collections import Counter
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training import PROMPTS, config

from gerl.algorithms import build_algorithm
from gerl.algorithms.planning import plan_samples
from gerl.config import ClusterConfig, Config, ModelConfig
from gerl.trainer.owners import followers, kind, share


def ranks(count: int, context: int = 1, shard: Literal["none", "denoiser"] = "denoiser") -> Config:
    return Config(model=ModelConfig(shard=shard), cluster=ClusterConfig(ranks_per_worker=count, context=context))


def test_without_shards_processes_take_turns() -> None:
    found = share("aabcc", Config(cluster=ClusterConfig(ranks_per_worker=2)), 4)
    assert (found.processes, found.sets, found.repeats) == ([0, 1, 2, 3, 0], [], [])


def test_a_set_is_of_one_kind_and_one_worker() -> None:
    found = share("aaabaa", ranks(2), 4)
    assert found.sets == [[0, 1], [2], [3], [4, 5]]
    assert found.processes == [0, 1, 2, 0, 2, 3]
    assert found.repeats == [(2, 3), (3, 1)]
    assert [found.repeated_after(i) for i in range(6)] == [[], [], [(2, 3)], [(3, 1)], [], []]


def test_ranks_that_share_tokens_follow_the_first_of_them() -> None:
    found = share("aaab", ranks(4, context=2), 8)
    assert found.sets == [[0, 1], [2], [3]]
    assert found.processes == [0, 2, 4, 0]
    assert found.repeats == [(2, 6), (2, 7), (3, 2), (3, 3)]
    assert [list(followers(process, ranks(4, context=2))) for process in (0, 2)] == [[1], [3]]
    assert list(followers(3, ranks(2))) == []


def test_without_shards_only_those_that_share_tokens_wait_for_each_other() -> None:
    found = share("aab", ranks(4, context=2, shard="none"), 8)
    assert (found.sets, found.processes, found.repeats) == ([[0], [1], [2]], [0, 2, 4], [])


@given(st.lists(st.sampled_from("abc")), st.integers(1, 2), st.integers(1, 2), st.booleans())
def test_followers_make_the_calls_of_whom_they_follow(
    kinds: list[str], groups: int, workers: int, sharded: bool
) -> None:
    config = ranks(groups * 2, context=2, shard="denoiser" if sharded else "none")
    found = share(kinds, config, config.cluster.ranks_per_worker * workers)
    calls = [(p, i) for i, owner in enumerate(found.processes) for p in (owner, *followers(owner, config))]
    calls += [(process, ~i) for i, process in found.repeats]
    by_process = [[i for p, i in calls if p == process] for process in range(groups * 2 * workers)]
    assert all(by_process[first] == by_process[first + 1] for first in range(0, len(by_process), 2))
    if sharded:
        counts = [len(by_process[first]) for first in range(0, len(by_process), 2)]
        assert all(len(set(counts[w * groups : (w + 1) * groups])) == 1 for w in range(workers))


@given(st.lists(st.sampled_from("abc")), st.integers(2, 4), st.integers(1, 3))
def test_the_ranks_of_a_worker_draw_as_much(kinds: list[str], size: int, workers: int) -> None:
    found = share(kinds, ranks(size), size * workers)
    assert [i for members in found.sets for i in members] == list(range(len(kinds)))
    drawn = [(process, kinds[i]) for i, process in enumerate(found.processes)]
    drawn += [(process, kinds[i]) for i, process in found.repeats]
    for worker in range(workers):
        by_rank = [Counter(kind for process, kind in drawn if process == worker * size + r) for r in range(size)]
        assert all(counts == by_rank[0] for counts in by_rank)
    assert sorted(found.repeats) == sorted(r for i in range(len(kinds)) for r in found.repeated_after(i))


@pytest.mark.parametrize(("name", "keys"), [("flow_grpo", {}), ("branch_grpo", {"split_steps": [0, 1]})])
def test_tasks_are_alike_where_they_need_the_same_calls(name: str, keys: dict[str, list[int]]) -> None:
    c = config(name, n=2, micro=4, **keys)
    first, second = build_algorithm(c).plan(plan_samples(c, [*PROMPTS, *PROMPTS], 1, 0))[:2]
    smaller = build_algorithm(c).plan(plan_samples(c, PROMPTS[:1], 1, 0))[0]
    assert kind(first) == kind(second) and (kind(smaller) == kind(first)) == (
        len(smaller.samples) == len(first.samples)
    )

"""Which process samples which micro-batch: in turn, or in lockstep groups of which every rank of a worker has one."""

from collections import Counter
from typing import Literal

import pytest
from executing import executed
from hypothesis import given
from hypothesis import strategies as st
from training import PROMPTS, config

from gerl.algorithms import build_algorithm
from gerl.algorithms.planning import plan_samples
from gerl.config import ClusterConfig, Config, ModelConfig
from gerl.workers.fleet import Placement, call_pattern, place


def ranks(count: int, context: int = 1, shard: Literal["none", "denoiser"] = "denoiser") -> Config:
    return Config(model=ModelConfig(shard=shard), cluster=ClusterConfig(ranks_per_worker=count, context=context))


def test_without_shards_processes_take_turns() -> None:
    found = place("aabcc", Config(cluster=ClusterConfig(ranks_per_worker=2)), 4)
    assert (found.processes, found.groups, found.padding) == ([0, 1, 2, 3, 0], [], [])


def test_a_set_is_of_one_kind_and_one_worker() -> None:
    found = place("aaabaa", ranks(2), 4)
    assert found.groups == [[0, 1], [2], [3], [4, 5]]
    assert found.processes == [0, 1, 2, 0, 2, 3]
    assert found.padding == [(2, 3), (3, 1)]
    assert [list(found.copies_after(i)) for i in range(6)] == [[], [], [(2, 3, True)], [(3, 1, True)], [], []]


def test_ranks_that_share_tokens_follow_the_first_of_them() -> None:
    found = place("aaab", ranks(4, context=2), 8)
    assert found.groups == [[0, 1], [2], [3]]
    assert found.processes == [0, 2, 4, 0]
    assert found.padding == [(2, 6), (2, 7), (3, 2), (3, 3)]
    assert [list(found.peers(i)) for i in range(4)] == [[1], [3], [5], [1]]
    assert list(found.copies_after(0)) == [(0, 1, False)]
    assert list(found.copies_after(2)) == [(2, 5, False), (2, 6, True), (2, 7, True)]
    assert not list(place("aa", ranks(2), 2).peers(1))


def test_without_shards_only_those_that_share_tokens_wait_for_each_other() -> None:
    found = place("aab", ranks(4, context=2, shard="none"), 8)
    assert (found.groups, found.processes, found.padding) == ([[0], [1], [2]], [0, 2, 4], [])


@given(st.lists(st.sampled_from("abc")), st.integers(1, 2), st.integers(1, 2), st.booleans())
def test_followers_make_the_calls_of_whom_they_follow(
    kinds: list[str], groups: int, workers: int, sharded: bool
) -> None:
    config = ranks(groups * 2, context=2, shard="denoiser" if sharded else "none")
    found = place(kinds, config, config.cluster.ranks_per_worker * workers)
    calls = [(p, i) for i, owner in enumerate(found.processes) for p in (owner, *found.peers(i))]
    calls += [(process, ~i) for i, process in found.padding]
    by_process = [[i for p, i in calls if p == process] for process in range(groups * 2 * workers)]
    assert all(by_process[first] == by_process[first + 1] for first in range(0, len(by_process), 2))
    if sharded:
        counts = [len(by_process[first]) for first in range(0, len(by_process), 2)]
        assert all(len(set(counts[w * groups : (w + 1) * groups])) == 1 for w in range(workers))


@given(st.lists(st.sampled_from("abc")), st.integers(2, 4), st.integers(1, 3))
def test_the_ranks_of_a_worker_draw_as_much(kinds: list[str], size: int, workers: int) -> None:
    found = place(kinds, ranks(size), size * workers)
    assert [i for members in found.groups for i in members] == list(range(len(kinds)))
    drawn = [(process, kinds[i]) for i, process in enumerate(found.processes)]
    drawn += [(process, kinds[i]) for i, process in found.padding]
    for worker in range(workers):
        by_rank = [Counter(kind for process, kind in drawn if process == worker * size + r) for r in range(size)]
        assert all(counts == by_rank[0] for counts in by_rank)
    copies = [copy for i in range(len(kinds)) for copy in found.copies_after(i)]
    assert sorted((number, process, True) for number, process in found.padding) == sorted(copies)


@pytest.mark.parametrize(("name", "keys"), [("flow_grpo", {}), ("branch_grpo", {"split_steps": [0, 1]})])
def test_tasks_are_alike_where_they_need_the_same_calls(name: str, keys: dict[str, list[int]]) -> None:
    c = config(name, n=2, micro=4, **keys)
    first, second = build_algorithm(c).plan(plan_samples(c, [*PROMPTS, *PROMPTS], 1, 0))[:2]
    smaller = build_algorithm(c).plan(plan_samples(c, PROMPTS[:1], 1, 0))[0]
    assert call_pattern(first) == call_pattern(second) and (call_pattern(smaller) == call_pattern(first)) == (
        len(smaller.samples) == len(first.samples)
    )


def test_repetitions_are_found_without_a_search() -> None:
    def find(count: int) -> None:
        found = Placement(list(range(count)), [[i] for i in range(count)], [(i, 0) for i in range(count)])
        assert [list(found.copies_after(i)) for i in range(count)] == [[(i, 0, True)] for i in range(count)]

    assert executed(lambda: find(400)) < 5 * executed(lambda: find(100))

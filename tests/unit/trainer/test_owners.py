"""Which process draws which micro-batch: in turn, or in sets of which every rank of a worker has one."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training import PROMPTS, config

from gerl.algorithms import build_algorithm
from gerl.algorithms.planning import plan_samples
from gerl.config import ClusterConfig, Config, ModelConfig
from gerl.trainer.owners import kind, share


def ranks(count: int) -> Config:
    return Config(model=ModelConfig(shard="denoiser"), cluster=ClusterConfig(ranks_per_worker=count))


def test_without_shards_processes_take_turns() -> None:
    found = share("aabcc", Config(cluster=ClusterConfig(ranks_per_worker=2)), 4)
    assert (found.processes, found.sets, found.repeats) == ([0, 1, 2, 3, 0], [], [])


def test_a_set_is_of_one_kind_and_one_worker() -> None:
    found = share("aaabaa", ranks(2), 4)
    assert found.sets == [[0, 1], [2], [3], [4, 5]]
    assert found.processes == [0, 1, 2, 0, 2, 3]
    assert found.repeats == [(2, 3), (3, 1)]
    assert [found.repeated_after(i) for i in range(6)] == [[], [], [(2, 3)], [(3, 1)], [], []]


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

"""Who writes a checkpoint of trained weights."""

import threading

import pytest

from gerl.config import ClusterConfig, Config, ModelConfig
from gerl.errors import WorkerDied
from gerl.workers.fleet import CheckpointWriter, writers


def test_the_ranks_of_one_worker_write_where_they_divide_the_weights() -> None:
    cluster = ClusterConfig(ranks_per_worker=2, num_workers=2)
    divided = Config(model=ModelConfig(train="full", shard="denoiser"), cluster=cluster)
    assert [writers(divided, process) for process in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert writers(Config(model=ModelConfig(train="full"), cluster=cluster), 3) == [3]


def test_who_waits_for_a_checkpoint_asks_whether_its_writers_hang() -> None:
    go_on, asked, writer = threading.Event(), list[int](), CheckpointWriter()

    def ask() -> None:
        asked.append(len(asked))
        if len(asked) == 3:
            raise WorkerDied("no answer of worker 0")

    writer.start(lambda: assert_set(go_on), ask, 0.01)
    with pytest.raises(WorkerDied, match="no answer of worker 0"):
        writer.finish()
    assert asked == [0, 1, 2]
    go_on.set()
    writer.start(lambda: None, ask, 60.0)  # the next one comes after it
    writer.finish()
    assert len(asked) == 3


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)

"""Who writes a checkpoint of trained weights."""

from gerl.config import ClusterConfig, Config, ModelConfig
from gerl.trainer.saving import writers


def test_the_ranks_of_one_worker_write_where_they_divide_the_weights() -> None:
    cluster = ClusterConfig(ranks_per_worker=2, num_workers=2)
    divided = Config(model=ModelConfig(train="full", shard="denoiser"), cluster=cluster)
    assert [writers(divided, process) for process in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert writers(Config(model=ModelConfig(train="full"), cluster=cluster), 3) == [3]

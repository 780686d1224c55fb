"""The checks of the model before its weights are loaded, and which process does them."""

from dataclasses import replace

import pytest

from gerl.config import Config, ModelConfig
from gerl.errors import ConfigError
from gerl.workers.hybrid import HybridWorker


def worker(rank: int) -> HybridWorker:
    config = Config()
    return HybridWorker(replace(config, model=ModelConfig(compile="foo")), rank, "cpu", 1, 10)


def test_on_one_machine_the_first_process_checks_for_all() -> None:
    with pytest.raises(ConfigError, match=r"^model\.compile='foo': .*null$"):
        worker(0).check()
    worker(1).check()


def test_on_a_cluster_each_process_does_and_names_its_machine() -> None:
    for rank in range(2):
        with pytest.raises(ConfigError, match=r"^model\.compile='foo': .*null \(on [\d.:a-f]+\)$"):
            worker(rank).check(joined=True)

"""The processes that hold the model: which of them checks it before its weights are loaded."""

from dataclasses import replace

import pytest

from gerl.config import Config, ModelConfig
from gerl.errors import ConfigError
from gerl.workers.fleet import check
from gerl.workers.worker import PolicyWorker


def worker(rank: int) -> PolicyWorker:
    config = Config()
    return PolicyWorker(replace(config, model=ModelConfig(compile="foo")), rank, "cpu", 1, 10)


def test_on_one_machine_the_first_process_checks_for_all() -> None:
    with pytest.raises(ConfigError, match=r"^model\.compile='foo': .*null$"):
        check(worker(0), joined=False)
    check(worker(1), joined=False)


def test_on_a_cluster_each_process_does_and_names_its_machine() -> None:
    for rank in range(2):
        with pytest.raises(ConfigError, match=r"^model\.compile='foo': .*null \(on [\d.:a-f]+\)$"):
            check(worker(rank), joined=True)

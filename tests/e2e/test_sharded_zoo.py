"""Pipelines of the zoo with their weights divided among the ranks of a worker: what one rank draws and learns."""

from typing import Any

import pytest
from ranks import run_ranks, worst
from zoo.entries import BY_NAME

CASES = list(BY_NAME)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return worst(run_ranks(tmp_path_factory.mktemp("ranks"), 2, "zoo", *CASES))


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_in_parts_draws_and_trains_as_the_whole(name: str, found: dict[str, dict[str, Any]]) -> None:
    assert found[name]["off"] <= 0

"""The reward manager in this process; its processes over Ray, and how it outlives them, are in tests/e2e."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gerl.cluster import Cluster, Pending
from gerl.config import ClusterConfig, RewardConfig, ScorerConfig
from gerl.protocol import Images, Prompt, Sample, Scores
from gerl.rewards.manager import RewardManager

SCORERS = """
def compute_score(images, prompts, metadata):
    return [float(row["value"]) for row in metadata]

def broken(images, prompts, metadata):
    return [float("nan") if row.get("broken") else 1.0 for row in metadata]

def spread(images, prompts, metadata):
    assert len(set(prompts)) == 1
    values = [row["value"] for row in metadata]
    return {"spread": [max(values) - min(values)] * len(values), "place": [sorted(values).index(v) for v in values]}

spread.groupwise = True

def flaky(images, prompts, metadata, log):
    with open(log, "a") as file:
        file.write("x")
    if len(open(log).read()) == 1:
        raise OSError("lost")
    return [1.0] * len(images)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("scorers") / "mine.py"
    path.write_text(SCORERS)
    return str(path)


def manager(retries: int = 0, **scorers: ScorerConfig) -> RewardManager:
    return RewardManager(RewardConfig(scorers, retries=retries), Cluster(ClusterConfig(launcher="local")))


def samples(*values: tuple[int, float], **metadata: Any) -> list[Sample]:
    """Samples of (prompt, value)."""
    return [Sample(Prompt(p, f"p{p}", {"value": v, **metadata}), i, 0, 1) for i, (p, v) in enumerate(values)]


def scored(made: RewardManager, *batches: list[Sample], held_out: bool = False) -> list[Scores]:
    scoring = made.open(batches, held_out)
    for i, batch in enumerate(batches):
        scoring.add(i, Pending("worker", value=Images(i, np.zeros((len(batch), 4, 4, 3), np.uint8), 0.0)))
    return scoring.finish()


def test_totals_are_weighted_sums_of_shaped_scores(file: str) -> None:
    made = manager(
        a=ScorerConfig(2.0, file),
        b=ScorerConfig(-1.0, file, scale=10.0, offset=-5.0, clip=[0.0, 20.0]),
        c=ScorerConfig(0.0, file),
    )
    (first, second) = scored(made, samples((0, 0.0), (0, 1.0)), samples((1, 3.0)))
    assert first.totals == [0.0, 2.0 - 5.0] and second.totals == [6.0 - 20.0]
    assert first.by_scorer == {name: [0.0, 1.0] for name in "abc"}  # as the scorer said
    assert first.failures == [[], []]


def test_a_failure_leaves_no_total_and_a_watched_one_changes_nothing(file: str) -> None:
    weighted = {"a": ScorerConfig(1.0, file), "bad": ScorerConfig(1.0, file, "broken")}
    rows = samples((0, 1.0)) + samples((0, 2.0), broken=True)
    (found,) = scored(manager(**weighted), rows)
    assert found.totals == [2.0, None] and found.by_scorer == {"a": [1.0, 2.0], "bad": [1.0, None]}
    assert [[f.scorer for f in row] for row in found.failures] == [[], ["bad"]]
    (found,) = scored(manager(bad=ScorerConfig(0.0, file, "broken"), a=ScorerConfig(1.0, file)), rows)
    assert found.totals == [1.0, 2.0] and [len(row) for row in found.failures] == [0, 1]


def test_a_groupwise_scorer_sees_each_group_at_once_across_micro_batches(file: str) -> None:
    made = manager(group=ScorerConfig(1.0, file, "spread"), a=ScorerConfig(0.0, file))
    found = scored(made, samples((0, 1.0), (1, 5.0)), samples((0, 4.0), (1, 5.5)), samples((0, 2.0)))
    assert [s.totals for s in found] == [[3.0, 0.5], [3.0, 0.5], [3.0]]
    assert [s.by_scorer["group/place"] for s in found] == [[0.0, 0.0], [2.0, 1.0], [1.0]]
    assert list(found[0].by_scorer) == ["group", "group/place", "a"]


def test_the_data_source_of_a_row_picks_its_scorers(file: str) -> None:
    made = manager(
        text=ScorerConfig(1.0, file, data_sources=["signs", "pages"]),
        taste=ScorerConfig(10.0, file, data_sources=["photos"]),
        all=ScorerConfig(0.0, file),
    )
    mixed = samples((0, 1.0), data_source="signs") + samples((1, 2.0), data_source="photos")
    (found,) = scored(made, mixed)
    assert found.totals == [1.0, 20.0] and found.failures == [[], []]
    assert found.by_scorer == {"text": [1.0, None], "taste": [None, 2.0], "all": [1.0, 2.0]}


def test_a_watched_scorer_may_look_at_one_part_of_a_run_only(file: str, tmp_path: Path) -> None:
    def watching(during: Any) -> ScorerConfig:
        return ScorerConfig(0.0, file, "flaky", {"log": str(tmp_path / during)}, during=during)

    made = manager(1, a=ScorerConfig(1.0, file), late=watching("validation"), early=watching("training"))
    (found,) = scored(made, samples((0, 1.0), (0, 2.0)))
    assert list(found.by_scorer) == ["a", "early"] and found.totals == [1.0, 2.0]
    assert not (tmp_path / "validation").exists()  # 0 calls in training
    (found,) = scored(made, samples((0, 1.0), (0, 2.0)), held_out=True)
    assert found.by_scorer == {"a": [1.0, 2.0], "late": [1.0, 1.0]} and found.totals == [1.0, 2.0]
    assert len((tmp_path / "validation").read_text()) == len((tmp_path / "training").read_text()) == 2  # one a retry


@given(order=st.permutations(range(6)), size=st.integers(1, 6))
def test_neither_order_nor_size_of_the_micro_batches_changes_a_score(file: str, order: list[int], size: int) -> None:
    rows = samples(*((i % 2, float(i) ** 2) for i in range(6)))
    shuffled = [rows[i] for i in order]
    batches = [shuffled[i : i + size] for i in range(0, 6, size)]
    made = manager(a=ScorerConfig(1.0, file), group=ScorerConfig(0.1, file, "spread"))
    totals = [t for s in scored(made, *batches) for t in s.totals]
    assert dict(zip(order, totals, strict=True)) == dict(enumerate(scored(made, rows)[0].totals))


def test_retries_are_logged_and_counted(file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = manager(1, f=ScorerConfig(1.0, file, "flaky", {"log": str(tmp_path / "log")}))
    with caplog.at_level(logging.WARNING):
        (found,) = scored(made, samples((0, 1.0), (0, 2.0)))
    assert found.totals == [1.0, 1.0]
    place = f'({file}, line 19: raise OSError("lost"))'
    assert caplog.messages == [f"scorer f was called again after it failed for 2 of 2 images: OSError: lost {place}"]
    metrics = made.metrics()
    names = ("latency_s", "queue_s", "images_per_s", "retries", "restarts", "warnings")
    assert set(metrics) == {f"scorer/f/{m}" for m in names}
    assert metrics["scorer/f/retries"] == 1 and metrics["scorer/f/latency_s"] > 0
    assert set(made.metrics().values()) == {0.0}  # a new count


def test_scorers_on_one_model_share_their_processes(file: str) -> None:
    kwargs = {"model": "some/clip", "device": "cpu"}
    alike = manager(clipscore=ScorerConfig(kwargs=kwargs), image_similarity=ScorerConfig(kwargs=kwargs))
    assert alike.pools["clipscore"] is alike.pools["image_similarity"]
    apart = manager(
        clipscore=ScorerConfig(kwargs=kwargs),
        image_similarity=ScorerConfig(kwargs=kwargs, replicas=2),
        a=ScorerConfig(1.0, file),
        b=ScorerConfig(1.0, file),
    )
    assert len({id(pool) for pool in apart.pools.values()}) == 4

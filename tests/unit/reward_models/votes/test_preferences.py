import importlib.util
import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from reward_models.votes.ballots import Preference, write_preferences

ROW = Preference(
    run="signs/now",
    step=3,
    prompt_id=7,
    prompt="ein Fuchs, größer",
    images=["images/a/0.png", "images/a/1.png"],
    sources=["images/a/source_0.png"],
    seeds=[2**63 - 1, 0],
    ranks=[2, 1],
    voter="anna",
    time=1795520771.25,
    used=True,
)


def test_the_parquet_file_has_the_columns_of_the_docs(tmp_path: Path) -> None:
    path = write_preferences(tmp_path, [ROW, ROW])
    assert path == tmp_path / "preferences.parquet"
    table = parquet.read_table(path)
    columns = dict(zip(table.schema.names, map(str, table.schema.types), strict=True))
    numbers, texts = "list<element: int64>", "list<element: string>"
    assert columns == {
        **{"run": "string", "step": "int64", "prompt_id": "int64", "prompt": "string", "images": texts},
        **{"sources": texts, "seeds": numbers, "ranks": numbers, "voter": "string"},
        **{"time": "timestamp[us, tz=UTC]", "used": "bool"},
    }
    docs = (Path(__file__).resolve().parents[4] / "docs" / "vote.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in docs for name in columns)
    assert table.to_pylist()[1] == asdict(ROW) | {"time": datetime.fromtimestamp(ROW.time, UTC)}


def test_without_pyarrow_it_is_lines_of_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = write_preferences(tmp_path, [ROW])
    assert path == tmp_path / "preferences.jsonl" and json.loads(path.read_text(encoding="utf-8")) == asdict(ROW)


def test_without_votes_there_is_no_file(tmp_path: Path) -> None:
    assert write_preferences(tmp_path, []) is None and not list(tmp_path.iterdir())

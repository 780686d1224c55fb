"""Data sets: local ones in this process, and those of a stand-in for the hub in processes of their own."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from drills import more
from hub_server import Server, serving
from PIL import Image

from gerl.data.hub import hub_rows
from gerl.errors import DataError
from gerl.protocol import Prompt

READ = """
import json, sys, time
from gerl.data.hub import hub_rows
from gerl.errors import DataError
for source, stream in json.loads(sys.argv[1]):
    start = time.monotonic()
    try:
        print(len(hub_rows(source, "caption", (), stream).rows))
    except DataError as error:
        print(error)
    assert time.monotonic() - start < 15
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))


def picture(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, "png")
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set of two splits with pictures, as the hub has them in Parquet files."""
    table = pyarrow.table(
        {
            "caption": [f"sign {n}" for n in range(5)],
            "word": ["A", "B", None, "D", "E"],
            "photo": [{"bytes": picture(colour), "path": None} for colour in ("red", "lime", "blue", "red", "white")],
            "raw": [b"x"] * 5,
        }
    )
    features = datasets.Features(
        {
            "caption": datasets.Value("string"),
            "word": datasets.Value("string"),
            "photo": datasets.Image(),
            "raw": datasets.Value("binary"),
        }
    )
    table = table.cast(features.arrow_schema)
    (tmp_path / "set").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "set" / "train.parquet")
    pyarrow.parquet.write_table(table.slice(0, 2), tmp_path / "set" / "test.parquet")
    return tmp_path / "set"


def test_rows_of_a_split_with_their_columns(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="gerl"):
        rows = hub_rows(f"hf:{folder}[train]", "caption", (("text", "word"),)).rows
    first, second, third = (prompt for _, prompt in rows[:3])
    assert len(rows) == 5 and first == Prompt(0, "sign 0", {"text": "A"}) and second.metadata == {"text": "B"}
    assert third == Prompt(2, "sign 2", {})  # an empty cell is no metadata
    assert "photo, raw" in caplog.text and "data.columns={image: photo}" in caplog.text
    assert [p.text for _, p in hub_rows(f"hf:{folder}[test]", "caption").rows] == ["sign 0", "sign 1"]
    assert len(hub_rows(f"hf:{folder}[train[1:4]]", "caption").rows) == 3
    assert len(hub_rows(f"hf:{folder}[train+test]", "caption").rows) == 7


def test_pictures_are_files_named_by_their_content(folder: Path) -> None:
    rows = hub_rows(f"hf:{folder}[train]", "caption", (("image", "photo"),)).rows
    paths = [Path(prompt.metadata["image"]) for _, prompt in rows]
    assert [path.read_bytes() for path in paths] == [picture(c) for c in ("red", "lime", "blue", "red", "white")]
    assert paths[0] == paths[3] and len(set(paths)) == 4 and all(path.suffix == ".png" for path in paths)
    again = hub_rows(f"hf:{folder}[train]", "caption", (("image", "photo"),)).rows
    assert again == rows


def test_pictures_beside_a_table_are_its_files(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for n in range(2):
        (tmp_path / "set" / f"{n}.png").write_bytes(picture("red"))
    lines = [json.dumps({"file_name": f"{n}.png", "caption": f"edit {n}"}) for n in range(2)]
    (tmp_path / "set" / "metadata.jsonl").write_text("\n".join(lines))
    rows = hub_rows(f"hf:{tmp_path / 'set'}", "caption", (("image", "image"),)).rows
    assert [prompt.metadata["image"] for _, prompt in rows] == [str(tmp_path / "set" / f"{n}.png") for n in range(2)]


def test_a_stream_is_the_first_rows(folder: Path) -> None:
    whole = hub_rows(f"hf:{folder}[train]", "caption")
    some = hub_rows(f"hf:{folder}[train]", "caption", (), 3)
    assert some.rows == whole.rows[:3] and some.digest != whole.digest
    assert hub_rows(f"hf:{folder}[train]", "caption", (), 99) == whole


def test_the_digest_is_of_the_rows(folder: Path) -> None:
    whole = hub_rows(f"hf:{folder}[train]", "caption")
    assert hub_rows(f"hf:{folder}[train]", "caption", (("text", "word"),)).digest == whole.digest
    copy = folder.parent / "copy"
    copy.mkdir()
    (copy / "train.parquet").write_bytes((folder / "train.parquet").read_bytes())
    assert hub_rows(f"hf:{copy}", "caption").digest == whole.digest
    table = pyarrow.parquet.read_table(folder / "train.parquet")
    words = pyarrow.array(["A", "B", None, "D", "F"])
    pyarrow.parquet.write_table(table.set_column(1, "word", words), copy / "train.parquet")
    assert hub_rows(f"hf:{copy}", "caption").digest != whole.digest


@pytest.mark.parametrize(
    ("source", "key", "columns", "stream", "message"),
    [
        ("hf:FOLDER", "caption", (), None, r"splits train, test: .*hf:.*\[train\]"),
        ("hf:FOLDER[dev]", "caption", (), None, "no split dev, only train, test"),
        ("hf:FOLDER[train]", "prompt", (), None, r"no column 'prompt', only caption, word.*data\.prompt_key"),
        ("hf:FOLDER[train]", "caption", (("text", "sign"),), None, r"no column 'sign', only.*data\.columns"),
        ("hf:FOLDER[train]", "word", (), None, r"row 3 has no 'word'"),
        ("hf:FOLDER[train[:2]]", "caption", (), 2, r"data\.stream=2 .*train\[:2\].*remove one"),
        ("hf:FOLDERS[train]", "caption", (), None, "does not exist"),
        ("hf:FOLDER/train.parquet", "caption", (), None, "remove hf:"),
    ],
)
def test_what_is_wrong_is_a_sentence(
    folder: Path, source: str, key: str, columns: tuple[tuple[str, str], ...], stream: int | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        hub_rows(source.replace("FOLDER", str(folder)), key, columns, stream)


def test_damage_is_a_sentence(folder: Path) -> None:
    (folder / "train.parquet").write_bytes(b"hello")
    with pytest.raises(DataError, match=r"datasets cannot read it .*correct"):
        hub_rows(f"hf:{folder}[train]", "caption")


def test_without_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'gerl\[hub\]'"):
        hub_rows(f"hf:{folder}[train]", "caption")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("hub")
    for name in ("signs/data", "gated", "code"):
        (root / "datasets" / "owner" / name).mkdir(parents=True)
    table = pyarrow.table({"caption": ["a", "b", "c"]})
    pyarrow.parquet.write_table(table, root / "datasets/owner/signs/data/train-00000-of-00001.parquet")
    pyarrow.parquet.write_table(table.slice(0, 1), root / "datasets/owner/signs/data/test-00000-of-00001.parquet")
    (root / "datasets/owner/gated/a.csv").write_text("caption\na\n")
    (root / "datasets/owner/code/code.py").write_text("raise RuntimeError('it was run')\n")
    with serving(root) as server:
        yield server


def read(hub: Server, home: Path, *wanted: tuple[str, int | None], **environment: str) -> list[str]:
    """The number of rows of each data set, or what is wrong with it."""
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(wanted)],
        env=hub.environment(home, **environment), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@more
def test_data_sets_of_the_hub_and_of_the_cache_without_it(hub: Server, tmp_path: Path) -> None:
    names = ["[train]", "[dev]", "/other[train]", "@other[train]", "@main[train]"]
    others = [("hf:owner/gated[train]", None), ("hf:owner/none[train]", None), ("hf:owner/code[train]", None)]
    found = read(hub, tmp_path, *((f"hf:owner/signs{name}", None) for name in names), *others)
    whole, split, configuration, revision, main, gated, none, code = found
    assert whole == main == "3" and "no split dev, only train, test" in split
    assert "hf:owner/signs/default[train]" in configuration and "no revision other" in revision
    assert f"{hub.address('datasets/owner/gated')}" in gated and "hf auth login" in gated
    assert "no such data set" in none and "hf auth login" in none and "is a script" in code

    hub.requests.clear()
    train, absent = ("hf:owner/signs[train]", None), ("hf:owner/none[train]", None)
    cached, none = read(hub, tmp_path, train, absent, HF_HUB_OFFLINE="1")
    assert cached == "3" and "HF_HUB_OFFLINE" in none and hub.requests == []
    cached, none = read(hub, tmp_path, train, absent, HF_ENDPOINT="http://127.0.0.1:9")
    assert cached == "3" and "127.0.0.1:9 cannot be reached" in none and "Connection refused" in none


@more
def test_a_stream_downloads_nothing_else(hub: Server, tmp_path: Path) -> None:
    hub.requests.clear()
    assert read(hub, tmp_path, ("hf:owner/signs[train]", 2)) == ["2"]
    assert not any(request.startswith("GET") and "test-00000" in request for request in hub.requests)
    assert any(request.startswith("GET") and "train-00000" in request for request in hub.requests)

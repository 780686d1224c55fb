import hashlib
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gerl.errors import DataError
from gerl.protocol import Prompt
from gerl.utils.dataset import SHIPPED, PromptSchedule, fingerprint, load_prompts


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_txt_skips_blank_lines_and_counts_on(tmp_path: Path) -> None:
    prompts = load_prompts(write(tmp_path, "a.txt", "\ufeffa red cube\r\n\n  a café \n\t\na red cube"))
    assert prompts == [Prompt(i, text) for i, text in enumerate(["a red cube", "a café", "a red cube"])]


def test_jsonl_other_columns_are_metadata(tmp_path: Path) -> None:
    rows = '{"caption": "a sign\u2028", "text": "A", "n": [1]}\n\n{"caption": "b", "text": "B"}\n'
    prompts = load_prompts(write(tmp_path, "a.jsonl", rows), prompt_key="caption")
    assert prompts == [Prompt(0, "a sign", {"text": "A", "n": [1]}), Prompt(1, "b", {"text": "B"})]


def test_parquet_equals_jsonl(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "text": "A", "n": {"count": 2}}, {"prompt": "b", "text": None, "n": {"count": 3}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    prompts = load_prompts(str(tmp_path / "a.parquet"))
    assert prompts == [Prompt(i, str(row.pop("prompt")), row) for i, row in enumerate(rows)]


def test_relative_path_and_shipped_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "mine.txt", "a")
    monkeypatch.chdir(tmp_path)
    assert load_prompts("mine.txt")[0].text == "a"
    shipped = load_prompts("signs_train")
    assert len(shipped) == len({p.id for p in shipped}) > 100
    assert fingerprint("signs_train") == hashlib.sha256((SHIPPED / "signs_train.txt").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", r"a\.txt .*at least one"),
        ("a.txt", " \n\n", r"a\.txt .*at least one"),
        ("a.txt", b"a\xff", r"a\.txt .*byte 1.*UTF-8"),
        ("a.jsonl", "", r"a\.jsonl .*at least one"),
        ("a.csv", "a", r"a\.csv .*'\.csv'.*\.txt, \.jsonl or \.parquet"),
        ("a.jsonl", '{"prompt": "a"}\n\n{"text": "b"}', r"a\.jsonl:3 .*'prompt'.*text.*data\.prompt_key"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": " "}', r"a\.jsonl:2 .*prompt=' '.*not empty"),
        ("a.jsonl", '{"prompt": 5}', r"a\.jsonl:1 .*prompt=5.*text"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": }', r"a\.jsonl:2 .*column 12.*correct"),
        ("a.jsonl", '"a red cube"', r'a\.jsonl:1 .*{"prompt": '),
        ("a.parquet", "prompt", r"a\.parquet .*Parquet.*write it anew"),
    ],
)
def test_bad_file_is_one_sentence(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_prompts(write(tmp_path, name, content))


def test_bad_parquet_row_is_named(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 2 .*prompt=None"):
        load_prompts(str(tmp_path / "a.parquet"))


def test_missing_file_suggests_near_names(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", "")
    with pytest.raises(DataError, match=r"trian\.jsonl .*did you mean train\.jsonl\?"):
        load_prompts(str(tmp_path / "trian.jsonl"))
    with pytest.raises(DataError, match=r"folder .*no: correct"):
        load_prompts(str(tmp_path / "no" / "train.jsonl"))
    with pytest.raises(DataError, match=r"'signs'.*signs_train, signs_val"):
        load_prompts("signs")
    with pytest.raises(DataError, match=r"\.txt, \.jsonl or \.parquet"):
        fingerprint(str(tmp_path))


schedules = st.builds(PromptSchedule, st.integers(1, 40), st.integers(1, 45), st.booleans(), st.integers(0, 2**70))


@given(schedules, st.integers(0, 5))
def test_an_epoch_is_a_permutation_in_batches(schedule: PromptSchedule, epoch: int) -> None:
    first = epoch * schedule.steps_per_epoch
    steps = range(first, first + schedule.steps_per_epoch)
    batches = [schedule.batch(step) for step in reversed(steps)][::-1]  # any order: there is no state
    assert sorted(i for batch in batches for i in batch) == list(range(schedule.count))
    assert all(len(batch) == schedule.per_step for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= schedule.per_step
    assert {schedule.epoch(step) for step in steps} == {epoch}
    assert schedule.shuffle or batches[0][0] == 0


def test_epochs_and_seeds_have_their_own_order() -> None:
    orders = [PromptSchedule(50, 50, True, seed).batch(step) for seed in (0, 1) for step in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert PromptSchedule(3, 2, False, 0).batch(3) == [2]

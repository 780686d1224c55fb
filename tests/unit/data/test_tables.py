import codecs
import hashlib
import io
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from gerl.config import Config, RewardConfig, ScorerConfig
from gerl.data.tables import SHIPPED, fingerprint, load_prompts, unused_columns
from gerl.errors import DataError
from gerl.protocol import Prompt


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
        ("a.txt", b"a\xff", r"a\.txt:1 .*byte 1.*UTF-8"),
        ("a.jsonl", "", r"a\.jsonl .*at least one"),
        ("a.doc", "a", r"a\.doc .*'\.doc'.*\.txt, \.jsonl, \.csv or \.parquet"),
        ("a.txt", "a\nb\0", r"a\.txt:2 .*NUL byte"),
        ("a.txt", "a\nb".encode("utf-16-le"), r"a\.txt:1 .*NUL byte.*UTF-8"),
        ("a.txt", codecs.BOM_UTF16_LE + b"a", r"a\.txt:1 .*save it as UTF-8"),
        ("a.txt", "a\nb\u2028c", r"a\.txt:2 .*U\+2028.*plain line end"),
        ("a.txt", "a\x85b", r"a\.txt:1 .*U\+0085"),
        ("a.txt", "a\vb", r"a\.txt:1 .*U\+000B"),
        (
            "a.jsonl",
            '{"prompt": "a"}\n{"prompt": "b", "n": %s}' % ("[" * 5000),
            r"a\.jsonl:2 .*(32 nested objects or lists|not valid JSON).*corr",
        ),
        (
            "a.jsonl",
            '{"prompt": "a", "n": ' + "[" * 99 + "]" * 99 + "}",
            r"a\.jsonl:1 .*32 nested objects or lists.*corr",
        ),
        ("a.jsonl", '{"prompt": "a", "n": %s}' % ("1" * 5000), r"a\.jsonl:1 .*digits.*correct"),
        ("a.jsonl", '{"prompt": "\\ud800"}', r"a\.jsonl:1 .*unpaired surrogate.*correct"),
        ("a.jsonl", '{"prompt": "a", "n": [{"\\udfff": 1}]}', r"a\.jsonl:1 .*unpaired surrogate.*correct"),
        ("a.jsonl", '{"prompt": "\\u0000"}', r"a\.jsonl:1 .*without NUL"),
        ("a.jsonl", '{"prompt": "a"}\n' + "\0" * 9, r"a\.jsonl:2 has a NUL byte.*recreate it"),
        ("a.csv", "", r"a\.csv .*at least one"),
        ("a.csv", "prompt\n", r"a\.csv .*at least one"),
        ("a.csv", "caption\na red cube", r"a\.csv:1 .*'prompt'.*caption.*data\.prompt_key"),
        ("a.csv", "prompt,n\na,1\na, b,1", r"a\.csv:3 .*more cells.*quote"),
        ("a.csv", 'prompt\n"a', r"a\.csv:2 .*correct it"),
        ("a.csv", "prompt,n\n,1", r"a\.csv:2 .*prompt"),
        ("a.csv", 'prompt,n\n"a\nb",1\n"c\nd",1,2', r"a\.csv:4 .*more cells"),
        ("a.csv", "prompt,n,prompt\na,1,b", r"a\.csv:1 has 'prompt' twice"),
        ("a.csv", "prompt,n, n\na,1,b", r"a\.csv:1 has 'n' twice"),
        ("a.csv", 'prompt;text\n"a, b";A', r"a\.csv:1 .*semicolons"),
        ("a.csv", "n\tprompt\n1\ta", r"a\.csv:1 .*tabs"),
        ("a.csv", "n|prompt\n1|a", r"a\.csv:1 .*bars"),
        ("a.csv", 'a red sign that reads "A"\na cat', r"a\.csv:1 .*header row above it"),
        ("a.csv", "prompt\na\0b", r"a\.csv:2 .*NUL byte"),
        ("a.jsonl", '{"prompt": "a", "n": 1, "prompt": "b"}', r"a\.jsonl:1 has 'prompt' twice"),
        ("a.jsonl", '{"prompt": "a", "n": {"x": 1, "x": 2}}', r"a\.jsonl:1 has 'x' twice"),
        ("a.jsonl", '[\n{"prompt": "a"},\n{"prompt": "b"}]', r"a\.jsonl:1 begins a list.*one object per line"),
        ("a.jsonl", '{\n"prompt": "a"\n}', r"a\.jsonl:1 begins a list or an object"),
        ("a.csv", "prompt\né".encode("latin-1"), r"a\.csv:2 .*byte 7.*UTF-8"),
        ("a.jsonl", '{"prompt": "a"}\n\n{"text": "b"}', r"a\.jsonl:3 .*'prompt'.*text.*data\.prompt_key"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": " "}', r"a\.jsonl:2 .*prompt=' '.*non-empty"),
        ("a.jsonl", '{"prompt": 5}', r"a\.jsonl:1 .*prompt=5.*string"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": }', r"a\.jsonl:2 .*column 12.*correct"),
        ("a.jsonl", '"a red cube"', r'a\.jsonl:1 .*{"prompt": '),
        ("a.parquet", "prompt", r"a\.parquet .*Parquet.*recreate it"),
    ],
)
def test_bad_file_is_one_sentence(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_prompts(write(tmp_path, name, content))


def test_csv_equals_jsonl_and_an_empty_cell_is_no_metadata(tmp_path: Path) -> None:
    table = '\ufeffprompt,text,style\r\n"a red cube, lit",A,\r\n"two\nlines","say ""B""",oil\r\n'
    assert load_prompts(write(tmp_path, "a.csv", table)) == [
        Prompt(0, "a red cube, lit", {"text": "A"}),
        Prompt(1, "two\nlines", {"text": 'say "B"', "style": "oil"}),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_line_ends_and_encodings_of_other_programs_are_read(tmp_path: Path, end: str, encoding: str) -> None:
    expected = [Prompt(0, "a café"), Prompt(1, "b")]
    for name, rows in (
        ("a.txt", ["a café", "", "b\u2028", "", ""]),
        ("a.jsonl", ['{"prompt": "a café"}', '{"prompt": "b"}', "", ""]),
        ("a.csv", ["prompt, text,", "a café,,", ",,", "b", ",,", ""]),
    ):
        assert load_prompts(write(tmp_path, name, end.join(rows).encode(encoding))) == expected


def test_files_put_behind_each_other_have_no_mark_in_a_prompt(tmp_path: Path) -> None:
    assert load_prompts(write(tmp_path, "a.txt", "\ufeffa\n\ufeffb\n")) == [Prompt(0, "a"), Prompt(1, "b")]


def test_a_header_with_spaces_and_the_index_of_pandas(tmp_path: Path) -> None:
    table = ",prompt, text\n0,a,A\n1,b,\n"
    assert load_prompts(write(tmp_path, "a.csv", table)) == [Prompt(0, "a", {"text": "A"}), Prompt(1, "b")]


def test_a_parquet_file_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["prompt", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet has 'prompt' twice"):
        load_prompts(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path, name: str) -> None:
    lines = {"a.txt": "a", "a.jsonl": '{"prompt": "a"}', "a.csv": "prompt\na"}
    assert load_prompts(write(tmp_path, name, "\ufeff" + lines[name])) == [Prompt(0, "a")]


def parquet(folder: Path, **columns: object) -> str:
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
    return str(folder / "a.parquet")


def test_bad_parquet_row_is_named(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 2 .*prompt=None"):
        load_prompts(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array([0, 2**50], pyarrow.timestamp("s")),
        pyarrow.array([0, 2**30], pyarrow.date32()),
        pyarrow.array([0, 2**60], pyarrow.duration("s")),
        pyarrow.array([None, 0], pyarrow.timestamp("us", tz="Mars/Base")),
    ],
    ids=["time", "date", "duration", "zone"],
)
def test_a_parquet_value_that_python_has_not_is_named_with_its_row(tmp_path: Path, column: pyarrow.Array) -> None:
    with pytest.raises(DataError, match=r"a\.parquet, row 2: when cannot be read.*remove the column"):
        load_prompts(parquet(tmp_path, prompt=["a", "b"], when=column))


def test_parquet_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    ends = pyarrow.py_buffer(b"".join(i.to_bytes(4, "little") for i in range(3)))
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, ends, pyarrow.py_buffer(b"a\xff")])
    with pytest.raises(DataError, match=r"a\.parquet is not a readable Parquet file.*UTF8.*recreate it"):
        load_prompts(parquet(tmp_path, prompt=broken))


def test_a_parquet_file_of_billions_of_rows_is_refused_before_they_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gerl.data.tables.MOST_ROWS", 100)
    assert len(load_prompts(parquet(tmp_path, prompt=["a"] * 100))) == 100
    with pytest.raises(DataError, match=r"a\.parquet has 101 rows: at most 100 are supported"):
        load_prompts(parquet(tmp_path, prompt=["a"] * 101))


def good_files(draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """Prompt files of every format, by suffix."""
    rows = [{"prompt": f"a {'x' * draw.randrange(9)} {i}", "n": i, "tags": [{"k": "v" * i}]} for i in range(8)]
    while True:
        file = io.BytesIO()
        codec = draw.choice(["none", "snappy", "zstd", "gzip"])
        options = {"use_dictionary": draw.random() < 0.5, "data_page_version": draw.choice(["1.0", "2.0"])}
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, compression=codec, **options)
        yield ".parquet", file.getvalue()
        yield ".jsonl", "\n".join(map(json.dumps, rows)).encode()
        yield ".csv", b"prompt,n\n" + "\n".join(f'"{row["prompt"]}",{row["n"]}' for row in rows).encode()
        yield ".txt", "\n".join(str(row["prompt"]) for row in rows).encode()


def damaged(good: bytes, draw: random.Random) -> bytes:
    """The file cut short, with bytes changed, zeroed, or with a piece twice."""
    first, second = sorted(draw.sample(range(len(good)), 2))
    match draw.randrange(4):
        case 0:
            return good[:first]
        case 1:
            changed = bytearray(good)
            for _ in range(draw.randrange(1, 9)):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            return bytes(changed)
        case 2:
            return good[:first] + b"\0" * (second - first) + good[second:]
        case _:
            return good[:second] + good[first:]


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_file_is_read_or_one_sentence_that_names_it(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    refused = 0
    for suffix, good in itertools.islice(good_files(draw), 120):
        path = tmp_path / ("damaged" + suffix)
        path.write_bytes(damaged(good, draw))
        try:
            prompts = load_prompts(str(path))
            assert prompts and all(prompt.text.encode() and "\0" not in prompt.text for prompt in prompts)
        except DataError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 700
    assert refused > 30


@pytest.mark.parametrize("name", ["x" * 300 + ".txt", "~nobody-of-this-name/a.txt", "a\0.txt"])
def test_an_impossible_name_is_one_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"prompt file .*correct the path"):
        load_prompts(name)


def test_only_names_that_are_alike_are_suggested(tmp_path: Path) -> None:
    for name in ("single.txt", "unicode.txt", "noquotes.txt", "held_out.jsonl"):
        write(tmp_path, name, "")
    for name in ("nofile.txt", "zzz.txt"):
        with pytest.raises(DataError, match="correct the path") as error:
            load_prompts(str(tmp_path / name))
        assert "did you mean" not in str(error.value)
    with pytest.raises(DataError, match=r"did you mean held_out\.jsonl\?"):
        load_prompts(str(tmp_path / "heldout.txt"))


def test_missing_file_suggests_near_names(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", "")
    with pytest.raises(DataError, match=r"trian\.jsonl .*did you mean train\.jsonl\?"):
        load_prompts(str(tmp_path / "trian.jsonl"))
    with pytest.raises(DataError, match=r"folder .*no: correct"):
        load_prompts(str(tmp_path / "no" / "train.jsonl"))
    with pytest.raises(DataError, match=r"'signs'.*signs_train, signs_val"):
        load_prompts("signs")
    with pytest.raises(DataError, match=r"\.txt, \.jsonl, \.csv or \.parquet"):
        fingerprint(str(tmp_path))


ARGUMENTS = ["prompt", "negative_prompt", "height", "num_inference_steps", "image", "ip_adapter_image", "strength"]


def said(accepted: list[str] = ARGUMENTS, scorer: str = "sharpness", **row: Any) -> str:
    config = Config(reward=RewardConfig({scorer: ScorerConfig()}))
    return "".join(unused_columns([Prompt(0, "a"), Prompt(1, "b", row)], config, accepted))


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ({"negative_prompt": "blurry"}, "negative_prompt (sampling.call.negative_prompt applies to all prompts)"),
        ({"seed": 3}, "seed (noise is sampled from trainer.seed)"),
        ({"height": 3}, "sampling.height"),
        ({"steps": 20}, "sampling.num_inference_steps"),
        ({"cfg": 7}, "sampling.guidance_scale"),
        ({"strength": 0.5}, "sampling.call.strength"),
        ({"ip_adapter_image": "a.png"}, "pictures are given in image, mask_image, control_image"),
        ({"mask": "a.png"}, "data.columns={mask_image: mask}"),
        ({"mask_image": "a.png"}, "takes no such argument"),
        ({"caption": "a long one"}, "data.prompt_key"),
        ({"text": "A"}, "data.prompt_key"),
    ],
)
def test_a_column_with_a_known_name_is_named_with_what_is_read_instead(row: dict[str, Any], remedy: str) -> None:
    assert remedy in said(**row) and said(**row).startswith("prompt columns")


def test_what_is_used_or_has_no_known_name_is_not_mentioned() -> None:
    assert said(image="a.png", tag="counting", include=[1], seed=None, data_source="x", turn=1) == ""
    assert said(scorer="ocr", text="A") == ""
    assert "takes no such argument" in said(["prompt"], negative_prompt="blurry")
    assert said(seed=1, steps=2).count("columns") == 1

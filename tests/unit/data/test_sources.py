import hashlib
import itertools
import json
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import datasets
import hypothesis
import pytest
from hypothesis import strategies as st
from PIL import Image

from gerl.api.training import write_prompts
from gerl.config import Config, DataConfig, ValidationConfig
from gerl.config.blocks import HubParts, hub_parts, sources
from gerl.config.user_files import load_module
from gerl.data.sources import (
    check_images,
    check_mixture,
    digest,
    filled,
    hold_out,
    limit_prompts,
    load,
    load_split,
    log_prompts,
    max_prompts_per_step,
    may_have_pictures,
    weights,
)
from gerl.errors import ConfigError, DataError
from gerl.protocol import Prompt
from reward_models.scorers.ocr import OcrScorer


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with two files and a data set."""
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"caption": "three", "word": "W", "text": "T"}\n{"caption": "four"}\n')
    (tmp_path / "set").mkdir()
    rows = [{"prompt": f"row {n}", "word": "W"} for n in range(4)]
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@hypothesis.given(
    st.lists(st.text(alphabet="abc", max_size=2), max_size=40),
    st.sampled_from([0.01, 0.1, 0.25, 0.5]),
    st.randoms(use_true_random=False),
)
def test_held_out_prompts_are_a_share_that_is_never_trained_on(texts: list[str], share: float, random: Any) -> None:
    prompts = [Prompt(i, text) for i, text in enumerate(texts)]
    trained, held_out = hold_out(prompts, share)
    assert not {p.text for p in trained} & {p.text for p in held_out}
    assert sorted(p.text for p in (*trained, *held_out)) == sorted(texts)
    assert len({p.text for p in held_out}) == int(share * len(set(texts)))
    for side in (trained, held_out):
        assert [p.id for p in side] == list(range(len(side)))
        assert [p.text for p in side] == [t for t in texts if t in {p.text for p in side}]
    random.shuffle(prompts)  # the same prompts, whatever their order
    again = hold_out([replace(p, id=i) for i, p in enumerate(prompts)], share)[1]
    assert {p.text for p in again} == {p.text for p in held_out}


def test_of_many_prompts_no_more_are_held_out_than_a_validation_needs() -> None:
    trained, held_out = hold_out([Prompt(i, f"{i}") for i in range(3000)], 0.1)
    assert (len(trained), len(held_out)) == (2936, 64)


def test_prompts_are_split_only_without_held_out_prompts_of_their_own(here: Path) -> None:
    (here / "c.txt").write_text("\n".join(f"{i}" for i in range(20)))
    config = Config(data=DataConfig(train="c.txt"), validation=ValidationConfig(share=0.25))
    parts = [load_split(config, key, given) for key, given in (("data.train", "c.txt"), ("validation.data", "auto"))]
    assert [len(part) for part in parts] == [15, 5]
    config = replace(config, validation=ValidationConfig(data="a.txt"))
    parts = [load_split(config, key, given) for key, given in (("data.train", "c.txt"), ("validation.data", "a.txt"))]
    assert [len(part) for part in parts] == [20, 2]


def test_sources_are_numbered_through(here: Path) -> None:
    second = {"path": "b.jsonl", "prompt_key": "caption", "columns": {"text": "word"}, "data_source": "words"}
    found = load(["a.txt", second, "hf:./set[train]"], DataConfig(stream=3), "data.train")
    assert [(p.id, p.text, p.source) for p in found] == [
        (0, "one", 0),
        (1, "two", 0),
        (2, "three", 1),
        (3, "four", 1),
        (4, "row 0", 2),
        (5, "row 1", 2),
        (6, "row 2", 2),
    ]
    assert found[0].metadata == {} and found[4].metadata == {"word": "W"}
    assert found[2].metadata == {"text": "W", "data_source": "words"} and found[3].metadata == {"data_source": "words"}


def test_a_template_makes_the_prompts_from_the_columns(here: Path) -> None:
    data = DataConfig(prompt_key="caption", template="a photo of {prompt} ({caption}), {word} {{x}}")
    own = {"path": "hf:./set[train]", "prompt_key": "prompt", "template": "{word}: {prompt}"}
    with pytest.raises(DataError, match=r"b\.jsonl:2 has no 'word', which data\.template=.* the row has caption"):
        load("b.jsonl", data, "data.train")
    (here / "b.jsonl").write_text('{"caption": "three", "word": "W", "n": 7}\n')
    found = load(["b.jsonl", own], data, "validation.data")
    assert [p.text for p in found[:2]] == ["a photo of three (three), W {x}", "W: row 0"]
    assert found[0].metadata == {"word": "W", "n": 7, "original_prompt": "three"}
    assert found[1].metadata == {"word": "W", "original_prompt": "row 0"}
    assert load("a.txt", DataConfig(template="{prompt}!"), "data.train")[1].text == "two!"
    assert filled("{a b} {n.x}", {"a b": 0.5, "n.x": ""}, "x.csv:2") == "0.5"
    with pytest.raises(DataError, match=r"x\.jsonl:3 has a list as 'a'"):
        filled("{a}", {"a": [1]}, "x.jsonl:3")


def test_the_text_to_write_is_that_of_the_row_and_not_of_the_template(here: Path) -> None:
    (here / "a.txt").write_text('a sign that reads "OPEN"\nOPEN\n')
    data = DataConfig(template='a "photo" of {prompt}')
    prompts = load("a.txt", data, "data.train")
    targets = [OcrScorer().target(prompt.text, prompt.metadata) for prompt in prompts]
    assert targets == ["OPEN", "photo"]  # of the second row nothing is quoted but by the template


@pytest.mark.parametrize("template", ["a photo", "a {}", "a {prompt!r}", "a {prompt:>3}", "a {prompt", "{ }"])
def test_what_a_template_may_be(template: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.template=.*\{prompt\}, \{style\}"):
        DataConfig(template=template)
    with pytest.raises(ConfigError, match="an entry with template="):
        sources([{"path": "a.txt", "template": template}], "data.train")


def test_one_file_is_read_as_ever(here: Path) -> None:
    assert load("a.txt", DataConfig(), "data.train") == [Prompt(0, "one"), Prompt(1, "two")]
    named = DataConfig(prompt_key="caption", columns={"text": "word", "said": "caption"})
    assert load("a.txt", named, "data.train")[0] == Prompt(0, "one")  # it has no columns
    assert load("b.jsonl", named, "data.train")[0].metadata == {"text": "W", "said": "three"}


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ((5, 6), 5, (3, 2)),
        ((1, 6), 5, (1, 4)),
        ((5, 6), 20, (5, 6)),
        ((5, 6), None, (5, 6)),
        ((9,), 4, (4,)),
        ((2, 2, 2), 2, (1, 1, 0)),
    ],
)
def test_held_out_prompts_are_shared_among_their_sources(
    sizes: tuple[int, ...], most: int | None, expected: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    places = [(s, i) for s, size in enumerate(sizes) for i in range(size)]
    prompts = [Prompt(n, f"{s}/{i}", source=s) for n, (s, i) in enumerate(places)]
    with caplog.at_level("INFO"):
        found = limit_prompts(prompts, most, [f"{s}.txt" for s in range(len(sizes))])
    assert [p.text for p in found] == [f"{s}/{i}" for s, count in enumerate(expected) for i in range(count)]
    assert ("excludes 2.txt" in caplog.text and "3 or more" in caplog.text) == (0 in expected)
    assert ("of 1.txt" in caplog.text) == (len(sizes) > 1 and len(found) < len(prompts))


@pytest.mark.parametrize("value", [["ocr"], {"a": 1}])
def test_a_data_source_that_is_no_plain_value_is_refused(value: object, here: Path) -> None:
    (here / "c.jsonl").write_text(json.dumps({"prompt": "a", "turn": [1], "role": {"a": 1}, "data_source": value}))
    with pytest.raises(DataError, match=r"c\.jsonl:1 has data_source=.*rename the column"):
        load("c.jsonl", DataConfig(), "data.train")
    with pytest.raises(DataError, match="data_source"):
        load("c.jsonl", DataConfig(prompt_key="prompt", columns={"said": "turn"}), "data.train")


@pytest.mark.parametrize(
    ("given", "data", "message"),
    [
        (["a.txt", "no.txt"], {}, r"data\.train=no\.txt: "),
        (["a.txt", "hf:./none"], {}, r"data\.train=hf:\./none: .*does not exist"),
        ("b.jsonl", {"columns": {"text": "sign"}, "prompt_key": "caption"}, r"no column 'sign', only caption, word"),
    ],
)
def test_the_source_is_named(here: Path, given: Any, data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(given, DataConfig(**data), "data.train")


def test_digests(here: Path) -> None:
    data = DataConfig()
    own = digest("a.txt", data, "data.train")
    assert own == hashlib.sha256((here / "a.txt").read_bytes()).hexdigest()  # that of runs of one file, as ever
    assert digest(["a.txt"], data, "data.train") == own
    both = digest(["a.txt", {"path": "hf:./set", "weight": 2}], data, "data.train")
    assert both == digest(["a.txt", "hf:./set"], data, "data.train") != own
    assert both != digest(["hf:./set", "a.txt"], data, "data.train")
    assert digest([{"path": "b.jsonl", "prompt_key": "caption"}], data, "x") != digest("b.jsonl", data, "x")
    (here / "set" / "train.jsonl").write_text('{"prompt": "another"}\n')
    assert both != digest(["a.txt", "hf:./set"], data, "data.train")


def test_weights() -> None:
    assert weights("a.txt") is None and weights(["a.txt", "b.txt"]) is None
    assert weights([{"path": "a.txt", "weight": 2}]) is None
    assert weights([{"path": "a.txt", "weight": 0.1}, "b.txt"]) == [Fraction(1, 10), 1]
    assert max_prompts_per_step([Fraction(3), Fraction(1)], 8) == [6, 2]
    assert max_prompts_per_step([Fraction(2), Fraction(1)], 8) == [6, 3]


def test_a_source_that_is_too_small_for_its_weight() -> None:
    config = Config(data=DataConfig(train=["a.txt", {"path": "b.txt", "weight": 3}]))
    prompts = [Prompt(i, "x", source=int(i > 3)) for i in range(10)]
    check_mixture(config, prompts)
    with pytest.raises(DataError, match=r"b\.txt has 5 prompts.* 6 of the 8.*weight"):
        check_mixture(config, prompts[:-1])


def test_room_for_pictures() -> None:
    assert may_have_pictures(DataConfig(train="a.csv")) and not may_have_pictures(DataConfig(train="a.txt"))
    assert not may_have_pictures(DataConfig(train="hf:a/b[c]")) and not may_have_pictures(DataConfig())
    assert may_have_pictures(DataConfig(train=["a.txt", "hf:a/b[c]"], columns={"image": "photo"}))


def test_parts_of_a_name() -> None:
    whole = HubParts("owner/name", "config", "train[:10%]+test", "v1")
    assert hub_parts("hf:owner/name/config@v1[train[:10%]+test]", "data.train") == whole
    assert hub_parts("hf:./my/own/set", "data.train").local and hub_parts("hf:/set[a]", "data.train").split == "a"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"data\.train=\[\]: .*list such as"),
        (3, "data.train=3: "),
        ([3], "data.train=3: an entry"),
        (["a.txt", "a.txt"], "a.txt twice"),
        ([{"path": "a.txt", "wieght": 2}], "wieght; allowed are path, weight"),
        ([{"weight": 2}], "path=null"),
        ([{"path": "a.txt", "weight": 0}], "weight=0: .*above 0"),
        ([{"path": "a.txt", "weight": True}], "weight=true: .*above 0"),
        ([{"path": "a.txt", "weight": float("inf")}], "weight=inf: .*above 0"),
        ([{"path": "a.txt", "stream": 0}], "stream=0: .*at least 1"),
        ([{"path": "a.txt", "columns": ["a"]}], r"columns=\['a'\]: .*caption_text"),
        ("hf:name[train]", r"owner/name, so write hf:owner/name\[split\]"),
        ("hf:owner/name[train", r"write hf:owner/name\[split\]"),
        ("hf:a/b/c/d", "owner/name"),
    ],
)
def test_values_that_are_no_sources(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(train=given)


def test_held_out_prompts_have_no_weights() -> None:
    ValidationConfig(data=["a.txt", {"path": "b.txt", "prompt_key": "caption"}])
    with pytest.raises(ConfigError, match=r"validation\.data has an entry with weight: .*sampled once"):
        ValidationConfig(data=["a.txt", {"path": "b.txt", "weight": 2}])
    assert sources("a.txt", "validation.data", weighted=False)[0].path == "a.txt"


def test_keys_that_say_nothing() -> None:
    with pytest.raises(ConfigError, match=r"data\.stream=5: .*remove it"):
        Config(data=DataConfig(stream=5))
    with pytest.raises(ConfigError, match=r"data\.columns has prompt: .*data\.prompt_key=caption"):
        DataConfig(columns={"prompt": "caption"})


# --- Prompts from Python code

DATASET = """
from torch.utils.data import Dataset

ROWS = ["a fox", {"prompt": "a hen", "word": "W", "n": (1, 2)}]
NONE = 3

class Words(Dataset):
    def __init__(self, count=2):
        self.rows = ROWS[:count]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[min(i, len(self.rows) - 1)]  # it never raises IndexError

def few(count=1):
    yield from ROWS[:count]

def broken():
    return Words(count="x")

made = Words()
"""


@pytest.fixture
def code(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_words", raising=False)
    (here / "my_words.py").write_text(DATASET)
    (here / "rows.jsonl").write_text('{"prompt": "a fox"}\n{"prompt": "a hen", "word": "W", "n": [1, 2]}\n')
    return here


@pytest.mark.parametrize("place", ["my_words.py", "my_words", "./my_words.py"])
@pytest.mark.parametrize("name", ["Words", "made", "ROWS"])
def test_code_gives_the_prompts_of_a_file_with_its_rows(code: Path, place: str, name: str) -> None:
    found = load(f"{place}:{name}", DataConfig(), "data.train")
    assert found == load("rows.jsonl", DataConfig(), "data.train") and found[1].metadata == {"word": "W", "n": [1, 2]}
    assert digest(f"{place}:{name}", DataConfig(), "data.train") == digest("my_words:ROWS", DataConfig(), "data.train")


def test_a_data_set_in_memory_is_written_with_the_same_rows(code: Path) -> None:
    made = load_module("file", "my_words.py", DataError).made
    written = write_prompts(made, code / "written.jsonl")
    assert load(written, DataConfig(), "data.train") == load("my_words.py:Words", DataConfig(), "data.train")


def test_code_may_have_arguments_and_columns_of_other_names(code: Path) -> None:
    source = {"path": "my_words.py:few", "kwargs": {"count": 2}, "data_source": "words", "columns": {"text": "word"}}
    found = load(["a.txt", source], DataConfig(), "data.train")
    assert [(p.text, p.source) for p in found] == [("one", 0), ("two", 0), ("a fox", 1), ("a hen", 1)]
    assert found[3].metadata == {"text": "W", "n": [1, 2], "data_source": "words"}
    assert len(load("my_words:few", DataConfig(), "data.train")) == 1
    assert may_have_pictures(DataConfig(train="my_words:few"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("my_words.py:Wrods", "my_words.py has no Wrods"),
        ("my_words:NONE", "int: expected a data set with __len__"),
        ("my_words.py:broken", r"it raised TypeError: .*my_words\.py, line 9: self\.rows = ROWS"),
        ("my_wrods:Words", r"module my_wrods cannot be imported .*FILE\.py:Words"),
        ("gone.py:Words", "there is no Python file"),
        ({"path": "my_words:made", "kwargs": {"count": 1}}, "is not a function or class"),
        ({"path": "my_words:few", "kwargs": {"count": 0}}, "it has no prompts"),
        ({"path": "my_words:ROWS", "prompt_key": "text"}, "row 2 has no 'text', only prompt, word, n"),
    ],
)
def test_code_without_prompts_is_a_sentence(code: Path, given: Any, said: str) -> None:
    with pytest.raises(DataError, match=rf"^data\.train=(my_w|gone).*{said}"):
        load([given], DataConfig(), "data.train")


def test_only_code_has_arguments() -> None:
    for path, kwargs in (("a.txt", {}), ("a.py:b", 3)):
        with pytest.raises(ConfigError, match="an entry with kwargs="):
            sources([{"path": path, "kwargs": kwargs}], "data.train")
    assert [source.is_code for source in sources(["a.py:b", "a.b:c", "hf:a/b", "a.txt", "signs_train"], "x")] == [
        True, True, False, False, False
    ]  # fmt: skip


def test_prompts_that_make_a_result_doubtful_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gerl")
    texts = ["a fox", "a hen", "a fox", "\u200b"]
    prompts = [Prompt(i, text) for i, text in enumerate(texts)]
    picture = Prompt(2, "a hen", {"image": "other.png"})  # the same words for another picture
    log_prompts(prompts, [Prompt(0, "a fox"), Prompt(1, "a cow"), picture])
    overlap, repeated, blank = caplog.messages
    assert overlap.startswith("1 of 3 held-out prompts are also trained on") and "validation.data" in overlap
    assert repeated.startswith("1 of the 4 prompts of data.train")
    assert blank.startswith("data.train: 1 prompts") and blank.endswith("is 3")
    caplog.clear()
    log_prompts(prompts[:2], [Prompt(0, "a cow")])
    assert not caplog.messages


def test_images_that_cannot_be_decoded_are_all_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["whole.jpg", "cut.jpg", "deep.png", "cut too.jpg"]
    for name in names:
        Image.effect_noise((64, 64), 50).convert("I;16" if name == "deep.png" else "RGB").save(tmp_path / name)
    for name in ("cut.jpg", "cut too.jpg"):
        file = tmp_path / name
        file.write_bytes(file.read_bytes()[:-900])
    texts = {name: f"prompt of {name}" for name in names}
    rows = [{"prompt": text, "image": name} for name, text in texts.items()] + [{"prompt": "again", "image": "cut.jpg"}]
    liked = [row | {"label": True} for row in rows]
    for data, written in ((DataConfig(), rows), (DataConfig(train_on="files"), liked)):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, written)))
        prompts = load(str(tmp_path / "rows.jsonl"), data, "data.train")
        check_images(prompts[:1])
        with pytest.raises(DataError, match=r"prompt 1 'prompt of cut\.jpg': .*cut\.jpg .*replace"):
            check_images(prompts[:2])
        caplog.clear()
        with pytest.raises(DataError, match=r"^3 of 4 images .* prompt 1 '"):
            check_images(prompts)
        assert [name for name in names if any(texts[name] in said for said in caplog.messages)] == names[1:]


def test_prompts_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gerl.data.code.MOST_ROWS", 100)
    code = "def some(count=None):\n    return map(str, itertools.count() if count is None else range(count))"
    (tmp_path / "rows.py").write_text(f"import itertools\n{code}")
    path = f"{tmp_path / 'rows.py'}:some"
    assert len(load([{"path": path, "kwargs": {"count": 100}}], DataConfig(), "data.train")) == 100
    for given in (path, [{"path": path, "kwargs": {"count": 101}}]):
        with pytest.raises(DataError, match=r"^data\.train=.* 100 .*islice"):
            load(given, DataConfig(), "data.train")
    with pytest.raises(DataError, match="islice"):
        write_prompts(map(str, itertools.count()), tmp_path / "prompts.jsonl")

"""Arguments in the style of other programs: the sentence has the line to write."""

from pathlib import Path

import pytest

from gerl.commandline.form import check_form, either, near_names, read_yaml
from gerl.config import nearest_key
from gerl.errors import ConfigError

KEYS = {"trainer.steps", "data.train", "out"}
SHORT = {"steps": "trainer.steps", "stepz": "trainer.steps", "data_train": "data.train"}


def check(*arguments: str) -> None:
    check_form(arguments, lambda name: name if name in KEYS else SHORT.get(name), "out")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trainer.steps=5", "out=x"],
        ["out=", "trainer.steps=5"],  # an empty value, and the next key
        ["+out=a=b", "~trainer.steps", "out=-1", "out==x"],
        ["zebra=1"],  # unknown keys are for others to refuse
    ],
)
def test_what_is_key_value_passes(arguments: list[str]) -> None:
    check(*arguments)


@pytest.mark.parametrize(
    ("arguments", "named", "written"),
    [
        (["--trainer.steps", "5"], "--trainer.steps 5: ", "trainer.steps=5"),
        (["-trainer.steps=5"], "-trainer.steps=5: ", "trainer.steps=5"),
        (["--stepz=5", "out=x"], "--stepz=5: ", "trainer.steps=5"),
        (["--data-train", "a b.txt"], "--data-train a b.txt: ", "'data.train=a b.txt'"),
        (["--steps", "--out", "x"], "--steps --out x: ", "trainer.steps=VALUE out=x;"),
        (
            ["--steps", "3", "out=y", "--zebra", "--data-train=z"],
            "--steps 3 --data-train=z: ",
            "trainer.steps=3 data.train=z;",
        ),
        (["--steps", "out=x"], "--steps: ", "trainer.steps=VALUE"),
        (["out=x", "steps", "=", "5"], "steps = 5: ", "steps=5"),
        (["steps", "="], "steps = VALUE: ", "steps=VALUE"),
        (["steps=", "5"], "steps= 5: ", "steps=5"),
        (["steps", "=5"], "steps =5: ", "steps=5"),
        (["trainer.steps", "5"], "trainer.steps 5: ", "trainer.steps=5"),
        (["trainer.steps"], "trainer.steps: ", "trainer.steps=VALUE"),
        (["trainer.steps 5"], "trainer.steps 5: ", "trainer.steps=5"),
    ],
)
def test_the_line_to_write_is_in_the_sentence(arguments: list[str], named: str, written: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(*arguments)
    assert str(caught.value).startswith(named) and f"write {written}" in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--multirun"], "--multirun: there is no such option"),
        (["data.train=my", "file.txt"], "put quotes: 'data.train=my file.txt'"),
        (["some/folder"], "some/folder: expected key=value, such as out=some/folder"),
    ],
)
def test_where_it_is_not_known_what_was_meant(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(*arguments)
    assert words in str(caught.value)


def test_a_value_may_be_that_of_several_keys() -> None:
    with pytest.raises(ConfigError, match=r"write sampling\.height=64 sampling\.width=64;"):
        check_form(["--size", "64"], lambda name: "sampling.height sampling.width" if name == "size" else None, "out")


def test_several_keys_of_another_program_are_one_sentence() -> None:
    given = ["learning_rate=1e-4", "trainer.steps=3", "+actor_rollout_ref.rollout.n=8", "~seed", "train_files=a b.txt"]
    with pytest.raises(ConfigError) as caught:
        check_form(given, nearest_key, "experiment")
    message = str(caught.value)
    assert message.startswith(
        "learning_rate, actor_rollout_ref.rollout.n and train_files are keys of another program: "
    )
    assert "write actor.lr=1e-4 rollout.n=8 'data.train=a b.txt';" in message


def test_keys_that_a_command_has_not_are_left_alone() -> None:
    check_form(["prompts=x", "images=y", "seed=3"], lambda name: name, "out")  # its own keys
    check_form(["learning_rate=1e-4", "num_generations=8"], lambda _: None, "out")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: [\n", "line 2, column 1: "),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: found duplicate key a"),
        ("a:\n\tb: 1\n", "line 2, column 1: a tab"),
        ("a: 'b\n", "line 2, column 1: "),
        ("a: b: c\n", "line 1, column 5: "),
        ("a: *nothing\n", "line 1, column 4: "),
        ("- a\n", "expected blocks of keys"),
        (b"\xff", "it is not UTF-8 text (byte 0): save it as UTF-8"),
        ("a: \x00\n", "it is not a valid yaml file"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, content: str | bytes, words: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        read_yaml(path, "experiment=mine.yaml")
    assert str(caught.value).startswith(f"experiment=mine.yaml: {words}"), caught.value
    assert "\n" not in str(caught.value)


def test_names_that_are_near() -> None:
    names = ["signs", "plain", "sd35_medium_ocr", "sd35_large_pickscore"]
    assert near_names("sings", names) == ["signs"] == near_names("SIGNS", names)
    assert near_names("sd35", names) == ["sd35_medium_ocr", "sd35_large_pickscore"]
    assert near_names("", names) == [] == near_names("zzz", names)
    assert near_names("rtx3060", ["rtx3090-24gb"]) == [], "another card"
    assert near_names("rtx3090", ["rtx3090-24gb"]) == ["rtx3090-24gb"]
    assert either(["a"]) == "'a'" and either(["a", "b", "c"]) == "'a', 'b' or 'c'"

"""The yaml files of users."""

from pathlib import Path

import pytest

from gerl.commandline.files import either, near_names, read_yaml
from gerl.errors import ConfigError


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

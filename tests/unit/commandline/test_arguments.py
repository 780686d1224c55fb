"""Keys of a command: their types, what is passed on to the configuration, and errors that name key and remedy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from gerl.commandline.arguments import Parser, key
from gerl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    out: Path = key("a folder; it is made", required=True)
    form: Literal["long", "short"] = key("long or short", "long")
    count: int | None = key("how many", unit="a number, at least 2", low=2)
    force: bool = key("true: even so", False)
    part: list[tuple[str | None, str]] = key("a file, or several", [])


PARSER = Parser(
    "trying", "try", "out=FOLDER", "Try it.", Options, passed=("experiment",), blocks=("reward",), notes="Is that all?"
)


def test_values_have_their_types_and_the_configuration_gets_its_own() -> None:
    options, overrides = PARSER.parse(
        ["out=~/x", "+reward.a=1", "count=2", "experiment=signs", "~reward.b", "force=true"]
    )
    assert options == Options(out=Path.home() / "x", count=2, force=True)
    assert overrides == ["+reward.a=1", "experiment=signs", "~reward.b"]
    options, _ = PARSER.parse(["out=a=b", "part=x", "part.one=y", "part=z", "form=short"])
    assert options == Options(out=Path("a=b"), form="short", part=[(None, "x"), ("one", "y"), (None, "z")])


def test_where_everything_else_is_passed_on_nothing_is_unknown() -> None:
    parser = Parser("trying", "", "", "", Options, rest=True)
    assert parser.parse(["out=x", "steps=3", "~odd"])[1] == ["steps=3", "~odd"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["out is missing", "out=a folder;"]),
        (["out= "], ["out is empty", "out=a folder"]),
        (["out=x", "count= "], ["count is empty", "omit it"]),
        (["out"], ["out: expected key=value"]),
        (["out=x", "out=y"], ["out is given twice"]),
        (["out=x", "part.a=1", "part.a=2"], ["part.a is given twice"]),
        (["out=x", "out.y=1"], ["out.y: trying has no such key", "'out'"]),
        (["out=x", "cuont=3"], ["cuont", "'count'"]),
        (["out=x", "sampling.steps=3"], ["sampling.steps", "out, form, count, force, part, experiment and reward.*"]),
        (["out=x", "form=wide"], ["form=wide: choose long or short"]),
        (["out=x", "force=yes"], ["force=yes: choose false or true"]),
        (["out=x", "count=1"], ["count=1: it must be a number, at least 2"]),
        (["out=x", "count=two"], ["count=two: it must be a number"]),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        PARSER.parse(arguments)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_help_has_every_key_with_its_default() -> None:
    text = PARSER.help()
    assert text.startswith("usage: try out=FOLDER\n") and "\nIs that all?\n" in text
    assert "  form   long or short (default: long)\n" in text and "  force  true: even so (default: false)\n" in text
    assert "reward.scorers.NAME.weight" in text and "trainer." not in text


def test_a_value_alone_may_stand_for_a_key(tmp_path: Path) -> None:
    parser = Parser("trying", "", "", "", Options, bare="out")
    assert parser.parse(["some/folder", "count=3"])[0] == Options(out=Path("some/folder"), count=3)
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert parser.parse([str(odd)])[0].out == odd
    with pytest.raises(ConfigError, match="out is given twice"):
        parser.parse(["x", "out=y"])
    with pytest.raises(ConfigError, match="drop the dashes, write count=3"):
        parser.parse(["x", "--count=3"])

"""The kind of a value: true and false are no numbers, by whichever way a key is set; what else is converted."""

import dataclasses
from itertools import product
from typing import Any, get_args, get_origin

import pytest
from tables import each

from gerl.commandline.composition import compose_run
from gerl.config import RolloutConfig, ScorerConfig, TrainerConfig, from_mapping, keys, readers
from gerl.config.blocks import ActorConfig
from gerl.config.schema import fits, kind_words
from gerl.errors import ConfigError

NUMBERS = [name for name, f in keys() if {int, float} & {f.type, *get_args(f.type)} and get_origin(f.type) is not list]
LISTS = [name for name, f in keys() if "list[int" in str(f.type) or "list[float" in str(f.type)]
SWITCHES = [name for name, f in keys() if f.type is bool]


def nested(name: str, value: object) -> dict[str, Any]:
    """A configuration with one key, of an algorithm that reads it."""
    *blocks, leaf = name.replace("NAME", "ocr").split(".")
    values: dict[str, Any] = {leaf: value}
    if blocks == ["algorithm"]:
        values["name"] = readers(leaf)[0]
    for block in reversed(blocks):
        values = {block: values}
    return values


def refused(name: str, value: object) -> str:
    with pytest.raises(ConfigError) as caught:
        from_mapping(nested(name, value))
    return str(caught.value)


@each(("name", "value"), product(NUMBERS, (True, False)))
def test_true_and_false_are_no_numbers(name: str, value: bool) -> None:
    message = refused(name, value)
    assert message.startswith(f"{name.replace('NAME', 'ocr')}={str(value).lower()}: it must be a"), message
    assert "number" in message or "an integer" in message


@each("name", LISTS)
def test_nor_are_they_in_lists(name: str) -> None:
    assert "a list" in refused(name, [0.9, True])


@each(("name", "value"), product(SWITCHES, (0, 1, 1.0, "yes", "1")))
def test_a_switch_is_true_or_false(name: str, value: object) -> None:
    assert refused(name, value).endswith("it must be true or false")


def test_there_are_keys_of_each_kind() -> None:
    assert len(NUMBERS) > 110 and len(LISTS) > 4 and len(SWITCHES) > 10


def test_what_spells_a_value_is_that_value() -> None:
    """A text of the environment or of YAML 1.1, and a whole number with an exponent."""
    given = {"actor": {"lr": "1e-3"}, "trainer": {"steps": 1e3, "seed": "5"}, "logger": {"live": "false"}}
    config = from_mapping(given)
    assert (config.actor.lr, config.trainer.steps, config.trainer.seed, config.logger.live) == (1e-3, 1000, 5, False)
    assert compose_run(["actor.lr='1e-3'", "trainer.steps=1e3"]).config.trainer.steps == 1000


@pytest.mark.parametrize(
    "build",
    [
        lambda: RolloutConfig(n=True),
        lambda: RolloutConfig(n="5"),  # type: ignore[arg-type]
        lambda: RolloutConfig(n=2.0),  # type: ignore[arg-type]
        lambda: ActorConfig(lr=True),
        lambda: ActorConfig(betas=[0.9, True]),
        lambda: ScorerConfig(weight=True),
        lambda: TrainerConfig(steps=None),  # type: ignore[arg-type]
    ],
)
def test_nor_are_they_in_blocks_that_are_built_in_python(build: Any) -> None:
    with pytest.raises(ConfigError, match="it must be a"):
        build()


def test_on_the_command_line() -> None:
    for given in ("actor.lr=true", "trainer.steps=True", "actor.betas=[0.9,true]", "reward.scorers.ocr.weight=false"):
        with pytest.raises(ConfigError, match=f"^{given.partition('=')[0]}=.*: it must be a"):
            compose_run([given])


@each("f", [f for _, f in keys()])
def test_every_default_is_of_its_kind(f: dataclasses.Field[Any]) -> None:
    default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
    assert default is dataclasses.MISSING or fits(default, f.type)
    assert kind_words(f.type)

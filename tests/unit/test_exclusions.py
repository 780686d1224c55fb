"""The table of keys that exclude each other."""

import re
from dataclasses import fields, replace

import pytest
from tables import each

from gerl.algorithms import every_exclusion
from gerl.config import Config, ModelConfig, from_mapping, keys
from gerl.config.algorithms import Needs
from gerl.config.exclusions import CONDITION, Exclusion, as_markdown, check_exclusions
from gerl.errors import ConfigError

DERIVED = """
lockstep has_kl base_alignment actor.updates guard.raises_kl algorithm.subtracts_kl algorithm.moves_reference
""".split()
KNOWN = {*(name for name, _ in keys()), *(f"needs.{f.name}" for f in fields(Needs)), *DERIVED}
ROWS = every_exclusion()


@each("row", ROWS)
def test_a_row_names_keys_that_there_are(row: Exclusion) -> None:
    for condition in (row.key, *re.split(r" [&|] ", row.beside)):
        match = CONDITION.fullmatch(condition)
        assert match and match[1] in KNOWN, condition
    assert row.remedy and set(re.findall(r"\{([\w.]+)\}", row.reason)) <= KNOWN


def test_what_conditions_mean() -> None:
    parts = {"model": ModelConfig(lora_rank=4, dtype="float16"), "lockstep": True}
    for condition, holds in (
        ("model.lora_rank=4", True), ("model.lora_rank!=4", False), ("model.lora_rank>4", False),
        ("model.lora_rank<5", True), ("model.dtype=float16", True), ("model.lora=null", True), ("model.lora", False),
        ("model.merge_lora=false", True), ("model.zebra!=1", False), ("lockstep", True), ("model.dtype=*", True),
    ):  # fmt: skip
        assert Exclusion("lockstep", condition, "", "").applies(parts) is holds, condition
        assert Exclusion("lockstep", f"{condition} & lockstep | model.lora", "", "").applies(parts) is holds


def test_the_sentence_has_key_value_reason_and_remedy() -> None:
    row = Exclusion("model.train!=lora", "model.dtype=float16", "{model.dtype} is too coarse", "use lora")
    model = ModelConfig(dtype="float16", train=r"a{2}")
    with pytest.raises(ConfigError, match=r"^model\.train=a\{2\}: float16 is too coarse; use lora$"):
        check_exclusions([row], {"model": model})
    check_exclusions([row], {"model": replace(model, dtype="float32")})


def test_the_documentation_has_every_row() -> None:
    text = as_markdown(ROWS)
    assert text.count("\n") == len(ROWS) + 2 and "| `trainer.staleness>0` | `needs.reward_gradient` |" in text
    assert "{" not in text


def test_an_own_exclusion_of_an_algorithm() -> None:
    with pytest.raises(ConfigError, match=r"use 1, or off_policy=true"):
        from_mapping({"algorithm": {"name": "awm", "off_policy": False}, "sampling": {"kernel": "ode"},
                      "actor": {"updates_per_step": 2}})  # fmt: skip
    assert Config().algorithm.excludes == ()

"""The block `episode`: what it refuses, and the configurations of its roles."""

from dataclasses import asdict
from typing import Any

import pytest

from gerl.config import Config, from_mapping
from gerl.config.roles import check_roles, role_config, signature
from gerl.errors import ConfigError

TURNS = [{"role": "draw"}, {"role": "edit", "images": 3}]
TEXT = [{"role": "rewrite", "images": 4}, {"role": "draw"}]
LM = {"kind": "text", "model.path": "lm"}


def composed(turns: list[dict[str, Any]], roles: dict[str, Any], **keys: Any) -> Config:
    """A configuration with these turns and roles; `keys`: others of the block, and whole blocks."""
    own = {name: value for name, value in keys.items() if name in ("next", "returns", "train")}
    blocks = {name: value for name, value in keys.items() if name not in own}
    found = from_mapping({"episode": {"turns": turns, "roles": roles, **own}, **blocks})
    check_roles(found)
    return found


def test_a_run_has_no_episodes_by_default() -> None:
    assert Config().episode.turns == [] and Config().episode.roles == {}


def test_a_role_has_the_keys_of_the_run_and_its_own() -> None:
    keys = {"model.lora_rank": 4, "sampling": {"num_inference_steps": 6}, "algorithm.clip_low": 0.5}
    c = composed(TURNS, {"edit": keys}, model={"lora_rank": 8, "lora_alpha": 3.0})
    own = role_config(c, "edit")
    assert (own.model.lora_rank, own.model.lora_alpha, own.sampling.num_inference_steps) == (4, 3.0, 6)
    assert own.rollout.n == 3 and own.guard.action == "off" and own.episode.turns == []
    assert role_config(c, "draw") is c
    assert signature(c, "edit") == signature(c, "draw")
    assert signature(composed(TURNS, {"edit": {"model.path": "other"}}), "edit") != signature(c, "draw")


def test_another_algorithm_of_a_role_has_its_own_keys() -> None:
    keys = {"algorithm.name": "awm", "sampling.kernel": "ode", "algorithm.timesteps": 1}
    own = role_config(composed(TURNS, {"edit": keys}), "edit")
    assert own.algorithm.name == "awm" and asdict(own.algorithm)["timesteps"] == 1


def test_a_role_that_rewrites_has_a_language_model() -> None:
    c = composed(TEXT, {"rewrite": LM | {"tokens": 7, "kept": 1}}, model={"lora_targets": ".*", "path": "signs"})
    own = role_config(c, "rewrite")
    assert (own.model.path, own.model.lora_targets, own.rollout.n) == ("lm", None, 4)
    assert asdict(own.algorithm)["clip_high"] == 0.2
    assert c.episode.text_role("rewrite").tokens == 7 and c.episode.is_text("rewrite") and not c.episode.is_text("draw")


def test_roles_are_trained_in_turn() -> None:
    train = composed(TURNS, {"edit": {}}, train={"alternate": 2}).episode
    assert [train.trained(step) for step in range(1, 6)] == [["draw"], ["draw"], ["edit"], ["edit"], ["draw"]]
    assert composed(TURNS, {"edit": {}}).episode.trained(1) == ["draw", "edit"]
    assert composed(TURNS, {"edit": {}}, train=["edit"]).episode.trained(9) == ["edit"]


@pytest.mark.parametrize(
    ("turns", "roles", "keys", "named"),
    [
        ([], {"edit": {}}, {}, "episode.turns"),
        ([{"role": "draw"}, {"role": "edit"}], {}, {}, "episode.roles"),
        (TURNS, {"edit": {}, "draw": {}}, {}, "none"),
        (TURNS, {"edit": {}, "idle": {}}, {}, "episode.roles.idle"),
        (TURNS[::-1], {"edit": {}}, {}, "own role"),
        ([{"role": "draw", "colour": 1}], {}, {}, "role, request, images"),
        ([{"role": "a b"}], {}, {}, "role="),
        ([{"role": "draw", "request": " "}], {}, {}, "request="),
        ([{"role": "draw", "images": 3}], {}, {}, "rollout.n"),
        ([{"role": "draw"}, {"role": "edit", "images": 0}], {"edit": {}}, {}, "images=0"),
        ([*TURNS, {"role": "edit"}], {"edit": {}}, {}, "give them the same"),
        (TURNS, {"edit": {"trainer.steps": 3}}, {}, "trainer.steps"),
        (TURNS, {"edit": {"model.lora_rang": 3}}, {}, "episode.roles.edit: model.lora_rang"),
        (TURNS, {"edit": {"model": 3}}, {}, "model.KEY"),
        (TURNS, {"edit": {"kind": "sound"}}, {}, "images or text"),
        (TURNS, {"edit": {"tokens": 3}}, {}, "kind=text"),
        (TURNS, {"edit": {"algorithm.name": "tree_grpo"}}, {}, "algorithm.name"),
        (TURNS, {"edit": {}}, {"returns": "last"}, "next=each"),
        (TURNS, {"edit": {}}, {"train": "edit"}, "a list of roles"),
        (TURNS, {"edit": {}}, {"train": ["paint"]}, "draw, edit"),
        (TURNS, {"edit": {}}, {"train": []}, "at least one"),
        (TURNS, {"edit": {}}, {"train": {"alternate": 0}}, "alternate: N"),
        (TURNS, {"edit": {}}, {"trainer": {"staleness": 1}}, "trainer.staleness=0"),
        (TURNS, {"edit": {}}, {"model": {"train": "full"}}, "model.train=lora"),
        (TURNS, {"edit": {}}, {"cluster": {"layout": "split", "num_workers": 2}}, "cluster.layout=hybrid"),
        (TURNS, {"edit": {}}, {"reward": {"scorers": {"ocr": {"turns": [2]}}}}, "reward.scorers.ocr.turns: 2"),
        (TURNS, {"edit": {}}, {"reward": {"scorers": {"ocr": {"roles": ["paint"]}}}}, "draw, edit"),
        (TURNS, {"edit": {}}, {"reward": {"scorers": {"ocr": {"turns": [1]}}}}, "turn 0 (draw)"),
        (TEXT, {"rewrite": {"kind": "text"}}, {}, "model.path"),
        (TEXT, {"rewrite": LM | {"kept": 4}}, {}, "none is sampled"),
        (TEXT, {"rewrite": LM | {"temperature": 0}}, {}, "greater than 0"),
        (TEXT, {"rewrite": LM | {"tokens": True}}, {}, "at least 1"),
        (TEXT, {"rewrite": LM | {"pipeline": "FluxPipeline"}}, {}, "kind=images"),
        (TEXT, {"rewrite": LM | {"algorithm.name": "awm"}}, {}, "GRPO"),
        ([{"role": "draw"}, {"role": "rewrite"}, {"role": "draw"}], {"rewrite": LM}, {}, "first turn"),
        ([{"role": "rewrite"}, {"role": "rewrite"}], {"rewrite": LM}, {}, "the run's own"),
    ],
)
def test_what_cannot_be_is_refused_with_the_key(
    turns: list[dict[str, Any]], roles: dict[str, Any], keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        composed(turns, roles, **keys)
    assert named in str(raised.value)

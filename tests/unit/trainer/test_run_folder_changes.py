"""What a run that is carried on may change, and how that is said."""

import json
import logging
import re
from pathlib import Path

import pytest
import yaml
from resumed_runs import KEYS, Made, add, content, opened, refused, said

from gerl.commandline.composition import compose_run
from gerl.config import keys
from gerl.config.changes import FIXED, changes, settings_of, unknown_keys
from gerl.errors import CheckpointError, DataError
from gerl.trainer.run_folder import CURRENT

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(
    "arguments",
    [
        (),  # the bare command
        KEYS,
        (*KEYS, "data.train=train.txt", "validation.data=held_out.txt"),
        ("algorithm=flow_grpo",),
        ("experiment=signs", "~reward.scorers.other", "~sampling.call.other=3"),
    ],
)
def test_the_same_command_changes_nothing(made: Made, arguments: tuple[str, ...]) -> None:
    run = made("a")
    folder = opened(*arguments, "checkpoint.resume=auto")
    assert folder.changes == [] and folder.path.resolve() == run
    before = content(run)
    folder.carry_on()
    assert content(run) == before
    config = folder.composed.config
    assert (config.actor.lr, config.algorithm.name, list(config.reward.scorers)) == (
        1e-3,
        "flow_grpo",
        ["ocr", "colour", "mine"],
    )


@pytest.mark.parametrize(("old", "new"), [(True, "encoders"), (False, "none")])
def test_an_older_value_that_means_the_same_changes_nothing(made: Made, old: bool, new: str) -> None:
    run = made("a")
    settings = yaml.safe_load((run / CURRENT).read_text())
    settings["model"]["offload"] = old
    (run / CURRENT).write_text(yaml.safe_dump(settings))
    for state in run.glob("checkpoints/*/state.json"):
        assert json.loads(state.read_text())["settings"]["model"]["offload"] == "none"
    folder = opened(f"checkpoint.resume={run}")
    assert folder.composed.config.model.offload == new
    before = {**settings, "model": settings["model"] | {"offload": old}}
    assert not [c for c in changes(before, settings_of(folder.composed.config)) if c.key == "model.offload"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["actor.lr=1e-4", "trainer.steps=20"], ["actor.lr 0.001 -> 0.0001", "trainer.steps 10 -> 20"]),
        (
            ["sampling.call.max_sequence_length=2"],
            ['sampling.call {"max_sequence_length": 1} -> {"max_sequence_length": 2}'],
        ),
        (["reward.scorers.mine.weight=0.5"], ["reward.scorers.mine.weight 1.0 -> 0.5"]),
        (["validation.data=null"], ["validation.data held_out.txt -> null"]),
        (["algorithm.clip_low=1e-4", "algorithm.clip_low=1e-4"], []),
        (["model.gradient_checkpointing=true"], ["model.gradient_checkpointing false -> true"]),
    ],
)
def test_changes_are_named(made: Made, arguments: list[str], expected: list[str]) -> None:
    made("a")
    assert said(opened("checkpoint.resume=auto", *arguments)) == expected


def test_scorers_that_come_and_go_are_named(made: Made) -> None:
    made("a")
    one, other = said(opened("checkpoint.resume=auto", "~reward.scorers.mine", "+reward.scorers.jpeg_size.weight=2"))
    assert one.startswith('reward.scorers.jpeg_size null -> {"weight": 2.0')
    assert other.startswith("reward.scorers.mine {") and other.endswith("-> null")


def test_another_name_of_the_same_prompts(made: Made, tmp_path: Path) -> None:
    run = made("a")
    (tmp_path / "train.txt").rename("moved.txt")
    assert refused(run, error=DataError).startswith("data.train=train.txt: ")
    assert said(opened("checkpoint.resume=auto", "data.train=moved.txt")) == ["data.train train.txt -> moved.txt"]


@pytest.mark.parametrize(
    "change",
    [
        "model.path=a/b", "model.dtype=bfloat16", "model.lora_rank=8", "model.lora_alpha=1.0", "trainer.seed=5",
        "model.lora_targets=to_q", "algorithm.name=dance_grpo", "actor.updates_per_step=3", "data.prompt_key=caption",
    ],
)  # fmt: skip
def test_what_cannot_change_is_refused_with_both_values(made: Made, change: str) -> None:
    run = made("a")
    key, _, value = change.partition("=")
    message = refused(run, change, "actor.lr=1e-5")
    old = yaml.safe_load((run / CURRENT).read_text())
    for name in key.split("."):
        old = old[name]
    assert f"{key} {'null' if old is None else old} -> {value}" in message
    assert "actor.lr" not in message and "checkpoint.resume=never" in message


def test_every_key_that_cannot_change_is_one() -> None:
    assert set(FIXED) <= {name for name, _ in keys()}


@pytest.mark.parametrize("key", ["data.train", "validation.data"])
def test_other_prompts_are_refused(made: Made, tmp_path: Path, key: str) -> None:
    run = made("a")
    (tmp_path / "other.txt").write_text("three\n")
    assert re.search(rf"with {key} \w+\.txt -> other\.txt", refused(run, f"{key}=other.txt"))
    (tmp_path / ("train.txt" if key == "data.train" else "held_out.txt")).write_text("three\n")
    assert f"the content of {key} has changed" in refused(run, error=CheckpointError)


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ("experiment=plain", "experiment=signs"),
        ("algorithm=crd", "algorithm=flow_grpo"),
        ("algorithm=dance_grpo", "algorithm=flow_grpo"),
    ],
)
def test_another_experiment_or_preset_is_refused(made: Made, given: str, own: str) -> None:
    message = refused(made("a"), given)
    assert message.startswith(f"{given}: ") and own in message and "give only the keys to change" in message


def test_a_config_from_before_presets_were_kept_is_compared_by_algorithm(made: Made) -> None:
    run = made("a")
    text = (run / CURRENT).read_text()
    (run / CURRENT).write_text(text.replace("preset: flow_grpo\n", ""))
    assert opened(f"checkpoint.resume={run}", "algorithm=flow_grpo").changes == []
    assert "algorithm=awm: " in refused(run, "algorithm=awm")


def test_an_experiment_that_was_edited_since_says_what_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.yaml").write_text("actor:\n  lr: 1e-3\ndata: {train: train.txt}\nvalidation: {data: null}\n")
    composed = compose_run(["experiment=mine.yaml", "hydra.run.dir=run", "trainer.steps=7"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CURRENT).write_text(composed.yaml())
    add(tmp_path / "run", composed.config, 5)
    command = ("experiment=mine.yaml", "checkpoint.resume=run", "trainer.steps=7")
    with caplog.at_level(logging.INFO, logger="gerl"):
        assert opened(*command).changes == [] and not caplog.messages
        (tmp_path / "mine.yaml").write_text("actor:\n  lr: 1e-5\ndata: {train: train.txt}\nvalidation: {data: null}\n")
        folder = opened(*command)
    assert folder.composed.config.actor.lr == 1e-3
    assert "experiment=mine" in caplog.text and "actor.lr 0.001 (not 1e-05)" in caplog.text


def test_a_model_whose_folder_moved(made: Made, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    run = made("a", f"model.path={old}")
    assert f"model.path {old} -> {new}" in refused(run, f"model.path={new}")
    old.rmdir()
    assert said(opened(f"checkpoint.resume={run}", f"model.path={new}")) == [f"model.path {old} -> {new}"]
    assert "model.path" in refused(run, "model.path=a/b")


def test_settings_differ_only_where_they_do() -> None:
    plain = settings_of(compose_run(["experiment=plain"]).config)
    assert changes(plain, plain) == [] and unknown_keys(plain) == []
    assert changes(plain, json.loads(json.dumps(plain))) == []

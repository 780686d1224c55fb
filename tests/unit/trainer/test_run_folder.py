"""Which run a command line resumes and from where, what may change, and the files of its folder; without a model."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from resumed_runs import KEYS, WORKER, Made, add, content, opened, refused, said

from gerl.commandline.composition import compose_run
from gerl.config import keys
from gerl.config.changes import FIXED, changes, settings_of, unknown_keys
from gerl.errors import CheckpointError, ConfigError, DataError
from gerl.run.checkpoint import NAME, RunLock, RunState, save_checkpoint
from gerl.trainer.run_folder import CURRENT, configuration_at, open_run

pytestmark = pytest.mark.usefixtures("here")


def test_auto_carries_on_the_run_that_was_written_last(made: Made) -> None:
    made("a")
    b = made("b", steps=(1, 2))
    made("c", steps=())
    folder = opened("checkpoint.resume=auto")
    assert folder.path.resolve() == b and folder.checkpoint is not None and folder.checkpoint.step == 2


def test_a_folder_that_is_named_is_the_only_one_that_is_looked_at(made: Made, tmp_path: Path) -> None:
    a, b = made("a"), made("b")
    assert opened("checkpoint.resume=auto", f"hydra.run.dir={a}").path == a
    new = opened("checkpoint.resume=auto", f"hydra.run.dir={b.parent / 'c'}")
    assert new.path == b.parent / "c" and new.checkpoint is None
    later = opened("checkpoint.resume=auto", f"hydra.run.dir={b.parent}/${{now:%Y}}")  # a new one every time
    assert later.path == b


def test_auto_starts_anew_where_there_is_nothing_to_resume(
    made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="gerl"):
        assert opened("checkpoint.resume=auto", "trainer.steps=7").checkpoint is None
        made("a")
        made("b", steps=(10,), finished=True)
        new = opened("checkpoint.resume=auto", "trainer.steps=7")
    assert new.checkpoint is None and new.composed.config.trainer.steps == 7
    assert len(caplog.messages) == 2 and all("nothing to resume in outputs/signs" in m for m in caplog.messages)
    assert opened("checkpoint.resume=auto", "trainer.steps=11").path.name == "b"  # more steps than it had


def test_a_run_or_a_checkpoint_by_path(made: Made) -> None:
    run = made("a", steps=(2, 3))
    for path, step in ((run, 3), (run / "checkpoints" / "step_2", 2), (run / "checkpoints" / "step_3", 3)):
        folder = opened(f"checkpoint.resume={path}")
        assert folder.path == run and folder.checkpoint is not None and folder.checkpoint.step == step
    assert opened("checkpoint.resume=outputs/signs/a").path == Path("outputs/signs/a")
    for nothing in ("nowhere", "outputs", "yes"):
        with pytest.raises(CheckpointError, match=rf"checkpoint\.resume={nothing}: .*auto or never"):
            open_run([f"checkpoint.resume={nothing}"])


@pytest.mark.parametrize("value", ["true", "null", "1", "[a]"])
def test_what_resume_may_be(value: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.resume=.*auto, never, or the folder"):
        open_run([f"checkpoint.resume={value}"])


@pytest.mark.parametrize("resume", ["auto", "{}/checkpoints/step_5"])
def test_a_run_that_is_alive_is_not_carried_on(made: Made, resume: str) -> None:
    made("old")
    run = made("alive", steps=(5,))
    lock = RunLock(run)
    lock.acquire()
    message = refused(run, f"checkpoint.resume={resume.format(run)}")
    assert "alive: its run is still alive (process " in message and "checkpoint.resume=never" in message
    lock.release()
    assert opened(f"checkpoint.resume={resume.format(run)}").path.resolve() == run


def test_auto_does_not_start_a_copy_of_a_run_that_has_no_checkpoint_yet(made: Made) -> None:
    made("old")
    run = made("alive", steps=())
    lock = RunLock(run)
    lock.acquire()
    assert "alive: its run is still alive" in refused(run, "checkpoint.resume=auto")
    lock.release()


def test_a_resume_is_refused_before_torch_is_imported(made: Made) -> None:
    run = made("a")
    code = (
        "import sys; from gerl.trainer.main_flowgrpo import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'ray', 'diffusers'} & set(sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, f"checkpoint.resume={run}"]
    found = subprocess.run([*command, "model.lora_rank=8"], capture_output=True, text=True, check=False)
    assert found.returncode == 2 and found.stderr.startswith("error: ") and "model.lora_rank 16 -> 8" in found.stderr
    assert subprocess.run([*command, "trainer.steps=5"], capture_output=True, check=False).returncode == 0


# --- what a resumed run may change, and how that is said


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
    folder.resume_run()
    assert content(run) == before
    config = folder.composed.config
    assert (config.actor.lr, config.algorithm.name, list(config.reward.scorers)) == (
        1e-3,
        "flow_grpo",
        ["ocr", "colour", "mine"],
    )


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


# --- configurations of other versions, or damaged


@pytest.mark.parametrize(
    "line", ["sampling.speed: 3", "reward.scorers.ocr.colour: red", "perflow.rate: 1", "oddity: 1"]
)
def test_a_key_that_is_no_more_is_named(made: Made, line: str) -> None:
    run, (key, value) = made("a"), line.split(": ")
    values = yaml.safe_load((run / CURRENT).read_text())
    *blocks, leaf = key.split(".")
    inner = values
    for block in blocks:
        inner = inner.setdefault(block, {})
    inner[leaf] = value
    (run / CURRENT).write_text(yaml.safe_dump(values))
    message = refused(run)
    assert f"{CURRENT}: {key}: " in message and "remove it from the file" in message


def test_a_key_that_is_no_more_and_changed_nothing_is_left_out(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    run = made("a")
    values = yaml.safe_load((run / CURRENT).read_text())
    values["logger"]["colours"], values["sampling"]["speed"] = True, None
    del values["validation"]["micro_batch_size"]  # a key that was not there yet has its default
    (run / CURRENT).write_text(yaml.safe_dump(values))
    folder = opened(f"checkpoint.resume={run}")
    assert folder.composed.config.validation.micro_batch_size == 32 and folder.changes == []
    assert "sampling.speed" in caplog.text and "logger.colours" in caplog.text


@pytest.mark.parametrize("text", ["", "[", "- 1\n", "a: b\n", "algorithm: {}\n", "algorithm: 3\n", "\x00", None])
def test_a_damaged_configuration_is_a_sentence(made: Made, text: str | None) -> None:
    run = made("a")
    (run / CURRENT).unlink()
    if text is not None:
        (run / CURRENT).write_text(text)
    message = refused(run)
    assert str(run / CURRENT) in message and "checkpoint.resume=never" in message


@pytest.mark.parametrize("state", [{"step": 4}, {"worker": None}, {"step": "5"}, {"identity": 3}, {"unlogged": []}])
def test_a_damaged_state_is_a_sentence_before_anything_is_loaded(made: Made, state: dict[str, Any]) -> None:
    run = made("a", steps=())
    save_checkpoint(run / "checkpoints", 5, {}, RunState(5, worker=WORKER).to_json() | state)
    assert f"no usable {next(iter(state))}" in refused(run, error=CheckpointError)


def test_a_finished_run_is_said_to_be(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    run = made("a", steps=(10,), finished=True)
    for arguments in ([f"checkpoint.resume={run}"], [*KEYS, "checkpoint.resume=auto", f"hydra.run.dir={run}"]):
        before = content(run)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="gerl"):
            assert open_run([*arguments, "logger.progress=false"]) is None
        assert "finished at step 10" in caplog.text and "trainer.steps=M" in caplog.text
        assert content(run) == before
    assert "actor.lr 0.001 -> 0.002" in refused(run, "actor.lr=2e-3")  # it could not take effect
    assert said(opened(f"checkpoint.resume={run}", "trainer.steps=12")) == ["trainer.steps 10 -> 12"]


STOP_AT = "trainer.stop_at={{metric: val/mine/mean, above: {}}}"


@pytest.mark.parametrize("given", ["trainer.steps=5", STOP_AT.format(0.6), "trainer.epochs=7", "trainer.hours=2"])
def test_auto_leaves_a_run_that_has_reached_its_limit(made: Made, given: str) -> None:
    keys = [STOP_AT.format(0.5), "trainer.epochs=7"]
    made("a", *keys, finished=True, val_metrics={"val/mine/mean": 0.6})
    assert opened("checkpoint.resume=auto", given).checkpoint is None


@pytest.mark.parametrize("given", [STOP_AT.format(0.7), "trainer.stop_at={}"])
def test_auto_extends_a_run_beyond_its_limit(made: Made, given: str) -> None:
    run = made("a", STOP_AT.format(0.5), finished=True, val_metrics={"val/mine/mean": 0.6})
    folder = opened("checkpoint.resume=auto", given)
    assert folder.path.resolve() == run and said(folder)[0].startswith("trainer.stop_at")
    assert open_run([f"checkpoint.resume={run}", "trainer.steps=20"]) is None  # the limit is reached all the same


def test_epochs_are_counted_before_a_run_is_resumed(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    run = made("a", "trainer.epochs=5", finished=True)  # of one prompt, and one step
    with caplog.at_level(logging.INFO, logger="gerl"):
        assert open_run([f"checkpoint.resume={run}"]) is None
    assert "finished at step 5" in caplog.text and "trainer.epochs above 5" in caplog.text
    assert opened("checkpoint.resume=auto", "trainer.epochs=6").path.resolve() == run
    assert refused(run, "trainer.epochs=4").startswith("trainer.epochs=4: ")


def test_a_last_step_that_was_not_logged_is_carried_on(made: Made) -> None:
    run = made("a", steps=(10,), unlogged={"reward/mean": 0.5})
    assert opened(f"checkpoint.resume={run}").checkpoint is not None


def test_fewer_steps_than_the_checkpoint_has_are_refused(made: Made) -> None:
    run = made("a", steps=(2, 5))
    message = refused(run, "trainer.steps=4")
    assert message.startswith("trainer.steps=4: ") and "step_5" in message
    assert opened(f"checkpoint.resume={run}/checkpoints/step_2", "trainer.steps=4").checkpoint is not None


# --- what is written


def test_the_configuration_before_a_change_is_kept(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    run = made("a")
    first = (run / CURRENT).read_text()
    folder = opened(f"checkpoint.resume={run}", "actor.lr=2e-3")
    begun: list[bool] = []
    folder.open(lambda: begun.append(True))  # nothing of a run that is carried on
    assert (run / CURRENT).read_text() == first and not begun
    with caplog.at_level(logging.INFO, logger="gerl"):
        folder.resume_run()
    assert begun == [True]
    assert "resumed with changes: actor.lr 0.001 -> 0.002" in caplog.messages
    assert (run / "config.step_5.yaml").read_text() == first
    assert yaml.safe_load((run / CURRENT).read_text()) == yaml.safe_load(folder.composed.yaml())
    assert opened(f"checkpoint.resume={run}").composed.config.actor.lr == 2e-3  # and from now on
    opened(f"checkpoint.resume={run}", "actor.lr=3e-3").resume_run()  # again from step 5
    assert (run / "config.step_5.yaml").read_text() == first


def test_the_configuration_of_an_earlier_step_is_found_again(made: Made) -> None:
    run = made("a", steps=(2, 5))
    first = (run / CURRENT).read_text()
    folder = opened(f"checkpoint.resume={run}", "actor.lr=2e-3")
    folder.resume_run()
    add(run, folder.composed.config, 8)
    (run / "metrics.jsonl").write_text('{"step": 8}\n')
    later = ["validation/step_000008.npz", "samples/validation_000008.png", "dumps/step_8.json"]
    for name in ("validation/step_000002.npz", "dumps/step_2.json", *later):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("")
    assert [configuration_at(run, step).name for step in (2, 4, 5, 8)] == ["config.step_5.yaml"] * 2 + [CURRENT] * 2
    back = opened(f"checkpoint.resume={run}/checkpoints/step_2")
    assert back.composed.config.actor.lr == 1e-3 and back.changes == []
    back.resume_run()
    assert (run / CURRENT).read_text() == first
    place = run / "abandoned" / "after_step_2"
    moved = ["checkpoints/step_5", "checkpoints/step_8", "config.step_5.yaml", "config.yaml", "metrics.jsonl"]
    assert all((place / name).exists() for name in (*moved, *later))
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_2"]
    assert [p.name for p in (run / "validation").iterdir()] == ["step_000002.npz"]
    assert [p.name for p in (run / "dumps").iterdir()] == ["step_2.json"]
    assert opened(f"checkpoint.resume={place}").composed.config.actor.lr == 2e-3  # a run as before


def test_a_configuration_that_was_edited_is_a_change(made: Made) -> None:
    run = made("a")
    (run / CURRENT).write_text((run / CURRENT).read_text().replace("lr: 0.001", "lr: 0.002"))
    folder = opened(f"checkpoint.resume={run}")
    assert said(folder) == ["actor.lr 0.001 -> 0.002"]
    folder.resume_run()
    assert "lr: 0.001" in (run / "config.step_5.yaml").read_text()
    (run / CURRENT).write_text((run / CURRENT).read_text().replace("seed: 0", "seed: 1"))
    assert "trainer.seed 0 -> 1" in refused(run)


def test_the_folder_of_a_new_run_gets_the_whole_configuration(tmp_path: Path) -> None:
    folder = open_run(["hydra.run.dir=run", "trainer.steps=3"])
    assert folder is not None and not (tmp_path / "run").exists()
    with folder:
        begun: list[bool] = []
        folder.open(lambda: begun.append(True))
        assert (tmp_path / "run" / NAME).exists() and begun == [True]
        with pytest.raises(ConfigError, match=r"run: its run is still alive"):
            opened("hydra.run.dir=run").open()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [CURRENT]
    assert compose_run(["experiment=run/config.yaml"]).config == folder.composed.config
    assert "resume" not in (tmp_path / "run" / CURRENT).read_text()


def test_a_new_run_knows_the_scorers_that_its_reward_replaces_and_a_resumed_run_has_its_own(made: Made) -> None:
    mine = "reward.scorers={mine: {path: mine.py}}"
    assert list(opened(mine).composed.replaced) == ["ocr", "colour"]
    watched = "{weight: 0, during: validation}"
    run = made("a", f"reward.scorers={{mine: {{path: mine.py}}, ocr: {watched}, colour: {watched}, sharpness: {{}}}}")
    again = opened(f"checkpoint.resume={run}", mine).composed  # the same command line
    assert list(again.config.reward.scorers) == ["mine", "ocr", "colour"] and not again.replaced
    less = opened(f"checkpoint.resume={run}", mine, "~reward.scorers.ocr").composed.config.reward.scorers
    assert list(less) == ["mine", "colour"]
    assert list(opened(f"checkpoint.resume={run}", "reward.scorers.ocr=null").composed.config.reward.scorers) == [
        "mine",
        "colour",
        "sharpness",
    ]


def test_a_scorer_that_stays_watched_is_no_other_value_of_the_experiment(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    watched = "{weight: 0, during: validation}"
    run = made("a", f"reward.scorers={{ocr: {{replicas: 2}}, sharpness: {watched}, imagereward: {watched}}}")
    with caplog.at_level(logging.INFO, logger="gerl"):
        opened(f"checkpoint.resume={run}", "experiment=signs")
    (said,) = [message for message in caplog.messages if message.startswith("kept from the run")]
    assert "reward.scorers.colour" in said and "sharpness" not in said and "imagereward" not in said

"""The files of a run that is carried on: damaged or of other versions, finished, kept and set aside."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from resumed_runs import KEYS, WORKER, Made, add, content, opened, refused, said

from gerl.commandline.composition import compose_run
from gerl.errors import CheckpointError, ConfigError
from gerl.run.checkpoint import NAME, RunState, save_checkpoint
from gerl.trainer.run_folder import CURRENT, configuration_at, open_run

pytestmark = pytest.mark.usefixtures("here")

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


def test_a_checkpoint_of_the_first_format_is_compared_with_the_configuration(made: Made) -> None:
    run = made("a", steps=())
    record = RunState(5, worker=WORKER).to_json()
    del record["settings"]
    record["identity"] = {"model.lora_*": "(32, 64.0, None)", "trainer.seed": "0"}
    path = save_checkpoint(run / "checkpoints", 5, {}, record)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["format"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert said(opened(f"checkpoint.resume={run}", "actor.lr=2e-3")) == ["actor.lr 0.001 -> 0.002"]
    assert "trainer.seed 0 -> 1" in refused(run, "trainer.seed=1")


# --- runs that are finished


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
    folder.open(lambda: begun.append(folder.accepted))  # nothing of a run that is carried on
    assert (run / CURRENT).read_text() == first and not begun
    with caplog.at_level(logging.INFO, logger="gerl"):
        folder.carry_on()
    assert begun == [True]
    assert "resumed with changes: actor.lr 0.001 -> 0.002" in caplog.messages
    assert (run / "config.step_5.yaml").read_text() == first
    assert yaml.safe_load((run / CURRENT).read_text()) == yaml.safe_load(folder.composed.yaml())
    assert opened(f"checkpoint.resume={run}").composed.config.actor.lr == 2e-3  # and from now on
    opened(f"checkpoint.resume={run}", "actor.lr=3e-3").carry_on()  # again from step 5
    assert (run / "config.step_5.yaml").read_text() == first


def test_the_configuration_of_an_earlier_step_is_found_again(made: Made) -> None:
    run = made("a", steps=(2, 5))
    first = (run / CURRENT).read_text()
    folder = opened(f"checkpoint.resume={run}", "actor.lr=2e-3")
    folder.carry_on()
    add(run, folder.composed.config, 8)
    (run / "metrics.jsonl").write_text('{"step": 8}\n')
    for name in ("validation/step_000002.npz", "validation/step_000008.npz", "samples/validation_000008.png"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("")
    assert [configuration_at(run, step).name for step in (2, 4, 5, 8)] == ["config.step_5.yaml"] * 2 + [CURRENT] * 2
    back = opened(f"checkpoint.resume={run}/checkpoints/step_2")
    assert back.composed.config.actor.lr == 1e-3 and back.changes == []
    back.carry_on()
    assert (run / CURRENT).read_text() == first
    place = run / "abandoned" / "after_step_2"
    moved = ["checkpoints/step_5", "checkpoints/step_8", "config.step_5.yaml", "config.yaml", "metrics.jsonl"]
    moved += ["validation/step_000008.npz", "samples/validation_000008.png"]
    assert all((place / name).exists() for name in moved)
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_2"]
    assert [p.name for p in (run / "validation").iterdir()] == ["step_000002.npz"]
    assert opened(f"checkpoint.resume={place}").composed.config.actor.lr == 2e-3  # a run as before


def test_a_configuration_that_was_edited_is_a_change(made: Made) -> None:
    run = made("a")
    (run / CURRENT).write_text((run / CURRENT).read_text().replace("lr: 0.001", "lr: 0.002"))
    folder = opened(f"checkpoint.resume={run}")
    assert said(folder) == ["actor.lr 0.001 -> 0.002"]
    folder.carry_on()
    assert "lr: 0.001" in (run / "config.step_5.yaml").read_text()
    (run / CURRENT).write_text((run / CURRENT).read_text().replace("seed: 0", "seed: 1"))
    assert "trainer.seed 0 -> 1" in refused(run)


def test_the_folder_of_a_new_run_gets_the_whole_configuration(tmp_path: Path) -> None:
    folder = open_run(["hydra.run.dir=run", "trainer.steps=3"])
    assert folder is not None and not (tmp_path / "run").exists()
    with folder:
        begun: list[bool] = []
        folder.open(lambda: begun.append(folder.accepted))
        assert (tmp_path / "run" / NAME).exists() and begun == [True]
        with pytest.raises(ConfigError, match=r"run: its run is still alive"):
            opened("hydra.run.dir=run").open()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [CURRENT]
    assert compose_run(["experiment=run/config.yaml"]).config == folder.composed.config
    assert "resume" not in (tmp_path / "run" / CURRENT).read_text()

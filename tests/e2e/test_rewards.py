"""Scorers that are wrong from the beginning, or die or hang over Ray in the middle of a run, which loses nothing."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from drills import more

# Brightness; the n-th call of all processes together may fail, and one prompt always kills the process that scores it.
FAULTY = """
import os, signal, time
import numpy as np

def compute_score(images, prompts, metadata, log, faults, poison):
    with open(log, "a") as file:
        file.write(f"{os.getpid()} ")
    fault = faults.get(len(open(log).read().split()))
    if any("poison" in prompt for prompt in prompts):
        fault = poison
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(1000)
    if fault == "raise":
        raise OSError("lost")
    return [float(np.asarray(image).mean()) / 255 for image in images]
"""
WATCHED = """
import os, sys

def compute_score(images, prompts, metadata):
    own = {"pid": os.getpid(), "torch": int("torch" in sys.modules)}
    return {"width": [image.width for image in images], **{name: [value] * len(images) for name, value in own.items()}}
"""


@pytest.fixture
def run(train: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "watched.py").write_text(WATCHED)
    (tmp_path / "prompts.txt").write_text("a red fox\na poison\nblue\na sign 482\n")

    def start(name: str, faults: str, poison: str, *overrides: str, **keys: Any) -> Any:
        kwargs = f"{{log: {tmp_path / f'{name}.log'}, faults: {faults}, poison: {poison}}}"
        scorer = f"+reward.scorers.mean={{path: {tmp_path / 'faulty.py'}, kwargs: {kwargs}, timeout: 5, replicas: 2}}"
        watched = f"+reward.scorers.watched={{path: {tmp_path / 'watched.py'}, weight: 0}}"
        fixed = {"scorer": "", "data__train": tmp_path / "prompts.txt", "data__shuffle": "false"}
        fixed["reward__trial"] = "false"  # calls are counted from the first step on
        fixed |= {"rollout__micro_batch_size": 2, "rollout__n": 2}
        return train(tmp_path / name, scorer, watched, *overrides, **fixed | keys)

    return start


@more
def test_processes_that_die_or_hang_cost_time_but_no_scores(
    run: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    plain = run("plain", "{}", "raise")
    faulty = run("faulty", "{1: kill, 6: hang}", "kill", cluster__launcher="ray", cluster__num_workers=1)
    pids = plain.column("reward/watched/pid/mean"), faulty.column("reward/watched/pid/mean")
    assert len(set(pids[0])) == len(set(pids[1])) == 1  # the other scorer's process lived on
    for row, other in zip(faulty.untimed(), plain.untimed(), strict=True):
        own = {name: row[name] for name in row if name.startswith(("reward/watched/pid/", "reward/watched/torch/"))}
        assert row == pytest.approx(other | own, rel=1e-4, abs=1e-6)
    assert not any(faulty.column("reward/watched/torch/mean"))  # which takes seconds and memory that no function needs
    assert faulty.column("group/dropped") == [1, 0]
    # one killed, one that hung, and two for the prompt that kills
    assert sum(faulty.column("scorer/mean/restarts")) == 4 and not any(faulty.column("scorer/watched/restarts"))
    for happened in ("mean: .*died.* 2 images of 'a poison'.*restarted", "mean: .* 5 s.* 2 images of '"):
        assert re.search(happened, caplog.text)
    assert re.search("mean has no score for image 0 of 'a poison': .*died", caplog.text)


def test_a_scorer_that_keeps_failing_stops_the_run_with_a_checkpoint(
    run: Callable[..., Any], arguments: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):  # the run's exit code
        run("run", "{5: raise, 6: raise}", "raise", "reward.retries=0", trainer__steps=4)
    assert re.search(r"100% .*step 3 .*reward\.max_failed=0\.5", capsys.readouterr().err)
    assert (tmp_path / "run" / "checkpoints" / "step_2" / "state.json").exists()


NO_RETURN = """
def compute_score(images, prompts, metadata):
    scores = [image.width for image in images]
"""
EXIT = """
import os, sys, time

def leave(images, prompts, metadata):
    sys.exit(3)

def end(images, prompts, metadata):
    os._exit(3)

def sleep(images, prompts, metadata):
    time.sleep(1000)

def late(images, prompts, metadata, log):
    with open(log, "a") as file:
        file.write("x")
    if len(open(log).read()) > 2:
        sys.exit(3)
    return [0.1 * i for i in range(len(images))]
"""


@pytest.fixture
def unloadable(tmp_path: Path) -> Path:
    """A model that is only found out when it is loaded: were it loaded first, this would be the error."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text('{"_class_name": "None"}')
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("leave", r"it called sys\.exit\(3\) \(.*exits\.py, line 5: sys\.exit\(3\)\)"),
        ("sleep", r"no answer within 2 s \(.*exits\.py, line 11: time\.sleep\(1000\)\)"),
    ],
)
def test_a_scorer_that_ends_or_holds_this_process_is_found_before_the_model_is_loaded(
    refused: Callable[..., str], unloadable: Path, tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "exits.py").write_text(EXIT)
    mine = f"reward.scorers={{mine: {{path: {tmp_path / 'exits.py'}, function: {name}, timeout: 2}}}}"
    assert re.search(rf"reward\.scorers\.mine .*grey images: {said}", refused(mine, model__path=unloadable))
    assert [path.name for path in (tmp_path / "run").glob("*")] in ([], ["config.yaml"])


@more
def test_scorers_that_end_or_hold_their_process_are_found_before_the_model_is_loaded(
    refused: Callable[..., str], unloadable: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "exits.py").write_text(EXIT)
    scorers = {"leave": (0, 60), "sleep": (0, 2), "end": (1, 60)}
    texts = [
        f"{name}: {{path: {tmp_path / 'exits.py'}, function: {name}, weight: {weight}, timeout: {timeout}}}"
        for name, (weight, timeout) in scorers.items()
    ]
    given = f"reward.scorers={{{', '.join(texts)}}}"
    message = refused(given, cluster__launcher="ray", cluster__num_workers=1, model__path=unloadable)
    assert re.search(r"reward\.scorers\.end .*grey images: its process died", message)
    assert re.search(r"scorers\.leave .*sys\.exit\(3\) \(.*exits\.py, line 5: .*the run continues", caplog.text)
    assert re.search(r"scorers\.sleep .*no answer within 2 s.*the run continues", caplog.text)


def test_what_counts_is_said_and_a_reward_of_your_own_is_the_only_one(
    refused: Callable[..., str], unloadable: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text(NO_RETURN)
    mine = f"reward.scorers={{mine: {{path: {tmp_path / 'mine.py'}}}, sharpness: {{weight: 0}}}}"
    with caplog.at_level("INFO"):
        message = refused(mine, experiment="signs", model__path=unloadable)
    assert "returned None, expected a list with one number per image" in message
    assert "mine.py, line 2: compute_score" in message
    assert "reward: 1 x mine; watched: sharpness" in caplog.messages
    assert "ocr and colour of the experiment are not watched: there are no held-out prompts" in caplog.messages


def test_replaced_scorers_are_watched_in_validation_and_change_no_training(
    train: Callable[..., Any], workplace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("".join(f'a red sign that reads "{number}"\n' for number in range(12)))
    keys = {"experiment": "signs", "scorer": "", "data__train": held_out, "validation__data": held_out}
    mine = f"reward.scorers={{mine: {{path: {workplace / 'bright.py'}}}}}"
    with caplog.at_level("INFO"):
        watched = train(tmp_path / "watched", mine, **keys)
        alone = train(tmp_path / "alone", mine, "~reward.scorers.ocr", "~reward.scorers.colour", **keys)
    assert watched.column("reward/mean") == alone.column("reward/mean")
    assert len(watched.column("val/ocr/exact/mean")) == len(watched.column("val/colour/mean")) > 0
    assert not watched.column("reward/ocr/mean") and not alone.column("val/ocr/mean")
    written = yaml.safe_load((tmp_path / "watched" / "config.yaml").read_text())["reward"]["scorers"]
    assert {name: (scorer["weight"], scorer["during"]) for name, scorer in written.items()} == {
        "mine": (1, "both"),
        "ocr": (0, "validation"),
        "colour": (0, "validation"),
    }
    assert "reward: 1 x mine; watched: ocr (in validation), colour (in validation)" in caplog.messages
    assert any("sees a fall of ocr, ocr/exact, colour, colour/named while" in message for message in caplog.messages)
    assert sum(message.startswith("no scorer is watched") for message in caplog.messages) == 1
    (offered,) = [message for message in caplog.messages if message.startswith("scorers that can be watched without")]
    assert "'+reward.scorers.ocr={weight: 0, during: validation}'" in offered


def test_a_scorer_that_calls_exit_in_the_middle_of_a_run_in_process_is_a_sentence(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "exits.py").write_text(EXIT)
    mine = f"{{path: {tmp_path / 'exits.py'}, function: late, kwargs: {{log: {tmp_path / 'log'}}}}}"
    message = refused(f"reward.scorers={{mine: {mine}}}", "reward.trial=false")
    assert re.search(r"100% .*step 2 .*it called sys\.exit\(3\) \(.*exits\.py, line 17: ", message)
    assert (tmp_path / "run" / "checkpoints" / "step_1" / "state.json").exists()


def test_a_score_that_float32_cannot_hold_is_a_failure(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "huge.py").write_text("def compute_score(images, *_):\n    return [1e300] * len(images)\n")
    message = refused(f"reward.scorers={{mine: {{path: {tmp_path / 'huge.py'}}}}}", "reward.trial=false")
    assert re.search(r"100% .*step 1 .*returned 1e\+300.*float32.*huge\.py, line 1", message)
    (tmp_path / "huge.py").write_text("def compute_score(images, *_):\n    return [3e38] * len(images)\n")
    heavy = f"reward.scorers={{mine: {{path: {tmp_path / 'huge.py'}, weight: 10}}}}"
    message = refused(heavy, hydra__run__dir=tmp_path / "heavy")
    assert re.search(r"100% .*step 1 .*part of the total is 3e\+39.*float32.*scale or weight", message)


PARTLY = """
import numpy as np

def compute_score(images, prompts, metadata, log):
    if "seven" in prompts and open(log, "a").tell() < 2:  # twice
        open(log, "a").write("x")
        raise OSError("lost")
    return [float(np.asarray(image).mean()) / 255 for image in images]
"""


def test_a_validation_with_failures_is_counted_and_compared_with_no_other(
    train: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "partly.py").write_text(PARTLY)
    (tmp_path / "val.txt").write_text("seven\nblue\na cat\nx y\n")
    (tmp_path / "train.txt").write_text("a red fox\nblue\n")
    kwargs = f"{{log: {tmp_path / 'log'}}}"
    keys = {"data__train": tmp_path / "train.txt", "validation__data": tmp_path / "val.txt", "validation__every": 1}
    keys |= {"validation__micro_batch_size": 1, "checkpoint__every": 1, "checkpoint__keep": 9, "trainer__steps": 3}
    keys["reward__retries"] = 0
    run = train(tmp_path / "run", scorer=tmp_path / "partly.py", reward__scorers__bright__kwargs=kwargs, **keys)
    assert run.column("val/failures") == [1, 1, 0, 0]
    means = run.column("val/reward/mean")
    assert means[:2] == [None, None] and all(0 < mean < 1 for mean in means[2:])
    assert re.search("step 1: reward on 3 of 4 held-out prompts .*, 1 not scored.*'seven': OSError: lost", caplog.text)
    saved = [json.loads((run.checkpoint(step) / "state.json").read_text())["val_reward"] for step in (1, 2, 3)]
    assert saved == [None, *means[2:]]
    kept = [json.loads((run.folder / "validation" / f"step_{step:06d}.json").read_text()) for step in (0, 2)]
    assert kept[0]["rewards"][0] is None and None not in kept[1]["rewards"]


def test_a_scorer_that_fails_in_validation_may_stop_the_run(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "partly.py").write_text(PARTLY)
    (tmp_path / "val.txt").write_text("seven\nblue\n")
    (tmp_path / "train.txt").write_text("a red fox\nblue\n")
    mine = f"reward.scorers={{mine: {{path: {tmp_path / 'partly.py'}, kwargs: {{log: {tmp_path / 'log'}}}}}}}"
    keys = {"data__train": tmp_path / "train.txt", "validation__data": tmp_path / "val.txt"}
    message = refused(mine, reward__on_error="stop", **keys)
    assert re.search("mine has no score for held-out 'seven': OSError: lost .*partly.py, line 7: raise", message)


@more
def test_prompts_with_typographic_quotes_train_as_with_straight_ones(train: Callable[..., Any], tmp_path: Path) -> None:
    texts = {"straight": '"{}"', "curly": "“{}”", "german": "„{}“"}
    runs = []
    for name, quotes in texts.items():
        lines = [f"a red sign that reads {quotes.format(text)}" for text in ("35", "482", "EXIT", "71")]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        keys = {"model__path": "signs", "data__train": tmp_path / f"{name}.txt", "sampling__width": 96}
        keys |= {"sampling__height": 32, "sampling__call": "{max_sequence_length: 1}", "trainer__steps": 1}
        runs.append(train(tmp_path / name, "reward.scorers={ocr: {}}", scorer="", **keys))
    straight, *others = runs
    assert straight.metrics[0]["reward/mean"] > 0.1
    for run in others:
        assert run.untimed() == straight.untimed() and torch.equal(run.lora(1), straight.lora(1))

"""The command line around the trainer: exit codes, which run is carried on, the closing screen."""

import logging
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gerl.commandline.composition import Composed, compose_run
from gerl.config import Config, TrainerConfig
from gerl.errors import CheckpointError, ConfigError, GerlError, Interrupted, ModelError
from gerl.run.checkpoint import save_checkpoint
from gerl.run.report import save_validation
from gerl.trainer import main_flowgrpo
from gerl.trainer.main_flowgrpo import closing_screen, find_checkpoint, identity, main, prepare_folder


@pytest.fixture
def composed(tmp_path: Path) -> Any:
    def compose(run: str = "new", *overrides: str) -> Composed:
        return compose_run(["experiment=plain", f"hydra.run.dir={tmp_path / 'runs' / run}", *overrides])

    return compose


def checkpoint(run_dir: Path, step: int, finished: bool = False) -> Path:
    path = save_checkpoint(run_dir / "checkpoints", step, {}, {"step": step, "finished": finished})
    time.sleep(0.01)  # the newest is the one written last
    return path


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_shown_and_nothing_started(
    option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_flowgrpo, "run", None)
    assert main([option, "trainer.stepz=1"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m gerl.trainer.main_flowgrpo")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("a.b=1: use 2"), 2, "error: a.b=1: use 2\n"),
        (ModelError("no pipeline"), 1, "error: no pipeline\n"),
        (GerlError("anything"), 1, "error: anything\n"),
        (Interrupted(signal.SIGTERM), 143, ""),
        (Interrupted(signal.SIGINT), 130, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Composed) -> None:
        raise error

    monkeypatch.setattr(main_flowgrpo, "run", fail)
    assert main(["experiment=plain"]) == code
    assert capsys.readouterr().err == message


def test_a_bug_is_not_dressed_up_as_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_flowgrpo, "run", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["experiment=plain"])


@pytest.mark.parametrize(
    ("resume", "saved", "carried_on"),
    [
        ("never", [("old", 3)], None),
        ("auto", [("b", 3), ("a", 1), ("a", 2)], ("a", 2)),  # the newest
        ("auto", [("new", 3), ("other", 4)], ("new", 3)),  # its own folder comes first
    ],
)
def test_which_run_is_carried_on(
    composed: Any, tmp_path: Path, resume: str, saved: list[tuple[str, int]], carried_on: tuple[str, int] | None
) -> None:
    for name, step in saved:
        checkpoint(tmp_path / "runs" / name, step)
    run_dir, found = find_checkpoint(composed("new", f"checkpoint.resume={resume}"))
    assert (found and (run_dir.name, found.step)) == carried_on
    assert run_dir == tmp_path / "runs" / (carried_on or ("new",))[0]


def test_auto_starts_anew_after_a_finished_run_and_where_there_is_none(
    composed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="gerl"):
        assert find_checkpoint(composed("new", "checkpoint.resume=auto")) == (tmp_path / "runs" / "new", None)
        checkpoint(tmp_path / "runs" / "old", 2)
        checkpoint(tmp_path / "runs" / "old", 3, finished=True)
        assert find_checkpoint(composed("new", "checkpoint.resume=auto")) == (tmp_path / "runs" / "new", None)
    assert len(caplog.messages) == 2 and all(str(tmp_path / "runs") in message for message in caplog.messages)


def test_a_run_or_a_checkpoint_by_path(composed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "runs" / "old"
    for step in (2, 3):
        checkpoint(old, step)
    for path, step in ((old, 3), (old / "checkpoints" / "step_2", 2), (old / "checkpoints" / "step_3", 3)):
        run_dir, found = find_checkpoint(composed("new", f"checkpoint.resume={path}"))
        assert run_dir == old and found is not None and found.step == step
    monkeypatch.chdir(tmp_path)
    run_dir, found = find_checkpoint(composed("new", "checkpoint.resume=runs/old"))
    assert run_dir.resolve() == old and found is not None
    with pytest.raises(CheckpointError, match=r"checkpoint\.resume=runs/nowhere: .*auto or never"):
        find_checkpoint(composed("new", "checkpoint.resume=runs/nowhere"))


def test_the_folder_gets_the_whole_configuration(composed: Any, tmp_path: Path) -> None:
    run = composed("new", "trainer.steps=3")
    prepare_folder(run.run_dir, run)
    again = compose_run([f"experiment={run.run_dir / 'config.yaml'}"])
    assert again.config == run.config


def test_what_identifies_a_run(composed: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.txt").write_text("one\n")
    base = identity(composed("new", f"data.train={tmp_path / 'a.txt'}", "validation.data=null").config)
    assert set(base) == {"model.lora_*", "trainer.seed", "data.train"}

    def changed(*overrides: str) -> list[str]:
        given = [f"data.train={tmp_path / 'a.txt'}", "validation.data=null", *overrides]
        other = identity(composed("new", *given).config)
        return [key for key, value in other.items() if base.get(key) != value]

    assert changed(f"data.train={tmp_path / 'b.txt'}") == []  # the content counts, not the name
    assert changed("trainer.steps=7", "actor.lr=1", "rollout.n=3") == []
    assert changed("model.lora_rank=7") == changed("model.lora_targets=to_q") == ["model.lora_*"]
    assert changed("trainer.seed=1") == ["trainer.seed"]
    (tmp_path / "b.txt").write_text("two\n")
    assert changed(f"data.train={tmp_path / 'b.txt'}") == ["data.train"]


def test_the_closing_screen(tmp_path: Path) -> None:
    pixels = np.zeros((3, 4, 4, 3), np.uint8)
    prompts = ["a", "b", "c"]
    for step, scores in ((0, [0.2, None, 0.4]), (5, [0.5, 0.5, 0.8]), (100, [None, None, 0.9])):
        save_validation(tmp_path, step, prompts, pixels, scores, {"ocr": scores})
    text = closing_screen(Config(), tmp_path, [], 90.0)
    assert "1.5 min" in text and str(tmp_path / "report.html") in text
    assert re.search(r"ocr .* 3 .*0\.300 before.*0\.900 after", text)  # failed scores are left out, not 0
    code = "\n".join(line.strip() for line in text.splitlines() if "pipe" in line or "import" in line)
    compile(code, "closing screen", "exec")
    assert code.count("\n") == 2 and f"{tmp_path / 'checkpoints' / 'step_100' / 'lora'}" in code


def test_the_closing_screen_without_validation(tmp_path: Path) -> None:
    config = Config(trainer=TrainerConfig(steps=7))
    text = closing_screen(config, tmp_path, [], 1.0)
    assert str(tmp_path / "checkpoints" / "step_7" / "lora") in text and str(tmp_path / "report.html") in text
    pixels = np.zeros((1, 4, 4, 3), np.uint8)
    save_validation(tmp_path, 0, ["a"], pixels, [0.5], {"ocr": [0.5]})
    assert closing_screen(config, tmp_path, [], 1.0) == text  # one validation alone: there is nothing to compare
    save_validation(tmp_path, 7, ["a"], pixels, [0.75], {"ocr": [0.75]})
    with_change = closing_screen(config, tmp_path, [], 1.0).splitlines()
    (line,) = set(with_change) - set(text.splitlines())
    assert "0.500" in line and "0.750" in line

import json
import os
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from gerl.errors import ModelError
from gerl.run.card import Card, commit_of, hardware, read_sessions

SMI = """#!/bin/sh
echo "NVIDIA H200, 143771, 580.65.06"
echo "[N/A], [N/A], [N/A]"
"""


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_card_has_command_code_versions_machine_and_times(tmp_path: Path) -> None:
    arguments = ["trainer.steps=2", "data.train=my prompts.txt", "reward.scorers.a.kwargs.api_key=s3cret"]
    card = Card(tmp_path, arguments, "2 on cpu, ray")
    (session,) = read_sessions(tmp_path / "run.json")
    assert session["ended"] is None and session["end"] is None  # it shows that a run was killed
    card.end("finished")
    (session,) = read_sessions(tmp_path / "run.json")
    shown = "trainer.steps=2 'data.train=my prompts.txt' reward.scorers.a.kwargs.api_key=***"
    assert session["command"] == f"python -m gerl.trainer.main_flowgrpo {shown}"
    assert session["folder"] == os.getcwd() and session["workers"] == "2 on cpu, ray"
    started, ended = (datetime.fromisoformat(session[name]) for name in ("started", "ended"))
    assert started.tzinfo is not None and started <= ended
    assert session["end"] == "finished" and "error" not in session
    assert {"torch", "diffusers", "peft", "transformers", "ray", "numpy"} <= set(session["packages"])
    assert session["python"] and session["system"] and session["cpu"] and session["cores"] >= 1


def test_a_resumed_run_adds_a_session_and_says_how_each_ended(tmp_path: Path) -> None:
    Card(tmp_path, [], "1").end("error", ModelError("no such\npassword=abc"))
    Card(tmp_path, ["checkpoint.resume=auto"], "1").end("interrupted", KeyboardInterrupt())
    first, second = read_sessions(tmp_path / "run.json")
    assert first["error"] == "ModelError: no such password=***" and first["end"] == "error"
    assert second["end"] == "interrupted" and "resume=auto" in second["command"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"sessions": 3}', '{"sessions": [1]}'])
def test_a_damaged_card_does_not_keep_a_run_from_going_on(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    Card(tmp_path, [], "1").end("finished")
    assert len(json.loads((tmp_path / "run.json").read_text())["sessions"]) == 1


def test_the_commit_and_whether_files_were_changed(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "a")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert commit_of(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "outputs").mkdir()
    assert commit_of(tmp_path / "outputs") == {"commit": commit, "dirty": False}
    assert commit_of(tmp_path / "outputs", at_top=True) is None
    (tmp_path / "a").write_text("2")
    assert commit_of(tmp_path, at_top=True) == {"commit": commit, "dirty": True}


def test_gpus_are_those_that_the_driver_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware()["gpus"] == []
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert hardware()["gpus"] == ["NVIDIA H200, 140 GiB, driver 580.65.06"]

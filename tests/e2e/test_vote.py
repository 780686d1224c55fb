"""People as the reward of whole runs: a program votes at the page's own requests."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import requests
from drills import more
from voting import Voter, service

from reward_models.votes.ballots import Journal
from reward_models.votes.command import TOKEN

Train = Callable[..., Any]
RED = """
import numpy as np

def compute_score(images, prompts, metadata):
    pixels = [np.asarray(image).astype(float) / 255 for image in images]
    return [float((p[..., 0] - (p[..., 1] + p[..., 2]) / 2).mean()) for p in pixels]
"""
EASY = """
model.lora_alpha=32 actor.lr=0.02 actor.ema_decay=0.5 rollout.prompts_per_step=3 rollout.n=8 rollout.micro_batch_size=24
""".split()


@pytest.fixture
def watched(tmp_path: Path) -> str:
    """The key of a scorer that only watches how red images are."""
    (tmp_path / "red.py").write_text(RED)
    return f"+reward.scorers.red={{path: {tmp_path / 'red.py'}, weight: 0}}"


def scorer(url: str) -> str:
    return f"reward.scorers={{vote: {{kwargs: {{url: '{url}'}}}}}}"


@more
def test_a_voter_who_prefers_red_raises_held_out_redness(
    train: Train, watched: str, workplace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No held-out prompt is shown to people: only the watched scorer measures them, and there is no held-out reward."""
    caplog.set_level("INFO", "gerl")
    with service(tmp_path / "votes") as (url, ballots, _), Voter(f"{url}/") as voter:
        run = train(
            tmp_path / "run",
            *[scorer(url), watched, *EASY],
            scorer="",
            trainer__steps=10,
            validation__data=workplace / "val.txt",
            validation__every=5,
        )
    before, _, after = run.column("val/red/mean")
    assert after > before + 0.002, (before, after)
    assert not [name for row in run.metrics for name in row if name.startswith(("val/reward", "val/vote"))]
    assert [row["val/failures"] for row in run.metrics if "val/failures" in row] == [0, 0, 0]
    assert "4 held-out prompts are sampled; no scorer with a weight scores them" in caplog.text
    assert all(row["reward/vote/mean"] == pytest.approx(0.5) for row in run.metrics[1:])
    assert len(set(voter.votes)) == len(voter.votes) == 30
    assert {ballot.request.step for ballot in ballots.ballots.values()} == set(range(1, 11))
    rows = parquet.read_table(tmp_path / "votes" / "preferences.parquet").to_pylist()
    assert len(rows) == 30 and all(row["used"] and sorted(row["ranks"]) == list(range(1, 9)) for row in rows)
    assert all((tmp_path / "votes" / path).is_file() for row in rows for path in row["images"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@more
def test_nothing_is_lost_when_trainer_and_service_are_killed_in_the_middle_of_votes(
    arguments: Callable[..., list[str]], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after three votes, of which one is on a step that is not trained; the end is that of a run without."""
    keys = {"scorer": "", "checkpoint__every": 1, "trainer__steps": 2}
    folder, port = tmp_path / "run", free_port()
    command = [sys.executable, "-m", "gerl.vote", *arguments(folder, **keys), "voters=anna", "undo=0", f"port={port}"]
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    try:
        link = process.stderr.readline().removeprefix("vote at ").strip()
        assert link.startswith(f"http://127.0.0.1:{port}/vote/anna/")
        voter = Voter(link)
        while len(voter.votes) < 3:
            assert process.poll() is None, process.stderr.read()
            if (group := voter.state()["group"]) is None:
                time.sleep(0.05)
                continue
            assert voter.post("vote", group=group["id"], ranks=voter.choose(voter.images(group))).ok
            voter.votes.append(group["id"])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    rows = Journal(folder / "votes").replay()
    assert [row["group"] for row in rows if row["kind"] == "vote"] == voter.votes
    assert (folder / "checkpoints" / "step_1").is_dir() and not (folder / "checkpoints" / "step_2").exists()
    with pytest.raises(requests.ConnectionError):
        requests.get(link, timeout=5)

    with service(folder / "votes", ["anna"], port) as (url, _, tokens), Voter(tokens.links(url)["anna"]) as again:
        assert tokens.links(url)["anna"] == link
        monkeypatch.setenv(TOKEN, str(tokens.run))
        own = scorer(url).replace("'}}}", f"', token_env: {TOKEN}}}}}}}")
        run = train(folder, own, checkpoint__resume="auto", **keys)
    assert len(again.votes) == 1 and not set(again.votes) & set(voter.votes)
    with service(tmp_path / "votes") as (url, _, _), Voter(f"{url}/") as whole:
        expected = train(tmp_path / "whole", scorer(url), **keys)
    assert len(whole.votes) == 4
    assert (run.lora(2) == expected.lora(2)).all() and run.lora(2).any()
    table = parquet.read_table(folder / "votes" / "preferences.parquet").to_pylist()
    assert [row["voter"] for row in table] == ["anna"] * 4 and all(row["used"] for row in table)


@more
def test_one_ctrl_c_ends_service_and_run_with_a_checkpoint(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    """As a terminal sends it, to the whole group of processes; the page is told."""
    folder, port = tmp_path / "run", free_port()
    given = arguments(folder, scorer="", checkpoint__every=0, trainer__steps=5)
    process = subprocess.Popen(
        [sys.executable, "-m", "gerl.vote", *given, "undo=0", f"port={port}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        voter = Voter(f"http://127.0.0.1:{port}/")
        while len(voter.votes) < 3:
            assert process.poll() is None
            with contextlib.suppress(requests.ConnectionError):
                if (group := voter.state()["group"]) is not None:
                    voter.post("vote", group=group["id"], ranks=voter.choose(voter.images(group)))
                    voter.votes.append(group["id"])
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130 and "Traceback" not in said, said
    assert said.count("stopped by SIGINT") == 2 and "checkpoint" in said, said
    assert (folder / "checkpoints" / "step_1").is_dir()
    assert len(parquet.read_table(folder / "votes" / "preferences.parquet")) == 3

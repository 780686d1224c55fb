"""The queue of the studio, with real processes: killed, stopped, and followed by another page."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gerl.errors import GerlError, TrustError
from gerl.web.studio import jobs as jobs_module
from gerl.web.studio.jobs import Job, Jobs, Store, shell_line, user_key

# `COMMAND SECONDS CODE` sleeps and exits; as gerl does, it ends with 130 after an interrupt
PROGRAM = ("sh", "-c", 'trap "exit 130" INT; echo slept; sleep $2 & wait $!; exit $3', "sh")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path / "runs")
    yield found
    found.close()


def on_cpu(store: Store) -> Jobs:
    jobs = Jobs(store, program=PROGRAM)
    jobs.devices = ["cpu"]
    return jobs


def until(jobs: Jobs, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, [job.state for job in jobs.all]
        jobs.poll()
        time.sleep(0.02)


def test_jobs_run_one_after_the_other_and_tell_their_end(store: Store) -> None:
    jobs = on_cpu(store)
    first, second, third = (jobs.add("train", ["0.2", code], "a run") for code in ("0", "3", "0"))
    assert [job.state for job in jobs.all] == ["running", "waiting", "waiting"]
    jobs.move(third, -1)
    until(jobs, lambda: third.ended is not None)
    assert (first.state, second.state, third.state) == ("finished", "running", "finished")
    until(jobs, lambda: second.ended is not None)
    assert second.state == "failed" and second.code == 3 and jobs.log(first) == "slept\n"


def test_a_job_per_gpu_and_the_first_of_the_queue_is_not_overtaken(store: Store) -> None:
    jobs = on_cpu(store)
    jobs.devices = ["0", "1"]
    one, two, three = (jobs.add("train", ["0.3", "0"], "a run", gpus=gpus) for gpus in (1, 2, 1))
    assert [job.state for job in (one, two, three)] == ["running", "waiting", "waiting"]
    until(jobs, lambda: three.ended is not None)
    assert (one.devices, two.devices) == (["0"], ["0", "1"]) and three.clock > two.clock  # type: ignore[operator]


def test_a_job_is_stopped_or_taken_from_the_queue(store: Store) -> None:
    jobs = on_cpu(store)
    first, second = (jobs.add("train", ["60", "0"], "a run") for _ in range(2))
    until(jobs, lambda: jobs.log(first) == "slept\n")
    jobs.stop(second)
    jobs.stop(first)
    until(jobs, lambda: first.ended is not None)
    assert (first.state, first.code, second.state, second.pid) == ("stopped", 130, "stopped", None)


def test_a_job_that_is_stopped_before_it_handles_signals_is_stopped(store: Store) -> None:
    jobs = on_cpu(store)
    job = jobs.add("train", ["3", "0"], "a run")
    jobs.stop(job)
    until(jobs, lambda: job.ended is not None)
    assert job.state in ("stopped", "finished")  # it may have missed the signal, but nothing killed it


def test_another_page_follows_the_same_jobs(store: Store) -> None:
    jobs = on_cpu(store)
    first, second = (jobs.add("train", [seconds, "0"], "a run") for seconds in ("0.5", "60"))
    third = jobs.add("train", ["0.1", "0"], "a run")
    store.close()  # as the end of the process does
    with pytest.raises(GerlError):
        again = Store(store.root), Store(store.root)
    again = Store(store.root)
    try:
        later = on_cpu(again)
        assert [job.id for job in later.all] == [1, 2, 3]
        until(later, lambda: later.get(2).state == "running")
        assert later.get(1).state == "finished" and later.get(1).code == 0
        pid = later.get(2).pid
        assert pid is not None
        os.killpg(pid, signal.SIGKILL)
        until(later, lambda: later.get(3).ended is not None)
        assert later.get(2).state == "killed" and later.get(3).state == "finished"
    finally:
        again.close()
    assert (first.id, second.id, third.id) == (1, 2, 3)


def test_a_queue_that_somebody_else_wrote_is_not_started_unless_trusted(store: Store, tmp_path: Path) -> None:
    jobs, mark = on_cpu(store), tmp_path / "mark"
    jobs.devices = []
    jobs.add("train", ["0", "0"], "a run", gpus=0)
    until(jobs, lambda: jobs.get(1).ended is not None)
    with store.changing() as values:
        values["drafts"] = {"a": {"name": "a", "texts": {"mine.py": "é"}}}
    store.close()
    copy = shutil.copytree(store.root, tmp_path / "copy")
    with pytest.raises(TrustError, match="trust=true"):
        Store(copy)
    Store(store.root).close()  # in its place it is the user's
    state = json.loads(store.path.read_text())
    state["jobs"].append(state["jobs"][0] | {"id": 2, "pid": None, "ended": None, "code": None})
    store.path.write_text(json.dumps(state))
    for path in (store.root, copy):
        with pytest.raises(TrustError):
            Store(path)
    again = Store(store.root, trust=True)
    try:
        later = Jobs(again, program=("sh", "-c", f"touch {mark}", "sh"))
        later.devices = ["cpu"]
        until(later, lambda: later.get(2).state == "finished")
        assert mark.exists()
    finally:
        again.close()
    Store(store.root).close()  # signed


def test_a_key_that_cannot_be_kept_is_said(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    user_key.cache_clear()
    try:
        with store.changing() as values:
            values["drafts"] = {}
        assert "XDG_STATE_HOME" in caplog.text and store.path.is_file()
        (tmp_path / "gerl").mkdir()
        (tmp_path / "gerl" / "studio.key").touch()  # a key that everybody could guess
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        user_key.cache_clear()
        assert len(user_key()) == 32 and "studio.key" in caplog.text
    finally:
        user_key.cache_clear()


JOB = '{"id": 1, "command": "train", "arguments": ["a"], "title": "t", "created": "now"%s}'
DAMAGED = [
    "{", "[]", '{"jobs": [1]}', '{"jobs": [{"id": 1}]}', '{"jobs": [%s]}' % (JOB % ', "pid": "1"'),
    '{"jobs": [%s]}' % (JOB % ', "devices": 3'), '{"jobs": {}}', '{"drafts": 3}', '{"drafts": {"a": 3}}',
    '{"drafts": {"a": {"revision": "1"}}}', '{"notes": []}', '{"notes": {"run": {"note": 3, "star": true}}}',
    '{"notes": {"run": {"note": "\\ud800", "star": true}}}', "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_state_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "studio.json").write_text(text)
    with pytest.raises(GerlError, match=r"studio\.json cannot be read .*move it away"):
        Jobs(Store(tmp_path))


def test_a_job_that_cannot_be_started_has_failed_and_the_next_one_runs(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    (store.root / "studio").write_text("no folder")
    jobs = on_cpu(store)
    first = jobs.add("train", ["0.1", "0"], "a run")
    assert first.state == "failed" and "job 1 cannot be started" in caplog.text
    (store.root / "studio").unlink()
    second = jobs.add("train", ["0.1", "0"], "a run")
    until(jobs, lambda: second.ended is not None)
    assert second.state == "finished"


def test_a_state_that_cannot_be_written_is_said_once_and_the_queue_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs, stop = on_cpu(store), threading.Event()
    job = jobs.add("train", ["0.3", "0"], "a run")
    monkeypatch.setattr(store, "path", store.root / "missing" / "studio.json")
    watcher = threading.Thread(target=jobs.watch, args=(stop,))
    watcher.start()
    try:
        end = time.monotonic() + 20
        while job.ended is None or not caplog.records:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert watcher.is_alive() and caplog.text.count("cannot be written") == 1
    finally:
        stop.set()
        watcher.join()


def test_the_line_of_a_job_names_its_gpus_and_a_model_that_is_served_makes_room(store: Store) -> None:
    jobs = on_cpu(store)
    jobs.devices = ["2", "3"]
    served = jobs.add("serve", ["20", "0"], "a model", gpus=0)
    assert served.line == "gerl serve 20 0"
    until(jobs, lambda: jobs.log(served) == "slept\n")  # else the signal may come before its handler
    job = jobs.add("train", ["0.1", "0"], "a run")
    assert job.line == "CUDA_VISIBLE_DEVICES=2 gerl train 0.1 0"
    until(jobs, lambda: job.ended is not None and served.ended is not None)
    assert served.stopping and served.state == "stopped"


@pytest.mark.parametrize(("visible", "expected"), [("2,3", ["2", "3"]), ("", ["cpu"]), (None, ["0", "1", "2", "3"])])
def test_the_devices_are_those_that_the_server_may_use(
    store: Store, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]
) -> None:
    monkeypatch.setattr(jobs_module, "hardware", lambda: {"gpus": ["a GPU"] * 4})
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Jobs(store).devices == expected


def test_a_number_whose_folder_exists_is_not_used(store: Store) -> None:
    (store.root / "studio" / "1").mkdir(parents=True)
    assert on_cpu(store).add("train", ["0.1", "0"], "a run").id == 2


# `COMMAND FILE` appends a line to a file
COUNTED = ("sh", "-c", 'echo "$$" >> "$2"; sleep 0.5; exit 3', "sh")


def counted(store: Store) -> Jobs:
    jobs = Jobs(store, program=COUNTED)
    jobs.devices = ["cpu"]
    return jobs


@pytest.mark.parametrize("when", ["before its process", "after its process"])
def test_a_job_whose_studio_was_killed_while_it_began_runs_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    ran, start = store.root / "ran", Jobs._start

    def killed(self: Jobs, job: Job) -> None:
        if when == "after its process":
            start(self, job)
        raise KeyboardInterrupt

    monkeypatch.setattr(Jobs, "_start", killed)
    with pytest.raises(KeyboardInterrupt):
        counted(store).add("train", [str(ran)], "a run")
    monkeypatch.undo()
    store.close()
    again = Store(store.root)
    try:
        jobs = counted(again)
        (job,) = jobs.all
        assert job.state == "waiting" and job.started is not None
        until(jobs, lambda: job.ended is not None)
        assert (job.state, job.code) == ("failed", 3) and len(ran.read_text().splitlines()) == 1
    finally:
        again.close()


def test_a_job_that_cannot_be_recorded_is_refused_and_does_not_run(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, ran = counted(store), store.root / "ran"
    with monkeypatch.context() as broken:
        broken.setattr(store, "path", store.root / "missing" / "studio.json")
        with pytest.raises(GerlError, match="cannot be written"):
            jobs.add("train", [str(ran)], "a run")
    jobs.poll()
    assert jobs.all == [] and not ran.exists()


def test_what_was_typed_is_readable_for_its_user_only(store: Store) -> None:
    jobs = counted(store)
    job = jobs.add("train", [str(store.root / "ran")], "a run")
    until(jobs, lambda: job.ended is not None)
    for file in (store.path, jobs.folder(job) / "log.txt", jobs.folder(job) / "exit"):
        assert file.stat().st_mode & 0o077 == 0, file


WORDS = [
    "plain",
    "two words",
    "out='a b'",
    "a='$HOME'",
    "a='`id`'",
    "a='\\'",
    "a='\"'",
    "a='!'",
    "",
    "a='\n'",
    "*",
    "~",
]


def test_a_line_is_read_by_a_shell_as_its_words() -> None:
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {shell_line(WORDS)}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\0")[:-1] == WORDS
    assert shell_line(["out='a b'"]) == "\"out='a b'\""

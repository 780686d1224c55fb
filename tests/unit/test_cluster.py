"""The worker groups of this process; those over Ray are in tests/e2e/test_workers.py."""

import contextlib
import errno
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass, field, replace

import pytest
import ray
import torch

from gerl.cluster import (
    Cluster,
    Pending,
    WorkerGroup,
    health,
    local_ray,
    machines,
    ray_calls,
    reaper,
    wait_any,
    worker_group,
    worker_share,
)
from gerl.config import ClusterConfig
from gerl.errors import ClusterError, Interrupted, RewardError
from gerl.protocol import Prompt, RolloutTask, Sample


@dataclass
class Worker:
    rank: int
    calls: list[str] = field(default_factory=list)

    def note(self, text: str) -> str:
        self.calls.append(text)
        return f"{self.rank}:{text}"

    def written(self) -> bool:
        return bool(self.calls)

    def fail(self, text: str) -> None:
        raise RewardError(text)

    def crash(self) -> None:
        raise ZeroDivisionError

    def interrupt(self) -> None:
        raise Interrupted(15)


@pytest.fixture
def group() -> WorkerGroup[Worker]:
    with Cluster(ClusterConfig(launcher="local", device="cpu", num_workers=3)) as cluster:
        return cluster.workers("worker", Worker, 3, lambda rank: (rank,), gpus=1.0)


def test_each_worker_gets_its_arguments_and_results_keep_the_order(group: WorkerGroup[Worker]) -> None:
    assert len(group) == 3
    assert group.run(Worker.note, "a") == ["0:a", "1:a", "2:a"]


def test_calls_of_a_worker_happen_in_the_order_of_submission(group: WorkerGroup[Worker]) -> None:
    pending = [group.submit(i % 2, Worker.note, str(i)) for i in range(5)]
    assert [p.result() for p in pending] == ["0:0", "1:1", "0:2", "1:3", "0:4"]
    assert group.workers[0].calls == ["0", "2", "4"]


def test_a_pending_argument_arrives_as_its_value(group: WorkerGroup[Worker]) -> None:
    first = group.submit(0, Worker.note, "x")
    second = group.submit(1, Worker.note, first.later())
    assert isinstance(second, Pending) and second.result() == "1:0:x"


def test_an_exception_waits_for_whoever_asks(group: WorkerGroup[Worker]) -> None:
    pending = group.submit(0, Worker.fail, "no score")
    pending.wait()
    for _ in range(2):
        with pytest.raises(RewardError, match="no score"):
            pending.result()
    with pytest.raises(ZeroDivisionError):
        group.submit(0, Worker.crash).result()
    with pytest.raises(RewardError):
        group.run(Worker.fail, "one failure is that of the group")


RPC = "The actor is temporarily unavailable: RpcError: RPC Error message: Cancelling all calls; RPC Error details: "


@pytest.mark.parametrize(
    ("error", "quoted"),
    [
        (ray.exceptions.ActorUnavailableError(RPC, b"\x0f" * 16), "ActorUnavailableError: The actor is unavailable"),
        (ray.exceptions.RpcError("failed to connect to all addresses; last error: x"), "RpcError: failed to connect"),
        (ray.exceptions.RaySystemError("Broken pipe", "Traceback ..."), "RaySystemError: Broken pipe"),
        (ray.exceptions.ObjectLostError("ab" * 28, None, ""), "ObjectLostError: Failed to retrieve object"),
        (ray.exceptions.ActorDiedError(), "ActorDiedError: The actor died unexpectedly before finishing this task"),
        (ray.exceptions.LocalRayletDiedError(), "LocalRayletDiedError: The task's local raylet died"),
        (ray.exceptions.NodeDiedError(""), "NodeDiedError"),
    ],
)
def test_of_what_ray_says_the_type_and_the_first_clause_are_quoted(error: ray.exceptions.RayError, quoted: str) -> None:
    said = str(ray_calls._lost("worker 1", error))
    assert f"({quoted}" in said and "worker 1" in said and said.endswith("restart the command")
    assert not any(word in said for word in ("RPC", "details", "Traceback", "0f0f", "abab", "..", ".;", ".)")), said


def test_a_workers_own_exception_keeps_the_end_of_its_traceback() -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 7, in work\n    stop()\nRuntimeError: no'
    task = ray.exceptions.RayTaskError("work", text, RuntimeError("no"), pid=1, ip="127.0.0.1")
    raised = ray_calls._translated("worker 1", task.as_instanceof_cause())  # as ray.get raises it
    assert type(raised) is RuntimeError and str(raised) == "no"
    (note,) = raised.__notes__
    assert note.startswith("in worker 1:\n") and 'File "a.py", line 7, in work' in note


def test_what_depends_on_a_failed_call_fails_with_its_exception(group: WorkerGroup[Worker]) -> None:
    chained = group.submit(1, Worker.note, group.submit(0, Worker.fail, "the cause").later())
    assert group.workers[1].calls == []
    with pytest.raises(RewardError, match="the cause"):
        chained.result()


def test_a_signal_is_not_kept_for_later(group: WorkerGroup[Worker]) -> None:
    with pytest.raises(Interrupted):
        group.submit(0, Worker.interrupt)


class Named:
    def __init__(self, number: int) -> None:
        self.own = number

    def number(self) -> int:
        return self.own


def test_devices_and_threads() -> None:
    cluster = Cluster(ClusterConfig(device="cpu", num_workers=2, threads_per_worker=3))
    assert (cluster.device, cluster.worker_device(1), cluster.num_workers, cluster.threads) == ("cpu", "cpu", 2, 3)
    cores = len(os.sched_getaffinity(0))
    assert Cluster(ClusterConfig(device="cpu")).num_workers == min(2, cores)
    assert Cluster(ClusterConfig(device="cpu", launcher="local")).num_workers == 1
    assert Cluster(ClusterConfig(device="cpu", num_workers=10_000)).threads == 1


@pytest.mark.parametrize(("workers", "said"), [(2, False), (64, True)])
def test_more_processes_than_cores_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, workers: int, said: bool
) -> None:
    monkeypatch.setattr(machines, "_cores", lambda: 2)
    with Cluster(ClusterConfig(device="cpu", launcher="local", num_workers=workers)):
        pass
    assert ("64 worker processes share 2 cores" in caplog.text) is said
    assert ("cluster.num_workers=2" in caplog.text) is said


def test_threads_that_the_user_has_set_are_not_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    over_ray = ClusterConfig(device="cpu", num_workers=2)
    assert Cluster(over_ray).threads == 4
    for given, threads in (("3", 3), ("6", 4), ("3,1", 3), ("0", 4), ("many", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert Cluster(over_ray).threads == threads
    here = ClusterConfig(device="cpu", launcher="local")
    torch.set_num_threads(2)
    assert Cluster(here).threads == 2 and Cluster(replace(here, threads_per_worker=3)).threads == 3
    with Cluster(here):
        torch.set_num_threads(1)  # as a worker of this process does
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("policy", "said"), [("passive", False), (None, True)])
def test_threads_that_spin_on_a_busy_machine_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, policy: str | None, said: bool
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    torch.set_num_threads(2)
    monkeypatch.setattr(machines, "_cores", lambda: 2)
    with Cluster(ClusterConfig(device="cpu", launcher="local")):
        pass
    assert ("OMP_WAIT_POLICY=passive" in caplog.text) is said


@pytest.mark.parametrize(("before", "policy"), [("", "passive"), ("import torch; ", None)])
def test_threads_do_not_spin_where_gerl_comes_before_torch(before: str, policy: str | None) -> None:
    code = f"{before}import gerl, os; print(os.environ.get('OMP_WAIT_POLICY'))"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip() == str(policy)


@pytest.mark.parametrize(
    ("given", "training", "drawing"),
    [
        ({"num_workers": 5}, 2, 3),
        ({"num_workers": 5, "actor_workers": 1}, 1, 4),
        ({"num_workers": 5, "rollout_workers": 2}, 3, 2),
        ({"rollout_workers": 2, "actor_workers": 4}, 4, 2),
        ({"launcher": "local"}, 1, 1),
    ],
)
def test_workers_are_divided_among_those_that_train_and_those_that_draw(
    given: dict[str, object], training: int, drawing: int
) -> None:
    cluster = Cluster(ClusterConfig(layout="split", device="cpu", **given))  # type: ignore[arg-type]
    assert (cluster.training, cluster.processes - cluster.training) == (training, drawing)


def test_a_layout_for_which_there_are_too_few_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ClusterError, match=r"cluster\.layout=split: 1 worker\(s\) on cuda .*cluster\.layout=hybrid"):
        Cluster(ClusterConfig(layout="split"))
    with pytest.raises(ClusterError, match=r"cluster\.layout=split: on GPUs .*cluster\.launcher=ray"):
        Cluster(ClusterConfig(layout="split", launcher="local"))


def test_a_part_of_a_group_is_what_is_left_of_it() -> None:
    group = WorkerGroup("worker", 5, lambda number: Named(number), None)
    first, last = group.part(range(2)), group.part(range(2, 5))
    assert first.run(Named.number) == [0, 1] and last.run(Named.number) == [2, 3, 4]
    number = group.leave_out(3)
    assert last.run(Named.number) == [2, 4] and len(last) == 2 and len(first) == 2
    assert last.submit(1, Named.number).worker == "worker 4"
    worker, first_call = group.start_beside(number, Named.number)
    assert first_call.result() == 3 and len(group) == 4
    group.take_in(number, worker)
    assert last.run(Named.number) == [2, 3, 4]


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    local = Cluster(ClusterConfig(launcher="local"))
    assert (local.device, local.num_workers, local.worker_device(1)) == ("cuda", 2, "cuda:1")
    assert Cluster(ClusterConfig(launcher="ray")).worker_device(1) == "cuda"  # Ray shows each worker its own GPU only
    with local, pytest.raises(ClusterError, match=r"cluster\.num_workers=3.* 2 GPUs.*lower"):
        Cluster(ClusterConfig(launcher="local", num_workers=3)).__enter__()


@pytest.mark.parametrize(
    ("devices", "workers", "scorers", "share"),
    [
        (8, 8, [], 1.0),
        (8, 8, [0.0, 0.0], 1.0),
        (8, 8, [0.25], 0.75),  # beside a worker
        (8, 7, [0.25, 0.25], 1.0),  # both on the GPU that is free
        (8, 6, [0.25, 0.25, 0.5], 1.0),  # two GPUs are free
        (1, 1, [0.1, 0.2], 0.6),  # both on the one GPU, as if both took the larger share
    ],
)
def test_scorers_get_their_share_of_a_gpu(devices: int, workers: int, scorers: list[float], share: float) -> None:
    assert worker_share(devices, workers, scorers) == pytest.approx(share)


def test_scorers_that_leave_a_worker_less_than_half_a_gpu_are_refused() -> None:
    with pytest.raises(
        ClusterError, match=r"2 scorer processes .* 0\.3 .* 1 workers on 1 GPUs: .*cluster\.num_workers"
    ):
        worker_share(1, 1, [0.3, 0.3])


def test_the_first_that_has_ended_is_waited_for(group: WorkerGroup[Worker]) -> None:
    ended = [group.submit(i, Worker.note, "x") for i in range(2)]
    assert wait_any(ended) == ended and wait_any([]) == []


def test_a_restarted_worker_of_this_process_goes_on(group: WorkerGroup[Worker]) -> None:
    group.run(Worker.note, "a")
    group.restart(1)
    assert group.workers[1].calls == ["a"]


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Cluster(ClusterConfig(device="auto")).device == "cpu"
    with pytest.raises(ClusterError, match=r"cluster\.device=cuda.*cluster\.device=auto"):
        Cluster(ClusterConfig(device="cuda"))


@pytest.mark.parametrize("busy", [1, 2])
def test_a_ray_that_does_not_start_in_time_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, busy: int
) -> None:
    tried: list[object] = []

    def time_out(**_: object) -> None:
        tried.append(None)
        if len(tried) <= busy:
            raise Exception("The current node timed out during startup")  # as ray/_private/node.py does

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", time_out)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeManagerAddress": "127.0.0.1"}])
    with contextlib.ExitStack() as ends:
        if busy == 1:
            local_ray.start({}, ends)
        else:
            with pytest.raises(ClusterError, match=r"Ray failed to start .* timed out .*cluster\.launcher=local"):
                local_ray.start({}, ends)
    assert len(tried) == 2 and sum("retrying once" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free up space for .*RAY_TMPDIR"),
        (OSError("AF_UNIX path length cannot exceed 107 bytes"), "RAY_TMPDIR"),
        (ValueError("The configured object store size exceeds /dev/shm size"), "revert .*RAY_"),
    ],
)
def test_a_ray_that_cannot_start_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, remedy: str
) -> None:
    tried: list[object] = []

    def fail(**_: object) -> None:
        tried.append(None)
        raise error

    monkeypatch.setattr(ray, "init", fail)
    with (
        contextlib.ExitStack() as ends,
        pytest.raises(ClusterError, match=rf"Ray failed to start .*{remedy}") as caught,
    ):
        local_ray.start({}, ends)
    assert len(tried) == 1 and "less busy" not in str(caught.value)


def test_a_ray_that_would_listen_to_other_machines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeManagerAddress": "192.0.2.2"}])
    with contextlib.ExitStack() as ends, pytest.raises(ClusterError, match=r"192\.0\.2\.2.*loopback.*install"):
        local_ray.start({}, ends)


def test_the_variables_of_an_embedded_ray_do_not_replace_those_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with local_ray.environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret"}):
        assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]) == ("disabled", "secret")
    assert os.environ["RAY_AUTH_MODE"] == "disabled" and "RAY_AUTH_TOKEN" not in os.environ


def test_a_service_that_is_gone_is_noticed_at_once_or_after_some_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        strict, patient = (health.Health({health.CONTROL: place}, patience, 0.0) for patience in (0.0, 60.0))
        strict.check()
    with pytest.raises(ClusterError, match=rf"control service \(GCS\) at 127\.0\.0\.1:{place[1]} is gone"):
        strict.check()
    patient.check()
    for name, takes_workers in ((health.NODE, True), (health.CONTROL, False)):
        monkeypatch.setattr(health, "_watched", health.Health({name: place}, 60.0 if takes_workers else 0.0, 0.0))
        with pytest.raises(ClusterError):
            health.check()
        assert not health.lives()
        with health.rescuing(), pytest.raises(ClusterError) if takes_workers else contextlib.nullcontext():
            health.check()
        with pytest.raises(ClusterError):
            health.check()


def test_the_processes_of_an_embedded_ray_end_with_the_command() -> None:
    mark = f"test-{os.getpid()}"
    sleeping = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    child = subprocess.Popen(sleeping, env={**os.environ, reaper.MARK: mark}, start_new_session=True)
    command = subprocess.Popen([sys.executable, "-I", "-S", reaper.__file__, mark], stdin=subprocess.PIPE)
    command.send_signal(0)
    assert child.poll() is None
    command.communicate()  # closes the pipe, as the end of the process that holds it does
    assert child.wait(30) == -9 and reaper.processes(mark) == []


def test_a_shielded_process_does_not_see_what_its_group_is_sent() -> None:
    with local_ray.shielded():
        child = subprocess.Popen(["sleep", "600"], preexec_fn=lambda: None)  # Ray has such a function too
    plain = subprocess.Popen(["sleep", "600"])
    for process in (child, plain):
        process.terminate()
    assert plain.wait(30) == -15 and child.poll() is None
    child.kill()
    child.wait()


WHILE_STARTING = """
import functools, os, signal, threading, time
from gerl.cluster import local_ray, reaper
from gerl.commandline import signals
from gerl.errors import Interrupted

os.environ[reaper.MARK] = mark = f"test-{os.getpid()}"
os.register_at_fork(after_in_child=functools.partial(time.sleep, 1))  # as on a busy machine
with signals.handled():
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    try:
        local_ray._start_process(["sleep", "20"], "gcs_server", fate_share=False)
    except Interrupted:
        print("interrupted, with", len(reaper.processes(mark)))
    reaper.kill(mark)
"""


def test_a_process_of_ray_that_starts_while_a_signal_arrives_is_ended_too() -> None:
    done = subprocess.run([sys.executable, "-c", WHILE_STARTING], capture_output=True, text=True)
    assert done.stdout == "interrupted, with 1\n", done.stderr


def test_debug_lines_name_a_call_by_its_tasks_numbers_and_texts(caplog: pytest.LogCaptureFixture) -> None:
    samples = [Sample(Prompt(number, "a sign"), 0, seed=0, step=1) for number in (4, 9)]
    task = RolloutTask(3, samples, ())
    group = WorkerGroup("worker", 2, Worker, None)
    group.run(Worker.note, "quietly")
    with caplog.at_level("DEBUG", "gerl"):
        assert group.submit(1, Worker.note, "x" * 50).description == f"note({'x' * 40}...)"
        assert group.submit(0, Worker.written).description == ""
        group.run(Worker.note, "aloud")
    found = [record.getMessage() for record in caplog.records]
    assert found[0] == f"worker 1: note({'x' * 40}...) ..." and found[1:3] == [
        "worker 0: note(aloud) ...",
        "worker 1: note(aloud) ...",
    ]
    assert re.fullmatch(r"worker 0, 1: note\(aloud\): \d+\.\d\d s", found[3]) and len(found) == 4
    described = worker_group.describe_call(
        Worker.note, (task, samples, {3: None, 5: None}, [(0, 1)], 2, 0.5, None, [1.0])
    )
    images = "2 image(s) of prompt 4, 9"
    assert described == f"note(task 3: {images}, {images}, task 3, 5, 1 image(s), 2, 0.5)"

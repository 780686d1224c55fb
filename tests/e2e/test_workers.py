"""One worker or two, in this process or over Ray: the same images and the same step."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import net
import numpy as np
import psutil
import pytest
import ray
from drills import more

from gerl.cluster import Cluster, Pending, wait_all
from gerl.config import ClusterConfig, Config, RewardConfig, ScorerConfig
from gerl.errors import WorkerDied
from gerl.progress import Timeline
from gerl.protocol import Images, Prompt, RolloutTask, Sample
from gerl.rewards.manager import RewardManager
from gerl.rewards.rollouts import PendingRollout, RoundRobin, serve_in_background
from gerl.workers.fleet import Placement, fleet_of

STEPS = 2
# Brightness, with a log of when it was called and what it saw.
SEEN = """
import hashlib, json, time
import numpy as np

def compute_score(images, prompts, metadata, log):
    digests = [hashlib.sha256(image.tobytes()).hexdigest() for image in images]
    with open(log, "a") as file:
        file.write(json.dumps({"time": time.time(), "images": [prompts, digests]}) + "\\n")
    return [float(np.asarray(image).mean()) / 255 for image in images]
"""
# Its first call returns once worker 0 has started to load the model, and fails after a minute.
WAITS = """
import time
from pathlib import Path

def compute_score(images, prompts, metadata, wish):
    end = time.monotonic() + 60
    while Path(wish).exists():
        assert time.monotonic() < end, "the model is not being loaded"
        time.sleep(0.05)
    return [0.5] * len(images)
"""
CLUSTER = """
import ray, sys
ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.readline()
print(ray.get(ray.remote(lambda: 42).remote()), flush=True)
"""


@pytest.fixture(scope="module")
def keys(workplace: Path) -> dict[str, Any]:
    (workplace / "seen.py").write_text(SEEN)
    sizes = {"rollout__prompts_per_step": 4, "rollout__micro_batch_size": 2, "validation__micro_batch_size": 2}
    steps = {"trainer__steps": STEPS, "actor__lr": 0.01, "validation__every": 1, "reward__trial": "false"}
    return {**sizes, **steps, "scorer": "seen.py", "validation__data": workplace / "val.txt"}


@pytest.fixture(scope="module")
def run(
    train: Callable[..., Any], keys: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    def start(**more: Any) -> Any:
        folder = tmp_path_factory.mktemp("workers")
        return train(folder / "run", f"reward.scorers.bright.kwargs.log={folder / 'log'}", **keys | more)

    return start


@pytest.fixture(scope="module")
def two(run: Callable[..., Any]) -> Any:
    return run(cluster__num_workers=2)


def calls(run: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder.parent / "log").read_text().splitlines()]


def images(run: Any) -> list[Any]:
    """Prompts and digests of everything that was drawn up to the first update, in a fixed order."""
    first = calls(run)[: 2 + 8]  # two micro-batches of validation, eight of rollout
    return sorted(pair for call in first for pair in zip(*call["images"], strict=True))


def pixels(run: Any, step: int) -> np.ndarray:
    with np.load(run.folder / "validation" / f"step_{step:06d}.npz") as arrays:
        return arrays["pixels"]


def assert_same_run(run: Any, other: Any) -> None:
    assert images(run) == images(other)
    assert (pixels(run, 0) == pixels(other, 0)).all()
    rows, others = run.untimed(), other.untimed()
    assert [set(row) for row in rows] == [set(row) for row in others]
    for row, expected in zip(rows, others, strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert run.column("reward/mean")[0] == other.column("reward/mean")[0]  # drawn before any update
    assert run.lora(STEPS).abs().max() > 0.01
    # AdamW divides a gradient near 0 by its own size, so that single weights show the rounding
    assert (run.lora(STEPS) - other.lora(STEPS)).norm() < 2e-4 * other.lora(STEPS).norm()


def test_one_and_two_workers_draw_and_learn_the_same(run: Callable[..., Any], two: Any) -> None:
    one = run(cluster__num_workers=1)
    assert_same_run(one, two)
    for name in ("images", "forward", "backward"):
        assert one.column(f"evaluations/{name}") == two.column(f"evaluations/{name}")


def meeting_class() -> type[Any]:
    """A worker that is asked anything; a local class, which Ray sends as a whole."""

    class Meeting:
        def __init__(self, rank: int, folder: Path) -> None:
            self.rank, self.folder = rank, folder

        def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
            return function(self, *arguments)

    return Meeting


@more
def test_all_workers_compute_distances_to_the_base_model_at_once(tmp_path: Path) -> None:
    """One after the other, each would wait in vain for its colleague."""

    def distances(worker: Any, task_id: int) -> list[float]:
        """An answer once the other worker is asked as well."""
        (worker.folder / f"rank{worker.rank}").touch()
        deadline = time.monotonic() + 60
        while not (worker.folder / f"rank{1 - worker.rank}").exists():
            assert time.monotonic() < deadline, "the other worker was not asked"
            time.sleep(0.05)
        return [10.0 * task_id + worker.rank]

    with Cluster(ClusterConfig(num_workers=2, device="cpu")) as machines:
        workers: Any = machines.workers("worker", meeting_class(), 2, lambda rank: (rank, tmp_path))
        fleet = fleet_of(Config(), machines, workers, Timeline())
        fleet.held.append(([RolloutTask(i, [], ()) for i in range(4)], Placement([1, 0, 1, 0])))
        assert fleet.on_trajectories(distances) == [[1.0], [10.0], [21.0], [30.0]]


@pytest.fixture
def over_ray(arguments: Callable[..., list[str]], start: Any, run_of: Any, keys: dict[str, Any], tmp_path: Path) -> Any:
    """Start a run with two workers over Ray, in a process of its own."""

    def begin(steps: int, **environment: str) -> tuple[Any, "subprocess.Popen[str]"]:
        more = keys | {"trainer__steps": steps, "cluster__num_workers": 2, "cluster__launcher": "ray"}
        more["logger__level"] = "debug"
        log = f"reward.scorers.bright.kwargs.log={tmp_path / 'log'}"
        return run_of(tmp_path / "run"), start(arguments(tmp_path / "run", log, **more), **environment)

    return begin


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A Ray cluster that somebody else started."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip(), process
    process.kill()


@more
def test_a_ray_cluster_is_joined_and_left_running(
    over_ray: Callable[..., Any], two: Any, cluster: tuple[str, "subprocess.Popen[str]"]
) -> None:
    """In a process of its own: one that had an embedded Ray before loses its actors on another cluster."""
    address, cluster_process = cluster
    run, process = over_ray(STEPS, RAY_ADDRESS=address, PYTHONPROFILEIMPORTTIME="1")
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    imported = set(re.findall(r"^import time:.*\|\s*([\w.]+)$", said, re.MULTILINE))
    # up to the report, the driver needs none of what loads and trains a model, which would take it seconds
    assert {"torch", "ray"} <= imported and not imported & {"diffusers", "transformers", "peft", "torch._dynamo"}
    assert_same_run(run, two)
    # the state of each step is sent once: the last checkpoint is written from the copy in the driver
    sent = re.findall(r"worker 0: checkpoint\((\d+)\) \.\.\.", (run.folder / "log.txt").read_text())
    assert sent == [str(step) for step in range(STEPS + 1)] and run.checkpoint(STEPS).is_dir()
    # streaming: the first micro-batch is scored long before the last one is drawn
    times = [call["time"] for call in calls(run)][-10:-2]  # of the last rollout
    assert times[-1] - times[0] > 0.2 * run.metrics[-1]["timing/rollout_s"]
    answer, _ = cluster_process.communicate("\n", timeout=30)
    assert answer.strip() == "42"


EMBEDDED = """
import sys
import ray
import torch
from gerl.cluster import Cluster
from gerl.config import ClusterConfig
from gerl.workers.collective import Meeting

class Worker:
    def __init__(self, rank):
        self.rank, self.meeting = rank, Meeting()

    def address(self):
        return self.meeting.open()

    def sum(self, address):
        self.meeting.join(address, self.rank, 2, "cpu")
        value = torch.tensor([self.rank + 1.0])
        torch.distributed.all_reduce(value)
        return float(value)

with Cluster(ClusterConfig(num_workers=2, device="cpu")) as machines:
    workers = machines.workers("worker", Worker, 2, lambda rank: (rank,))
    assert workers.run(Worker.sum, workers.submit(0, Worker.address).result()) == [3.0, 3.0]
    print(ray.get_runtime_context().gcs_address, ray._private.worker._global_node.get_session_dir_path(), flush=True)
    sys.stdin.readline()
"""
INTRUDER = """
import os
import ray
ray.init(address=os.environ["ADDRESS"], log_to_driver=False)
print("ran", ray.get(ray.remote(lambda: 42).remote()))
"""


@more
def test_an_embedded_ray_listens_on_the_loopback_and_asks_for_a_token() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    embedded = subprocess.Popen(
        [sys.executable, "-c", EMBEDDED], env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert embedded.stdout is not None
    address, session = embedded.stdout.readline().split()
    processes = [psutil.Process(embedded.pid), *psutil.Process(embedded.pid).children(recursive=True)]
    # all are found by their mark, those too that have given themselves a title
    assert all("GERL_RAY" in process.environ() for process in processes[1:])
    services = " ".join(part for process in processes[1:] for part in process.cmdline())
    assert {process.nice() for process in processes} == {processes[0].nice()}
    assert "ray::Worker" in services and "ray::IDLE" not in services  # none is started ahead
    assert "raylet" in services and not re.search(r"dashboard\.py|log_monitor\.py|monitor\.py", services)
    listening = {c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}
    # as another user of this machine would, who knows everything but the token
    knows = {"ADDRESS": address, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_NUM_REDIS_GET_RETRIES": "3"}
    intruders = [
        subprocess.Popen(
            [sys.executable, "-c", INTRUDER], env=clean | knows | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for own in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64})
    ]  # fmt: skip
    end = time.monotonic() + 60
    for intruder in intruders:
        try:
            out, said = intruder.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:  # it is still asking
            intruder.kill()
            out, said = intruder.communicate()
            assert "ran" not in out
            continue
        assert intruder.returncode != 0 and "ran" not in out and "oken" in said, said
    embedded.communicate("\n", timeout=60)
    assert embedded.returncode == 0 and not any(p.is_running() and p.status() != "zombie" for p in processes)
    assert not Path(session).exists()


@more
def test_what_all_workers_get_is_packed_once_and_silence_without_progress_is_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed, downloaded = [], iter(["1 GB", "2 GB", "2 GB"])

    class Message:
        def __reduce__(self) -> tuple[Any, ...]:
            packed.append(self)
            return dict, ([("is", "there")],)

    class Taker:
        def take(self, message: Any, number: int) -> tuple[Any, int]:
            return message, number

        def environment(self) -> tuple[str | None, dict[str, Any]]:
            return os.environ.get("OMP_NUM_THREADS"), dict(ray.get_runtime_context().runtime_env)

        def load(self) -> None:
            time.sleep(60)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with Cluster(ClusterConfig(num_workers=3, device="cpu")) as cluster:
        group = cluster.workers("taker", Taker, 3, lambda rank: ())
        assert group.run(Taker.environment) == [("1", {})] * 3  # Ray starts Python twice for a runtime_env
        assert group.run(Taker.take, Message(), 7) == [({"is": "there"}, 7)] * 3
        assert len(packed) == 1
        with pytest.raises(WorkerDied, match=r"no answer from taker 1 for 0\.2 s; raise cluster\.hang_after"):
            wait_all([group.submit(1, Taker.load)], 0.2, lambda: next(downloaded))
    assert next(downloaded, None) is None


@more
def test_scorers_go_on_while_something_else_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def compute_score(images, prompts, metadata):\n    return [row['value'] for row in metadata]\n")
    config = RewardConfig({"a": ScorerConfig(1.0, str(file))})
    batches = [[Sample(Prompt(i, f"p{i}", {"value": float(i)}), 0, 0, 1)] for i in range(4)]
    with Cluster(ClusterConfig(num_workers=1, device="cpu")) as cluster:
        manager = RewardManager(config, cluster)
        drawn = [Pending("worker", value=Images(i, np.zeros((1, 4, 4, 3), np.uint8), 0.0)) for i in range(4)]
        rollout = PendingRollout(manager, batches, RoundRobin(drawn.__getitem__, 1, 4), ahead=1)
        deadline = time.monotonic() + 60
        with serve_in_background(manager, [rollout]):
            while manager.load["a"].calls < 3 and time.monotonic() < deadline:  # the last one may still be at work
                time.sleep(0.05)
        assert manager.load["a"].calls >= 3
        assert [scores.totals for scores in rollout.finish()] == [[float(i)] for i in range(4)]


@more
def test_the_model_is_loaded_while_the_scorers_are_tried(
    train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in net.kills(tmp_path).items():
        monkeypatch.setenv(name, value)
    (wish := tmp_path / "kills" / "setup.0.0").parent.mkdir()
    wish.write_text("0")  # signal 0 does nothing; the worker removes the file when it starts to load
    (scorer := tmp_path / "waits.py").write_text(WAITS)
    keys = {"reward__trial": "true", "reward__retries": 0, "cluster__launcher": "ray", "trainer__steps": 1}
    train(tmp_path / "run", f"reward.scorers.bright.kwargs.wish={wish}", scorer=scorer, **keys)

"""Workers that Ray, or the system, ends for want of memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from drills import more

WORKER = """
import os, time
import ray
from gerl.cluster import Cluster
from gerl.config import ClusterConfig
from gerl.errors import WorkerDied

class Worker:
    def hold(self):
        self.memory = bytearray(300_000_000)
        time.sleep(120)

    def vanish(self):
        os.kill(os.getpid(), 9)

try:
    with Cluster(ClusterConfig(num_workers=1, device="cpu")) as machines:
        session = ray._private.worker._global_node.get_session_dir_path()
        group = machines.workers("worker", Worker, 1, lambda rank: ())
        group.submit(0, Worker.CALL).result()
except WorkerDied as error:
    print("found", error)
    print(session)
"""


@more
@pytest.mark.parametrize(
    ("call", "environment", "named"),
    [
        ("hold", {"RAY_memory_usage_threshold": "0.001"}, ["nearly out of memory", "rollout.micro_batch_size"]),
        pytest.param("vanish", {}, ["worker 0 died", "memory runs out", "restart the command"], marks=more),
    ],
)
def test_a_worker_that_is_ended_for_want_of_memory(call: str, environment: dict[str, str], named: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORKER.replace("CALL", call)],
        env=os.environ | {"RAY_memory_monitor_refresh_ms": "100"} | environment,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    message, session = done.stdout.splitlines() if done.stdout.startswith("found") else (done.stderr, "")
    assert all(part in message for part in named), message
    assert (Path(session) / "logs").is_dir()  # which the sentence speaks of
    assert (done.returncode == 0 and "cluster.num_workers" in message) or call == "vanish"

"""Runs on a Ray cluster of several nodes, which are raylets of their own on this machine, one of which dies."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drills import more
from ranks import ROOT

STEPS = 8
SETTINGS = "checkpoint.every=0 actor.lr=0.01 rollout.micro_batch_size=2 cluster.patience=60".split()
# three workers on two nodes: two that train have to meet, and trajectories go from one node to the other
SPLIT = "cluster.layout=split cluster.rollout_workers=1 cluster.actor_workers=2".split()
# a head without CPUs, as KubeRay and SkyPilot have it, and two nodes; a line from stdin ends one of them, or the head's
# control service (the cluster asks them often, so that it soon knows of the end)
NODES = """
import os
import sys
from pathlib import Path
os.environ |= {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}
from ray.cluster_utils import Cluster

def workers(node):  # of the run, which are children of the node's raylet
    raylet, count = node.all_processes["raylet"][0].process.pid, 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            count += parent == raylet and (folder / "cmdline").read_bytes().startswith(b"ray::PolicyWorker")
        except OSError:
            pass
    return count

nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
others = [nodes.add_node(num_cpus=1) for _ in range(2)]
print(nodes.address, flush=True)
for line in sys.stdin:
    if line == "kill\\n":
        node = max(others, key=workers)
        others.remove(node)
        nodes.remove_node(node, allow_graceful=False)
    elif line == "gcs\\n":
        nodes.head_node.kill_gcs_server()
    else:
        nodes.head_node.kill_raylet()
    print("done", flush=True)
nodes.shutdown()
"""


@pytest.fixture
def nodes() -> Iterator[tuple[str, Callable[[str], None]]]:
    """The address of a cluster, and a function that tells it "kill", "gcs" or "raylet", these of the head."""
    process = subprocess.Popen(
        [sys.executable, "-c", NODES], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None

    def tell(word: str) -> None:
        process.stdin.write(f"{word}\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        assert process.stdout.readline() == "done\n"  # type: ignore[union-attr]

    yield process.stdout.readline().strip(), tell
    process.stdin.close()
    process.wait(60)


@pytest.fixture
def begin(
    nodes: tuple[str, Callable[[str], None]],
    arguments: Callable[..., list[str]],
    start: Callable[..., Any],
    run_of: Any,
    tmp_path: Path,
) -> Callable[..., tuple[Any, Any]]:
    """Start a run on the cluster; returns it and its process after two steps."""

    def run(*keys: str) -> tuple[Any, Any]:
        found = run_of(tmp_path / "run")
        command = arguments(found.folder, *SETTINGS, f"trainer.steps={STEPS}", *keys, cluster__launcher="ray")
        process = start(command, RAY_ADDRESS=nodes[0])
        while not (found.folder / "metrics.jsonl").exists() or len(found.metrics) < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        return found, process

    return run


@more
def test_a_run_outlives_a_node(
    nodes: tuple[str, Callable[[str], None]],
    train: Callable[..., Any],
    begin: Callable[..., tuple[Any, Any]],
    workplace: Path,
    tmp_path: Path,
) -> None:
    other = [f"reward.scorers.other.path={workplace / 'bright.py'}", "reward.scorers.bright.replicas=2"]
    whole = train(tmp_path / "whole", *SETTINGS, *other, trainer__steps=STEPS, cluster__num_workers=2)
    run, process = begin(*SPLIT, *other)
    nodes[1]("kill")
    _, log = process.communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in log, log
    assert "3 worker(s) on cpu (1 for sampling, 2 for training)" in log, log
    assert sum(run.column("cluster/restarts")) >= 1, log
    state, expected = run.state(STEPS), whole.state(STEPS)
    assert sorted(state) == sorted(expected) and all(torch.equal(state[name], expected[name]) for name in state)


@more
@pytest.mark.parametrize("service", ["gcs", "raylet"])
def test_a_head_that_dies_ends_a_run_with_its_newest_step(
    nodes: tuple[str, Callable[[str], None]], begin: Callable[..., tuple[Any, Any]], service: str
) -> None:
    run, process = begin("trainer.steps=100000")
    nodes[1](service)
    _, log = process.communicate(timeout=300)
    said, newest = log.strip().splitlines()[-1], run.metrics[-1]["step"]
    assert process.returncode == 1 and "Traceback" not in log, log
    assert (
        re.match(rf"error: Ray's \w+ service \({service}\) at .* is gone", said, re.IGNORECASE)
        and f"step_{newest}: resume with" in said
    ), log
    assert run.checkpoint(newest).is_dir()

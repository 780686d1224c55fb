"""The ranks of a worker on a Ray cluster of two nodes, which are two raylets on this machine."""

import subprocess
import sys
from pathlib import Path

from drills import more
from ranks import ROOT

NODES = """
import sys
import time
import ray
from ray.cluster_utils import Cluster as Nodes
from gerl.cluster import Cluster, placement
from gerl.config import ClusterConfig
from gerl.errors import ClusterError

class Rank:
    def __init__(self, number):
        pass

    def node(self):
        return ray.get_runtime_context().get_node_id()

placement.PATIENCE = 2.0  # there are two strategies to wait for
nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
nodes.add_node(num_cpus=2)
ray.init(address=nodes.address, log_to_driver=False)
with Cluster(ClusterConfig(num_workers=2, ranks_per_worker=2, device="cpu")) as cluster:
    found = cluster.workers("worker", Rank, 4, lambda rank: (rank,), together=2).run(Rank.node)
    assert found[0] == found[1] and found[2] == found[3], found
    start = time.monotonic()
    try:
        cluster.workers("other", Rank, 12, lambda rank: (rank,), together=12)
    except ClusterError as error:
        print(error)
    assert time.monotonic() - start < 60
ray.shutdown()
nodes.shutdown()
"""

# two nodes with a GPU each, of which Ray only has to believe that it is there: for two workers, one of which is left
# out, taken in again and restarted, and then for the two processes of a scorer. A process that has its resources is
# waited for, however short cluster.patience is
GPUS = """
import copy
import logging
import sys
import os
import time
import numpy as np
import ray
from ray.util import placement_group_table
os.environ |= {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}
from ray.cluster_utils import Cluster as Nodes
from gerl.cluster import Cluster, Pending
from gerl.config import ClusterConfig, Config, RewardConfig, ScorerConfig
from gerl.errors import RewardError
from gerl.protocol import Images, Prompt, Sample
from gerl.rewards.manager import RewardManager
from gerl.progress import Timeline
from gerl.workers.fleet import RayFleet

class Rank:
    def leave(self):
        pass

    def node(self):
        return ray.get_runtime_context().get_node_id()

def lose(node):
    # and wait until Ray knows: a process of the node could outlive it for a moment, and answer
    nodes.remove_node(node, allow_graceful=False)
    while node.node_id in {found["NodeID"] for found in ray.nodes() if found["Alive"]}:
        time.sleep(0.1)

logging.basicConfig(stream=sys.stdout, format="%(message)s")
nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
others = [nodes.add_node(num_cpus=1, num_gpus=1) for _ in range(2)]
os.environ["RAY_ADDRESS"] = nodes.address
batches = [[Sample(Prompt(i, "a"), 0, 0, 1)] for i in range(4)]
with Cluster(ClusterConfig(num_workers=1, device="cuda", patience=1.0)) as cluster:
    workers = cluster.workers("worker", Rank, 2, lambda rank: (), gpus=1.0)
    recovery = RayFleet(Config(cluster=cluster.config), cluster, workers, Timeline()).recovery
    lost = [node for node in others if node.node_id == workers.run(Rank.node)[1]]
    nodes.remove_node(lost[0], allow_graceful=False)  # which Ray does not know at once
    others.remove(lost[0])
    assert recovery.restart([1]) == [] and len(workers) == 1
    assert [group["state"] for group in placement_group_table().values()].count("CREATED") == 1
    assert all(group["state"] in ("CREATED", "REMOVED") for group in placement_group_table().values())
    assert recovery.admit(ask=False) == [] and recovery.admit() == []  # asked for, and not there
    others.append(nodes.add_node(num_cpus=1, num_gpus=1))
    while not (found := recovery.admit()):
        time.sleep(0.1)
    assert found == [1] and len(set(workers.run(Rank.node))) == 2
    ray.kill(workers.workers[1])
    recovery.settings = copy.copy(recovery.settings)
    object.__setattr__(recovery.settings, "patience", 0.01)  # less than a start takes, and there is room
    assert recovery.restart([1]) == [1] and len(set(workers.run(Rank.node))) == 2
    for _ in range(2):
        workers.leave_out(0)  # and leave their GPUs to others
    scorer = ScorerConfig(path=sys.argv[1], gpus=1.0, replicas=2)
    manager = RewardManager(RewardConfig({"bright": scorer}, retries=5), cluster)

    def score():
        scoring = manager.open(batches)
        for i in range(4):
            scoring.add(i, Pending("worker", value=Images(i, np.zeros((1, 4, 4, 3), np.uint8), 0.0)))
        return [scores.totals for scores in scoring.finish()]

    assert score() == [[0.0]] * 4
    lose(others.pop())
    assert score() == [[0.0]] * 4
    time.sleep(cluster.config.patience)
    assert score() == [[0.0]] * 4
    lose(others.pop())
    try:
        score()
    except RewardError as error:
        print(error)
nodes.shutdown()
"""


@more
def test_workers_come_back_and_scorers_go_on_with_fewer_processes_until_there_is_none(workplace: Path) -> None:
    command = [sys.executable, "-c", GPUS, str(workplace / "bright.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.strip().splitlines()
    (warning,) = [line for line in said if "continues with 1 of 2 processes" in line]
    assert "no room for scorer bright, process" in warning
    assert said[-1].startswith("Ray has no room for scorer bright, 1 process of ") and "free are" in said[-1], said
    assert "1 GPU" in said[-1] and "0 GPU" in said[-1] and "cluster.patience=1 s" in said[-1]


@more
def test_ranks_of_a_worker_run_on_one_node_and_want_of_room_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NODES], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.strip().splitlines()[-1]
    assert "no room for other 0" in said and "12 processes of" in said and "free are" in said

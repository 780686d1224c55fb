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
from gerl.cluster import Cluster, places
from gerl.config import ClusterConfig
from gerl.errors import ClusterError

class Rank:
    def __init__(self, number):
        pass

    def node(self):
        return ray.get_runtime_context().get_node_id()

places.PATIENCE = 2.0  # there are two strategies to wait for
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


@more
def test_ranks_of_a_worker_run_on_one_node_and_want_of_room_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NODES], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.strip().splitlines()[-1]
    assert "no room for other 0" in said and "12 processes of" in said and "free are" in said

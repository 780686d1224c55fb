"""Wait until so many machines have joined the Ray cluster of RAY_ADDRESS: python wait_for_nodes.py 2 [SECONDS]

gerl counts the cluster's GPUs when a run begins; a machine that joins later does not add a worker. Run it on a machine
of the cluster.
"""

import logging
import os
import socket
import sys
import time

import ray


def machines(address: str) -> int:
    """The machines that take part now; raises `OSError` or `RuntimeError` as long as Ray cannot be joined here."""
    if not ray.is_initialized():
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()  # Ray would try for minutes
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    return sum(node["Alive"] for node in ray.nodes())


def main(wanted: int, seconds: float = 600.0) -> int:
    address, until = os.environ["RAY_ADDRESS"], time.monotonic() + seconds
    found, why = 0, ""
    while found < wanted:
        try:
            found = machines(address)
        except (OSError, RuntimeError) as error:
            ray.shutdown()
            why = f" ({error}); have all machines the same token?"
        if found < wanted and time.monotonic() > until:
            print(f"after {seconds:g} s there are {found} of {wanted} machines at {address}{why}", file=sys.stderr)
            return 1
        time.sleep(1.0)
    print(f"{found} machines at {address} with {ray.cluster_resources().get('GPU', 0):g} GPUs")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *map(float, sys.argv[2:])))

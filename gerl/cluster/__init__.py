"""Workers over Ray or in this process, behind one interface: the only package of gerl that imports Ray."""

from gerl.cluster.calls import AGAIN as AGAIN
from gerl.cluster.calls import LAST_WORDS as LAST_WORDS
from gerl.cluster.calls import Pending as Pending
from gerl.cluster.calls import WorkerGroup as WorkerGroup
from gerl.cluster.calls import silence as silence
from gerl.cluster.calls import wait_all as wait_all
from gerl.cluster.calls import wait_any as wait_any
from gerl.cluster.health import rescuing as rescuing
from gerl.cluster.machines import Cluster as Cluster
from gerl.cluster.machines import own_host as own_host
from gerl.cluster.machines import worker_share as worker_share
from gerl.cluster.places import no_room as no_room

"""Workers over Ray or in this process behind one interface; the only package of gerl that imports Ray, on first use."""

from gerl.cluster.health import AGAIN as AGAIN
from gerl.cluster.health import rescuing as rescuing
from gerl.cluster.machines import Cluster as Cluster
from gerl.cluster.machines import open_ray as open_ray
from gerl.cluster.machines import own_host as own_host
from gerl.cluster.machines import worker_share as worker_share
from gerl.cluster.worker_group import LAST_WORDS as LAST_WORDS
from gerl.cluster.worker_group import Pending as Pending
from gerl.cluster.worker_group import WorkerGroup as WorkerGroup
from gerl.cluster.worker_group import silence as silence
from gerl.cluster.worker_group import wait_all as wait_all
from gerl.cluster.worker_group import wait_any as wait_any

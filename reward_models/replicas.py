"""Scorer replicas in Ray Serve: started, batched across requests, monitored, and replaced if one dies.

Serve's HTTP proxy is not used: the application of `reward_models.app` runs in the started process, so that a port in
use, a wrong token or an oversized body is answered before anything reaches Ray.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from gerl.cluster import local_ray
from gerl.cluster.ray_session import join as join_cluster
from gerl.config import ScorerConfig
from gerl.errors import ClusterError, RewardError
from gerl.rewards.scorers import build_scorer
from gerl.rewards.scorers.base import JSON, Columns, Metadata, references_within
from reward_models.scoring import Item, Refusal, Row, decode, join, score_items, warm_up

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]  # replicas import this package from here
DEPLOYMENT = "scorer"
TRUSTED_SECONDS = 1.0  # how long a running replica is assumed before Serve is asked again


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Number of replicas, their resources and batching.

    `gpus` (a fraction lets replicas share a GPU) and CPU `threads` are per replica; None divides those available. A
    batch has at most `max_batch_size` images, from any requests that arrive within `batch_wait_s` seconds.
    """

    replicas: int = 1
    gpus: float | None = None
    threads: int | None = None
    max_batch_size: int = 16
    batch_wait_s: float = 0.01
    max_in_flight: int = 64
    folders: str | None = None  # whose files requests may name, separated by commas


class Replica:
    """Replica of the scorer; `warm` is the prompt and metadata of a warm-up image, None to skip the warm-up."""

    def __init__(
        self, name: str, config: ScorerConfig, placement: Placement, warm: tuple[str, Metadata] | None
    ) -> None:
        self.name, self.placement = name, placement
        self.scorer = build_scorer(name, config)
        # One thread, because a scorer need not be thread-safe. Decoding and health checks run beside it.
        self._thread = ThreadPoolExecutor(1)
        self._numbers = itertools.count()
        batched: Any = self._batched  # the decorator adds these methods
        batched.set_max_batch_size(placement.max_batch_size)
        batched.set_batch_wait_timeout_s(placement.batch_wait_s)
        if warm is not None:
            self._thread.submit(warm_up, name, self.scorer, *warm).result()

    async def score(self, images: list[bytes], prompts: list[str], metadata: list[Metadata]) -> Columns | Refusal:
        """Return the columns `[B]` for the image files `[B]` of one request."""
        pictures = await asyncio.to_thread(decode, images)
        if isinstance(pictures, Refusal):
            return pictures
        number = next(self._numbers)
        rows = enumerate(zip(pictures, prompts, metadata, strict=True))
        try:
            return join(self.name, await asyncio.gather(*(self._batched(Item(number, i, *row)) for i, row in rows)))
        finally:
            for picture in pictures:
                picture.close()  # Serve keeps the last batch until the next one

    @serve.batch
    async def _batched(self, items: list[Item]) -> list[Row]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._scored, items)

    def _scored(self, items: list[Item]) -> list[Row]:
        with references_within(self.placement.folders or ""):
            return score_items(self.name, self.scorer, items)


class RayScoring:
    """Client of the replicas of the Serve application `application`."""

    def __init__(self, application: str, handle: DeploymentHandle, warm: bool) -> None:
        self.application, self.handle, self.warm = application, handle, warm
        self._ready_until = 0.0

    async def score(self, images: list[bytes], prompts: list[str], metadata: list[Metadata]) -> Columns | Refusal:
        # a handle would keep the request until a replica is available, beyond the client's time-out
        if time.monotonic() > self._ready_until:
            if isinstance(state := await self.state(), Refusal):
                return state
            self._ready_until = time.monotonic() + TRUSTED_SECONDS
        try:
            return await self.handle.score.remote(images, prompts, metadata)
        except ray.exceptions.RayTaskError as error:
            log.error("a replica raised: %s", error)
            return Refusal(500, f"a replica failed with {type(error.cause).__name__}: check the log of the service")
        except (ray.exceptions.RayError, RayServeException) as error:
            log.error("a replica is lost (%s: %s)", type(error).__name__, error)
            return Refusal(503, "the replica that was scoring is lost and is being replaced: try again")

    async def state(self) -> dict[str, JSON] | Refusal:
        return await asyncio.to_thread(self.look)

    def look(self) -> dict[str, JSON] | Refusal:
        """Return the number of running replicas, or the reason why there are none."""
        try:
            application = serve.status().applications[self.application]
        except (ray.exceptions.RayError, RayServeException, KeyError) as error:
            return Refusal(503, f"Ray Serve does not answer ({type(error).__name__}): check the log of the service")
        states = application.deployments[DEPLOYMENT].replica_states if application.deployments else {}
        running = sum(count for state, count in states.items() if state == "RUNNING")
        if not running:
            return Refusal(
                503, f"no replica of the scorer is running yet ({application.status.value.lower()}): try again"
            )
        return {"replicas": running, "warm": self.warm}

    def check(self) -> None:
        """Raise `RewardError` if the scorer cannot be started, `ClusterError` if Ray is gone."""
        try:
            application = serve.status().applications[self.application]
        except (ray.exceptions.RayError, RayServeException, KeyError) as error:
            raise ClusterError(
                f"Ray Serve is gone ({type(error).__name__}: {error}): start the service again"
            ) from None
        if application.status.value == "DEPLOY_FAILED":
            messages = [deployment.message for deployment in application.deployments.values()]
            raise RewardError(f"the scorer failed to start: {_cause(' '.join([*messages, application.message]))}")


@contextlib.contextmanager
def deployed(
    name: str, config: ScorerConfig, placement: Placement, warm: tuple[str, Metadata] | None
) -> Iterator[RayScoring]:
    """Run replicas of the scorer `name` within the context; they start in the background.

    Joins the Ray cluster of the environment variable RAY_ADDRESS if it is set, else starts a local one; stops only what
    it started.

    Raises:
        ClusterError: Ray does not start, or has fewer GPUs than requested.
    """
    joined = os.environ.get("RAY_ADDRESS")
    options: dict[str, object] = {"logging_level": logging.ERROR}
    application = f"gerl_reward_{name}_{os.getpid()}"
    with contextlib.ExitStack() as ends:  # a local cluster ends, with Serve and replicas; a joined one keeps running
        if joined:
            join_cluster(joined, options)
            ends.callback(ray.shutdown)
            ends.callback(_delete, application)
        else:
            local_ray.start(options, ends)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        deployment = _deployment(placement).bind(name, config, placement, warm)
        quiet = {"log_level": "WARNING", "enable_access_log": False}
        serve.start(proxy_location="Disabled", logging_config=quiet)
        target = serve.RunTarget(deployment, name=application, route_prefix=None, logging_config=quiet)
        (handle,) = serve.run_many([target], wait_for_applications_running=False)
        yield RayScoring(application, handle, warm is not None)


def _delete(application: str) -> None:
    with contextlib.suppress(ray.exceptions.RayError, RayServeException):  # this may run because Ray is gone
        serve.delete(application)


def _deployment(placement: Placement) -> serve.Deployment:
    resources = ray.cluster_resources()
    there = resources.get("GPU", 0.0)
    gpus = int(1000 * min(1.0, there / placement.replicas)) / 1000 if placement.gpus is None else placement.gpus
    if gpus * placement.replicas > there:
        raise ClusterError(
            f"replicas={placement.replicas} with gpus={gpus:g} need more than the {there:g} GPUs Ray has: lower one"
        )
    threads = placement.threads or max(1, int(resources.get("CPU", 1.0)) // placement.replicas)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(paths),
        # otherwise glibc never returns the freed memory of large images
        "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    }
    return serve.deployment(
        Replica,
        name=DEPLOYMENT,
        num_replicas=placement.replicas,
        # each may take all requests: a replica that dies leaves its share to the others
        max_ongoing_requests=placement.max_in_flight,
        max_constructor_retry_count=1,  # for the first replica only: later ones are retried forever
        # No CPU is reserved: CPUs are shared by design, and a replica must not wait for one that is never free.
        ray_actor_options={"num_cpus": 0, "num_gpus": gpus, "runtime_env": {"env_vars": environment}},
    )


def _cause(message: str) -> str:
    """Return the final error message of a traceback in text form."""
    for mark in ("gerl.errors.RewardError: ", "gerl.errors.DataError: "):
        if mark in message:
            return " ".join(message.rsplit(mark, 1)[1].split())
    return " ".join(message.split())[-1000:]

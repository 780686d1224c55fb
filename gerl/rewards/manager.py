"""Reward manager: scorer processes, scoring of images while others are sampled, and the trial of the scorers."""

import hashlib
import json
import logging
import math
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gerl.cluster import AGAIN, Cluster, Pending, WorkerGroup, silence, wait_any
from gerl.config import Config, RewardConfig, ScorerConfig
from gerl.errors import RewardError, WorkerDied
from gerl.objects import PREFIX, Function, function
from gerl.progress import Timeline
from gerl.protocol import FeedbackRequest, Group, Images, Prompt, RolloutTask, Sample, ScorerFailure, Scores
from gerl.rewards.scorers import known_scorer
from gerl.rewards.scorers.base import PeopleScorer
from gerl.rewards.total import active_scorers, applies, total
from gerl.rewards.worker import Answer, RewardWorker, Row
from gerl.utils.seeding import seed_everything

logger = logging.getLogger(__name__)

# --- Scorer processes: start, restart, waiting for resources in Ray; and their calls

PAUSE = 1.0  # seconds before a process that died while starting is started again


@dataclass(eq=False)
class Job:
    """Call of a scorer on the images of one micro-batch or, for a groupwise scorer, of one group."""

    round: "ScoringRound"
    scorer: str
    places: list[tuple[int, int]]  # (micro-batch, row)
    attempts: int = 0
    queued: float = field(default_factory=time.perf_counter)
    polls: int = 0  # number of times that people had not answered yet
    wake: float = 0.0  # when they are asked again
    process: int = 0  # of its scorer's pool, while the call runs
    started: float = 0.0


@dataclass(frozen=True)
class Start:
    """Starting process. `until`: deadline for getting resources; None: placed and building its scorers.

    `build`: the call that builds them once it is placed, while the driver may wait for something else.
    """

    process: int
    until: float | None = None
    build: Pending[None] | None = None


@dataclass(eq=False)
class Pool:
    """Pool of identical processes, with a queue of calls."""

    workers: WorkerGroup[RewardWorker]
    timeout: float
    patience: float = math.inf  # seconds to wait for resources of a process
    idle: list[int] = field(default_factory=list)
    starting: dict[Pending[None], Start] = field(default_factory=dict)  # not subject to `timeout`
    queue: deque[Job] = field(default_factory=deque)
    died: set[int] = field(default_factory=set)  # while starting, at the last attempt

    def start(self, process: int, until: float | None = None) -> None:
        """Start a process, which builds its scorers as soon as Ray has placed it."""
        if not self.workers.remote:
            self.starting[self.workers.submit(process, RewardWorker.build)] = Start(process)
            return
        until = time.perf_counter() + self.patience if until is None else until
        placed = self.workers.submit(process, RewardWorker.ping)
        self.starting[placed] = Start(process, until, self.workers.submit(process, RewardWorker.build))

    def start_all(self) -> None:
        """Start all processes again after a restart of Ray."""
        self.idle, self.starting, self.died = [], {}, set()
        self.workers.forget()
        for process in range(len(self.workers)):
            self.renew(process)

    def renew(self, process: int, until: float | None = None) -> None:
        """End a process, even if it is working, and start a replacement."""
        self.idle = [other for other in self.idle if other != process]
        self.workers.restart(process)
        self.start(process, until)

    def started(self, pending: Pending[None]) -> None:
        """Make a process available, or restart it once if it died; raises `RewardError` if it failed or died again."""
        start = self.starting.pop(pending)
        process, until = start.process, start.until
        try:
            pending.result()
        except WorkerDied as error:
            if until is not None and time.perf_counter() < until < math.inf:
                time.sleep(PAUSE)  # its machine may have died too, which Ray has not noticed yet
                self.renew(process, until)
                return
            if process in self.died:
                raise RewardError(f"a process failed to start: {error}") from None
            logger.warning("%s; it is started again", str(error).removesuffix(f"; {AGAIN}"))
            self.died.add(process)
            self.renew(process)
            return
        if start.build is not None:
            self.starting[start.build] = Start(process)
            return
        self.died.discard(process)
        self.idle.append(process)

    @property
    def without_room(self) -> dict[Pending[None], Start]:
        """Processes that Ray has not placed yet."""
        return {pending: start for pending, start in self.starting.items() if start.until is not None}

    def check_room(self) -> None:
        """Stop waiting for processes not placed in time; they join later. Raises `RewardError` if none was placed."""
        if not self.starting:
            return
        now, late, count = time.perf_counter(), self.without_room, len(self.workers)
        for pending, start in late.items():
            if start.until is None or start.until > now or self._starts_slowly(pending, start.process):
                continue
            if len(late) == count:
                raise self._without_room()
            name, left = f"{self.workers.name} {start.process}", count - len(late)
            logger.warning("Ray has no room for %s: the run continues with %d of %d processes", name, left, count)
            self.starting[pending] = replace(start, until=math.inf)

    def wait_until_ready(self, process: int) -> None:
        """Wait until a process has built its scorers; raises `RewardError` if it cannot, or Ray cannot place it."""
        while pending := [pending for pending, start in self.starting.items() if start.process == process]:
            until = self.starting[pending[0]].until or math.inf
            left = until - time.perf_counter()
            if not pending[0].wait(max(0.0, left) if left < math.inf else pending[0].hang_after):
                if not self._starts_slowly(pending[0], process):
                    raise self._without_room()
                continue
            self.started(pending[0])

    def _starts_slowly(self, pending: Pending[None], process: int) -> bool:
        """Extend the wait for a process that was placed but has not started: its Python may be on a network disk."""
        if not self.workers.has_room(process):
            return False
        logger.info("%s %d has been scheduled but not started yet: waiting", self.workers.name, process)
        self.starting[pending] = replace(self.starting[pending], until=time.perf_counter() + self.patience)
        return True

    def _without_room(self) -> RewardError:
        from gerl.cluster.placement import no_room  # here: imports Ray, which has no room

        message = no_room(self.workers.name.removesuffix(", process"), self.workers.needs)
        return RewardError(
            f"{message}, after cluster.patience={self.patience:g} s; add a machine, or lower cluster.num_workers or "
            "reward.scorers.NAME.gpus"
        )


# --- Scorer load since the last report


@dataclass
class ScorerLoad:
    """Load of a scorer: calls, images, seconds and problems."""

    calls: int = 0
    images: int = 0
    seconds: float = 0.0
    queued: float = 0.0
    retries: int = 0
    restarts: int = 0
    warnings: int = 0

    def metrics(self, name: str) -> dict[str, float]:
        """Return the metrics of scorer `name`: latency and queue seconds per call, images per second, and problems."""
        calls = max(self.calls, 1)
        found = {"latency_s": self.seconds / calls, "queue_s": self.queued / calls}
        found["images_per_s"] = self.images / self.seconds if self.seconds else 0.0
        found |= {"retries": float(self.retries), "restarts": float(self.restarts), "warnings": float(self.warnings)}
        return {f"scorer/{name}/{key}": value for key, value in found.items()}


# --- Human feedback: requests and polling

SOON, LATE, GROWTH = 0.05, 1.0, 1.5  # first and maximum polling interval in seconds, and its growth factor


class FeedbackQueue(list[Job]):
    """Queue of calls that wait for people; each costs only a short request now and then."""

    problem: str = ""  # the last known problem

    def put(self, call: Job, problem: str) -> None:
        """Queue a call; log the `problem` with the service if it has changed."""
        call.wake = time.perf_counter() + min(LATE, SOON * GROWTH ** min(call.polls, 20))
        call.polls += 1
        self.append(call)
        if problem != self.problem:
            logger.warning("scorer %s: %s", call.scorer, problem or "people can be asked again")
            self.problem = problem

    def awake(self) -> list[Job]:
        """Remove and return the calls that are due again."""
        now = time.perf_counter()
        found = [call for call in self if call.wake <= now]
        self[:] = [call for call in self if call.wake > now]
        return found


def wait(pending: Sequence[Pending[Any]], seconds: float | None) -> set[Pending[Any]]:
    """Wait until one of the `pending` calls ends, at most `seconds`; return those that have ended."""
    if not pending and seconds is not None:  # only people are awaited
        time.sleep(seconds)
    return set(wait_any(pending, seconds))


def feedback_requests(run: str, groups: Mapping[Group, Sequence[Sample]]) -> dict[Group, FeedbackRequest]:
    """Return the feedback request of each of the groups that are scored together."""
    seeds = {group: [sample.seed for sample in members] for group, members in groups.items()}
    steps = {group: members[0].step for group, members in groups.items()}
    named = {group: json.dumps([run, steps[group], *group, seeds[group]]).encode() for group in groups}
    keys = {group: hashlib.sha256(name).hexdigest()[:16] for group, name in named.items()}
    together = tuple(keys.values())
    return {
        group: FeedbackRequest(keys[group], run, steps[group], group.prompt, tuple(seeds[group]), together)
        for group in groups
    }


# --- Reward manager: the scorer processes, and the scoring of images
#
# Each scorer has separate processes (`reward.scorers.NAME.replicas`), unless it shares a model with others. A call that
# fails, hangs or dies with its process is repeated; after that, its images get a failure instead of a score. The
# manager only scores: a `PendingRollout` adds the images of a micro-batch when they are sampled.

SHOWN = 3  # prompts named in a warning


def functions_of(scorers: Mapping[str, ScorerConfig]) -> dict[str, Function]:
    """Return the functions of this program that are scorers, by name."""
    paths = [scorer.path for scorer in scorers.values() if scorer.path is not None and scorer.path.startswith(PREFIX)]
    return {path.removeprefix(PREFIX): found for path in paths if (found := function(path)) is not None}


class RewardManager:
    """Manager of all scorer processes; rounds are scored in the order of their images. `run`: name shown to people."""

    def __init__(self, config: RewardConfig, cluster: Cluster, run: str = "", timeline: Timeline | None = None) -> None:
        self.config, self.run, self.timeline = config, run, timeline or Timeline()
        scorers = {name: known_scorer(name, scorer) for name, scorer in config.scorers.items()}
        cluster.send_by_value(functions_of(config.scorers).values())
        self.groupwise = {name for name, scorer in scorers.items() if scorer.groupwise}
        self.people = {name for name, scorer in scorers.items() if isinstance(scorer, PeopleScorer)}
        self.on_worker = {name for name, scorer in scorers.items() if scorer.on_worker}
        by_model = {name: scorer for name, scorer in config.scorers.items() if name not in self.people}
        self.training = active_scorers(config.scorers, "training")
        self.validation = active_scorers(by_model, "validation")  # people are not asked
        self.feedback_queue = FeedbackQueue()
        self.load = {name: ScorerLoad() for name in scorers}
        self.running: dict[Pending[Answer], Job] = {}
        self.pools: dict[str, Pool] = {}  # by scorer; scorers that share a model have the same pool
        self.failure: Exception | None = None  # of work done while the run waited for something else
        together: dict[tuple[object, ...], list[str]] = {}
        for name, scorer in config.scorers.items():
            kind = (scorers[name].shares or name, scorer.replicas, scorer.gpus, scorer.timeout, repr(scorer.env))
            together.setdefault(kind, []).append(name)
        folder = str(Path.cwd())
        for names in together.values():
            first = config.scorers[names[0]]
            count = first.replicas if cluster.remote else 1
            if packages := first.env.get("uv", first.env.get("pip")):
                logger.info("Ray creates an environment with %s for %s ...", ", ".join(packages), " and ".join(names))
            own = {name: config.scorers[name] for name in names}
            workers = cluster.workers(
                f"scorer {' and '.join(names)}, process",
                RewardWorker,
                count,
                lambda _, own=own: (own, config.retries, folder, functions_of(own), frozenset(self.groupwise)),  # type: ignore[misc]
                gpus=first.gpus,
                environment=first.env,
            )
            patience = cluster.config.patience if cluster.joined else math.inf  # otherwise resources are available
            patience += cluster.config.hang_after if first.env else 0.0  # Ray creates the environment first
            pool = Pool(workers, first.timeout, patience)
            for process in range(count):
                pool.start(process)
            self.pools |= dict.fromkeys(names, pool)
        self.distinct_pools = list(dict.fromkeys(self.pools.values()))
        # number of queued micro-batches at which the scorers are saturated
        self.capacity = 2 * max([len(pool.workers) for pool in self.distinct_pools], default=1)

    def open(self, samples: Sequence[Sequence[Sample]], held_out: bool = False, scored: bool = True) -> "ScoringRound":
        """Start scoring `samples`, whose images are added as they are sampled; `held_out`: people are not asked."""
        scorers = self.validation if held_out else self.training
        return ScoringRound(self, samples, scorers if scored else {})

    def give_up(self) -> None:
        """Drop all rounds; the results of running calls are discarded."""
        self.failure = self.failure if isinstance(self.failure, RewardError) else None  # of dropped work
        self.feedback_queue.clear()
        for pool in self.distinct_pools:
            pool.queue.clear()
        for job in self.running.values():
            job.round.wanted = False
        self.timeline.forget()

    def start_all(self) -> None:
        """Start all processes again after a restart of Ray, with no running call."""
        self.running.clear()
        self.failure = None
        for pool in self.distinct_pools:
            pool.start_all()

    @property
    def wants_room(self) -> bool:
        """Whether a process waits for Ray to place it."""
        return any(pool.without_room for pool in self.distinct_pools)

    def submit(self) -> None:
        """Assign queued calls to idle processes."""
        for job in self.feedback_queue.awake():
            self.pools[job.scorer].queue.append(job)
        for pool in self.distinct_pools:
            while pool.queue and pool.idle:
                job = pool.queue.popleft()
                job.process, job.started = pool.idle.pop(0), time.perf_counter()
                limited = not pool.workers.remote and job.scorer not in self.people
                try:
                    with _time_limit(pool.timeout if limited else None):
                        pending = job.round.score(job, pool.workers)
                        self.timeline.submitted(pending, "score", job.started)
                except Overdue as error:
                    self._renew(job, f"no answer within {pool.timeout:g} s{_place(pool, job.scorer, error)}")
                    continue
                self.load[job.scorer].queued += 0.0 if job.polls else job.started - job.queued
                self.running[pending] = job

    @property
    def remote(self) -> bool:
        """Whether scorers run in separate processes."""
        return any(pool.workers.remote for pool in self.distinct_pools)

    def serve(self, others: Sequence[Pending[Any]] = (), most: float | None = None) -> set[Pending[Any]]:
        """Submit queued calls, wait at most `most` seconds until a call or one of `others` ends; return the ended."""
        self.submit()
        starting = [pending for pool in self.distinct_pools for pending in pool.starting]
        deadlines = [job.started + self.pools[job.scorer].timeout for job in self.running.values()]
        deadlines += [job.wake for job in self.feedback_queue]
        starts = [start for pool in self.distinct_pools for start in pool.without_room.values()]
        deadlines += [start.until for start in starts if start.until and start.until < math.inf]
        limits = [] if most is None else [most]
        limits += [max(0.0, min(deadlines) - time.perf_counter())] if deadlines else []
        ended = wait([*others, *starting, *self.running], min(limits, default=None))
        if self.timeline.running:
            self.timeline.ended(ended)
        self.collect(ended)
        return ended

    def collect(self, ended: Collection[Pending[Any]]) -> None:
        """Process `ended` calls and starts, renew processes that timed out; raises errors of both and of sampling."""
        if self.failure is not None:
            raise self.failure
        for pool in self.distinct_pools:
            for pending in [p for p in pool.starting if p in ended]:
                pool.started(pending)
            pool.check_room()
        now = time.perf_counter()
        for answer, job in list(self.running.items()):
            timeout = self.pools[job.scorer].timeout
            if answer in ended:
                del self.running[answer]
                self._collect(answer, job)
            elif now > job.started + timeout:
                del self.running[answer]
                self._renew(job, f"no answer within {timeout:g} s")

    def _collect(self, pending: Pending[Answer], job: Job) -> None:
        load, idle = self.load[job.scorer], self.pools[job.scorer].idle
        try:
            answer = pending.ended()
        except Exception as error:  # noqa: BLE001 - of sampling, unrelated to this process, unless that died
            lost = job.round.sampling_error(job) if isinstance(error, WorkerDied) else error
            if lost is None:
                self._renew(job, "its process died")
                return
            idle.append(job.process)
            if job.round.wanted:
                raise lost from lost.__cause__
            return
        idle.append(job.process)
        if answer.waiting is not None:
            if job.round.wanted:
                self.feedback_queue.put(job, answer.waiting)
            return
        load.calls += 1
        load.images += len(job.places)
        load.seconds += time.perf_counter() - job.queued if job.polls else answer.seconds
        load.retries += len(answer.retried)
        load.warnings += len(answer.warnings)
        for message in answer.warnings:
            logger.warning("scorer %s: %s", job.scorer, message)
        for reason in answer.retried:
            logger.warning("scorer %s was called again after it failed for %s", job.scorer, reason)
        job.round.store(job, answer.rows)

    def _renew(self, job: Job, reason: str) -> None:
        """Restart a process that died or hangs, and repeat its call or give up."""
        pool, load = self.pools[job.scorer], self.load[job.scorer]
        texts = job.round.texts(job)
        more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        logger.warning(
            "scorer %s: %s, with %d images of %s pending; %s",
            *(job.scorer, reason, len(job.places), ", ".join(map(repr, texts[:SHOWN])) + more),
            "the process is restarted" if pool.workers.remote else "it is built again",
        )
        pool.renew(job.process)
        load.restarts += 1
        job.attempts += 1
        if not job.round.wanted:
            return
        if job.attempts <= self.config.retries:
            load.retries += 1
            pool.queue.appendleft(job)
            return
        job.round.store(job, [{job.scorer: ScorerFailure(job.scorer, reason)} for _ in job.places])

    def metrics(self) -> dict[str, float]:
        """Return the metrics of each scorer since the last call, and reset them."""
        metrics: dict[str, float] = {}
        for name, load in self.load.items():
            metrics |= load.metrics(name)
            self.load[name] = ScorerLoad()
        return metrics


class ScoringRound:
    """Scoring of a set of micro-batches; added ones are scored while the next ones are sampled."""

    def __init__(
        self, manager: RewardManager, samples: Sequence[Sequence[Sample]], scorers: Mapping[str, ScorerConfig]
    ) -> None:
        self.manager, self.samples, self.scorers = manager, samples, scorers
        self.wanted = True
        self.images: dict[int, Pending[Images]] = {}  # of the sampled micro-batches
        self.rows: list[list[Row]] = [[{} for _ in batch] for batch in samples]
        self.left = 0  # calls that have not ended
        self.left_of: dict[int, int] = {}  # the same by sampled micro-batch
        self.groups: dict[Group, list[tuple[int, int]]] = {}
        for i, batch in enumerate(samples):
            for row, sample in enumerate(batch):
                self.groups.setdefault(sample.group, []).append((i, row))
        self.missing = {group: len(places) for group, places in self.groups.items()}  # images still to be sampled
        members = {group: [samples[i][row] for i, row in places] for group, places in self.groups.items()}
        self.feedback_requests = feedback_requests(manager.run, members) if manager.people & scorers.keys() else {}

    @property
    def queued(self) -> int:
        """Number of micro-batches with queued calls."""
        jobs = [job for pool in self.manager.distinct_pools for job in pool.queue if job.round is self]
        return len({i for job in jobs for i, _ in job.places})

    def add(self, batch: int, images: Pending[Images]) -> None:
        """Queue the calls that are possible once the `images` of micro-batch `batch` are sampled."""
        self.images[batch] = images
        self.left_of.setdefault(batch, 0)
        for sample in self.samples[batch]:
            self.missing[sample.group] -= 1
        whole = [g for g in dict.fromkeys(sample.group for sample in self.samples[batch]) if not self.missing[g]]
        for name, scorer in self.scorers.items():
            parts = [[(batch, row) for row in range(len(self.samples[batch]))]]
            if name in self.manager.groupwise:
                parts = [self.groups[group] for group in whole]
            for part in parts:
                places = [(i, row) for i, row in part if applies(scorer, self.samples[i][row].prompt)]
                if places:
                    self.manager.pools[name].queue.append(Job(self, name, places))
                    self._count(places, 1)

    def finish(self) -> list[Scores]:
        """Wait for the scores of all micro-batches after all were added; raises as `RewardManager.collect`."""
        while self.left:
            self.manager.serve()
        return self.scores()

    def scores(self) -> list[Scores]:
        """Return the scores of all micro-batches, in order, after all calls have ended."""
        return self.scores_of([[(i, row) for row in range(len(batch))] for i, batch in enumerate(self.samples)])

    def is_scored(self, batch: int) -> bool:
        """Whether all calls of a sampled micro-batch have ended; those of groups begin when all images are sampled."""
        return self.left_of.get(batch) == 0

    def scores_of(self, parts: Sequence[Sequence[tuple[int, int]]]) -> list[Scores]:
        """Return the scores of the images at the places (micro-batch, row) of each part."""
        return [self._scores([self.samples[i][r] for i, r in p], [self.rows[i][r] for i, r in p]) for p in parts]

    def _count(self, places: Sequence[tuple[int, int]], change: int) -> None:
        self.left += change
        for batch in {i for i, _ in places}:
            self.left_of[batch] = self.left_of.get(batch, 0) + change

    def score(self, job: Job, workers: WorkerGroup[RewardWorker]) -> Pending[Answer]:
        """Submit the call of `job` to its process of `workers`."""
        batches = list(dict.fromkeys(i for i, _ in job.places))
        places = [(batches.index(i), row) for i, row in job.places]
        prompts = [self.samples[i][row].prompt for i, row in job.places]
        texts, metadata = [prompt.text for prompt in prompts], [prompt.metadata for prompt in prompts]
        images = [self.images[i].later() for i in batches]
        if job.scorer in self.manager.people:
            i, row = job.places[0]
            occasion = self.feedback_requests[self.samples[i][row].group]
            arguments = (job.scorer, places, texts, metadata, occasion)
            return workers.submit(job.process, RewardWorker.ask, *arguments, *images)
        return workers.submit(job.process, RewardWorker.score, job.scorer, places, texts, metadata, *images)

    def store(self, job: Job, rows: Sequence[Row]) -> None:
        """Store the rows returned by the call of `job`."""
        self._count(job.places, -1)
        for (i, row), found in zip(job.places, rows, strict=True):
            self.rows[i][row] |= found

    def texts(self, job: Job) -> list[str]:
        """Return the distinct prompts of `job`."""
        return list(dict.fromkeys(self.samples[i][row].prompt.text for i, row in job.places))

    def sampling_error(self, job: Job) -> Exception | None:
        """Return the error that sampling the images of `job` raised, None if it succeeded."""
        for i in {i for i, _ in job.places}:
            try:
                self.images[i].result()
            except Exception as error:  # noqa: BLE001 - the caller raises it
                return error
        return None

    def _scores(self, batch: Sequence[Sample], rows: list[Row]) -> Scores:
        scorers = self.scorers
        sums = [total(scorers, sample.prompt, row) for sample, row in zip(batch, rows, strict=True)]
        totals = [None if isinstance(value, ScorerFailure) else value for value in sums]
        found = list(dict.fromkeys(label for row in rows for label in row))
        labels = [label for name in scorers for label in (name, *(c for c in found if c.startswith(f"{name}/")))]
        # weighted scorers first: the first failure of a sample explains its missing total
        order = sorted(labels, key=lambda label: label not in scorers or scorers[label].weight == 0)
        failures = [
            [v for v in (value, *map(row.get, order)) if isinstance(v, ScorerFailure)]
            for value, row in zip(sums, rows, strict=True)
        ]
        by_scorer = {
            label: [value if isinstance(value := row.get(label), float) else None for row in rows] for label in labels
        }
        return Scores(list(batch), totals, by_scorer, failures)


# --- Sampling and scoring at once: scorers score a micro-batch while the workers sample the next ones

POLL_S = 0.1  # interval at which the thread checks whether the block has ended
PREFETCH = 2  # micro-batches submitted to a process: the current one and the next


class Dispatch:
    """Micro-batches being sampled, each by its process of `processes` `[M]`."""

    def __init__(self, call: Callable[[int], Pending[Images]], processes: Sequence[int]) -> None:
        self.submit, self.processes = call, processes

    def ended(self, number: int) -> None:
        """Handle the end of a micro-batch."""

    def finish(self) -> Sequence[RolloutTask]:
        """Handle the end of all micro-batches; return the tasks that will be trained on."""
        return []


class RoundRobin(Dispatch):
    """Micro-batches that `count` processes take in turn: `call(i)` submits the i-th of `total`."""

    def __init__(self, call: Callable[[int], Pending[Images]], count: int, total: int) -> None:
        super().__init__(call, [number % count for number in range(total)])


class PendingRollout:
    """Micro-batches in flight; sampling pauses while the scorers lag behind, so that images do not accumulate."""

    def __init__(
        self,
        manager: RewardManager,
        samples: Sequence[Sequence[Sample]],
        dispatch: Dispatch,
        hang_after: float | None = None,
        ahead: int = 0,
        held_out: bool = False,
        progress: Callable[[int], None] = lambda images: None,
        scored: bool = True,
    ) -> None:
        """`hang_after`: seconds without an answer after which a worker counts as dead.

        `ahead`: steps between sampling and training; more images may wait for the scorers.
        `held_out`: votes of people are not requested. `progress`: called with the number of sampled images.
        `scored`: whether any scorer gets the images.
        """
        self.hang_after, self.silent, self.progressed = hang_after, 0.0, progress
        self.what: Literal["sample", "validate"] = "validate" if held_out else "sample"
        self.manager, self.dispatch, self.count = manager, dispatch, len(samples)
        self.processes = dispatch.processes
        self.sizes = [len(batch) for batch in samples]
        self.total = sum(self.sizes)
        self.scoring = manager.open(samples, held_out, scored)
        self.scorers = list(self.scoring.scorers)
        self.images: list[Pending[Images]] = []  # of the submitted micro-batches, in order
        self.running: dict[int, Pending[Images]] = {}  # those not yet sampled
        self.busy = Counter[int]()  # submitted micro-batches by process
        self.sampled: set[int] = set()
        # so that scorers always have a micro-batch
        self.limit = (1 + ahead) * (len(set(self.processes)) + manager.capacity)

    def wait_until_sampled(self, others: Sequence["PendingRollout"] = ()) -> None:
        """Wait until all images are sampled, serving later rollouts `others`; raises errors of sampling and scoring."""
        while len(self.sampled) < self.count:
            advance([self, *others])

    def finish(
        self, others: Sequence["PendingRollout"] = (), meanwhile: Callable[[], None] | None = None
    ) -> list[Scores]:
        """Wait for all micro-batches and return their scores in order; raises errors of sampling and scoring.

        `meanwhile`: called while scores are missing, after each wait.
        """
        self.wait_until_sampled(others)
        while self.scoring.left:
            if meanwhile is not None:
                meanwhile()
            advance([self, *others])
        return self.scoring.scores()

    def progress(self) -> str:
        """Describe how many images are sampled and which scorers are pending; called from another thread."""
        sampled = sum(self.sizes[i] for i in tuple(self.sampled))
        if sampled < self.total:
            return f"{sampled} of {self.total} images sampled"
        return f"all {self.total} images sampled, waiting for {' and '.join(self.scorers)}"

    def submit(self) -> None:
        """Submit the micro-batches for which a sampler is free."""
        while len(self.images) < self.count and self.scoring.queued < self.limit:
            i = len(self.images)
            if self.busy[self.processes[i]] >= PREFETCH:
                break
            started = time.perf_counter()
            self.running[i] = image = self.dispatch.submit(i)
            self.images.append(image)
            self.busy[self.processes[i]] += 1
            self.manager.timeline.submitted(image, self.what, started)

    def take(self, ended: Collection[Pending[Any]]) -> None:
        """Pass the images of finished calls `ended` to the scorers."""
        for i, image in [(i, image) for i, image in self.running.items() if image in ended]:
            del self.running[i]
            self.busy[self.processes[i]] -= 1
            self.sampled.add(i)
            self.scoring.add(i, image)
            self.dispatch.ended(i)
            self.progressed(self.sizes[i])

    def check_silence(self, heard: bool, seconds: float) -> None:
        """Count `seconds` without an answer, unless one was `heard`; raises `WorkerDied` after `hang_after`."""
        self.silent = 0.0 if heard or not self.running else self.silent + seconds
        if self.hang_after is not None and self.silent >= self.hang_after:
            raise silence(list(self.running.values()), self.hang_after)


def advance(rollouts: Sequence[PendingRollout], most: float | None = None) -> None:
    """Submit due calls, wait up to `most` seconds for one to finish, and take its result.

    `rollouts`: of one manager, at least one of them unfinished; each begins once those before it are submitted.
    """
    manager = rollouts[0].manager
    for each in rollouts:
        each.submit()
        if len(each.images) < each.count:
            break
    sampling = [image for each in rollouts for image in each.running.values()]
    limits = [limit for limit in (most, *(each.hang_after for each in rollouts if each.running)) if limit is not None]
    started = time.monotonic()
    ended = manager.serve(sampling, min(limits, default=None))
    heard = not ended.isdisjoint(sampling) if manager.feedback_queue else bool(ended)  # people vote at any time
    for each in rollouts:
        each.check_silence(heard, time.monotonic() - started)
        each.take(ended)


@contextmanager
def serve_in_background(manager: RewardManager, rollouts: Sequence[PendingRollout]) -> Iterator[None]:
    """Keep samplers and scorers busy with `rollouts` from a thread; the next wait for a rollout raises its errors."""
    if not manager.remote:  # in one process they would compete with the block
        yield
        return
    over = threading.Event()

    def left() -> bool:
        return any(each.scoring.left or len(each.sampled) < each.count for each in rollouts)

    def serve() -> None:
        try:
            while not over.is_set() and left():
                advance(rollouts, POLL_S)
        except Exception as error:  # noqa: BLE001 - raised by the next wait
            manager.failure = error

    server = threading.Thread(target=serve, name="sampling ahead", daemon=True)
    server.start()
    try:
        yield
    finally:
        over.set()
        server.join()


# --- Scorer trial: two calls of each scorer on grey images, before a model is loaded and anything is written
#
# Runs in the processes that score later, so that loaded models stay loaded. With Ray a scorer that hangs or dies is
# ended with its process; in this process a time-out interrupts its Python code.

NOISE = 1e-3  # of two calls of a scorer on the same images; half precision rounds less
GREY, SIZE = 128, 512  # pixel value; size in pixels if the pipeline's default is not known yet


class Overdue(BaseException):
    """Time-out of a scorer in this process; not an `Exception`, which the scorer might catch."""


def try_scorers(
    manager: RewardManager, config: Config, prompts: Sequence[Prompt], held_out: Sequence[Prompt] = ()
) -> list[str]:
    """Call every scorer as in training, on grey images with rows of `prompts`, and return the columns it scores.

    A second call shows whether it gives other numbers for the same images, which is a warning. Scorers used only in
    validation get rows of `held_out`. If `reward.trial` is off, none is called, and there are no columns.

    The call has a micro-batch of images, or a group for a groupwise scorer; as in training it is repeated
    (`reward.retries`) and checked. A failure of a scorer with weight 0 is only a warning. People are not asked; only
    the connection to their service is checked.

    Raises:
        RewardError: a scorer with a weight has no score for any image, hangs, or ends its process.
    """
    if not config.reward.trial:
        return []
    for pool in manager.distinct_pools:
        pool.wait_until_ready(0)
    trials: dict[str, tuple[list[Prompt], Images]] = {}
    for name, scorer in config.reward.scorers.items():
        known = held_out if scorer.during == "validation" else prompts
        shown = [prompt for prompt in known if applies(scorer, prompt)]
        if shown and name in manager.people:
            _reach(manager.pools[name], name)
        elif shown and name not in manager.on_worker:
            count = config.rollout.n if name in manager.groupwise else config.rollout.micro_batch_size
            shown = shown[:1] * count if name in manager.groupwise else [shown[i % len(shown)] for i in range(count)]
            trials[name] = shown, _grey(config, count)
    first = _trial(manager, config, trials, 0)
    second = _trial(manager, config, {name: trials[name] for name, rows in first.items() if _all_scored(rows)}, 1)
    for name, rows in second.items():
        if differing := _difference(first[name], rows):
            logger.warning(
                "scorer %s gives other numbers for the same images (%s), which is noise in the reward: turn off "
                "dropout and sampling in it, or average several calls",
                *(name, differing),
            )
    return list(dict.fromkeys(column for rows in first.values() for row in rows for column in row))


def _trial(
    manager: RewardManager, config: Config, trials: Mapping[str, tuple[Sequence[Prompt], Images]], number: int
) -> dict[str, list[Row]]:
    """Call each scorer once; returns its rows, none of a watched one that failed."""
    if not manager.remote:
        seed_everything("trial", config.trainer.seed, number)  # calls begin with the generators of this process
    calls = {name: _submit(manager.pools[name], name, *trial) for name, trial in trials.items()}
    # calls in one process run one after the other, each with its full time-out
    return {name: _conclude(manager.pools[name], name, config.reward.scorers[name], calls[name]) for name in calls}


def _all_scored(rows: Sequence[Row]) -> bool:
    return bool(rows) and all(isinstance(value, float) for row in rows for value in row.values())


def _difference(first: Sequence[Row], second: Sequence[Row]) -> str:
    """Return the first number that differs between two calls of a scorer, by more than rounding; empty if none does."""
    for row, again in zip(first, second, strict=False):
        for column, value in row.items():
            other = again.get(column)
            if not isinstance(value, float) or not isinstance(other, float):
                continue
            if not math.isclose(value, other, rel_tol=NOISE, abs_tol=NOISE):
                return f"{column} {value:.4g}, then {other:.4g}"
    return ""


def _reach(pool: Pool, name: str) -> None:
    """Warn if people cannot be asked; a run may start before that is possible."""
    try:
        problem = pool.workers.submit(0, RewardWorker.reach, name).result()
    except RewardError as error:
        raise RewardError(f"reward.scorers.{name}: {error}") from None
    if problem:
        logger.warning("scorer %s: %s", name, problem)


def _grey(config: Config, count: int) -> Images:
    """Return grey images `[B, H, W, 3]` or videos `[B, F, H, W, 3]` of the configured size."""
    frames = config.sampling.call.get("num_frames")
    size = (config.sampling.height or SIZE, config.sampling.width or SIZE, 3)
    shape = (frames, *size) if isinstance(frames, int) and frames > 1 else size
    return Images(0, np.full((count, *shape), GREY, np.uint8), 0.0)


def _submit(pool: Pool, name: str, rows: Sequence[Prompt], images: Images) -> Pending[Answer] | str:
    """Call a scorer; in this process it ends at once, and a time-out is returned as a sentence."""
    texts, metadata = [row.text for row in rows], [row.metadata for row in rows]
    places = [(0, row) for row in range(len(rows))]
    try:
        with _time_limit(None if pool.workers.remote else pool.timeout):
            return pool.workers.submit(0, RewardWorker.score, name, places, texts, metadata, images)
    except Overdue as error:
        return f"no answer within {pool.timeout:g} s{_place(pool, name, error)}"


def _place(pool: Pool, name: str, error: BaseException) -> str:
    """Return where a scorer in this process was interrupted by `error`."""
    return pool.workers.workers[0].scorers[name].place(error)


def _conclude(pool: Pool, name: str, scorer: ScorerConfig, call: Pending[Answer] | str) -> list[Row]:
    """Wait for a call and return its rows; raises `RewardError`, or warns, if it failed."""
    answer = call if isinstance(call, str) else _answer(pool, call)
    if isinstance(answer, str):
        count, failures, rows = 0, [answer], list[Row]()
    else:
        for message in answer.warnings:
            logger.warning("scorer %s: %s", name, message)
        count, rows = len(answer.rows), answer.rows
        failures = [value.reason for row in rows if isinstance(value := row[name], ScorerFailure)]
    if not failures:
        return rows
    problem = (
        f"reward.scorers.{name} failed in a trial on grey images: {failures[0]}; fix it, or skip this trial with "
        "reward.trial=false if it is only grey images that it cannot score"
    )
    if len(failures) < count:
        logger.warning("%s (%d of %d images have a score)", problem, count - len(failures), count)
    elif scorer.weight != 0:
        raise RewardError(problem)
    else:
        logger.warning("%s; its weight is 0, so the run continues", problem)
        if isinstance(answer, str):
            pool.renew(0)
    return rows


def _answer(pool: Pool, call: Pending[Answer]) -> Answer | str:
    if call not in wait_any([call], pool.timeout):
        return f"no answer within {pool.timeout:g} s"
    try:
        return call.result()
    except WorkerDied:
        return "its process died"


@contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `Overdue` in Python code that runs longer, if possible: only in the main thread."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise Overdue

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)

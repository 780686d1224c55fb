"""Reward manager: images are scored by scorer processes while the next ones are sampled."""

import hashlib
import json
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gerl.cluster import Cluster, Pending, WorkerGroup, wait_any
from gerl.config import RewardConfig, ScorerConfig
from gerl.errors import RewardError, WorkerDied
from gerl.objects import PREFIX, Function, function
from gerl.progress import Timeline
from gerl.protocol import FeedbackRequest, Group, Images, Sample, ScorerFailure, Scores
from gerl.rewards.pool import Overdue, Pool, ScorerLoad, time_limit
from gerl.rewards.scorers import known_scorer
from gerl.rewards.scorers.base import PeopleScorer
from gerl.rewards.total import active_scorers, applies, total
from gerl.rewards.worker import Answer, RewardWorker, Row

logger = logging.getLogger(__name__)


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
        calls = [call for call in self if call.wake <= now]
        self[:] = [call for call in self if call.wake > now]
        return calls


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
# manager only scores: a `rollouts.PendingRollout` adds the images of a micro-batch when they are sampled.

SHOWN = 3  # prompts named in a warning


def functions_of(scorers: Mapping[str, ScorerConfig]) -> dict[str, Function]:
    """Return the functions of this program that are scorers, by name."""
    paths = [scorer.path for scorer in scorers.values() if scorer.path is not None and scorer.path.startswith(PREFIX)]
    return {path.removeprefix(PREFIX): loaded for path in paths if (loaded := function(path)) is not None}


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
        self.pools: dict[str, Pool[Job]] = {}  # by scorer; scorers that share a model have the same pool
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
            pool = Pool[Job](workers, first.timeout, patience)
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
        return any(pool.unplaced for pool in self.distinct_pools)

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
                    with time_limit(pool.timeout if limited else None):
                        pending = job.round.score(job, pool.workers)
                        self.timeline.submitted(pending, "score", job.started)
                except Overdue as error:
                    self._renew(job, f"no answer within {pool.timeout:g} s{pool.interrupted_at(job.scorer, error)}")
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
        starts = [start for pool in self.distinct_pools for start in pool.unplaced.values()]
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
        for (i, row), values in zip(job.places, rows, strict=True):
            self.rows[i][row] |= values

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
        columns = list(dict.fromkeys(label for row in rows for label in row))
        labels = [label for name in scorers for label in (name, *(c for c in columns if c.startswith(f"{name}/")))]
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

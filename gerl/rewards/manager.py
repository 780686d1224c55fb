"""The reward manager: the processes of the scorers, and images on their way through them.

Every scorer has processes of its own (`reward.scorers.NAME.replicas`), but for those that share a model. A call that
fails, hangs or dies with its process is repeated, then its images have a failure in place of a score. The manager only
scores: whoever draws adds the images of a micro-batch as they come (`gerl.trainer.rollouts`).
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from gerl.cluster import Cluster, Pending
from gerl.config import RewardConfig, ScorerConfig
from gerl.errors import RewardError, WorkerDied
from gerl.objects import PREFIX, Function, function
from gerl.protocol import Group, Images, ScorerFailure, Scores
from gerl.rewards.asking import Asleep, Scorable, occasions, wait
from gerl.rewards.load import Load
from gerl.rewards.pool import Call, Job, Pool
from gerl.rewards.scorers import known_scorer
from gerl.rewards.scorers.base import PeopleScorer
from gerl.rewards.total import applies, looking, total
from gerl.rewards.worker import Answer, RewardWorker, Row
from gerl.timeline import Timeline

logger = logging.getLogger(__name__)
SHOWN = 3  # prompts named in a warning


def given(scorers: Mapping[str, ScorerConfig]) -> dict[str, Function]:
    """The functions of this program that are scorers, by name."""
    paths = [scorer.path for scorer in scorers.values() if scorer.path is not None and scorer.path.startswith(PREFIX)]
    return {path.removeprefix(PREFIX): found for path in paths if (found := function(path)) is not None}


class RewardManager:
    """The processes of all scorers; `open` begins the scoring of a step's micro-batches, or of a validation's.

    Of several rounds under way calls are made in the order in which images were added. `run`: its name, for people.
    """

    def __init__(self, config: RewardConfig, cluster: Cluster, run: str = "", timeline: Timeline | None = None) -> None:
        self.config, self.run, self.timeline = config, run, timeline or Timeline()
        scorers = {name: known_scorer(name, scorer) for name, scorer in config.scorers.items()}
        cluster.send_by_value(given(config.scorers).values())
        self.groupwise = {name for name, scorer in scorers.items() if scorer.groupwise}
        self.people = {name for name, scorer in scorers.items() if isinstance(scorer, PeopleScorer)}
        self.asleep: Asleep[Job[ScoringRound]] = Asleep()
        self.load = {name: Load() for name in scorers}
        self.running: dict[Pending[Answer], Call[ScoringRound]] = {}
        self.pools: dict[str, Pool[ScoringRound]] = {}  # by scorer; those that share a model have the same one
        self.failure: Exception | None = None  # of what was done while the run waited for something else
        together: dict[tuple[object, ...], list[str]] = {}
        for name, scorer in config.scorers.items():
            kind = (scorers[name].shares or name, scorer.replicas, scorer.gpus, scorer.timeout, repr(scorer.env))
            together.setdefault(kind, []).append(name)
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
                _always((own, config.retries, str(Path.cwd()), given(own), frozenset(self.groupwise))),
                gpus=first.gpus,
                environment=first.env,
            )
            patience = cluster.config.patience if cluster.joined else math.inf  # else there is room
            patience += cluster.config.hang_after if first.env else 0.0  # Ray makes the environment first
            pool: Pool[ScoringRound] = Pool(workers, first.timeout, patience)
            for process in range(count):
                pool.start(process)
            self.pools |= dict.fromkeys(names, pool)

    def open(self, samples: Sequence[Sequence[Scorable]], held_out: bool = False) -> "ScoringRound":
        """Begin to score micro-batches of `samples`, whose images are added as they are drawn.

        `held_out`: images of a validation, about which people are not asked.
        """
        part = looking(self.config.scorers, "validation" if held_out else "training")
        scorers = {name: scorer for name, scorer in part.items() if not (held_out and name in self.people)}
        return ScoringRound(self, samples, scorers)

    def give_up(self) -> None:
        """Drop all rounds: calls that are at work end for nothing."""
        self.failure = self.failure if isinstance(self.failure, RewardError) else None  # of what is dropped
        self.asleep.clear()
        for pool in self._pools():
            pool.queue.clear()
        for call in self.running.values():
            call.job.round.wanted = False
        self.timeline.forget()

    def start_all(self) -> None:
        """Start all processes anew, when nothing is under way any more: the Ray that had them is gone."""
        self.running.clear()
        self.failure = None
        for pool in self._pools():
            pool.start_all()

    @property
    def wants_room(self) -> bool:
        """Whether a process waits for Ray to place it."""
        return any(pool.late for pool in self._pools())

    @property
    def capacity(self) -> int:
        """Micro-batches with calls in a queue at which the scorers have enough to do."""
        return 2 * max((len(pool.workers) for pool in self._pools()), default=1)

    def submit(self) -> None:
        """Give idle processes the calls at the heads of their queues."""
        for job in self.asleep.awake():
            self.pools[job.scorer].queue.append(job)
        for pool in self._pools():
            while pool.queue and pool.idle:
                job, process = pool.queue.popleft(), pool.idle.pop(0)
                started, now = self.timeline.now(), time.perf_counter()
                pending = job.round.score(job, pool, process)
                self.timeline.submitted(pending, "score", started)
                self.load[job.scorer].queued += 0.0 if job.polls else now - job.queued
                self.running[pending] = Call(job, pool, process, now)

    @property
    def remote(self) -> bool:
        """Whether scorers have processes of their own."""
        return any(pool.workers.remote for pool in self._pools())

    def awaited(self) -> tuple[list[Pending[Any]], float | None]:
        """Starts and calls whose end moves a round on, and the seconds after which one hangs, or is made again."""
        starting = [pending for pool in self._pools() for pending in pool.starting]
        deadlines = [call.started + call.pool.timeout for call in self.running.values()]
        deadlines += [job.wake for job in self.asleep]
        deadlines += [s.until for pool in self._pools() for s in pool.late.values() if s.until and s.until < math.inf]
        return [*starting, *self.running], max(0.0, min(deadlines) - time.perf_counter()) if deadlines else None

    def collect(self, ended: Collection[Pending[Any]]) -> None:
        """Take what has `ended` of the awaited, and restart the processes of calls that take too long.

        Raises `RewardError` if a process has no room, cannot start or build its scorers, and what drawing raised.
        """
        if self.failure is not None:
            raise self.failure
        self.timeline.ended(ended)
        for pool in self._pools():
            for pending in [p for p in pool.starting if p in ended]:
                pool.started(pending)
            pool.look_for_room()
        now = time.perf_counter()
        for answer, call in list(self.running.items()):
            if answer in ended:
                del self.running[answer]
                self._collect(answer, call)
            elif now > call.started + call.pool.timeout:
                del self.running[answer]
                self._renew(call, f"no answer within {call.pool.timeout:g} s")

    def _pools(self) -> "list[Pool[ScoringRound]]":
        return list({id(pool): pool for pool in self.pools.values()}.values())

    def _collect(self, pending: Pending[Answer], call: Call) -> None:
        job, load = call.job, self.load[call.job.scorer]
        try:
            answer = pending.ended()
        except WorkerDied:
            lost = job.round.lost(job)  # if it was the worker that draws who died
            if lost is None:
                self._renew(call, "its process died")
                return
            call.pool.idle.append(call.process)
            if job.round.wanted:
                raise lost from None
            return
        except Exception:  # what drawing the images raised: the process has nothing to do with it
            call.pool.idle.append(call.process)
            if job.round.wanted:
                raise
            return
        call.pool.idle.append(call.process)
        if answer.waiting is not None:
            if job.round.wanted:
                self.asleep.put(job, answer.waiting)
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
        job.round.take(job, answer.rows)

    def _renew(self, call: Call, reason: str) -> None:
        """Restart a process that died or hangs, and repeat its call, or give it up."""
        job, load = call.job, self.load[call.job.scorer]
        texts = job.round.texts(job)
        more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        logger.warning(
            "scorer %s: %s, with %d images of %s pending; the process is restarted",
            *(job.scorer, reason, len(job.places), ", ".join(map(repr, texts[:SHOWN])) + more),
        )
        call.pool.renew(call.process)
        load.restarts += 1
        job.attempts += 1
        if not job.round.wanted:
            return
        if job.attempts <= self.config.retries:
            load.retries += 1
            call.pool.queue.appendleft(job)
            return
        job.round.take(job, [{job.scorer: ScorerFailure(job.scorer, reason)} for _ in job.places])

    def metrics(self) -> dict[str, float]:
        """Of each scorer since the last time: seconds a call took and waited, images a second, and what went wrong."""
        metrics: dict[str, float] = {}
        for name, load in self.load.items():
            metrics |= load.metrics(name)
            self.load[name] = Load()
        return metrics


class ScoringRound:
    """Micro-batches on their way through the scorers; what is added is scored while the next ones are drawn."""

    def __init__(
        self, manager: RewardManager, samples: Sequence[Sequence[Scorable]], scorers: Mapping[str, ScorerConfig]
    ) -> None:
        self.manager, self.samples, self.scorers = manager, samples, scorers
        self.wanted = True
        self.images: dict[int, Pending[Images]] = {}  # of the micro-batches that are drawn
        self.rows: list[list[Row]] = [[{} for _ in batch] for batch in samples]
        self.left = 0  # calls that have not ended
        self.groups: dict[Group, list[tuple[int, int]]] = {}
        for i, batch in enumerate(samples):
            for row, sample in enumerate(batch):
                self.groups.setdefault(sample.group, []).append((i, row))
        self.missing = {group: len(places) for group, places in self.groups.items()}  # images still to be drawn
        members = {group: [samples[i][row] for i, row in places] for group, places in self.groups.items()}
        self.occasions = occasions(manager.run, members) if manager.people & scorers.keys() else {}

    @property
    def queued(self) -> int:
        """Micro-batches with calls that wait for a process."""
        pools = {id(pool): pool for pool in self.manager.pools.values()}.values()
        return len({i for pool in pools for job in pool.queue if job.round is self for i, _ in job.places})

    def add(self, batch: int, images: Pending[Images]) -> None:
        """Queue the calls that are possible now that the `images` of micro-batch `batch` are drawn."""
        self.images[batch] = images
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
                    self.left += 1

    def finish(self) -> list[Scores]:
        """The scores of all micro-batches, in order, once all are added; the order of scoring changes nothing.

        Raises what the manager's `collect` does.
        """
        while self.left:
            self.manager.submit()
            awaited, seconds = self.manager.awaited()
            self.manager.collect(wait(awaited, seconds))
        return self.scores()

    def scores(self) -> list[Scores]:
        """The scores of all micro-batches, in order; none of their calls is left."""
        return [self._scores(batch, rows) for batch, rows in zip(self.samples, self.rows, strict=True)]

    def score(self, job: Job, pool: Pool, process: int) -> Pending[Answer]:
        """Submit the call of `job` to a process of `pool`."""
        batches = list(dict.fromkeys(i for i, _ in job.places))
        places = [(batches.index(i), row) for i, row in job.places]
        prompts = [self.samples[i][row].prompt for i, row in job.places]
        texts, metadata = [prompt.text for prompt in prompts], [prompt.metadata for prompt in prompts]
        images = [self.images[i].later() for i in batches]
        if job.scorer in self.manager.people:
            i, row = job.places[0]
            occasion = self.occasions[self.samples[i][row].group]
            arguments = (job.scorer, places, texts, metadata, occasion)
            return pool.workers.submit(process, RewardWorker.ask, *arguments, *images)
        return pool.workers.submit(process, RewardWorker.score, job.scorer, places, texts, metadata, *images)

    def take(self, job: Job, rows: Sequence[Row]) -> None:
        """Keep the rows that the call of `job` has brought."""
        self.left -= 1
        for (i, row), found in zip(job.places, rows, strict=True):
            self.rows[i][row] |= found

    def texts(self, job: Job) -> list[str]:
        """The prompts of `job`, each once."""
        return list(dict.fromkeys(self.samples[i][row].prompt.text for i, row in job.places))

    def lost(self, job: Job) -> Exception | None:
        """Why the images of `job` are not there; None if they are."""
        for i in {i for i, _ in job.places}:
            try:
                self.images[i].result()
            except Exception as error:  # noqa: BLE001 - raised by whoever asks
                return error
        return None

    def _scores(self, batch: Sequence[Scorable], rows: list[Row]) -> Scores:
        scorers = self.scorers
        sums = [total(scorers, sample.prompt, row) for sample, row in zip(batch, rows, strict=True)]
        totals = [None if isinstance(value, ScorerFailure) else value for value in sums]
        found = list(dict.fromkeys(label for row in rows for label in row))
        labels = [label for name in scorers for label in (name, *(c for c in found if c.startswith(f"{name}/")))]
        # Weighted scorers first: the first failure of a sample without a total is why it has none.
        order = sorted(labels, key=lambda label: label not in scorers or scorers[label].weight == 0)
        failures = [
            [v for v in (value, *map(row.get, order)) if isinstance(v, ScorerFailure)]
            for value, row in zip(sums, rows, strict=True)
        ]
        by_scorer = {
            label: [value if isinstance(value := row.get(label), float) else None for row in rows] for label in labels
        }
        return Scores(totals, by_scorer, failures)


def _always(arguments: tuple[object, ...]) -> Callable[[int], tuple[object, ...]]:
    return lambda _: arguments

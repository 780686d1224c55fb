"""The model behind `scale.py`: driver costs fitted to what was measured, and a simulation of the training loop.

The simulation is of discrete events: the driver is a program that works and waits, as gerl's loop does, with calls that
workers and scorers finish at times of their own. What it leaves out: failures, validation, and saving.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from gerl.rewards.rollouts import PREFETCH

Record = dict[str, Any]
WARM = 2  # simulated steps that do not count
FEATURES = {  # of each part of the driver's work: what it is proportional to
    "draw": ("one", "micro_batches", "images"),
    "credit": ("one", "images"),
    "update": ("one", "calls", "awaited"),
    "other": ("one", "images", "workers"),
}


def features(row: Record) -> dict[str, float]:
    """What a measured step consists of."""
    calls = sum(row["messages"].get(name, 0) for name in ("accumulate", "reduce_gradient", "step", "finish_step"))
    sizes = {name: float(row[name]) for name in ("micro_batches", "images", "workers")}
    return {"one": 1.0, "calls": float(calls), "awaited": float(calls * row["workers"]), **sizes}


def parts(row: Record) -> dict[str, float]:
    """The driver's CPU seconds of a measured step, less what Ray's threads in it take while nothing happens."""
    cpu, wall, idle = row["cpu"], row["timing"], row.get("idle_cpu", 0.0)
    found = {
        "draw": cpu["draw"] + cpu["score"] - idle * (wall["rollout"] + wall["reward_wait"]),
        "credit": cpu["credit"],
        "update": cpu["update"] - idle * wall["update"],
    }
    other = row["cpu_s"] - cpu["draw"] - cpu["score"] - cpu["credit"] - cpu["update"]
    return {name: max(value, 1e-4) for name, value in (found | {"other": other}).items()}


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients that are not negative, with the least sum of squared relative errors."""
    scale = 1 / np.asarray(values)
    matrix, kept = np.asarray(rows, float) * scale[:, None], list(range(len(rows[0])))
    while True:
        found = np.linalg.lstsq(matrix[:, kept], np.ones(len(values)), rcond=None)[0]
        if not (found < 0).any():
            break
        kept.pop(int(found.argmin()))
    return [float(found[kept.index(i)]) if i in kept else 0.0 for i in range(len(rows[0]))]


Fit = dict[str, dict[str, float]]  # part of the driver's work -> feature -> CPU seconds


def fit(rows: Sequence[Record]) -> Fit:
    """The driver's costs from measured steps."""
    found: Fit = {}
    for part, names in FEATURES.items():
        matrix = [[features(row)[name] for name in names] for row in rows]
        values = [parts(row)[part] for row in rows]
        found[part] = dict(zip(names, least_squares(matrix, values), strict=True))
    return found


def predicted(costs: Fit, row: Record) -> float:
    """The driver's CPU seconds of a step."""
    return sum(value * features(row)[name] for part in costs.values() for name, value in part.items())


def errors(costs: Fit, rows: Sequence[Record]) -> list[float]:
    """Relative errors of what is predicted of measured steps."""
    return [predicted(costs, row) / sum(parts(row).values()) - 1 for row in rows]


def fit_collective(rows: Sequence[Record]) -> tuple[float, float]:
    """Seconds a hop, and a byte, of a ring: `2 (W - 1) a + 2 (W - 1) / W * bytes * b`."""
    matrix = [[2.0 * (r["workers"] - 1), 2 * (r["workers"] - 1) / r["workers"] * r["bytes"]] for r in rows]
    hop, byte = least_squares(matrix, [r["seconds"] for r in rows])
    return hop, byte


@dataclass(frozen=True)
class Network:
    """Links of GPUs in a node and between nodes: bytes a second of each, seconds a hop, and GPUs in a node."""

    inside: float = 450e9  # a direction of NVLink, data sheet of the H100
    between: float = 12.5e9  # of a node: 100 Gbit/s
    hop: float = 20e-6
    gpus: int = 8
    latency: float = 1e-3  # of a call over Ray, one way

    def all_reduce(self, workers: int, size: float) -> float:
        """Seconds of a ring in each node, and one between them."""
        nodes, local = -(-workers // self.gpus), min(workers, self.gpus)
        rings = ((local, self.inside), (nodes, self.between))
        return sum(2 * (n - 1) * self.hop + 2 * (n - 1) / n * size / rate for n, rate in rings)


@dataclass(frozen=True)
class Work:
    """What a step asks for. `actors`: workers that only train, beside `workers` that only draw; 0: all do both."""

    workers: int
    images: int
    micro_batch: int
    draw: float  # seconds an image
    update: float
    updates: int = 2  # optimizer steps
    actors: int = 0
    staleness: int = 0
    scorers: int = 1
    score: float = 0.0  # seconds an image
    gradient: float = 0.0  # bytes
    keep: float = 0.0  # seconds in which a worker copies of its state what it cannot copy while it draws
    tape: float = 0.0  # bytes an image that go from a worker to an actor
    spread: float = 0.0  # standard deviation of the workers' speeds, relative

    @property
    def ideal(self) -> float:
        """Seconds of a step on as many GPUs that never wait."""
        return self.images * (self.draw + self.update) / (self.workers + self.actors)


@dataclass
class Round:
    """Micro-batches of a step on their way."""

    owners: list[int]
    sizes: list[int]
    submitted: int = 0
    drawn: int = 0
    left: int = 0  # not yet scored
    queued: int = 0
    scored_at: float = 0.0
    flying: list[int] = field(default_factory=list)  # by worker


FREE: Fit = {part: dict.fromkeys(names, 0.0) for part, names in FEATURES.items()}  # a driver that takes no time


class Simulation:
    """The training loop of `gerl.trainer.loop` on a clock of its own."""

    def __init__(self, work: Work, costs: Fit = FREE, network: Network | None = None, seed: int = 0) -> None:
        self.work, self.costs, self.network = work, costs, network or Network()
        self.now = 0.0  # of the driver; in a split its part that draws and scores
        self.training = 0.0  # in a split: of its part that trains
        speeds = np.random.default_rng(seed).normal(1.0, work.spread, work.workers + work.actors)
        self.speeds = [float(speed) for speed in speeds]
        self.free = [0.0] * (work.workers + work.actors)  # when each worker has done what it was given
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.jobs: deque[tuple[Round, int]] = deque()
        self.idle, self.number, self.busy = work.scorers, 0, 0.0

    def spend(self, part: str, **amounts: float) -> None:
        """The driver works."""
        seconds = sum(self.costs[part][name] * amount for name, amount in amounts.items())
        self.now, self.busy = self.now + seconds, self.busy + seconds

    def later(self, when: float, action: Callable[[float], None]) -> None:
        """`action` is what the driver does when it learns of something that happens at `when`."""
        self.number += 1
        heapq.heappush(self.events, (when + self.network.latency, self.number, action))

    def wait(self) -> None:
        """The driver deals with what has happened, or with what happens next."""
        self.now = max(self.now, self.events[0][0])
        while self.events and self.events[0][0] <= self.now:
            when, _, action = heapq.heappop(self.events)
            action(when)

    def until(self, when: float) -> None:
        """The driver waits for something else than scorers, which are given what waits for them meanwhile."""
        self.give_scorers()
        while self.events and self.events[0][0] <= when:
            self.wait()
            self.give_scorers()
        self.now = max(self.now, when)

    def assign(self, worker: int, seconds: float) -> float:
        """Give a worker something to do; returns when it is done."""
        start = max(self.free[worker], self.now + self.network.latency)
        self.free[worker] = start + seconds * self.speeds[worker]
        return self.free[worker]

    # --- drawing and scoring

    def plan(self) -> Round:
        """The micro-batches of a step, in turn of all workers."""
        work = self.work
        count = -(-work.images // work.micro_batch)
        sizes = [min(work.micro_batch, work.images - i * work.micro_batch) for i in range(count)]
        owners = [i % work.workers for i in range(count)]
        return Round(owners, sizes, left=count, flying=[0] * work.workers)

    def roll_out(self, found: Round) -> None:
        """Until all is drawn."""
        self.spend("draw", one=1)
        while found.drawn < len(found.sizes):
            limit = (1 + self.work.staleness) * (self.work.workers + 2 * self.work.scorers)
            while found.submitted < len(found.sizes) and found.queued < limit:
                i = found.submitted
                if found.flying[found.owners[i]] >= PREFETCH:
                    break
                self.spend("draw", micro_batches=0.5, images=0.5 * found.sizes[i])
                done = self.assign(found.owners[i], found.sizes[i] * self.work.draw)
                self.later(done, lambda _, i=i: self.drawn(found, i))  # type: ignore[misc]
                found.submitted += 1
                found.flying[found.owners[i]] += 1
            self.give_scorers()
            self.wait()

    def drawn(self, found: Round, i: int) -> None:
        """A micro-batch is there."""
        self.spend("draw", micro_batches=0.5, images=0.5 * found.sizes[i])
        found.drawn, found.queued = found.drawn + 1, found.queued + 1
        found.flying[found.owners[i]] -= 1
        self.jobs.append((found, found.sizes[i]))

    def give_scorers(self) -> None:
        """What waits, to the scorers that do not."""
        while self.jobs and self.idle:
            found, images = self.jobs.popleft()
            self.idle -= 1
            found.queued -= 1
            done = self.now + self.network.latency + images * self.work.score
            self.later(done, lambda when, found=found: self.scored(found, when))  # type: ignore[misc]

    def scored(self, found: Round, when: float) -> None:
        """The scores of a micro-batch are there."""
        self.idle, found.left, found.scored_at = self.idle + 1, found.left - 1, when

    def finish(self, found: Round) -> None:
        """Until all is scored."""
        while found.left:
            self.give_scorers()
            self.wait()
        self.spend("credit", one=1, images=self.work.images)
        self.spend("other", one=1, images=self.work.images, workers=self.work.workers)

    # --- training

    def barrier(self, seconds: Sequence[float], first: int, together: float = 0.0) -> None:
        """A call of all workers from number `first` on; in a collective one they begin together."""
        cost = self.costs["update"]
        ends, call = [], cost["calls"] + cost["awaited"] * len(seconds)
        for worker, duration in enumerate(seconds, start=first):
            self.spend("update", calls=0.5, awaited=0.5 * len(seconds))
            ends.append(self.assign(worker, duration))
        if together:
            ends = [max(ends) + together] * len(ends)
            self.free[first : first + len(ends)] = ends
        for end in sorted(ends):
            if self.work.actors:  # the part of the driver that draws has a clock of its own
                self.now = max(self.now, end + self.network.latency)
            else:
                self.until(end + self.network.latency)
            self.now += call / 2
            self.busy += call / 2

    def train(self, found: Round) -> None:
        """The optimizer steps of a step."""
        work, first = self.work, self.work.workers if self.work.actors else 0
        count = work.actors or work.workers
        self.spend("update", one=1)
        bounds = [round(i * len(found.sizes) / work.updates) for i in range(work.updates + 1)]
        for number in range(work.updates):
            images = [0] * count
            for i in range(bounds[number], bounds[number + 1]):
                images[i % count] += found.sizes[i]
            travel = work.tape / self.network.between * self.network.gpus
            self.barrier([n * (work.update + travel) for n in images], first)
            kept = [0.0 if number else work.keep] * count
            self.barrier(kept, first, self.network.all_reduce(count, work.gradient) if count > 1 else 0.0)

    # --- steps

    def run(self, steps: int) -> list[float]:
        """Seconds of each step."""
        return self._split(steps) if self.work.actors else self._hybrid(steps)

    def _hybrid(self, steps: int) -> list[float]:
        ahead: dict[int, Round] = {}
        ends = [0.0]
        for step in range(steps):
            for other in range(step, min(step + self.work.staleness, steps - 1) + 1):
                if other not in ahead:
                    ahead[other] = self.plan()
                    self.roll_out(ahead[other])
            found = ahead.pop(step)
            self.finish(found)
            self.train(found)
            ends.append(self.now)
        return [b - a for a, b in pairwise(ends)]

    def _split(self, steps: int) -> list[float]:
        work, published = self.work, [0.0]  # when the weights of each version are with those that draw
        weights = self.network.all_reduce(work.workers + work.actors, work.gradient)
        ahead: dict[int, Round] = {}
        for step in range(steps):
            for other in range(step, min(step + work.staleness, steps - 1) + 1):
                if other not in ahead:
                    self.until(published[max(0, other - work.staleness)])
                    ahead[other] = self.plan()
                    self.roll_out(ahead[other])
            found = ahead.pop(step)
            self.finish(found)
            drawing, self.now = self.now, max(self.training, found.scored_at)
            self.train(found)
            self.training, self.now = self.now, drawing
            published.append(self.training + weights)
        return [b - a for a, b in pairwise(published)]


def step_seconds(work: Work, costs: Fit = FREE, network: Network | None = None, steps: int = 8) -> float:
    """Mean seconds of a step, the first ones and those at the end of the run apart."""
    times = Simulation(work, costs, network).run(steps + 2 * (WARM + work.staleness))
    count = len(times)
    return math.fsum(times[WARM + work.staleness : count - work.staleness]) / (count - WARM - 2 * work.staleness)


def without(work: Work, costs: Fit, network: Network) -> dict[str, tuple[Work, Fit, Network]]:
    """The same with one of its causes of waiting taken away."""
    fast = replace(network, inside=math.inf, between=math.inf, hop=0.0)
    return {
        "driver": (work, FREE, network),
        "collective": (work, costs, fast),
        "scorer tail": (replace(work, score=0.0), costs, network),
        "slowest worker": (replace(work, spread=0.0), costs, network),
        "keeping the state": (replace(work, keep=0.0), costs, network),
        "calls": (work, costs, replace(network, latency=0.0)),
    }


def lost(work: Work, costs: Fit, network: Network) -> dict[str, float]:
    """The share of a step that each cause of waiting costs: what would be gained without it."""
    whole = step_seconds(work, costs, network)
    return {name: 1 - step_seconds(*other) / whole for name, other in without(work, costs, network).items()}

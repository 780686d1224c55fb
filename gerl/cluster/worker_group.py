"""Groups of workers in this process or over Ray, and their calls."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from gerl.cluster import health
from gerl.errors import GerlError, WorkerDied
from gerl.protocol import RolloutTask, Sample

logger = logging.getLogger(__name__)
W = TypeVar("W")  # the class of a worker
R = TypeVar("R")  # result type of a call
P = ParamSpec("P")
SLICE = 2.0  # seconds of waiting after which Ray itself is probed
LAST_WORDS = 15.0  # seconds to find out whether the failure of a worker was caused by the death of another
GRACE = 0.005  # seconds to collect simultaneous answers: each poll costs time per pending call
MAX_TEXT = 40  # characters of a string in a debug line
POLLS = ("written",)  # calls that poll, which are not logged


class Pending(Generic[R]):
    """Result or exception of a submitted call; `later` passes it to another call."""

    def __init__(
        self,
        worker: str,
        reference: Any = None,
        call: Callable[[], R] | None = None,
        value: R | None = None,
        hang_after: float | None = None,
        description: str = "",
    ) -> None:
        """`reference`: Ray's object reference of a remote call. `description`: of the call, for debug lines."""
        self.worker, self.reference, self.hang_after, self.description = worker, reference, hang_after, description
        self._value = value
        self._error: Exception | None = None
        if call is not None:
            try:
                self._value = call()
            except Exception as error:  # noqa: BLE001 - any error is raised by `result`
                self._error = error

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the call has ended or `timeout` seconds have passed, without fetching the result."""
        return bool(wait_any([self], timeout))

    def later(self) -> R:
        """Return the future result as an argument of another call; does not wait."""
        return cast(R, self)

    def result(self) -> R:
        """Wait for the call and return its result. Raises its exception, or `WorkerDied` if it hangs."""
        if self.reference is not None and not self.wait(self.hang_after):
            assert self.hang_after is not None
            raise silence([self], self.hang_after)
        return self.ended()

    def ended(self) -> R:
        """Return the `result` of a call that is known to have ended."""
        if self.reference is None:
            if self._error is not None:
                raise self._error
            return cast(R, self._value)
        from gerl.cluster import ray_calls  # here and below: imports Ray, which workers of this process do without

        health.check()
        return cast(R, ray_calls.fetch(self.worker, self.reference))


def wait_any(pending: Sequence[Pending[Any]], timeout: float | None = None, grace: float = 0.0) -> list[Pending[Any]]:
    """Wait until a call has ended or `timeout` seconds have passed; return the ended calls in order.

    `grace`: further seconds for the other calls. Raises `ClusterError` if Ray itself is gone.
    """
    references = [p.reference for p in pending if p.reference is not None]
    if len(references) < len(pending) or not references:  # calls in this process have already ended
        return [p for p in pending if p.reference is None]
    from gerl.cluster import ray_calls

    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        health.check()
        left = SLICE if deadline is None else min(SLICE, max(0.0, deadline - time.monotonic()))
        if ray_calls.wait(references, 1, left):
            break
        if deadline is not None and time.monotonic() >= deadline:
            break
    ended = set(ray_calls.wait(references, len(references), grace))
    return [p for p in pending if p.reference in ended]


class WorkerGroup(Generic[W]):
    """Workers of one plain class; calls are queued per worker in the order they are submitted.

    A call names the method of the class, `group.submit(0, Worker.method, argument)`, so arguments and results are
    typed, over Ray too.
    """

    def __init__(
        self,
        name: str,
        count: int,
        start: Callable[[int], W],
        end: Callable[[W], None] | None,
        hang_after: float | None = None,
        needs: Mapping[str, float] = MappingProxyType({}),
        give_back: Callable[[int], None] | None = None,
        has_room: Callable[[int], bool] | None = None,
    ) -> None:
        """Start the workers; `hang_after`: seconds of silence after which `run` and `Pending.result` raise.

        `run` waits for an answer of any worker, `Pending.result` for its own. `needs`: Ray's resources of each worker.
        `give_back`: releases those of an ended worker. `has_room`: whether a worker has them; it may still be starting.
        """
        self.hang_after, self.needs, self._give_back, self._has_room = hang_after, needs, give_back, has_room
        self.name, self._start, self._end = name, start, end
        self.remote = end is not None
        self._count, self.numbers = count, list(range(count))  # numbers of the present workers
        self.workers = [start(number) for number in self.numbers]  # over Ray: actor handles

    def __len__(self) -> int:
        return len(self.workers)

    def submit(
        self, index: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[R]:
        """Queue `method(*args)` on worker `index`; an argument that is `Pending.later()` arrives as its value.

        `method`: of the class, or a function of a worker, which is passed to its method `call`.
        """
        return self._submit(self.numbers[index], self.workers[index], method, *args, **kwargs)

    def _submit(
        self, number: int, worker: W, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[R]:
        label, bound = f"{self.name} {number}", getattr(worker, method.__name__, None)
        description = ""
        if logger.isEnabledFor(logging.DEBUG) and method.__name__ not in POLLS:
            description = describe_call(method, args)
            logger.debug("%s: %s ...", label, description)
        if bound is None:  # a function of the worker, not a method
            bound, args = worker.call, (method, *args)  # type: ignore[attr-defined, assignment]
        if self.remote:
            arguments = [a.reference if isinstance(a, Pending) and a.reference is not None else _value(a) for a in args]
            reference = bound.remote(*arguments, **kwargs)
            return Pending(label, reference=reference, hang_after=self.hang_after, description=description)
        return Pending(label, call=lambda: bound(*map(_value, args), **kwargs), description=description)

    def part(self, numbers: range) -> "WorkerGroup[W]":
        """Return a view of the present workers with these numbers."""
        return _Part(self, numbers)

    def restart(self, index: int) -> None:
        """End worker `index` and start it again."""
        self.end(index)
        if self._end is not None:
            self.workers[index] = self._start(self.numbers[index])

    def end(self, index: int) -> None:
        """End worker `index`; calls waiting for it raise. Does nothing for workers of this process."""
        if self._end is not None:
            self._end(self.workers[index])

    def has_room(self, index: int) -> bool:
        """Whether worker `index` has its resources; it may still be starting."""
        return self._has_room is not None and self._has_room(self.numbers[index])

    def forget(self) -> None:
        """Forget all workers of a dead Ray; `restart` starts them."""
        self.numbers = list(range(self._count))
        self.workers = [cast(W, None)] * self._count

    def leave_out(self, index: int) -> int:
        """Continue without worker `index`: end it and release its room; return its number."""
        self.end(index)
        number, _ = self.numbers.pop(index), self.workers.pop(index)
        if self._give_back is not None:
            self._give_back(number)
        return number

    def start_beside(
        self, number: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[W, Pending[R]]:
        """Start a worker that was left out, once it has room, with a first call; `take_in` adds it."""
        worker = self._start(number)
        return worker, self._submit(number, worker, method, *args, **kwargs)

    def take_in(self, number: int, worker: W) -> int:
        """Add a `worker` of `start_beside` at its old position; return its index."""
        index = sum(other < number for other in self.numbers)
        self.numbers.insert(index, number)
        self.workers.insert(index, worker)
        return index

    def run(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run `method(*args)` on all workers concurrently and return the results in order, as `wait_all` does.

        Common arguments are serialised and sent once per machine, not once per worker.
        """
        if self.remote:
            health.check(now=True)
        shared = args if not self.remote or len(self) == 1 else tuple(map(_shared, args))
        start = time.perf_counter()
        pending = [self.submit(i, method, *shared, **kwargs) for i in range(len(self))]  # type: ignore[arg-type]
        results = wait_all(pending, self.hang_after)
        if logger.isEnabledFor(logging.DEBUG):
            names, call = f"{self.name} {listed(self.numbers)}", describe_call(method, args)
            logger.debug("%s: %s: %.2f s", names, call, time.perf_counter() - start)
        return results


class _Part(WorkerGroup[W]):
    def __init__(self, whole: WorkerGroup[W], numbers: range) -> None:
        self._whole, self._wanted = whole, numbers
        self.name, self.remote, self.hang_after = whole.name, whole.remote, whole.hang_after

    @property
    def numbers(self) -> list[int]:  # type: ignore[override]
        return [number for number in self._whole.numbers if number in self._wanted]

    @property
    def workers(self) -> list[W]:  # type: ignore[override]
        whole = self._whole
        return [worker for number, worker in zip(whole.numbers, whole.workers, strict=True) if number in self._wanted]


def wait_all(
    pending: Sequence[Pending[R]], hang_after: float | None = None, progress: Callable[[], object] | None = None
) -> list[R]:
    """Wait for concurrent calls and return their results in order.

    Raises the first exception; if a worker died, its death rather than the errors of workers that wait for it. Workers
    count as dead if none answers for `hang_after` seconds while `progress` stays the same.
    """
    left, error, results = list(pending), None, dict[Pending[R], R]()
    before = progress() if progress is not None else None
    while left:
        ended = wait_any(left, hang_after if error is None else LAST_WORDS, GRACE)
        if not ended and error is None and hang_after is not None:
            now = progress() if progress is not None else None
            if now == before:
                raise silence(left, hang_after)
            before = now
            continue
        if not ended:
            break
        _fetch(ended)
        for call in ended:
            left.remove(call)
            try:
                results[call] = call.ended()
            except WorkerDied:
                raise
            except Exception as other:  # noqa: BLE001 - raised below
                error = error or other
        if isinstance(error, GerlError):
            break
    if error is not None:
        raise error
    return [results[call] for call in pending]


def describe_call(method: Callable[..., object], arguments: Sequence[object]) -> str:
    """Return the name of a method with those arguments that are numbers, strings, tasks or samples."""
    return f"{method.__name__}({', '.join(filter(None, map(_described, arguments)))})"


def listed(numbers: Iterable[object]) -> str:
    """Join values by commas."""
    return ", ".join(map(str, numbers))


def _described(argument: object) -> str:
    match argument:
        case RolloutTask():
            return f"task {argument.id}: {_described(argument.samples)}"
        case [Sample(), *_]:
            prompts = dict.fromkeys(sample.prompt.id for sample in cast(Sequence[Sample], argument))
            return f"{len(argument)} image(s) of prompt {listed(prompts)}"
        case [(int(), int()), *_]:  # places of images
            return f"{len(argument)} image(s)"
        case Mapping() if argument and all(isinstance(key, int) for key in argument):
            return f"task {listed(argument)}"
        case str():
            return argument if len(argument) <= MAX_TEXT else f"{argument[:MAX_TEXT]}..."
        case int() | float():
            return f"{argument:g}" if isinstance(argument, float) else f"{argument}"
    return ""


def _fetch(ended: Sequence[Pending[Any]]) -> None:
    """Fetch all results in one request, which is faster; if a call failed, `ended` raises its error."""
    remote = [call for call in ended if call.reference is not None]
    if len(remote) > 1:
        from gerl.cluster import ray_calls

        with contextlib.suppress(Exception):
            for call, value in zip(remote, ray_calls.fetch_all([call.reference for call in remote]), strict=True):
                call.reference, call._value = None, value


def silence(pending: Sequence[Pending[Any]], hang_after: float) -> WorkerDied:
    """Return the error for workers that did not answer for `hang_after` seconds."""
    names = " and ".join(dict.fromkeys(call.worker for call in pending))
    return WorkerDied(f"no answer from {names} for {hang_after:g} s; raise cluster.hang_after if they need longer")


def _value(argument: object) -> object:
    return argument.result() if isinstance(argument, Pending) else argument


def _shared(argument: object) -> object:
    """Put an argument of many calls into Ray's store, unless it is a number or a string."""
    from gerl.cluster import ray_calls

    plain = argument is None or isinstance(argument, int | float | str | Pending)
    return argument if plain else Pending("Ray's store", reference=ray_calls.put(argument))

"""Signals that end a command: the first ends it in order, a second one at once.

Handled are SIGINT, SIGTERM, SIGHUP (closed terminal), and the warnings of schedulers (SIGUSR1, SIGUSR2, SIGXCPU); the
latter four only if their default would end the process: nohup ignores SIGHUP, and a program may have its own handler.

A process has one set of signal handlers, so this is a module and not an object: `run_command` sets them before anything
heavy is imported. Outside the main thread, and where no command runs, nothing is set and nothing here has an effect.
"""

import atexit
import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from gerl.errors import Interrupted

SIGINT, SIGTERM = signal.SIGINT, signal.SIGTERM
NUMBERS = (SIGINT, SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
SAME = 1.0  # seconds within which a repeated signal counts once: timeout(1) signals the process, then its group
AGAIN = 0.1  # seconds after which an interruption is raised again that was swallowed, or came during a fork


@dataclass
class _State:
    process: int = 0  # the process of the command: forks inherit the handlers
    received: int | None = None
    since: float = 0.0
    deferred: int = 0
    forks: int = 0  # in progress, by any thread
    answered: bool = False  # the command is ending
    late: bool = False  # the signal came after that: the command ends for another reason
    previous: dict[int, Any] = field(default_factory=dict)
    last: list[Callable[[], None]] = field(default_factory=list)  # called before exiting at once


_state = _State()


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Raise `Interrupted` in the main thread on a signal during the block, or after a `deferred` block.

    A second signal ends the process at once, after the calls of `before_leaving`.
    """
    global _state
    if threading.current_thread() is not threading.main_thread() or _state.process == os.getpid():  # or set already
        yield
        return
    _count_forks()
    outer, hook = _state, sys.unraisablehook
    before: dict[int, Any] = {number: signal.getsignal(number) for number in NUMBERS}
    heard = {n: handler for n, handler in before.items() if n in (SIGINT, SIGTERM) or handler == signal.SIG_DFL}
    _state = _State(os.getpid(), previous=heard)
    sys.unraisablehook = _unraisable(hook)
    for number in heard:
        signal.signal(number, _handle)
    try:
        yield
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook
        _state = outer


def received() -> int | None:
    """Return the number of the signal that ends this command, or None."""
    return _state.received


def came_late() -> bool:
    """Whether the signal arrived while the command was already ending for another reason."""
    return _state.late


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defer a first signal: `Interrupted` is raised after the block."""
    state = _state
    state.deferred += 1
    try:
        yield
    finally:
        state.deferred -= 1
    if not state.deferred:
        check()


def check() -> None:
    """Raise `Interrupted` if a signal has arrived, even if a library swallowed the first exception."""
    if _state.received is not None and not _state.answered:
        raise Interrupted(_state.received)


def answered() -> None:
    """Mark the command as ending: `deferred` blocks no longer raise."""
    _state.answered = True


@contextlib.contextmanager
def before_leaving(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` before the process exits on a second signal during the block."""
    state = _state
    state.last.append(end)
    try:
        yield
    finally:
        state.last.remove(end)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keep the handlers during the block, in Python and in C: Ray replaces the one of SIGTERM when it starts."""
    replace = signal.signal

    def refuse(number: int, handler: Any) -> Any:
        return signal.getsignal(number) if number in NUMBERS else replace(number, handler)

    signal.signal = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = replace
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if (handler := signal.getsignal(number)) is not None:  # None: one in C, of another library
                    signal.signal(number, handler)


@functools.cache
def _count_forks() -> None:
    """Count the forks in progress: in a hook of one, an exception is lost, and logging would never release its lock."""

    def add(count: int) -> None:
        _state.forks += count

    end = functools.partial(add, -1)
    os.register_at_fork(before=functools.partial(add, 1), after_in_parent=end, after_in_child=end)


def _handle(number: int, frame: FrameType | None) -> None:
    del frame
    state = _state
    if os.getpid() != state.process:  # a fork by a library or a scorer
        signal.signal(number, state.previous.get(number) or signal.SIG_DFL)
        signal.raise_signal(number)
    elif state.forks:
        _call_later(lambda: os.kill(state.process, number))
    elif state.received is None:
        state.received, state.since, state.late = number, time.monotonic(), state.answered
        if not state.deferred and not state.answered:
            raise Interrupted(number)
    elif time.monotonic() - state.since > SAME:
        leave(number)


def leave(number: int) -> None:
    """Exit at once, with a sentence and the exit code of the signal."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nstopped immediately by a second {name(number)}: work in progress is lost\n".encode())
    try:
        for end in reversed(_state.last):
            end()
    finally:
        os._exit(128 + number)


def exit_with(code: int) -> NoReturn:
    """Exit with this code after the work is done; a signal meanwhile does not change the code."""

    with contextlib.suppress(OSError):  # Python tries it again and says what is wrong
        sys.stdout.flush()
    _exit_codes.append(code)
    for number in NUMBERS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(code))
    if code > 128:  # C++ threads may have been interrupted during their start: teardown would crash
        atexit._run_exitfuncs()
        os._exit(code)
    sys.exit(code)


_exit_codes: list[int] = []


@atexit.register  # before all others, and so the last to be called
def _ignore() -> None:
    """Ignore signals at teardown, when Python removes its handlers and a signal would change the exit code."""
    for number in NUMBERS if _exit_codes else ():
        signal.signal(number, signal.SIG_IGN)


def name(number: int) -> str:
    """Return the name of a signal, such as SIGTERM."""
    return signal.Signals(number).name


def _unraisable(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    def again() -> None:
        if not _state.answered and (number := _state.received) is not None:
            _state.received = None
            os.kill(os.getpid(), number)

    def report(unraisable: Any) -> None:
        """Keep an interruption raised in a finalizer or callback, where Python would only print it."""
        if not isinstance(unraisable.exc_value, Interrupted):
            hook(unraisable)
            return
        _call_later(again)

    return report


def _call_later(function: Callable[[], None]) -> None:
    timer = threading.Timer(AGAIN, function)
    timer.daemon = True
    timer.start()

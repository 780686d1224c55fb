"""Real signals, sent to this process, and to one of its own where it ends."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gerl.commandline import signals
from gerl.commandline.command import run_command
from gerl.errors import Interrupted

EACH = pytest.mark.parametrize("number", signals.NUMBERS)


@pytest.fixture(autouse=True)
def handlers_come_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in signals.NUMBERS]
    yield
    assert [signal.getsignal(number) for number in signals.NUMBERS] == before
    assert signals.received() is None


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # Python runs the handler at the next opportunity


@EACH
def test_a_signal_raises_at_once(number: int) -> None:
    reached = []
    with signals.handled():
        with pytest.raises(Interrupted) as caught:
            send(number)
            reached.append("after")
        assert caught.value.signal_number == signals.received() == number and not reached
    assert isinstance(caught.value, KeyboardInterrupt)  # nothing else gets through Ray's waits
    assert str(int(number)) in str(caught.value)


@EACH
def test_a_deferred_block_ends_first(number: int) -> None:
    done = []
    with signals.handled(), pytest.raises(Interrupted) as caught:
        with signals.deferred():
            with signals.deferred():
                send(number)
                done.append("inner")
            done.append("outer")
        done.append("never")
    assert done == ["inner", "outer"] and caught.value.signal_number == number


def test_without_a_signal_nothing_happens() -> None:
    with signals.handled():
        with signals.deferred():
            pass
        signals.check()
        assert signals.received() is None
    with signals.deferred():  # nor where no command runs
        pass


def test_an_error_in_a_deferred_block_is_not_hidden_by_the_signal() -> None:
    with signals.handled():
        with pytest.raises(KeyError), signals.deferred():
            send(signal.SIGTERM)
            raise KeyError
        assert signals.received() == signal.SIGTERM


def test_an_interruption_that_a_library_swallows_comes_back() -> None:
    with signals.handled():
        with contextlib.suppress(BaseException):
            send(signal.SIGTERM)
        with pytest.raises(Interrupted), signals.deferred():
            pass


class Finalized:
    def __del__(self) -> None:
        send(signal.SIGTERM)
        time.sleep(0.01)


def test_an_interruption_in_a_finalizer_is_neither_printed_nor_lost(capfd: pytest.CaptureFixture[str]) -> None:
    with signals.handled(), pytest.raises(Interrupted):
        Finalized()
        time.sleep(5)
    assert capfd.readouterr().err == ""


IN_A_FORK = """
import _thread, functools, os, signal, subprocess, sys, time

arrive = functools.partial(_thread.interrupt_main, signal.SIGTERM)  # the handler is run at the next bytecode
os.register_at_fork(after_in_parent=arrive)  # before logging's hooks
import logging
from gerl.commandline import signals
from gerl.errors import Interrupted

with signals.handled():
    try:
        subprocess.Popen([sys.executable, "-c", ""], preexec_fn=lambda: None)
        time.sleep(5)
    except Interrupted:
        print("interrupted", logging._lock._is_owned())
"""


def test_a_signal_during_a_fork_leaves_no_lock_of_a_library_held() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_FORK], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("interrupted False\n", "")


def test_after_the_first_signal_a_save_may_still_finish() -> None:
    saved = []
    with signals.handled():
        with pytest.raises(Interrupted):
            send(signal.SIGTERM)
        signals.answered()
        with signals.deferred():
            send(signal.SIGTERM)  # as timeout(1) does, to the process and to its group
            saved.append("checkpoint")
    assert saved == ["checkpoint"]


SECOND = """
import os, signal, time
from gerl.commandline import signals
from gerl.commandline.command import run_command

signals.SAME = 0.05
with signals.handled(), signals.before_leaving(lambda: print("children end", flush=True)), signals.deferred():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    print("saving", flush=True)
    os.kill(os.getpid(), signal.{second})
    time.sleep(60)
    print("saved", flush=True)
"""


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_a_second_signal_does_not_wait(second: str) -> None:
    done = subprocess.run([sys.executable, "-c", SECOND.format(second=second)], capture_output=True, text=True)
    assert done.returncode == 128 + signal.Signals[second], done.stderr
    assert done.stdout == "saving\nchildren end\n"
    assert second in done.stderr and len(done.stderr.strip().splitlines()) == 1


LATE = """
import atexit, os, signal, sys, time
from gerl.commandline import signals
from gerl.commandline.command import run_command

class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

def hang():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored here, as in a shell's background
if {hangs}:
    atexit.register(hang)
late = Late()  # torn down with this module
signals.exit_with(3)
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_a_signal_while_the_process_ends_changes_nothing_of_its_exit_code(hangs: bool) -> None:
    command = [sys.executable, "-c", LATE.format(hangs=hangs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


def test_a_signal_after_the_end_was_said_interrupts_nothing() -> None:
    with signals.handled():
        signals.answered()
        send(signal.SIGINT)
        assert signals.received() == signal.SIGINT


def test_a_library_cannot_replace_the_handlers() -> None:
    with signals.handled():
        own = signal.getsignal(signal.SIGTERM)
        with signals.kept():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            previous = signal.signal(signal.SIGWINCH, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == own
        assert signal.signal(signal.SIGWINCH, previous) == signal.SIG_IGN


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None], ids=["as under nohup", "of the program"])
def test_a_signal_that_would_not_end_the_process_is_left_alone(handler: Any) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with signals.handled():
            assert signal.getsignal(signal.SIGHUP) == handler
            send(signal.SIGHUP)
            assert signals.received() is None
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_fork_is_not_the_command() -> None:
    with signals.handled():
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_outside_the_main_thread_it_does_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def run() -> None:
        with signals.handled(), signals.deferred():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


def test_an_interruption_survives_the_way_through_a_worker_process() -> None:
    error = pickle.loads(pickle.dumps(Interrupted(15)))
    assert isinstance(error, Interrupted) and error.signal_number == 15


def test_an_interruption_that_a_library_makes_anew_from_its_text_ends_the_command_all_the_same() -> None:
    """As OmegaConf does with exceptions: `type(error)(message)`."""
    again = type(Interrupted(15))("Error merging a.yaml: interrupted by signal 15")
    assert str(again).startswith("Error merging") and again.signal_number == signal.SIGINT

    def work(_: list[str]) -> None:
        try:
            send(signal.SIGTERM)
            time.sleep(10)
        except Interrupted as error:
            raise type(error)(f"Error merging a.yaml: {error}") from error

    assert run_command([], lambda: "", work) == 128 + signal.SIGTERM  # the signal that came

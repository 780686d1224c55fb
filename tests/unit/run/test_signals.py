"""Real signals, sent to this process."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from gerl.errors import Interrupted
from gerl.run.signals import Signals

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@pytest.fixture(autouse=True)
def handlers_come_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # Python runs the handler at the next opportunity


@BOTH
def test_a_signal_raises_at_once(number: int) -> None:
    reached = []
    with pytest.raises(Interrupted) as caught, Signals() as signals:
        send(number)
        reached.append("after")
    assert caught.value.signal_number == signals.received == number and not reached
    assert str(int(number)) in str(caught.value)


@BOTH
def test_a_deferred_block_ends_first(number: int) -> None:
    done = []
    with pytest.raises(Interrupted) as caught, Signals() as signals:
        with signals.deferred():
            with signals.deferred():
                send(number)
                done.append("inner")
            done.append("outer")
        done.append("never")
    assert done == ["inner", "outer"] and caught.value.signal_number == number


def test_without_a_signal_nothing_happens() -> None:
    with Signals() as signals:
        with signals.deferred():
            pass
        signals.check()
        assert signals.received is None
    with Signals() as signals:  # one that arrived in a block is also seen by `check`
        with pytest.raises(Interrupted), signals.deferred():
            send(signal.SIGTERM)
        with pytest.raises(Interrupted):
            signals.check()


def test_an_error_in_a_deferred_block_is_not_hidden_by_the_signal() -> None:
    with Signals() as signals, pytest.raises(KeyError), signals.deferred():
        send(signal.SIGTERM)
        raise KeyError
    assert signals.received == signal.SIGTERM and not signals._deferred


def test_after_the_first_signal_a_save_may_still_finish() -> None:
    saved = []
    with Signals() as signals:
        with pytest.raises(Interrupted):
            send(signal.SIGTERM)
        with pytest.raises(Interrupted), signals.deferred():
            send(signal.SIGTERM)  # a scheduler that repeats itself
            saved.append("checkpoint")
    assert saved == ["checkpoint"]


def test_a_second_ctrl_c_does_not_wait() -> None:
    saved = []
    with Signals() as signals, pytest.raises(KeyboardInterrupt), signals.deferred():
        send(signal.SIGINT)
        saved.append("first half")
        send(signal.SIGINT)
        saved.append("second half")
    assert saved == ["first half"]


def test_outside_the_main_thread_it_does_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def run() -> None:
        with Signals() as signals, signals.deferred():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


def test_an_interruption_survives_the_way_through_a_worker_process() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(Interrupted(15)))
    assert isinstance(error, Interrupted) and error.signal_number == 15

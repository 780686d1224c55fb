"""The trial of the scorers: each is called once on grey images, before a model is loaded and anything is written.

It happens in the process that will score later, so whatever a scorer loads is there when it is needed. Over Ray a
scorer that hangs or dies is ended with its process; in this process a time-out interrupts its Python code.
"""

import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from gerl.cluster import Pending, wait_any
from gerl.config import Config, ScorerConfig
from gerl.errors import RewardError, WorkerDied
from gerl.protocol import Images, Prompt, ScorerFailure
from gerl.rewards.manager import Pool, RewardManager
from gerl.rewards.total import applies
from gerl.rewards.worker import Answer, RewardWorker

logger = logging.getLogger(__name__)
GREY, SIZE = 128, 512  # pixel value; pixels, where the pipeline's own size is not known yet


class Overdue(BaseException):
    """A scorer in this process takes longer than its time-out; no `Exception`, which the scorer might catch."""


def try_scorers(
    manager: RewardManager, config: Config, prompts: Sequence[Prompt], held_out: Sequence[Prompt] = ()
) -> None:
    """Call every scorer once as training will, on grey images with rows of `prompts`; nothing if `reward.trial` is off.

    Those that look at validation only get rows of `held_out`.

    The call has a micro-batch of images, of a groupwise scorer a group; in training's way it is repeated
    (`reward.retries`) and checked. A scorer with weight 0 that fails is only warned of. People are not asked, only
    whether they can be is looked at.

    Raises:
        RewardError: a scorer with a weight has no score for any image, hangs, or ends its process.
    """
    if not config.reward.trial:
        return
    for pool in {id(pool): pool for pool in manager.pools.values()}.values():
        pool.begin(0)
    calls: dict[str, Pending[Answer] | str] = {}
    for name, scorer in config.reward.scorers.items():
        known = held_out if scorer.during == "validation" else prompts
        rows = [prompt for prompt in known if applies(scorer, prompt)]
        if rows and name in manager.people:
            _reach(manager.pools[name], name)
        elif rows:
            count = config.rollout.n if name in manager.groupwise else config.rollout.micro_batch_size
            rows = rows[:1] * count if name in manager.groupwise else [rows[i % len(rows)] for i in range(count)]
            calls[name] = _submit(manager.pools[name], name, rows, _grey(config, count))
    for name, call in calls.items():  # those of a process one after the other: each waits its whole time-out
        _conclude(manager.pools[name], name, config.reward.scorers[name], call)


def _reach(pool: Pool, name: str) -> None:
    """Say whether people can be asked; one may begin to wait for them before that is so."""
    try:
        said = pool.workers.submit(0, RewardWorker.reach, name).result()
    except RewardError as error:
        raise RewardError(f"reward.scorers.{name}: {error}") from None
    if said:
        logger.warning("scorer %s: %s", name, said)


def _grey(config: Config, count: int) -> Images:
    """Grey images `[B, H, W, 3]`, or videos `[B, F, H, W, 3]`, of the size that the configuration asks for."""
    frames = config.sampling.call.get("num_frames")
    size = (config.sampling.height or SIZE, config.sampling.width or SIZE, 3)
    shape = (frames, *size) if isinstance(frames, int) and frames > 1 else size
    return Images(0, np.full((count, *shape), GREY, np.uint8), 0.0)


def _submit(pool: Pool, name: str, rows: Sequence[Prompt], images: Images) -> Pending[Answer] | str:
    """The call of a scorer; in this process it has ended, and a hang is a sentence."""
    texts, metadata = [row.text for row in rows], [row.metadata for row in rows]
    places = [(0, row) for row in range(len(rows))]
    try:
        with _time_limit(None if pool.workers.remote else pool.timeout):
            return pool.workers.submit(0, RewardWorker.score, name, places, texts, metadata, images)
    except Overdue as error:
        return f"no answer within {pool.timeout:g} s{pool.workers.workers[0].scorers[name].place(error)}"


def _conclude(pool: Pool, name: str, scorer: ScorerConfig, call: Pending[Answer] | str) -> None:
    """Wait for a call and say what was wrong with it."""
    answer = call if isinstance(call, str) else _answer(pool, call)
    rows = [] if isinstance(answer, str) else answer.rows
    failures = [answer] if isinstance(answer, str) else []
    failures += [value.reason for row in rows if isinstance(value := row[name], ScorerFailure)]
    for message in [] if isinstance(answer, str) else answer.warnings:
        logger.warning("scorer %s: %s", name, message)
    if not failures:
        return
    told = (
        f"reward.scorers.{name} failed in a trial on grey images: {failures[0]}; fix it, or skip this trial with "
        "reward.trial=false if it is only grey images that it cannot score"
    )
    if len(failures) < len(rows):
        logger.warning("%s (%d of %d images have a score)", told, len(rows) - len(failures), len(rows))
        return
    if scorer.weight != 0:
        raise RewardError(told)
    logger.warning("%s; it is only watched, so the run continues", told)
    if isinstance(answer, str):
        pool.renew(0)


def _answer(pool: Pool, call: Pending[Answer]) -> Answer | str:
    if call not in wait_any([call], pool.timeout):
        return f"no answer within {pool.timeout:g} s"
    try:
        return call.result()
    except WorkerDied:
        return "its process died"


@contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `Overdue` in the Python code that runs longer, where that is possible: in the main thread."""
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

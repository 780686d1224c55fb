"""Scorer trial: two calls of each scorer on grey images, before a model is loaded and anything is written.

Runs in the processes that score later, so that loaded models stay loaded. With Ray a scorer that hangs or dies is
ended with its process; in this process a time-out interrupts its Python code.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gerl.cluster import Pending, wait_any
from gerl.config import Config, ScorerConfig
from gerl.errors import RewardError, WorkerDied
from gerl.protocol import Images, Prompt, ScorerFailure
from gerl.rewards.manager import RewardManager
from gerl.rewards.pool import Overdue, Pool, time_limit
from gerl.rewards.total import applies
from gerl.rewards.worker import Answer, RewardWorker, Row
from gerl.utils.seeding import seed_everything

logger = logging.getLogger(__name__)
NOISE = 1e-3  # of two calls of a scorer on the same images; half precision rounds less
GREY, SIZE = 128, 512  # pixel value; size in pixels if the pipeline's default is not known yet


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
        candidates = held_out if scorer.during == "validation" else prompts
        shown = [prompt for prompt in candidates if applies(scorer, prompt)]
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


def _reach(pool: Pool[Any], name: str) -> None:
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


def _submit(pool: Pool[Any], name: str, rows: Sequence[Prompt], images: Images) -> Pending[Answer] | str:
    """Call a scorer; in this process it ends at once, and a time-out is returned as a sentence."""
    texts, metadata = [row.text for row in rows], [row.metadata for row in rows]
    places = [(0, row) for row in range(len(rows))]
    try:
        with time_limit(None if pool.workers.remote else pool.timeout):
            return pool.workers.submit(0, RewardWorker.score, name, places, texts, metadata, images)
    except Overdue as error:
        return f"no answer within {pool.timeout:g} s{pool.interrupted_at(name, error)}"


def _conclude(pool: Pool[Any], name: str, scorer: ScorerConfig, call: Pending[Answer] | str) -> list[Row]:
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
        "reward.trial=false if the scorer fails on grey images only"
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


def _answer(pool: Pool[Any], call: Pending[Answer]) -> Answer | str:
    if call not in wait_any([call], pool.timeout):
        return f"no answer within {pool.timeout:g} s"
    try:
        return call.result()
    except WorkerDied:
        return "its process died"

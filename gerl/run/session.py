"""A run in its folder from start to end: its log, its card, and no folder where nothing came of it."""

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gerl.errors import GerlError, Interrupted
from gerl.run.card import Card, End, now
from gerl.run.checkpoint import checkpoint_paths
from gerl.run.log import RunLog
from gerl.utils.files import reason

logger = logging.getLogger("gerl")
METRICS = "metrics.jsonl"
VOTES = "votes"  # the folder of what people said, which nobody can compute again
STOPS = Interrupted | KeyboardInterrupt | GeneratorExit  # a program that asks for no further step


@contextlib.contextmanager
def session(run_dir: Path, log: RunLog, arguments: Sequence[str], workers: str) -> Iterator[Callable[[], None]]:
    """Keep log and card in the folder, from when the block calls what is yielded until it ends.

    The block calls it once the folder is there and the run may write into it: one that is refused leaves no trace. The
    log then has what was logged before, and the card when the block began. A folder that was made in the block goes
    again if the block ends by an error before the first metrics, checkpoint or vote.
    """
    missing = [folder for folder in (run_dir, *run_dir.absolute().parents) if not folder.exists()]
    how: End = "error"
    why: BaseException | None = None
    card: Card | None = None
    started = now()

    def begin() -> None:
        nonlocal card
        # Not sooner, so a resumed run that fails while it is loaded writes none: the folder is as the run before left
        # it, and may have nothing wrong with it. The console has the error, with its traceback if there is no sentence.
        log.open(run_dir)
        card = Card(run_dir, arguments, workers, started)

    try:
        yield begin
        how = "finished"
    except BaseException as error:
        how, why = "interrupted" if isinstance(error, STOPS) else "error", error
        log.failure(error)
        raise
    finally:
        if why is not None and run_dir in missing and not has_results(run_dir) and not (run_dir / VOTES).exists():
            remove(missing)
            if card is not None:
                logger.info("the run produced nothing: its folder %s is removed", run_dir)
        elif card is not None and run_dir.is_dir():
            _complete(card, how, why)


def has_results(run_dir: Path) -> bool:
    """Whether a line of metrics or a checkpoint was written."""
    metrics = run_dir / METRICS
    return (metrics.is_file() and metrics.stat().st_size > 0) or bool(checkpoint_paths(run_dir / "checkpoints"))


def remove(made: Sequence[Path]) -> None:
    """Delete the run folder, the first of the folders that were `made` for it, and those above it that are empty."""
    run_dir, *above = made
    try:
        shutil.rmtree(run_dir)
        for folder in above:
            folder.rmdir()
    except OSError as error:  # another run may have put its folder beside it
        logger.debug("%s is kept: %s", run_dir, reason(error))


def _complete(card: Card, how: End, why: BaseException | None) -> None:
    try:
        card.end(how, why)
    except GerlError as error:
        if why is None:
            raise
        logger.warning("%s", error)  # the first cause is the one that is raised

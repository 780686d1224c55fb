"""The end of a run that does not finish: its last finished step is saved, from whichever worker still has it."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from gerl.cluster import WorkerGroup, wait_any
from gerl.config.reading import typed
from gerl.errors import CheckpointError, ClusterError, Interrupted, RayDied
from gerl.run.checkpoint import checkpoint_paths, load_checkpoint
from gerl.workers.hybrid import HybridWorker

logger = logging.getLogger(__name__)


def save_from_any(workers: WorkerGroup[HybridWorker], save: Callable[[int], None]) -> str:
    """Call `save` with the first worker that can give its state; returns why none could, or nothing.

    All workers hold the same LoRA and optimizer, and the state before the update in which they may be. One may wait for
    another that failed: those that answer first are asked first.
    """
    reasons = list[str]()
    # what they forget makes room: an out-of-memory error may be why we are here
    asked = {workers.submit(worker, HybridWorker.forget): worker for worker in range(len(workers))}
    while asked:
        try:
            answered = wait_any(list(asked))
        except RayDied:  # with the workers
            return "all workers are gone"
        for call in answered:
            worker = asked.pop(call)
            try:
                call.result()
                save(worker)
                return ""
            except CheckpointError as error:
                return str(error)
            except ClusterError:
                reasons.append(f"worker {worker} is gone")
            # the run is ending for another reason, and what a worker in an unknown state raises must not hide it
            except Exception as error:
                logger.debug("worker %d has no checkpoint to offer", worker, exc_info=True)
                reasons.append(next(iter(str(error).splitlines()), type(error).__name__))
    return "; ".join(dict.fromkeys(reasons))


@contextlib.contextmanager
def interruption_said(run_dir: Path, steps: int) -> Iterator[None]:
    """Add to an interruption before the first step or after the last one of `steps` what there is."""
    try:
        yield
    except Interrupted as error:
        if not hasattr(error, "__notes__") and checkpoint_paths(run_dir / "checkpoints"):
            say_how_to_go_on(error, run_dir, steps)
        raise


def say_how_to_go_on(error: BaseException, run_dir: Path, steps: int, step: int = 0, failure: str = "") -> None:
    """Add to the exception that ends a run of `steps` which checkpoint is the newest, and how to carry on from it.

    Where that has all steps, what is left is the report. failure: why the finished `step` could not be saved.
    """
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.strerror and cause.strerror in failure:
        failure = "for the same reason"
    if failure:
        error.add_note(f"no checkpoint of step {step} could be written ({failure})")
    paths = checkpoint_paths(run_dir / "checkpoints")
    if paths and _has_all(paths[-1], steps):
        error.add_note(
            f"the run is finished, its last checkpoint is {paths[-1]}: python -m gerl.run.report "
            f"{typed({'run': str(run_dir)})} rewrites its report"
        )
    elif paths:
        again = typed({"checkpoint.resume": str(run_dir)})
        error.add_note(f"the latest checkpoint is {paths[-1]}: resume with {again}")
    elif step:  # before the first one nothing is lost
        error.add_note("there is no checkpoint: start a new run")


def _has_all(path: Path, steps: int) -> bool:
    """Whether nothing is left to do after a checkpoint in a run of `steps`, which may be more than it was made for."""
    try:
        checkpoint = load_checkpoint(path)
    except CheckpointError:
        return False
    return checkpoint.step >= steps and bool(checkpoint.state.get("finished"))

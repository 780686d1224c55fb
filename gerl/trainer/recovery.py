"""Recover a run: repeat a step with new workers, return to an earlier step, save the last finished step at the end.

All sampling derives from the seed, the step and the task, so a repeated step is bitwise equal.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from gerl.cluster import AGAIN, rescuing, wait_any
from gerl.commandline import signals
from gerl.config.reading import typed
from gerl.errors import CheckpointError, ClusterError, GuardError, Interrupted, ModelError, RayDied
from gerl.progress import waiting
from gerl.run.checkpoint import Checkpoint, RunState, WorkerFiles, checkpoint_paths, load_checkpoint
from gerl.run.choice import good_checkpoint
from gerl.run.tracking import METRICS, read_metrics
from gerl.trainer.run import Run
from gerl.trainer.run_folder import set_aside
from gerl.trainer.step import RollBack
from gerl.workers.fleet import Held, writers
from gerl.workers.recovery import NoCapacity, Recovery
from gerl.workers.worker import PolicyWorker

logger = logging.getLogger(__name__)
LOSSES = (ClusterError, ModelError, RuntimeError)  # raised by calls to a dead worker, or to one that waits for it


def recover(run: Run, error: Exception) -> None:
    """Replace the workers that died; raises `error` if none died or too many have."""
    started, recovery = time.perf_counter(), run.fleet.recovery
    state: WorkerFiles | None = (
        None  # as soon as one worker has returned it: the survivors may themselves be new next time
    )
    while True:
        lost = lost_workers(run, error)
        with waiting(f"replacing {len(lost)} process(es)"):
            try:
                run.rollouts.discard()
                state = state or surviving_state(run, lost)
                assert recovery is not None
                bring_together(run, recovery.restart(lost), state)
                break
            except NoCapacity:
                raise
            except LOSSES as another:  # another worker died meanwhile
                error = another
    recovery.seconds += time.perf_counter() - started


def admit(run: Run, number: int) -> None:
    """Let restarted workers join before step `number`, once the cluster has room for them."""
    run.fleet.timeline.step = number
    recovery = run.fleet.recovery
    if recovery is None:
        return
    recovery.update_copy(run.state)
    if new := recovery.admit(ask=not run.rewards.wants_room):
        recovery.lost()
        run.rollouts.discard()
        bring_together(run, new, surviving_state(run, new))


def remember(run: Run) -> None:
    """Keep a copy of the state outside the workers, in case all of them die."""
    if run.fleet.recovery is not None:
        run.fleet.recovery.remember(run.state, run.fleet.model.trained_parameters)


def lost_workers(run: Run, error: Exception) -> list[int]:
    """Return the workers whose death caused `error`, all if Ray died (it is restarted); raises other errors."""
    fleet, recovery = run.fleet, run.fleet.recovery
    if recovery is None:
        raise error
    try:
        lost = recovery.lost(error)
    except RayDied as died:
        lost, error = [], died
    gone = isinstance(error, RayDied) and fleet.cluster.own
    if gone:
        lost = list(range(len(fleet.workers)))
    if not lost:
        raise error
    recovery.allow(lost, error, deaths=1 if gone else len(lost))
    why = str(error).removesuffix(f"; {AGAIN}")  # the run resumes by itself
    logger.warning("%s; continuing from step %d with %d new process(es)", why, run.state.step, len(lost))
    if gone:
        restart_ray(run, recovery, error)
        lost = list(range(len(fleet.workers)))
    return lost


def restart_lost(run: Run, error: Exception) -> None:
    """Restart the workers whose death caused `error`, before the model is loaded."""
    lost = lost_workers(run, error)
    assert run.fleet.recovery is not None
    run.fleet.recovery.restart(lost)


def restart_ray(run: Run, recovery: Recovery, error: Exception) -> None:
    """Start Ray again after it died with `error`; all workers must be restarted afterwards."""
    run.saved()  # an unfinished write of a checkpoint ends
    run.rollouts.discard()
    recovery.forget_workers()
    with waiting("restarting Ray"):
        run.fleet.cluster.start_anew(error)
    run.fleet.workers.forget()
    run.rewards.start_all()


def surviving_state(run: Run, lost: Sequence[int]) -> WorkerFiles | None:
    """Return the last finished step from a worker not in `lost`; None: it is in a checkpoint (full fine-tuning)."""
    if run.config.model.train == "lora":
        assert run.fleet.recovery is not None
        return run.fleet.recovery.state(run.state.step, lost)
    if not run.saved():
        for worker in range(len(run.fleet.trainers)):
            if not set(writers(run.config, worker)) & set(lost):
                run.save(worker)
                run.fleet.writer.finish()
                break
    return None


def bring_together(run: Run, new: Sequence[int], state: WorkerFiles | None) -> None:
    """Set up the workers `new`, and load `state`, or else the newest earlier step there is, into all workers."""
    run.fleet.set_up(new)
    if state is not None:
        files, numbers = state
        run.fleet.restore(files, numbers, run.state.step)
        run.fleet.sync(run.state.step, earlier=True)
        run.restore(run.state)
        return
    before, root = run.state.step, run.run_dir / "checkpoints"
    checkpoint = next((c for path in reversed(checkpoint_paths(root)) if (c := _intact(path))), None)
    copied = None if run.fleet.recovery is None else run.fleet.recovery.newest_copy()
    if copied is not None and (checkpoint is None or checkpoint.step < copied[0].step):
        load_copy(run, *copied)
    elif checkpoint is not None:
        run.load(checkpoint)
    else:
        begin_again(run)
    if run.state.step < before:
        logger.warning("no worker is left that has step %d: returning to step %d", before, run.state.step)
        rows = read_metrics(run.run_dir / METRICS)
        assert run.fleet.recovery is not None
        run.fleet.recovery.count_again(row for row in rows if row["step"] > run.state.step)
        reopen_log(run)


def load_copy(run: Run, driver: RunState, workers: WorkerFiles) -> None:
    """Return to a step that was kept in this process."""
    run.fleet.restore(*workers, driver.step)
    run.fleet.sync(driver.step, earlier=True)
    run.restore(driver)


def begin_again(run: Run) -> None:
    """Return to the start of the run."""
    fleet = run.fleet
    if len(fleet.workers) > 1:
        workers = range(len(fleet.workers))
        fleet.set_up(fleet.recovery.restart(workers) if fleet.recovery else workers)
    fleet.forget_sync()
    run.restore(RunState(identity=run.state.identity, settings=run.state.settings))


def reopen_log(run: Run) -> None:
    """Reopen the log after returning to an earlier step; the row of step 0 is not logged again."""
    run.notify("returning")
    run.history.log.close()
    run.open_log(kept=run.state.step - bool(run.state.unlogged))


def roll_back(run: Run, directive: RollBack) -> None:
    """Return to an earlier checkpoint and raise the weight of the KL; raises the error that ends the run, if any."""
    checkpoint = directive.checkpoint
    run.fleet.writer.finish()
    returns = [*run.state.returns, checkpoint.step]
    with signals.deferred(), waiting(f"rolling back to step {checkpoint.step}"):
        run.rollouts.discard()
        run.fleet.clear()
        run.load(checkpoint, returns)
        if directive.kl_coef is not None:
            run.set_kl_coef(directive.kl_coef)
        run.save()  # so that a resumed run knows of the rollback
        run.fleet.writer.finish()
        set_aside(run.run_dir, checkpoint.step, with_images=True)
        reopen_log(run)
        run.notify("rolled_back", directive)
        remember(run)
    if directive.error is not None:
        raise directive.error


# --- The end of a run


@contextlib.contextmanager
def rescued(run: Run) -> Iterator[None]:
    """End a run with the block; if an error ends it, save the last finished step and add how to resume to the error."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        signals.answered()
        failure = save_last_step(run)
        add_resume_notes(raised, run.run_dir, run.plan.last_step, run.state.step, failure)
        raise
    finally:
        if run.fleet.recovery is not None:
            run.fleet.recovery.close()
        run.notify("ended", error)
        run.history.log.close()


def save_last_step(run: Run) -> str:
    """Save the last finished step from any worker that holds it; returns the reason if none could, else ''."""
    failure = ""
    with rescuing():
        failure = "" if run.saved() else "all workers are gone"
        if failure and run.fleet.cluster.alive:
            failure = _save_from_any(run)
        recovery = run.fleet.recovery
        copied = recovery.newest_copy() if failure and recovery is not None else None
        if copied is not None and copied[0].step > (run.history.saved or 0):
            run.restore(copied[0])
            run.save(held=Held.of(*copied[1]))
            failure = ""
    return failure


def _save_from_any(run: Run) -> str:
    """Save from the first worker that answers; others may hang in a collective. Returns why none could, else ''."""
    trainers, reasons = run.fleet.trainers, list[str]()
    # dropping the rollouts frees memory: an out-of-memory error may have ended the run
    asked = {trainers.submit(worker, PolicyWorker.clear): worker for worker in range(len(trainers))}
    while asked:
        try:
            answered = wait_any(list(asked))
        except RayDied:  # with the workers
            return "all workers are gone"
        for call in answered:
            worker = asked.pop(call)
            try:
                call.result()
                run.save(worker)
                run.fleet.writer.finish()
                return ""
            except CheckpointError as error:
                return str(error)
            except ClusterError:
                reasons.append(f"worker {worker} is gone")
            # the run ends for another reason, which errors of a worker in an unknown state must not hide
            except Exception as error:
                logger.debug("worker %d has no checkpoint to offer", worker, exc_info=True)
                reasons.append(next(iter(str(error).splitlines()), type(error).__name__))
    return "; ".join(dict.fromkeys(reasons))


@contextlib.contextmanager
def interruption_logged(run_dir: Path, steps: int) -> Iterator[None]:
    """Add how to resume the run to an interruption before its first or after its last step."""
    try:
        yield
    except Interrupted as error:
        if not hasattr(error, "__notes__") and checkpoint_paths(run_dir / "checkpoints"):
            add_resume_notes(error, run_dir, steps)
        raise


def add_resume_notes(error: BaseException, run_dir: Path, steps: int, step: int = 0, failure: str = "") -> None:
    """Add to `error` how to resume the run of `steps` or rewrite its report; `failure`: why `step` was not saved."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.strerror and cause.strerror in failure:
        failure = "for the same reason"
    if failure:
        error.add_note(f"no checkpoint of step {step} could be written ({failure})")
    paths = checkpoint_paths(run_dir / "checkpoints")
    again = typed({"checkpoint.resume": str(run_dir)})
    if paths and isinstance(error, GuardError):
        good = good_checkpoint(run_dir / "checkpoints")
        if good is None:
            error.add_note(f"no checkpoint is without signals: {again} begins anew")
        else:
            error.add_note(f"the last checkpoint without signals is {good.path}: {again} begins there")
    elif paths and _has_all(paths[-1], steps):
        error.add_note(
            f"the run is finished, its last checkpoint is {paths[-1]}: python -m gerl.run.report "
            f"{typed({'run': str(run_dir)})} rewrites its report"
        )
    elif paths:
        error.add_note(f"the latest checkpoint is {paths[-1]}: resume with {again}")
    elif step:  # before the first step nothing is lost
        error.add_note("there is no checkpoint: start a new run")


def _has_all(path: Path, steps: int) -> bool:
    """Whether a checkpoint is the last one of a run of `steps`, which may be more than it was trained with."""
    checkpoint = _intact(path)
    return checkpoint is not None and checkpoint.step >= steps and bool(checkpoint.state.get("finished"))


def _intact(path: Path) -> Checkpoint | None:
    try:
        return load_checkpoint(path)
    except CheckpointError:
        return None

"""Write what is needed to train on a step again into `dumps/`, for `gerl replay` and `gerl verify` (trainer.dump)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gerl.config import Config
from gerl.config.changes import settings_of
from gerl.errors import ClusterError, GerlError
from gerl.progress import waiting
from gerl.run.card import redacted, software
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Step
from gerl.utils.files import writing
from gerl.workers.fleet import gradient, writers

if TYPE_CHECKING:
    from gerl.model.shards import Part
    from gerl.run.checkpoint import WorkerState
    from gerl.run.dump import StepRecord
    from gerl.utils.tensors import TensorFile

logger = logging.getLogger(__name__)
CHUNK = 2**28  # bytes of the state in one call of a worker


class StepDump(Extension):
    """Dump every `trainer.dump`-th step; if a dump cannot be written, that is logged, and the run continues."""

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return config.trainer.dump > 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.begun: tuple[TensorFile, StepRecord] | None = None  # from the credit of a step to its update
        self.logged_once = False

    def starting(self, run: Run) -> None:
        for leftover in (run.run_dir / "dumps").glob(".step_*"):  # of a process that was killed
            leftover.unlink()

    def credited(self, run: Run, step: Step) -> None:
        self.drop()
        if step.number % self.config.trainer.dump:
            return
        from gerl.run.dump import tensor_file  # imported late: runs without dumps do not need it

        with self.tolerant(step), waiting(f"dumping step {step.number}"):
            file = tensor_file(run.run_dir, step.number)
            with contextlib.ExitStack() as stack, writing(file.path):
                stack.callback(file.discard)
                self.begun = file, add_step(file, run, step)
                stack.pop_all()

    def updating(self, run: Run, step: Step) -> bool:
        """Add the gradient of the last optimizer step, of a LoRA; that of whole models is as large as they are."""
        if self.begun is not None and self.config.model.train == "lora" and step.stats.pairs:
            from gerl.run.dump import GRADIENT

            file, _ = self.begun
            parts = run.fleet.trainers.run(gradient)
            with self.tolerant(step), writing(file.path):
                file.add(GRADIENT, parts[0] if len(parts) == 1 else torch.stack(parts).sum(0))
        return False

    def updated(self, run: Run, step: Step) -> None:
        if self.begun is None:
            return
        from gerl.run.dump import MEASURED, write_record
        from gerl.workers.dumping import after_update

        file, record = self.begun
        limits, digests = zip(*run.fleet.trainers.run(after_update), strict=True)
        metrics: dict[str, float | None] = {n: v for n, v in step.metrics.items() if n.startswith(MEASURED)}
        with self.tolerant(step), writing(file.path):
            record = replace(record, sha256=file.close(), limits=list(limits), weights=digests[0], metrics=metrics)
            write_record(file.path.with_suffix(".json"), record)
            if not self.logged_once:
                size = file.path.stat().st_size / 1e6
                logger.info("step %d is dumped: %s (%.0f MB); gerl replay trains on it", step.number, file.path, size)
            self.logged_once, self.begun = True, None

    def ended(self, run: Run, error: BaseException | None) -> None:
        self.drop()

    def drop(self) -> None:
        """Discard an unfinished dump."""
        if self.begun is not None:
            self.begun[0].discard()
        self.begun = None

    @contextlib.contextmanager
    def tolerant(self, step: Step) -> Iterator[None]:
        """Log an error in the block instead of raising it, unless a worker died."""
        try:
            yield
        except ClusterError:
            raise
        except GerlError as error:
            logger.warning("step %d is not dumped: %s", step.number, error)
            self.drop()


def add_step(file: TensorFile, run: Run, step: Step) -> StepRecord:
    """Write the tensors of a step before its update, and return its record so far."""
    from gerl.run.dump import CREDIT, EXTENSION, FORM, FORMAT, KL_WEIGHT, STATE, TRAJECTORY, Environment, StepRecord
    from gerl.utils.tensors import unpack_tensors
    from gerl.workers.dumping import machine, packed_trajectory

    assert step.credit is not None and step.rewards is not None
    fleet, state, scores = run.fleet, run.state, step.scores
    holders = [process for tasks, placement in fleet.held for process in placement.processes[: len(tasks)]]
    for i, (task, process) in enumerate(zip(step.tasks, holders, strict=True)):
        form, packed = fleet.trainers.submit(process, packed_trajectory, task.id).result()
        file.add(f"{TRAJECTORY}{i}/{FORM}", torch.frombuffer(bytearray(form), dtype=torch.uint8))
        for name, tensor in sorted(unpack_tensors(packed).items()):
            file.add(f"{TRAJECTORY}{i}/{name}", tensor)
    file.add(CREDIT, step.credit)
    if step.kl_weight is not None:
        file.add(KL_WEIGHT, step.kl_weight)
    files = {name: content for name, content in state.extensions.items() if isinstance(content, bytes)}
    for name, content in files.items():
        file.add(f"{EXTENSION}{name}", torch.frombuffer(bytearray(content), dtype=torch.uint8))
    numbers = add_state(file, run, STATE)
    facts = fleet.trainers.submit(0, machine).result()
    code = {name: value for name, value in software().items() if name != "repository"}
    return StepRecord(
        format=FORMAT,
        step=step.number,
        planned=run.plan.steps,
        lag=step.lag,
        file=file.path.name,
        sha256="",
        settings=redacted(settings_of(run.config)),
        identity=dict(state.identity),
        environment=Environment(code, facts.device, facts.processor, facts.dtype, facts.threads),
        processes=len(fleet.trainers),
        holders=holders,
        limits=[],
        policy_version=state.policy_version,
        nonfinite=state.nonfinite,
        kl_coef=state.kl_coef,
        algorithm=dict(state.algorithm),
        extensions={name: s for name, s in state.extensions.items() if name not in files},
        worker=numbers,
        tasks=list(step.tasks),
        totals=list(scores.totals),
        by_scorer=dict(scores.by_scorer),
        failures=list(scores.failures),
        given=scores.given,
        weights=None,
    )


def add_state(file: TensorFile, run: Run, prefix: str) -> WorkerState:
    """Write the state of the workers: weights, averages and moments, a part at a time; returns its counters."""
    from gerl.workers.dumping import state_parts, state_sizes

    trainers = run.fleet.trainers
    ranks = [0] if run.config.model.train == "lora" else writers(run.config, 0)
    sizes = [trainers.submit(rank, state_sizes).result() for rank in ranks]
    names, numbers = list(sizes[0][0]), sizes[0][1]
    while names:
        chosen, size = list[str](), 0
        while names and (not chosen or size + sizes[0][0][names[0]] <= CHUNK):
            size += sizes[0][0][names[0]]
            chosen.append(names.pop(0))
        parts = [trainers.submit(rank, state_parts, chosen).result() for rank in ranks]
        for name in chosen:
            file.add(f"{prefix}{name}", joined([part[name] for part in parts]))
    return numbers


def joined(parts: Sequence[Part]) -> torch.Tensor:
    """Return the tensor of which `parts` are the shards of all ranks, each the whole if it is not sharded."""
    first = parts[0]
    if tuple(first.values.shape) == first.shape:
        return first.values
    whole = torch.empty(first.shape, dtype=first.values.dtype)
    for part in parts:
        place = tuple(slice(at, at + size) for at, size in zip(part.offset, part.values.shape, strict=True))
        whole[place] = part.values
    return whole

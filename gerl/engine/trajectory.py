"""A trajectory as a value: the record of a task, as small as its algorithm allows, to be held, split or sent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gerl.engine.batching import shapes, tensor_bytes
from gerl.engine.guidance import is_guided
from gerl.engine.tape import Reads, Tape
from gerl.errors import ReplayError
from gerl.protocol import RolloutTask


def lean(tape: Tape, reads: Reads) -> Tape:
    """`tape` with the tensors that a replay of `reads` does not read replaced by their shapes (device `meta`).

    A replay ends at the last trained step, lets the denoiser compute at the trained ones and answers from the tape at
    those before. It can train all of `reads.steps`, or the first of them, with `reads.chain` any of them; anything else
    raises `ReplayError`, and so does a branch. The result shares its tensors with `tape`.
    """
    final = len(tape.steps) - 1
    last = max((k for k in reads.steps if k <= final), default=-1)  # of others a replay complains
    looped, live = tape.looped_components(), tape.live_at(reads.steps)
    num_answers = tape.steps[last].num_answers if last >= 0 else 0
    if reads.chain:  # at any step all others answer from the tape, and the pipeline runs to its end to decode
        live, num_answers = set(), len(tape.answers)
    outputs = reads.outputs and is_guided(tape, live)
    # the caller's latents stand for those of trained steps; but the search for guidance's roles takes the recorded ones
    given = reads.steps if reads.forward and not outputs else frozenset()

    # a gradient is handed on by the rules of steps that are not trained, and leaps pass over their latents
    end = final if reads.chain else last

    def is_left(k: int) -> bool:
        return k < last and k + 1 not in given if reads.forward else k <= end

    # the step after a trained one tells what of its latents reaches the images
    after = frozenset() if reads.forward else {min(k + 1, final) for k in (*reads.steps, final)}
    steps = [
        replace(
            step,
            # the initial latents are recognised by their values, as is what a pipeline writes into later ones
            x=step.x if k <= end and (k == 0 or k not in given or step.written is not None) else shapes(step.x),
            written=step.written
            if k in {*given, *after} or (given and k == 1) or reads.chain
            else shapes(step.written),
            x_next=step.x_next if is_left(k) or (reads.clean and k == final) else shapes(step.x_next),
            mean=step.mean if reads.means and not reads.forward and k in reads.steps else shapes(step.mean),
        )
        for k, step in enumerate(tape.steps)
    ]
    calls = [
        c
        if c.component in looped and c.step <= last and (outputs or c.step not in live)
        else replace(c, output=shapes(c.output))
        for c in tape.component_calls
    ]
    answers = [a if i < num_answers else replace(a, value=shapes(a.value)) for i, a in enumerate(tape.answers)]
    kept = final + 1 if reads.chain else last
    companions = [c if c.step <= kept else replace(c, x=shapes(c.x), x_next=shapes(c.x_next)) for c in tape.companions]
    return replace(tape, steps=steps, answers=answers, component_calls=calls, companions=companions, reads=reads)


@dataclass(frozen=True)
class Trajectory:
    """The record of a task that was drawn: all that training on it needs besides the pipeline and the credit.

    `tapes`: lean, one for each of the task's segments. `policy_version`: optimizer steps behind the weights that drew.
    `owner`: rank of the worker that drew.
    """

    task: RolloutTask
    tapes: tuple[Tape, ...]
    policy_version: int
    owner: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are held; the probe, which is shared by all trajectories, has shapes only."""
        steps = ([s.x, s.x_next, s.mean, s.log_prob, s.written] for tape in self.tapes for s in tape.steps)
        companions = ([c.x, c.x_next] for tape in self.tapes for c in tape.companions)
        answers = (a.value for tape in self.tapes for a in tape.answers)
        outputs = (c.output for tape in self.tapes for c in tape.component_calls)
        return tensor_bytes([*steps, *companions, *answers, *outputs])

    def rows(self, index: Sequence[int]) -> "Trajectory":
        """The part of the samples `index`, as a trajectory of its own; raises `ReplayError` for a tree."""
        if any(segment.parent is not None for segment in self.task.segments):
            raise ReplayError(f"task {self.task.id} is a tree, whose samples share their trunk: it cannot be split")
        if len(self.task.segments) > 1:  # drawn in several calls
            places = {leaf: (i, r) for i, s in enumerate(self.task.segments) for r, leaf in enumerate(s.leaves)}
            found = [places[i] for i in index]
            parts = [
                replace(self.task.segments[i], seeds=(self.task.segments[i].seeds[r],), leaves=(n,))
                for n, (i, r) in enumerate(found)
            ]
            task = replace(self.task, samples=[self.task.samples[i] for i in index], segments=tuple(parts))
            tapes = tuple(self.tapes[i] if self.tapes[i].batch_size == 1 else self.tapes[i].rows([r]) for i, r in found)
            return replace(self, task=task, tapes=tapes)
        (segment,), (tape,) = self.task.segments, self.tapes
        segment = replace(segment, seeds=tuple(segment.seeds[i] for i in index), leaves=tuple(range(len(index))))
        task = replace(self.task, samples=[self.task.samples[i] for i in index], segments=(segment,))
        return replace(self, task=task, tapes=(tape.rows(index),))

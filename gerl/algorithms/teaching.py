"""Steps of teachers at the states of a student's trajectories."""

from __future__ import annotations  # of the model, which the driver of a run does not have

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_never

import torch

from gerl.config.choices import StepDistance
from gerl.config.teachers import NAME, Teacher
from gerl.engine import ReplayedStep, Tape, record_structure, replay
from gerl.engine.kernels import Rule
from gerl.errors import ModelError
from gerl.protocol import DATA_SOURCE, Sample

if TYPE_CHECKING:
    from gerl.model.policy import Policy


@dataclass(frozen=True)
class Lesson:
    """The steps of the teachers at the states of some samples."""

    outputs: dict[int, torch.Tensor]  # by step: [R, ...] fp32 what the teacher of each row computes there, 0 without
    weights: torch.Tensor  # [R] of the rows' losses, 0 for those without a teacher
    taught_by: list[int | None]  # [R] number of the teacher of each row


def teacher_of(teachers: Sequence[Teacher], sample: Sample) -> int | None:
    """The number of the teacher of a sample: that of its data_source, else that of all prompts; None: it has none."""
    given = sample.prompt.metadata.get(DATA_SOURCE)
    numbers = {teacher.data_source: i for i, teacher in enumerate(teachers)}
    return numbers.get(None if given is None else str(given), numbers.get(None))


def ask_teachers(
    policy: Policy, tape: Tape, samples: Sequence[Sample], options: dict[str, Any], every: bool = False
) -> Lesson:
    """The teachers' steps for the rows of `tape` that `options["index"]` names; `samples`: those of these rows.

    `options`: the arguments of the student's replay. `every`: each teacher computes all rows, whatever it teaches: for
    ranks in lockstep, which call the models equally often.
    """
    index = list(options["index"] or range(tape.batch_size))
    teachers = [model.teacher for model in policy.teachers]
    taught_by = [teacher_of(teachers, sample) for sample in samples]
    divisible = tape.probe is not None and tape.probe.batch_size != tape.batch_size
    outputs: dict[int, torch.Tensor] = {}
    for number in range(len(teachers)):
        own = [i for i, teacher in enumerate(taught_by) if teacher == number]
        rows = own if divisible and not every else list(range(len(index)))
        if not own and not every:
            continue
        found = _steps_of(policy, number, tape, [index[i] for i in rows], options)
        for k, output in found.items():
            whole = outputs.setdefault(k, output.new_zeros(len(index), *output.shape[1:]))
            whole[own] = output[[rows.index(i) for i in own]]
    weights = [0.0 if number is None else teachers[number].weight for number in taught_by]
    return Lesson(outputs, torch.tensor(weights, device=tape.steps[0].x.device), taught_by)


def _steps_of(
    policy: Policy, number: int, tape: Tape, rows: list[int], options: dict[str, Any]
) -> dict[int, torch.Tensor]:
    """The outputs of one teacher by step, at the states of `rows` of `tape`: `[R, ...]`."""
    outputs: dict[int, torch.Tensor] = {}

    def keep(k: int, step: ReplayedStep) -> None:
        outputs[k] = step.model_output

    model, options = policy.teachers[number], {**options, "cfg": "joint", "grad": False}
    with policy.teacher(number) as pipe:
        if model.pipe is None and not model.teacher.changed:
            replay(pipe, tape, keep, **options | {"index": rows})
            return outputs
        # another call of a pipeline, at the same latents
        found = record_structure(pipe, tape, rows, model.teacher.changed)
        for k in options["steps"]:
            _check_alike(model.teacher, k, found.steps[k].rule, tape.steps[k].rule)
            shapes = found.steps[k].x.shape[1:], tape.steps[k].x.shape[1:]
            if shapes[0] != shapes[1]:
                raise ModelError(
                    f"{NAME}: the latents of {model.teacher} have the shape {list(shapes[0])}, those of the "
                    f"student {list(shapes[1])}: use a teacher with the same latents"
                )
        latents = {k: tape.steps[k].x[rows] for k in options["steps"]}
        replay(pipe, found, keep, **options | {"index": None, "latents": latents})
    return outputs


def _check_alike(teacher: Teacher, k: int, found: Rule, expected: Rule) -> None:
    """Raise `ModelError` unless the step of a teacher is from the noise level of the student's, in the same terms."""
    if type(found) is not type(expected) or abs(found.sigma - expected.sigma) > 1e-6:
        raise ModelError(
            f"{NAME}: step {k} of {teacher} is at noise level {found.sigma:.6g} ({type(found).__name__}), that of "
            f"the student at {expected.sigma:.6g} ({type(expected).__name__}): use a teacher with the same steps"
        )


def step_distance(kind: StepDistance, step: ReplayedStep, output: torch.Tensor) -> torch.Tensor:
    """Distance `[B]` of a student's step to that of the `output` `[B, ...]` of a teacher, with gradient to the former.

    - `gaussian`: `(mean - mean')^2 / (2 std^2)`, the KL of the two transitions; raises `ValueError` without noise.
    - `mean`: `(mean - mean')^2 / 2`.
    - `velocity`: `(output - output')^2`.

    Each a mean over non-batch dimensions. With `J` the step's jacobian, the first is `J^2 / (2 std^2)` and the second
    `J^2 / 2` times the third.
    """
    output = output.detach()
    match kind:
        case "gaussian":
            if step.std == 0:
                raise ValueError("a step with std 0 is deterministic, and has no KL to another one")
            return _squares(step.mean - step.rule.mean(step.x, output)) / (2 * step.std**2)
        case "mean":
            return _squares(step.mean - step.rule.mean(step.x, output)) / 2
        case "velocity":
            return _squares(step.model_output - output)
        case unknown:
            assert_never(unknown)


def distance_weight(kind: StepDistance, rule: Rule) -> float:
    """The factor of the squared distance of outputs in `step_distance`."""
    squared = rule.jacobian**2 / 2
    return {"gaussian": squared / rule.std**2 if rule.std else 0.0, "mean": squared, "velocity": 1.0}[kind]


def _squares(values: torch.Tensor) -> torch.Tensor:
    return (values**2).flatten(1).mean(1)


Measured = dict[str, tuple[float, int]]


def by_teacher(teachers: Sequence[Teacher], lesson: Lesson, distances: torch.Tensor) -> Measured:
    """Of each teacher that has rows among those of `distances` `[R]`: their sum and number, by its name."""
    values, found = distances.detach().tolist(), Measured()
    for number, teacher in enumerate(teachers):
        own = [value for value, taught in zip(values, lesson.taught_by, strict=True) if taught == number]
        if own:
            found[teacher.name] = (sum(own), len(own))
    return found

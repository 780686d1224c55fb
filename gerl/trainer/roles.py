"""The policies of a run by their role, each with an algorithm and updates on its own samples."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from gerl.algorithms import Algorithm
from gerl.config import Config
from gerl.trainer.step import Metrics, Step
from gerl.trainer.update import Update
from gerl.workers.fleet import LocalFleet

POLICY = "policy"  # name of the only role of a plain run


@dataclass(frozen=True)
class Role:
    """A policy: its configuration, its fleet, which are calls to its adapter, and its updates with their algorithm.

    Example: `draw` and `edit` of an episode; a plain run has the role `policy` alone. trained: whether a step, by its
    number, trains it.
    """

    name: str
    config: Config
    fleet: LocalFleet
    update: Update
    trained: Callable[[int], bool] = lambda number: True

    @property
    def algorithm(self) -> Algorithm:
        return self.update.algorithm

    def part_of(self, step: Step) -> Step:
        """Return the part of a step with the samples of this role; its credit is NaN if the role is not trained."""
        assert step.credit is not None
        rows = [row for row, sample in enumerate(step.scores.samples) if sample.role == self.name]
        credit = step.credit[rows, : self.config.sampling.num_inference_steps]
        tasks = [task for task in step.tasks if task.samples[0].role == self.name]
        if not self.trained(step.number):
            credit = torch.full_like(credit, torch.nan)
        return replace(step, tasks=tasks, credit=credit, kl_weight=None)


def update_roles(roles: Mapping[str, Role], step: Step) -> Metrics:
    """Train each role on its own samples of a step; if the update of one fails, those before it count as not done."""
    if len(roles) == 1:
        (role,) = roles.values()
        return role.update.run(step)
    records = [role.update.state for role in roles.values()]
    counts = [(record.policy_version, record.nonfinite, record.checked) for record in records]
    try:
        return _update_each(roles, step)
    except BaseException:
        for record, values in zip(records, counts, strict=True):
            record.policy_version, record.nonfinite, record.checked = values
        raise


def _update_each(roles: Mapping[str, Role], step: Step) -> Metrics:
    first, *others = roles.values()
    part = first.part_of(step)
    metrics = first.update.run(part)
    step.stats = part.stats
    for role in others:
        role.update.state.step = first.update.state.step
        metrics = merged(metrics, role.update.run(role.part_of(step)), role.name)
    return metrics


def merged(metrics: Metrics, added: Metrics, role: str) -> Metrics:
    """Add the metrics of a role's update: counts are summed, others are named by the role."""
    result = dict(metrics)
    for name, value in added.items():
        if name.startswith("evaluations/"):
            result[name] = result.get(name, 0.0) + value
        elif name.startswith("gpu/"):
            result[name] = max(result.get(name, value), value)
        else:
            part, _, rest = name.partition("/")
            result[f"{part}/{role}/{rest}"] = value
    return result

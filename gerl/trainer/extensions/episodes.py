"""Episodes of several turns: each starts from images of the turn before, and roles have policies of their own.

The turns of a step are rounds of sampling: turn t + 1 is planned from the scored images of turn t. Groups are keyed by
prompt, turn, role and state (AT-GRPO, arXiv 2510.11062), so images are compared only with those that started from the
same image. Each role credits and trains its own samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from gerl.algorithms.base import Rewards
from gerl.algorithms.planning import plan_samples, plan_validation
from gerl.algorithms.token_grpo import TokenGRPO
from gerl.config import Config
from gerl.config.roles import role_config
from gerl.errors import CheckpointError
from gerl.progress import waiting
from gerl.protocol import Group, Prompt, RolloutTask, Sample, Scores
from gerl.run.checkpoint import RunState
from gerl.trainer.roles import Role
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Metrics, Step, mean, reward_metrics
from gerl.trainer.turns import Turns, written
from gerl.trainer.update import Update
from gerl.utils.seeding import derive_seed
from gerl.workers.roles import RoleFleet, role_algorithm

if TYPE_CHECKING:
    from gerl.cluster import Pending
    from gerl.protocol import Images
    from gerl.rewards.rollouts import PendingRollout
    from gerl.trainer.run import HeldOut

logger = logging.getLogger(__name__)


class Episodes(Extension):
    """Sample the turns of each step and validation, and train each role on its own samples."""

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return bool(config.episode.turns)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.turns = Turns(config)
        self.roles: dict[str, OtherRole] = {}
        self.texts: TextTurn | None = None  # of this step or validation
        self.by_turn: Metrics = {}  # of this step

    # --- roles

    def assigning(self, run: Run, first: Role) -> Mapping[str, Role]:
        episode = self.config.episode

        def trained(name: str) -> Callable[[int], bool]:
            return lambda number: name in episode.trained(number)

        self.roles = {name: OtherRole(name, run, trained(name)) for name in episode.roles}
        main = replace(first, name=episode.own_role, trained=trained(episode.own_role))
        return {main.name: main} | {name: other.role for name, other in self.roles.items()}

    def state(self) -> Any:
        return {name: role.state() for name, role in self.roles.items()}

    def load_state(self, state: Any) -> None:
        if state is not None and not isinstance(state, dict):
            raise CheckpointError("state.json has no usable extensions.episodes: a state per role")
        for name, role in self.roles.items():
            role.load((state or {}).get(name, {}))

    # --- turns of a step

    def prompted(self, run: Run, number: int, prompts: Sequence[Prompt], held_out: bool) -> Sequence[Prompt]:
        asked = self.turns.first(prompts)
        if not self.turns.writes:
            return asked
        self.texts = texts = self.written(run, number, asked, held_out)
        return self.turns.rewritten(texts.samples, texts.texts)

    def written(self, run: Run, number: int, prompts: Sequence[Prompt], held_out: bool) -> TextTurn:
        """Rewrite `prompts`; the tokens stay on the workers."""
        role = self.roles[self.turns.parsed[0].role].role
        role.fleet.held.clear()
        if held_out:
            batches, tasks = plan_validation(role.config, prompts, number), list[RolloutTask]()
            dispatch = role.fleet.validate(batches)
        else:
            tasks = role.algorithm.plan(plan_samples(role.config, prompts, number, run.state.policy_version))
            batches, dispatch = [task.samples for task in tasks], role.fleet.sample(tasks)
        with waiting(f"rewriting {len(prompts)} prompts"):
            texts = written(dispatch, batches)
        return TextTurn(tasks, [sample for batch in batches for sample in batch], texts)

    def add_texts(self, step: Step) -> None:
        """Add the texts of a step, whose reward is the mean over the images of their descendants."""
        assert self.texts is not None
        samples = self.texts.samples
        totals = text_returns(samples, step.scores)
        failures = [[] if total is not None else step.scores.failures[step.scores.failed[0]] for total in totals]
        step.scores.add(Scores(samples, totals, {}, failures))
        step.tasks += self.texts.tasks

    def scored(self, run: Run, step: Step) -> PendingRollout | None:
        number = step.rounds + self.turns.writes  # of the next turn
        done = sum(len(task.samples) for task in step.round)
        last = Scores()
        last.add(part_of(step.scores, len(step.scores.samples) - done))
        if number == len(self.turns):
            self.by_turn = self.metrics(step.scores)
            step.scores.totals = returns(self.config.episode.returns, step.scores)
            if self.turns.writes:
                self.add_texts(step)
            return None
        images = step.images[len(step.images) - len(step.round) :]
        pixels = [image for part in images for image in part.result().pixels]
        prompts = self.turns.following(number, last, pixels, self.chosen(last, step.number))
        name = self.turns.parsed[number].role
        role = run.roles[name]
        if step.rounds == 1:
            for other in self.roles.values():
                other.role.fleet.held.clear()
        samples = plan_samples(role.config, prompts, step.number, run.state.policy_version)
        tasks = role.algorithm.plan(samples, first_id=len(step.tasks))
        if name in self.roles:
            self.roles[name].calibrate(tasks[0])
        return run.rollouts.start(tasks, role.fleet)

    def chosen(self, scores: Scores, step: int) -> list[int]:
        """Return the rows of `scores` whose images the next turn starts from (`episode.next`)."""
        groups: dict[Group, list[int]] = {}
        for row, sample in enumerate(scores.samples):
            groups.setdefault(sample.group, []).append(row)
        chosen_rows: list[int] = []
        for group, rows in groups.items():
            match self.config.episode.next:
                case "each":
                    chosen_rows += rows
                case "best":
                    scored = [row for row in rows if scores.totals[row] is not None]
                    chosen_rows.append(max(scored or rows[:1], key=lambda row: scores.totals[row] or 0.0))
                case "sample":
                    parts = (group.prompt, group.turn or 0, -1 if group.branch is None else group.branch)
                    chosen_rows.append(rows[derive_seed("state", self.config.trainer.seed, step, *parts) % len(rows)])
        return chosen_rows

    def rewarded(self, run: Run, step: Step) -> None:
        assert step.rewards is not None
        step.metrics |= self.by_turn
        self.rewards = by_role(step.rewards)
        if self.turns.writes:
            step.metrics |= self.without_texts(step.scores)
        step.rewards = self.rewards.get(self.config.episode.own_role, subset(step.rewards, []))

    def without_texts(self, scores: Scores) -> Metrics:
        """Return the metrics of the images' rewards, and the mean reward of the texts."""
        assert self.texts is not None
        texts, writer = len(self.texts.samples), self.turns.parsed[0].role
        images = [rewards.totals for name, rewards in self.rewards.items() if name != writer]
        metrics = reward_metrics(part_of(scores, 0, len(scores.samples) - texts), self.config.reward)
        metrics["reward/std"] = float(torch.cat(images).std(correction=0)) if images else float("nan")
        return metrics | {"turn_0/reward/mean": mean(scores.totals[-texts:])}

    def credited(self, run: Run, step: Step) -> None:
        assert step.credit is not None
        widths = [other.role.config.sampling.num_inference_steps for other in self.roles.values()]
        missing = max(0, max(widths, default=0) - step.credit.shape[1])
        step.credit = torch.nn.functional.pad(step.credit, (0, missing), value=torch.nan)
        for name, other in self.roles.items():
            if (rewards := self.rewards.get(name)) is not None:
                credit = other.role.algorithm.credit(rewards)
                step.credit[list(rewards.rows), : credit.shape[1]] = credit

    # --- turns of a validation

    def continued(self, run: Run, step: Step, scores: Scores, images: Sequence[Pending[Images]]) -> HeldOut | None:
        number = next((s.turn for s in scores.samples), 0) or 0
        pixels = [image for part in images for image in part.result().pixels]
        if len(self.turns) > 1 + self.turns.writes:
            step.metrics |= {f"val/{name}": value for name, value in self.metrics(scores).items()}
        elif self.turns.writes:
            first = scores.samples[0].prompt
            logger.info("step %d: %r is rewritten as %r", step.number, first.text, first.request)
        number += 1
        if number == len(self.turns):
            return None
        prompts = self.turns.following(number, scores, pixels, range(len(scores.samples)))
        role = run.roles[self.turns.parsed[number].role]
        return role.fleet, plan_validation(role.config, prompts, step.number)

    def metrics(self, scores: Scores) -> Metrics:
        """Return the mean reward of each turn."""
        by_turn: dict[int, list[float | None]] = {}
        for sample, total in zip(scores.samples, scores.totals, strict=True):
            by_turn.setdefault(sample.turn or 0, []).append(total)
        return {f"turn_{number}/reward/mean": mean(totals) for number, totals in by_turn.items()}


def part_of(scores: Scores, start: int, end: int | None = None) -> Scores:
    """Return the rows of `scores` from `start` to `end`."""
    part = slice(start, end)
    columns = {name: values[part] for name, values in scores.by_scorer.items()}
    return Scores(scores.samples[part], scores.totals[part], columns, scores.failures[part])


def by_role(rewards: Rewards) -> dict[str, Rewards]:
    """Split rewards by the role of their samples."""
    rows: dict[str, list[int]] = {}
    for row, sample in enumerate(rewards.samples):
        assert sample.role is not None
        rows.setdefault(sample.role, []).append(row)
    return {name: subset(rewards, of_role) for name, of_role in rows.items()}


def subset(rewards: Rewards, rows: Sequence[int]) -> Rewards:
    """Return the rewards of `rows`."""
    index = torch.tensor(rows, dtype=torch.int64)
    diversity = None if rewards.diversity is None else rewards.diversity[index]
    samples, places = [rewards.samples[row] for row in rows], [rewards.rows[row] for row in rows]
    return Rewards(samples, rewards.totals[index], rewards.by_scorer[index], rewards.weights, diversity, places)


def returns(kind: str, scores: Scores) -> list[float | None]:
    """Return the reward of each image `[B]`: of its turn, the mean over its descendants in the last, or the sum."""
    if kind == "turn":
        return list(scores.totals)
    values = list(scores.totals)
    members: dict[tuple[int, int], list[int]] = {}  # prompt and turn -> rows, in the order of their states
    children: dict[tuple[int, int, int], list[int]] = {}  # prompt, turn and state -> rows
    for row, sample in enumerate(scores.samples):
        turn = sample.turn or 0
        members.setdefault((sample.prompt.id, turn), []).append(row)
        if sample.branch is not None:
            children.setdefault((sample.prompt.id, turn, sample.branch), []).append(row)
    for (prompt, turn), rows in sorted(members.items(), key=lambda item: -item[0][1]):
        for state, row in enumerate(rows):
            later = children.get((prompt, turn + 1, state))
            if later is None:
                continue
            later_values = [value for child in later if (value := values[child]) is not None]
            rest = sum(later_values) / len(later_values) if len(later_values) == len(later) else None
            of_turn = scores.totals[row] if kind == "sum" else 0.0
            values[row] = None if rest is None or of_turn is None else of_turn + rest
    return values


def text_returns(samples: Sequence[Sample], scores: Scores) -> list[float | None]:
    """Return the reward of each text `[B]`: the mean over the images sampled for it; None: one of them has none."""
    by_text: dict[tuple[int, int | None], list[float | None]] = {}
    for image, total in zip(scores.samples, scores.totals, strict=True):
        if image.turn == 1:
            by_text.setdefault((image.prompt.id, image.branch), []).append(total)
    of_texts = [by_text[sample.prompt.id, sample.index] for sample in samples]
    return [None if None in totals else mean(totals) for totals in of_texts]


@dataclass(frozen=True)
class TextTurn:
    """The turn that rewrites prompts: its tasks, samples and texts."""

    tasks: list[RolloutTask]
    samples: list[Sample]
    texts: list[str]


# --- Roles


class OtherRole:
    """Another role than the run's own: what its updates count, and whether its ratio is calibrated."""

    def __init__(self, name: str, run: Run, trained: Callable[[int], bool]) -> None:
        config, algorithm, fleet = (
            role_config(run.config, name),
            role_algorithm(run.config, name),
            RoleFleet(run.fleet, name),
        )
        update = Update(config, algorithm, fleet, RunState(), run.fleet.model.half_precision)
        update.prefix = f"{name}: "
        self.calibrated = isinstance(algorithm, TokenGRPO)
        if isinstance(algorithm, TokenGRPO):
            update.compares_gradient = False  # it replays no denoiser
            update.clip_range = algorithm.settings.clip_low, algorithm.settings.clip_high
        self.role = Role(name, config, fleet, update, trained)

    def calibrate(self, task: RolloutTask) -> None:
        """Measure the numerical noise of the ratio with the first task that the role is given, and warn."""
        role = self.role
        if self.calibrated or not role.algorithm.needs.ratio or role.config.algorithm.cfg == "off":
            return
        self.calibrated = True
        with waiting(f"measuring the numerical noise of the ratio of {role.name} on {len(task.samples)} images"):
            role.update.calibrate(task)

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run, as JSON."""
        counts = self.role.update.state
        return {
            "policy_version": counts.policy_version,
            "nonfinite": counts.nonfinite,
            "checked": counts.checked,
            "algorithm": self.role.algorithm.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, or the start for an empty one."""
        counts = [state.get(name, 0) for name in ("policy_version", "nonfinite")]
        if not all(type(count) is int for count in counts):
            raise CheckpointError(f"state.json has no usable counts of the role {self.role.name}")
        self.role.update.state = RunState(
            policy_version=counts[0], nonfinite=counts[1], checked=str(state.get("checked", ""))
        )
        if "algorithm" in state:
            self.role.algorithm.load_state(state["algorithm"])

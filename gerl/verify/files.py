"""Checks of a run's files against each other, without its model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from gerl.algorithms import build_algorithm
from gerl.config import Config, RewardConfig
from gerl.config.bounded_text import MALFORMED, read_json
from gerl.config.changes import flat_settings, unknown_keys
from gerl.errors import CheckpointError, DataError
from gerl.protocol import Prompt, RolloutTask, Sample, Scores
from gerl.run.card import redacted, software
from gerl.run.checkpoint import RunState
from gerl.run.dump import STATE, Dump
from gerl.run.live import FOLDER, live_steps
from gerl.run.validation import Validation, judged, mean, paired_gains
from gerl.trainer.plan import Plan, due
from gerl.trainer.run_folder import identity
from gerl.trainer.step import reward_metrics
from gerl.trainer.validation import gain_metrics
from gerl.utils.files import file_digest, finite, reason
from gerl.utils.tensors import tensors_digest, unpack_tensors
from gerl.verify.findings import DAMAGED, Check, NotCheckedError, Tally
from gerl.verify.recorded import RunRecord

METRICS = "metrics.jsonl"
ROUNDING = 1e-9  # relative, of means that are computed in another order


# --- Configuration, data and code


def check_config(run: RunRecord) -> Check:
    """Compare `config.yaml` with the settings in checkpoints and dumps, which the run has written itself."""
    tally = Tally()
    for step, checkpoint in run.checkpoints.items():
        recorded = checkpoint.state.get("settings")
        if isinstance(recorded, dict):
            _compare_settings(tally, run, step, recorded, f"in {relative(run, checkpoint.path)}/state.json")
    for step, dump in run.dumps.items():
        _compare_settings(tally, run, step, dump.record.settings, f"in {relative(run, dump.path)}", hides=True)
    return tally.result("config", f"config.yaml against {len(run.checkpoints)} checkpoints and {len(run.dumps)} dumps")


def _compare_settings(
    tally: Tally, run: RunRecord, step: int, recorded: dict[str, Any], by: str, hides: bool = False
) -> None:
    """`hides`: secrets are left out of the `recorded` settings."""
    settings = run.settings(step)
    values, expected = flat_settings(redacted(settings) if hides else settings), flat_settings(recorded)
    gone = set(unknown_keys(recorded))  # in this version of gerl
    for key, value in expected.items():
        if key in values or key not in gone:
            tally.compare(relative(run, run.file_of(step)), key, values.get(key, "missing"), value, by=by)


def check_data(run: RunRecord) -> Check:
    """Compare the digests of the prompts, and of an algorithm of the user, with the recorded ones."""
    recorded = identities(run)
    try:
        digests = identity(run.newest)
    except DataError as error:
        raise NotCheckedError(str(error)) from None
    tally = Tally()
    for where, values in recorded.items():
        for key, value in digests.items():
            if key in values:
                tally.compare(where, key, values[key], value)
    return tally.result("data", f"SHA-256 of {' and '.join(digests)}")


def identities(run: RunRecord) -> dict[str, dict[str, str]]:
    """Return the digests of prompts and weights that checkpoints and dumps have, by file."""
    states = {f"{relative(run, c.path)}/state.json": c.state.get("identity") for c in run.checkpoints.values()}
    dumps = {relative(run, dump.path): dump.record.identity for dump in run.dumps.values()}
    return {where: dict(values) for where, values in {**states, **dumps}.items() if isinstance(values, dict)}


def check_code(run: RunRecord) -> Check:
    """Compare the code of gerl here with that of the run's sessions."""
    here, name = software()["gerl"], "code"
    others = [session["gerl"] for session in run.sessions if isinstance(session.get("gerl"), dict)]
    if not others:
        raise NotCheckedError("run.json has no record of the code")
    differing = [other for other in others if other.get("code", here["code"]) != here["code"]]
    unknown = [other for other in others if "code" not in other and other.get("commit") != here.get("commit")]
    if not differing and not unknown:
        return Check(name, "ok", f"the code of gerl here is that of the run, SHA-256 {here['code'][:12]}")
    other = [*differing, *unknown][0]
    if "commit" in here and other.get("commit") == here["commit"] and not (other.get("dirty") or here["dirty"]):
        tally = Tally()
        tally.compare("run.json", "gerl.code", other.get("code"), here["code"], by=f"at commit {here['commit'][:12]}")
        return tally.result(name, "digest of the code")
    changed = " with changes" if other.get("dirty") else ""
    commit = f"commit {other['commit'][:12]}{changed}" if other.get("commit") else "no commit"
    raise NotCheckedError(
        f"the run used gerl {other.get('version')} ({commit}, code {str(other.get('code'))[:12]}), and this is "
        f"{here['version']} (code {here['code'][:12]}): numbers are recomputed with this one"
    )


# --- Checkpoints


def check_checkpoints(run: RunRecord) -> Check:
    """Compare the files of all checkpoints with their digests, and their state with the metrics."""
    intact = run.checkpoints
    if not intact and not run.damaged:
        raise NotCheckedError("the run has no checkpoint")
    tally = Tally()
    for path, error in run.damaged.items():
        tally.compare(relative(run, path), "SHA-256", "that of its manifest", str(error).partition(": ")[2], by=DAMAGED)
    for step, checkpoint in intact.items():
        tally.count += len(checkpoint.files)
        row, where = run.row_of.get(step), f"{relative(run, checkpoint.path)}/state.json"
        try:
            state = RunState.of(checkpoint)
        except CheckpointError as error:
            tally.compare(where, "content", "usable", str(error))
            continue
        if row is None:
            continue
        for key, value in (("actor/policy_version", state.policy_version), ("val/reward/mean", state.val_reward)):
            if row.get(key) is not None and value is not None:
                tally.compare(METRICS, key, row[key], value, step, f"in {where}")
    return tally.result("checkpoints", f"SHA-256 of all files of {len(intact)} checkpoints, their state")


# --- Metrics


def check_metrics(run: RunRecord) -> Check:
    """Check that steps have no gaps, and what follows of a row from the configuration and the row before it."""
    rows, tally, done, trainer = run.rows, Tally(), (0, 0), run.newest.trainer
    if not rows and not run.checkpoints:
        raise NotCheckedError("metrics.jsonl has no rows")
    first, last = 0 if 0 in run.row_of else 1, max(run.row_of, default=0)
    for number, row in enumerate(rows, start=first):
        tally.compare(METRICS, "step", row["step"], number, by=f"expected in line {number - first + 1}")
    times = [str(row.get("time")) for row in rows]
    for row, time, before in zip(rows[1:], times[1:], times, strict=False):
        tally.compare(METRICS, "time", time, max(time, before), row["step"], "expected, as rows are in order")
    for step, checkpoint in run.checkpoints.items():
        reached = step - bool(checkpoint.state.get("unlogged"))  # a step may be saved before it is logged
        tally.compare(METRICS, "the last step", last, max(reached, last), by="reached by a checkpoint")
        if checkpoint.state.get("finished") and step == max(run.checkpoints) and not trainer.stop_at:
            key = "trainer.steps" if trainer.epochs is None else "trainer.epochs, in steps,"
            tally.compare("config.yaml", key, run.planned, step, by="finished by the last checkpoint")
    for row in rows:
        if row["step"]:
            done = _check_updates(run, row, done, tally)
            _check_due(run, row, tally)
    return tally.result("metrics", f"{len(rows)} rows without gaps; updates, rates, validations as configured")


def _check_updates(run: RunRecord, row: dict[str, Any], done: tuple[int, int], tally: Tally) -> tuple[int, int]:
    """Check the optimizer steps and the learning rate of a row after `done`: updates taken, and skipped."""
    step, config = row["step"], run.config(row["step"])
    taken, skipped = (row.get(f"actor/{key}") for key in ("policy_version", "nonfinite_updates"))
    if taken is None or skipped is None:
        return done
    most, new = config.actor.updates, taken + skipped - sum(done)
    tally.compare(METRICS, "actor/policy_version", taken, min(max(taken, done[0]), taken - new + most), step, "at most")
    if "actor/lr" in row:
        steps = config.trainer.steps if config.trainer.epochs is None else run.planned
        tally.compare(METRICS, "actor/lr", row["actor/lr"], rate(config, steps, int(taken + skipped) - 1), step)
    return int(taken), int(skipped)


def rate(config: Config, steps: int, taken: int) -> float:
    """Return the learning rate after `taken` optimizer steps of a run of so many trainer `steps`."""
    from diffusers.optimization import get_scheduler  # takes seconds

    base = config.actor.rate(config.model.train)
    name = "constant_with_warmup" if config.actor.lr_schedule == "constant" else config.actor.lr_schedule
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    warmup, total = config.actor.warmup_steps, steps * config.actor.updates
    schedule = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    return float(base * schedule.lr_lambdas[0](taken))


def _check_due(run: RunRecord, row: dict[str, Any], tally: Tally) -> None:
    """Check that a validation that was due has been logged and kept."""
    step, config = row["step"], run.config(row["step"])
    if config.validation.data is not None and due(step, config.validation.every, 0):
        tally.compare(METRICS, "val/reward/mean", "val/failures" in row or "val/reward/mean" in row, True, step, "due")
        tally.compare("validation", f"step_{step:06d}.json", step in run.validations, True, by="due")


def check_plan(run: RunRecord, lost: set[str] | None) -> Check:
    """Compare the images of each step with those that the planning functions give for its number.

    `lost`: prompts beyond the tokens that the model reads; None: unknown.
    """
    tally, prompts = Tally(), run.prompts
    if run.newest.episode.turns:
        raise NotCheckedError("the turns of an episode follow from scores (episode.turns)")
    if run.newest.data.overlong == "drop":
        if lost is None:
            raise NotCheckedError("data.overlong=drop leaves out prompts by their tokens, which needs the model")
        prompts = [prompt for prompt in prompts if prompt.text not in lost]
    planner = Planner(run, prompts)
    for row in run.rows:
        if (step := row["step"]) and (recorded := row.get("evaluations/images")) is not None:
            sizes = [sum(len(task.samples) for task in tasks) for tasks in planner.rounds(step, sampled=True)]
            planned = [sum(sizes[: i + 1]) for i in range(len(sizes))]
            expected = recorded if recorded in planned else planned[0]
            tally.compare(METRICS, "evaluations/images", recorded, expected, step, "planned")
    for step, dump in run.dumps.items():
        planned_tasks = [task for tasks in planner.rounds(step) for task in tasks]
        _compare_tasks(tally, relative(run, dump.path), step, dump.record.tasks, planned_tasks)
    return tally.result("plan", f"images of each step; prompts, seeds and windows of {len(run.dumps)} dumps")


class Planner:
    """Plans the tasks of any step as the run did."""

    def __init__(self, run: RunRecord, prompts: Sequence[Prompt]) -> None:
        self.run, self.prompts = run, prompts
        self._plans: dict[Path, Plan] = {}  # by configuration

    def rounds(self, step: int, sampled: bool = False) -> list[list[RolloutTask]]:
        """Return the tasks of each round that the step may have had; `sampled`: without images from files beside."""
        config = self.run.config(step)
        if (file := self.run.file_of(step)) not in self._plans:
            imitated = self.run.imitated if config.data.regularise is not None else []
            self._plans[file] = Plan(config, self.prompts, (), imitated)
        plan, rounds = self._plans[file], list[list[RolloutTask]]()
        algorithm, state = build_algorithm(config), RunState()
        for attempt in range(config.algorithm.dynamic_sampling + 1):
            prompts = plan.prompts_of(step, attempt)
            tasks = plan.tasks(algorithm, state, prompts, step, attempt, sum(map(len, rounds)))
            beside = sampled and config.data.regularise is not None
            rounds.append([t for t in tasks if not (beside and t.samples[0].dataset_image)])
        return rounds


def _compare_tasks(
    tally: Tally, where: str, step: int, recorded: Sequence[RolloutTask], planned: Sequence[RolloutTask]
) -> None:
    """Compare the tasks of a dump with those that are planned, of which there may be more rounds than were taken."""
    for task, other in zip_longest(recorded, planned[: len(recorded)]):
        if task is None or other is None:
            tally.compare(where, "tasks", len(recorded), len(planned), step, "planned")
            return
        for sample, like in zip_longest(task.samples, other.samples):
            for key in ("prompt", "index", "seed", "init_seed", "branch"):
                a, b = (getattr(each, key, None) for each in (sample, like))
                if key == "prompt":
                    a, b = (getattr(prompt, "text", None) for prompt in (a, b))
                tally.compare(where, f"tasks.{task.id}.samples.{key}", a, b, step, "planned")
        tally.compare(where, f"tasks.{task.id}.segments", task.segments, other.segments, step, "planned")


# --- Validations and live images: their means are in the metrics


def check_validations(run: RunRecord) -> Check:
    """Compare held-out means, rates, gains and judgements in the metrics with the scores of each image on disk."""
    tally, validations = Tally(), run.validations
    if not validations:
        raise NotCheckedError("the run has no validation")
    first = validations[min(validations)]
    for step, validation in validations.items():
        if (row := run.row_of.get(step)) is None:
            continue  # it ended before the row was written
        expected = held_out_metrics(validation, run.config(max(step, 1)).reward)
        expected |= {f"val/{name}/mean": mean(column) for name, column in judged(validation, first).items()}
        if step > first.step:
            expected |= gain_metrics(paired_gains(first, validation))
        for key, value in expected.items():
            if row.get(key) is not None:
                tally.compare(METRICS, key, row[key], value, step, "from validation/", ROUNDING)
    return tally.result("validations", f"means, rates, gains and judgements of {len(validations)} validations")


def held_out_metrics(validation: Validation, reward: RewardConfig) -> dict[str, float | None]:
    """Return the metrics that follow from the scores of a validation; of columns without a missing score."""
    ids = validation.ids or list(range(len(validation.prompts)))
    prompts = [Prompt(i, text) for i, text in zip(ids, validation.prompts, strict=True)]
    samples = [Sample(prompt, k, 0, validation.step) for k, prompt in enumerate(prompts)]
    columns = {name: column for name, column in validation.by_scorer.items() if None not in column}
    scores = Scores(samples, validation.rewards, columns, [[] for _ in samples])
    metrics: dict[str, float | None] = {**reward_metrics(scores, reward, validation=True)}
    del metrics["val/failures"]  # not on disk
    return metrics if None not in validation.rewards else {k: v for k, v in metrics.items() if "val/reward/" not in k}


def check_live(run: RunRecord) -> Check:
    """Compare the mean reward of steps with the rewards of their live images, if all of them are shown."""
    tally = Tally()
    for step in live_steps(run.folder):
        path = run.folder / FOLDER / f"step_{step:06d}.json"
        try:
            values = read_json(path)
            count = len(values["images"])
            totals = [image[2] for image in values["images"] if len(image) == 5]  # without the texts of a rewriter
        except (OSError, *MALFORMED) as error:
            tally.compare(relative(run, path), "content", "readable", str(error), step)
            continue
        recorded = run.row_of.get(step, {}).get("reward/mean")
        if recorded is not None and count == values.get("of") and None not in totals:
            tally.compare(METRICS, "reward/mean", recorded, mean(totals), step, "from live/", ROUNDING)
    return tally.result("live images", "mean reward of the steps whose images are all shown")


# --- Dumps


def check_dump_files(run: RunRecord) -> Check:
    """Compare the tensors of dumps with their digests, their metrics with the rows, and scores with the rewards."""
    if not run.dumps:
        raise NotCheckedError("the run has no dumps (trainer.dump)")
    tally = Tally()
    for step, dump in run.dumps.items():
        where, record = relative(run, dump.path), dump.record
        try:
            tally.compare(where, "sha256", record.sha256, file_digest(dump.tensors), step)
        except OSError as error:
            tally.compare(where, "file", record.file, reason(error), step)
            continue
        for key, value in record.metrics.items():
            if (row := run.row_of.get(step)) is not None:
                tally.compare(METRICS, key, row.get(key), value, step, f"in {where}")
        _compare_weights(tally, run, dump)
        for key, mean_of in reward_metrics(record.scores, run.config(step).reward).items():
            tally.compare(where, f"metrics.{key}", record.metrics.get(key), finite(mean_of), step, "of its scores")
    return tally.result("dumps", f"SHA-256, metrics, scores and weights of {len(run.dumps)} dumps")


def _compare_weights(tally: Tally, run: RunRecord, dump: Dump) -> None:
    """Compare the state in the dump of a LoRA's step with the checkpoints before and after it, where they are kept."""
    record, name = dump.record, "state.safetensors"
    before, after = (run.checkpoints.get(step) for step in (record.step - 1, record.step))
    if before is not None and name in before.files:
        where, state = f"in {relative(run, before.path)}/{name}", unpack_tensors(before.read(name))
        dumped = dump.group(STATE)
        for key in {**dumped, **state}:
            a, b = (tensors_digest({key: each[key]}) if key in each else "missing" for each in (dumped, state))
            tally.compare(relative(run, dump.tensors), f"{STATE}{key}", a, b, record.step, where)
    if after is not None and name in after.files and record.weights is not None:
        state = unpack_tensors(after.read(name))
        trained = {key.removeprefix("lora/"): tensor for key, tensor in state.items() if key.startswith("lora/")}
        where = f"in {relative(run, after.path)}/{name}"
        tally.compare(relative(run, dump.path), "weights", record.weights, tensors_digest(trained), record.step, where)


def relative(run: RunRecord, path: Path) -> str:
    """Return a path within the run's folder."""
    return path.relative_to(run.folder).as_posix()

"""Checks of a run that compute again what it has recorded, with its model and its scorers."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from gerl.algorithms.planning import plan_validation
from gerl.algorithms.signal_checks import ratio_limit
from gerl.cluster import Cluster
from gerl.commandline.composition import compose_changes
from gerl.config import Config
from gerl.engine import Tape, Trajectory
from gerl.engine.storage import store
from gerl.errors import GerlError, ModelError
from gerl.model.errors import model_errors
from gerl.protocol import Images, ModelFacts, RolloutTask, Sample
from gerl.run.card import hardware, software
from gerl.run.checkpoint import RunState
from gerl.run.dump import CREDIT, TRAJECTORY
from gerl.run.validation import Validation, load_validation
from gerl.trainer.dumped_step import DumpedStep, configuration, in_one_process, load_worker
from gerl.trainer.overlong import cut_prompts, sentences
from gerl.trainer.replay import compare, default_tolerance
from gerl.utils.files import reason
from gerl.utils.pages import still
from gerl.verify.files import METRICS, identities, relative
from gerl.verify.findings import Check, NotCheckedError, Tally
from gerl.verify.recorded import RunRecord
from gerl.verify.scoring import Scoring
from gerl.workers.rollout import CallFormat, find_images
from gerl.workers.worker import PolicyWorker

CUT = re.compile(r"(\d+) of (\d+) prompts exceed the (\d+) tokens that (\S+) reads")
# of 255: by which a pixel may differ, and on average over an image, on the run's machine and on another one
LEVELS = {"own": (2, 0.5), "float32": (8, 0.5), "other": (64, 8.0)}


@dataclass
class Recomputation:
    """The run's model in this process; `lost`: prompts whose end no tokenizer reads, once they are counted."""

    run: RunRecord
    cluster: Cluster
    worker: PolicyWorker
    facts: ModelFacts
    tolerance: float | None
    lost: set[str] | None = None

    @property
    def config(self) -> Config:
        return self.worker.config

    @cached_property
    def levels(self) -> tuple[int, float]:
        """How far pixels may differ, see `LEVELS`."""
        here, last = software() | hardware(), self.run.sessions[-1] if self.run.sessions else {}
        if all(here[name] == last.get(name) for name in ("python", "packages", "cpu", "gpus")):
            return LEVELS["own"]
        dtype = next(iter(self.worker.policy.denoisers.values())).dtype
        return LEVELS["float32" if dtype == torch.float32 else "other"]

    def worker_of(self, config: Config) -> PolicyWorker:
        """Return a worker of this configuration, once it has a state; another one takes the place of that in use."""
        if replace(self.config, model=replace(self.config.model, lora=config.model.lora)) != config:
            del self.worker
            gc.collect()
            self.worker, self.facts = load_worker(config, self.cluster)
        return self.worker


@contextmanager
def recomputing(run: RunRecord, tolerance: float | None) -> Iterator[Recomputation]:
    """Load the run's model, on the kind of device that it used if there is one; raises `GerlError`."""
    environments = [dump.record.environment for dump in run.dumps.values()]
    drawn = [v.drawing.device for v in run.validations.values() if v.drawing is not None]
    device = environments[-1].device if environments else drawn[-1] if drawn else None
    dtype = environments[-1].dtype if environments else None
    threads = environments[-1].threads if environments else None
    if dtype is None and device == "cuda" and run.newest.model.dtype == "auto":
        dtype = "bfloat16"  # also where it is computed again on a CPU
    settings = in_one_process(run.settings(run.last), run.planned, device, dtype, threads)
    config = compose_changes(settings, run.overrides)
    with Cluster(config.cluster) as cluster:
        try:
            worker, facts = load_worker(config, cluster)
        except ModelError:
            if config.model.lora is None or config.model.merge_lora:
                raise
            worker, facts = load_worker(replace(config, model=config.model.for_resume()), cluster)
        yield Recomputation(run, cluster, worker, facts, tolerance)


# --- The base model, its tokenizers and its guidance


def check_base(r: Recomputation) -> Check:
    """Compare the fingerprint of the base weights with the recorded ones."""
    tally = Tally()
    for where, values in identities(r.run).items():
        if "model.path" in values:
            tally.compare(where, "model.path", values["model.path"], r.facts.weights)
    return tally.result("base model", f"fingerprint of {r.config.model.path}, {r.facts.weights[:12]}")


def check_tokens(r: Recomputation) -> Check:
    """Count the truncated prompts again, and compare with the warnings in the log."""
    run, log = r.run, r.run.folder / "log.txt"
    texts = list(dict.fromkeys(prompt.text for prompt in [*run.prompts, *run.held_out]))
    cut = cut_prompts(r.worker, texts, run.prompts[0])
    r.lost = {texts[i] for i in cut.lost}
    counted = [match.groups() for sentence in sentences(cut, texts) if (match := CUT.search(sentence))]
    try:
        logged = CUT.findall(log.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotCheckedError(
            f"log.txt cannot be read: {reason(error)}; of {len(texts)} prompts {counted} are cut"
        ) from None
    recorded, tally = {name: values for *values, name in logged}, Tally()
    for *values, name in counted:
        tally.compare("log.txt", f"prompts cut by {name}", recorded.pop(name, "not mentioned"), values)
    for name, values in recorded.items():
        tally.compare("log.txt", f"prompts cut by {name}", values, "none")
    tally.count += 1
    cuts = ", ".join(f"{name} truncates {values[0]}" for *values, name in counted) or "none is truncated"
    return tally.result("tokens", f"{len(texts)} prompts: {cuts}")


def check_guidance(r: Recomputation) -> Check:
    """Sample an image with the guidance of the run and one with more: they must differ if the run has any."""
    pipe, sampling, tally = r.worker.policy.pipe, r.config.sampling, Tally()
    parameters = inspect.signature(type(pipe).__call__).parameters
    settings = {f"sampling.{name}": getattr(sampling, name) for name in ("guidance_scale",) if name in parameters}
    settings |= {f"sampling.call.{name}": sampling.call[name] for name in ("true_cfg_scale",) if name in sampling.call}
    if not settings:
        raise NotCheckedError(f"{type(pipe).__name__} has no guidance_scale")
    findings = list[str]()
    for key, value in settings.items():
        name, used = key.rpartition(".")[2], value
        if used is None:
            used = parameters[name].default if isinstance(parameters[name].default, int | float) else 1.0
        plain, other = (_one_image(r, {name: scale}) for scale in (used, max(used, 1.0) + 3.0))
        effect = not np.array_equal(plain, other)
        if value is not None and value > 1:
            tally.compare(
                "config.yaml", key, value, value if effect else "no effect", by="of another scale on an image"
            )
        findings.append(f"another {key} than {used:g} gives {'another' if effect else 'the same'} image")
    for step, dump in r.run.dumps.items():
        expected, where = r.run.config(step).sampling.guidance_scale, relative(r.run, dump.tensors)
        for tape in next(dump.trajectories("cpu")).tapes:
            tally.compare(where, "guidance_scale", tape.call.get("guidance_scale"), expected, step, "in config.yaml")
    tally.count += 1
    dumped = f"; the calls of {len(r.run.dumps)} dumps have it" if r.run.dumps else ""
    return tally.result("guidance", f"{', '.join(findings)}{dumped}")


def _one_image(r: Recomputation, scale: Mapping[str, object]) -> np.ndarray:
    """Sample a training prompt with a guidance scale."""
    sample = Sample(replace(r.run.prompts[0], dataset_images=()), 0, 0, 0)

    def sampled(form: CallFormat) -> np.ndarray:
        def run(call: dict[str, object]) -> np.ndarray:
            return find_images(r.worker.policy.pipe(**call, generator=torch.Generator().manual_seed(0)))

        return r.worker.rollout.called(run, [sample], form, "sampling", **scale)

    with model_errors("rollout"):
        return r.worker.rollout.format.attempt("verification", 1, sampled, None)


# --- Held-out images


def check_images(r: Recomputation, count: int) -> Check:
    """Sample `count` kept held-out images of each validation again whose weights are known, and compare the pixels."""
    run, tally, done, left = r.run, Tally(), list[int](), list[int]()
    if not run.validations or not count:
        raise NotCheckedError("the run has no validation" if count else "images=0")
    if run.newest.episode.turns:
        raise NotCheckedError("images of an episode are not sampled again (episode.turns)")
    for step in run.validations:
        config = run.config(max(step, 1))
        has_weights = step == 0 or step in run.checkpoints
        same = (config.validation, config.sampling) == (r.config.validation, r.config.sampling)
        if not has_weights or not same or not (validation := load_validation(run.folder, step)).shown:
            left.append(step)
            continue
        if step:
            _load(r, step)
        _compare_images(r, tally, validation, count)
        done.append(step)
    if not done:
        raise NotCheckedError("the weights of no validation with kept images are known")
    rest = f"; no weights or images of step {', '.join(map(str, left))}" if left else ""
    return tally.result("images", f"pixels of images of step {', '.join(map(str, done))}, sampled again{rest}")


def _load(r: Recomputation, step: int) -> None:
    """Load the weights of a checkpoint."""
    checkpoint = r.run.checkpoints[step]
    numbers = RunState.of(checkpoint).worker
    assert numbers is not None
    whole = r.worker.policy.whole
    r.worker.load(checkpoint.path.resolve() if whole else checkpoint.read("state.safetensors"), numbers, step)


def _compare_images(r: Recomputation, tally: Tally, validation: Validation, count: int) -> None:
    step, file, first, compared = validation.step, f"validation/step_{validation.step:06d}.npz", 0, 0
    lost = r.lost or set() if r.config.data.overlong == "drop" else set()
    held_out = [prompt for prompt in r.run.held_out if prompt.text not in lost]
    batches = plan_validation(r.config, held_out, step)
    texts = [sample.prompt.text for batch in batches for sample in batch]
    tally.compare(file.replace(".npz", ".json"), "prompts", validation.prompts, texts, step, "planned")
    seeds = dict(zip(validation.shown, validation.drawing.seeds if validation.drawing else (), strict=False))
    for batch in batches:
        here = [i for i in validation.shown if first <= i < first + len(batch)]
        if here and compared < count and validation.prompts == texts:
            sampled, _ = r.worker.rollout.validate(batch)
            for i in here:
                tally.compare(file, f"seed of image {i}", seeds.get(i), batch[i - first].seed, step, "planned")
                recorded = validation.pixels[validation.shown.index(i)]
                _compare_pixels(r, tally, f"{file}, image {i}", recorded, still(sampled[i - first]), step)
            compared += len(here)
        first += len(batch)


def _compare_pixels(
    r: Recomputation, tally: Tally, file: str, recorded: np.ndarray, actual: np.ndarray, step: int
) -> None:
    """Compare two images uint8 `[H, W, 3]` up to the levels that another machine may make."""
    if recorded.shape != actual.shape:
        tally.compare(file, "size", list(recorded.shape), list(actual.shape), step)
        return
    apart = np.abs(recorded.astype(int) - actual.astype(int))
    if apart.max() <= r.levels[0] and apart.mean() <= r.levels[1]:
        tally.count, tally.apart = tally.count + 1, max(tally.apart, float(apart.max()) / 255)
        return
    y, x, channel = (int(place) for place in np.unravel_index(int(apart.argmax()), apart.shape))
    tally.compare(file, f"pixel {y},{x},{channel}", int(recorded[y, x, channel]), int(actual[y, x, channel]), step)


# --- Dumped steps


def check_steps(r: Recomputation, count: int, scoring: Scoring) -> Check:
    """Sample, score, credit and train `count` dumped steps again, evenly spaced, and compare each number."""
    dumps = list(r.run.dumps.values())
    if not dumps:
        raise NotCheckedError("the run has no dumps (trainer.dump)")
    if not (count := min(count, len(dumps))):
        raise NotCheckedError("steps=0")
    chosen = [dumps[round(i * (len(dumps) - 1) / max(count - 1, 1))] for i in range(count)]
    tally, exact, again = Tally(), True, "trajectories, scores, "
    for dump in chosen:
        config = configuration(dump, r.run.overrides)
        step = DumpedStep(dump, config, r.cluster, r.worker_of(config))
        if sampled := not dump.record.settings["rollout"].get("service"):
            exact &= _compare_rollout(r, tally, step, scoring)
        else:  # another engine did
            again = ""
        exact &= _compare_update(r, tally, step, counted=sampled)
    steps, words = ", ".join(str(dump.record.step) for dump in chosen), "bitwise equal" if exact else "equal"
    what = f"step {steps} of {len(dumps)} dumped: {again}credit, ratio, gradient, weights"
    return tally.result("steps", (what if tally.wrong else f"{what} {words}") + scoring.left)


def _compare_rollout(r: Recomputation, tally: Tally, step: DumpedStep, scoring: Scoring) -> bool:
    """Sample the tasks of a step again, compare every tensor of their trajectories, and score the images if all equal.

    Returns whether they do. On another machine images differ a little, and a scorer may well see that.
    """
    worker, record, where = step.worker, step.dump.record, relative(r.run, step.dump.tensors)
    limit, before, images = _limit(r, step), (len(tally.wrong), tally.apart), list[Images]()
    tally.apart = 0.0
    worker.evaluations.forward = worker.evaluations.backward = 0
    for number, task in enumerate(record.tasks):
        recorded = worker.trajectories[task.id]
        images.append(worker.sample(replace(recorded.task, lag=record.lag)))
        for k, (tape, like) in enumerate(zip(recorded.tapes, worker.trajectories[task.id].tapes, strict=True)):
            _compare_tapes(tally, f"{where}, {TRAJECTORY}{number}/{k}", tape, like, record.step, limit)
    step.fleet.gather()
    exact = (len(tally.wrong), tally.apart) == (before[0], 0.0)
    if exact and not record.given:
        _compare_scores(r, tally, step, images, scoring)
    tally.apart = max(tally.apart, before[1])
    return exact


def _compare_tapes(tally: Tally, where: str, recorded: Tape, actual: Tape, step: int, limit: float) -> None:
    # the probe, which has shapes only, is that of the first call of a process
    whole = Trajectory(RolloutTask(0, [], ()), (), 0, 0)
    pair = [store(replace(whole, tapes=(replace(tape, probe=None),))) for tape in (recorded, actual)]
    (form, tensors), (expected, others) = pair
    same = form == expected and all(tensors[name].shape == others[name].shape for name in tensors)
    tally.compare(where, "form", "recorded", "recorded" if same else "another one", step)
    for name in tensors if same else ():
        _compare_tensors(tally, f"{where}/{name}", tensors[name], others[name], step, limit)


def _compare_scores(r: Recomputation, tally: Tally, step: DumpedStep, images: list[Images], scoring: Scoring) -> None:
    """Score the images of a step again, and compare with its table of scores."""
    record, where = step.dump.record, relative(r.run, step.dump.path)
    both = zip(record.tasks, images, strict=True)
    pairs = [(task, other) for task, other in both if not task.samples[0].dataset_image]
    samples = [sample for task, _ in pairs for sample in task.samples]
    pixels = [image for _, other in pairs for image in other.pixels]
    of_worker = {name: np.concatenate([other.scores[name] for _, other in pairs]) for name in images[0].scores}
    columns: dict[str, Sequence[float | None]] = {name: values.tolist() for name, values in of_worker.items()}
    columns |= scoring.columns(r.run.config(record.step).reward, "training", samples, pixels)
    for name, values in columns.items():
        recorded = record.by_scorer.get(name, [None] * len(samples))
        for i, (value, other) in enumerate(zip(recorded, values, strict=True)):
            tally.compare(where, f"by_scorer.{name}[{i}]", value, other, record.step, "scored again", 1e-6)


def _compare_tensors(
    tally: Tally, where: str, recorded: torch.Tensor, actual: torch.Tensor, step: int, tolerance: float
) -> None:
    """Compare two tensors by the element that differs most."""
    a, b = (tensor.detach().cpu().double().flatten() for tensor in (recorded, actual))
    apart = torch.where(a.isnan() & b.isnan() | (a == b), 0.0, (a - b).abs()).nan_to_num(torch.inf)
    largest = max(1.0, float(a.nan_to_num().abs().max())) if len(a) else 1.0
    if not len(a) or float(apart.max()) <= tolerance * largest:
        tally.count, tally.apart = tally.count + 1, max([tally.apart, *(float(apart.max()) / largest for _ in a[:1])])
        return
    i = int(apart.argmax())
    place = [int(n) for n in np.unravel_index(i, tuple(recorded.shape) or (1,))]
    tally.compare(where, f"element {place}", float(a[i]), float(b[i]), step)


def _limit(r: Recomputation, step: DumpedStep) -> float:
    return default_tolerance(step.dump.record.environment.dtype) if r.tolerance is None else r.tolerance


def _compare_update(r: Recomputation, tally: Tally, step: DumpedStep, counted: bool) -> bool:
    """Train on a step again; returns whether all numbers are bitwise equal. `counted`: with its evaluations."""
    dump, record = step.dump, step.dump.record
    where, number, limit = relative(r.run, dump.path), record.step, _limit(r, step)
    try:
        replayed = step.train()
    except GerlError as error:  # of a replay that is not possible
        tally.compare(
            relative(r.run, dump.tensors), "trajectories", "recorded", str(error), number, "said their replay"
        )
        return False
    compared = compare(step, replayed, limit)
    for n in compared.numbers:
        if n.name == CREDIT:
            _compare_tensors(
                tally, f"{relative(r.run, dump.tensors)}, {CREDIT}", dump.tensor(CREDIT), replayed.credit, number, limit
            )
        elif n.within(limit):
            tally.count += 1
        else:
            tally.compare(where, n.name, n.run, n.replay, number)
    if compared.weights is False and all(n.difference == 0 for n in compared.numbers):
        tally.compare(where, "weights", record.weights, replayed.weights, number)
    deviation = replayed.metrics.get("actor/ratio_deviation")
    if deviation is not None:
        most = max(1e-6, ratio_limit(step.config.actor, record.environment.dtype != "float32"))
        tally.compare(where, "actor/ratio_deviation", min(deviation, most), deviation, number, "but 0 is expected")
    row = r.run.row_of.get(number, {})
    counted &= compared.exact and not r.run.config(number).lockstep  # ranks in lockstep count their padding
    for name in ("evaluations/forward", "evaluations/backward") if counted else ():
        if row.get(name) is not None:
            tally.compare(METRICS, name, row[name], replayed.metrics[name], number)
    return compared.exact

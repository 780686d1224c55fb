"""Validate: sample and score the held-out prompts, save the images, compare with the first validation; looks."""

import logging
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from gerl.algorithms.planning import VALIDATION_SEED, micro_batches, plan_validation, sampled_steps
from gerl.cluster import Pending
from gerl.config import Config, ValidationConfig
from gerl.config.held_out import Criterion
from gerl.errors import GerlError
from gerl.progress import Progress, waiting
from gerl.protocol import Images, ModelFacts, Sample, Scores
from gerl.rewards.rollouts import PendingRollout
from gerl.rewards.total import thresholds
from gerl.run.attempts import SUCCESS, held_out_metric
from gerl.run.guard import LOOKED_AT, look_rows
from gerl.run.validation import (
    Estimate,
    SamplingRecord,
    Validation,
    evenly,
    held_out_words,
    judged,
    load_validation,
    paired_gains,
    remove_images,
    save_validation,
    validation_steps,
)
from gerl.trainer.run import Run
from gerl.trainer.step import Metrics, Step, check_failures, failure_text, mean, reward_metrics
from gerl.utils.condition_images import COLUMNS
from gerl.utils.files import finite
from gerl.utils.pages import grid, still
from gerl.utils.quotes import quoted_texts
from gerl.workers.fleet import LocalFleet
from gerl.workers.image_statistics import unlikeness

logger = logging.getLogger(__name__)
SHEET = 32  # images of the sheet in samples/
Looks = Mapping[str, np.ndarray]  # statistic -> its value for each image


def validate(run: Run, step: Step) -> None:
    """Sample and score the held-out prompts and save the result: fixed noise, ODE sampling, averaged weights."""
    run.rollouts.sync(run.state.step, step)
    with step.watch("validation"):
        held_out = run.prompted(step.number, run.plan.held_out, held_out=True)
        fleet, batches = run.fleet, plan_validation(run.config, held_out, step.number)
        while True:  # once, unless an extension samples further images from these
            scores, images = _sampled(run, fleet, batches)
            later = next((more for more in run.notify("continued", step, scores, images) if more is not None), None)
            if later is None:
                break
            fleet, batches = later
        _conclude(run, step, scores, images, batches)


def look(run: Run, step: Step) -> None:
    """Let the base model alone judge some images of the first validation, sampled again; more if an extension asks."""
    steps = validation_steps(run.run_dir)
    first = load_scores(run.run_dir, steps[0]) if steps else None
    planned = [sample for batch in plan_validation(run.config, run.plan.held_out, step.number) for sample in batch]
    if first is None or not judged(first, first) or [sample.prompt.text for sample in planned] != first.prompts:
        return  # the pipeline cannot be judged, or the run was resumed with other prompts
    run.rollouts.sync(run.state.step, step)
    with step.watch("look"):
        rows = look_rows(first)
        for count in (LOOKED_AT, len(rows)):
            chosen = evenly(rows, count)
            seen, pixels = _looked(run, step.number, chosen, [planned[row] for row in chosen])
            step.look = seen
            if not any(run.notify("looked", step)):
                break
    stills = [still(image) for image in pixels] if step.signals else []  # to show them
    step.metrics |= {f"look/{name}/mean": mean(v) for name, v in judged(seen, first.part(seen.ids)).items()}
    unscored = list[float | None]([None] * len(seen.prompts))
    save_validation(
        run.run_dir, step.number, seen.prompts, stills, unscored, {}, ids=seen.ids, looks=seen.looks, name="look"
    )


def _looked(run: Run, number: int, rows: list[int], samples: Sequence[Sample]) -> tuple[Validation, list[np.ndarray]]:
    """Sample the `rows` of a validation; returns them without scores, and their pixels."""
    parts = len(run.fleet.samplers.workers)  # so few images are divided among all of them
    batches = micro_batches(samples, min(run.config.validation.micro_batch_size, -(-len(samples) // parts)))
    dispatch, hang_after = run.fleet.validate(batches), run.fleet.samplers.hang_after
    rollout = PendingRollout(run.rewards, batches, dispatch, hang_after, held_out=True, scored=False)
    with waiting(f"looking at {len(samples)} held-out images", run.rollouts.progress_of(rollout)):
        rollout.wait_until_sampled()
    pixels, looks = chosen_pixels(rollout.images, batches, range(len(samples)))
    columns = {name: [finite(float(v)) for v in values] for name, values in looks.items() if name != "thumbnail"}
    prompts, unknown = [sample.prompt.text for sample in samples], list[float | None]([None] * len(samples))
    return Validation(number, prompts, unknown, {}, [], [], None, rows, columns), pixels


def _sampled(
    run: Run, fleet: LocalFleet, batches: Sequence[Sequence[Sample]]
) -> tuple[Scores, Sequence[Pending[Images]]]:
    """Sample and score held-out micro-batches."""
    what, count, scores = f"validating {len(run.plan.held_out)} prompts", sum(map(len, batches)), Scores()
    bar = Progress(count, disable=not run.config.logger.progress, unit="image", what=what)
    dispatch, hang_after = fleet.validate(batches), fleet.samplers.hang_after
    rollout = PendingRollout(run.rewards, batches, dispatch, hang_after, held_out=True, progress=bar.update)
    with waiting(what, run.rollouts.progress_of(rollout)), bar:
        tables = rollout.finish()
    for table in tables:
        scores.add(table)
    return scores, rollout.images


def _conclude(
    run: Run, step: Step, scores: Scores, images: Sequence[Pending[Images]], batches: Sequence[Sequence[Sample]]
) -> None:
    """Save and log the validation after a step, and notify the extensions."""
    config, folder = run.config, run.run_dir
    shown = shown_images(len(scores.samples), config.validation)
    pixels, looks = chosen_pixels(images, batches, shown)
    model, device = run.fleet.model, run.fleet.cluster.device
    step.validation, sheet = keep_images(folder, step.number, scores, pixels, shown, model, device, looks)
    run.picture(step.number, "validation", sheet)
    steps = validation_steps(folder)
    # the first validation had the same noise; a damaged one is not compared
    first = load_scores(folder, steps[0]) if steps else None
    gains = paired_gains(first, step.validation) if first is not None and first.step < step.number else {}
    metrics, reward = conclude_validation(config, scores, step.number, gains.get("reward"))
    judgement = {name: mean(values) for name, values in judged(step.validation, first or step.validation).items()}
    step.metrics |= metrics | gain_metrics(gains) | {f"val/{name}/mean": value for name, value in judgement.items()}
    if judgement:
        timed = [pending.result() for pending in images]
        share = sum(part.judge_seconds for part in timed) / sum(part.seconds for part in timed)
        step.metrics["timing/judge_share"] = share  # of the samplers' time in validation
    finite_metrics = {n: v for n, v in step.metrics.items() if n.startswith("val/") and math.isfinite(v)}
    run.history.add_validation(step.validation, reward, finite_metrics, gains.get("reward"))
    run.notify("validated", step)
    if config.validation.keep is not None:
        criterion, success = Criterion.parse(config.checkpoint.best), thresholds(config.reward)

        def rank(validation: Validation) -> float | None:
            value = held_out_metric(validation, criterion.metric, success)
            return None if value is None else criterion.rank(value)

        remove_images(folder, config.validation.keep, rank)


def load_scores(run_dir: Path, step: int, name: str = "step") -> Validation | None:
    """Read a validation, or a look, without its images; None if it cannot be read."""
    try:
        return load_validation(run_dir, step, pictures=False, name=name)
    except GerlError:
        return None


def shown_images(count: int, validation: ValidationConfig) -> list[int]:
    """Return which of `count` held-out images are saved: all of `validation.images` prompts; None: of all.

    The file is split into as many equal parts, and one prompt is chosen at random from each, the same ones at every
    validation: they represent the file regardless of its order.
    """
    each, wished = validation.images_per_prompt, validation.images
    prompts = range(count // each)
    chosen = prompts if wished is None else sampled_steps(prompts, wished, "shown", VALIDATION_SEED)
    return [prompt * each + k for prompt in chosen for k in range(each)]


def chosen_pixels(
    sampled: Sequence[Pending[Images]], batches: Sequence[Sequence[Sample]], shown: Sequence[int]
) -> tuple[list[np.ndarray], Looks]:
    """Return the uint8 pixels of the images `shown` (ascending), and the statistics of all sampled images."""
    copies: list[np.ndarray] = []
    looks: list[Looks] = []
    start = 0
    for pending, batch in zip(sampled, batches, strict=True):
        images = pending.result()
        first, last = bisect_left(shown, start), bisect_left(shown, start + len(batch))
        copies += [np.array(images.pixels[i - start]) for i in shown[first:last]]  # copies
        looks.append(images.statistics or {})
        start += len(batch)
    return copies, {name: np.concatenate([part[name] for part in looks]) for name in looks[0]}


def keep_images(
    run_dir: Path,
    step: int,
    scores: Scores,
    pixels: Sequence[np.ndarray],
    shown: Sequence[int],
    model: ModelFacts,
    device: str,
    looks: Looks,
) -> tuple[Validation, Image.Image]:
    """Write a validation with the `pixels` of the images `shown`; returns it without images, and a sheet of them."""
    texts = [sample.prompt.text for sample in scores.samples]
    chosen = [scores.samples[i] for i in shown]
    pictures = [{n: v for n in COLUMNS if (v := s.prompt.metadata.get(n)) and n in model.arguments} for s in chosen]
    seeds, alone = [sample.seed for sample in chosen], not any(sample.prompt.turn for sample in chosen)
    video, loaded = pixels[0].ndim == 4, (model.scheduler, model.lora_lines, model.components)
    drawing = SamplingRecord(seeds, pictures, device, video, *loaded)
    stills = [still(image) for image in pixels]
    ids = [sample.prompt.id for sample in scores.samples]
    columns = {name: [finite(float(v)) for v in values] for name, values in _columns(looks, ids).items()}
    ids = ids if len(set(ids)) < len(ids) else []
    save_validation(
        run_dir, step, texts, stills, scores.totals, scores.by_scorer, shown, drawing if alone else None, ids, columns
    )
    firsts = [k for k, i in enumerate(shown) if scores.samples[i].index == 0]
    sheet = [firsts[k] for k in sampled_steps(range(len(firsts)), SHEET, "sheet", VALIDATION_SEED)]
    failed = set(scores.failed)
    captions = [caption(texts[i], scores.totals[i], i in failed) for i in (shown[k] for k in sheet)]
    validation = Validation(step, texts, scores.totals, scores.by_scorer, [], [], None, ids, columns)
    return validation, grid([stills[k] for k in sheet], captions, columns=4)


def conclude_validation(
    config: Config, scores: Scores, step: int, gain: Estimate | None = None
) -> tuple[Metrics, float | None]:
    """Log a validation; returns metrics and mean reward (None: one is missing). May raise `RewardError`."""
    metrics, count, failed = reward_metrics(scores, config.reward, validation=True), scores.measured, scores.unscored
    if not count:
        logger.info(
            "step %d: %d held-out prompts are sampled; no scorer with a weight scores them (people vote in "
            "training only)",
            *(step, len(scores.samples)),
        )
        return metrics, None
    if not failed:
        over = ""
        if gain is not None and not math.isnan(gain.low):
            over = (
                f", {gain.mean:+z.3f} over the first validation (95 % interval {gain.low:+z.3f} to {gain.high:+z.3f})"
            )
        images = held_out_words(count, config.validation.images_per_prompt)
        over += "".join(success_words(name, metrics) for name in config.reward.scorers)
        logger.info("step %d: reward on %s %.3f%s", step, images, metrics["val/reward/mean"], over)
        return metrics, metrics["val/reward/mean"]
    i = scores.failed[0]
    first = failure_text(f"held-out {scores.samples[i].prompt.text!r}", scores.failures[i])
    logger.warning(
        "step %d: reward on %d of %s %.3f, %d not scored; it is excluded from comparisons with other validations; %s",
        *(step, count - failed, held_out_words(count, config.validation.images_per_prompt), mean(scores.totals)),
        *(failed, first),
    )
    totals = [v for k, v in enumerate(scores.totals) if v is not None or k in scores.failed]
    check_failures(totals, first, config.reward, f"held-out images of step {step}", "let such prompts be skipped")
    return metrics, None


def success_words(name: str, metrics: Metrics) -> str:
    """Describe the success rate of the scorer `name` with its interval; empty without one."""
    key = f"val/{name}/{SUCCESS}"
    if math.isnan(metrics.get(f"{key}_low", math.nan)):
        return ""
    low, high = metrics[f"{key}_low"], metrics[f"{key}_high"]
    return f"; {name}/{SUCCESS} {metrics[key]:.3f} (95 % interval {low:.3f} to {high:.3f})"


def gain_metrics(gains: Mapping[str, Estimate]) -> Metrics:
    """Return `val/NAME/gain` over the first validation, and its 95 % interval."""
    metrics: Metrics = {}
    for name, gain in gains.items():
        parts = {"gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high}
        metrics |= {f"val/{name}/{part}": value for part, value in parts.items() if not np.isnan(value)}
    return metrics


def _columns(looks: Looks, ids: Sequence[int]) -> Looks:
    """Return the image statistics, with the dissimilarity of the images in place of their thumbnails."""
    columns = dict(looks)
    if (thumbnails := columns.pop("thumbnail", None)) is not None:
        columns["unlike_own"], columns["unlike_others"] = unlikeness(thumbnails, ids)
    return {name: values for name, values in columns.items() if np.isfinite(values).any()}


def training_sheet(
    samples: Sequence[Sample], pixels: Sequence[np.ndarray], totals: Sequence[float | None]
) -> Image.Image:
    """Draw a sheet of a micro-batch of training images with their rewards."""
    captions = [caption(s.prompt.text, total) for s, total in zip(samples, totals, strict=False)]
    stills = [still(image) for image in pixels[:SHEET]]
    return grid(stills, captions[:SHEET], columns=4)


def caption(text: str, total: float | None, failed: bool = True) -> str:
    """Return the caption of an image: its reward, and the text to render if the prompt has one, else the prompt.

    `failed`: whether a total of None means that scoring failed, not that no scorer applies.
    """
    texts, _ = quoted_texts(text)
    reward = f"{total:.2f} " if total is not None else "failed " if failed else ""
    return f"{reward}{texts[0] if texts and texts[0] else text}"

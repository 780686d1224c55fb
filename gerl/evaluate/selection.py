"""Choice of a run's checkpoint on other prompts than those whose results are reported."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gerl.config.changes import scorers_of
from gerl.config.held_out import REWARD
from gerl.errors import GerlError
from gerl.evaluate.loras import find_lora
from gerl.protocol import Prompt
from gerl.run.attempts import held_out_metric
from gerl.run.checkpoint import Checkpoint
from gerl.run.choice import comparable_checkpoints, criterion_of
from gerl.run.settings import get
from gerl.run.validation import Validation, load_validation

LEAST = 8  # fewest prompts of each part
SEED = 0  # of the split: fixed, so that evaluations of other runs report the same prompts


@dataclass(frozen=True)
class Selection:
    """LoRAs and the prompts to report.

    words: which checkpoint was chosen for a run. aside: number of prompts left to the choice. remarks: what belongs
    beside the results.
    """

    loras: dict[str, Path]
    prompts: list[Prompt]
    words: dict[str, str] = field(default_factory=dict)
    aside: int = 0
    remarks: tuple[str, ...] = ()


def select(
    loras: Mapping[str, Path], runs: Mapping[str, Path], prompts: Sequence[Prompt], whole: str | None = None
) -> Selection:
    """Choose the checkpoints of `runs`, by the name of the LoRA, and the prompts to report.

    If a run's checkpoint is the best of several on its held-out prompts, and `prompts` are among them, a random half of
    `prompts` is used for the choice and not reported. All are reported, with a remark, if a split is
    impossible, or if `whole` gives a reason against it.
    """
    several = {name: checkpoints for name, run in runs.items() if len(checkpoints := comparable_checkpoints(run)) > 1}
    reported_prompts, best = list(prompts), {}
    try:
        stored = {
            name: {c.step: _validation(runs[name], c.step) for c in checkpoints}
            for name, checkpoints in several.items()
        }
        seen = {text for by_step in stored.values() for validation in by_step.values() for text in validation.prompts}
        shared = list(dict.fromkeys(prompt.text for prompt in prompts if prompt.text in seen))
        if not shared:
            return Selection(dict(loras), reported_prompts)
        if whole is None and len(shared) < 2 * LEAST:
            whole = f"{len(shared)} are too few to split, it takes {2 * LEAST}"
        order = np.random.default_rng(SEED).permutation(len(shared))
        aside = {shared[i] for i in order[: len(shared) // 2]}
        if whole is None:
            reported_prompts = [prompt for prompt in prompts if prompt.text not in aside]
            reported = {prompt.text for prompt in reported_prompts}
            best = {name: _best(checkpoints, stored[name], reported) for name, checkpoints in several.items()}
    except GerlError as error:
        whole = str(error)
    if whole is not None:
        remarks = [
            f"{name}: its checkpoint was chosen among {len(checkpoints)} by its {_what(checkpoints)} on held-out "
            f"prompts that are also reported here ({whole}): expect a smaller gain on new prompts."
            for name, checkpoints in several.items()
        ]
        return Selection(dict(loras), list(prompts), remarks=tuple(remarks))
    files = {name: find_lora(str(checkpoint.path))[0] for name, (checkpoint, _) in best.items()}
    words = {name: text for name, (_, text) in best.items()}
    remarks = [f"{name}: the checkpoint of {text}." for name, text in words.items()]
    remarks.append(
        f"The results are of the {len(reported_prompts)} prompts that had no part in this choice; split=false reports "
        f"all {len(prompts)}."
    )
    return Selection({**loras, **files}, reported_prompts, words, len(prompts) - len(reported_prompts), tuple(remarks))


def _what(checkpoints: Sequence[Checkpoint]) -> str:
    """Name what the checkpoints of a run are chosen by."""
    metric = criterion_of(checkpoints[-1]).metric
    return "reward" if metric == REWARD else re.sub("/gain$", "/mean", metric)


def _validation(run: Path, step: int) -> Validation:
    """Read a validation. Raises `GerlError` if it is missing, damaged or incomplete."""
    with contextlib.suppress(GerlError):
        validation = load_validation(run, step, pictures=False)
        if None not in validation.rewards:
            return validation
    raise GerlError(f"the rewards of step {step} in {run / 'validation'} are missing, damaged or incomplete")


def _best(
    checkpoints: Sequence[Checkpoint], stored: Mapping[int, Validation], reported: set[str]
) -> tuple[Checkpoint, str]:
    """Return the best checkpoint on the held-out prompts that are not reported, the newest of equals, and words.

    Raises `GerlError` if these are too few, or their part of the metric is unknown.
    """
    criterion, others = (
        criterion_of(checkpoints[-1]),
        {text for validation in stored.values() for text in validation.prompts},
    )
    scorers = scorers_of(get(checkpoints[-1].state, "settings") or {})
    success = {name: limit for name, scorer in scorers.items() if (limit := scorer.get("success")) is not None}
    others -= reported
    values = {
        step: held_out_metric(validation, criterion.metric, success, others) for step, validation in stored.items()
    }
    if unknown := [step for step, value in values.items() if value is None]:
        raise GerlError(f"{criterion.metric} of step {unknown[0]} cannot be computed for a part of the prompts")
    means = {step: value for step, value in values.items() if value is not None}
    best = max(checkpoints, key=lambda c: (criterion.rank(means[c.step]), c.step))
    count = len(others & set(stored[best.step].prompts))
    if count < LEAST:
        raise GerlError(f"{count} are too few to choose by, it takes {LEAST}")
    words = (
        f"step {best.step}, the best of {len(checkpoints)} on {count} held-out prompts: {_what(checkpoints)} "
        f"{means[best.step]:.3f}"
    )
    keep = get(best.state, "settings", "checkpoint", "keep")
    if isinstance(keep, int) and len(checkpoints) > keep and best is checkpoints[0]:
        words += (
            f" (kept as the best on all prompts when others were deleted, checkpoint.keep={keep}, which favours it)"
        )
    return best, words

"""Scoring images of a run again, with every scorer that can be used here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from gerl.cluster import Cluster, Pending
from gerl.config import ClusterConfig, RewardConfig, ScorerConfig
from gerl.config.blocks import RunPart
from gerl.errors import GerlError
from gerl.protocol import Images, Sample
from gerl.rewards.manager import RewardManager
from gerl.rewards.total import active_scorers
from gerl.run.validation import load_validation
from gerl.verify.findings import Check, NotCheckedError, Tally
from gerl.verify.recorded import RunRecord


class Scoring(ExitStack):
    """Scorers in use, each started once; `reasons`: by name why one cannot be used."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, str] = {}
        self._managers: dict[str, RewardManager] = {}

    @property
    def left(self) -> str:
        """Say which scorers are not used, and why."""
        return "".join(f"; the scorer {name} is not used: {why}" for name, why in self.reasons.items())

    def columns(
        self, reward: RewardConfig, part: RunPart, samples: Sequence[Sample], pixels: Sequence[np.ndarray]
    ) -> dict[str, list[float | None]]:
        """Return the scores of images by column, from the scorers of a `part` of a run; images that fail have None."""
        columns: dict[str, list[float | None]] = {}
        for name, scorer in active_scorers(reward.scorers, part).items():
            if name in self.reasons:
                continue
            try:
                scoring = self.manager(reward, name, scorer).open([samples], held_out=True)
                scoring.add(0, Pending("image reader", value=Images(0, list(pixels), 0.0)))
                (scores,) = scoring.finish()
            except (GerlError, NotCheckedError) as error:
                self.reasons[name] = str(error)
                continue
            if failed := next((failure for causes in scores.failures for failure in causes), None):
                self.reasons[name] = failed.reason
            else:
                columns |= scores.by_scorer
        return columns

    def manager(self, reward: RewardConfig, name: str, scorer: ScorerConfig) -> RewardManager:
        """Return the manager of a single scorer; raises `NotCheckedError` if images alone cannot be scored."""
        key = f"{name} {scorer}"
        if key not in self._managers:
            launcher = ClusterConfig(launcher="ray" if scorer.env else "local", num_workers=1)
            alone = replace(reward, scorers={name: replace(scorer, during="both", weight=1.0)})
            self._managers[key] = RewardManager(alone, self.enter_context(Cluster(launcher)))
        manager = self._managers[key]
        if name in manager.people:
            raise NotCheckedError("people score, in training only")
        if name in manager.on_worker:
            raise NotCheckedError("it needs the latents of the images")
        return manager


def check_scores(run: RunRecord, scoring: Scoring, tolerance: float) -> Check:
    """Score the kept images of validations again."""
    tally = Tally()
    if not run.validations:
        raise NotCheckedError("the run has no validation")
    by_text = {prompt.text: prompt for prompt in run.held_out}
    for step in run.validations:
        validation, where = load_validation(run.folder, step), f"validation/step_{step:06d}.json"
        if validation.drawing is not None and validation.drawing.video:
            raise NotCheckedError("of videos only some frames are kept")
        places = [(i, k) for k, i in enumerate(validation.shown) if validation.prompts[i] in by_text]
        if not places:
            continue
        samples = [Sample(by_text[validation.prompts[i]], i, 0, step) for i, _ in places]
        reward = run.config(max(step, 1)).reward
        columns = scoring.columns(reward, "validation", samples, [validation.pixels[k] for _, k in places])
        for name, values in columns.items():
            recorded = validation.by_scorer.get(name, [None] * len(validation.prompts))
            for (i, _), value in zip(places, values, strict=True):
                tally.compare(where, f"{name} of image {i}", recorded[i], value, step, "scored again", tolerance)
    if not tally.count:
        raise NotCheckedError(f"no kept image can be scored here{scoring.left}")
    return tally.result("scores", f"kept held-out images, scored again{scoring.left}")

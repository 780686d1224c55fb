"""GARDO (arXiv 2512.24138): apply the KL penalty only to the samples whose reward is uncertain (algorithm.kl_share).

A sample is uncertain if the reward ranks it high and other scorers do not. With `w(R)` its win rate (the share of
the step's other images with a lower score R), the doubt is `w(reward) - mean w(R_n)` over the watched R_n.
Of the images with a doubt of at least 0, those beyond the `1 - share` quantile are held. The share follows the doubt: a
tenth more where its mean is above all of the last 20 steps, a tenth less where it is below all of them.

After the authors' code (tinnerhrhe/GARDO 1cc77fb, scripts/train_sd3_grpo_gardo.py, lines 219-238 and 826-837), but for
the sign: there ranks count from the best image, so that those are held that the reward ranks low and the others high,
which is the opposite of what the paper argues for.
"""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from gerl.config import Config
from gerl.config.configuration import reference_scorers
from gerl.errors import CheckpointError
from gerl.trainer.run import Extension, Run
from gerl.trainer.step import Step, column

STEP, LEAST, MOST, WINDOW = 0.1, 0.2, 2.0, 20  # change of the share, its bounds as parts of the first one, steps kept


def doubts(rewards: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return win rate by reward `[B]` minus mean win rate by other scores `[B, K]`; NaN where these are all NaN."""
    is_scored = ~others.isnan()
    rates = torch.full_like(others, torch.nan, dtype=torch.float64)
    for k in range(others.shape[1]):
        rates[is_scored[:, k], k] = _win_rates(others[is_scored[:, k], k])
    return _win_rates(rewards) - rates.nanmean(1)


def _win_rates(values: torch.Tensor) -> torch.Tensor:
    """Return the share of the others that each of `values` `[B]` exceeds; ties count half, exact in fp64."""
    above = (values[:, None] > values).double().sum(1)
    equal = (values[:, None] == values).double().sum(1) - 1  # without itself
    return (above + equal / 2) / max(len(values) - 1, 1)


def held(doubt: torch.Tensor, share: float) -> torch.Tensor:
    """Return the images `[B]` (bool) whose doubt is at least 0 and beyond the `1 - share` quantile of those."""
    candidates = doubt >= 0
    if not candidates.any():
        return candidates
    return candidates & (doubt > doubt[candidates].quantile(1 - share))


class KLGate(Extension):
    """Set `step.kl_weight`: 1 for the samples penalised by the KL, else 0."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.gate = Gate(config.algorithm.kl_share)

    @classmethod
    def wanted(cls, config: Config) -> bool:
        return config.algorithm.kl_share < 1

    def rewarded(self, run: Run, step: Step) -> None:
        assert step.rewards is not None
        rows = list(step.rewards.rows)
        asked = reference_scorers(self.config.algorithm, self.config.reward.scorers)
        others = torch.stack([column(step.scores, name, rows) for name in asked], 1)
        step.kl_weight = torch.zeros(len(step.scores.samples))
        step.kl_weight[rows] = self.gate.choose(step.rewards.totals, others)
        step.metrics["group/kl_share"] = float(step.kl_weight[rows].mean())
        step.metrics["group/kl_share_of_doubted"] = self.gate.share

    def state(self) -> Any:
        return self.gate.state()

    def load_state(self, state: Any) -> None:
        self.gate.load_state(state)


class Gate:
    """The adaptive share of uncertain samples that are penalised."""

    def __init__(self, share: float) -> None:
        self.first, self.share = share, share
        self.past: list[float] = []  # mean doubt of the latest steps

    def choose(self, rewards: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return 1 for each penalised image of a step, else 0: `[B]`; arguments as `doubts`."""
        doubt = doubts(rewards, others)
        candidates = doubt[doubt >= 0]
        if len(candidates):
            self._follow(float(candidates.mean()))
        return held(doubt, min(1.0, self.share)).float()

    def _follow(self, mean: float) -> None:
        if self.past and mean > max(self.past):
            self.share *= 1 + STEP
        elif self.past and mean < min(self.past):
            self.share *= 1 - STEP
        self.share = min(max(self.share, LEAST * self.first), MOST * self.first)
        self.past = [*self.past, mean][-WINDOW:]

    def state(self) -> dict[str, Any]:
        """As JSON, for `load_state`."""
        return {"share": self.share, "past": list(self.past)}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Restore what `state` returned; None: the initial state. Raises `CheckpointError` if it has another form."""
        try:
            values = {"share": self.first, "past": []} if state is None else state
            share = TypeAdapter(float).validate_python(values["share"])
            past: Sequence[float] = TypeAdapter(list[float]).validate_python(values["past"])
        except (ValidationError, KeyError, TypeError):
            raise CheckpointError("state.json has no usable extensions.gardo: share and past doubts") from None
        self.share, self.past = share, list(past)

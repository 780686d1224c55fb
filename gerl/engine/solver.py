"""The deterministic steps of a rollout: to which order each is taken (solver), and how far it goes (compression)."""

from __future__ import annotations  # of diffusers, which the driver of a run does without

import math
from itertools import pairwise
from typing import TYPE_CHECKING, get_args

import torch

from gerl.config.choices import SolverName
from gerl.engine.kernels import Rule

if TYPE_CHECKING:
    from diffusers import SchedulerMixin

SOLVERS: tuple[str, ...] = get_args(SolverName)

Span = tuple[int, int]  # of step k: from the sigma of step k + start to that of step k + end
ONE_STEP: Span = (0, 1)


def compressed_spans(first: int, total: int, compression: float) -> dict[int, Span]:
    """How far the steps `first` to `total - 1` go if only `ceil(compression * m)` of these m are taken.

    The steps that are taken are spread evenly, begin with `first`, and each goes as far as the next one begins, the
    last to the end. The others have length 0, at the sigma that the one before them reached (MixGRPO-Flash, arXiv
    2507.21802).
    """
    m = total - first
    taken = max(math.ceil(compression * m - 1e-9), 1)  # 0.55 * 100 is 55.00000000000001
    starts = [first + round(j * m / taken) for j in range(taken + 1)]
    return {
        k: (0 if k == here else following - k, following - k)
        for here, following in pairwise(starts)
        for k in range(here, following)
    }


class OdeSolver:
    """Takes deterministic steps; remembers the last one of each scheduler.

    `euler` is the scheduler's own step (`rule.mean`). `dpm2` is DPM-Solver++(2M), arXiv 2211.01095, algorithm 2, for
    flow matching: with `lambda = log((1 - s) / s)`, `h = lambda' - lambda` and the clean latents `x0h` predicted here
    and at the last step,

        D = (1 + w) x0h - w x0h_last,  w = h / (2 h_last),  x' = (1 - s') D + s' (x - (1 - s) D) / s

    It is of first order, hence `euler`, without a last step, where lambda is infinite (a last step from sigma 1, a step
    to sigma 0), and after noise was added.
    """

    def __init__(self, name: str) -> None:
        self.second_order = name == "dpm2"
        self._last: dict[int, tuple[float, torch.Tensor]] = {}  # scheduler -> sigma and x0h of its last step

    def step(self, scheduler: SchedulerMixin, rule: Rule, x: torch.Tensor, model_output: torch.Tensor) -> torch.Tensor:
        """The next latents, fp32, shape of `x`."""
        last = self._last.get(id(scheduler))
        self.observe(scheduler, rule, x, model_output)
        s, s_next = rule.sigma, rule.sigma_next
        if last is None or s_next <= 0 or not s < last[0] < 1:
            return rule.mean(x, model_output)
        x0 = self._last[id(scheduler)][1]
        w = 0.5 * (_log_snr(s_next) - _log_snr(s)) / (_log_snr(s) - _log_snr(last[0]))
        ratio = s_next / s  # (1 - s') - s' (1 - s) / s = 1 - s' / s
        return ratio * x.float() + (1 - ratio) * ((1 + w) * x0 - w * last[1])

    def observe(self, scheduler: SchedulerMixin, rule: Rule, x: torch.Tensor, model_output: torch.Tensor) -> None:
        """Take note of a step of `scheduler`; after noise the latents are not on the path of earlier steps."""
        if rule.std > 0:
            self._last.pop(id(scheduler), None)
        elif self.second_order and rule.dt < 0:
            self._last[id(scheduler)] = (rule.sigma, rule.clean(x, model_output))


def _log_snr(sigma: float) -> float:
    return math.log((1 - sigma) / sigma)

"""Health checks: signs that a run cannot learn or has stopped learning, with remedies."""

import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

from gerl.config.changes import flat_settings
from gerl.run.settings import differentiates, get, is_stochastic

SENTENCES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("health.yaml").read_text(encoding="utf-8"))
Row = Mapping[str, Any]
Said = Iterator[tuple[str, str]]  # kind and sentence
PATIENCE = 5  # consecutive steps without a signal, or with one constant reward, before a warning
LARGE_WEIGHT = 10.0  # of a LoRA; typical weights are below 1
ABSURD_WEIGHT = 1000.0  # the model is destroyed long before
BLOCK, FALL = 20, 4.0  # steps per average, and the relevant fall in standard errors
BLANK = 0.5  # share of single-colour images
BOUND = 0.9  # share of off-policy ratios outside the trust region
DOMINANT = 0.9  # share of one timestep in the squared gradient norm


@dataclass(frozen=True)
class Finding:
    """A reason why a run does not learn, with the sentence of the last step that showed it."""

    kind: str
    step: int
    text: str


class Health:
    """Checks of consecutive rows of `metrics.jsonl`, its only state: a resumed run finds the same."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.eps, self.differentiates = get(config, "actor", "eps"), differentiates(config)
        scorers = get(config, "reward", "scorers") or {}
        self.scorers = [name for name in scorers if get(scorers, name, "weight") != 0]  # that count in the reward
        self.last: Row = {}
        self.findings: dict[str, Finding] = {}  # the latest of each kind
        self._said: dict[str, int] = {}  # kind -> step
        self._dominated = 0  # consecutive steps whose gradient came from one timestep
        self._rewards: list[float] = []
        self._blocks: list[tuple[float, float, int]] = []  # mean, standard error, last step
        self._outside: list[float] = []  # latest steps: share of off-policy ratios outside the trust region

    def measure(
        self,
        by_scorer: Mapping[str, Sequence[float | None]],
        signal: bool,
        groups: Sequence[Sequence[float | None]] = (),
    ) -> dict[str, float]:
        """Return the `health/` metrics of the next step: for how many consecutive steps something has been wrong.

        by_scorer: scores of the step's images. signal: whether any credit is not 0. groups: rewards by group.
        """
        metrics = {"health/no_signal_steps": 0.0 if signal else 1.0 + self.last.get("health/no_signal_steps", 0.0)}
        for name in self.scorers:
            values = [value for value in by_scorer.get(name, []) if value is not None]
            if not values:
                continue
            key, before = f"health/{name}/constant_steps", number(self.last, f"reward/{name}/mean")
            same = before is not None and math.isclose(before, values[0], rel_tol=1e-9, abs_tol=1e-12)
            count = 1.0 + (self.last.get(key, 0.0) if same else 0.0)
            metrics[key] = 0.0 if min(values) < max(values) else count
        return metrics | self._stuck(groups)

    def _stuck(self, groups: Sequence[Sequence[float | None]]) -> dict[str, float]:
        rewards = [[value for value in group if value is not None] for group in groups]
        scored = [group for group in rewards if len(group) > 1]
        if not scored:
            return {}
        best = max(value for group in scored for value in group)
        best = max(best, self.last.get("health/highest_reward") or best)
        stuck = sum(min(group) == max(group) < best for group in scored)
        names = ("health/groups", "health/stuck_groups", "health/highest_reward")
        return dict(zip(names, (float(len(scored)), float(stuck), best), strict=True))

    def observe(self, row: Row) -> list[str]:
        """Check the row of a step; returns the sentences due for a log line: new ones, and old ones now and then."""
        self.last, step = row, int(row["step"])
        due = []
        checks = (self._equal_rewards, self._weights, self._trust_region, self._one_step, self._falling)
        for kind, text in (warning for check in checks for warning in check(row)):
            self.findings[kind] = Finding(kind, step, text)
            # again once the run is more than twice as long
            if kind not in self._said or step >= 2 * self._said[kind] + PATIENCE:
                self._said[kind] = step
                due.append(text)
        return due

    def _sentence(self, name: str, /, **values: object) -> str:
        values = flat_settings(self.config) | values
        formatter = Formatter()
        formatter.get_field = lambda key, *_: (values.get(key), key)  # type: ignore[method-assign]  # names have dots
        return formatter.vformat(f"step {self.last['step']}: {SENTENCES[name]}", (), values)

    def _equal_rewards(self, row: Row) -> Said:
        counts = {name: number(row, f"health/{name}/constant_steps") or 0.0 for name in self.scorers}
        constant = {name: int(count) for name, count in counts.items() if count >= PATIENCE}
        for name, count in constant.items():
            value = number(row, f"reward/{name}/mean") or 0.0
            quotes = ", whether the text to be rendered is in quotes there" if name == "ocr" else ""
            facts = {"name": name, "value": value, "count": count, "quotes": quotes}
            yield f"constant {name}", self._sentence("constant" if value else "zero", **facts)
        without = number(row, "health/no_signal_steps") or 0.0
        if without < PATIENCE or (self.scorers and len(constant) == len(self.scorers)):
            return
        sampling = get(self.config, "sampling") or {}
        remedies = [f"raise rollout.n={get(self.config, 'rollout', 'n')}"]
        if get(self.config, "algorithm", "dynamic_sampling") == 0:
            remedies.append("set algorithm.dynamic_sampling=2, which samples further prompts to replace such groups")
        if is_stochastic(self.config):
            remedies.append(f"raise sampling.noise_level={sampling.get('noise_level')}")
        if sampling.get("same_init_noise"):
            remedies.append("set sampling.same_init_noise=false")
        yield "no signal", self._sentence("no signal", count=without, remedies=", ".join(remedies))

    def _weights(self, row: Row) -> Said:
        names = ("health/blank_fraction", "actor/lora_max", "actor/grad_rms")
        blank, largest, rms = (number(row, name) for name in names)
        if blank is not None and blank >= BLANK:
            yield "blank images", self._sentence("blank images", share=blank)
        if largest is not None and largest > LARGE_WEIGHT:
            yield "large weights", self._sentence("large weights", largest=largest, absurd=ABSURD_WEIGHT)
        if rms is not None and isinstance(self.eps, int | float) and 0 < rms < self.eps:
            better = f"1e{math.floor(math.log10(rms)) - 3}"  # at least a thousand times smaller
            yield "gradient below eps", self._sentence("gradient below eps", rms=rms, eps=self.eps, better=better)

    def _trust_region(self, row: Row) -> Said:
        outside = number(row, "actor/off_policy/outside_fraction")
        self._outside = [*self._outside, outside][-PATIENCE:] if outside is not None else self._outside
        if outside is None or len(self._outside) < PATIENCE:
            return
        kind = "clip always binds" if min(self._outside) > BOUND else "clip never binds"
        if kind == "clip never binds" and max(self._outside) > 0:
            return
        spread, clip = (number(row, f"actor/off_policy/{name}") for name in ("log_ratio_abs", "clip_range"))
        low, high, threshold = (get(self.config, "algorithm", n) for n in ("clip_low", "clip_high", "kl_threshold"))
        keys, region = f"algorithm.kl_threshold={threshold}", "threshold"
        if clip is not None:
            keys, region = f"algorithm.clip_low={low} and clip_high={high}", f"clip range, {clip:.2g}"
        measured = f"|log ratio| is {spread:.2g} on average" if spread is not None else "the policy moves"
        yield kind, self._sentence(kind, steps=PATIENCE, bound=BOUND, region=region, measured=measured, keys=keys)

    def _one_step(self, row: Row) -> Said:
        """Find a gradient that has come almost entirely from one timestep for a while."""
        share, prefix = number(row, "actor/step_grad_share"), "actor/step_grad_norm/"
        if share is None or self.differentiates:  # no update, a single timestep, or no noise in the timesteps
            return
        self._dominated = self._dominated + 1 if share > DOMINANT else 0
        norms = {int(name.removeprefix(prefix)): row[name] or 0.0 for name in row if name.startswith(prefix)}
        if self._dominated < PATIENCE or not norms:
            return
        largest, first = max(norms, key=lambda k: norms[k]), min(norms)
        algorithm, sampling = get(self.config, "algorithm") or {}, get(self.config, "sampling") or {}
        remedies = []
        # the first timestep has most noise: other weights or another window would increase its share
        if largest > first and algorithm.get("timestep_weights") not in (None, "std2_over_jacobian"):
            remedies.append("set algorithm.timestep_weights=std2_over_jacobian")
        start = (sampling.get("window_range") or [0])[0]
        shortest = max(start + (sampling.get("window_size") or 1), 1 + max(algorithm.get("split_steps") or [0]))
        if largest > first and largest >= shortest:
            remedies.append(f"train the steps before it only, sampling.window_range=[{start},{largest}]")
        advice = " or ".join(remedies) + ("; " if remedies else "")
        facts = {"largest": largest, "dominant": DOMINANT, "count": self._dominated, "remedies": advice}
        yield "one step", self._sentence("one step", share=share, **facts)

    def _falling(self, row: Row) -> Said:
        """Find two latest blocks of steps with a mean reward clearly below the best block."""
        value = number(row, "reward/mean")
        self._rewards += [] if value is None else [value]
        if len(self._rewards) < BLOCK:
            return
        error = statistics.stdev(self._rewards) / math.sqrt(BLOCK)
        self._blocks.append((statistics.fmean(self._rewards), error, int(row["step"])))
        self._rewards = []
        best, latest = max(self._blocks), self._blocks[-2:]
        if all(best[0] - block[0] > FALL * math.hypot(best[1], block[1]) for block in latest):
            facts = {"block": BLOCK, "latest": latest[-1][0], "best": best[0], "peak": best[2], "fall": FALL}
            yield "falling", self._sentence("falling", **facts)


def number(row: Row, name: str) -> float | None:
    """Return a metric; None if it is missing or not finite."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None

"""Health checks: signs that a run cannot learn or has stopped learning, with remedies."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gerl.run.settings import differentiates, get, is_stochastic

Row = Mapping[str, Any]
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
    """Checks of consecutive rows of `metrics.jsonl`, its only state: a resumed run finds the same.

    config: as in config.yaml.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.eps, self.differentiates = get(config, "actor", "eps"), differentiates(config)
        self.scorers = [  # those that count in the reward
            name
            for name in get(config, "reward", "scorers") or {}
            if get(config, "reward", "scorers", name, "weight") != 0
        ]
        self.last: Row = {}
        self.found: dict[str, Finding] = {}  # the latest of each kind
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
            if values:
                metrics[f"health/{name}/constant_steps"] = self._constant_steps(name, values)
        return metrics | self._stuck(groups)

    def _stuck(self, groups: Sequence[Sequence[float | None]]) -> dict[str, float]:
        """Count the groups whose images all have the same reward below the best one so far."""
        known = [[value for value in group if value is not None] for group in groups]
        scored = [group for group in known if len(group) > 1]
        if not scored:
            return {}
        best = max(value for group in scored for value in group)
        best = max(best, self.last.get("health/highest_reward") or best)
        stuck = sum(min(group) == max(group) < best for group in scored)
        names = ("health/groups", "health/stuck_groups", "health/highest_reward")
        return dict(zip(names, (float(len(scored)), float(stuck), best), strict=True))

    def _constant_steps(self, name: str, values: Sequence[float]) -> float:
        if min(values) < max(values):
            return 0.0
        before = _number(self.last, f"reward/{name}/mean")
        same = before is not None and math.isclose(before, values[0], rel_tol=1e-9, abs_tol=1e-12)
        return 1.0 + (self.last.get(f"health/{name}/constant_steps", 0.0) if same else 0.0)

    def observe(self, row: Row) -> list[str]:
        """Check the row of a step; returns the sentences due for a log line: new ones, and old ones now and then."""
        self.last, step = row, int(row["step"])
        due = []
        signs = [
            self._equal_rewards(row),
            self._broken(row),
            self._tiny(row),
            self._trust_region(row),
            self._one_step(row),
            self._falling(row),
        ]
        for kind, text in (found for sign in signs for found in sign):
            self.found[kind] = Finding(kind, step, text)
            # again once the run is more than twice as long
            if kind not in self._said or step >= 2 * self._said[kind] + PATIENCE:
                self._said[kind] = step
                due.append(text)
        return due

    def _equal_rewards(self, row: Row) -> list[tuple[str, str]]:
        step, scorers = int(row["step"]), self.scorers
        counts = {name: _number(row, f"health/{name}/constant_steps") or 0.0 for name in scorers}
        constant = {name: int(count) for name, count in counts.items() if count >= PATIENCE}
        said = [(f"constant {name}", self._constant(row, name, count)) for name, count in constant.items()]
        without = _number(row, "health/no_signal_steps") or 0.0
        if without < PATIENCE or (scorers and len(constant) == len(scorers)):
            return said
        n, sampling = get(self.config, "rollout", "n"), get(self.config, "sampling") or {}
        remedies = [f"raise rollout.n={n}"]
        if get(self.config, "algorithm", "dynamic_sampling") == 0:
            remedies.append("set algorithm.dynamic_sampling=2, which samples further prompts to replace such groups")
        if is_stochastic(self.config):
            remedies.append(f"raise sampling.noise_level={sampling.get('noise_level')}")
        if sampling.get("same_init_noise"):
            remedies.append("set sampling.same_init_noise=false")
        text = (
            f"step {step}: no training signal for {without:.0f} steps, since all images of a prompt had the same "
            f"reward; {', '.join(remedies)}, or choose prompts that are neither too easy nor too hard (data.train)"
        )
        return [*said, ("no signal", text)]

    def _constant(self, row: Row, name: str, count: int) -> str:
        value, key = _number(row, f"reward/{name}/mean") or 0.0, f"reward.scorers.{name}"
        begin = f"step {row['step']}: {name} gave {value:.4g} to every image of the last {count} steps"
        if value != 0:
            return (
                f"{begin}, which gives no training signal: test it on images that differ (python -m gerl.score), "
                f"correct {key}.kwargs, or, if they are all perfect, choose harder prompts (data.train)"
            )
        quotes = ", whether the text to be rendered is in quotes there" if name == "ocr" else ""
        return (
            f"{begin}: check the images in samples/, the prompts of "
            f"data.train={get(self.config, 'data', 'train')}{quotes}, and {key}.kwargs; training needs some "
            "prompts that are sometimes solved"
        )

    def _broken(self, row: Row) -> list[tuple[str, str]]:
        found, step = list[tuple[str, str]](), row["step"]
        blank, largest = _number(row, "health/blank_fraction"), _number(row, "actor/lora_max")
        if blank is not None and blank >= BLANK:
            text = (
                f"step {step}: {blank:.0%} of the images have a single colour: the model or its decoder "
                f"overflowed; use model.dtype=float32 or bfloat16 instead of {get(self.config, 'model', 'dtype')}, "
                f"or, if it began during training, lower actor.lr={get(self.config, 'actor', 'lr')} and start a "
                "new run"
            )
            found.append(("blank images", text))
        if largest is not None and largest > LARGE_WEIGHT:
            text = (
                f"step {step}: the largest weight of the LoRA is {largest:.3g}, while typical ones are below 1: "
                f"lower actor.lr={get(self.config, 'actor', 'lr')}, or raise "
                f"algorithm.kl_coef={get(self.config, 'algorithm', 'kl_coef')}; the run stops above "
                f"{ABSURD_WEIGHT:g}"
            )
            found.append(("large weights", text))
        return found

    def _tiny(self, row: Row) -> list[tuple[str, str]]:
        """Find a gradient smaller than AdamW's epsilon."""
        rms, eps = _number(row, "actor/grad_rms"), self.eps
        if rms is None or not isinstance(eps, int | float) or not 0 < rms < eps:
            return []
        text = (
            f"step {row['step']}: the root mean square of the gradient, {rms:.2g}, is below actor.eps={eps:g}, "
            f"which then dominates AdamW's divisor, so the weights hardly change: use actor.eps={_below(rms)}"
        )
        return [("gradient below eps", text)]

    def _trust_region(self, row: Row) -> list[tuple[str, str]]:
        """Find off-policy steps with nearly all or none of their ratios outside the clip range."""
        outside = _number(row, "actor/off_policy/outside_fraction")
        self._outside = [*self._outside, outside][-PATIENCE:] if outside is not None else self._outside
        if outside is None or len(self._outside) < PATIENCE:
            return []
        spread, clip = (_number(row, f"actor/off_policy/{name}") for name in ("log_ratio_abs", "clip_range"))
        low, high, threshold = (get(self.config, "algorithm", n) for n in ("clip_low", "clip_high", "kl_threshold"))
        keys, region = f"algorithm.kl_threshold={threshold}", "threshold"
        if clip is not None:
            keys, region = f"algorithm.clip_low={low} and clip_high={high}", f"clip range, {clip:.2g}"
        begin = f"step {row['step']}: in the last {PATIENCE} steps with off-policy updates"
        measured = f"|log ratio| is {spread:.2g} on average" if spread is not None else "the policy moves"
        if min(self._outside) > BOUND:
            text = (
                f"{begin} more than {BOUND:.0%} of their ratios were outside the {region}, which removes the "
                f"gradient from most of what still improves ({measured}): raise {keys}, lower "
                f"actor.lr={get(self.config, 'actor', 'lr')}, or set actor.updates_per_step=1 actor.epochs=1"
            )
            return [("clip always binds", text)]
        if max(self._outside) == 0:
            text = (
                f"{begin} no ratio was outside the {region} ({measured}): nothing keeps the policy close to the "
                f"sampling policy; lower {keys}, or raise "
                f"actor.updates_per_step={get(self.config, 'actor', 'updates_per_step')} as long as rewards rise"
            )
            return [("clip never binds", text)]
        return []

    def _one_step(self, row: Row) -> list[tuple[str, str]]:
        """Find a gradient that has come almost entirely from one timestep for a while."""
        share, prefix = _number(row, "actor/step_grad_share"), "actor/step_grad_norm/"
        if share is None or self.differentiates:  # no update, a single timestep, or no noise in the timesteps
            return []
        self._dominated = self._dominated + 1 if share > DOMINANT else 0
        norms = {int(name.removeprefix(prefix)): row[name] or 0.0 for name in row if name.startswith(prefix)}
        if self._dominated < PATIENCE or not norms:
            return []
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
        measure = "python -m gerl.preflight signal=4 measures which steps carry the reward"
        text = (
            f"step {row['step']}: {share:.0%} of the squared gradient came from denoising step {largest}, as more "
            f"than {DOMINANT:.0%} from one in each of the last {self._dominated} steps: the signal of the others "
            f"is lost in its noise; {' or '.join(remedies)}{'; ' if remedies else ''}{measure}"
        )
        return [("one step", text)]

    def _falling(self, row: Row) -> list[tuple[str, str]]:
        """Find two latest blocks of steps with a mean reward clearly below the best block."""
        value = _number(row, "reward/mean")
        self._rewards += [] if value is None else [value]
        if len(self._rewards) < BLOCK:
            return []
        mean = sum(self._rewards) / BLOCK
        variance = sum((reward - mean) ** 2 for reward in self._rewards) / (BLOCK - 1)
        self._blocks.append((mean, math.sqrt(variance / BLOCK), int(row["step"])))
        self._rewards = []
        best = max(self._blocks)
        latest = self._blocks[-2:]
        if any(best[0] - block[0] <= FALL * math.hypot(best[1], block[1]) for block in latest):
            return []
        text = (
            f"step {row['step']}: the mean reward of the last {BLOCK} steps, {mean:.4g}, is below the "
            f"{best[0]:.4g} of the {BLOCK} to step {best[2]} by more than {FALL:g} standard errors: return to a "
            f"checkpoint from then, lower actor.lr={get(self.config, 'actor', 'lr')}, or raise "
            f"algorithm.kl_coef={get(self.config, 'algorithm', 'kl_coef')}"
        )
        return [("falling", text)]


def _below(rms: float) -> str:
    """Return a power of ten at least a thousand times smaller."""
    return f"1e{math.floor(math.log10(rms)) - 3}"


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

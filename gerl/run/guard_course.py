"""Signs of reward hacking in the course of the training: a KL that gains nothing, and groups that have become alike."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gerl.run.guard import CONFIDENCE, FEWEST, Signal
from gerl.run.statistics import bootstrap, share_interval
from gerl.run.validation import Validation, paired_gains

Row = Mapping[str, Any]
MOST = 1000  # groups of a block that are counted: their share stands for that of more


class TrainingTrends:
    """The steps between validations, by the rows of the metrics."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows: dict[int, tuple[float | None, float | None, float | None]] = {}  # KL, groups, those of them stuck
        self.validated: list[int] = []
        for row in rows:
            self.add(row)
            if "val/reward/mean" in row:
                self.validated.append(int(row["step"]))

    def add(self, row: Row) -> None:
        """Take what a step has measured."""
        kl, groups, stuck = (_number(row, n) for n in ("actor/kl", "health/groups", "health/stuck_groups"))
        self._rows[int(row["step"])] = kl, groups, stuck

    def kl(self, step: int) -> float | None:
        """The mean KL to the base model in the steps up to the validation of `step`, from the one before it on."""
        known = [kl for kl, _, _ in self._block(step) if kl is not None]
        return sum(known) / len(known) if known else None

    def stuck(self, step: int) -> tuple[int, int]:
        """How many groups had one reward for all their images, not the best one so far; and how many there were."""
        known = [(stuck, groups) for _, groups, stuck in self._block(step) if groups is not None and stuck is not None]
        return round(sum(stuck for stuck, _ in known)), round(sum(groups for _, groups in known))

    def _block(self, step: int) -> list[tuple[float | None, float | None, float | None]]:
        before = max((other for other in self.validated if other < step), default=0)
        return [values for number, values in self._rows.items() if before < number <= step]


def trend_signals(
    course: TrainingTrends, first: Validation, best: Validation, later: Validation, measures_kl: bool = True
) -> list[Signal]:
    """The signs in the steps up to the validation `later`.

    best: the earlier validation with the highest reward. measures_kl: whether the KL is that to one and the same model.
    """
    if first.step >= later.step:
        return []
    kl = _kl(course, first, best, later) if measures_kl else ()
    return [*kl, *_no_signal(course, first, later)]


def _kl(course: TrainingTrends, first: Validation, best: Validation, later: Validation) -> Iterator[Signal]:
    """A KL that has grown since the best validation without the gain in reward that this should have brought.

    The gain of an optimisation that is not overdone rises as the root of the KL (Gao et al. 2022, arXiv 2210.10760).
    """
    before, now = course.kl(best.step), course.kl(later.step)
    if first.prompts != later.prompts or not first.step < best.step < later.step or len(first.first_rows) < FEWEST:
        return
    if before is None or now is None or not 0 < before < now:
        return
    sure = paired_gains(first, best).get("reward")
    if sure is None or not sure.low > 0:
        return
    growth = math.sqrt(now / before) - 1
    columns = [v.by_prompt(v.rewards) for v in (first, best, later)]
    known = [(a, b, c) for a, b, c in zip(*columns, strict=True) if a is not None and b is not None and c is not None]
    if len(known) < FEWEST:
        return
    expected = growth * sum(b - a for a, b, _ in known) / len(known)
    gained = sum(c - b for _, b, c in known) / len(known)
    if bootstrap([(c - b) - growth * (b - a) for a, b, c in known], CONFIDENCE)[1] < 0:
        text = (
            f"the KL to the base model grew from {before:.3g} to {now:.3g} since step {best.step}, and the "
            f"held-out reward changed by {gained:+.3f} instead of the {expected:+.3f} expected from the gain up to "
            "that step"
        )
        order = sorted(later.shown or range(len(later.rewards)), key=lambda i: _change(best, later, i))
        yield Signal("kl", "reward", later.step, gained, expected, text, order[:8])


def _change(before: Validation, after: Validation, row: int) -> float:
    old, new = before.rewards[row], after.rewards[row]
    return 0.0 if old is None or new is None else new - old


def _no_signal(course: TrainingTrends, first: Validation, later: Validation) -> Iterator[Signal]:
    """More groups than in the beginning whose images all have one and the same reward, which is not the best one."""
    after = [step for step in course.validated if step > first.step]
    if not after or after[0] >= later.step:
        return
    old, new = (_share(*course.stuck(step)) for step in (after[0], later.step))
    if old is not None and new is not None and new[1] > old[2]:
        text = (
            f"in {new[0]:.0%} of the groups since the previous validation all images had the same reward, below "
            f"the best one, as in {old[0]:.0%} of those up to step {after[0]}: they carry no training signal"
        )
        yield Signal("no_signal", "groups", later.step, new[0], old[2], text, [])


def _share(count: int, total: int) -> tuple[float, float, float] | None:
    """A share and the ends of its interval."""
    if not total:
        return None
    scale = min(1.0, MOST / total)
    return count / total, *share_interval(round(scale * count), round(scale * total), CONFIDENCE)


def best_of(validations: Sequence[Validation], before: int) -> Validation | None:
    """The one with the highest mean reward before step `before`, of equals the last."""
    known = [v for v in validations if v.step < before and v.rewards and None not in v.rewards]
    return max(known, key=lambda v: (sum(r for r in v.rewards if r is not None) / len(v.rewards), v.step), default=None)


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

"""Success rate, best of n and pass@k: what the scores of one or several images per prompt say about each prompt."""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import comb

from gerl.config.held_out import parts
from gerl.run.validation import Estimate, Validation, estimate, estimate_share, known, mean

SUCCESS, BEST, PASS = "success_rate", "best_of_n", "pass_at_"


@dataclass(frozen=True)
class Attempts:
    """A column derived from the scores of another one: a value per image or prompt, None if unknown."""

    ids: list[int]  # [M] prompt of each value
    values: list[float | None]  # [M]
    share: bool  # the values are successes or shares of them, from 0 to 1

    def estimate(self, ends: tuple[float, float] | None = None) -> Estimate:
        """Return the mean over prompts with its interval; `ends`, see `mean_interval`, are those of scores."""
        return estimate_share(self.ids, self.values) if self.share else estimate(self.ids, self.values, ends)


def best_of(values: Sequence[float], k: int) -> float:
    """Return the mean over all subsets of `k` of the values of their maximum: the unbiased estimate of the best of k.

    For successes (0 or 1) it is pass@k, 1 - C(n - c, k) / C(n, k) with c of n successes (Chen et al. 2021,
    arXiv 2107.03374, section 2.1). `k` is at most the number of values.
    """
    ordered, ways = sorted(values), comb(len(values), k)
    return sum(ordered[i] * (comb(i, k - 1) / ways) for i in range(k - 1, len(ordered)))


def attempts(ids: Sequence[int], values: Sequence[float | None], success: float | None = None) -> dict[str, Attempts]:
    """Return the columns derived from `values` [N], the scores of images whose prompts are `ids` [N].

    `success_rate`: whether an image has at least the score `success`, if that is given. With up to n > 1 images of a
    prompt also `best_of_n`, the best one, and with `success` `pass_at_1` to `pass_at_n`, see `best_of`. A prompt with
    too few scored images has no value.
    """
    reached = [None if value is None or success is None else float(value >= success) for value in values]
    columns = {} if success is None else {SUCCESS: Attempts(list(ids), reached, True)}
    prompts: dict[int, list[int]] = {}
    for row, prompt in enumerate(ids):
        prompts.setdefault(prompt, []).append(row)
    most = max(map(len, prompts.values()), default=0)

    def best(column: Sequence[float | None], k: int, share: bool) -> Attempts:
        groups = [[value for row in rows if (value := column[row]) is not None] for rows in prompts.values()]
        return Attempts(list(prompts), [best_of(group, k) if len(group) >= k else None for group in groups], share)

    if most > 1:
        columns[BEST] = best(values, most, False)
    if most > 1 and success is not None:
        columns |= {f"{PASS}{k}": best(reached, k, True) for k in range(1, most + 1)}
    return columns


def held_out_metric(
    validation: Validation, metric: str, success: Mapping[str, float], prompts: Container[str] | None = None
) -> float | None:
    """Compute a metric of a stored validation, of some of its `prompts` or all; None if that is not possible.

    Of the gain over the first validation only the part that differs between validations: the mean. success: by scorer.
    """
    column, statistic = parts(metric)
    values = validation.rewards if column == "reward" else validation.by_scorer.get(column, [])
    rows = [row for row, text in enumerate(validation.prompts) if prompts is None or text in prompts]
    chosen = [values[row] for row in rows] if values else []
    if not known(chosen) or (column == "reward" and None in chosen):  # a scorer need not apply to all prompts
        return None
    ids = validation.ids or range(len(validation.prompts))
    if statistic in ("mean", "gain"):
        return mean(chosen)
    column_attempts = attempts([ids[row] for row in rows], chosen, success.get(column)).get(statistic)
    return None if column_attempts is None else column_attempts.estimate().mean


def is_printed(name: str, names: Container[str]) -> bool:
    """Whether a table shows the column `name` among `names`: of pass@k those with k = 2, 4, 8, ... and the last."""
    match = re.fullmatch(rf"(.*{PASS})(\d+)", name)
    if match is None:
        return True
    k = int(match[2])
    return k > 1 and (k & (k - 1) == 0 or f"{match[1]}{k + 1}" not in names)

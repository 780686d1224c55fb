"""Algorithms: each a class with its keys, built on record, replay, kernels and `core_algos`.

`ALGORITHMS` has them by the values of `algorithm.name`; see `gerl.config.registry` for how it finds them.
"""

from gerl.algorithms.base import Algorithm, Batch, KLWeight, Rewards, batches_of, count_pairs, row_credit
from gerl.algorithms.flow_grpo import PolicyGradient
from gerl.algorithms.forward_process import SFT, ForwardProcess, regularising
from gerl.config import Config
from gerl.config.exclusions import EXCLUSIONS, MODEL, SAMPLING, Exclusion
from gerl.config.registry import ALGORITHMS

__all__ = [
    "ALGORITHMS", "Algorithm", "Batch", "ForwardProcess", "KLWeight", "PolicyGradient", "Rewards", "batches_of",
    "build_algorithm", "count_pairs", "every_exclusion", "row_credit",
]  # fmt: skip


def every_exclusion() -> list[Exclusion]:
    """Return all rows of keys that exclude each other, those of algorithms last."""
    of_algorithms = (row for cls in ALGORITHMS.values() for row in cls.config_class.excludes)
    return list(dict.fromkeys((*MODEL, *SAMPLING, *EXCLUSIONS, *of_algorithms)))


def build_algorithm(config: Config) -> Algorithm:
    """Build the algorithm of the block `algorithm`."""
    algorithm: Algorithm = ALGORITHMS.of(config.algorithm.name, config.algorithm.path)(config)
    if config.data.regularise is not None:
        algorithm.regulariser = SFT(regularising(config))
    return algorithm

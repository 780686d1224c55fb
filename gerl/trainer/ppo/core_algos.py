"""Advantages, losses and KL under the name that users of verl and MM-GRPO import."""

from gerl.algorithms.core_algos import *  # noqa: F403

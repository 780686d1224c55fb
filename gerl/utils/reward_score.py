"""Alias of the scorers for users of verl and MM-GRPO."""

from gerl.rewards.scorers import *  # noqa: F403

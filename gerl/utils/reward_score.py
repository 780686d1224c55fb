"""The scorers under the name that users of verl and MM-GRPO import."""

from gerl.rewards.scorers import *  # noqa: F403

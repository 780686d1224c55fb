"""The checks of rewards, under the name that MM-GRPO's users import."""

from gerl.rewards.checks import *  # noqa: F403

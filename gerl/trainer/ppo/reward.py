"""The checks of rewards, under the name that MM-GRPO's users import."""

from gerl.rewards.checks import *  # noqa: F403
from gerl.trainer.step import usable_groups as usable_groups

"""Alias of the prompt files for users of MM-GRPO."""

from gerl.data.tables import *  # noqa: F403

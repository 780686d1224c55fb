"""Prompt files under the name that MM-GRPO's users import."""

from gerl.data.tables import *  # noqa: F403

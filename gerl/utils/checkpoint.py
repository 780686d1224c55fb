"""Checkpoints under the name that MM-GRPO's users import."""

from gerl.run.checkpoint import *  # noqa: F403

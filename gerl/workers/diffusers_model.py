"""Alias of record and replay for users of MM-GRPO."""

from gerl.engine import *  # noqa: F403

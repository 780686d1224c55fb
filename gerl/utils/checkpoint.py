"""Alias of the checkpoints for users of MM-GRPO."""

from gerl.run.checkpoint import *  # noqa: F403
from gerl.run.choice import *  # noqa: F403
from gerl.utils.tensors import *  # noqa: F403

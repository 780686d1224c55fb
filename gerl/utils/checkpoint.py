"""Checkpoints under the name that MM-GRPO's users import."""

from gerl.run.checkpoint import *  # noqa: F403
from gerl.utils.tensors import *  # noqa: F403

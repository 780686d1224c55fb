"""Alias of LoRA for users of MM-GRPO."""

from gerl.model.lora import *  # noqa: F403
from gerl.model.lora_files import *  # noqa: F403

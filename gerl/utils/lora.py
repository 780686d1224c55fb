"""Alias of LoRA for users of MM-GRPO."""

from gerl.model.lora import *  # noqa: F403

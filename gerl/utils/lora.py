"""LoRA under the name that MM-GRPO's users import."""

from gerl.model.lora import *  # noqa: F403

"""The trainer under the name that MM-GRPO's users import."""

from gerl.trainer.run import Run as RayDiffusionTrainer  # noqa: F401 - the name is for them

"""The trainer under the name that MM-GRPO's users import."""

from gerl.trainer.ray_diffusion_trainer import RayDiffusionTrainer as RayDiffusionTrainer

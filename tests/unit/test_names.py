"""The names that users of MM-GRPO, verl and earlier versions import, which stay where they look for them."""

from importlib import import_module

import pytest

NAMES = {
    "gerl.trainer.main_flowgrpo": ("main",),
    "gerl.trainer.ppo.ray_diffusion_trainer": ("RayDiffusionTrainer",),
    "gerl.trainer.ppo.core_algos": ("group_advantages", "clipped_policy_loss", "kl_divergence"),
    "gerl.trainer.ppo.reward": ("check_reward", "usable_groups"),
    "gerl.workers.actor": ("Actor",),
    "gerl.workers.rollout": ("Rollout",),
    "gerl.workers.reward_manager": ("RewardManager",),
    "gerl.workers.diffusers_model": ("Tape", "branch", "record", "replay"),
    "gerl.utils.reward_score": ("SCORERS", "Scorer", "build_scorer"),
    "gerl.utils.dataset": ("load_prompts",),
    "gerl.utils.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "gerl.utils.lora": ("add_lora", "load_lora", "lora_disabled"),
    "gerl.protocol": ("Prompt", "RolloutTask", "Sample", "Scores"),
}


@pytest.mark.parametrize("module", NAMES)
def test_a_promised_name_is_there(module: str) -> None:
    assert all(hasattr(import_module(module), name) for name in NAMES[module])


def test_a_signpost_is_the_thing_itself() -> None:
    for old, new, name in (
        ("gerl.workers.diffusers_model", "gerl.engine", "replay"),
        ("gerl.utils.reward_score", "gerl.rewards.scorers", "SCORERS"),
        ("gerl.trainer.ppo.core_algos", "gerl.algorithms.core_algos", "group_advantages"),
    ):
        assert getattr(import_module(old), name) is getattr(import_module(new), name)

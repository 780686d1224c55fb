"""The reward manager under the name that MM-GRPO's users import."""

from gerl.rewards.manager import RewardManager as RewardManager

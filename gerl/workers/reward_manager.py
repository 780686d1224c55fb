"""Alias of the reward manager for users of MM-GRPO."""

from gerl.rewards.manager import RewardManager as RewardManager

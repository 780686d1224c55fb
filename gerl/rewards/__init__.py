"""Rewards: scorers, their processes, and the total reward."""

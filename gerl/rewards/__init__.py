"""Rewards: the scorers, the processes they run in, and the total they make."""

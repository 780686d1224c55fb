"""gerl: reinforcement learning for diffusion models."""

__version__ = "0.1.0"

"""A run's LoRA for other programs: `python -m gerl.export`."""

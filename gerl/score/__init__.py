"""Look at a reward before training on it: `python -m gerl.score`."""

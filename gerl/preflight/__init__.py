"""Look at a run before starting it: `python -m gerl.preflight`."""

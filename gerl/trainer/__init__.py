"""The training loop, and its entry point `python -m gerl.trainer.main_flowgrpo`."""

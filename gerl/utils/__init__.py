"""Helpers for every package: seeds, prompt files, condition images, logs."""

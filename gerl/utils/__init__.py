"""Helpers for every room: seeds, prompt files, condition images, logs."""

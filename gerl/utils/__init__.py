"""Helpers for all packages: seeds, condition images, files, tensors as bytes."""

"""Pipelines with a LoRA: loading, schedulers, placement, averaged weights, LoRA files."""

"""Prompts of a run: files, data sets of the Hugging Face Hub, and mixtures."""

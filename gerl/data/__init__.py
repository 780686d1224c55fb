"""The prompts of a run: files, data sets of the Hugging Face hub, and mixtures of them."""

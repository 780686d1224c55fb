"""Records of a run on disk and on the terminal: checkpoints, metrics, validations, report."""

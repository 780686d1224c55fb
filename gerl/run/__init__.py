"""What a run leaves on disk and on the terminal: checkpoints, metrics, report, signals, times."""

"""What every room may use: seeds, prompt files, condition images, logs."""

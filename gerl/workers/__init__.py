"""What runs on a worker's device: rollout, update, and the collective between them."""

"""Work on a device: rollout, update, and the collective between workers."""

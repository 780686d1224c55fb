"""Work on a device: rollout, update, and the collective between workers."""

from gerl.commandline.command import importing

with importing():  # before all else that a worker's process imports
    import torch  # noqa: F401

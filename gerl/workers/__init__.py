"""Work on a device: rollout, update, and the collective between workers."""

from gerl.utils.imports import importing

with importing():  # must precede all other imports of a worker's process
    import torch  # noqa: F401

"""The work of a scorer since it was last asked for."""

from dataclasses import dataclass


@dataclass
class Load:
    """The work of a scorer, in calls, images and seconds, and what went wrong."""

    calls: int = 0
    images: int = 0
    seconds: float = 0.0
    queued: float = 0.0
    retries: int = 0
    restarts: int = 0
    warnings: int = 0

    def metrics(self, name: str) -> dict[str, float]:
        """Seconds a call took and waited, images a second, and what went wrong, of the scorer `name`."""
        calls = max(self.calls, 1)
        return {
            f"scorer/{name}/latency_s": self.seconds / calls,
            f"scorer/{name}/queue_s": self.queued / calls,
            f"scorer/{name}/images_per_s": self.images / self.seconds if self.seconds else 0.0,
            f"scorer/{name}/retries": float(self.retries),
            f"scorer/{name}/restarts": float(self.restarts),
            f"scorer/{name}/warnings": float(self.warnings),
        }

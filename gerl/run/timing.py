"""Wall-clock time of the parts of a trainer step."""

import contextlib
import time
from collections.abc import Iterator

from gerl.timeline import Timeline, What

PHASES: dict[str, What] = {"rollout": "draw", "reward_wait": "score", "update": "update", "validation": "validate"}


class Stopwatch:
    """Adds up seconds by name; `metrics` gives them as `timing/<name>_s`, and the timeline gets the run's phases."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.timeline = timeline

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        phase = PHASES.get(name) if self.timeline is not None else None
        shown = self.timeline.span(phase) if self.timeline is not None and phase else contextlib.nullcontext()
        try:
            with shown:
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def restarted(self) -> "Stopwatch":
        """Another one that has measured nothing."""
        return Stopwatch(self.timeline)

    def metrics(self) -> dict[str, float]:
        return {f"timing/{name}_s": seconds for name, seconds in self.seconds.items()}

"""Wall-clock time of the parts of a trainer step."""

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
    """Adds up seconds by name; `metrics` gives them as `timing/<name>_s`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {f"timing/{name}_s": seconds for name, seconds in self.seconds.items()}

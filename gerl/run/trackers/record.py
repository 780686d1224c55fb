"""Which runs of its trackers a run is: `trackers.json` of the run folder, by which a resumed run goes on with them."""

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gerl.errors import GerlError
from gerl.run.trackers.base import TrackedRun
from gerl.utils.files import write_file

logger = logging.getLogger(__name__)
KEYS = ("project", "name", "id")


class Record:
    """The file, read when it is opened and written whenever a tracker has begun a run."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            found = {}
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read (%s): trackers start new runs", path, error)
            found = {}
        entries = found.items() if isinstance(found, dict) else ()
        self._runs = {
            name: {key: str(entry[key]) for key in KEYS}
            for name, entry in entries
            if isinstance(entry, dict) and all(entry.get(key) for key in KEYS)
        }

    def carried_on(self, tracker: str, run: TrackedRun) -> TrackedRun:
        """The run with project, name and id as `tracker` knows it; as it is if there is none to go on with."""
        known = self._runs.get(tracker)
        return replace(run, project=known["project"], name=known["name"], id=known["id"]) if known else run

    def keeper(self, tracker: str) -> Callable[[dict[str, str]], None]:
        """A function that keeps what the tracker says of its run, and says where it is; for any thread."""

        def keep(opened: dict[str, str]) -> None:
            logger.info("%s: run %s of project %s; %s", tracker, opened["name"], opened["project"], opened["place"])
            entry = {key: opened[key] for key in KEYS}
            with self._lock:
                if self._runs.get(tracker) == entry:
                    return
                self._runs[tracker] = entry
                try:
                    write_file(self._path, json.dumps(self._runs, indent=1) + "\n")
                except GerlError as error:
                    logger.warning("%s; when resumed, the run starts another one in %s", error, tracker)

        return keep

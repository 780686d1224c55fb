"""MLflow: a database on this machine, or a server."""

import os
import re
import time
from pathlib import Path
from typing import Any

from PIL import Image

from gerl.config.changes import flat_settings, shown
from gerl.run.trackers.base import PROJECT, TrackedRun, reach

TEXT = 500  # characters of a parameter that every MLflow takes
BATCH = 100  # parameters, or metrics, in a request
NAME = re.compile(r"[^\w\-. /]")  # characters that MLflow refuses in names


class Mlflow:
    """A run of MLflow; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and the others are read as MLflow does."""

    def __init__(self, run: TrackedRun) -> None:
        # the package's own are minutes; what could not be sent is in metrics.jsonl
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        import mlflow
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._closed = Metric, False
        address = mlflow.get_tracking_uri()
        if address.startswith(("http:", "https:")):
            reach(address, "MLFLOW_TRACKING_URI names the server or file")
        self._client = MlflowClient()
        self.id = run.id or os.environ.get("MLFLOW_RUN_ID") or ""
        if self.id:
            self._client.update_run(self.id, status="RUNNING")
        else:
            self.id = self._client.create_run(self._experiment(run.project), run_name=run.name).info.run_id
            # only once: the parameters of a run cannot change, config.yaml below can
            values = flat_settings(run.config).items()
            params = [Param(NAME.sub("_", key), shown(value)[:TEXT]) for key, value in values]
            for start in range(0, len(params), BATCH):
                self._client.log_batch(self.id, params=params[start : start + BATCH])
        for tag in run.tags:
            self._client.set_tag(self.id, NAME.sub("_", tag), "true")
        if run.text:
            self._client.log_text(self.id, run.text, "config.yaml")
        info = self._client.get_run(self.id).info
        self.name, self.project = info.run_name, self._client.get_experiment(info.experiment_id).name
        self.place = f"experiment {self.project} of {address}"

    def _experiment(self, project: str | None) -> str:
        given = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if project is None and given:
            return given
        name = project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found: Any = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        rows = [self._metric(NAME.sub("_", name), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(rows), BATCH):
            self._client.log_batch(self.id, metrics=rows[start : start + BATCH])

    def image(self, step: int, name: str, path: Path) -> None:
        with Image.open(path) as picture:
            self._client.log_image(self.id, picture, key=name, step=step)

    def lora(self, step: int, folder: Path) -> None:
        self._client.log_artifacts(self.id, str(folder), f"checkpoints/step_{step}/lora")

    def alert(self, step: int, sentence: str) -> None:
        """MLflow has no alerts: the run's page shows the newest as a tag."""
        self._client.set_tag(self.id, "alert", sentence[: 10 * TEXT])

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")

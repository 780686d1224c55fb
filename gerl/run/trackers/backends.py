"""Trackers: Weights & Biases, MLflow, SwanLab, trackio and TensorBoard."""

import os
import re
import secrets
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from PIL import Image

from gerl.config.changes import flat_settings, shown
from gerl.run.trackers.process import PROJECT, TrackedRun, reach


class Wandb:
    """A run of wandb; WANDB_MODE, WANDB_BASE_URL, WANDB_PROJECT, WANDB_NAME and the others are read by the package."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_CONSOLE", "off")  # this process prints nothing worth sending
        import wandb

        self._wandb, settings = wandb, wandb.setup().settings
        if settings.mode in ("online", "run", "shared"):
            reach(settings.base_url, "WANDB_MODE=offline stores a run here, for wandb sync")
        self._run = wandb.init(
            project=run.project or settings.project or PROJECT,
            name=settings.run_name or run.name,
            id=run.id or settings.run_id or secrets.token_hex(8),
            resume="allow" if run.id else None,
            tags=[*run.tags, *(settings.run_tags or ())],
            dir=None if os.environ.get("WANDB_DIR") else str(run.folder),
        )
        self._run.config.update(run.config, allow_val_change=True)
        # not wandb's own step, which must increase: a resumed run repeats steps
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.project, self.name, self.id = self._run.project, self._run.name or run.name, self._run.id
        off = "disabled by WANDB_MODE" if settings.mode == "disabled" else f"wandb sync {Path(self._run.dir).parent}"
        self.place = self._run.url or off

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def image(self, step: int, name: str, path: Path) -> None:
        self._run.log({name: self._wandb.Image(str(path)), "step": step})

    def lora(self, step: int, folder: Path) -> None:
        artifact = self._wandb.Artifact(f"lora-{self.id}", type="model", metadata={"step": step})
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact, aliases=["latest", f"step_{step}"])

    def alert(self, step: int, sentence: str) -> None:
        self._run.alert(title=self.name, text=sentence, level=self._wandb.AlertLevel.WARN)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)
        self._wandb.teardown()  # waits until its service has written the end of the run


# --- MLflow: a database on this machine, or a server

TEXT = 500  # characters of a parameter that all versions accept
BATCH = 100  # parameters or metrics per request
NAME = re.compile(r"[^\w\-. /]")  # characters MLflow rejects in names


class Mlflow:
    """A run of MLflow; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and the others are read as MLflow does."""

    def __init__(self, run: TrackedRun) -> None:
        # the defaults are minutes; what is not sent is in metrics.jsonl
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
            # only once: parameters cannot change, unlike config.yaml below
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
        experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if project is None and experiment_id:
            return experiment_id
        name = project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment: Any = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))

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
        """Set a tag, which the run's page shows: MLflow has no alerts."""
        self._client.set_tag(self.id, "alert", sentence[: 10 * TEXT])

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


class Swanlab:
    """A run of SwanLab; SWANLAB_MODE, SWANLAB_API_HOST, SWANLAB_PROJ_NAME and the others are read by the package."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._swanlab = swanlab
        # without prompts, and without the output of this process
        settings = swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none"))
        if settings.mode == "online":
            reach(settings.api_host, "SWANLAB_MODE=offline stores a run here, for swanlab sync")
        elsewhere = os.environ.get("SWANLAB_LOG_DIR") or os.environ.get("SWANLAB_LOGDIR")
        self._run = swanlab.init(
            project=run.project or settings.project.name or PROJECT,
            name=settings.experiment.name or run.name,
            id=run.id or settings.run.id or uuid.uuid4().hex[:21],
            resume="allow",
            tags=[*run.tags, *settings.experiment.tags],
            config=run.config,
            log_dir=None if elsewhere else str(run.folder / "swanlab"),
            settings=settings,
        )
        self.project, self.name, self.id = run.project or settings.project.name or PROJECT, self._run.name, self._run.id
        match self._run.mode:
            case "online":
                self.place = str(self._run.url)
            case "offline":
                self.place = f"swanlab sync {self._run.dir}"
            case mode:
                self.place = f"SWANLAB_MODE={mode}"

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def image(self, step: int, name: str, path: Path) -> None:
        self._run.log({name: self._swanlab.Image(str(path))}, step=step)

    def lora(self, step: int, folder: Path) -> None:
        place = Path(self._run.dir) / "lora" / f"step_{step}"  # SwanLab reads the files later
        shutil.copytree(folder, place, dirs_exist_ok=True)
        self._run.save(f"{place}/*", base_path=self._run.dir, policy="now")

    def alert(self, step: int, sentence: str) -> None:
        """Log a text: SwanLab's alerts are sent only by mail and chat."""
        self._run.log({"alerts": self._swanlab.Text(sentence)}, step=step)

    def close(self, failed: bool) -> None:
        if failed:
            self._run.finish(state="crashed", error="the run ended with an error or was interrupted")
        else:
            self._run.finish()


# --- trackio: a database on this machine, a Hugging Face Space, or your own server


class Trackio:
    """A run of trackio; TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL and the others are read by the package."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio
        from huggingface_hub import constants

        self._trackio = trackio
        space, server = os.environ.get("TRACKIO_SPACE_ID"), os.environ.get("TRACKIO_SERVER_URL", "").partition("?")[0]
        if space or server:  # the rest of the URL may contain a token
            away = "without TRACKIO_SPACE_ID and TRACKIO_SERVER_URL runs are stored on this machine"
            reach(constants.ENDPOINT if space else server, away)
        self.project, self.name = run.project or PROJECT, run.name
        self._run = trackio.init(
            project=self.project,
            name=self.name,
            config={**run.config, "tags": run.tags},
            resume="allow" if run.id else "never",
            embed=False,
        )
        self.id = self._run.id
        self.place = f"the Space {space}" if space else server or f"trackio show --project {self.project}"

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def image(self, step: int, name: str, path: Path) -> None:
        self._run.log({name: self._trackio.Image(str(path))}, step=step)

    def lora(self, step: int, folder: Path) -> None:
        artifact = self._trackio.Artifact(f"lora-{self.id}", type="model", metadata={"step": step})
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact, aliases=[f"step_{step}"])

    def alert(self, step: int, sentence: str) -> None:
        self._run.alert(self.name, sentence, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()

"""Weights & Biases."""

import os
import secrets
from pathlib import Path

from gerl.run.trackers.base import PROJECT, TrackedRun, reach


class Wandb:
    """A run of wandb; WANDB_MODE, WANDB_BASE_URL, WANDB_PROJECT, WANDB_NAME and the others are read by the package."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_CONSOLE", "off")  # this process says nothing worth to be sent
        import wandb

        self._wandb, given = wandb, wandb.setup().settings
        if given.mode in ("online", "run", "shared"):
            reach(given.base_url, "WANDB_MODE=offline stores a run here, for wandb sync")
        self._run = wandb.init(
            project=run.project or given.project or PROJECT,
            name=given.run_name or run.name,
            id=run.id or given.run_id or secrets.token_hex(8),
            resume="allow" if run.id else None,
            tags=[*run.tags, *(given.run_tags or ())],
            dir=None if os.environ.get("WANDB_DIR") else str(run.folder),
        )
        self._run.config.update(run.config, allow_val_change=True)
        # not wandb's own step, which has to rise: a resumed run repeats those after its checkpoint
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.project, self.name, self.id = self._run.project, self._run.name or run.name, self._run.id
        off = "disabled by WANDB_MODE" if given.mode == "disabled" else f"wandb sync {Path(self._run.dir).parent}"
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
        self._wandb.teardown()  # waits for its service, which has the end of the run still to write

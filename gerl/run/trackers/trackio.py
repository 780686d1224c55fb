"""trackio: a database on this machine, a Space of Hugging Face, or a server of one's own."""

import os
from pathlib import Path

from gerl.run.trackers.base import PROJECT, TrackedRun, reach


class Trackio:
    """A run of trackio; TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL and the others are read by the package."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio
        from huggingface_hub import constants

        self._trackio = trackio
        space, server = os.environ.get("TRACKIO_SPACE_ID"), os.environ.get("TRACKIO_SERVER_URL", "").partition("?")[0]
        if space or server:  # what follows in the address of a server may be a token
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

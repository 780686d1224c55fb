"""SwanLab."""

import os
import shutil
import uuid
from pathlib import Path

from gerl.run.trackers.base import PROJECT, TrackedRun, reach


class Swanlab:
    """A run of SwanLab; SWANLAB_MODE, SWANLAB_API_HOST, SWANLAB_PROJ_NAME and the others are read by the package."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._swanlab = swanlab
        # without questions, and without what this process prints
        given = swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none"))
        if given.mode == "online":
            reach(given.api_host, "SWANLAB_MODE=offline stores a run here, for swanlab sync")
        elsewhere = os.environ.get("SWANLAB_LOG_DIR") or os.environ.get("SWANLAB_LOGDIR")
        self._run = swanlab.init(
            project=run.project or given.project.name or PROJECT,
            name=given.experiment.name or run.name,
            id=run.id or given.run.id or uuid.uuid4().hex[:21],
            resume="allow",
            tags=[*run.tags, *given.experiment.tags],
            config=run.config,
            log_dir=None if elsewhere else str(run.folder / "swanlab"),
            settings=given,
        )
        self.project, self.name, self.id = run.project or given.project.name or PROJECT, self._run.name, self._run.id
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
        kept = Path(self._run.dir) / "lora" / f"step_{step}"  # SwanLab reads the files later
        shutil.copytree(folder, kept, dirs_exist_ok=True)
        self._run.save(f"{kept}/*", base_path=self._run.dir, policy="now")

    def alert(self, step: int, sentence: str) -> None:
        """SwanLab has alerts by mail and chat only: it is a text."""
        self._run.log({"alerts": self._swanlab.Text(sentence)}, step=step)

    def close(self, failed: bool) -> None:
        if failed:
            self._run.finish(state="crashed", error="the run ended with an error or was interrupted")
        else:
            self._run.finish()

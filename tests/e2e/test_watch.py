"""A run that is watched: the page sees it train, and tells it to save, to validate and to stop."""

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from watching import serving

from gerl.run.session import ask
from gerl.trainer.main_flowgrpo import main

STEPS = 2000  # more than are taken


class Visitor(threading.Thread):
    """Opens the page of a run and presses its buttons, each when the one before it has been obeyed."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(daemon=True)
        self.url, self.folder = url, folder
        self.seen: dict[str, Any] = {}
        self.error: Exception | None = None

    def get(self, path: str, **query: Any) -> Any:
        answer = requests.get(f"{self.url}/api/{path}", params={"run": self.folder.name, **query}, timeout=10)
        return answer.json() if answer.ok else {}

    def until(self, condition: Callable[[], Any]) -> Any:
        end = time.monotonic() + 60
        while not (found := condition()):
            assert time.monotonic() < end
            time.sleep(0.01)
        return found

    def press(self, command: str) -> None:
        given = {"run": self.folder.name, "command": command}
        answer = requests.post(f"{self.url}/api/control", json=given, timeout=10)
        assert answer.json() == {"asked": command}

    def run(self) -> None:
        try:
            self.until(lambda: self.get("run").get("step", 0) >= 2)
            self.seen["run"] = self.get("run")
            self.seen["live"] = self.until(lambda: self.get("live"))
            self.press("save")
            self.seen["saved"] = self.until(lambda: [p.name for p in (self.folder / "checkpoints").glob("step_*")])
            self.press("validate")
            self.seen["validated"] = self.until(lambda: self.get("held_out").get("steps", [])[1:])
            self.press("stop")
        except Exception as error:  # noqa: BLE001 - raised by the test
            self.error = error
            ask(self.folder, "stop")


def test_a_watched_run_saves_validates_and_stops_when_it_is_told_to(
    arguments: Callable[..., list[str]], workplace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    ask(folder, "stop")  # of a run before this one
    keys = [f"validation.data={workplace / 'val.txt'}", "validation.num_inference_steps=2", "validation.every=0"]
    keys += ["checkpoint.every=0", "sampling.num_inference_steps=2", f"trainer.steps={STEPS}", "logger.report=true"]
    given = [key for key in arguments(folder) if key.split("=")[0] not in {k.split("=")[0] for k in keys}]
    with serving(tmp_path) as (url, _), caplog.at_level(logging.INFO, logger="gerl"):
        visitor = Visitor(url, folder)
        visitor.start()
        assert main([*given, *keys]) == 0
        visitor.join(60)
        if visitor.error is not None:
            raise visitor.error
        assert visitor.get("run")["alive"] is False and visitor.get("run")["asked"] == []
        timeline = visitor.get("timeline", steps=2)
    seen, steps = visitor.seen, [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]
    last = steps[-1]
    assert seen["run"]["alive"] and seen["run"]["writable"] and 2 <= last < STEPS and steps == list(range(last + 1))
    assert len(seen["live"]["images"]) == 8 == seen["live"]["of"] and len(seen["live"]["prompts"]) == 2
    totals = [total for _, _, total, _, _ in seen["live"]["images"]]
    advantages = [advantage for *_, advantage, _ in seen["live"]["images"]]
    for members in (slice(0, 4), slice(4, 8)):  # of a group: the better image has the larger advantage
        order = sorted(zip(totals[members], advantages[members], strict=True))
        assert [advantage for _, advantage in order] == sorted(advantages[members]) and order[0][1] < 0 < order[-1][1]
    assert {(row["worker"], row["what"]) for row in timeline["spans"]} >= {
        ("run", "sample"), ("run", "update"), ("worker 0", "sample"), ("worker 0", "update"),
    }  # fmt: skip
    said = "\n".join(caplog.messages)
    for name in ("saving a checkpoint", "validating"):
        assert f"{name}, as requested" in said
    assert f"stopped after step {last}, as requested; the latest checkpoint is" in said
    assert f"step_{last}: resume with checkpoint.resume={folder}" in said and f"watch run={folder}" in said
    assert (folder / "checkpoints" / f"step_{last}" / "state.json").exists() and (folder / "report.html").exists()
    assert json.loads((folder / "run.json").read_text())["sessions"][-1]["end"] == "interrupted"
    assert main([f"checkpoint.resume={folder}", f"trainer.steps={last + 1}", "logger.live=false"]) == 0
    assert not list((folder / "live").glob("*")) and not (folder / "control").exists()


ASKS = """
from pathlib import Path
import numpy as np

def compute_score(images, prompts, metadata, folder, command):
    if not (folder := Path(folder)).with_suffix(".asked").exists():  # on grey images, before the model is loaded
        folder.with_suffix(".asked").touch()
        (folder / "control").mkdir()
        (folder / "control" / command).touch()
    return [float(np.asarray(image).mean()) / 255 for image in images]
"""


@pytest.mark.parametrize("command", ["stop", "save"])
def test_what_is_asked_while_the_run_loads_is_done(
    arguments: Callable[..., list[str]],
    workplace: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    command: str,
) -> None:
    (workplace / "asks.py").write_text(ASKS)
    run, kwargs = tmp_path / "run", f"{{folder: {tmp_path / 'run'}, command: {command}}}"
    keys = [f"reward.scorers.bright.kwargs={kwargs}", "checkpoint.every=0"]
    with caplog.at_level(logging.INFO, logger="gerl"):
        assert main(arguments(run, *keys, scorer="asks.py")) == 0
    if command == "stop":
        assert "stopped after step 0, as requested" in caplog.text and not run.exists()
    else:
        assert (run / "checkpoints" / "step_1").is_dir()

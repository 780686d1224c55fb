"""What the tests of the page share: run folders with everything in them, and the real server of the page."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import uvicorn

from gerl.progress import Span
from gerl.protocol import Prompt, Sample, Scores, Turn
from gerl.run.validation import save_validation
from gerl.trainer.extensions.episode_images import arranged
from gerl.trainer.extensions.timeline import append_spans
from gerl.trainer.extensions.training_images import LiveImage, live_path, save_live, save_sheet
from gerl.web.site import Folders, Site, build_site

PROMPTS = ['a sign that reads "<img src=x onerror=alert(1)>"', "a sign that reads 12", "a red fox"]
CONFIG = """
model: {path: signs, lora_rank: 8}
trainer: {steps: 40}
rollout: {prompts_per_step: 2, n: 2}
reward: {scorers: {ocr: {weight: 1.0}}}
validation: {data: held_out.txt}
"""


def row(step: int) -> dict[str, float | str]:
    """A line of metrics."""
    values: dict[str, float | str] = {"step": step, "time": f"2024-05-01T10:{step // 60 % 60:02d}:{step % 60:02d}.000Z"}
    if step:
        reward = 0.5 + 0.4 * step / (step + 20)
        values |= {
            "reward/mean": reward,
            "reward/ocr/mean": reward,
            "actor/kl": 0.01 * step,
            "actor/grad_norm": 1 / step,
        }
        values |= {"timing/rollout_s": 1.0, "timing/update_s": 0.5, "timing/step_s": 1.75}
    if step % 10 == 0:
        values |= {"val/reward/mean": 0.4 + 0.01 * step, "val/ocr/mean": 0.4 + 0.01 * step}
    return values


def add_rows(folder: Path, first: int, last: int) -> None:
    """Metrics of the steps from `first` to `last`."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row(step)) + "\n" for step in range(first, last + 1))


def add_validation(folder: Path, step: int, rewards: list[float | None] | None = None) -> None:
    """A validation whose pictures are as bright as the step is late."""
    pixels = np.full((len(PROMPTS), 16, 32, 3), 5 * step, np.uint8)
    values = rewards or [step / 40, 0.5, 1 - step / 40]
    save_validation(folder, step, PROMPTS, pixels, values, {"ocr": values})


def add_live(folder: Path, step: int) -> None:
    """Images of a step: two of each of two groups."""
    images = [LiveImage(g, i, 0.5 + 0.1 * i, {"ocr": 0.5 + 0.1 * i}, 2.0 * i - 1) for g in (0, 1) for i in (0, 1)]
    pixels = [np.full((16, 32, 3), 60 * k, np.uint8) for k in range(4)]
    save_live(folder, step, PROMPTS[:2], images, pixels, 4)


def episode(step: int) -> tuple[Scores, list[np.ndarray]]:
    """Two images of a prompt, of which the second is edited twice, on a request with HTML."""
    pixels = [np.full((16, 32, 3), 40 * k + step, np.uint8) for k in range(4)]
    first, second = Turn(0, "draw"), Turn(1, "edit", "<i>bolder</i>", pixels[1], 0)
    samples = [Sample(Prompt(0, PROMPTS[0], turn=first), k, 0, step, turn=0, role="draw") for k in (0, 1)]
    samples += [Sample(Prompt(0, PROMPTS[0], turn=second), k, 0, step, turn=1, role="edit", branch=0) for k in (0, 1)]
    totals = [0.1, 0.5, 0.9, step / 40]
    return Scores(samples, list(totals), {"ocr": list(totals)}, [[] for _ in samples]), pixels


def add_episodes(folder: Path, step: int) -> None:
    """The episodes of a step and of its validation."""
    scores, pixels = episode(step)
    values, shown = arranged(scores, pixels, torch.tensor([[-1.0], [1.0], [0.5], [torch.nan]]))
    save_sheet(live_path(folder, step), shown, {"step": step, "of": len(pixels), **values})
    values, shown = arranged(scores, pixels)
    save_sheet(folder / "validation" / f"episode_{step:06d}.json", shown, {"step": step, **values})


def make_run(folder: Path, steps: int = 20) -> Path:
    """The folder of a run."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    add_rows(folder, 0, steps)
    for step in range(0, steps + 1, 10):
        add_validation(folder, step)
    add_live(folder, steps)
    spans = [Span("run", "sample", 20, 100.0, 101.0), Span("worker 0", "sample", 20, 100.0, 100.9)]
    append_spans(folder, [*spans, Span("scorer ocr, process 0", "score", 20, 100.5, 101.0)])
    (folder / "log.txt").write_text("2024-05-01T10:00:00Z INFO gerl: run folder: x\n")
    return folder


@contextmanager
def serving(folder: Path, token: str | None = None) -> Iterator[tuple[str, Site]]:
    """The address of the page of `folder`, and what it is made from."""
    app, site = build_site(Folders.of(folder), token, token is None)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", site
    finally:
        site.closing.set()
        server.should_exit = True
        thread.join(10)

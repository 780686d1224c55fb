"""The report of a whole run: the code in it draws the picture it shows, and its pictures are spread over the file."""

import html
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from PIL import Image

from gerl.config import ValidationConfig
from gerl.run.validation import load_validation
from gerl.trainer.validation import shown_images

Train = Callable[..., Any]
SHORT = ("rollout.prompts_per_step=1", "rollout.n=2", "sampling.num_inference_steps=2", "actor.lr=0.02")


def drawn(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The picture that a program saves in the current folder."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    exec(compile(code, "the printed program", "exec"), {})
    (picture,) = folder.glob("*.png")
    return np.asarray(Image.open(picture))


@pytest.mark.parametrize("name", ["sd3", "sd15"])
def test_the_printed_program_draws_the_picture_that_is_shown(
    name: str, train: Train, workplace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pipe = getattr(tiny, name)()
    keys = {"model__path": tmp_path / "model"}
    if name == "sd15":  # its scheduler has no transition kernel
        pipe.scheduler = diffusers_scheduler(pipe)
        keys |= {
            "sampling__call": "{negative_prompt: ugly}",
            "sampling__guidance_scale": "3",
            "sampling__kernel": "ddim",
        }
    pipe.save_pretrained(tmp_path / "model")
    settings = (f"validation.data={workplace / 'val.txt'}", "validation.images=3", "validation.num_inference_steps=3")
    with caplog.at_level(logging.INFO, logger="gerl"):
        run = train(tmp_path / "run", *SHORT, *settings, "logger.report=true", trainer__steps=2, **keys)
    shown = load_validation(run.folder, 2)
    assert (
        shown.shown == shown_images(4, ValidationConfig(images=3))
        and shown.drawing is not None
        and len(shown.pixels) == 3
    )
    before = load_validation(run.folder, 0)
    assert not np.array_equal(before.pixels[0], shown.pixels[0])
    report = (run.folder / "report.html").read_text(encoding="utf-8")
    (code,) = [html.unescape(text) for text in re.findall(r"<pre>(import.*?)</pre>", report, re.DOTALL)]
    printed = caplog.messages[-1].partition("in plain diffusers:\n")[2]
    assert "\n".join(line.strip() for line in printed.strip().splitlines()) == "\n".join(
        line.strip() for line in code.splitlines()
    )
    assert ("trainable_scheduler" in code) == (name == "sd15")
    found = drawn(code, tmp_path / "elsewhere", monkeypatch)
    # the run drew several pictures in one batch, which may change the last bit
    assert np.abs(found.astype(int) - shown.pixels[0]).max() <= 1
    assert "3 of 4 shown" in report and "of 4 held-out prompts" in report


def diffusers_scheduler(pipe: Any) -> Any:
    import diffusers

    return diffusers.DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)

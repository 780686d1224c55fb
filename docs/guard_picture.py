"""Make the picture of docs/guard.md: train for a reward that asks for a frame, and photograph the card of the report.

    python docs/guard_picture.py [RUN]

RUN: a finished run whose card is wanted instead. Takes a minute on two cores; needs playwright and chromium.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "guard.png"
WIDTH, COLOURS = 1000, 128  # pixels, and colours of the picture
KEYS = """
experiment=signs actor.lr=1e-3 actor.lr_schedule=constant trainer.steps=24 trainer.seed=2 validation.every=6
validation.max_prompts=64 checkpoint.every=6 cluster.launcher=local cluster.threads_per_worker=1
""".split()
REWARD = f"reward.scorers={{frame: {{path: {ROOT / 'benchmarks' / 'hackable.py'}, function: frame}}}}"


def train(folder: Path) -> Path:
    """Train in `folder` and return the run folder, relative as most people have it."""
    run = Path("outputs/signs/frame")
    subprocess.run(
        [sys.executable, "-m", "gerl", "train", *KEYS, REWARD, f"hydra.run.dir={run}"], cwd=folder, check=True
    )
    return run


def photograph(report: Path, target: Path) -> None:
    """Photograph the card of a report."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 800})
        page.goto(report.as_uri())
        page.locator("#hacking").screenshot(path=target)
        browser.close()
    Image.open(target).convert("RGB").quantize(COLOURS).save(target, optimize=True)


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(arguments[0]) if arguments else train(Path(folder))
        subprocess.run([sys.executable, "-m", "gerl.run.report", f"run={run}"], cwd=folder, check=True)
        photograph(Path(folder) / run / "report.html", PICTURE)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Write the README's picture and numbers from a run of `make demo`: `python docs/demo_picture.py RUN`; needs chromium.

`docs/pictures/demo.png` has held-out images before and after training, and the report;
`benchmarks/results/demo.json` has the validations and the machine.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from gerl.run.card import CARD, read_sessions
from gerl.run.tracking import METRICS, read_metrics

ROOT = Path(__file__).resolve().parents[1]
PICTURE, NUMBERS = ROOT / "docs" / "pictures" / "demo.png", ROOT / "benchmarks" / "results" / "demo.json"
WIDTH, HEIGHT = 1040, 780
BROWSER = "chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --virtual-time-budget=4000"
PLACES = ("command", "folder", "repository")  # of the machine on which it ran
COLUMNS = 2  # of a sheet's four
TITLE, MARGIN = 44, 16  # pixels


def screenshot(run: Path, target: Path) -> None:
    """Photograph the report of a run."""
    with tempfile.TemporaryDirectory() as profile:
        options = [f"--user-data-dir={profile}", f"--screenshot={target}", f"--window-size={WIDTH},{HEIGHT}"]
        page = (run / "report.html").resolve().as_uri()
        subprocess.run([*BROWSER.split(), *options, page], check=True, env=os.environ | {"TZ": "UTC"})


def sheet(run: Path, step: int) -> Image.Image:
    """The first columns of the held-out images of a step."""
    found = Image.open(run / "samples" / f"validation_{step:06}.png").convert("RGB")
    return found.crop((0, 0, found.width * COLUMNS // 4, found.height))


def main(run: Path) -> None:
    rows = [row for row in read_metrics(run / METRICS) if "val/ocr/mean" in row]
    if not rows:
        raise SystemExit(f"{run} has no validations: give the folder of a finished run of `make demo`")
    last = int(rows[-1]["step"])
    validation = [{"step": r["step"], "reward": r["val/ocr/mean"], "exact": r["val/ocr/exact/mean"]} for r in rows]
    card = {name: value for name, value in read_sessions(run / CARD)[-1].items() if name not in PLACES}
    NUMBERS.write_text(json.dumps({"command": "make demo", "card": card, "validation": validation}, indent=1) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        screenshot(run, Path(folder) / "page.png")
        page = Image.open(Path(folder) / "page.png").convert("RGB")
    parts = {"before": sheet(run, 0), f"after {last} steps": sheet(run, last), "the report": page}
    size = (sum(part.width + MARGIN for part in parts.values()), TITLE + max(part.height for part in parts.values()))
    picture, left, font = Image.new("RGB", size, "white"), 0, ImageFont.load_default(22)
    draw = ImageDraw.Draw(picture)
    for title, part in parts.items():
        draw.text((left + 6, 8), title, fill=(31, 35, 40), font=font)
        picture.paste(part, (left, TITLE))
        left += part.width + MARGIN
    picture.quantize(128).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

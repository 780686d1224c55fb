"""Make the pictures of docs/studio.md and docs/vote.md, and the animation of the README.

Drives the studio in a browser as a reader would: from an empty folder to a trained, evaluated and exported LoRA with a
reward function typed into the page, in two to four minutes on two cores; then votes.
Needs the package playwright and chromium.
"""

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

PICTURES = Path(__file__).resolve().parent / "pictures"
SIZE, WIDE = (1200, 800), 900  # pixels: of the browser, and of the animation
SECONDS = 20.0  # of the animation
CODE = '''def compute_score(images, prompts):
    """Bright signs."""
    return [sum(image.convert("L").tobytes()) / image.width / image.height / 255 for image in images]
'''


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[str]:
    """Run a command of gerl that serves a page; yields its address, with the token."""
    command = [sys.executable, "-m", "gerl", *arguments, "port=0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder)
    assert process.stderr is not None
    found = (re.search(r"http://\S+", line) for line in process.stderr)
    try:
        yield next(match[0] for match in found if match)
    finally:
        process.terminate()
        process.wait()


class Film:
    """Frames of the animation."""

    def __init__(self, page: Page) -> None:
        self.page, self.frames, self.start = page, list[tuple[float, Image.Image]](), time.monotonic()

    def shoot(self, weight: float = 1.0) -> None:
        """Take a frame, shown for a time in proportion to `weight`."""
        picture = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
        self.frames.append((weight, picture.resize((WIDE, WIDE * SIZE[1] // SIZE[0]), Image.Resampling.LANCZOS)))

    def write(self, path: Path) -> None:
        """Write the frames as an animated WebP of `SECONDS`."""
        total = sum(weight for weight, _ in self.frames)
        durations = [round(1000 * SECONDS * weight / total) for weight, _ in self.frames]
        first, *others = [frame for _, frame in self.frames]
        first.save(path, save_all=True, append_images=others, duration=durations, loop=0, quality=70, method=6)


def drive(page: Page, url: str, film: Film, steps: int) -> None:
    """From an empty folder to an exported LoRA."""
    page.wait_for_selector("text=Try the demo")
    film.shoot()
    page.click("text=Try the demo")
    page.wait_for_selector(".status.good")
    page.fill("#field-name", "bright signs")
    page.fill('[id="field-trainer.steps"]', str(steps))
    film.shoot()
    page.click("text=What the model draws now")
    page.click("text=Draw these prompts")
    page.wait_for_selector("ul.images img")
    page.locator("ul.images").first.scroll_into_view_if_needed()
    film.shoot(2)
    page.click("text=Your own function")
    area = page.locator('textarea[aria-label="function of mine"]')
    area.fill(CODE.replace("images]", "image]"))
    page.click("text=Score the images above")
    page.wait_for_selector("section[aria-label=Reward] .wrong:not(:empty)")
    area.scroll_into_view_if_needed()
    page.wait_for_timeout(600)
    film.shoot(2)
    area.fill(CODE)
    page.click("text=Text in quotes is legible")
    page.wait_for_selector(".status.good")
    page.click("text=Score the images above")
    page.wait_for_selector("section[aria-label=Reward] ul.images img")
    page.locator("section[aria-label=Reward] ul.images").scroll_into_view_if_needed()
    film.shoot(2)
    page.evaluate("window.scrollTo(0, 0)")
    page.wait_for_timeout(300)
    page.screenshot(path=PICTURES / "studio.png")
    film.shoot()
    page.click(".start-bar .first")
    page.wait_for_url(f"{url}/")
    page.wait_for_selector(".run .thumb img")
    page.wait_for_timeout(4000)
    film.shoot()
    page.screenshot(path=PICTURES / "studio_runs.png", clip={"x": 0, "y": 0, "width": SIZE[0], "height": 480})
    page.click(".run a:text('bright signs')")
    while trained(page, url)["state"] == "running":
        page.wait_for_timeout(2000)
        if page.locator("#reward-chart svg path").count() and len(film.frames) < 20:
            film.shoot(0.7)
    page.goto(f"{url}/compare?run=bright signs")
    page.wait_for_selector("fieldset input")
    page.fill(
        "#own-prompts", 'a red sign that reads "CAT"\na blue sign that reads "DOG"\na green sign that reads "FOX"'
    )
    page.click("text=Draw")
    page.wait_for_selector(".pairs img >> nth=5")
    page.locator("#own-prompts").scroll_into_view_if_needed()
    film.shoot(3)
    page.screenshot(path=PICTURES / "studio_compare.png")
    page.fill("#evaluate-most", "16")
    page.click("section[aria-label=Evaluate] button")
    page.wait_for_url("**/job?job=*")
    page.wait_for_selector(".tag.finished", timeout=180_000)
    film.shoot(2)
    page.goto(f"{url}/compare?run=bright signs")
    page.wait_for_selector("fieldset input")
    page.click("section[aria-label=Export] button")
    page.wait_for_url("**/job?job=*")
    page.wait_for_selector(".tag.finished", timeout=180_000)
    film.shoot(2)


def trained(page: Page, url: str) -> dict[str, Any]:
    """The job that trains."""
    found = page.request.get(f"{url}/api/home").json()
    return next(job for job in found["jobs"] if job["command"] == "train")


SIGNS = ["PILOT", "7261", "CAT", "FOX"]
VOTED = ["experiment=signs", "data.train=signs.txt", "validation.data=null", "rollout.prompts_per_step=4"]


def vote(browser: Browser, folder: Path) -> None:
    """Take the pictures of voting: in the light, ranking in the dark, on a phone."""
    (folder / "signs.txt").write_text("".join(f'a red sign that reads "{word}"\n' for word in SIGNS), encoding="utf-8")
    views = {"vote": ("light", 1100), "vote_rank": ("dark", 1100), "vote_phone": ("light", 390)}
    with serving(folder, "vote", *VOTED, "rollout.n=6", "out=voted") as url:
        for name, (scheme, width) in views.items():
            page = browser.new_page(viewport={"width": width, "height": 700}, color_scheme=scheme)  # type: ignore[arg-type]
            page.goto(url)
            page.wait_for_selector("#stage img", timeout=120_000)
            page.wait_for_timeout(1500)
            if name == "vote_rank":
                for key in "r342":
                    page.keyboard.press(key)
            page.wait_for_timeout(500)
            page.screenshot(path=PICTURES / f"{name}.png")
            page.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of the runs; default: a temporary one")
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        root = args.folder or Path(place) / "outputs"
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]})
        page.set_default_timeout(120_000)
        with serving(root.parent, "studio", f"folder={root.name}") as opening:
            url = opening.partition("/?")[0]
            film, start = Film(page), time.monotonic()
            page.goto(opening)  # a cookie keeps the token
            drive(page, url, film, args.steps)
            sys.stdout.write(json.dumps({"seconds": round(time.monotonic() - start)}) + "\n")
        film.write(PICTURES / "studio.webp")
        vote(browser, Path(place))
        browser.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

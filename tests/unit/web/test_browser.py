"""The page in a browser: slider, phone, dark mode, buttons, and prompts with HTML; skipped where there is no browser.

It needs the package playwright and a Chromium that is installed (GERL_BROWSER names it, else one on the PATH).
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from watching import PROMPTS, add_episodes, add_live, add_rows, add_validation, make_run, serving

from gerl.run.checkpoint import RunLock
from gerl.run.report import write_report
from gerl.run.session import asked
from gerl.run.validation import save_validation

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
BROWSER = os.environ.get("GERL_BROWSER") or next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
WAIT = 10_000  # milliseconds
SHADE = """async (image) => {
  await image.decode();
  const context = document.createElement("canvas").getContext("2d");
  context.drawImage(image, 0, 0);
  return context.getImageData(4, 4, 1, 1).data[0];
}"""  # of a picture that has one colour


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--renderer-process-limit=2"]
        )
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that has raised nothing and asked no other server."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(WAIT)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: asked_for.append(request.url))
    asked_for: list[str] = []
    yield page
    context.close()
    assert errors == []
    assert all(url.startswith(("http://127.0.0.1:", "data:", "file:")) for url in asked_for)


def text(page: Any, selector: str, expected: str) -> None:
    sync_api.expect(page.locator(selector)).to_have_text(expected, timeout=WAIT)


def shows(page: Any, step: int) -> None:
    """The training images of this step are shown."""
    sync_api.expect(page.locator("#live-step")).to_have_value(str(step), timeout=WAIT)


def test_a_run_is_watched_while_it_goes_on(page: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "outputs" / "x" / "one")
    lock = RunLock(run)
    lock.acquire()
    try:
        with serving(tmp_path / "outputs") as (url, _):
            page.goto(url)
            text(page, "#slider-step", "step 20")
            assert "step 20 of 40" in page.locator("#state").inner_text()
            page.select_option("#prompt", "0")  # its HTML is text
            text(page, "#now-note", "step 20: 0.500 +0.500")
            page.locator("#slider").focus()
            page.keyboard.press("ArrowLeft")
            text(page, "#now-note", "step 10: 0.250 +0.250")
            assert page.eval_on_selector("#now img", SHADE) == 50  # the picture of step 10
            assert page.locator("#prompt option").all_inner_texts() == PROMPTS
            assert page.locator("img[onerror]").count() == 0
            assert page.locator("#groups .group").count() == 2 and page.locator("#groups .tile").count() == 4
            assert page.locator("#timeline rect").count() == 3
            # the run goes on, and the page with it
            add_rows(run, 21, 30)
            add_validation(run, 30)
            add_live(run, 30)
            shows(page, 30)
            page.locator("#slider").focus()
            page.keyboard.press("End")
            text(page, "#now-note", "step 30: 0.750 +0.750")
            page.get_by_role("button", name="largest loss").click()
            sync_api.expect(page.locator("#extreme-list p").first).to_contain_text("a red fox")
            # the buttons
            page.get_by_role("button", name="Save").click()
            text(page, "[data-command=save]", "Saving after this step …")
            assert asked(run) == ["save"]
            (run / "control" / "save").unlink()
            text(page, "[data-command=save]", "Save")
            page.get_by_role("button", name="Stop").click()
            assert asked(run) == []  # asks once more
            page.get_by_role("button", name="Stop for sure?").click()
            text(page, "[data-command=stop]", "Stopping after this step …")
            assert asked(run) == ["stop"]
            lock.release()
            sync_api.expect(page.locator("#buttons")).to_be_hidden()
    finally:
        lock.release()


def test_each_image_of_a_prompt_is_named_and_signals_of_a_kind_are_one_line(page: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "outputs" / "x" / "one", 0)
    texts, ids = ["a red fox", "a red fox", "blue", "blue"], [0, 0, 1, 1]
    for step in (0, 10, 20):
        pixels = np.full((4, 24, 32, 3), 60, np.uint8) + np.arange(4, dtype=np.uint8)[:, None, None, None] * 40
        values: list[float | None] = [0.1 * i + step / 50 * (i == 3) for i in range(4)]
        save_validation(run, step, texts, pixels, values, {"ocr": values}, ids=ids)
        signal = {"step": step, "signal": "watched", "column": "ocr", "text": f"ocr fell, {step}", "shown": [1, 2]}
        with (run / "guard.jsonl").open("a") as file:
            file.write(json.dumps(signal) + "\n" if step else "")
    with serving(tmp_path / "outputs") as (url, _):
        page.goto(url)
        text(page, "#slider-step", "step 20")
        assert page.locator("#prompt option").all_inner_texts() == [
            f"{prompt} (image {i} of 2)" for prompt in ("a red fox", "blue") for i in (1, 2)
        ]
        assert page.locator("#prompt").input_value() == "3"  # it gained most
        text(page, "#now-note", "step 20: 0.700 +0.400")
        page.select_option("#prompt", "1")
        text(page, "#now-note", "step 20: 0.100 +0.000")
        assert page.eval_on_selector("#now img", SHADE) == 100
        sync_api.expect(page.locator("#extreme-list .pair").first).to_contain_text("blue2/20.300 → 0.700")
        page.locator("#hacking summary").click()
        assert page.locator("#signal-list p").all_inner_texts() == ["steps 10 to 20, watchedocr fell, 20"]
        assert page.locator("#signal-list img").count() == 2 and page.locator("#warnings").is_hidden()


def test_a_hacked_run_has_one_card_and_no_green_gain(page: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "outputs" / "x" / "one")
    signal = {"step": 20, "signal": "watched", "column": "ocr", "value": -0.1, "text": "ocr fell", "shown": [1, 0]}
    with serving(tmp_path / "outputs") as (url, _):
        page.goto(url)
        text(page, "#slider-step", "step 20")
        assert page.locator("#hacking").is_hidden() and page.locator("#sections.doubtful").count() == 0
        (run / "guard.jsonl").write_text(json.dumps(signal) + "\n")
        for address in (url, write_report(run).as_uri()):
            if address != url:
                page.goto(address)
            text(page, "#hacking-title", "Probably hacked since step 20")
            sync_api.expect(page.locator("#hacking-pairs .pair")).to_have_count(3)
            assert page.locator("#hacking-pairs p").all_inner_texts() == [PROMPTS[1], PROMPTS[0], PROMPTS[2]]  # as text
            shades = [page.locator("#hacking-pairs img").nth(i).evaluate(SHADE) for i in (0, 1)]
            assert shades == [0, 100]  # of the first step and of the flagged one
            assert page.locator("#hacking-falls li").count() == 1 and page.locator("#signal-list").is_hidden()
            sync_api.expect(page.locator("#numbers")).to_contain_text("in doubt, see above; ")
            gain, ink = (
                page.eval_on_selector(where, "(node) => getComputedStyle(node).color")
                for where in ("#extreme-list .up", "#extreme-list .pair")
            )
            assert gain == ink
            page.locator("#hacking-pairs .zooms").nth(1).click()
            text(page, "#zoom-note", f"{PROMPTS[1]}, step 20")
            page.keyboard.press("Escape")


def test_fifty_pages_are_open_and_show_what_is_new(browser: Any, tmp_path: Path) -> None:
    """Each under a name of its own, as a browser has six connections at most to one."""
    run = make_run(tmp_path / "outputs" / "x" / "one")
    with serving(tmp_path / "outputs") as (url, site):
        context = browser.new_context(viewport={"width": 400, "height": 300})
        pages = [context.new_page() for _ in range(50)]
        for i, page in enumerate(pages):
            page.goto(url.replace("127.0.0.1", f"visitor{i}.localhost"), wait_until="commit")
        for page in pages:
            shows(page, 20)
        assert site.streams >= 50
        add_live(run, 21)
        for page in pages:
            shows(page, 21)
        context.close()


def test_phone_dark_mode_and_another_run(browser: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "outputs" / "x" / "one")
    make_run(tmp_path / "outputs" / "x" / "two", 10)
    with serving(tmp_path / "outputs") as (url, _):
        context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark", has_touch=True)
        page = context.new_page()
        page.goto(url)
        text(page, "#slider-step", "step 20")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        red, green, blue = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert max(red, green, blue) < 60
        page.locator("#others input").check()
        sync_api.expect(page.locator("#compare-chart path")).to_have_count(2)
        page.select_option("#run", "x/two")
        text(page, "#slider-step", "step 10")
        assert page.url.endswith("run=x%2Ftwo")
        page.reload()
        text(page, "#slider-step", "step 10")
        context.close()


def test_images_open_and_arrow_keys_turn_to_others(page: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "outputs" / "x" / "one")
    make_run(tmp_path / "outputs" / "x" / "two", 10)
    add_live(run, 21)
    lora = run / "checkpoints" / "step_20" / "lora" / "pytorch_lora_weights.safetensors"
    lora.parent.mkdir(parents=True)
    lora.write_bytes(b"weights")
    with serving(tmp_path / "outputs") as (url, _):
        page.goto(f"{url}/?run=x/one")
        text(page, "#slider-step", "step 20")
        shows(page, 21)
        chosen = page.locator("#prompt").input_value()
        page.keyboard.press("ArrowRight")
        sync_api.expect(page.locator("#prompt")).not_to_have_value(chosen)
        page.select_option("#live-step", "20")  # an earlier step, which stays while others come
        add_live(run, 22)
        sync_api.expect(page.locator("#live-step option")).to_have_count(3)
        shows(page, 20)
        page.locator("#groups .zooms").first.click()
        before = page.locator("#zoom-note").inner_text()
        page.keyboard.press("ArrowLeft")
        assert page.locator("#zoom-note").inner_text() != before and page.locator("#zoom img").is_visible()
        page.keyboard.press("Escape")
        sync_api.expect(page.locator("#zoom")).to_be_hidden()
        page.locator("#now").click()
        sync_api.expect(page.locator("#zoom-note")).to_contain_text("step 20")
        page.keyboard.press("Escape")
        page.locator("#others input").check()
        sync_api.expect(page.locator("#side .pair")).to_have_count(3)
        sync_api.expect(page.locator("#side .pair img")).to_have_count(6)
        with page.expect_download() as download:
            page.locator("#lora").click()
        assert download.value.path().read_bytes() == b"weights"
        assert download.value.suggested_filename == "gerl-one-step20.safetensors"


def test_an_episode_is_a_row_of_its_turns(page: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "outputs" / "x" / "one")
    for step in (0, 10, 20):
        add_episodes(run, step)
    text_of_an_edit = "<i>bolder</i>"  # as text
    with serving(tmp_path / "outputs") as (url, _):
        for address in (url, write_report(run).as_uri()):
            page.goto(address)
            shows(page, 20)
            live = page.locator("#groups .group")
            sync_api.expect(live).to_have_count(1)
            assert live.locator(".turn > .soft").all_inner_texts() == [
                "turn 0, draw, mean 0.300",
                "turn 1, edit, mean 0.700",
            ]
            assert (
                live.locator(".asked").all_inner_texts() == [text_of_an_edit] and page.locator("#page i i").count() == 0
            )
            assert live.locator(".tile").count() == 4 and live.locator(".tile.on").count() == 1
            alt = live.locator(".tile.on img").get_attribute("alt")
            assert alt.startswith(PROMPTS[0]) and "turn 0, draw" in alt and "goes on to turn 1, edit" in alt
            sync_api.expect(live.locator(".tile img").nth(3)).to_be_visible()
            first, second = (live.locator(".tile img").nth(i).bounding_box() for i in (0, 3))
            assert first["x"] < second["x"]
            rows = page.locator("#episode-list .at")
            assert rows.locator("> .soft").all_inner_texts() == ["step 0", "step 20"]
            if address == url:
                page.select_option("#episode-step", "10")
                text(page, "#episode-list .at:nth-of-type(2) > .soft", "step 10")
            rows.first.locator(".zooms").first.click()
            sync_api.expect(page.locator("#zoom-note")).to_contain_text("turn 0, draw")
            page.keyboard.press("Escape")


def test_ticks_have_as_many_digits_as_tell_them_apart(page: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "outputs" / "x" / "one")
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(21, 31):
            file.write(
                json.dumps({"step": step, "actor/lr": 5e-4 - 1e-5 * (step - 20), "guard/signals": step % 3}) + "\n"
            )
    with serving(tmp_path / "outputs") as (url, _):
        page.goto(f"{url}/?run=x/one")
        for name in ("actor/lr", "guard/signals"):
            figure = page.locator(f'[data-id="{name}"] figure')
            sync_api.expect(figure.locator("path").first).to_be_attached(timeout=WAIT)
            labels = figure.locator('text[text-anchor="end"]').all_text_contents()
            assert len(labels) > 1 and len(set(labels)) == len(labels)
            if name == "guard/signals":
                assert set(labels) <= {"0", "1", "2"}


def test_the_page_comes_back_when_its_server_does(page: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "outputs" / "x" / "one")
    with serving(tmp_path / "outputs", token="t") as (url, site):
        page.goto(f"{url}/?token=t")
        text(page, "#slider-step", "step 20")
        assert "token" not in page.url
        threading.Timer(0.1, site.closing.set).start()  # all streams end, as in a restart
        sync_api.expect(page.locator("#state")).to_have_class(re.compile("lost"), timeout=WAIT)
        site.closing.clear()
        add_live(run, 21)
        shows(page, 21)


def test_the_report_is_the_page_frozen_into_a_file(page: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "outputs" / "x" / "one")
    page.goto(write_report(run).as_uri())
    text(page, "#slider-step", "step 20")
    assert page.locator("#page").is_visible() and not page.locator(".still").is_visible()
    page.locator("#slider").focus()
    page.keyboard.press("Home")
    text(page, "#slider-step", "step 0")
    assert page.locator("#groups .tile").count() == 4 and page.locator("#reward-chart path").count() >= 2
    assert (
        page.get_by_role("heading", name="Before and after").is_visible() and not page.locator("#buttons").is_visible()
    )


def test_before_anything_is_measured_the_page_says_what_happens(page: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "outputs" / "x" / "one")
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / "validation")
    (run / "log.txt").write_text("2026-05-01T10:00:00.000Z INFO gerl.trainer.run: <b>loading</b> the model\n")
    lock = RunLock(run)
    lock.acquire()
    try:
        with serving(tmp_path / "outputs") as (url, _):
            page.goto(url)
            sync_api.expect(page.locator(".doing")).to_contain_text("<b>loading</b> the model")
            assert "gerl.trainer" not in page.inner_text(".doing")
            with (run / "log.txt").open("a") as log:
                log.write("2026-05-01T10:00:01.000Z INFO gerl.trainer.run: measuring the base model\n")
            sync_api.expect(page.locator(".doing")).to_contain_text("measuring the base model")
            add_rows(run, 0, 3)
            sync_api.expect(page.locator(".doing")).to_have_count(0)
    finally:
        lock.release()

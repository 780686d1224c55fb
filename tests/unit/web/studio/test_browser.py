"""The studio in a browser: answers beside their fields, phones, names of controls; skipped where there is no browser.

It needs the package playwright and a Chromium that is installed (GERL_BROWSER names it, else one on the PATH).
"""

import base64
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from watching import make_run

from gerl.utils.pages import encode
from gerl.utils.serving import listen
from gerl.web.server import address, serving
from gerl.web.studio.app import build_studio

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
BROWSER = os.environ.get("GERL_BROWSER") or next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
PAGES = ("", "new", "new?from=flux1_dev_pickscore", "job?job=1", "compare", "watch/?run=signs/one")
UNNAMED = """() => [...document.querySelectorAll("button, input, select, textarea, a")]
  .filter((e) => e.offsetParent && !(e.labels?.length || e.ariaLabel || e.textContent.trim() || e.title))
  .map((e) => e.outerHTML)"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("work") / "outputs"
    make_run(root / "signs" / "one")
    app, studio = build_studio(root, None, True)
    studio.jobs.program, studio.jobs.devices = ("sh", "-c", "echo http://localhost:1/; sleep 900", "sh"), ["cpu"]
    studio.jobs.add(
        "train", ["reward.scorers={a: {path: /a/very/long/path/without/any/space/in/it.py}}"], "<b>bold</b>"
    )
    with listen("127.0.0.1", 0) as listener, serving(app, listener, 2.0):
        yield address(listener)
        studio.closing.set()
    for job in studio.jobs.all:
        studio.jobs.stop(job)
    studio.store.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(params=["light", "dark"])
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page that has raised nothing and asked no other server."""
    size = {"width": 1280, "height": 900} if request.param == "light" else {"width": 390, "height": 844}
    context = browser.new_context(viewport=size, color_scheme=request.param)
    page = context.new_page()
    page.set_default_timeout(20_000)
    errors, asked_for = list[str](), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda asked: asked_for.append(asked.url))
    yield page
    context.close()
    assert errors == [] and all(found.startswith(("http://127.0.0.1:", "data:")) for found in asked_for)


def test_a_wrong_value_is_answered_beside_its_field(page: Any, url: str) -> None:
    page.goto(f"{url}/new?from=signs")
    page.wait_for_selector(".status.good")
    name = f"from-{page.viewport_size['width']}"
    page.fill("#field-name", name)
    page.fill('[id="field-trainer.steps"]', "many")
    page.fill('[id="field-sampling.width"]', "33")
    page.fill('[id="field-prompts.txt"]', "a cat")
    page.wait_for_selector("[id='wrong-prompts.txt']:not(:empty)")
    assert page.inner_text('[id="wrong-prompts.txt"]').startswith("line 1: 'a cat'")
    assert "multiples of 8" in page.inner_text('[id="wrong-sampling.width"]')  # all at once
    names = page.locator(".status.bad button").all_inner_texts()
    assert names == ["How long", "Width", "Prompts to learn from"]
    page.click(".status.bad button >> nth=1")
    assert page.evaluate("document.activeElement.id") == "field-sampling.width"
    page.fill('[id="field-sampling.width"]', "")
    page.fill('[id="field-prompts.txt"]', "")
    page.wait_for_function("() => document.querySelectorAll('.status.bad button').length === 1")
    assert "integer" in page.inner_text('[id="wrong-trainer.steps"]')
    assert page.get_attribute('[id="field-trainer.steps"]', "aria-invalid") == "true"
    page.fill('[id="field-trainer.steps"]', "3")
    page.click("text=Your own function")
    page.fill('textarea[aria-label="function of mine"]', "def compute_score(images):\n    return [\n")
    page.wait_for_selector(".lines b")
    assert page.inner_text(".lines b").strip() == "2" and page.locator(".status.bad").count() == 1
    page.fill('textarea[aria-label="function of mine"]', "def compute_score(images):\n    return [1.0] * len(images)\n")
    page.wait_for_selector(".status.good")
    assert "trainer.steps=3" in page.inner_text(".side-panel pre")
    assert page.locator(".changes tr").count() == 4  # the steps, and two scorers
    page.reload()
    page.wait_for_selector(".status.good")
    assert page.input_value('[id="field-trainer.steps"]') == "3" and name in page.url


def test_start_is_in_view_wherever_the_page_is(page: Any, url: str) -> None:
    page.goto(f"{url}/new?from=signs")
    page.wait_for_selector(".status.good")
    for y in (0, 700, 100_000):
        page.evaluate("(y) => scrollTo(0, y)", y)
        page.wait_for_timeout(100)
        for name in ("button.first:text('Start')", ".status"):
            box = page.locator(f".start-bar {name}").bounding_box()
            assert box["y"] >= 0 and box["y"] + box["height"] <= page.viewport_size["height"]
    page.fill("#field-name", "")
    page.wait_for_selector(".status.todo")  # a name is to be filled in
    assert page.is_disabled(".start-bar button.first")


COVERED = """() => {
  const it = document.activeElement, box = it.getBoundingClientRect();
  const [head, bar] = [".head", ".start-bar"].map((name) => document.querySelector(name));
  const isBelow = box.top < head.getBoundingClientRect().bottom - 1;
  const isBehind = Math.min(box.bottom, box.top + 20) > bar.getBoundingClientRect().top + 1;
  const isCovered = !bar.contains(it) && !head.contains(it) && (isBelow || isBehind);
  return `${it.id || it.textContent.trim()}${isCovered ? " is covered" : ""}`;
}"""


def test_a_run_is_started_by_keyboard_alone_and_what_has_the_focus_is_in_view(page: Any, url: str) -> None:
    page.goto(f"{url}/new?from=signs")
    page.wait_for_selector(".status.good")
    page.focus("#main")
    passed = []
    while "Start" not in passed and len(passed) < 80:
        page.keyboard.press("Tab")
        passed.append(page.evaluate(COVERED))
        if passed[-1] == "field-name":
            page.keyboard.press("Control+A")
            page.keyboard.type(f"keyboard {page.viewport_size['width']}")
            page.wait_for_url("**/new?draft=keyboard*")
            page.wait_for_selector(".status.good")
    fields = [each.removeprefix("field-") for each in passed if each.startswith("field-")]
    assert fields == [
        "name", "experiment", "model.path", "card", "prompts.txt", "held_out.txt", "sampling.width",
        "sampling.height", "trainer.steps", "algorithm",
    ]  # fmt: skip
    assert not [each for each in passed if "covered" in each]
    page.keyboard.press("Enter")
    page.wait_for_url(f"{url}/")
    page.wait_for_selector(f"section[aria-label=Queue] a:has-text('keyboard {page.viewport_size['width']}')")


def test_a_card_fills_in_the_keys_that_fit_the_recipe(page: Any, url: str) -> None:
    page.goto(f"{url}/new?from=flux1_dev_pickscore")
    page.wait_for_selector("#field-card")
    page.fill("#field-name", f"card-{page.viewport_size['width']}")
    page.click("summary:text-is('Advanced')")
    page.fill('[id="field-actor.lr"]', "0.1")
    page.select_option("#field-card", "24gb")
    page.wait_for_selector(".side-panel pre:has-text('model.offload=blocks')")
    assert (
        page.input_value('[id="field-model.offload"]') == "blocks" and page.input_value('[id="field-rollout.n"]') == "8"
    )
    page.wait_for_url("**/new?draft=card-*")
    page.reload()
    page.wait_for_function("() => document.querySelector('#field-card')?.value === '24gb'")
    page.select_option("#field-card", "8x80gb")
    page.wait_for_function("() => !document.querySelector('.side-panel pre')?.textContent.includes('model.offload')")
    assert page.input_value('[id="field-rollout.n"]') == "" and page.input_value('[id="field-actor.lr"]') == "0.1"
    page.select_option("#field-experiment", "flux2_dev_pickscore")
    page.select_option("#field-card", "12gb")
    assert "does not fit" in page.inner_text("#help-card")


def test_an_estimate_prices_only_what_fits_and_its_keys_can_be_used(page: Any, url: str) -> None:
    """The answers of `gerl preflight` are written by hand: the job of this studio only sleeps."""
    page.goto(f"{url}/new?from=signs")
    page.wait_for_selector(".status.good")
    page.fill("#field-name", f"estimate-{page.viewport_size['width']}")
    page.select_option("#field-card", "24gb")
    page.wait_for_function("() => document.querySelector('.side-panel pre')?.textContent.includes('estimate')")
    report = {
        "fits": False,
        "can_fit": True,
        "keys": ["model.offload=blocks"],
        "seconds": 3.0,
        "memory": {"phases": {"rollout": 4e10}},
    }
    page.route("**/api/command", lambda route: route.fulfill(json={"job": 1}))
    page.route(
        "**/api/log?*", lambda route: route.fulfill(json={"state": "finished", "log": "", "files": ["preflight.json"]})
    )
    page.route("**/preflight.json", lambda route: route.fulfill(json=report))
    page.click("text=Estimate time and memory")
    page.wait_for_selector("text=Use these keys")
    said = page.inner_text(".rest")
    assert (
        "40 GB" in said
        and "per step" not in said
        and page.locator("[aria-label='price per card and hour']").count() == 0
    )
    report |= {"fits": True, "memory": {"phases": {"rollout": 1.4e10}}}
    page.click("text=Use these keys")
    page.wait_for_selector("[aria-label='price per card and hour']")
    assert "model.offload=blocks" in page.inner_text(".side-panel pre")
    assert "72 s per step" in page.inner_text(".rest")  # 24 images
    page.fill("[aria-label='price per card and hour']", "10")
    assert page.inner_text(".rest output") == "15"  # 76 steps


def test_an_empty_folder_explains_itself_and_offers_the_demo(page: Any, tmp_path: Path) -> None:
    app, studio = build_studio(tmp_path / "outputs", None, True)
    with listen("127.0.0.1", 0) as listener, serving(app, listener, 2.0):
        page.goto(address(listener))
        page.click("text=Try the demo")
        page.wait_for_selector(".status.good")
        assert "experiment=signs" in page.inner_text(".side-panel pre")
        studio.closing.set()
    studio.store.close()


def test_a_run_is_listed_with_its_last_picture_and_its_page_has_the_links(page: Any, url: str) -> None:
    page.goto(url)
    page.wait_for_selector(".run .thumb img")
    assert page.evaluate("document.querySelector('.run .thumb img').naturalWidth") == 32
    assert page.get_attribute(".run progress", "max") == "40"
    page.click(".run a:text-is('signs/one')")
    page.wait_for_selector("#slider-step")
    assert page.locator("nav a").all_inner_texts() == ["Runs", "New run", "Compare"]
    page.click("nav a:text('Compare')")
    page.wait_for_url("**/compare")


def test_the_images_of_a_comparison_are_pairs_that_enlarge(page: Any, url: str) -> None:
    """The service that draws is not started: its answers are given."""
    pictures = [
        base64.b64encode(encode(Image.new("RGB", (8, 8), colour), False)[0]).decode() for colour in ("red", "blue")
    ]
    answers = iter(pictures)
    page.route(
        "**/api/checkpoints?*",
        lambda route: route.fulfill(
            json={
                "checkpoints": [{"step": 5, "folder": "f", "best": True}],
                "formats": ["diffusers", "kohya"],
                "first": [],
                "none": "",
            }
        ),
    )
    page.route(
        "**/api/sample",
        lambda route: route.fulfill(
            json={"images": [next(answers)] * 2, "prompts": ["<b>a</b>", "b"], "folder": "", "note": ""}
        ),
    )
    page.goto(f"{url}/compare")
    page.wait_for_selector("fieldset input")
    assert page.locator("#format option").first.inner_text().startswith("for ComfyUI")
    page.fill("#own-prompts", "<b>a</b>\nb")
    page.click("text=Draw")
    page.wait_for_selector(".pair >> nth=1")
    assert page.locator(".pair").first.inner_text().split() == "base model step 5, strength 1 <b>a</b>".split()
    page.click(".pair button >> nth=0")
    page.wait_for_selector("dialog[open]")
    assert page.inner_text("dialog figcaption") == "<b>a</b>: base model"
    page.keyboard.press("ArrowRight")
    assert page.inner_text("dialog figcaption") == "<b>a</b>: step 5, strength 1"
    assert page.get_attribute("dialog img", "src").endswith(pictures[1])
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")


def test_a_draft_of_any_name_is_drawn_and_started_by_its_folder(page: Any, url: str) -> None:
    asked_for: list[Any] = []
    page.route("**/api/sample", lambda route: (asked_for.append(route.request.post_data_json), route.abort())[1])
    page.goto(f"{url}/new?from=signs")
    page.wait_for_selector(".status.good")
    name = f"any, {page.viewport_size['width']}"
    page.fill("#field-name", f' {name} "猫"')
    page.wait_for_selector("#help-name:has-text('Its folder is')")
    page.click("text=What the model draws now")
    page.click("text=Draw these prompts")
    page.wait_for_selector("#message:not([hidden])")
    assert [each["draft"] for each in asked_for] == [f"{name.replace(',', '')} 猫"]
    page.wait_for_selector(".status.good")
    page.click(".start-bar .first")
    page.wait_for_selector(f"section[aria-label=Queue] a:has-text('{name.replace(',', '')} 猫')")


def test_a_name_can_be_typed_slowly_and_the_editor_can_be_left_by_key(page: Any, url: str) -> None:
    name = f"slow-{page.viewport_size['width']}"
    page.goto(f"{url}/new?from=signs")
    page.wait_for_selector(".status.good")
    page.fill("#field-name", "")
    page.type("#field-name", name, delay=250)
    page.wait_for_url(f"**/new?draft={name}")
    page.wait_for_selector(".status.good")
    drafts = page.request.get(f"{url}/api/home").json()["drafts"]
    assert [each for each in drafts if name.startswith(each)] == [name]
    page.click("text=Your own function")
    area = page.locator('textarea[aria-label="function of mine"]')
    area.focus()
    page.keyboard.press("Tab")
    assert area.evaluate("area => area === document.activeElement")
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    assert area.evaluate("area => area !== document.activeElement")


def test_a_second_window_does_not_replace_what_the_first_typed(page: Any, url: str) -> None:
    name = f"twice-{page.viewport_size['width']}"
    page.goto(f"{url}/new?from=signs")
    page.wait_for_selector(".status.good")
    page.fill("#field-name", name)
    page.wait_for_url(f"**/new?draft={name}")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector(".status.good")
    page.fill('[id="field-trainer.steps"]', "3")
    page.wait_for_selector(".changes")
    other.fill('[id="field-trainer.steps"]', "4")
    other.wait_for_selector("#message:not([hidden])")
    assert "another window" in other.inner_text("#message") and other.is_disabled("button.first")
    other.reload()
    other.wait_for_selector(".status.good")
    assert other.input_value('[id="field-trainer.steps"]') == "3"


@pytest.mark.parametrize("path", PAGES)
def test_no_page_scrolls_sideways_and_every_control_has_a_name(page: Any, url: str, path: str) -> None:
    page.goto(f"{url}/{path}")
    page.wait_for_selector("main section, .sections section:not([hidden])")
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.evaluate(UNNAMED) == []


def test_what_people_type_is_text(page: Any, url: str, tmp_path: Path) -> None:
    page.goto(url)
    page.wait_for_selector("section[aria-label=Queue] li")
    assert "<b>bold</b>" in page.inner_text("section[aria-label=Queue]")
    assert page.locator("section[aria-label=Queue] b").count() == 0
    page.click("section[aria-label=Queue] li a")
    page.wait_for_selector("pre a")
    assert page.get_attribute("pre a", "href") == "http://localhost:1/"


def test_a_star_and_a_note_are_set_with_the_keyboard(page: Any, url: str) -> None:
    page.goto(url)
    page.wait_for_selector(".star")
    before = page.get_attribute(".star", "aria-pressed")
    page.focus(".star")
    page.keyboard.press("Enter")
    page.wait_for_function("(before) => document.querySelector('.star').ariaPressed !== before", arg=before)
    page.fill("input[placeholder=note]", "good")
    page.keyboard.press("Tab")
    page.wait_for_timeout(500)
    page.reload()
    page.wait_for_selector(".star")
    assert page.input_value("input[placeholder=note]") == "good"
